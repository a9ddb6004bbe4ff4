"""Frames out of a prompt: prefill once, then a frame a step, with the delay pattern kept in one place.

It runs the same layers as training. Codebook k speaks k frames after codebook 0, which alone decides when to stop:
after its end-of-stream at frame f, codebook k ends at frame f + k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from myna.models.attention import Cache, attend_within
from myna.models.base import GeneratedCodes, Sampling
from myna.models.higgs_v2.batch import HiggsBatch
from myna.models.higgs_v2.forward import embed, run_layer
from myna.models.higgs_v2.packing import rotary_tables, rotate
from myna.models.higgs_v2.render import FRAME_RATE, DelayPattern


@torch.inference_mode()
def generate(
    core: Any,
    batch: HiggsBatch,
    delay: DelayPattern,
    sampling: Sampling,
    seeds: Sequence[int],
    on_frame: Callable[[int], None] | None = None,
) -> list[GeneratedCodes]:
    """Speak every prompt of the batch, each with its own random stream, so that company changes nothing."""
    config, device = core.config, batch.text_ids.device
    cache = Cache(len(core.model.layers), batch.lengths)
    sampler = _Sampler(delay, sampling, seeds)

    hidden = _prefill(core, batch, cache)
    while True:
        logits = core.audio_lm_head(core.model.norm(hidden)).unflatten(-1, (config.num_codebooks, config.codebook_size))
        frame = sampler.next_frame(logits.float().cpu())
        if on_frame is not None:
            on_frame(sampler.length)
        if sampler.all_done:
            return sampler.result()
        hidden = _step(core, frame.to(device), cache)


def _prefill(core: Any, batch: HiggsBatch, cache: Cache) -> torch.Tensor:
    """Read all prompts at once; the hidden state at each one's last position."""
    stream = embed(core, batch.text_ids, batch.codes)
    cos, sin = rotary_tables(core, batch.position_ids, stream)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x[batch.to_sequence] for x in (q, k, v))
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        cache.start(layer, k, v)
        return attend_within(q, k, v, batch.lengths)[batch.to_stream]

    for layer in core.model.layers:
        stream = run_layer(layer, stream, len(batch.text_ids), attend)
    return stream[batch.to_sequence[batch.bounds[1:].long() - 1]]


def _step(core: Any, frame: torch.Tensor, cache: Cache) -> torch.Tensor:
    """One more frame (prompts, codebooks) for every prompt; a stream of audio positions alone."""
    nothing = frame.new_empty(0)
    stream = embed(core, nothing, frame)
    cos, sin = rotary_tables(core, cache.filled.to(frame.device), stream)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        keys, values, seen = cache.extend(layer, k, v)
        return cache.attend(q, keys, values, seen)

    for layer in core.model.layers:
        stream = run_layer(layer, stream, 0, attend)
    cache.filled += 1
    return stream


class _Sampler:
    """Chooses frames under the delay pattern and keeps what was chosen."""

    def __init__(self, delay: DelayPattern, sampling: Sampling, seeds: Sequence[int]) -> None:
        self.delay, self.sampling = delay, sampling
        self.frames: list[torch.Tensor] = []
        self.ended_at: list[int | None] = [None] * len(seeds)
        self.capped_at = max(1, int(sampling.max_seconds * FRAME_RATE)) + 1
        self.random = [torch.Generator().manual_seed(seed) for seed in seeds]

    @property
    def length(self) -> int:
        return len(self.frames)

    @property
    def all_done(self) -> bool:
        last = self.delay.codebooks - 1
        return all(end is not None and self.length > end + last for end in self.ended_at)

    def next_frame(self, logits: torch.Tensor) -> torch.Tensor:
        """(prompts, codebooks, classes) -> (prompts, codebooks)."""
        number = self.length
        logits[..., self.delay.begin] = -torch.inf
        logits[:, 1:, self.delay.end] = -torch.inf
        frame = torch.stack([self._choose(prompt, one) for prompt, one in enumerate(logits)])
        books = torch.arange(self.delay.codebooks)
        frame[:, books >= number] = self.delay.begin
        for prompt, end in enumerate(self.ended_at):
            if end is None and (number == self.capped_at or (number > 0 and frame[prompt, 0] == self.delay.end)):
                self.ended_at[prompt] = end = number
            if end is not None:
                frame[prompt, books <= number - end] = self.delay.end
        self.frames.append(frame)
        return frame

    def _choose(self, prompt: int, logits: torch.Tensor) -> torch.Tensor:
        """(codebooks, classes) -> (codebooks,)."""
        sampling = self.sampling
        if sampling.temperature == 0:
            return logits.argmax(-1)
        random = self.random[prompt]
        chosen = torch.multinomial(_filtered(logits / sampling.temperature, sampling), 1, generator=random)[:, 0]
        if sampling.repetition_window and self.frames:
            window = torch.stack([frame[prompt] for frame in self.frames[-sampling.repetition_window :]])
            special = (window == self.delay.begin) | (window == self.delay.end)
            repeats = ((window == chosen) & ~special).sum(0)
            fresh = torch.multinomial(logits.softmax(-1), 1, generator=random)[:, 0]
            chosen = torch.where(repeats >= sampling.repetition_limit, fresh, chosen)
        return chosen

    def result(self) -> list[GeneratedCodes]:
        frames = torch.stack(self.frames, dim=1).numpy()
        return [
            GeneratedCodes(self.delay.undo(frames[prompt, : end + self.delay.codebooks]), stopped=end < self.capped_at)
            for prompt, end in enumerate(self.ended_at)
            if end is not None
        ]


def _filtered(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Probabilities after top-k and top-p, per codebook."""
    if 0 < sampling.top_k < logits.shape[-1]:
        smallest = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    probabilities = logits.softmax(-1)
    if sampling.top_p < 1:
        ordered, order = probabilities.sort(-1, descending=True)
        beyond = ordered.cumsum(-1) - ordered > sampling.top_p
        probabilities = probabilities.masked_fill(beyond.gather(-1, order.argsort(-1)), 0.0)
    return probabilities / probabilities.sum(-1, keepdim=True)
