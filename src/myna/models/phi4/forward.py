"""Training forward pass and the loss sums, with the audio encoder over padded clips of unequal length.

transformers' own audio encoder adds 1 for sound and 0 for padding to the attention scores, so that padding is attended
to and a clip's embedding depends on its batch. The same modules run here, but padding is zeroed before every strided
convolution and masked in attention.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from myna.models.attention import padded_causal_attention
from myna.models.base import LossSums, get_base_model
from myna.models.cross_entropy import cross_entropy
from myna.models.phi4.batch import Phi4Batch
from myna.models.phi4.checkpoint import eos_ids


def encode_audio(core: Any, features: Tensor, spectra: Tensor) -> Tensor:
    """Encode (clips, spectra, bands) to embeddings at the placeholders, (clips, positions, hidden size)."""
    audio_embed = core.model.embed_tokens_extend.audio_embed
    encoder = audio_embed.encoder
    hidden = encoder.encoder_embedding(features).to(audio_embed.up_proj_for_speech.bias.dtype)
    hidden, lengths = _subsample(encoder.embed, hidden, spectra)
    mask = _mask(hidden.shape[1], lengths)
    bias = encoder.relative_attention_bias_layer(hidden).masked_fill(~mask[:, None, None], -torch.inf).to(hidden.dtype)
    for layer in encoder.encoders:
        hidden = layer(hidden, bias)
    return audio_embed.down_proj_for_speech(F.gelu(audio_embed.up_proj_for_speech(hidden)))  # type: ignore[no-any-return]


def _subsample(embed: Any, hidden: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the strided convolutions before the encoder, each of which halves the length."""
    hidden = hidden.unsqueeze(1)
    for module in embed.conv:
        if getattr(module, "stride", None) == (2, 2):
            hidden = hidden * _mask(hidden.shape[2], lengths)[:, None, :, None]
            lengths = (lengths + 1) // 2
        hidden = module(hidden)
    return embed.out(hidden.transpose(1, 2).flatten(2)), lengths


def _mask(count: int, lengths: Tensor) -> Tensor:
    """(clips, count): true before each clip's length."""
    return torch.arange(count, device=lengths.device) < lengths[:, None]


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer number, q, k, v), each (positions, heads, head size) -> (positions, heads, head size)."""


class RotaryTables(NamedTuple):
    """Rotary position embeddings: cosine and sine, (positions, 1, rotated size)."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, core: Any, position_ids: Tensor) -> Self:
        """Make tables with the frequencies of short sequences; the renderer refuses longer ones."""
        rotary = core.model.rotary_emb
        angles = position_ids[:, None].float() * rotary.inv_freq.float()
        angles = torch.cat([angles, angles], dim=-1).unsqueeze(1)
        return cls(angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling)

    def apply(self, x: Tensor) -> Tensor:
        """Rotate the first part of each head; the rest has no position."""
        size = self.cos.shape[-1]
        rotated, rest = x[..., :size].float(), x[..., size:]
        first, second = rotated.chunk(2, dim=-1)
        rotated = rotated * self.cos + torch.cat([-second, first], dim=-1) * self.sin
        return torch.cat([rotated.to(x.dtype), rest], dim=-1)


def embed(core: Any, batch: Phi4Batch) -> Tensor:
    """Return the residual stream before the first layer: embeddings of tokens, and of audio at its placeholders."""
    stream: Tensor = core.model.embed_tokens(batch.ids).float()
    if not len(batch.audio_at):
        return stream
    audio = encode_audio(core, batch.padded_features(), batch.spectra).flatten(0, 1)
    return stream.index_copy(0, batch.audio_at, audio[batch.audio_from].float())


def run_layer(layer: Any, stream: Tensor, rotary: RotaryTables, attend: Attend, dtype: torch.dtype) -> Tensor:
    attention = layer.self_attn
    size, kv_heads = attention.head_dim, attention.num_key_value_heads
    x = attention.qkv_proj(layer.input_layernorm(stream).to(dtype)).unflatten(-1, (-1, size))
    q, k, v = x.split([x.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    attended = attend(attention.layer_idx, rotary.apply(q), rotary.apply(k), v)
    stream = stream + layer.resid_attn_dropout(attention.o_proj(attended.flatten(1))).float()
    update = layer.mlp(layer.post_attention_layernorm(stream).to(dtype))
    return stream + layer.resid_mlp_dropout(update).float()  # type: ignore[no-any-return]


def compute_dtype(core: Any) -> torch.dtype:
    return core.model.embed_tokens.weight.dtype  # type: ignore[no-any-return]


class Phi4Layer(nn.Module):
    """Decoder layer over packed sequences, the unit of sharding, compiling and activation checkpointing."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self, stream: Tensor, rotary: RotaryTables, padded_at: Tensor, lengths: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return padded_causal_attention(q, k, v, padded_at, lengths)

        return run_layer(self.layer, stream, rotary, attend, dtype)


class Phi4Objective(nn.Module):
    """Training objective: batch to summed losses."""

    fused = False
    """Whether layers are fused. This family has no fused layers: `train.fused_lora` changes nothing."""

    def __init__(
        self,
        model: nn.Module,
        label_smoothing: float = 0.0,
        recompute: int = 0,
        fused_lora: bool = False,  # noqa: ARG002
        compiled: bool = False,
    ) -> None:
        super().__init__()
        core, self.model = get_base_model(model), model
        self.layers = nn.ModuleList(Phi4Layer(layer) for layer in core.model.layers)
        if compiled and next(model.parameters()).device.type == "cuda":
            for layer in self.layers:
                layer.compile(dynamic=True)
        self.eos_ids, self.label_smoothing, self.recompute = eos_ids(core.config), label_smoothing, recompute

    def hidden(self, batch: Phi4Batch) -> Tensor:
        """Return the residual stream after the last layer, before the final norm."""
        core = get_base_model(self.model)
        stream, rotary, dtype = embed(core, batch), RotaryTables.at(core, batch.position_ids), compute_dtype(core)
        for number, layer in enumerate(self.layers, start=1):
            arguments = (stream, rotary, batch.padded_at, batch.lengths, dtype)
            # The first layers are recomputed: when the backward pass reaches them, the others' activations are freed.
            if number <= self.recompute and self.training:
                stream = checkpoint(layer, *arguments, use_reentrant=False)
            else:
                stream = layer(*arguments)
        return stream

    def forward(self, batch: Phi4Batch) -> LossSums:
        core = get_base_model(self.model)
        stream = self.hidden(batch)[batch.text_from]
        logits = core.lm_head(core.model.norm(stream).to(compute_dtype(core)))
        losses, hits = cross_entropy(logits, batch.text_targets, self.label_smoothing)
        is_eos = torch.stack([batch.text_targets == id for id in self.eos_ids]).any(0)
        return LossSums(
            sums=losses.sum().unsqueeze(0),
            correct=hits.sum().unsqueeze(0),
            stops=torch.stack([(hits & is_eos).sum(), is_eos.sum()]),
        )
