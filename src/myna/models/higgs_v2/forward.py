"""The forward pass over the sorted stream, and the loss sums.

It runs the very modules of transformers (and the adapters PEFT put into them), so weights, checkpoints and gradients
are theirs; only the routing is ours: two slices instead of boolean indexing in every layer, and sequences that attend
to themselves alone instead of padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from myna.models.base import IGNORED, StreamSums
from myna.models.higgs_v2.batch import HiggsBatch

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer number, q, k, v), each (positions, heads, head size) in stream order -> (positions, heads, head size)."""


def core_of(model: nn.Module) -> Any:
    """transformers' model inside whatever PEFT put around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def embed(core: Any, text_ids: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """The stream before the first layer. An embedding that is trained is fp32: it is cast where the two meet."""
    text = core.model.embed_tokens(text_ids)
    return torch.cat([text, core.model.embed_audio_tokens(codes).to(text.dtype)])


def run_layer(layer: Any, stream: torch.Tensor, texts: int, attend: Attend) -> torch.Tensor:
    """One decoder layer; the first `texts` rows of the stream are text, the rest audio."""
    attention = layer.self_attn
    text, audio = stream[:texts], stream[texts:]
    x = torch.cat([layer.input_layernorm(text), layer.audio_input_layernorm(audio)])
    q, k, v = (
        projection(x).unflatten(-1, (-1, attention.head_dim))
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    attended = attention.o_proj(attend(attention.layer_idx, q, k, v).flatten(1))
    stream = stream + attended.to(stream.dtype)
    text, audio = stream[:texts], stream[texts:]
    text = layer.mlp(layer.post_attention_layernorm(text))
    audio = layer.audio_mlp(layer.audio_post_attention_layernorm(audio))
    return stream + torch.cat([text, audio]).to(stream.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions; cos and sin are (positions, 1, head size)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def rotary_tables(core: Any, position_ids: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = core.model.rotary_emb(like, position_ids[None])
    return cos[0].unsqueeze(1), sin[0].unsqueeze(1)


def attend_within(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """Causal attention inside each sequence; (positions, heads, head size) in sequence order.

    One call per sequence: exact on every device, and no mask that grows with the square of a row.
    """
    attended = []
    for parts in zip(*(torch.split(x, list(lengths)) for x in (q, k, v)), strict=True):
        one_q, one_k, one_v = (part.transpose(0, 1).unsqueeze(0) for part in parts)
        grouped = one_q.shape[1] != one_k.shape[1]
        out = F.scaled_dot_product_attention(one_q, one_k, one_v, is_causal=True, enable_gqa=grouped)
        attended.append(out[0].transpose(0, 1))
    return torch.cat(attended)


class SortedLayer(nn.Module):
    """A decoder layer as a module of its own, so that sharding, compiling and checkpointing have something to hold."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, stream: torch.Tensor, texts: int, attend: Attend) -> torch.Tensor:
        return run_layer(self.layer, stream, texts, attend)


def training_attention(core: Any, batch: HiggsBatch, stream: torch.Tensor) -> Attend:
    """Attention among the positions of each sequence, for a stream in sorted order."""
    cos, sin = rotary_tables(core, batch.position_ids, stream)

    def attend(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x[batch.to_sequence] for x in (q, k, v))
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        return attend_within(q, k, v, batch.lengths)[batch.to_stream]

    return attend


class HiggsObjective(nn.Module):
    """Batch to loss sums: what the loop, DDP and FSDP hold."""

    def __init__(self, model: nn.Module, label_smoothing: float = 0.0, checkpoint_every: int = 0) -> None:
        super().__init__()
        self.model = model
        self.layers = nn.ModuleList(SortedLayer(layer) for layer in core_of(model).model.layers)
        self.label_smoothing = label_smoothing
        self.checkpoint_every = checkpoint_every

    def hidden(self, batch: HiggsBatch) -> torch.Tensor:
        """The stream after the last layer, before the final norm."""
        core = core_of(self.model)
        stream, texts = embed(core, batch.text_ids, batch.codes), len(batch.text_ids)
        attend = training_attention(core, batch, stream)
        for number, layer in enumerate(self.layers):
            if self.checkpoint_every and self.training and number % self.checkpoint_every == 0:
                stream = checkpoint(layer, stream, texts, attend, use_reentrant=False)
            else:
                stream = layer(stream, texts, attend)
        return stream

    def forward(self, batch: HiggsBatch) -> StreamSums:
        core = core_of(self.model)
        config = core.config
        stream = self.hidden(batch)

        logits = core.audio_lm_head(core.model.norm(stream[batch.audio_from]))
        logits = logits.unflatten(-1, (config.num_codebooks, config.codebook_size))
        audio_sums = self._loss(logits, batch.audio_targets)
        with torch.no_grad():
            hits = logits.argmax(-1) == batch.audio_targets
            ends = batch.audio_targets == config.audio_stream_eos_id
            stops = torch.stack([(hits & ends).sum(), ends.sum()])

        text_sum = audio_sums.new_zeros(1)
        text_hits = torch.zeros(1, device=stream.device, dtype=torch.long)
        if core.text_lm_head is not None:
            text_logits = core.text_lm_head(core.model.norm(stream[batch.text_from]))
            text_sum = self._loss(text_logits.unsqueeze(1), batch.text_targets.unsqueeze(1))
            text_hits = (text_logits.argmax(-1) == batch.text_targets).sum().view(1)
        return StreamSums(
            sums=torch.cat([text_sum, audio_sums]),
            correct=torch.cat([text_hits, hits.sum(0)]),
            stops=stops,
        )

    def _loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """(targets, streams, classes) -> (streams,)."""
        losses = F.cross_entropy(
            logits.flatten(0, 1).float(),
            targets.flatten(),
            ignore_index=IGNORED,
            reduction="none",
            label_smoothing=self.label_smoothing,
        )
        return losses.view(targets.shape).sum(0)
