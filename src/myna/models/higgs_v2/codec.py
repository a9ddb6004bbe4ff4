"""Codec of Higgs Audio v2: transformers' model with keys, lengths and codes checked, and a batched decoder.

In the batched decoder a convolution reads zeros past a window's end, as it does at the end of a clip. On a CUDA GPU
with Triton it uses the kernels of `codec_kernels.py`, whose sums do not depend on the batch, so that a window always
gives the same samples, alone or among others.
"""

import importlib
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional as F

from myna.core.device import supports_triton
from myna.core.errors import CheckpointError, ModelError
from myna.data.codec import Codes, EncodedBatch, NotifyCallback, PendingSamples, Samples, encode_equal_lengths
from myna.models.codecs import check_clips, check_codes, codec_revision, decode_in_windows, full_precision, record_event
from myna.models.files import format_names, quiet_transformers, read_json, stored_tensors
from myna.models.higgs_v2 import batched_encoder
from myna.models.higgs_v2.batched_encoder import BatchedCodec, FusedConv, ResidualUnits, snake_frequencies

MODEL_TYPE = "higgs_audio_v2_tokenizer"
RELEASED_CODEC = "eustlb/higgs-audio-v2-tokenizer"
"""Released codec in the transformers layout; the original repository holds a pickle."""

# Settings that the codes depend on, besides the tensors. Only these are hashed: a setting that a later transformers
# adds must not invalidate every stored code.
CODEC_SETTINGS = (
    "sample_rate semantic_sample_rate hop_length semantic_downsample_factor num_quantizers codebook_size strides "
    "block_dilations kernel_size unit_kernel_size"
)
ACOUSTIC_SETTINGS = "downsampling_ratios upsampling_ratios"
SEMANTIC_SETTINGS = (
    "conv_stride conv_kernel feat_extract_norm feat_extract_activation feat_proj_layer_norm hidden_act layer_norm_eps "
    "do_stable_layer_norm num_attention_heads num_conv_pos_embedding_groups"
)
TRAINING_TENSORS = re.compile(r"fc1\..*|decoder_semantic\..*|.*\.codebook\.(cluster_size|embed_avg|inited)")
"""Names of tensors that neither encode nor decode reads. A checkpoint may have or lack them."""
FRAME_BUCKETS = (24, 52, 84, 116, 148)
"""Frames that windows are padded to. Windows of `codecs.py` have at most the last number, with a reach of 10 frames;
longer ones are decoded one by one without padding."""
WINDOW_BUCKETS = (1, 2, 4, 8, 16)
"""Numbers of windows in a call. Windows are stacked up to the last."""


class HiggsCodec:
    """`Codec` of Higgs Audio v2 (24 kHz, 25 frames a second, 8 codebooks) or of any checkpoint of its class."""

    def __init__(self, model: Any, revision: str, device: torch.device) -> None:
        self.revision = revision
        self.sample_rate: int = model.config.sample_rate
        self.hop: int = model.config.hop_length
        self.codebooks: int = model.config.num_quantizers
        self.codebook_size: int = model.config.codebook_size
        self.frame_rate = self.sample_rate / self.hop
        self._device = device
        self._model = model.to(device).eval().requires_grad_(False)
        self.decode_reach = decode_reach(self._model.acoustic_decoder, self.hop)
        self._batched: BatchedCodec | None = None
        self._batched_checked = False
        self._window_decoder: WindowDecoder | None = None

    @classmethod
    def open(cls, folder: Path, device: torch.device | str = "cpu") -> Self:
        """Open a folder, every tensor checked."""
        config = _read_config(folder)
        revision = _revision(folder, config)
        return cls(_load(folder, config), revision, torch.device(device))

    def encode(self, clips: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
        """Encode (clips, samples) to (clips, frames, codebooks). One frame is enough, nothing is padded."""
        check_clips(self, clips)
        waves = torch.from_numpy(np.ascontiguousarray(clips, dtype=np.float32)).to(self._device)
        with full_precision(self._device):
            codes = self._model.encode(waves[:, None]).audio_codes
        wanted = (len(clips), self.codebooks, clips.shape[1] // self.hop)
        if tuple(codes.shape) != wanted:
            raise ModelError(
                f"the codec gave codes of shape {tuple(codes.shape)} where {wanted} was due",
                hint="its configuration contradicts itself; use the codec that belongs to the model",
            )
        return codes.transpose(1, 2).cpu().numpy().astype(np.uint16)  # type: ignore[no-any-return]

    def encode_batches(
        self, clips: Sequence[Samples], batch_seconds: float, notify: NotifyCallback
    ) -> Iterator[EncodedBatch]:
        """Encode clips with the batched encoder if it gives the same codes, else with `encode` in batches of equal
        length. Only this method uses the batched encoder, which needs seconds of compilation at first, too long for a
        single reference. The choice depends on the codec and the GPU, not on the clips."""
        batched = self._batched_codec(notify)
        if batched is None:
            yield from encode_equal_lengths(self, clips, batch_seconds)
            return
        for clip in clips:
            check_clips(self, clip[None])
        too_long = [index for index, clip in enumerate(clips) if len(clip) > batched.max_samples]
        yield from self._encode_exactly(clips, too_long, batch_seconds)
        rest = [index for index, clip in enumerate(clips) if len(clip) <= batched.max_samples]
        overflowed: list[int] = []
        for batch, codes in batched.encode([clips[index] for index in rest], batch_seconds):
            indices = [rest[number] for number in batch]
            if codes is None:
                overflowed += indices
            else:
                yield indices, codes
        if overflowed:
            notify(f"{len(overflowed)} clips are encoded in plain fp32: in their batches, activations went beyond fp16")
            yield from self._encode_exactly(clips, overflowed, batch_seconds)

    def _encode_exactly(
        self, clips: Sequence[Samples], indices: Sequence[int], batch_seconds: float
    ) -> Iterator[EncodedBatch]:
        for batch, codes in encode_equal_lengths(self, [clips[index] for index in indices], batch_seconds):
            yield [indices[number] for number in batch], codes

    def _batched_codec(self, notify: NotifyCallback) -> BatchedCodec | None:
        """Return the batched encoder if it can be used; chosen once, at the first call."""
        if self._batched_checked:
            return self._batched
        weight = self._model.fc.weight
        if supports_triton(weight):
            reason = batched_encoder.unsupported_reason(self._model)
            if reason is None:
                batched = BatchedCodec(self._model, self._device, sinc_resample)
                reason = batched.mismatch_reason(self)
                self._batched = batched if reason is None else None
        else:
            reason = "it needs Triton and a GPU of compute capability 8.0" if weight.is_cuda else None
        if reason is not None:
            notify(f"clips are encoded in plain fp32, without the batched encoder: {reason}")
        self._batched_checked = True
        return self._batched

    @property
    def window_independent(self) -> bool:
        """Whether other windows give the same bits: with our kernels they do, libraries order sums differently."""
        return supports_triton(self._model.fc.weight)

    def decode(self, codes: Codes) -> Samples:
        return decode_in_windows(self, codes)

    def decode_windows(self, windows: Sequence[Codes]) -> PendingSamples:
        """Decode windows: stacked by our kernels, which take seconds to compile, else one by one, as sums depend on the
        batch."""
        for window in windows:
            check_codes(self, window)
        if self._window_decoder is None and self.window_independent:
            with full_precision(self._device):  # tables of products are computed here
                self._window_decoder = WindowDecoder(self._model, self._device)
        if self._window_decoder is None:
            decoded = [self._decode_window(window) for window in windows]
            return lambda: decoded
        pending = self._window_decoder.launch(windows)
        return lambda: [
            self._decode_window(window) if samples is None else samples
            for window, samples in zip(windows, pending(), strict=True)
        ]

    def _decode_window(self, codes: Codes) -> Samples:
        """Decode in plain fp32, clipped to [-1, 1] since the decoder ends without a tanh."""
        ids = torch.from_numpy(codes.astype(np.int64)).to(self._device)
        with full_precision(self._device):
            wave = self._model.decode(ids.T[None]).audio_values[0, 0]
        if len(wave) != len(codes) * self.hop:
            raise ModelError(
                f"{len(codes)} frames became {len(wave)} samples instead of {len(codes) * self.hop}",
                hint="the codec's up- and downsampling ratios differ; use the codec that belongs to the model",
            )
        return wave.clamp(-1, 1).cpu().numpy()  # type: ignore[no-any-return]


def decode_reach(decoder: nn.Module, hop: int) -> int:
    """Return the frames on either side that a frame's samples depend on, from the convolutions, last to first."""
    first, last = 0, hop - 1
    convolutions = [module for module in decoder.modules() if isinstance(module, nn.Conv1d | nn.ConvTranspose1d)]
    for conv in reversed(convolutions):
        size, stride, padding = conv.kernel_size[0], conv.stride[0], int(conv.padding[0])
        if isinstance(conv, nn.ConvTranspose1d):
            first, last = -((size - 1 - padding - first) // stride), (last + padding) // stride
        else:
            first, last = first - padding, last - padding + conv.dilation[0] * (size - 1)
    return max(-first, last)


@cache
def codec_classes() -> tuple[Any, Any]:
    """Return configuration and model class of the codec, with or without a working torchaudio. transformers' module
    imports torchaudio for one function, and the registry's torchaudio does not load beside a CPU build of torch. In
    that case the module gets `sinc_resample` from a stand-in, the only one in Myna."""
    from transformers import HiggsAudioV2TokenizerConfig
    from transformers.utils import import_utils

    modeling = f"transformers.models.{MODEL_TYPE}.modeling_{MODEL_TYPE}"
    try:
        importlib.import_module("torchaudio")
    except (ImportError, OSError):
        # Called before the stand-in exists, because transformers caches the answer.
        import_utils.is_torchaudio_available()
        stand_in = ModuleType("torchaudio")
        stand_in.__spec__ = ModuleSpec("torchaudio", None)
        vars(stand_in)["functional"] = SimpleNamespace(resample=sinc_resample)
        sys.modules["torchaudio"] = stand_in
        try:
            module = importlib.import_module(modeling)
        finally:
            # Only transformers' module keeps the stand-in.
            del sys.modules["torchaudio"]
    else:
        module = importlib.import_module(modeling)
    return HiggsAudioV2TokenizerConfig, module.HiggsAudioV2TokenizerModel


def sinc_resample(waveform: torch.Tensor, orig: int, new: int) -> torch.Tensor:
    """Resample like `torchaudio.functional.resample` with its default arguments: a sinc under a Hann window of 6 zero
    crossings.

    Output sample j sits at time j / new. After both rates are divided by their greatest common divisor, samples j and j
    + new read the input through the same weights, `orig` samples apart: one strided convolution with `new` filters. The
    order of the arithmetic is torchaudio's too, so that codes do not depend on which of the two is used.
    """
    if orig == new:
        return waveform
    shared = math.gcd(orig, new)
    orig, new = orig // shared, new // shared
    crossings, cutoff = 6, 0.99 * min(orig, new)
    reach = math.ceil(crossings * orig / cutoff)

    def steps(*span: int) -> torch.Tensor:
        return torch.arange(*span, dtype=waveform.dtype, device=waveform.device)

    time = steps(0, -new, -1)[:, None] / new + steps(-reach, reach + orig) / orig
    phase = (time * cutoff).clamp(-crossings, crossings)
    window = torch.cos(phase * math.pi / crossings / 2) ** 2
    filters = torch.sinc(phase) * (window * (cutoff / orig))
    padded = F.pad(waveform.reshape(-1, 1, waveform.shape[-1]), (reach, reach + orig))
    out = F.conv1d(padded, filters[:, None], stride=orig).transpose(1, 2).flatten(1)
    length = math.ceil(waveform.shape[-1] * new / orig)
    return out[:, :length].reshape(*waveform.shape[:-1], length)


def _read_config(folder: Path) -> Any:
    path = folder / "config.json"
    settings = read_json(path)
    kind, hint = settings.get("model_type"), f"use {RELEASED_CODEC}"
    if kind != MODEL_TYPE:  # the original configuration has no model type
        raise ModelError(
            f"{folder} holds a model of type {kind!r}, not a codec in the layout of transformers", hint=hint
        )
    try:
        return codec_classes()[0].from_dict(settings)
    except (ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise ModelError(f"{path}: {error}", hint=hint) from None


def _load(folder: Path, config: Any) -> Any:
    try:
        with quiet_transformers():
            model, info = codec_classes()[1].from_pretrained(
                folder,
                config=config,
                dtype=torch.float32,
                use_safetensors=True,
                local_files_only=True,
                ignore_mismatched_sizes=True,  # mismatched tensors are listed below with the rest
                output_loading_info=True,
            )
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"the codec in {folder} cannot be loaded: {error}", hint="download it again; the file may be cut short"
        ) from error
    mismatched = [f"{name} {tuple(found)} instead of {tuple(due)}" for name, found, due in info["mismatched_keys"]]
    kinds = {"missing": info["missing_keys"], "unexpected": info["unexpected_keys"], "of another shape": mismatched}
    needed = {kind: sorted(name for name in names if not TRAINING_TENSORS.match(name)) for kind, names in kinds.items()}
    if problems := [f"{len(names)} {kind}: {format_names(names)}" for kind, names in needed.items() if names]:
        raise CheckpointError(
            f"the codec in {folder} does not fit its configuration: {'; '.join(problems)}",
            hint=f"use a checkpoint of the Higgs v2 codec such as {RELEASED_CODEC}",
        )
    return model


def _revision(folder: Path, config: Any) -> str:
    settings = [
        {name: getattr(part, name) for name in names.split()}
        for part, names in (
            (config, CODEC_SETTINGS),
            (config.acoustic_model_config, ACOUSTIC_SETTINGS),
            (config.semantic_model_config, SEMANTIC_SETTINGS),
        )
    ]
    stored = stored_tensors(folder, pickle_hint=f"use the converted checkpoint: hf download {RELEASED_CODEC}")
    return codec_revision(settings, ((tensor.name, tensor.read()) for tensor in stored))


class UpsamplingBlock(nn.Module):
    """Upsampling and residual units of DAC's decoder."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.stride: int = block.conv_t1.stride[0]
        self.up = _transposed(block.conv_t1)
        self.units = ResidualUnits(block.res_unit1, block.res_unit2, block.res_unit3)
        self.phases = nn.Buffer(self.units.alphas[0].detach().repeat(self.stride))

    def forward(self, activated: Tensor, ends: Tensor, snake: Tensor) -> Tensor:
        """Map the input after this block's own snake to the output after the next one's."""
        windows, time, _ = activated.shape
        shape = (windows, time * self.stride, len(self.units.alphas[0]))
        x, activated = self.up.with_sum(activated, ends, activation=self.phases)
        return self.units(x.view(shape), activated.view(shape), ends * self.stride, snake)  # type: ignore[no-any-return]


def _transposed(conv: nn.ConvTranspose1d) -> FusedConv:
    """Fuse a transposed convolution of two strides' length: each input position, with its neighbours, gives one
    stride."""
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
    """Decoder for windows of unequal length. Build it on its final device: the format of its weights depends on it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        decoder = model.acoustic_decoder
        self.first = FusedConv.from_conv(decoder.conv1)
        self.blocks = nn.ModuleList(UpsamplingBlock(block) for block in decoder.block)
        self.last = FusedConv.from_conv(decoder.conv2)
        snakes = [*(block.snake1 for block in decoder.block), decoder.snake1]
        self.alphas = nn.ParameterList(snake_frequencies(snake) for snake in snakes).requires_grad_(False)
        # The linear layers between codebooks and decoder are applied to the entries once. A frame is then a sum of
        # entries.
        entries = [layer.project_out(layer.codebook.embed) for layer in model.quantizer.quantizers]
        tables = torch.stack([entry @ model.fc2.weight.T for entry in entries]).detach()
        tables[0] += model.fc2.bias.detach()
        self.tables = nn.Buffer(tables)

    def forward(self, codes: Tensor, lengths: Tensor) -> Tensor:
        """Decode codes (windows, frames, codebooks) with the frames of each window to (windows, frames * hop), in [-1,
        1]. Samples past a window's frames have no meaning. If an activation overflows fp16, samples are not finite."""
        x = self.tables[0][codes[..., 0]]
        for number in range(1, codes.shape[-1]):
            x = x + self.tables[number][codes[..., number]]
        activated = self.first(x, lengths, activation=self.alphas[0])
        block: Any
        for number, block in enumerate(self.blocks, start=1):
            activated = block(activated, lengths, self.alphas[number])
            lengths = lengths * block.stride
        out: Tensor = self.last(activated, lengths)[..., 0]
        return out.clamp(-1, 1)


class WindowDecoder:
    """Batched decoder for stacked windows; on a GPU in CUDA graphs, on a CUDA stream of its own."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self._device, self._on_gpu = device, device.type == "cuda"
        self._decoder = BatchedDecoder(model).eval()
        self._hop: int = model.config.hop_length
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None  # type: ignore[no-untyped-call]
        if self._stream is not None:  # the weights above are still being computed
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._graphs: dict[tuple[int, int], tuple[Any, Tensor, Tensor, Tensor]] = {}
        self._pool: Any = None

    def launch(self, windows: Sequence[Codes]) -> Callable[[], list[Samples | None]]:
        """Start decoding, and return a function that waits for the samples, with None for an overflow of fp16."""
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
            wait = record_event(self._device)

        def fetch() -> list[Samples | None]:
            wait()
            samples: list[Samples | None] = [None] * len(windows)
            for batch, waves in parts:
                for index, wave in zip(batch, waves.numpy(), strict=False):
                    own = wave[: len(windows[index]) * self._hop].copy()
                    samples[index] = own if np.isfinite(own).all() else None
            return samples

        return fetch

    def _run(self, windows: Sequence[Codes], frames: int) -> Tensor:
        """Decode to samples (windows or more, frames * hop) on the host, valid once the CUDA stream has got there."""
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
