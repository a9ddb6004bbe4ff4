"""Attention of one layer at the true size, forward and backward: torch's kernel for sequences end to end, and ours.

python benchmarks/attention.py --out docs/benchmarks

Rows are filled with clips and references as the training benchmark draws them. Times are medians on the card;
errors are relative, against float64, of what was attended to and of the gradients of queries, keys and values.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.figures import save_figures
from benchmarks.synthetic import (
    LOG_STD,
    MAX_SECONDS,
    MEDIAN_SECONDS,
    MIN_SECONDS,
    PACKING_WINDOW,
    PROMPT_TOKENS,
    REFERENCE_SECONDS,
    TEXT_TOKENS_PER_SECOND,
    TURN_TOKENS,
)

from myna.data.loader import first_fit_decreasing
from myna.models.attention import packed_causal_attention
from myna.models.higgs_v2.forward import PackedAttention
from myna.models.higgs_v2.render import FRAME_RATE

QUERIES, KEYS, SIZE = 24, 8, 128
"""Heads of queries and of keys, and the size of one, in Higgs Audio v2."""
DELAY = 9
"""Positions that begin, end and delay add to a clip."""
TIMES = 20
COMPARED = 4
"""Sequences worked out in float64, and the last one, whose tiles reach beyond the end."""


def lengths(tokens: int) -> list[int]:
    """A row from the middle of a window, in random order."""
    rng, pool = random.Random(0), []
    for _ in range(PACKING_WINDOW):
        target = min(
            MAX_SECONDS, max(MIN_SECONDS, rng.lognormvariate(torch.tensor(MEDIAN_SECONDS).log().item(), LOG_STD))
        )
        spoken = [rng.uniform(*REFERENCE_SECONDS), target]
        pool.append(
            PROMPT_TOKENS
            + TURN_TOKENS
            + sum(int(s * TEXT_TOKENS_PER_SECOND) + int(s * FRAME_RATE) + DELAY for s in spoken)
        )
    rows = first_fit_decreasing(pool, tokens)
    row = [pool[place] for place in rows[len(rows) // 2]]
    rng.shuffle(row)
    return row


def measure(tokens: int) -> dict[str, Any]:
    row = lengths(tokens)
    cu_seqlens = torch.tensor([0, *row], device="cuda").cumsum(0).int()
    torch.manual_seed(0)
    qkv = torch.randn(sum(row), QUERIES + 2 * KEYS, SIZE, device="cuda", dtype=torch.bfloat16)
    q, k, v = (part.detach().requires_grad_() for part in qkv.split([QUERIES, KEYS, KEYS], dim=1))
    d_out = torch.randn(sum(row), QUERIES, SIZE, device="cuda", dtype=torch.bfloat16)
    from myna.models.higgs_v2.fused.attention_kernels import AttentionTileTables

    max_seqlen = -(-max(row) // 1024) * 1024
    tiles = AttentionTileTables.from_cu_seqlens(cu_seqlens, sum(row))
    attention = PackedAttention(*[cu_seqlens] * 5, (), max_seqlen, tiles)
    exact = _exact(q, k, v, d_out, cu_seqlens.tolist())
    useful = sum(n * (n + 1) / 2 for n in row) * 4 * SIZE * QUERIES
    results = [
        {"name": name, **_timed(attend, (q, k, v), d_out, exact, useful)}
        for name, attend in (("torch", attention.attend), ("ours", attention.attend_tiled))
    ]
    return {
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "tokens": sum(row),
        "sequences": len(row),
        "rows": results,
    }


def _timed(
    attend: Callable[..., torch.Tensor],
    inputs: tuple[torch.Tensor, ...],
    d_out: torch.Tensor,
    exact: Sequence[tuple[slice, list[torch.Tensor]]],
    useful: float,
) -> dict[str, Any]:
    out = attend(*inputs)

    def back() -> list[torch.Tensor]:
        # What follows wants them in memory of their own, and copies them where they are not.
        return [x.contiguous() for x in torch.autograd.grad(out, inputs, d_out, retain_graph=True)]

    got = [out.detach(), *back()]
    errors = [
        max(float((mine[part].double() - true[at]).norm() / true[at].norm()) for part, true in exact)
        for at, mine in enumerate(got)
    ]
    with torch.no_grad():
        forward = _median(lambda: attend(*inputs))
    backward = _median(back)
    return {
        "forward_ms": forward,
        "backward_ms": backward,
        "forward_tflops": useful / forward / 1e9,
        "backward_tflops": 2.5 * useful / backward / 1e9,
        "errors": errors,
    }


def _exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d_out: torch.Tensor, ends: list[int]
) -> list[tuple[slice, list[torch.Tensor]]]:
    results = []
    for number in (*range(COMPARED), len(ends) - 2):
        part = slice(ends[number], ends[number + 1])
        own = [x[part].detach().double().requires_grad_() for x in (q, k, v)]
        out = packed_causal_attention(*own, (len(own[0]),))
        results.append((part, [out.detach(), *torch.autograd.grad(out, own, d_out[part].double())]))
    return results


def _median(work: Callable[[], Any]) -> float:
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    pairs = []
    for _ in range(TIMES):
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pair[0].record()
        work()
        pair[1].record()
        pairs.append(pair)
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for attention.json")
    parser.add_argument("--tokens", type=int, default=32_768, help="of a row")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "this benchmark needs a CUDA card\n")
    results = measure(given.tokens)
    given.out.mkdir(parents=True, exist_ok=True)
    save_figures(given.out / "attention.json", results)
    for row in results["rows"]:
        print(
            f"{row['name']:6} forward {row['forward_ms']:.3f} ms, backward {row['backward_ms']:.3f} ms", row["errors"]
        )


if __name__ == "__main__":
    main()
