"""Decoding batch of Higgs Audio v2: a cache of fixed rows, filled by prompts, and one frame of every row per step.

It runs on any device; `cuda.py` runs the same step as a CUDA graph. Plain weights are joined and read without
transformers' modules; a model in training, an unmerged adapter or a quantized base goes through its own modules. Each
row may use an adapter of its own (`weights.py`).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from myna.core.compat import foreach_copy
from myna.models.base import Number, PendingStep, RenderedSequence, Sampling, StepHistory, StepResult
from myna.models.code_sampling import RowState, advance, log_probabilities, sample_frame
from myna.models.higgs_v2.decode import weights
from myna.models.higgs_v2.decode.weights import AdapterDelta, HiggsAdapterSlots, LayerWeights, Weight
from myna.models.higgs_v2.forward import AttentionFunction, apply_rotary, embed_inputs, rotary_tables, run_layer
from myna.models.higgs_v2.render import DelayPattern

CPU_SLABS, MAX_SLAB_ROWS = 8, 8
"""Number of parts that a CPU splits a small model's weight into, and the most rows it does so for."""


class HiggsDecoder:
    """`SpeechDecoder` on any device, one step at a time."""

    steps_ahead = 0

    def __init__(
        self,
        core: Any,
        delay: DelayPattern,
        rows: int,
        max_positions: int,
        adapters: HiggsAdapterSlots | None = None,
        exact: bool = False,
    ) -> None:
        self.core, self.delay, self.rows, self.max_positions = core, delay, rows, max_positions
        self.adapters, self.exact = adapters, exact
        self._row_slots = [-1] * rows
        """Copy of `state.adapters` on the host."""
        config = core.config
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim: int = core.model.layers[0].self_attn.head_dim
        self.classes: int = config.codebook_size
        self.device = core.audio_lm_head.weight.device
        self.state = RowState.create(rows, delay.codebooks, self.device)
        self._layers: list[LayerWeights] | None = None
        if weights.can_join(core):
            self._layers, self._head = weights.join_weights(core)
        self._allocate()

    def _allocate(self) -> None:
        """Allocate what all steps use: the cache and the rotary tables."""
        # Under autocast attention gets another type than the weights have.
        dtype = self.core.audio_lm_head.weight.dtype
        if torch.is_autocast_enabled(self.device.type):
            dtype = torch.get_autocast_dtype(self.device.type)
        size = (self.rows, self.kv_heads, self.max_positions, self.head_dim)
        layers = range(len(self.core.model.layers))
        # Zeros, because positions after a row's end are multiplied by a weight of zero.
        self.keys = [torch.zeros(size, dtype=dtype, device=self.device) for _ in layers]
        self.values = [torch.zeros(size, dtype=dtype, device=self.device) for _ in layers]
        positions = torch.arange(self.max_positions, device=self.device)
        like = self.keys[0].new_empty(0, dtype=torch.float32)
        self._cos, self._sin = rotary_tables(self.core, positions, like)
        first, second = self._sin.chunk(2, -1)
        self._signed_sin = torch.cat([-first, second], -1)

    def warm_up(self) -> None:
        """Do nothing: there is nothing to compile."""

    @torch.inference_mode()
    def prefill(self, row: int, prompt: RenderedSequence) -> None:
        parts = prompt_tensors(prompt, self.core.config, self.device)
        self._prefill(torch.tensor([row], device=self.device), *parts, self._row_slots[row] >= 0)

    def _prefill(self, row: Tensor, text_ids: Tensor, codes: Tensor, order: Tensor, adapted: bool) -> None:
        """Process one sequence into its row of the cache; position i of the stream is position `order[i]` there."""

        def store(layer: int, k: Tensor, v: Tensor) -> None:
            for cache, x in ((self.keys[layer], k), (self.values[layer], v)):
                cache[:, :, : x.shape[2]].index_copy_(0, row, x.to(cache.dtype))

        delta = None
        if self.adapters is not None and adapted:
            state = self.state
            delta = self.adapters.delta(state.adapters.index_select(0, row), state.strengths.index_select(0, row))
        run_prompt(self.core, text_ids, codes, order, store, delta)

    @torch.inference_mode()
    def use_adapter(self, row: int, slot: int, strength: float) -> None:
        self._row_slots[row] = slot
        self.state.adapters[row].fill_(slot)
        self.state.strengths[row].fill_(strength)

    @torch.inference_mode()
    def copy_prompt(self, source: int, target: int, positions: int) -> None:
        caches = (*self.keys, *self.values)
        if self.device.type == "cuda":  # whole rows in a few launches; one launch per layer takes ten times as long
            foreach_copy([cache[target] for cache in caches], [cache[source] for cache in caches])
            return
        for cache in caches:
            cache[target, :, :positions] = cache[source, :, :positions]

    @torch.inference_mode()
    def begin(self, row: int, positions: int, sampling: Sampling, max_frames: int) -> None:
        self.state.set_row(row, position=positions, sampling=sampling, max_frames=max_frames, begin=self.delay.begin)

    @torch.inference_mode()
    def move_row(self, source: int, target: int, positions: int) -> None:
        self.state.copy_row(source, target)
        self._row_slots[target] = self._row_slots[source]
        self.copy_prompt(source, target, positions)

    @torch.inference_mode()
    def end(self, row: int) -> None:
        self.state.active[row].fill_(0)
        self.state.positions[row].fill_(0)
        self.use_adapter(row, -1, 0.0)

    def bucket(self, rows: int) -> int:
        return rows

    def positions(self, prompt: RenderedSequence, max_frames: int) -> int:
        return len(prompt) + self.delay.positions(max_frames)

    def frames(self, delayed: StepHistory[Any], ended: bool) -> int:
        # Without the begin-of-stream frame, a clip of n frames takes n + codebooks frames; the last one ends it.
        return max(0, len(delayed) - self.delay.codebooks + (0 if ended else 1))

    def undelay(self, delayed: StepHistory[Number], start: int, stop: int) -> npt.NDArray[Number]:
        books = np.arange(self.delay.codebooks)
        part = np.array(delayed[start : max(start, stop) + len(books) - 1]).reshape(-1, len(books))
        return part[np.arange(max(0, stop - start))[:, None] + books, books]  # type: ignore[no-any-return]

    @torch.inference_mode()
    def step(self, rows: int, longest: int) -> PendingStep:
        if not self.exact:
            return self._step(0, rows, longest + 1)
        lengths = (self.state.positions[:rows] + 1).tolist()
        results = [self._step(row, 1, length) for row, length in enumerate(lengths)]
        return StepResult(*(torch.cat(parts) for parts in zip(*results, strict=True)))

    def _step(self, first: int, rows: int, length: int) -> StepResult:
        """Generate a frame of some rows, whose longest context will be `length`."""
        state = self.state.part(first, rows)
        hidden = self.core.model.norm(self._hidden(state, first, length))
        logits = self.core.audio_lm_head(hidden) if self._layers is None else _product(hidden, self._head)
        logits = logits.view(rows, self.delay.codebooks, self.classes).float()
        codes = sample_frame(logits, state, rows, self.delay.begin, self.delay.end)
        state.log_probs.copy_(log_probabilities(logits, codes))
        if not state.log_probs.isfinite().all():
            # The request ends with an error. In its row, a later request multiplies masked values by 0: NaN stays NaN.
            broken = ~state.log_probs.isfinite().all(1)
            for cache in (*self.keys, *self.values):
                cache[first : first + rows][broken] = 0
        advance(state, rows, codes, self.delay.end)
        return StepResult(codes.cpu(), state.log_probs.cpu().clone(), state.active.cpu().clone())

    def _hidden(self, state: RowState, first: int, length: int) -> Tensor:
        positions, rows = state.positions, len(state.positions)
        row = torch.arange(first, first + rows, device=self.device)
        mask = (torch.arange(length, device=self.device) <= positions[:, None])[:, None, None]

        def attend_single(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            """Attend for one row in plain products, which are faster than a fused kernel for so little work."""
            keys, values = self.keys[layer][first, :, :length], self.values[layer][first, :, :length]
            keys[:, -1], values[:, -1] = k[0], v[0]
            q = q.to(keys.dtype).reshape(self.kv_heads, -1, self.head_dim)
            attention = torch.matmul(q * self.head_dim**-0.5, keys.transpose(1, 2)).softmax(-1)
            return torch.matmul(attention, values).view(1, self.heads, self.head_dim)

        def attend_many(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            """Attend with one query per row. Heads that share keys are taken as positions: no key is repeated."""
            keys, values = self.keys[layer], self.values[layer]
            keys[row, :, positions] = k.to(keys.dtype)
            values[row, :, positions] = v.to(keys.dtype)
            keys, values = keys[:rows, :, :length], values[:rows, :, :length]
            q = q.to(keys.dtype).reshape(rows, self.kv_heads, -1, self.head_dim)
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask).flatten(1, 2)

        attend = attend_single if rows == 1 else attend_many
        stream = embed_inputs(self.core, state.codes.new_empty(0), state.codes)
        cos, delta = self._cos[positions], None
        if self.adapters is not None and any(slot >= 0 for slot in self._row_slots[first : first + rows]):
            delta = self.adapters.row_deltas(state.adapters, state.strengths)
        if self._layers is not None:
            sin = self._signed_sin[positions]
            for number, layer in enumerate(self._layers):
                stream = self._joined_layer(number, layer, stream, cos, sin, attend, delta)
            return stream
        sin = self._sin[positions]

        def rotate_and_attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(layer, apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v)

        return run_layers(self.core, stream, 0, rotate_and_attend, delta)

    def _joined_layer(
        self,
        number: int,
        layer: LayerWeights,
        stream: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Any,
        delta: AdapterDelta | None,
    ) -> Tensor:
        def project(group: str, x: Tensor, weight: Weight) -> Tensor:
            y = _product(x, weight)
            return y if delta is None else y + delta(group, number, x)

        epsilon = self.core.config.rms_norm_eps
        x = _rms_norm(stream, layer.attention_norm, epsilon)
        qkv = project("qkv", x, layer.qkv).view(len(x), -1, self.head_dim)
        qk, v = qkv[:, : -self.kv_heads], qkv[:, -self.kv_heads :]
        first, second = qk.chunk(2, -1)
        qk = torch.addcmul(qk * cos, torch.cat([second, first], -1), sin)
        attended = attend(number, qk[:, : self.heads], qk[:, self.heads :], v)
        stream = stream + project("out", attended.flatten(1), layer.out)
        x = _rms_norm(stream, layer.mlp_norm, epsilon)
        gate, up = project("gate_up", x, layer.gate_up).chunk(2, -1)
        return stream + project("down", F.silu(gate).mul_(up), layer.down)


def run_prompt(
    core: Any,
    text_ids: Tensor,
    codes: Tensor,
    order: Tensor,
    store: Callable[[int, Tensor, Tensor], None],
    delta: AdapterDelta | None = None,
) -> Tensor:
    """Return the residual stream of one sequence after the last layer. `store` gets the keys and values of every layer,
    (1, heads, positions, head size). Position i of the stream is position `order[i]` of the sequence."""
    stream, to_sequence = embed_inputs(core, text_ids, codes), order.argsort()
    cos, sin = rotary_tables(core, torch.arange(len(stream), device=stream.device), stream)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x[to_sequence] for x in (q, k, v))
        q, k = apply_rotary(q, cos, sin).to(v.dtype), apply_rotary(k, cos, sin).to(v.dtype)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        store(layer, k, v)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return attended[0].transpose(0, 1)[order]

    return run_layers(core, stream, len(text_ids), attend, delta)


def run_layers(
    core: Any, stream: Tensor, num_text: int, attend: AttentionFunction, delta: AdapterDelta | None
) -> Tensor:
    """Run all decoder layers through transformers' modules, and add what adapters add."""
    for layer in core.model.layers:
        if delta is None:
            stream = run_layer(layer, stream, num_text, attend)
        else:
            stream = weights.run_adapted_layer(layer, stream, num_text, attend, delta)
    return stream


def _product(x: Tensor, weight: Weight) -> Tensor:
    """Compute `F.linear`, with few rows on a CPU as products of slabs of the weight. That takes half to four fifths of
    the time: torch multiplies a single row on one core, and slower than memory is read."""
    outputs, inputs = weight.values.shape
    if weight.input_major is None or len(x) > MAX_SLAB_ROWS or outputs % CPU_SLABS:
        return F.linear(x, weight.values if weight.input_major is None else weight.input_major)
    slabs = weight.values.view(CPU_SLABS, -1, inputs)
    return torch.bmm(slabs, x.t().expand(CPU_SLABS, -1, -1)).view(outputs, len(x)).t().contiguous()


def _rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Compute the RMS norm; torch's own takes twice as long for a single row."""
    wide = x.float()
    return ((wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + epsilon)).to(x.dtype)) * weight


def prompt_tensors(prompt: RenderedSequence, config: Any, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return text ids, codes, and the order of the residual stream: text, then audio."""
    is_audio = audio_positions(prompt, config)
    order = np.concatenate([np.flatnonzero(~is_audio), np.flatnonzero(is_audio)])
    ids, codes, places = (torch.from_numpy(x).to(device) for x in (prompt.ids[~is_audio], prompt.codes, order))
    return ids, codes, places


def audio_positions(prompt: RenderedSequence, config: Any) -> npt.NDArray[np.bool_]:
    """Return a mask of the prompt's positions that are frames of audio."""
    return np.isin(prompt.ids, (config.audio_token_id, config.audio_delay_token_id))
