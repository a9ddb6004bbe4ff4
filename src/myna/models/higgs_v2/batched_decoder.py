"""Batched decoder of the Higgs codec: transformers' weights in a forward pass for windows of unequal length.

Past a window's end a convolution reads zeros, as it does at the end of a clip. On a CUDA GPU with Triton the kernels
are those of `codec_kernels.py`, whose sums do not depend on the batch, so that a window always gives the same samples,
alone or among others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from myna.data.codec import Codes, Samples
from myna.models.codec_checks import full_precision
from myna.models.higgs_v2.batched_encoder import FusedConv, ResidualUnits, snake_frequencies

FRAME_BUCKETS = (24, 52, 84, 116, 148)
"""Frames that windows are padded to; longer ones are decoded one by one, as they are. The windows of `codec_windows.py`
have at most the last, with a reach of 10 frames."""
WINDOW_BUCKETS = (1, 2, 4, 8, 16)
"""Windows in a call: as many are stacked as there are, up to the last."""


class UpsamplingBlock(nn.Module):
    """Upsampling and residual units of DAC's decoder."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.stride: int = block.conv_t1.stride[0]
        self.up = _transposed(block.conv_t1)
        self.units = ResidualUnits(block.res_unit1, block.res_unit2, block.res_unit3)
        self.phases = nn.Buffer(self.units.alpha(0).repeat(self.stride))

    def forward(self, activated: Tensor, ends: Tensor, snake: Tensor) -> Tensor:
        """The input after this block's own snake -> the output after the next one's."""
        windows, time, _ = activated.shape
        shape = (windows, time * self.stride, len(self.units.alpha(0)))
        x, activated = self.up.with_sum(activated, ends, activation=self.phases)
        return self.units(x.view(shape), activated.view(shape), ends * self.stride, snake)  # type: ignore[no-any-return]


def _transposed(conv: nn.ConvTranspose1d) -> FusedConv:
    """A transposed convolution of two strides' length: each input position gives one stride of output, from itself and
    its two neighbours, so that channels-last outputs need only be viewed as more time."""
    stride, padding = conv.stride[0], int(conv.padding[0])
    weight = conv.weight.detach()
    channels, outputs, size = weight.shape
    assert size == 2 * stride and conv.bias is not None
    taps = weight.new_zeros(stride, outputs, channels, 3)
    for phase in range(stride):
        for tap in range(3):
            place = phase + padding + stride * (1 - tap)
            if 0 <= place < size:
                taps[phase, :, :, tap] = weight[:, :, place].T
    return FusedConv(taps.flatten(0, 1), conv.bias.detach().repeat(stride), padding=1)


class BatchedDecoder(nn.Module):
    """Decoder of the Higgs codec for windows of unequal length. Build it where the model stays: the format of the
    copied weights depends on the device."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        decoder = model.acoustic_decoder
        self.first = FusedConv.from_conv(decoder.conv1)
        self.blocks = nn.ModuleList(UpsamplingBlock(block) for block in decoder.block)
        self.last = FusedConv.from_conv(decoder.conv2)
        alphas = [*(block.snake1 for block in decoder.block), decoder.snake1]
        for number, snake in enumerate(alphas):
            self.register_buffer(f"alpha{number}", snake_frequencies(snake))
        # Linear layers between codebooks and decoder are applied to the entries once: a frame is then a sum of entries.
        entries = [layer.project_out(layer.codebook.embed) for layer in model.quantizer.quantizers]
        tables = torch.stack([entry @ model.fc2.weight.T for entry in entries]).detach()
        tables[0] += model.fc2.bias.detach()
        self.tables = nn.Buffer(tables)

    def forward(self, codes: Tensor, lengths: Tensor) -> Tensor:
        """Codes (windows, frames, codebooks) and the frames of each window -> (windows, frames * hop), in [-1, 1].

        Samples past a window's frames mean nothing. Where an activation overflows fp16, samples are not finite.
        """
        x = self.tables[0][codes[..., 0]]
        for number in range(1, codes.shape[-1]):
            x = x + self.tables[number][codes[..., number]]
        activated = self.first(x, lengths, activation=self._alpha(0))
        block: Any
        for number, block in enumerate(self.blocks, start=1):
            activated = block(activated, lengths, self._alpha(number))
            lengths = lengths * block.stride
        out: Tensor = self.last(activated, lengths)[..., 0]
        return out.clamp(-1, 1)

    def _alpha(self, number: int) -> Tensor:
        return getattr(self, f"alpha{number}")  # type: ignore[no-any-return]


class WindowDecoder:
    """Stacked windows through the batched decoder; on a GPU in CUDA graphs, on a stream of its own."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self._device, self._on_gpu = device, device.type == "cuda"
        self._decoder = BatchedDecoder(model).eval()
        self._hop: int = model.config.hop_length
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None  # type: ignore[no-untyped-call]
        self._graphs: dict[tuple[int, int], tuple[Any, Tensor, Tensor, Tensor]] = {}
        self._pool: Any = None

    def launch(self, windows: Sequence[Codes]) -> Callable[[], list[Samples | None]]:
        """Start decoding; the function that it returns waits for the samples, None where an activation overflowed."""
        by_frames: defaultdict[int, list[int]] = defaultdict(list)
        for index, window in enumerate(windows):
            by_frames[next((size for size in FRAME_BUCKETS if len(window) <= size), len(window))].append(index)
        parts: list[tuple[list[int], Tensor]] = []
        # Triton launches on the current device, which need not be the codec's.
        with full_precision(self._device), torch.cuda.stream(self._stream) if self._stream else nullcontext():
            for frames, indices in sorted(by_frames.items()):
                largest = WINDOW_BUCKETS[-1] if frames <= FRAME_BUCKETS[-1] else 1
                for start in range(0, len(indices), largest):
                    batch = indices[start : start + largest]
                    parts.append((batch, self._run([windows[index] for index in batch], frames)))
            done = torch.cuda.Event() if self._on_gpu else None  # type: ignore[no-untyped-call]
            if done is not None:
                done.record()

        def fetch() -> list[Samples | None]:
            if done is not None:
                done.synchronize()
            samples: list[Samples | None] = [None] * len(windows)
            for batch, waves in parts:
                for index, wave in zip(batch, waves.numpy(), strict=False):
                    own = wave[: len(windows[index]) * self._hop].copy()
                    samples[index] = own if np.isfinite(own).all() else None
            return samples

        return fetch

    def _run(self, windows: Sequence[Codes], frames: int) -> Tensor:
        """Samples (windows or more, frames * hop) on the host, once the stream has got there."""
        count = next(size for size in WINDOW_BUCKETS if len(windows) <= size)
        codes = torch.zeros(count, frames, windows[0].shape[1], dtype=torch.int64, pin_memory=self._on_gpu)
        lengths = torch.zeros(count, dtype=torch.int64, pin_memory=self._on_gpu)
        for row, window in enumerate(windows):
            codes[row, : len(window)] = torch.from_numpy(window.astype(np.int64))
            lengths[row] = len(window)
        if not self._on_gpu or frames > FRAME_BUCKETS[-1]:
            waves: Tensor = self._decoder(*(x.to(self._device, non_blocking=True) for x in (codes, lengths)))
            return waves.to("cpu", non_blocking=True)
        if (count, frames) not in self._graphs:
            self._graphs[count, frames] = self._capture(codes.to(self._device), lengths.to(self._device))
        graph, own_codes, own_lengths, waves = self._graphs[count, frames]
        own_codes.copy_(codes, non_blocking=True)
        own_lengths.copy_(lengths, non_blocking=True)
        graph.replay()
        host = torch.empty(waves.shape, pin_memory=True)
        return host.copy_(waves, non_blocking=True)

    def _capture(self, codes: Tensor, lengths: Tensor) -> tuple[Any, Tensor, Tensor, Tensor]:
        assert self._stream is not None
        self._decoder(codes, lengths)  # compiles the kernels
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            waves = self._decoder(codes, lengths)
        self._pool = graph.pool()
        return graph, codes, lengths, waves
