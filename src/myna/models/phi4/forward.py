"""The forward pass over sequences that lie end to end, and the loss sums.

It runs the very modules of transformers, and the adapters PEFT put into them. The residual stream is fp32 in every
precision: what 32 layers add up in it may leave the range of fp16, and a card that has nothing else must train it too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from myna.models.attention import attend_side_by_side
from myna.models.base import StreamLosses, core_of
from myna.models.cross_entropy import cross_entropy
from myna.models.phi4.audio_encoder import hear
from myna.models.phi4.batch import PhiBatch

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer number, q, k, v), each (positions, heads, head size) -> (positions, heads, head size)."""


class Turns(NamedTuple):
    """Rotary positions: cosine and sine, (positions, 1, rotated size)."""

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def at(cls, core: Any, position_ids: torch.Tensor) -> Turns:
        """Of short sequences, which is all we take: a longer one would turn at other frequencies from its start."""
        rotary = core.model.rotary_emb
        angles = position_ids[:, None].float() * rotary.inv_freq.float()
        angles = torch.cat([angles, angles], dim=-1).unsqueeze(1)
        return cls(angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Phi turns only a part of each head."""
        size = self.cos.shape[-1]
        turned, rest = x[..., :size].float(), x[..., size:]
        first, second = turned.chunk(2, dim=-1)
        turned = turned * self.cos + torch.cat([-second, first], dim=-1) * self.sin
        return torch.cat([turned.to(x.dtype), rest], dim=-1)


def embed(core: Any, batch: PhiBatch) -> torch.Tensor:
    """The stream before the first layer: words, and what is heard in its place."""
    stream: torch.Tensor = core.model.embed_tokens(batch.ids).float()
    if not len(batch.audio_at):
        return stream
    heard = hear(core, batch.side_by_side(), batch.spectra).flatten(0, 1)
    return stream.index_copy(0, batch.audio_at, heard[batch.audio_from].float())


def run_layer(layer: Any, stream: torch.Tensor, turns: Turns, attend: Attend, dtype: torch.dtype) -> torch.Tensor:
    attention = layer.self_attn
    size, keys = attention.head_dim, attention.num_key_value_heads
    x = attention.qkv_proj(layer.input_layernorm(stream).to(dtype)).unflatten(-1, (-1, size))
    q, k, v = x.split([x.shape[1] - 2 * keys, keys, keys], dim=1)
    attended = attend(attention.layer_idx, turns.apply(q), turns.apply(k), v)
    stream = stream + layer.resid_attn_dropout(attention.o_proj(attended.flatten(1))).float()
    made = layer.mlp(layer.post_attention_layernorm(stream).to(dtype))
    return stream + layer.resid_mlp_dropout(made).float()  # type: ignore[no-any-return]


def compute_dtype(core: Any) -> torch.dtype:
    dtype: torch.dtype = core.model.embed_tokens.weight.dtype
    return dtype


class FlatLayer(nn.Module):
    """A decoder layer as a module of its own, so that sharding, compiling and checkpointing have something to hold."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self, stream: torch.Tensor, turns: Turns, places: torch.Tensor, lengths: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        def attend(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return attend_side_by_side(q, k, v, places, lengths)

        return run_layer(self.layer, stream, turns, attend, dtype)


class PhiObjective(nn.Module):
    """Batch to loss sums: what the loop, DDP and FSDP hold."""

    folded = False
    """There is no faster way yet: `train.fused_lora` changes nothing."""

    def __init__(
        self, model: nn.Module, ends: tuple[int, ...], label_smoothing: float, recompute: int, compiled: bool
    ) -> None:
        super().__init__()
        self.model = model
        self.layers = nn.ModuleList(FlatLayer(layer) for layer in core_of(model).model.layers)
        if compiled and next(model.parameters()).device.type == "cuda":
            for layer in self.layers:
                layer.compile(dynamic=True)
        self.ends, self.label_smoothing, self.recompute = ends, label_smoothing, recompute

    def hidden(self, batch: PhiBatch) -> torch.Tensor:
        """The stream after the last layer, before the final norm."""
        core = core_of(self.model)
        stream, turns, dtype = embed(core, batch), Turns.at(core, batch.position_ids), compute_dtype(core)
        for number, layer in enumerate(self.layers, start=1):
            arguments = (stream, turns, batch.places, batch.lengths, dtype)
            # The first ones: when the backward pass comes to them, all that the whole ones kept is gone.
            if number <= self.recompute and self.training:
                stream = checkpoint(layer, *arguments, use_reentrant=False)
            else:
                stream = layer(*arguments)
        return stream

    def forward(self, batch: PhiBatch) -> StreamLosses:
        core = core_of(self.model)
        stream = self.hidden(batch)[batch.text_from]
        logits = core.lm_head(core.model.norm(stream).to(compute_dtype(core)))
        losses, hits = cross_entropy(logits, batch.text_targets, self.label_smoothing)
        ends = torch.stack([batch.text_targets == end for end in self.ends]).any(0)
        return StreamLosses(
            sums=losses.sum().unsqueeze(0),
            correct=hits.sum().unsqueeze(0),
            stops=torch.stack([(hits & ends).sum(), ends.sum()]),
        )
