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
from myna.models.higgs_v2.fast import FoldedLayer, can_fold, refresh
from myna.models.higgs_v2.route import Route

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


class SortedLayer(nn.Module):
    """A decoder layer as a module of its own, so that sharding, compiling and checkpointing have something to hold."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, stream: torch.Tensor, texts: int, route: Route) -> torch.Tensor:
        def attend(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return route.attend(*(x[route.to_sequence] for x in (q, k, v)))[route.to_stream]

        return run_layer(self.layer, stream, texts, attend)


class HiggsObjective(nn.Module):
    """Batch to loss sums: what the loop, DDP and FSDP hold."""

    def __init__(
        self, model: nn.Module, label_smoothing: float = 0.0, checkpoint_every: int = 0, fast: bool = False
    ) -> None:
        super().__init__()
        self.model = model
        layers = core_of(model).model.layers
        kind = FoldedLayer if fast and all(can_fold(layer) for layer in layers) else SortedLayer
        self.layers = nn.ModuleList(kind(layer) for layer in layers)
        self._groups = [group for layer in self.layers if isinstance(layer, FoldedLayer) for group in layer.groups]
        if fast and next(model.parameters()).is_cuda:
            for layer in self.layers:
                layer.compile(dynamic=True)
        self.label_smoothing = label_smoothing
        self.checkpoint_every = checkpoint_every

    def hidden(self, batch: HiggsBatch) -> torch.Tensor:
        """The stream after the last layer, before the final norm."""
        core = core_of(self.model)
        if self._groups:
            refresh(self._groups)
        stream, texts = embed(core, batch.text_ids, batch.codes), len(batch.text_ids)
        route = Route.of(core, batch, stream)
        for number, layer in enumerate(self.layers):
            if self.checkpoint_every and self.training and number % self.checkpoint_every == 0:
                stream = checkpoint(layer, stream, texts, route, use_reentrant=False)
            else:
                stream = layer(stream, texts, route)
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
