"""The forward pass over the sorted stream, and the loss sums.

It runs the very modules of transformers (and the adapters PEFT put into them), so weights, checkpoints and gradients
are theirs; only the routing is ours: two slices instead of boolean indexing in every layer, and sequences that attend
to themselves alone instead of padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from myna.models.base import StreamLosses
from myna.models.base import core_of as core_of
from myna.models.cross_entropy import cross_entropy
from myna.models.higgs_v2.batch import HiggsBatch
from myna.models.higgs_v2.fused.layer import FusedLoraLayer, can_fold
from myna.models.higgs_v2.fused.ops import Copies
from myna.models.higgs_v2.packing import Needed, PackedAttention

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer number, q, k, v), each (positions, heads, head size) in stream order -> (positions, heads, head size)."""


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


def reorder(x: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
    """`x[order]`, where `back` is the way back."""
    return _Reordered.apply(x, order, back)  # type: ignore[no-untyped-call,no-any-return]


class _Reordered(torch.autograd.Function):
    """Gradients only go back to where rows came from. Left to autograd they would be added up, as of rows that may have
    been taken twice, and sorted for that."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *d_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        [back] = ctx.saved_tensors
        return d_outputs[0].index_select(0, back), None, None


class SortedLayer(nn.Module):
    """A decoder layer as a module of its own, so that sharding, compiling and checkpointing have something to hold."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self,
        stream: torch.Tensor,
        update: torch.Tensor | None,
        texts: int,
        route: PackedAttention,
        needed: Needed | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same as of `FoldedLayer`; here nothing is left to be added."""
        assert update is None

        def attend(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            ways = route.to_sequence, route.to_stream
            return reorder(route.attend(*(reorder(x, *ways) for x in (q, k, v))), *ways[::-1])

        stream = run_layer(self.layer, stream, texts, attend)
        return (stream if needed is None else stream[needed.rows]), None


class HiggsObjective(nn.Module):
    """Batch to loss sums: what the loop, DDP and FSDP hold."""

    def __init__(
        self,
        model: nn.Module,
        label_smoothing: float = 0.0,
        recompute: int = 0,
        fast: bool = False,
        compiled: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        layers, device = core_of(model).model.layers, next(model.parameters()).device
        # Nobody has tried the folded products on Apple's devices yet.
        folded = fast and device.type != "mps" and all(can_fold(layer) for layer in layers)
        self.layers = nn.ModuleList((FusedLoraLayer if folded else SortedLayer)(layer) for layer in layers)
        groups = [group for layer in self.layers if isinstance(layer, FusedLoraLayer) for group in layer.groups]
        self._copies = Copies([copy for group in groups for copy in group.copies()])
        if compiled and not folded and device.type == "cuda":
            for layer in self.layers:
                layer.compile(dynamic=True)
        self.label_smoothing = label_smoothing
        self.recompute, self.folded = recompute, folded

    def hidden(self, batch: HiggsBatch, *, needed: Needed | None = None) -> torch.Tensor:
        """The stream after the last layer, before the final norm: all of it, or the rows that are needed."""
        core = core_of(self.model)
        self._copies.refresh()
        stream, update, texts = embed(core, batch.text_ids, batch.codes), None, len(batch.text_ids)
        route = PackedAttention.of(core, batch, stream)
        for number, layer in enumerate(self.layers, start=1):
            # The first ones: when the backward pass comes to them, all that the whole ones kept is gone.
            again = number <= self.recompute and self.training
            if again and update is not None:
                # The layer would add it in passing, but then both would be kept to recompute it from.
                stream, update = stream + update, None
            arguments = (stream, update, texts, route, needed if number == len(self.layers) else None)
            if again:
                stream, update = checkpoint(layer, *arguments, use_reentrant=False)
            else:
                stream, update = layer(*arguments)
        return stream if update is None else stream + update

    def forward(self, batch: HiggsBatch) -> StreamLosses:
        core = core_of(self.model)
        config = core.config
        stream = self.hidden(batch, needed=Needed(batch.needed, batch.needed_texts))

        logits = core.audio_lm_head(core.model.norm(stream[batch.audio_place]))
        logits = logits.unflatten(-1, (config.num_codebooks, config.codebook_size))
        sums, hits = self._losses(logits, batch.audio_targets)
        ends = batch.audio_targets == config.audio_stream_eos_id
        stops = torch.stack([(hits & ends).sum(), ends.sum()])

        text_sum, text_hits = sums.new_zeros(1), hits.new_zeros((1, 1))
        if core.text_lm_head is not None:
            text_logits = core.text_lm_head(core.model.norm(stream[batch.text_place]))
            text_sum, text_hits = self._losses(text_logits.unsqueeze(1), batch.text_targets.unsqueeze(1))
        return StreamLosses(
            sums=torch.cat([text_sum, sums]),
            correct=torch.cat([text_hits.sum(0), hits.sum(0)]),
            stops=stops,
        )

    def _losses(self, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(targets, streams, classes) -> summed losses (streams,), and hits (targets, streams)."""
        losses, hits = cross_entropy(logits.flatten(0, 1), targets.flatten(), self.label_smoothing)
        return losses.view(targets.shape).sum(0), hits.view(targets.shape)
