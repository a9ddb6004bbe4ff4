"""Decoding batch on a CUDA device: a whole step is one CUDA graph, and its results are read behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import triton

from myna.models.base import RenderedSequence
from myna.models.code_sampling import MAX_REPETITION_WINDOW
from myna.models.higgs_v2.decode import kernels
from myna.models.higgs_v2.decode.decoder import HiggsDecoder, audio_positions
from myna.models.higgs_v2.decode.weights import LayerWeights
from myna.models.higgs_v2.forward import embed_inputs, run_layer
from myna.models.higgs_v2.packing import apply_rotary
from myna.models.higgs_v2.render import DelayPattern
from myna.models.speech_decoder import StepResult

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Batch sizes that graphs are captured for; a batch between two of them runs as the larger."""
DEPENDENT_LAUNCH_CAPABILITY = (9, 0)
"""The first compute capability with programmatic dependent launch."""
RESULT_BUFFERS = 4
"""Steps whose results may wait for the host: more than `steps_ahead`."""
PROMPT_BUCKET = 64
"""Prompts are padded to a multiple of this, in text and in audio positions, so that few graphs serve all."""
LOG2_E = 1.4426950408889634


class DecodeAttentionTile(NamedTuple):
    """Tile sizes of the attention kernel."""

    split: int
    """Positions per program."""
    block: int
    warps: int
    stages: int


def decode_attention_tile(rows: int) -> DecodeAttentionTile:
    """Few rows share their context out among many programs; many rows are many programs already."""
    return DecodeAttentionTile(128, 64, 4, 2) if rows <= 8 else DecodeAttentionTile(1024, 32, 4, 4)


class PromptGraph(NamedTuple):
    """Prefill of a prompt of at most so many text and audio positions, as a CUDA graph."""

    graph: torch.cuda.CUDAGraph
    inputs: torch.Tensor
    """The row, text ids, codes, and the order of the stream, one after another."""


class CudaDecoder(HiggsDecoder):
    """`SpeechDecoder` whose steps are CUDA graphs, one per bucket of rows, captured when first needed."""

    steps_ahead = 2

    def __init__(self, core: Any, delay: DelayPattern, rows: int, max_positions: int) -> None:
        super().__init__(core, delay, rows, max_positions)
        config, device = core.config, self.device
        hidden, dtype = config.hidden_size, self.keys[0].dtype
        self._h = torch.empty(rows, hidden, dtype=torch.float32, device=device)
        self._q = torch.empty(rows, self.heads * self.head_dim, dtype=dtype, device=device)
        self._attended = torch.empty_like(self._q)
        self._gated = torch.empty(rows, config.intermediate_size, dtype=dtype, device=device)
        self._logits = torch.empty(rows, delay.codebooks * self.classes, dtype=torch.float32, device=device)
        smallest_split = min(decode_attention_tile(bucket).split for bucket in ROW_BUCKETS)
        parts = rows * self.heads * triton.next_power_of_2(-(-max_positions // smallest_split))
        self._partial_sums = torch.empty(parts, self.head_dim, dtype=torch.float32, device=device)
        self._partial_norms = torch.empty(parts, 2, dtype=torch.float32, device=device)
        self._arrivals = torch.zeros(rows, self.kv_heads, dtype=torch.int32, device=device)
        half = self.head_dim // 2
        self._rotary_sin = torch.cat([-self._sin[..., :half], self._sin[..., half:]], -1)
        self._half_cos = self._cos[:, 0, :half].float().contiguous()
        self._half_sin = self._sin[:, 0, half:].float().contiguous()
        self._table = core.model.embed_audio_tokens.embed_audio_tokens.weight
        books = delay.codebooks
        self._result = torch.empty(rows, 2 * books + 1, dtype=torch.int32, device=device)
        self._host = torch.empty(RESULT_BUFFERS, rows, 2 * books + 1, dtype=torch.int32, pin_memory=True)
        self._copied = [torch.cuda.Event() for _ in range(RESULT_BUFFERS)]  # type: ignore[no-untyped-call]
        self._steps = 0
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._prompt_graphs: dict[tuple[int, int], PromptGraph] = {}
        self._pool: Any = None
        # A kernel that may start while the one before it ends, on GPUs that can.
        self._dependent = torch.cuda.get_device_capability(device) >= DEPENDENT_LAUNCH_CAPABILITY

    @torch.inference_mode()
    def prefill(self, row: int, prompt: RenderedSequence) -> None:
        """Replay the graph of the prompt's size; padding stands behind its end, where nothing attends to it, and where
        the frames that follow overwrite it."""
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
        key = (sizes[0], sizes[1])
        if key not in self._prompt_graphs:
            self._prompt_graphs[key] = self._capture_prefill(*key, inputs)
        graph = self._prompt_graphs[key]
        graph.inputs.copy_(inputs.pin_memory(), non_blocking=True)
        graph.graph.replay()

    def _capture_prefill(self, text: int, audio: int, inputs: torch.Tensor) -> PromptGraph:
        """The first inputs warm it up, into the row that they are meant for."""
        static, books = inputs.to(self.device), self.delay.codebooks
        row, text_ids, codes, order = torch.split(static, [1, text, audio * books, text + audio])

        def run() -> None:
            self._prefill(row, text_ids, codes.view(audio, books), order)

        return PromptGraph(self._captured(run), static)

    @torch.inference_mode()
    def step(self, rows: int, longest: int) -> EnqueuedStep:  # noqa: ARG002 - the graph reads the lengths itself
        bucket = self.bucket(rows)
        if bucket not in self._graphs:
            self._graphs[bucket] = self._capture_step(bucket)
        self._graphs[bucket].replay()
        number = self._steps % RESULT_BUFFERS
        self._host[number, :rows].copy_(self._result[:rows], non_blocking=True)
        self._copied[number].record()
        self._steps += 1
        return EnqueuedStep(self._host[number, :rows], self._copied[number], self.delay.codebooks)

    def bucket(self, rows: int) -> int:
        """The batch size that so many rows run as."""
        return min((size for size in ROW_BUCKETS if rows <= size <= self.rows), default=self.rows)

    def _capture_step(self, rows: int) -> torch.cuda.CUDAGraph:
        saved = {field.name: getattr(self.state, field.name).clone() for field in fields(self.state)}
        self.state.active.zero_()  # the warm-up moves no row on
        graph = self._captured(lambda: self._launch_step(rows))
        for name, tensor in saved.items():
            getattr(self.state, name).copy_(tensor)
        return graph

    def _captured(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """A graph of what a function launches; it is called once before, so that kernels are compiled. Copies of
        weights that autocast keeps must be made inside the graph, which sees other weights every time."""
        torch.clear_autocast_cache()
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            launch()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        torch.clear_autocast_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            launch()
        torch.clear_autocast_cache()
        self._pool = graph.pool()
        return graph

    def _launch_step(self, rows: int) -> None:
        state, config, hidden = self.state, self.core.config, self._h.shape[1]
        books, epsilon = self.delay.codebooks, config.rms_norm_eps
        if self._layers is None:
            self._launch_modules(rows)
        else:
            kernels.embed_kernel[rows, triton.cdiv(hidden, 1024)](
                state.codes, self._table, self._h, hidden, books, self.classes, BLOCK=1024
            )
            for number, weights in enumerate(self._layers):
                if rows == 1:
                    self._vector_layer(number, weights)
                else:
                    self._matrix_layer(number, weights, rows)
            self._launch_head(rows, epsilon)
        kernels.sample_kernel[rows, books](
            *(self._logits, state.codes, self._result, state.frames, state.ends, state.caps, state.seeds),
            *(state.temperatures, state.top_ks, state.top_ps, state.windows, state.limits, state.history),
            *(books, self.classes, triton.next_power_of_2(self.classes), self.delay.begin, self.delay.end),
            HISTORY=MAX_REPETITION_WINDOW,
            num_warps=4,
        )
        kernels.advance_kernel[(triton.cdiv(rows, 32),)](
            *(state.codes, self._result, state.frames, state.ends, state.positions, state.active, state.history, rows),
            *(books, self.delay.end),
            HISTORY=MAX_REPETITION_WINDOW,
            BLOCK=32,
            num_warps=1,
        )

    def _launch_modules(self, rows: int) -> None:
        """The layers and the head through transformers' modules, for weights that are not plain: with an adapter, in
        training, quantized."""
        core, positions = self.core, self.state.positions[:rows]
        row = torch.arange(rows, device=self.device)
        cos, sin = self._cos[positions], self._rotary_sin[positions]

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
            self.keys[layer][row, :, positions] = k.to(self._q.dtype)
            self.values[layer][row, :, positions] = v.to(self._q.dtype)
            self._q[:rows] = q.flatten(1)
            self._attend(layer, rows)
            return self._attended[:rows].view(rows, self.heads, self.head_dim)

        stream = embed_inputs(core, self.state.codes.new_empty(0), self.state.codes[:rows])
        for layer in core.model.layers:
            stream = run_layer(layer, stream, 0, attend)
        self._logits[:rows] = core.audio_lm_head(core.model.norm(stream))

    def _product(self, kernel: Any, outputs: int, per_program: int, *arguments: Any, **sizes: Any) -> None:
        """Launch a product kernel: `per_program` outputs a program, and as many weights for each of them."""
        kernel[(triton.cdiv(outputs, per_program),)](
            *arguments,
            **sizes,
            BLOCK_N=per_program,
            BLOCK_K=triton.next_power_of_2(sizes["K"]),
            DEPENDENT=self._dependent,
            num_warps=4,
            launch_pdl=self._dependent,
        )

    def _vector_layer(self, number: int, weights: LayerWeights) -> None:
        """A layer for a single row: five kernels."""
        keys, values, hidden = self.keys[number], self.values[number], self._h.shape[1]
        epsilon, inner, wide = self.core.config.rms_norm_eps, self._q.shape[1], self._gated.shape[1]
        self._product(
            *(kernels.qkv_kernel, (self.heads + 2 * self.kv_heads) * self.head_dim // 2, 2),
            *(self._h, weights.attention_norm, weights.qkv, None, self._q, keys, values),
            *(self._half_cos, self._half_sin, self.state.positions, epsilon, self.max_positions),
            **{"K": hidden, "HEADS": self.heads, "KV_HEADS": self.kv_heads, "D": self.head_dim, "QUANTIZED": False},
        )
        self._attend(number, 1)
        self._product(
            *(kernels.residual_kernel, hidden, 2, self._attended, weights.out, None, self._h),
            **{"K": inner, "QUANTIZED": False},
        )
        self._product(
            *(kernels.swiglu_kernel, wide, 2, self._h, weights.mlp_norm, weights.gate_up, None, self._gated),
            *(epsilon,),
            **{"K": hidden, "N": wide, "QUANTIZED": False},
        )
        self._product(
            *(kernels.residual_kernel, hidden, 2, self._gated, weights.down, None, self._h),
            **{"K": wide, "QUANTIZED": False},
        )

    def _attend(self, number: int, rows: int) -> None:
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
            DEPENDENT=self._dependent and rows == 1 and self._layers is not None,
            num_warps=tile.warps,
            num_stages=tile.stages,
            launch_pdl=self._dependent and rows == 1 and self._layers is not None,
        )

    def _matrix_layer(self, number: int, weights: LayerWeights, rows: int) -> None:
        """A layer for many rows: cuBLAS products with our kernels between them."""
        hidden, epsilon, wide = self._h.shape[1], self.core.config.rms_norm_eps, self._gated.shape[1]
        block = triton.next_power_of_2(hidden)
        x = torch.empty(rows, hidden, dtype=self._q.dtype, device=self.device)
        kernels.rms_norm_kernel[(rows,)](self._h, weights.attention_norm, x, epsilon, hidden, BLOCK=block)
        kernels.rotate_and_store_kernel[rows, self.heads + 2 * self.kv_heads](
            *(F.linear(x, weights.qkv), self._q, self.keys[number], self.values[number], self._half_cos),
            *(self._half_sin, self.state.positions, self.max_positions, self.heads, self.kv_heads, self.head_dim),
            num_warps=1,
        )
        self._attend(number, rows)
        update = F.linear(self._attended[:rows], weights.out)
        kernels.add_rms_norm_kernel[(rows,)](self._h, update, weights.mlp_norm, x, epsilon, hidden, BLOCK=block)
        gate_up = F.linear(x, weights.gate_up)
        kernels.silu_multiply_kernel[rows, triton.cdiv(wide, 1024)](gate_up, self._gated, wide, BLOCK=1024)
        self._h[:rows] += F.linear(self._gated[:rows], weights.down)

    def _launch_head(self, rows: int, epsilon: float) -> None:
        norm, weight = self.core.model.norm.weight, self.core.audio_lm_head.weight
        outputs, hidden = weight.shape
        if rows == 1:
            self._product(
                *(kernels.head_kernel, outputs, 4, self._h, norm, weight, self._logits, epsilon),
                **{"K": hidden, "N": outputs},
            )
            return
        x = torch.empty(rows, hidden, dtype=weight.dtype, device=self.device)
        kernels.rms_norm_kernel[(rows,)](self._h, norm, x, epsilon, hidden, BLOCK=triton.next_power_of_2(hidden))
        self._logits[:rows] = F.linear(x, weight)


class EnqueuedStep:
    """`PendingStep` on a CUDA stream."""

    def __init__(self, host: torch.Tensor, copied: torch.cuda.Event, codebooks: int) -> None:
        self._host, self._copied, self._codebooks = host, copied, codebooks

    def result(self) -> StepResult:
        self._copied.synchronize()
        books = self._codebooks
        host = self._host.clone()
        return StepResult(host[:, :books].long(), host[:, books : 2 * books].view(torch.float32), host[:, -1])
