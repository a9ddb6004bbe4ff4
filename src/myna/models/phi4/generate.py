"""Words out of a prompt: read all prompts at once, then a token a step, each the likeliest one that may be said."""

from __future__ import annotations

from typing import Any

import torch

from myna.models.attention import Cache, attend_side_by_side
from myna.models.constrained_decoding import Guide
from myna.models.phi4.batch import PhiBatch
from myna.models.phi4.forward import Turns, compute_dtype, embed, run_layer


@torch.inference_mode()
def generate(
    core: Any, batch: PhiBatch, ends: tuple[int, ...], max_tokens: int, guide: Guide | None = None
) -> list[tuple[list[int], bool]]:
    """The ids that answer each prompt, and whether it found its end. Company changes nothing."""
    cache, device = Cache(len(core.model.layers), batch.lengths), batch.ids.device
    hidden = _prefill(core, batch, cache)
    said: list[list[int]] = [[] for _ in batch.lengths]
    stopped = [False] * len(said)
    for _ in range(max_tokens):
        logits = core.lm_head(core.model.norm(hidden).to(compute_dtype(core))).float()
        chosen = (guide.hold(logits) if guide is not None else logits).argmax(-1).tolist()
        if guide is not None:
            guide.follow(chosen)
        for number, id in enumerate(chosen):
            stopped[number] = stopped[number] or id in ends
            if not stopped[number]:
                said[number].append(id)
        if all(stopped):
            break
        hidden = _step(core, torch.tensor(chosen, device=device), cache)
    return list(zip(said, stopped, strict=True))


def _prefill(core: Any, batch: PhiBatch, cache: Cache) -> torch.Tensor:
    """The stream at each prompt's last position."""
    stream, turns = embed(core, batch), Turns.at(core, batch.position_ids)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        cache.start(layer, k, v)
        return attend_side_by_side(q, k, v, batch.places, batch.lengths)

    for layer in core.model.layers:
        stream = run_layer(layer, stream, turns, attend, compute_dtype(core))
    last = torch.tensor(batch.lengths, device=stream.device).cumsum(0) - 1
    return stream[last]


def _step(core: Any, ids: torch.Tensor, cache: Cache) -> torch.Tensor:
    """One more token for every prompt."""
    stream: torch.Tensor = core.model.embed_tokens(ids).float()
    turns = Turns.at(core, cache.filled.to(ids.device))

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return cache.attend(q, *cache.extend(layer, k, v))

    for layer in core.model.layers:
        stream = run_layer(layer, stream, turns, attend, compute_dtype(core))
    cache.filled += 1
    return stream
