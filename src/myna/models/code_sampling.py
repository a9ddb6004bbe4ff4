"""Sampling of codes under the delay pattern, with random numbers that depend on seed, frame and codebook alone.

Codebook k is k frames after codebook 0, which alone decides when to stop: after its end of stream at frame f, codebook
k ends at frame f + k. Noise is a hash of (seed, frame, codebook, draw, class), so a request's codes do not depend on
other requests in its batch. `sample_kernel` in higgs_v2/decode/sampling_kernels.py does the same on a GPU.
"""

from dataclasses import dataclass, fields
from typing import Self

import torch

from myna.models.base import Sampling

SAMPLING_REVISION = "counter-1"
"""Name that changes whenever model, prompt and settings would give other codes than before."""
MAX_REPETITION_WINDOW = 16
"""Frames of history that are kept for repetition-aware sampling."""
MIN_TEMPERATURE = 1e-30
"""Temperature below which a draw is greedy: it would be in effect, and quotients of logits could overflow."""
_LOW = 0xFFFFFFFF
_TINY = 2.0**-24


@dataclass(eq=False)
class RowState:
    """State of every row of a decoding batch: tensors with one entry per row, of fixed size."""

    codes: torch.Tensor
    """(rows, codebooks): the last frame, which the next step reads."""
    positions: torch.Tensor
    """Position of the last frame in the cache."""
    frames: torch.Tensor
    """Number of the frame that the next step samples. Frame 0 is all begin-of-stream."""
    ends: torch.Tensor
    """Frame at which codebook 0 ended, or -1."""
    active: torch.Tensor
    """1 while the row generates. The state of a finished row does not change."""
    caps: torch.Tensor
    """Last frame at which codebook 0 must end."""
    seeds: torch.Tensor
    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    windows: torch.Tensor
    limits: torch.Tensor
    history: torch.Tensor
    """(rows, MAX_REPETITION_WINDOW, codebooks): the last frames, frame f at index f % MAX_REPETITION_WINDOW."""
    log_probs: torch.Tensor
    """(rows, codebooks): log-probabilities of the last frame's codes under the model's own distribution."""
    adapters: torch.Tensor
    """Slot of the row's adapter, or -1."""
    strengths: torch.Tensor
    """Factor of the adapter's effect."""

    @classmethod
    def create(cls, rows: int, codebooks: int, device: torch.device) -> Self:
        sizes = {"codes": (codebooks,), "history": (MAX_REPETITION_WINDOW, codebooks), "log_probs": (codebooks,)}
        real, first = ("temperatures", "top_ps", "log_probs", "strengths"), {"adapters": -1, "ends": -1, "frames": 1}
        tensors = {}
        for name in (field.name for field in fields(cls)):
            dtype = torch.float32 if name in real else torch.int64
            tensors[name] = torch.full((rows, *sizes.get(name, ())), first.get(name, 0), dtype=dtype, device=device)
        return cls(**tensors)

    def set_row(self, row: int, *, position: int, sampling: Sampling, max_frames: int, begin: int) -> None:
        """Begin a request. The frame before its first one is all begin-of-stream."""
        values = {
            "codes": begin,
            "positions": position,
            "frames": 1,
            "ends": -1,
            "active": 1,
            "caps": max_frames + 1,
            "seeds": sampling.seed,
            "temperatures": sampling.temperature if sampling.temperature >= MIN_TEMPERATURE else 0.0,
            "top_ks": sampling.top_k,
            "top_ps": sampling.top_p,
            "windows": sampling.repetition_window,
            "limits": sampling.repetition_limit,
            "history": begin,
        }
        for name, value in values.items():
            getattr(self, name)[row].fill_(value)  # an assignment would wait for the device

    def part(self, first: int, rows: int) -> "RowState":
        """Return some rows, as views."""
        return RowState(**{field.name: getattr(self, field.name)[first : first + rows] for field in fields(self)})

    def copy_row(self, source: int, target: int) -> None:
        for field in fields(self):
            tensor = getattr(self, field.name)
            tensor[target] = tensor[source]


def sample_frame(logits: torch.Tensor, state: RowState, rows: int, begin: int, end: int) -> torch.Tensor:
    """Sample the next frame, (rows, codebooks, classes) -> (rows, codebooks). Leaves the state unchanged."""
    frames, ends, temperature = state.frames[:rows], state.ends[:rows], state.temperatures[:rows]
    books = torch.arange(logits.shape[1], device=logits.device)
    allowed = logits.clone()
    allowed[..., begin] = -torch.inf
    allowed[:, 1:, end] = -torch.inf
    codes = _draw(allowed, state, rows, books) if temperature.any() else allowed.argmax(-1)
    codes[:, 0].masked_fill_((ends < 0) & (frames >= state.caps[:rows]), end)
    codes.masked_fill_((ends[:, None] >= 0) & (books <= (frames - ends)[:, None]), end)
    return codes.masked_fill_(books >= frames[:, None], begin)


def _draw(allowed: torch.Tensor, state: RowState, rows: int, books: torch.Tensor) -> torch.Tensor:
    temperature = state.temperatures[:rows, None, None]
    greedy = temperature == 0
    scaled = allowed / temperature.masked_fill(greedy, 1.0)
    top_k, classes = state.top_ks[:rows], allowed.shape[-1]
    top_k = top_k.masked_fill(top_k == 0, classes).clamp(max=classes)
    values, ids = scaled.topk(int(top_k.max()), dim=-1)
    mass = (values - values[..., :1]).exp()
    # With ranks instead of a threshold, a tie at place k is cut rather than kept.
    beyond = torch.arange(values.shape[-1], device=values.device) >= top_k[:, None, None]
    mass = mass.masked_fill(beyond, 0.0)
    above = mass.cumsum(-1) - mass
    top_p = state.top_ps[:rows, None, None]
    values = values.masked_fill(beyond | ((above > top_p * mass.sum(-1, keepdim=True)) & (top_p < 1)), -torch.inf)

    keys = mix(_frame_keys(state, rows)[:, None] ^ (2 * books))
    noise = gumbel_noise(keys[..., None], ids)
    codes = ids.gather(-1, (values + noise.masked_fill(greedy, 0.0)).argmax(-1, keepdim=True))[..., 0]

    window, limit = state.windows[:rows, None], state.limits[:rows, None]
    repeated = _repeats(codes, state, rows, window) >= limit
    repeated &= (window > 0) & ~greedy[..., 0]
    if repeated.any():
        every = torch.arange(classes, device=allowed.device)
        keys = mix(_frame_keys(state, rows)[:, None] ^ (2 * books + 1))
        noise = gumbel_noise(keys[..., None], every)
        codes = torch.where(repeated, (allowed + noise).argmax(-1), codes)
    return codes


def _frame_keys(state: RowState, rows: int) -> torch.Tensor:
    """(rows,): hash of seed and frame."""
    seeds = state.seeds[:rows]
    return mix(mix(mix(seeds ^ 0x9E3779B9) ^ (seeds >> 32)) ^ state.frames[:rows])


def _repeats(codes: torch.Tensor, state: RowState, rows: int, window: torch.Tensor) -> torch.Tensor:
    """Count each code in the window of its codebook. Begin and end count for nothing: they are never drawn twice."""
    history, frames = state.history[:rows], state.frames[:rows, None]
    age = (frames - 1 - torch.arange(MAX_REPETITION_WINDOW, device=codes.device)) % MAX_REPETITION_WINDOW
    recent = (age < window) & (age < frames)
    return ((history == codes[:, None]) & recent[..., None]).sum(1)


def log_probabilities(logits: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities of codes under the model's own distribution, without temperature, filters or bans."""
    return logits.log_softmax(-1).gather(-1, codes[..., None])[..., 0]


def advance(state: RowState, rows: int, codes: torch.Tensor, end: int) -> None:
    """Update the state of the active rows after a frame."""
    running = state.active[:rows] == 1
    frames, ends = state.frames[:rows], state.ends[:rows]
    state.codes[:rows] = codes
    state.history[torch.arange(rows, device=codes.device), frames % MAX_REPETITION_WINDOW] = codes
    ends.copy_(torch.where(running & (ends < 0) & (codes[:, 0] == end), frames, ends))
    finished = (ends >= 0) & (frames >= ends + codes.shape[1] - 1)
    state.positions[:rows] += running
    frames += running
    state.active[:rows] = running & ~finished


def mix(x: torch.Tensor) -> torch.Tensor:
    """Avalanche hash of 32 bits, in the low half of int64."""
    x = x & _LOW
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _LOW
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _LOW
    return x ^ (x >> 16)


def gumbel_noise(key: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    uniform = ((mix(key ^ classes) >> 8).float() + 0.5) * _TINY
    return -torch.log(-torch.log(uniform))
