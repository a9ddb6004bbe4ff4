"""Autoregressive generation: prefill, then one frame a step under the delay pattern.

It runs the same layers as training. Codebook k is k frames behind codebook 0, which alone decides when to stop: after
its end-of-stream at frame f, codebook k ends at frame f + k.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from myna.models.attention import KVCache, packed_causal_attention
from myna.models.base import FrameCallback, GeneratedCodes, Sampling
from myna.models.higgs_v2.batch import HiggsBatch
from myna.models.higgs_v2.forward import embed_inputs, run_layer
from myna.models.higgs_v2.packing import apply_rotary, rotary_tables
from myna.models.higgs_v2.render import FRAME_RATE, DelayPattern


@torch.inference_mode()
def generate(
    core: Any,
    batch: HiggsBatch,
    delay: DelayPattern,
    sampling: Sampling,
    seeds: Sequence[int],
    on_frame: FrameCallback = None,
) -> list[GeneratedCodes]:
    """Generate codes for every prompt, each with its own random stream, so that the batch does not matter."""
    config, device = core.config, batch.text_ids.device
    cache = KVCache(len(core.model.layers), batch.lengths)
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


def _prefill(core: Any, batch: HiggsBatch, cache: KVCache) -> torch.Tensor:
    """Process all prompts at once; the hidden state at the last position of each."""
    stream = embed_inputs(core, batch.text_ids, batch.codes)
    cos, sin = rotary_tables(core, batch.position_ids, stream)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x[batch.to_sequence] for x in (q, k, v))
        q, k = apply_rotary(q, cos, sin).to(v.dtype), apply_rotary(k, cos, sin).to(v.dtype)
        cache.prefill(layer, k, v)
        return packed_causal_attention(q, k, v, batch.lengths)[batch.to_stream]

    for layer in core.model.layers:
        stream = run_layer(layer, stream, len(batch.text_ids), attend)
    return stream[batch.to_sequence[batch.cu_seqlens[1:].long() - 1]]


def _step(core: Any, frame: torch.Tensor, cache: KVCache) -> torch.Tensor:
    """Process one more frame (prompts, codebooks) of every prompt; a stream of audio positions alone."""
    stream = embed_inputs(core, frame.new_empty(0), frame)
    cos, sin = rotary_tables(core, cache.lengths.to(frame.device), stream)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k = apply_rotary(q, cos, sin).to(v.dtype), apply_rotary(k, cos, sin).to(v.dtype)
        return cache.attend(q, *cache.append(layer, k, v))

    for layer in core.model.layers:
        stream = run_layer(layer, stream, 0, attend)
    cache.lengths += 1
    return stream


class _Sampler:
    """Samples frames under the delay pattern, and keeps them."""

    def __init__(self, delay: DelayPattern, sampling: Sampling, seeds: Sequence[int]) -> None:
        self.delay, self.sampling = delay, sampling
        self.frames: list[torch.Tensor] = []
        self.ended_at: list[int | None] = [None] * len(seeds)
        self.capped_at = max(1, int(sampling.max_seconds * FRAME_RATE)) + 1
        self.rng = [torch.Generator().manual_seed(seed) for seed in seeds]

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
        frame = torch.stack([self._sample(prompt, row) for prompt, row in enumerate(logits)])
        books = torch.arange(self.delay.codebooks)
        frame[:, books >= number] = self.delay.begin
        for prompt, end in enumerate(self.ended_at):
            if end is None and (number == self.capped_at or (number > 0 and frame[prompt, 0] == self.delay.end)):
                self.ended_at[prompt] = end = number
            if end is not None:
                frame[prompt, books <= number - end] = self.delay.end
        self.frames.append(frame)
        return frame

    def _sample(self, prompt: int, logits: torch.Tensor) -> torch.Tensor:
        """Codes of one prompt's next frame: (codebooks, classes) -> (codebooks,)."""
        sampling = self.sampling
        if sampling.temperature == 0:
            return logits.argmax(-1)
        rng = self.rng[prompt]
        codes = torch.multinomial(_top_k_top_p(logits / sampling.temperature, sampling), 1, generator=rng)[:, 0]
        if sampling.repetition_window and self.frames:
            window = torch.stack([frame[prompt] for frame in self.frames[-sampling.repetition_window :]])
            special = (window == self.delay.begin) | (window == self.delay.end)
            repeats = ((window == codes) & ~special).sum(0)
            redrawn = torch.multinomial(logits.softmax(-1), 1, generator=rng)[:, 0]
            codes = torch.where(repeats >= sampling.repetition_limit, redrawn, codes)
        return codes

    def result(self) -> list[GeneratedCodes]:
        frames = torch.stack(self.frames, dim=1).numpy()
        return [
            GeneratedCodes(self.delay.undo(frames[prompt, : end + self.delay.codebooks]), stopped=end < self.capped_at)
            for prompt, end in enumerate(self.ended_at)
            if end is not None
        ]


def _top_k_top_p(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
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
