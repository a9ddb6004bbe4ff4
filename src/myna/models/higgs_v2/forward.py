"""Training forward pass over packed sequences, and the loss sums.

Attention is causal inside each sequence. The residual stream is sorted by modality, see `batch.py`; only attention
needs the sequence order.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from myna.core.device import supports_triton
from myna.models.attention import packed_causal_attention
from myna.models.base import LossSums, get_base_model
from myna.models.cross_entropy import cross_entropy
from myna.models.higgs_v2.batch import HiggsBatch

VARLEN_CAPABILITY = (8, 0)
"""First compute capability with a variable-length attention kernel in torch."""
TILED_CAPABILITY_MAJOR = 9
"""Compute capability that our attention kernels were tuned on; elsewhere tiles may not fit shared memory."""
TILED_HEAD_SIZES = (16, 32, 64, 128)


class OutputRows(NamedTuple):
    """Positions of the residual stream that the loss reads."""

    rows: Tensor
    num_text: int
    """Number of text positions, which come first."""


class PackedAttention(NamedTuple):
    """Attention over packed sequences, prepared once per batch for all layers."""

    to_sequence: Tensor
    """(positions,): indices that bring the residual stream, `stream[to_sequence]`, into sequence order."""
    to_stream: Tensor
    """(positions,): inverse of `to_sequence`."""
    cos: Tensor
    sin: Tensor
    """(positions, 1, head size): rotary tables in sequence order."""
    cu_seqlens: Tensor
    """(sequences + 1,) int32: where sequences begin and end."""
    lengths: tuple[int, ...]
    """Lengths of the sequences if attention runs one by one; empty if one call takes all."""
    max_seqlen: int
    """Upper bound of the longest sequence."""
    tiles: tuple[Tensor, ...] | None = None
    """Tile tables of our own attention kernels; None if torch's kernels are used."""

    @classmethod
    def from_batch(cls, core: Any, batch: HiggsBatch, stream: Tensor) -> Self:
        cos, sin = rotary_tables(core, batch.position_ids, stream)
        varlen = supports_varlen_attention(stream)
        # Rounded, and without lengths, because a compiled layer is recompiled for every new number.
        max_seqlen = -(-max(batch.lengths) // 1024) * 1024
        lengths = () if varlen else batch.lengths
        tiles = None
        if varlen and supports_tiled_attention(stream):
            tiles = _kernels().AttentionTileTables.from_cu_seqlens(batch.cu_seqlens, len(stream))
        return cls(batch.to_sequence, batch.to_stream, cos, sin, batch.cu_seqlens, lengths, max_seqlen, tiles)

    def rotate_and_attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Rotate queries and keys, then `attend`."""
        q, k = (apply_rotary(x, self.cos, self.sin).to(v.dtype) for x in (q, k))
        return self.attend(q, k, v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend causally inside each sequence; (positions, heads, head size) in sequence order."""
        if self.lengths:
            return packed_causal_attention(q, k, v, self.lengths)
        from myna.models.higgs_v2.varlen import varlen_causal_attention

        return varlen_causal_attention(q, k, v, self.cu_seqlens, self.max_seqlen)

    def attend_tiled(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with our own kernels if they apply. Not for compiled layers."""
        if self.tiles is None or q.dtype not in (torch.bfloat16, torch.float16) or q.shape[2] not in TILED_HEAD_SIZES:
            return self.attend(q, k, v)
        return _TiledAttention.apply(q, k, v, self.tiles)  # type: ignore[no-untyped-call,no-any-return]


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiles: tuple[Tensor, ...]) -> Tensor:
        out, log2sumexp = _kernels().tiled_attention(q, k, v, tiles)
        ctx.save_for_backward(q, k, v, out, log2sumexp)
        ctx.tiles = tiles
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return *_kernels().tiled_attention_backward(d_outputs[0].contiguous(), *ctx.saved_tensors, ctx.tiles), None


@cache
def _kernels() -> Any:
    return import_module("myna.models.higgs_v2.fused.attention_kernels")


def supports_tiled_attention(like: Tensor) -> bool:
    """Return whether our own attention kernels run on this GPU. docs/benchmarks/attention.json has what they save."""
    return supports_triton(like) and torch.cuda.get_device_capability(like.device)[0] == TILED_CAPABILITY_MAJOR


def attention_tile_table(cu_seqlens: Tensor, positions: int, size: int) -> Tensor:
    """(tiles, 3) int32: start and length of a tile's sequence, and the tile's first position in it. Computed on the GPU
    without waiting for it. The number of rows is the most that sequences of so many positions could need; unused rows
    have length 0."""
    starts, lengths = cu_seqlens[:-1], cu_seqlens.diff()
    ends = (-(-lengths // size)).cumsum(0)
    tile = torch.arange(positions // size + len(lengths), device=cu_seqlens.device)
    sequence = torch.searchsorted(ends, tile, right=True)
    used, sequence = sequence < len(lengths), sequence.clamp(max=len(lengths) - 1)
    # The last tiles of a sequence attend to the most keys, so they start first.
    first = (ends[sequence] - 1 - tile) * size
    return torch.stack([starts[sequence], lengths[sequence] * used, first * used], dim=1).int()


def supports_varlen_attention(like: Tensor) -> bool:
    """Return whether torch's variable-length attention runs on such a stream, whose type autocast may change."""
    autocast = torch.is_autocast_enabled(like.device.type) if like.is_cuda else False
    dtype = torch.get_autocast_dtype(like.device.type) if autocast else like.dtype
    capable = like.is_cuda and torch.cuda.get_device_capability(like.device) >= VARLEN_CAPABILITY
    return capable and dtype in (torch.bfloat16, torch.float16)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads by their positions; cos and sin are (positions, 1, head size)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def rotary_tables(core: Any, position_ids: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the positions, (positions, 1, head size)."""
    cos, sin = core.model.rotary_emb(like, position_ids[None])
    return cos[0].unsqueeze(1), sin[0].unsqueeze(1)


AttentionFunction = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer number, q, k, v), each (positions, heads, head size) in stream order -> (positions, heads, head size)."""


def embed_inputs(core: Any, text_ids: Tensor, codes: Tensor) -> Tensor:
    """Return the residual stream before the first layer. A trained embedding is fp32, and cast to the other's type."""
    text = core.model.embed_tokens(text_ids)
    return torch.cat([text, core.model.embed_audio_tokens(codes).to(text.dtype)])


def run_layer(layer: Any, stream: Tensor, num_text: int, attend: AttentionFunction) -> Tensor:
    """Run one decoder layer. The first `num_text` rows of the residual stream are text, the rest audio."""
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


class _PermuteRows(torch.autograd.Function):
    """Permutation `x[order]`, given its inverse, whose backward pass is a gather. Autograd's own would sort and
    accumulate, as rows might repeat."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor) -> tuple[Tensor | None, ...]:
        [inverse] = ctx.saved_tensors
        return d_outputs[0].index_select(0, inverse), None, None


class PackedLayer(nn.Module):
    """Decoder layer over packed sequences, as a module that can be sharded, compiled and recomputed."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self,
        stream: Tensor,
        update: Tensor | None,
        num_text: int,
        packing: PackedAttention,
        output: OutputRows | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layer like `FusedLoraLayer.forward`, except that no update is left to add."""
        assert update is None

        def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            orders = packing.to_sequence, packing.to_stream
            q, k, v = (_PermuteRows.apply(x, *orders) for x in (q, k, v))  # type: ignore[no-untyped-call]
            return _PermuteRows.apply(packing.rotate_and_attend(q, k, v), *orders[::-1])  # type: ignore[no-untyped-call,no-any-return]

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
        # Imported here because PEFT comes with it, which speaking does not need.
        from myna.models.higgs_v2.fused import FusedLoraLayer, can_fuse
        from myna.models.higgs_v2.fused.linear import WeightCopies

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

    def hidden(self, batch: HiggsBatch, *, output: OutputRows | None = None) -> Tensor:
        """Return the residual stream after the last layer, before the final norm: all of it, or the `output` rows."""
        core = get_base_model(self.model)
        self._weight_copies.refresh()
        stream, update, num_text = embed_inputs(core, batch.text_ids, batch.codes), None, len(batch.text_ids)
        packing = PackedAttention.from_batch(core, batch, stream)
        for number, layer in enumerate(self.layers, start=1):
            # The first layers are recomputed: when the backward pass reaches them, the others' activations are freed.
            recompute = number <= self.recompute and self.training
            if recompute and update is not None:
                # The layer would fuse this addition, but then both summands would be kept for the recomputation.
                stream, update = stream + update, None
            arguments = (stream, update, num_text, packing, output if number == len(self.layers) else None)
            if recompute:
                stream, update = checkpoint(layer, *arguments, use_reentrant=False)
            else:
                stream, update = layer(*arguments)
        return stream if update is None else stream + update

    def forward(self, batch: HiggsBatch) -> LossSums:
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
        return LossSums(sums, correct, stops)

    def _losses(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(targets, loss terms, classes) -> summed losses (loss terms,), and hits (targets, loss terms)."""
        losses, hits = cross_entropy(logits.flatten(0, 1), targets.flatten(), self.label_smoothing)
        return losses.view(targets.shape).sum(0), hits.view(targets.shape)
