"""Batched encoder of the Higgs codec: transformers' weights in a forward pass for clips of unequal length.

Outside a clip a convolution reads zeros, never the padding or another clip; the norm over time and attention mask it.
Activations are (clips, time, channels), and a convolution is fused with the residual sum and activation after it. On a
CUDA GPU with Triton that is one kernel of `codec_kernels.py`; the torch code here is the reference for other devices.

Codes are those of plain fp32 except for rounding: on an H200 at true size 99.99 % of them are equal, and 99.9 % of a
probe must be equal before the encoder is used. The same batch on the same device gives the same codes. In another batch
libraries may choose other kernels and, in rare cases, round to another code; therefore batches depend on the given
clips alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from myna.core.device import supports_triton
from myna.data.codec import Codec, Codes, Samples, encode_equal_lengths
from myna.models.codecs import full_precision, record_event

Activation = Tensor | Literal["gelu", "elu"] | None
"""Activation after a convolution; a tensor holds the channel frequencies of a snake activation."""
PROBE_SECONDS = (16.0, 12.0, 10.0, 8.0, 6.0, 4.0, 3.0, 1.0)
"""Clips of the probe: one minute, or 12,000 codes of the released codec, of which 12 may differ."""
PROBE_BATCH_SECONDS = 48.0
"""Size of the probe's batches: a large and a small one, with clips of unequal length in both."""
MIN_EQUAL_SHARE = 0.999


@cache
def _kernels() -> Any:
    return import_module("myna.models.higgs_v2.codec_kernels")


def activate(x: Tensor, activation: Activation) -> Tensor:
    if isinstance(activation, Tensor):
        return x + (activation + 1e-9).reciprocal() * torch.sin(activation * x).pow(2)
    if activation is None:
        return x
    return F.gelu(x) if activation == "gelu" else F.elu(x)


def valid_mask(x: Tensor, ends: Tensor) -> Tensor:
    """(clips, time, 1): true before each clip's end."""
    return (torch.arange(x.shape[1], device=x.device) < ends[:, None])[..., None]


class FusedConv(nn.Module):
    """1-D convolution or linear layer, fused with a residual sum and an activation."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, stride: int = 1, padding: int = 0, dilation: int = 1, groups: int = 1
    ) -> None:
        super().__init__()
        self.outputs, self.channels, self.kernel = weight.shape
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups
        self.bias = None if bias is None else nn.Buffer(bias.detach().clone())
        if supports_triton(weight):
            high, low = _kernels().split_fp16(weight.detach(), groups)
            self.high, self.low = nn.Buffer(high), nn.Buffer(low)
        else:
            self.weight = nn.Buffer(weight.detach().clone())

    @classmethod
    def from_conv(cls, conv: nn.Conv1d) -> Self:
        geometry = (conv.stride[0], int(conv.padding[0]), conv.dilation[0])
        return cls(conv.weight, conv.bias, *geometry, conv.groups)

    @classmethod
    def from_linears(cls, *layers: nn.Linear) -> Self:
        """Join linear layers of a common input."""
        weight = torch.cat([layer.weight.detach() for layer in layers])
        return cls(weight[..., None], torch.cat([layer.bias.detach() for layer in layers]))

    def length(self, time: Any) -> Any:
        """Return the output length for an int or a tensor of them."""
        return (time + 2 * self.padding - self.dilation * (self.kernel - 1) - 1) // self.stride + 1

    def time_out(self, time: int) -> int:
        # Kernels of even length give one position more than HuBERT's positional convolution keeps.
        return min(int(self.length(time)), time)

    def forward(self, x: Tensor, ends: Tensor, residual: Tensor | None = None, activation: Activation = None) -> Tensor:
        """Convolve (clips, time, channels), read up to `ends`, and return the activated output."""
        return self.with_sum(x, ends, residual, activation, keep=False)[1]

    def with_sum(
        self, x: Tensor, ends: Tensor, residual: Tensor | None = None, activation: Activation = None, keep: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return the output plus `residual` before and after the activation; the former is only valid with `keep`."""
        if supports_triton(x):
            return _kernels().launch_conv(self, x, ends, residual, activation, keep)  # type: ignore[no-any-return]
        time_out = self.time_out(x.shape[1])
        x = torch.where(valid_mask(x, ends), x, 0.0).transpose(1, 2)
        x = F.conv1d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)
        x = x[..., :time_out].transpose(1, 2).contiguous()
        x = x if residual is None else x + residual
        return x, activate(x, activation)


class WaveformConv(nn.Module):
    """Convolution over samples: one input channel."""

    def __init__(self, conv: nn.Conv1d) -> None:
        super().__init__()
        self.kernel, self.stride, self.padding = conv.kernel_size[0], conv.stride[0], int(conv.padding[0])
        self.weight = nn.Buffer(conv.weight.detach()[:, 0].T.contiguous())
        bias = conv.weight.new_zeros(len(conv.weight)) if conv.bias is None else conv.bias
        self.bias = nn.Buffer(bias.detach().clone())

    def length(self, time: Any) -> Any:
        return (time + 2 * self.padding - self.kernel) // self.stride + 1

    def forward(
        self, waves: Tensor, ends: Tensor, activation: Activation, norm: nn.GroupNorm | None = None, keep: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Convolve (clips, samples) and activate; a `norm` is applied over each clip's time."""
        scale, shift = (None, self.bias) if norm is None else self.norm_scale_and_shift(waves, ends, norm)
        if supports_triton(waves):
            arguments = (self, waves, ends, scale, shift, activation, keep)
            return _kernels().launch_waveform_conv(*arguments)  # type: ignore[no-any-return]
        x = self._windows(torch.where(valid_mask(waves[..., None], ends)[..., 0], waves, 0.0)) @ self.weight
        x = x + shift if scale is None else x * scale[:, None] + shift[:, None]
        return x, activate(x, activation)

    def norm_scale_and_shift(self, waves: Tensor, ends: Tensor, norm: nn.GroupNorm) -> tuple[Tensor, Tensor]:
        """Return scale and shift of each channel of each clip that normalize it over the clip's time. A channel's mean
        and variance follow from the moments of the few samples it is a weighted sum of, before the channels are
        computed."""
        windows = self._windows(waves).double()
        count = self.length(ends)[:, None, None]
        keep = valid_mask(windows, count[:, 0, 0])
        mean = torch.where(keep, windows, 0.0).sum(1, keepdim=True) / count
        rest = torch.where(keep, windows - mean, 0.0)
        weight = self.weight.double()
        variance = (weight * (rest.mT @ rest / count @ weight)).sum(1)
        scale = torch.rsqrt(variance + norm.eps) * norm.weight
        return scale.float(), (norm.bias - (mean[:, 0] @ weight) * scale).float()

    def _windows(self, waves: Tensor) -> Tensor:
        return F.pad(waves, (self.padding, self.padding)).unfold(1, self.kernel, self.stride)


def snake_frequencies(snake: Any) -> Tensor:
    """(channels,): parameter of a snake activation."""
    return snake.alpha.detach().flatten().clone()  # type: ignore[no-any-return]


class ResidualUnits(nn.Module):
    """Residual units of one of DAC's blocks."""

    def __init__(self, *units: Any) -> None:
        super().__init__()
        self.conv1 = nn.ModuleList(FusedConv.from_conv(unit.conv1) for unit in units)
        self.conv2 = nn.ModuleList(FusedConv.from_conv(unit.conv2) for unit in units)
        snakes = [snake for unit in units for snake in (unit.snake1, unit.snake2)]
        self.alphas = nn.ParameterList(snake_frequencies(snake) for snake in snakes).requires_grad_(False)
        """Parameter of the snake before each convolution."""

    def forward(self, x: Tensor, activated: Tensor, ends: Tensor, snake: Tensor) -> Tensor:
        """Map the input before and after its first snake to the output after `snake`."""
        conv1: Any
        conv2: Any
        for number, (conv1, conv2) in enumerate(zip(self.conv1, self.conv2, strict=True), start=1):
            activated = conv1(activated, ends, activation=self.alphas[2 * number - 1])
            last = number == len(self.conv1)
            following = snake if last else self.alphas[2 * number]
            x, activated = conv2.with_sum(activated, ends, x, following, keep=not last)
        return activated


class AcousticBlock(nn.Module):
    """Residual units and downsampling of DAC's encoder."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.units = ResidualUnits(block.res_unit1, block.res_unit2, block.res_unit3)
        self.down = FusedConv.from_conv(block.conv1)
        self.alpha = nn.Buffer(snake_frequencies(block.snake1))

    def forward(self, x: Tensor, activated: Tensor, ends: Tensor, snake: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
        """Map the input before and after its first snake to the output before and after its snake."""
        activated = self.units(x, activated, ends, self.alpha)
        return self.down.with_sum(activated, ends, activation=snake, keep=keep)


class AcousticEncoder(nn.Module):
    """DAC's encoder: 24 kHz to 25 frames a second."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.first = WaveformConv(encoder.conv1)
        self.blocks = nn.ModuleList(AcousticBlock(block) for block in encoder.block)
        self.alpha = nn.Buffer(snake_frequencies(encoder.snake1))
        self.last = FusedConv.from_conv(encoder.conv2)

    def forward(self, waves: Tensor, ends: Tensor) -> Tensor:
        """Encode waves; `ends` are in samples."""
        blocks: list[Any] = list(self.blocks)
        alphas = [*(block.units.alphas[0] for block in blocks), self.alpha]
        x, activated = self.first(waves, ends, activation=alphas[0], keep=True)
        for number, block in enumerate(blocks, start=1):
            x, activated = block(x, activated, ends, alphas[number], keep=number < len(blocks))
            ends = block.down.length(ends)
        return self.last(activated, ends)  # type: ignore[no-any-return]


class HubertLayer(nn.Module):
    """Layer of HuBERT."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention, feed_forward = layer.attention, layer.feed_forward
        self.heads = attention.num_heads
        self.qkv = FusedConv.from_linears(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = FusedConv.from_linears(attention.out_proj)
        self.up = FusedConv.from_linears(feed_forward.intermediate_dense)
        self.down = FusedConv.from_linears(feed_forward.output_dense)
        self.norm1, self.norm2 = layer.layer_norm, layer.final_layer_norm

    def forward(self, x: Tensor, ends: Tensor, mask: Tensor | None) -> Tensor:
        clips, time, channels = x.shape
        query, key, value = self.qkv(x, ends).view(clips, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        attended = attended.transpose(1, 2).reshape(clips, time, channels)
        x = self.norm1(self.out(attended, ends, residual=x))
        out: Tensor = self.norm2(self.down(self.up(x, ends, activation="gelu"), ends, residual=x))
        return out


class HubertEncoder(nn.Module):
    """HuBERT as the codec uses it: 16 kHz to the mean of its hidden states, 50 a second."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        first, *others = model.feature_extractor.conv_layers
        self.first = WaveformConv(first.conv)
        self.norm_over_time = first.layer_norm
        self.others = nn.ModuleList(FusedConv.from_conv(layer.conv) for layer in others)
        self.feature_norm = model.feature_projection.layer_norm
        self.projection = FusedConv.from_linears(model.feature_projection.projection)
        self.positions = FusedConv.from_conv(model.encoder.pos_conv_embed.conv)
        self.norm = model.encoder.layer_norm
        self.layers = nn.ModuleList(HubertLayer(layer) for layer in model.encoder.layers)

    def forward(self, waves: Tensor, ends: Tensor, mixed: bool) -> Tensor:
        """Encode waves; `ends` are in samples. `mixed`: whether they differ; a comparison would wait for the GPU."""
        _, x = self.first(waves, ends, norm=self.norm_over_time, activation="gelu")
        ends = self.first.length(ends)
        conv: Any
        for conv in self.others:
            x, ends = conv(x, ends, activation="gelu"), conv.length(ends)
        x = self.projection(self.feature_norm(x), ends)
        x = self.norm(x + self.positions(x, ends, activation="gelu"))
        mask = valid_mask(x, ends)[:, None, None, :, 0] if mixed else None
        total = x
        for layer in self.layers:
            x = layer(x, ends, mask)
            total = total + x
        return total / (len(self.layers) + 1)  # type: ignore[no-any-return]


class SemanticEncoder(nn.Module):
    """Convolutions after HuBERT."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.first = FusedConv.from_conv(encoder.conv)
        self.conv1, self.conv2, self.last = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for block in encoder.conv_blocks:
            self.conv1.append(nn.ModuleList(FusedConv.from_conv(unit.conv1) for unit in block.res_units))
            self.conv2.append(nn.ModuleList(FusedConv.from_conv(unit.conv2) for unit in block.res_units))
            self.last.append(FusedConv.from_conv(block.conv))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        x, activated = self.first.with_sum(x, ends, activation="elu")
        first_convs: Any
        second_convs: Any
        last: Any
        for first_convs, second_convs, last in zip(self.conv1, self.conv2, self.last, strict=True):
            for conv1, conv2 in zip(first_convs, second_convs, strict=True):
                x, activated = conv2.with_sum(conv1(activated, ends, activation="elu"), ends, x, "elu")
            x, activated = last.with_sum(x, ends, activation="elu")
            ends = last.length(ends)
        return x


class BatchedEncoder(nn.Module):
    """Encoder for clips of unequal length. Build it on its final device: the format of its weights depends on it."""

    def __init__(self, model: Any, resample: Callable[[Tensor, int, int], Tensor]) -> None:
        super().__init__()
        config = model.config
        self.hop: int = config.hop_length
        self.rates: tuple[int, int] = (config.sample_rate, config.semantic_sample_rate)
        self.downsampling: int = config.semantic_downsample_factor
        self.resample = resample
        self.acoustic = AcousticEncoder(model.acoustic_encoder)
        self.hubert = HubertEncoder(model.semantic_model)
        self.semantic = SemanticEncoder(model.encoder_semantic)
        self.join = FusedConv.from_linears(model.fc)

    def forward(self, waves: Tensor, frames: Tensor | None = None) -> Tensor:
        """Encode (clips, samples), with their `frames` if they differ; an overflow of fp16 gives values that are not
        finite."""
        mixed = frames is not None
        if frames is None:
            frames = torch.full((len(waves),), waves.shape[1] // self.hop, device=waves.device)
        ends = frames * self.hop
        waves = torch.where(valid_mask(waves[..., None], ends)[..., 0], waves, 0.0)
        acoustic = self.acoustic(waves, ends)
        semantic = self.encode_semantic(self.semantic_waves(waves, frames), frames, mixed)
        return self.join(torch.cat([acoustic, semantic], -1), frames)  # type: ignore[no-any-return]

    def semantic_waves(self, waves: Tensor, frames: Tensor) -> Tensor:
        """Resample the waves to HuBERT's rate, with the padding that the codec gives them."""
        slow = self.resample(waves, *self.rates)
        slow = torch.where(valid_mask(slow[..., None], self._slow_ends(frames))[..., 0], slow, 0.0)
        return F.pad(slow, (160, 160))

    def encode_semantic(self, slow: Tensor, frames: Tensor, mixed: bool) -> Tensor:
        hidden = self.hubert(slow, self._slow_ends(frames) + 320, mixed)
        return self.semantic(hidden[:, :: self.downsampling].contiguous(), frames)  # type: ignore[no-any-return]

    def _slow_ends(self, frames: Tensor) -> Tensor:
        own, slow = self.rates
        return -(-frames * self.hop * slow // own)


def unsupported_reason(model: Any) -> str | None:
    """Return why a codec cannot use the batched encoder, which supports only the released form of HuBERT."""
    config = model.config.semantic_model_config
    if config.model_type != "hubert" or config.do_stable_layer_norm or config.feat_extract_norm != "group":
        return "its semantic model is not a HuBERT with one norm over time"
    if {config.feat_extract_activation, config.hidden_act} != {"gelu"} or not config.feat_proj_layer_norm:
        return "its semantic model has other activations or norms than the released codec's"
    if getattr(config, "conv_pos_batch_norm", False):
        return "its positional convolution has a batch norm"
    ratio = model.config.hop_length * model.config.semantic_sample_rate
    if ratio % model.config.sample_rate:
        return "its two sample rates have no common frame"
    return None


class BatchedCodec:
    """Batched encoder with the codec's own quantizer."""

    def __init__(self, model: Any, device: torch.device, resample: Callable[[Tensor, int, int], Tensor]) -> None:
        self._model, self._device = model, device
        self._encoder = BatchedEncoder(model, resample).eval()
        self._hop, self._rate = self._encoder.hop, self._encoder.rates[0]

    @property
    def max_samples(self) -> int:
        """Samples of the longest clip: kernel offsets are 32-bit, and the first activations are the widest."""
        return (2**31 - 1) // max(len(self._encoder.acoustic.first.bias), len(self._encoder.hubert.first.bias))

    def encode(self, clips: Sequence[Samples], batch_seconds: float) -> Iterator[tuple[list[int], list[Codes] | None]]:
        """Yield codes with their clips' indices, None for an overflow of fp16, while the next batch is computed."""
        pending = None
        for indices in self.batches([len(clip) for clip in clips], batch_seconds):
            launched = indices, self._launch([clips[index] for index in indices])
            if pending is not None:
                yield pending[0], pending[1]()
            pending = launched
        if pending is not None:
            yield pending[0], pending[1]()

    def batches(self, lengths: Sequence[int], batch_seconds: float) -> Iterator[list[int]]:
        """Yield indices of clips of similar length, longest first. A batch is padded to its longest clip."""
        waiting = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
        max_total = min(int(batch_seconds * self._rate), self.max_samples)
        while waiting:
            size = max(1, max_total // lengths[waiting[0]])
            yield waiting[:size]
            waiting = waiting[size:]

    def _launch(self, clips: Sequence[Samples]) -> Callable[[], list[Codes] | None]:
        """Start a batch on the GPU, and return a function that waits for the codes."""
        on_gpu = self._device.type == "cuda"
        frames = [len(clip) // self._hop for clip in clips]
        waves = torch.zeros(len(clips), max(map(len, clips)), pin_memory=on_gpu)
        for row, clip in zip(waves.numpy(), clips, strict=True):
            row[: len(clip)] = clip
        lengths = torch.tensor(frames, pin_memory=on_gpu).to(self._device, non_blocking=True)
        # Triton launches on the current device, which need not be the codec's.
        with full_precision(self._device), torch.cuda.device(self._device) if on_gpu else nullcontext():
            mixed = lengths if len(set(frames)) > 1 else None
            encoded = self._encoder(waves.to(self._device, non_blocking=True), mixed)
            bandwidth = self._model.config.target_bandwidths[-1]
            codes = self._model.quantizer.encode(encoded.transpose(1, 2), bandwidth).permute(1, 2, 0)
            codes, finite = (x.to("cpu", non_blocking=True) for x in (codes, encoded.isfinite().all()))
            wait = record_event(self._device)

        def fetch() -> list[Codes] | None:
            wait()
            if not bool(finite):
                return None
            return [own[:count] for own, count in zip(codes.numpy().astype(np.uint16), frames, strict=True)]

        return fetch

    def mismatch_reason(self, codec: Codec) -> str | None:
        """Compare with `codec.encode` on a minute of synthetic speech; returns the reason if codes differ."""
        lengths = [max(1, int(seconds * self._rate) // self._hop) * self._hop for seconds in PROBE_SECONDS]
        clips = synthetic_speech(lengths, self._rate)
        expected: dict[int, Codes] = {}
        for indices, batch in encode_equal_lengths(codec, clips, PROBE_BATCH_SECONDS):
            expected |= zip(indices, batch, strict=True)
        equal = total = 0
        try:
            for indices, encoded in self.encode(clips, PROBE_BATCH_SECONDS):
                if encoded is None:
                    return "activations of this codec are beyond fp16"
                equal += sum(
                    int((expected[index] == codes).sum()) for index, codes in zip(indices, encoded, strict=True)
                )
                total += sum(codes.size for codes in encoded)
        except torch.OutOfMemoryError:
            # Memory depends on other processes on the GPU, and the choice of encoder must not.
            raise
        except Exception as error:  # noqa: BLE001 - whatever a compiler or a driver raises, plain fp32 remains
            return f"its kernels do not work here ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})"
        if equal < MIN_EQUAL_SHARE * total:
            return f"{equal / total:.3%} of a probe's codes were those of fp32, where {MIN_EQUAL_SHARE:.1%} must be"
        return None


def synthetic_speech(lengths: Sequence[int], rate: int, seed: int = 0) -> list[Samples]:
    """Make speech-like clips of these lengths: gliding pitch, breath noise, syllables, various levels."""
    rng = np.random.default_rng(seed)
    clips: list[Samples] = []
    for samples in lengths:
        t = np.arange(samples, dtype=np.float32) / rate
        pitch = rng.uniform(80, 250) * (1 + 0.1 * np.sin(2 * np.pi * rng.uniform(0.2, 1) * t))
        phase = 2 * np.pi * np.cumsum(pitch) / rate
        slope = rng.uniform(0.5, 1.5)
        voice = np.sum([np.sin(n * phase) / n**slope for n in range(1, 9)], axis=0)
        syllables = np.clip(0.3 + np.sin(2 * np.pi * rng.uniform(2, 5) * t + rng.uniform(0, 6)), 0.02, None)
        level = 10 ** rng.uniform(-1.5, -0.5)
        breath = rng.standard_normal(samples)
        clips.append((level * syllables * (0.4 * voice + 0.15 * breath)).astype(np.float32))
    return clips
