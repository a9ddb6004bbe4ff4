"""Training forward pass over the packed stream, and the loss.

It runs transformers' own modules (and the adapters PEFT put into them), so weights, checkpoints and gradients are
theirs; only the routing is ours: two slices instead of boolean indexing in every layer, and packed sequences instead of
padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from myna.models.base import StreamLosses, get_base_model
from myna.models.cross_entropy import cross_entropy
from myna.models.higgs_v2.batch import HiggsBatch
from myna.models.higgs_v2.packing import OutputRows, PackedAttention

AttentionFunction = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer number, q, k, v), each (positions, heads, head size) in stream order -> (positions, heads, head size)."""


def embed_inputs(core: Any, text_ids: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """The residual stream before the first layer. A trained embedding is fp32 and is cast to the other's type."""
    text = core.model.embed_tokens(text_ids)
    return torch.cat([text, core.model.embed_audio_tokens(codes).to(text.dtype)])


def run_layer(layer: Any, stream: torch.Tensor, num_text: int, attend: AttentionFunction) -> torch.Tensor:
    """One decoder layer; the first `num_text` rows of the stream are text, the rest audio."""
    attention = layer.self_attn
    text, audio = stream[:num_text], stream[num_text:]
    x = torch.cat([layer.input_layernorm(text), layer.audio_input_layernorm(audio)])
    q, k, v = (
        projection(x).unflatten(-1, (-1, attention.head_dim))
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    attended = attention.o_proj(attend(attention.layer_idx, q, k, v).flatten(1))
    stream = stream + attended.to(stream.dtype)
    text, audio = stream[:num_text], stream[num_text:]
    text = layer.mlp(layer.post_attention_layernorm(text))
    audio = layer.audio_mlp(layer.audio_post_attention_layernorm(audio))
    return stream + torch.cat([text, audio]).to(stream.dtype)


def permute_rows(x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """`x[order]`, where `inverse` is the inverse permutation."""
    return _PermuteRows.apply(x, order, inverse)  # type: ignore[no-untyped-call,no-any-return]


class _PermuteRows(torch.autograd.Function):
    """Its backward is a gather; autograd's own would sort and accumulate, as rows might repeat."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *d_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        [inverse] = ctx.saved_tensors
        return d_outputs[0].index_select(0, inverse), None, None


class PackedLayer(nn.Module):
    """Decoder layer over packed sequences, as a module that can be sharded, compiled and recomputed."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self,
        stream: torch.Tensor,
        update: torch.Tensor | None,
        num_text: int,
        packing: PackedAttention,
        output: OutputRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `FusedLoraLayer.forward`; here no update is left to add."""
        assert update is None

        def attend(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            orders = packing.to_sequence, packing.to_stream
            q, k, v = (permute_rows(x, *orders) for x in (q, k, v))
            return permute_rows(packing.rotate_and_attend(q, k, v), *orders[::-1])

        stream = run_layer(self.layer, stream, num_text, attend)
        return (stream if output is None else stream[output.rows]), None


class HiggsObjective(nn.Module):
    """Training objective: batch to summed losses. DDP and FSDP wrap it."""

    def __init__(
        self,
        model: nn.Module,
        label_smoothing: float = 0.0,
        recompute: int = 0,
        fused_lora: bool = False,
        compiled: bool = False,
    ) -> None:
        # Imported here: PEFT comes with it, and speaking needs only the functions above.
        from myna.models.higgs_v2.fused.layer import FusedLoraLayer, can_fuse
        from myna.models.higgs_v2.fused.ops import WeightCopies

        super().__init__()
        self.model = model
        layers, device = get_base_model(model).model.layers, next(model.parameters()).device
        # Not tested on Apple's devices yet.
        fused = fused_lora and device.type != "mps" and all(can_fuse(layer) for layer in layers)
        self.layers = nn.ModuleList((FusedLoraLayer if fused else PackedLayer)(layer) for layer in layers)
        groups = [group for layer in self.layers if isinstance(layer, FusedLoraLayer) for group in layer.groups]
        self._weight_copies = WeightCopies([copy for group in groups for copy in group.weight_copies()])
        if compiled and not fused and device.type == "cuda":
            for layer in self.layers:
                layer.compile(dynamic=True)
        self.label_smoothing = label_smoothing
        self.recompute, self.fused = recompute, fused

    def hidden(self, batch: HiggsBatch, *, output: OutputRows | None = None) -> torch.Tensor:
        """The stream after the last layer, before the final norm: all of it, or the `output` rows."""
        core = get_base_model(self.model)
        self._weight_copies.refresh()
        stream, update, num_text = embed_inputs(core, batch.text_ids, batch.codes), None, len(batch.text_ids)
        packing = PackedAttention.from_batch(core, batch, stream)
        for number, layer in enumerate(self.layers, start=1):
            # The first layers: the backward pass reaches them when the others' activations are freed.
            recompute = number <= self.recompute and self.training
            if recompute and update is not None:
                # The layer would fuse this addition, but then both would be kept for the recomputation.
                stream, update = stream + update, None
            arguments = (stream, update, num_text, packing, output if number == len(self.layers) else None)
            if recompute:
                stream, update = checkpoint(layer, *arguments, use_reentrant=False)
            else:
                stream, update = layer(*arguments)
        return stream if update is None else stream + update

    def forward(self, batch: HiggsBatch) -> StreamLosses:
        core = get_base_model(self.model)
        config = core.config
        stream = self.hidden(batch, output=OutputRows(batch.output_positions, batch.num_text_outputs))

        logits = core.audio_lm_head(core.model.norm(stream[batch.audio_output_index]))
        logits = logits.unflatten(-1, (config.num_codebooks, config.codebook_size))
        sums, hits = self._losses(logits, batch.audio_targets)
        ends = batch.audio_targets == config.audio_stream_eos_id
        stops = torch.stack([(hits & ends).sum(), ends.sum()])

        text_sum, text_hits = sums.new_zeros(1), hits.new_zeros((1, 1))
        if core.text_lm_head is not None:
            text_logits = core.text_lm_head(core.model.norm(stream[batch.text_output_index]))
            text_sum, text_hits = self._losses(text_logits.unsqueeze(1), batch.text_targets.unsqueeze(1))
        sums, correct = torch.cat([text_sum, sums]), torch.cat([text_hits.sum(0), hits.sum(0)])
        return StreamLosses(sums, correct, stops)

    def _losses(self, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(targets, streams, classes) -> summed losses (streams,), and hits (targets, streams)."""
        losses, hits = cross_entropy(logits.flatten(0, 1), targets.flatten(), self.label_smoothing)
        return losses.view(targets.shape).sum(0), hits.view(targets.shape)
