"""Decoding batch on a CUDA device. A whole step is one CUDA graph, and its results are read asynchronously."""

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from myna.core.compat import scaled_mm
from myna.models.base import IGNORE_INDEX, RenderedSequence, StepResult
from myna.models.code_sampling import MAX_REPETITION_WINDOW, RowState
from myna.models.higgs_v2.decode import HiggsDecoder, audio_positions, kernels, run_layers, sampling_kernels, weights
from myna.models.higgs_v2.decode.weights import Weight, WeightFormat
from myna.models.higgs_v2.forward import apply_rotary, embed_inputs

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Batch sizes that graphs are captured for. A batch between two of them runs as the larger."""
DEPENDENT_LAUNCH_CAPABILITY = (9, 0)
"""First compute capability with programmatic dependent launch."""
RESULT_BUFFERS = 4
"""Number of steps whose results may wait for the host, more than `steps_ahead`."""
PROMPT_BUCKET = 64
"""Positions that prompts are padded to a multiple of, in text and in audio, so that few graphs serve all."""
WARM_TEXT, WARM_AUDIO = 256, 448
"""Positions of the largest prompt that a graph is captured for in advance: 1,000 letters, and a reference of 17 s."""
LOG2_E = 1.4426950408889634
ADAPTER_CHUNK = 16
"""Ranks of an adapter that a kernel reads at once."""
GATE_OUTPUTS, GATE_RANKS = 64, 64
"""Outputs and ranks of a tile of SwiGLU with adapters."""
ROTATED_HEADS = 4
"""Largest number of heads that a program rotates. With adapters it rotates one."""
NORM_WARPS, ADAPTED_NORM_WARPS = 8, 16
"""Warps of the norm kernel in a decoder without and with adapter slots; the order of a sum depends on it."""


class DecodeAttentionTile(NamedTuple):
    """Tile sizes of the attention kernel."""

    split: int
    """Positions per program."""
    block: int
    warps: int
    stages: int


def decode_attention_tile(rows: int) -> DecodeAttentionTile:
    """Choose tile sizes: few rows share their context among many programs, many rows are many programs already."""
    return DecodeAttentionTile(128, 64, 4, 2) if rows <= 8 else DecodeAttentionTile(1024, 32, 4, 4)


class PromptGraph(NamedTuple):
    """CUDA graph of the prefill of a prompt of at most this many text and audio positions."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    """Row, text ids, codes, and the order of the residual stream, one after another."""


class CudaDecoder(HiggsDecoder):
    """`SpeechDecoder` whose steps are CUDA graphs, one per bucket of rows, captured when first needed."""

    steps_ahead = 2

    def _allocate(self) -> None:
        super()._allocate()
        core, rows, books, device = self.core, self.rows, self.delay.codebooks, self.device
        config, dtype = core.config, self.keys[0].dtype
        hidden: int = config.hidden_size
        self._h = torch.empty(rows, hidden, dtype=torch.float32, device=device)
        self._q = torch.empty(rows, self.heads * self.head_dim, dtype=dtype, device=device)
        self._attended = torch.empty_like(self._q)
        self._gated = torch.empty(rows, config.intermediate_size, dtype=dtype, device=device)
        self._logits = torch.empty(rows, books * self.classes, dtype=torch.float32, device=device)
        smallest_split = min(decode_attention_tile(bucket).split for bucket in ROW_BUCKETS)
        parts = rows * self.heads * triton.next_power_of_2(-(-self.max_positions // smallest_split))
        self._partial_sums = torch.empty(parts, self.head_dim, dtype=torch.float32, device=device)
        self._partial_norms = torch.empty(parts, 2, dtype=torch.float32, device=device)
        self._arrivals = torch.zeros(rows, self.kv_heads, dtype=torch.int32, device=device)
        half = self.head_dim // 2
        self._half_cos = self._cos[:, 0, :half].float().contiguous()
        self._half_sin = self._sin[:, 0, half:].float().contiguous()
        self._table = core.model.embed_audio_tokens.embed_audio_tokens.weight
        self._result = torch.empty(rows, 2 * books + 1, dtype=torch.int32, device=device)
        self._host = torch.empty(RESULT_BUFFERS, rows, 2 * books + 1, dtype=torch.int32, pin_memory=True)
        self._copied = [torch.cuda.Event() for _ in range(RESULT_BUFFERS)]  # type: ignore[no-untyped-call]
        self._steps = 0
        self._graphs: dict[tuple[int, int, int], torch.cuda.CUDAGraph] = {}
        """Graphs of steps, by rows, slots in use and `_adapter_version`."""
        self._prompt_graphs: dict[tuple[int, int, int], PromptGraph] = {}
        """Graphs of prompts, by text positions, audio positions and `_adapter_version`."""
        self._pool: Any = None
        self._format: WeightFormat | None = "plain" if self._layers is not None else weights.packed_format(core)
        self._packed = weights.pack_weights(core) if self._layers is None and self._format is not None else None
        self._text_layers = weights.join_text_weights(core) if self._layers is not None else []
        self._levels = None
        if self._format == "nf4":
            pairs = core.model.layers[0].self_attn.q_proj.level_pairs
            self._levels = pairs.contiguous().view(torch.int32).flatten()
        # Products of several rows are in fp8; int8 and nf4 are unpacked for them.
        self._fp8_products = self._packed is not None and self._packed[0].qkv.values.dtype == torch.float8_e4m3fn
        if self._fp8_products:
            wide = config.intermediate_size
            self._codes8 = torch.empty(rows, max(hidden, wide), dtype=torch.float8_e4m3fn, device=device)
            self._scales8 = torch.empty(rows, 1, dtype=torch.float32, device=device)
        self._norm_warps = NORM_WARPS if self.adapters is None else ADAPTED_NORM_WARPS
        # The kernel may start while the one before it ends, on GPUs that support it.
        self._dependent = torch.cuda.get_device_capability(device) >= DEPENDENT_LAUNCH_CAPABILITY

    def warm_up(self) -> None:
        """Capture the graphs of prompts up to `WARM_TEXT` and `WARM_AUDIO` positions, without adapters."""
        config, books = self.core.config, self.delay.codebooks
        for text in range(PROMPT_BUCKET, WARM_TEXT + 1, PROMPT_BUCKET):
            for audio in range(0, WARM_AUDIO + 1, PROMPT_BUCKET):
                ids = np.repeat([config.bos_token_id, config.audio_token_id], [text, audio])
                codes = np.zeros((audio, books), np.int64)
                ignored = (np.full_like(ids, IGNORE_INDEX), np.full_like(codes, IGNORE_INDEX))
                if text + audio <= self.max_positions:
                    self.prefill(0, RenderedSequence("warm-up", ids, codes, *ignored, spans=(), target_seconds=0.0))

    @torch.inference_mode()
    def prefill(self, row: int, prompt: RenderedSequence) -> None:
        """Replay the graph of the prompt's size. No position attends to the padding, which later frames overwrite."""
        is_audio = audio_positions(prompt, self.core.config)
        text, audio = np.flatnonzero(~is_audio), np.flatnonzero(is_audio)
        sizes = [-(-len(part) // PROMPT_BUCKET) * PROMPT_BUCKET for part in (text, audio)]
        if sum(sizes) > self.max_positions:
            super().prefill(row, prompt)
            return
        padding = np.arange(len(prompt), sum(sizes))
        spare = sizes[0] - len(text)
        order = np.concatenate([text, padding[:spare], audio, padding[spare:]])
        text_ids = np.pad(prompt.ids[~is_audio], (0, spare))
        codes = np.pad(prompt.codes, ((0, sizes[1] - len(audio)), (0, 0)))
        inputs = torch.from_numpy(np.concatenate([[row], text_ids, codes.ravel(), order]))
        key = (sizes[0], sizes[1], self._adapter_version(self._row_slots[row] >= 0))
        if key not in self._prompt_graphs:
            self._prompt_graphs[key] = self._capture_prefill(*key, inputs)
        graph = self._prompt_graphs[key]
        graph.inputs.copy_(inputs.pin_memory(), non_blocking=True)
        graph.graph.replay()

    def _capture_prefill(self, text: int, audio: int, adapter_version: int, inputs: Tensor) -> PromptGraph:
        """Capture the graph of a prompt size. The first inputs warm it up, in the row that they are meant for."""
        static, books = inputs.to(self.device), self.delay.codebooks
        row, text_ids, codes, order = torch.split(static, [1, text, audio * books, text + audio])

        def run() -> None:
            parts = (row, text_ids, codes.view(audio, books), order)
            if self._text_layers and not adapter_version:
                self._prefill_joined(*parts)
            else:
                self._prefill(*parts, adapter_version > 0)

        return PromptGraph(self._captured(run), static)

    def _prefill_joined(self, row: Tensor, text_ids: Tensor, codes: Tensor, order: Tensor) -> None:
        """Run `_prefill` for plain weights in few kernels. The last layer only needs keys and values."""
        stream, texts = embed_inputs(self.core, text_ids, codes), len(text_ids)
        length, epsilon = len(stream), self.core.config.rms_norm_eps
        h, x, update = stream.float(), torch.empty_like(stream), None
        q = x.new_empty(1, self.heads, length, self.head_dim)
        k, v = (x.new_empty(1, self.kv_heads, length, self.head_dim) for _ in range(2))

        def add_and_normalize(update: Tensor | None, norms: tuple[Tensor, Tensor]) -> None:
            for first, last, norm in ((0, texts, norms[0]), (texts, length, norms[1])):
                if first < last:
                    added = None if update is None else update[first:]
                    kernels.add_rms_norm_kernel[(last - first,)](
                        *(h[first:], added, norm, x[first:], *(None,) * 6, epsilon, x.shape[1], 0, x.shape[1]),
                        BLOCK=triton.next_power_of_2(x.shape[1]),
                        **{"ADD": update is not None, "RANK": 0, "CHUNK": 0, "QUANTIZE": False, "DEPENDENT": False},
                        num_warps=self._norm_warps,
                    )

        for number, (audio, text) in enumerate(zip(self._layers or (), self._text_layers, strict=True)):
            add_and_normalize(update, (text.attention_norm, audio.attention_norm))
            kernels.place_prompt_kernel[length, self.heads + 2 * self.kv_heads](
                *(F.linear(x, audio.qkv.values), q, k, v, self.keys[number], self.values[number]),
                *(self._half_cos, self._half_sin, order, row, length, self.max_positions),
                *(self.heads, self.kv_heads, self.head_dim),
                num_warps=1,
            )
            if number + 1 == len(self._text_layers):
                return
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
            attended = attended[0].transpose(0, 1)[order].flatten(1)
            add_and_normalize(F.linear(attended, audio.out.values), (text.mlp_norm, audio.mlp_norm))
            update = torch.empty_like(x)
            for first, last, own in ((0, texts, text), (texts, length, audio)):
                if first < last:
                    gate_up = F.linear(x[first:last], own.gate_up.values)
                    gated = gate_up.new_empty(last - first, gate_up.shape[1] // 2)
                    kernels.silu_multiply_kernel[last - first, triton.cdiv(gated.shape[1], 1024)](
                        gate_up, gated, None, None, gated.shape[1], 1024, False, False
                    )
                    torch.mm(gated, own.down.values.t(), out=update[first:last])

    @torch.inference_mode()
    def step(self, rows: int, longest: int) -> "EnqueuedStep":  # noqa: ARG002 - the graph reads the lengths itself
        used = self.slots_in_use(rows)
        version = self._adapter_version(used > 0)
        key = (self.bucket(rows), used, version)
        if key not in self._graphs:
            self._graphs[key] = self._capture_step(key[0], adapted=version > 0)
        self._graphs[key].replay()
        number = self._steps % RESULT_BUFFERS
        self._host[number, :rows].copy_(self._result[:rows], non_blocking=True)
        self._copied[number].record()
        self._steps += 1
        return EnqueuedStep(self._host[number, :rows], self._copied[number], self.delay.codebooks)

    def bucket(self, rows: int) -> int:
        """Return the batch size that this many rows run as."""
        if self.exact:
            return self.rows
        return min((size for size in ROW_BUCKETS if rows <= size <= self.rows), default=self.rows)

    def _adapter_version(self, adapted: bool) -> int:
        """Return 0 without adapters, else the version of the adapters' tensors; graphs of old versions are dropped."""
        if self.adapters is None or not adapted:
            return 0
        version = self.adapters.version
        self._graphs = {key: graph for key, graph in self._graphs.items() if key[-1] in (0, version)}
        self._prompt_graphs = {key: graph for key, graph in self._prompt_graphs.items() if key[-1] in (0, version)}
        if not self._graphs and not self._prompt_graphs:
            self._pool = None  # memory of graphs is freed with the last of them
        return version

    def slots_in_use(self, rows: int) -> int:
        """Return how many adapter slots a step multiplies by: as few as its rows need, or all in `exact` mode."""
        if self.adapters is None:
            return 0
        if self.exact:
            return self.adapters.capacity
        return self.adapters.slots_in_use(self._row_slots[:rows])

    def _capture_step(self, rows: int, adapted: bool) -> torch.cuda.CUDAGraph:
        saved = {field.name: getattr(self.state, field.name).clone() for field in fields(self.state)}
        self.state.active.zero_()  # the warm-up advances no row
        graph = self._captured(lambda: self._launch_step(rows, adapted))
        for name, tensor in saved.items():
            getattr(self.state, name).copy_(tensor)
        return graph

    def _captured(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture what a function launches. It is called once before, so that kernels are compiled. Copies of weights
        that autocast keeps must be made inside the graph, because the weights may change between replays."""
        torch.clear_autocast_cache()
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            launch()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        torch.clear_autocast_cache()
        graph = torch.cuda.CUDAGraph()
        # Another thread may encode references meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            launch()
        torch.clear_autocast_cache()
        self._pool = graph.pool()
        return graph

    def _launch_step(self, rows: int, adapted: bool) -> None:
        state, hidden, books = self.state, self._h.shape[1], self.delay.codebooks
        single = rows == 1 and not adapted
        if self._layers is not None or self._packed is not None:
            kernels.embed_kernel[rows, triton.cdiv(hidden, 1024)](
                state.codes, self._table, self._h, hidden, books, self.classes, BLOCK=1024
            )
            if single:
                self._vector_layers()
            else:
                self._matrix_layers(rows, adapted)
        else:
            self._launch_modules(rows, adapted)
        sampling_kernels.sample_kernel[rows, books](
            *(self._logits, state.codes, self._result, state.frames, state.ends, state.caps, state.seeds),
            *(state.temperatures, state.top_ks, state.top_ps, state.windows, state.limits, state.history),
            *(books, self.classes, triton.next_power_of_2(self.classes), self.delay.begin, self.delay.end),
            HISTORY=MAX_REPETITION_WINDOW,
            num_warps=4,
        )
        sampling_kernels.advance_kernel[(triton.cdiv(rows, 32),)](
            *(state.codes, self._result, state.frames, state.ends, state.positions, state.active, state.history, rows),
            *(books, self.delay.end),
            HISTORY=MAX_REPETITION_WINDOW,
            BLOCK=32,
            num_warps=1,
        )

    def _launch_modules(self, rows: int, adapted: bool) -> None:
        """Run layers and head through transformers' modules: in training, or with an adapter in the model."""
        core, positions = self.core, self.state.positions[:rows]
        row = torch.arange(rows, device=self.device)
        cos, sin = self._cos[positions], self._sin[positions]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
            self.keys[layer][row, :, positions] = k.to(self._q.dtype)
            self.values[layer][row, :, positions] = v.to(self._q.dtype)
            self._q[:rows] = q.flatten(1)
            self._attend(layer, rows)
            return self._attended[:rows].view(rows, self.heads, self.head_dim)

        stream, delta = embed_inputs(core, self.state.codes.new_empty(0), self.state.codes[:rows]), None
        if adapted and self.adapters is not None:
            delta = self.adapters.row_deltas(self.state.adapters[:rows], self.state.strengths[:rows])
        self._logits[:rows] = core.audio_lm_head(core.model.norm(run_layers(core, stream, 0, attend, delta)))

    def _product(self, kernel: Any, outputs: int, per_program: int, *arguments: Any, **sizes: Any) -> None:
        """Launch a product kernel with `per_program` outputs per program, and as many weights for each of them."""
        kernel[(triton.cdiv(outputs, per_program),)](
            *arguments,
            **sizes,
            BLOCK_N=per_program,
            BLOCK_K=triton.next_power_of_2(sizes["K"]),
            DEPENDENT=self._dependent,
            num_warps=4,
            launch_pdl=self._dependent,
        )

    def _vector_layers(self) -> None:
        """Run layers and head for a single row: five kernels a layer."""
        hidden, inner, wide = self._h.shape[1], self._q.shape[1], self._gated.shape[1]
        core, levels, epsilon = self.core, self._levels, self.core.config.rms_norm_eps
        for number, layer in enumerate(self._layers or self._packed or []):
            qkv, out, gate_up, down = (
                (weight.values, weight.scales) for weight in (layer.qkv, layer.out, layer.gate_up, layer.down)
            )
            self._product(
                *(kernels.qkv_kernel, (self.heads + 2 * self.kv_heads) * self.head_dim // 2, 2),
                *(self._h, layer.attention_norm, *qkv, levels, self._q, self.keys[number], self.values[number]),
                *(self._half_cos, self._half_sin, self.state.positions, epsilon, self.max_positions),
                **{"K": hidden, "HEADS": self.heads, "KV_HEADS": self.kv_heads, "D": self.head_dim},
                FORMAT=self._format,
            )
            self._attend(number, 1, dependent=self._dependent)
            arguments = (kernels.residual_kernel, hidden, 2, self._attended, *out, levels, self._h)
            self._product(*arguments, K=inner, FORMAT=self._format)
            self._product(
                *(kernels.swiglu_kernel, wide, 2, self._h, layer.mlp_norm, *gate_up, levels, self._gated, epsilon),
                **{"K": hidden, "N": wide},
                FORMAT=self._format,
            )
            arguments = (kernels.residual_kernel, hidden, 2, self._gated, *down, levels, self._h)
            self._product(*arguments, K=wide, FORMAT=self._format)
        outputs, head = len(core.audio_lm_head.weight), core.audio_lm_head.weight
        self._product(
            *(kernels.head_kernel, outputs, 4, self._h, core.model.norm.weight, head, self._logits, epsilon),
            **{"K": hidden, "N": outputs},
        )

    def _attend(self, number: int, rows: int, *, dependent: bool = False) -> None:
        tile = decode_attention_tile(rows)
        splits = triton.cdiv(self.max_positions, tile.split)
        kernels.decode_attention_kernel[rows, self.kv_heads, splits](
            *(self._q, self.keys[number], self.values[number], self.state.positions),
            *(self._partial_sums, self._partial_norms, self._arrivals, self._attended),
            *(self.head_dim**-0.5 * LOG2_E, self.max_positions),
            *(self.kv_heads, self.heads // self.kv_heads, self.head_dim),
            SPLIT=tile.split,
            MAX_SPLITS=triton.next_power_of_2(splits),
            BLOCK_T=tile.block,
            DEPENDENT=dependent,
            num_warps=tile.warps,
            num_stages=tile.stages,
            launch_pdl=dependent,
        )

    def _matrix_layers(self, rows: int, adapted: bool) -> None:
        """Run layers and head for several rows: cuBLAS's products, and between them our kernels, which add adapters."""
        core, layers = self.core, self._layers or self._packed or []
        x = torch.empty(rows, self._h.shape[1], dtype=self._q.dtype, device=self.device)
        batch = MatrixBatch(self, rows, adapted)
        group = 1 if adapted else math.gcd(ROTATED_HEADS, self.heads, self.kv_heads)
        batch.add_and_normalize(None, layers[0].attention_norm, x)
        for number, layer in enumerate(layers):
            qkv = batch.product(x, layer.qkv, "qkv", number)
            kernels.rotate_and_store_kernel[rows, (self.heads + 2 * self.kv_heads) // group](
                *(qkv.values, self._q, self.keys[number], self.values[number], self._half_cos, self._half_sin),
                *(self.state.positions, *qkv.adapters, self.max_positions, *qkv.strides),
                *(self.heads, self.kv_heads, self.head_dim, group, batch.rank, batch.chunk, self._dependent),
                num_warps=group,
                launch_pdl=self._dependent,
            )
            self._attend(number, rows, dependent=self._dependent)
            attended = self._attended[:rows]
            batch.quantize(attended)
            batch.add_and_normalize(batch.product(attended, layer.out, "out", number), layer.mlp_norm, x)
            batch.gate(batch.product(x, layer.gate_up, "gate_up", number))
            norm = layers[number + 1].attention_norm if number + 1 < len(layers) else core.model.norm.weight
            batch.add_and_normalize(batch.product(self._gated[:rows], layer.down, "down", number), norm, x)
        self._logits[:rows] = F.linear(x, core.audio_lm_head.weight)


class Product(NamedTuple):
    """Outputs of a product, and the input of the kernel that adds the adapters' part to them."""

    values: Tensor
    shrunk: Tensor | None
    """(rows, slots, projections, rank): input multiplied by the A of the slots in use."""
    b: Tensor | None
    state: RowState

    @property
    def adapters(self) -> tuple[Tensor | None, ...]:
        return self.shrunk, self.b, self.state.adapters, self.state.strengths

    @property
    def strides(self) -> tuple[int, int]:
        return self.values.stride(0), 0 if self.shrunk is None else self.shrunk.stride(0)


class MatrixBatch:
    """Products of several rows in one step, with the adapters of those rows if there are any."""

    def __init__(self, decoder: CudaDecoder, rows: int, adapted: bool) -> None:
        self.decoder, self.rows = decoder, rows
        self.adapters = decoder.adapters if adapted else None
        self.rank = 0 if self.adapters is None else self.adapters.rank
        self.chunk = min(self.rank, ADAPTER_CHUNK)
        self.quantized = decoder._fp8_products
        self.codes = (decoder._codes8, decoder._scales8) if self.quantized else (None, None)

    def product(self, x: Tensor, weight: Weight, group: str, layer: int) -> Product:
        """Return x W' and x A', in one product if A lies below W. In fp8, x is read in its last quantization."""
        decoder, state = self.decoder, self.decoder.state
        if self.adapters is None:
            return Product(self._multiply(x, weight), None, None, state)
        a, b, _, extended = self.adapters.groups[group][layer]
        outputs, used = b.shape[2], decoder.slots_in_use(self.rows)
        ranks = used * a.shape[1] * a.shape[2]
        if extended is not None:
            y = F.linear(x, extended[: outputs + ranks])
            return Product(y, y[:, outputs:], b, state)
        return Product(self._multiply(x, weight), F.linear(x, a[:used].flatten(0, 2)), b, state)

    def _multiply(self, x: Tensor, weight: Weight) -> Tensor:
        decoder, inputs = self.decoder, x.shape[1]
        if weight.scales is None:
            return F.linear(x, weight.values)
        if self.quantized:
            codes = decoder._codes8.flatten()[: self.rows * inputs].view(self.rows, inputs)
            scales = {"scale_a": decoder._scales8[: self.rows], "scale_b": weight.scales[None]}
            return scaled_mm(codes, weight.values.t(), **scales, out_dtype=torch.bfloat16)
        outputs = len(weight.values)
        values = torch.empty(outputs, inputs, dtype=x.dtype, device=x.device)
        kernels.unpack_kernel[(outputs // 2,)](
            *(weight.values, weight.scales, decoder._levels, values),
            K=inputs,
            BLOCK_N=2,
            BLOCK_K=triton.next_power_of_2(inputs),
            FORMAT=decoder._format,
        )
        return F.linear(x, values)

    def add_and_normalize(self, update: Product | None, norm: Tensor, x: Tensor) -> None:
        """Add an update to the residual stream, and write its norm to x, also in fp8 if products are in fp8."""
        decoder, hidden = self.decoder, x.shape[1]
        arguments: tuple[Any, ...] = (None, (None,) * 4, (0, 0))
        if update is not None:
            arguments = (update.values, update.adapters, update.strides)
        values, adapters, strides = arguments
        kernels.add_rms_norm_kernel[(self.rows,)](
            *(decoder._h, values, norm, x, *self.codes, *adapters, decoder.core.config.rms_norm_eps, *strides, hidden),
            BLOCK=triton.next_power_of_2(hidden),
            ADD=update is not None,
            RANK=self.rank if update is not None else 0,
            CHUNK=self.chunk,
            QUANTIZE=self.quantized,
            DEPENDENT=decoder._dependent,
            num_warps=decoder._norm_warps,
            launch_pdl=decoder._dependent,
        )

    def gate(self, gate_up: Product) -> None:
        """Compute SwiGLU, also in fp8 if products are in fp8."""
        gated, rows, dependent = self.decoder._gated, self.rows, self.decoder._dependent
        wide = gated.shape[1]
        if gate_up.shrunk is None:
            block = triton.next_power_of_2(wide) if self.quantized else 1024
            kernels.silu_multiply_kernel[rows, triton.cdiv(wide, block)](
                *(gate_up.values, gated, *self.codes, wide, block, self.quantized, dependent),
                num_warps=8 if self.quantized else 4,
                launch_pdl=dependent,
            )
            return
        ranks = self.decoder.slots_in_use(rows) * self.rank
        block_ranks = max(16, min(GATE_RANKS, triton.next_power_of_2(ranks)))  # 16: smallest side of a product
        block_rows = min(64, max(16, triton.next_power_of_2(rows)))
        kernels.adapted_silu_multiply_kernel[triton.cdiv(rows, block_rows), triton.cdiv(wide, GATE_OUTPUTS)](
            *(gate_up.values, gated, *gate_up.adapters, rows, ranks, *gate_up.strides),
            *(wide, self.rank, block_rows, GATE_OUTPUTS, block_ranks, dependent),
            num_warps=4,
            num_stages=3,
            launch_pdl=dependent,
        )
        self.quantize(gated[:rows])

    def quantize(self, x: Tensor) -> None:
        """Quantize rows if products are in fp8."""
        if self.quantized:
            block = triton.next_power_of_2(x.shape[1])
            kernels.quantize_rows_kernel[(self.rows,)](x, *self.codes, x.shape[1], BLOCK=block)


class EnqueuedStep:
    """`PendingStep` on a CUDA stream."""

    def __init__(self, host: Tensor, copied: torch.cuda.Event, codebooks: int) -> None:
        self._host, self._copied, self._codebooks = host, copied, codebooks

    def result(self) -> StepResult:
        self._copied.synchronize()
        books = self._codebooks
        host = self._host.clone()
        return StepResult(host[:, :books].long(), host[:, books : 2 * books].view(torch.float32), host[:, -1])
