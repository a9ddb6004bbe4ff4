"""Greedy text generation: prefill of all prompts at once, then a token a step."""

from __future__ import annotations

from typing import Any

import torch

from myna.models.attention import KVCache, padded_causal_attention
from myna.models.constrained_decoding import ConstrainedDecoder
from myna.models.phi4.batch import Phi4Batch
from myna.models.phi4.forward import RotaryTables, compute_dtype, embed, run_layer


@torch.inference_mode()
def generate(
    core: Any, batch: Phi4Batch, eos_ids: tuple[int, ...], max_tokens: int, decoder: ConstrainedDecoder | None = None
) -> list[tuple[list[int], bool]]:
    """Generated ids of each prompt, and whether an end token came. They do not depend on the batch."""
    cache, device = KVCache(len(core.model.layers), batch.lengths), batch.ids.device
    hidden = _prefill(core, batch, cache)
    generated: list[list[int]] = [[] for _ in batch.lengths]
    stopped = [False] * len(generated)
    for _ in range(max_tokens):
        logits = core.lm_head(core.model.norm(hidden).to(compute_dtype(core))).float()
        chosen = logits.argmax(-1).tolist() if decoder is None else decoder.choose(logits)
        for number, id in enumerate(chosen):
            stopped[number] = stopped[number] or id in eos_ids
            if not stopped[number]:
                generated[number].append(id)
        if all(stopped):
            break
        hidden = _step(core, torch.tensor(chosen, device=device), cache)
    return list(zip(generated, stopped, strict=True))


def _prefill(core: Any, batch: Phi4Batch, cache: KVCache) -> torch.Tensor:
    """The residual stream at each prompt's last position."""
    stream, rotary = embed(core, batch), RotaryTables.at(core, batch.position_ids)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        cache.prefill(layer, k, v)
        return padded_causal_attention(q, k, v, batch.padded_at, batch.lengths)

    for layer in core.model.layers:
        stream = run_layer(layer, stream, rotary, attend, compute_dtype(core))
    last = torch.tensor(batch.lengths, device=stream.device).cumsum(0) - 1
    return stream[last]


def _step(core: Any, ids: torch.Tensor, cache: KVCache) -> torch.Tensor:
    """One more token for every prompt."""
    stream: torch.Tensor = core.model.embed_tokens(ids).float()
    rotary = RotaryTables.at(core, cache.lengths.to(ids.device))

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return cache.attend(q, *cache.append(layer, k, v))

    for layer in core.model.layers:
        stream = run_layer(layer, stream, rotary, attend, compute_dtype(core))
    cache.lengths += 1
    return stream
