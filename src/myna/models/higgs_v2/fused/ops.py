"""What a layer does between its matrix products: every function here is one pass over memory.

Written in plain torch, for any device and for reading. On a CUDA card with Triton the same functions are the kernels of
`kernels.py`, since there these passes, not the arithmetic, are what a step loses its time to.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from myna.models.quantized import E4M3
from myna.models.triton_support import fused

LARGEST = 448.0
"""The largest number of fp8 (e4m3)."""
FP8_PARTS = 3
"""Columns of fp8 for one column of an adapter. One would leave what adapters add three bits behind the leading one, and
plain layers do not round that to fp8 at all. So a number is the fp8 near it and, as another fp8, the rest. Of the
products of two such sums only that of the two rests is too small to count: rows hold (near, rest, near) where weights
hold (near, near, rest)."""
SMALLEST = 1e-12
"""What rows of zeros are taken to reach."""


class Norms(NamedTuple):
    """The two RMS norms at one place of a layer, one per modality."""

    text: torch.Tensor
    audio: torch.Tensor
    eps: float

    def per_row(self, texts: int, rows: int) -> torch.Tensor:
        """(rows, width): the weight that each row meets."""
        return torch.cat([self.text.expand(texts, -1), self.audio.expand(rows - texts, -1)]).float()


class PackedInput(NamedTuple):
    """Rows that go into a matrix product: the numbers, their projection by the adapters, and both as fp8 if wanted.

    A pass writes `x`, and with it `codes` and `scale`; the projection comes later, see `fold.py`.
    """

    x: torch.Tensor
    """(rows, width)"""
    low: torch.Tensor
    """(rows, fold)"""
    whole: torch.Tensor | None = None
    """(rows, width + fold): both, where they lie side by side."""
    codes: torch.Tensor | None = None
    """(rows, width + FP8_PARTS * fold): both as fp8, the projection in parts."""
    scale: torch.Tensor | None = None
    """(rows, 1): what to multiply the codes with."""

    def part(self, rows: slice) -> PackedInput:
        rest = (None if part is None else part[rows] for part in self[2:])
        return PackedInput(self.x[rows], self.low[rows], *rest)


@cache
def _kernels() -> Any:
    return __import__("myna.models.higgs_v2.fused.kernels", fromlist=["kernels"])


def add_norm(
    stream: torch.Tensor,
    update: torch.Tensor | None,
    order: torch.Tensor | None,
    norms: Norms,
    texts: int,
    out: PackedInput,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add row `order[i]` of the update to row i of the stream, and write what the norm makes of that into `out`.

    Returns the new stream, and for each row the factor that the norm multiplied it with.
    """
    if fused(stream):
        return _kernels().add_norm(stream, update, order, *norms, texts, out)  # type: ignore[no-any-return]
    if update is not None:
        stream = stream + (update if order is None else update[order])
    wide = stream.float()
    factor = torch.rsqrt(wide.square().mean(1) + norms.eps)
    out.x.copy_(wide * factor[:, None] * norms.per_row(texts, len(stream)))
    _encode(out)
    return stream, factor


def norm_back(
    d_normed: torch.Tensor,
    stream: torch.Tensor,
    factor: torch.Tensor,
    norms: Norms,
    texts: int,
    d_stream: torch.Tensor,
    order: torch.Tensor | None = None,
    ordered: PackedInput | None = None,
) -> torch.Tensor:
    """The gradient of what `add_norm` returned and wrote. Row i of it also goes to row `order[i]` of `ordered`."""
    if fused(stream):
        arguments = (d_normed, stream, factor, d_stream.contiguous(), *norms[:2], texts, order, ordered)
        return _kernels().norm_back(*arguments)  # type: ignore[no-any-return]
    slope = d_normed.float() * norms.per_row(texts, len(stream))
    normal = stream.float() * factor[:, None]
    d = factor[:, None] * (slope - normal * (slope * normal).mean(1, keepdim=True))
    d = (d + d_stream).to(stream.dtype)
    if order is not None and ordered is not None:
        ordered.x[order] = d
        _encode(ordered)
    return d


def rotate(
    qkv: torch.Tensor, order: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, size: int, turned: int
) -> torch.Tensor:
    """Row i is row `order[i]` of `qkv`, its first `turned` heads of `size` at the angle of position i."""
    if fused(qkv):
        return _kernels().rotate(qkv, order, cos, sin, size, turned)  # type: ignore[no-any-return]
    heads = qkv[order].view(len(order), qkv.shape[1] // size, size)
    rotated, rest = heads[:, :turned], heads[:, turned:]
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([rotated, rest], dim=1).flatten(1)


def rotate_back(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    order: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    out: PackedInput,
) -> None:
    """The gradient of `rotate`, written to the rows `order` of `out`."""
    if fused(dq):
        _kernels().rotate_back(dq, dk, dv, order, cos, sin, out)
        return
    rotated = torch.cat([dq, dk], dim=1)
    first, second = (rotated * sin).chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat([second, -first], dim=-1)
    out.x[order] = torch.cat([rotated, dv], dim=1).flatten(1)
    _encode(out)


def gate(both: torch.Tensor, out: PackedInput) -> None:
    """silu of the first half of each row, times the second half."""
    if fused(both):
        _kernels().gate(both, out)
        return
    opening, up = both.float().chunk(2, dim=1)
    out.x.copy_(torch.nn.functional.silu(opening) * up)
    _encode(out)


def gate_back(d: torch.Tensor, both: torch.Tensor, out: PackedInput) -> None:
    if fused(both):
        _kernels().gate_back(d, both, out)
        return
    opening, up = both.float().chunk(2, dim=1)
    opened, slope = torch.sigmoid(opening), d.float()
    out.x.copy_(torch.cat([slope * up * opened * (1 + opening * (1 - opened)), slope * opening * opened], dim=1))
    _encode(out)


def copy(x: torch.Tensor, out: PackedInput) -> None:
    """Numbers that came from elsewhere. `out.x` may be the same tensor, if there is room beside it or need for none."""
    if fused(x):
        _kernels().copy(x, out)
        return
    out.x.copy_(x)
    _encode(out)


def _encode(out: PackedInput) -> None:
    if out.codes is not None and out.scale is not None:
        numbers = out.x.float()
        out.scale.copy_(numbers.abs().amax(1, keepdim=True).clamp(min=SMALLEST) / LARGEST)
        out.codes[:, : numbers.shape[1]] = (numbers / out.scale).to(out.codes.dtype)


def fold_in(wide: PackedInput) -> None:
    """Put the projection behind the codes. Where it is larger than they reach, the row is coded anew to hold both."""
    assert wide.codes is not None and wide.scale is not None
    if not wide.low.shape[1]:
        return
    if fused(wide.x):
        _kernels().fold_in(wide)
        return
    wide.scale.copy_(torch.maximum(wide.scale, wide.low.float().abs().amax(1, keepdim=True) / LARGEST))
    near, rest = _near_and_rest(wide.low.float() / wide.scale)
    wide.codes.copy_(torch.cat([wide.x.float() / wide.scale, near, rest, near], dim=1))


def _near_and_rest(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two numbers that fp8 holds, in the type they came in, whose sum is all but the number."""
    near = _rounded(numbers)
    return near, _rounded(numbers - near)


def _rounded(numbers: torch.Tensor) -> torch.Tensor:
    """To fp8. What it does not reach is cut off, as the card does; not every version of torch would."""
    return numbers.clamp(-LARGEST, LARGEST).to(E4M3).to(numbers.dtype)


class Copy(NamedTuple):
    """A parameter, and where a copy of it in another type is kept up to date: times `factor`, over `scale`."""

    source: torch.Tensor
    target: torch.Tensor
    """Of the parameter's shape. With a scale it is (FP8_PARTS, *shape), as fp8."""
    factor: float = 1.0
    scale: torch.Tensor | None = None
    along: int = 0
    """Which dimension `scale` runs along."""


class Copies:
    """Many small copies at once. Copied one by one, the card would wait longer for each than it takes."""

    def __init__(self, copies: list[Copy]) -> None:
        self.copies = copies
        self._known: tuple[int, ...] = ()
        self._tables: list[tuple[Any, ...]] = []

    @torch.no_grad()
    def refresh(self) -> None:
        if not self.copies:
            return
        if not fused(self.copies[0].target):
            for source, target, factor, scale, along in self.copies:
                value = source.float() * factor
                if scale is not None:
                    near, rest = _near_and_rest(value / scale.view((-1, 1) if along == 0 else (1, -1)))
                    value = torch.stack([near, near, rest])
                target.copy_(value)
            return
        # A parameter's memory is its own and may be exchanged for other memory, if seldom.
        known = tuple(copy.source.data_ptr() for copy in self.copies)
        if known != self._known:
            self._known, self._tables = known, self._tabulate()
        for table in self._tables:
            _kernels().copy_all(*table)

    def _tabulate(self) -> list[tuple[Any, ...]]:
        kinds: dict[tuple[torch.dtype, torch.dtype, bool], list[Copy]] = {}
        for copy in self.copies:
            kind = (copy.source.dtype, copy.target.dtype, copy.scale is not None)
            kinds.setdefault(kind, []).append(copy)
        tables = []
        for (source, target, scaled), copies in kinds.items():
            lines = [
                [
                    copy.source.data_ptr(),
                    copy.target.data_ptr(),
                    *copy.source.shape,
                    *copy.target.stride()[-2:],
                    copy.target.stride(0),
                    0 if copy.scale is None else copy.scale.data_ptr(),
                    copy.along,
                ]
                for copy in copies
            ]
            assert all(copy.source.is_contiguous() for copy in copies)
            device, largest = copies[0].target.device, max(copy.source.numel() for copy in copies)
            factors = torch.tensor([copy.factor for copy in copies], dtype=torch.float32, device=device)
            table = torch.tensor(lines, dtype=torch.int64, device=device)
            tables.append((table, factors, largest, source, target, scaled))
        return tables
