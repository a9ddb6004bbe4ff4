"""The codec's encoder for many clips: transformers' weights in a forward pass of our own.

Clips of unequal length may share a batch. A convolution takes what lies outside a clip as zero, so none reads behind a
shorter clip's end; the one norm over time leaves that out, and attention does not look there. Activations lie as
(clips, time, channels), and all that happens to a product's output before the next product reads it is done where the
product is made: the sum with what came before it, and the activation. On a CUDA card with Triton that is one kernel of
`codec_kernels.py`, on tensor cores and as accurate as fp32; what is written here in torch is for any other device and
for reading.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from myna.models.triton_support import fused

Then = Tensor | Literal["gelu", "elu"] | None
"""The activation behind a product. A tensor is a snake's: how fast each channel's sine is."""


@cache
def _kernels() -> Any:
    return __import__("myna.models.higgs_v2.codec_kernels", fromlist=["codec_kernels"])


def _activation(then: Then) -> tuple[int, Tensor | None]:
    """As the kernels are told it."""
    if isinstance(then, Tensor):
        return _kernels().SNAKE, then
    return {None: _kernels().NOTHING, "gelu": _kernels().GELU, "elu": _kernels().ELU}[then], None


def act(x: Tensor, then: Then) -> Tensor:
    if isinstance(then, Tensor):
        return x + (then + 1e-9).reciprocal() * torch.sin(then * x).pow(2)
    if then is None:
        return x
    return F.gelu(x) if then == "gelu" else F.elu(x)


def inside(x: Tensor, ends: Tensor) -> Tensor:
    """Which places of `x` (clips, time, ...) lie before each clip's end, as (clips, time, 1)."""
    return (torch.arange(x.shape[1], device=x.device) < ends[:, None])[..., None]


class Product(nn.Module):
    """A convolution or a linear layer, and what happens to its output before the next one reads it."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        stride: int = 1,
        padding: int = 0,
        dilation: int = 1,
        groups: int = 1,
    ) -> None:
        super().__init__()
        self.outputs, self.channels, self.kernel = weight.shape
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups
        self.bias = None if bias is None else nn.Buffer(bias.detach().clone())
        if fused(weight):
            high, low = _kernels().split(weight.detach(), groups)
            self.high, self.low = nn.Buffer(high), nn.Buffer(low)
        else:
            self.weight = nn.Buffer(weight.detach().clone())

    @classmethod
    def of(cls, conv: nn.Conv1d) -> Product:
        geometry = (conv.stride[0], int(conv.padding[0]), conv.dilation[0])
        return cls(conv.weight, conv.bias, *geometry, conv.groups)

    @classmethod
    def linear(cls, *layers: nn.Linear) -> Product:
        """Linear layers that read the same input, as one."""
        weight = torch.cat([layer.weight.detach() for layer in layers])
        return cls(weight[..., None], torch.cat([layer.bias.detach() for layer in layers]))

    def length(self, time: Any) -> Any:
        """How long the output is, for a number or a tensor of them."""
        return (time + 2 * self.padding - self.dilation * (self.kernel - 1) - 1) // self.stride + 1

    def forward(self, x: Tensor, ends: Tensor, *, add: Tensor | None = None, then: Then = None) -> Tensor:
        """(clips, time, channels), read up to `ends` -> `then` of the product, with `add` added to it."""
        return self.both(x, ends, add=add, then=then, keep=False)[1]

    def both(
        self, x: Tensor, ends: Tensor, *, add: Tensor | None = None, then: Then = None, keep: bool = True
    ) -> tuple[Tensor, Tensor]:
        """The product with `add` added to it, and `then` of that. Without `keep`, only the latter is of use."""
        # Filters of even length would leave one place more than HuBERT's positional convolution keeps.
        time_out = min(self.length(x.shape[1]), x.shape[1])
        if fused(x):
            weight, geometry = (self.high, self.low), (self.stride, self.dilation, self.padding)
            arguments = (x, ends, weight, self.bias, self.outputs, time_out, *geometry, *_activation(then), add, keep)
            return _kernels().convolve(*arguments)  # type: ignore[no-any-return]
        x = torch.where(inside(x, ends), x, 0.0).transpose(1, 2)
        x = F.conv1d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)
        x = x[..., :time_out].transpose(1, 2).contiguous()
        x = x if add is None else x + add
        return x, act(x, then)


class FirstProduct(nn.Module):
    """A convolution over samples: with one channel to read, it takes less time than writing down what it gives."""

    def __init__(self, conv: nn.Conv1d) -> None:
        super().__init__()
        self.kernel, self.stride, self.padding = conv.kernel_size[0], conv.stride[0], int(conv.padding[0])
        self.weight = nn.Buffer(conv.weight.detach()[:, 0].T.contiguous())
        bias = conv.weight.new_zeros(len(conv.weight)) if conv.bias is None else conv.bias
        self.bias = nn.Buffer(bias.detach().clone())

    def length(self, time: Any) -> Any:
        return (time + 2 * self.padding - self.kernel) // self.stride + 1

    def forward(
        self, waves: Tensor, ends: Tensor, *, norm: nn.GroupNorm | None = None, then: Then = None, keep: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(clips, samples) -> the product, normalised over each clip's time where that is due, and `then` of it."""
        scale, shift = (None, self.bias) if norm is None else self.over_time(waves, ends, norm)
        if fused(waves):
            time_out = self.length(waves.shape[1])
            arguments = (self.weight, scale, shift, time_out, self.stride, self.padding, *_activation(then), keep)
            return _kernels().convolve_samples(waves, ends, *arguments)  # type: ignore[no-any-return]
        x = self._windows(torch.where(inside(waves[..., None], ends)[..., 0], waves, 0.0)) @ self.weight
        x = x + shift if scale is None else x * scale[:, None] + shift[:, None]
        return x, act(x, then)

    def over_time(self, waves: Tensor, ends: Tensor, norm: nn.GroupNorm) -> tuple[Tensor, Tensor]:
        """What each channel of each clip is multiplied with, and what is added, to normalise it over the clip's time.

        A channel's mean and variance follow from those of the few samples that it is a weighted sum of, so that the
        many channels need not be there yet.
        """
        windows = self._windows(waves).double()
        count = self.length(ends)[:, None, None]
        keep = inside(windows, count[:, 0, 0])
        mean = torch.where(keep, windows, 0.0).sum(1, keepdim=True) / count
        rest = torch.where(keep, windows - mean, 0.0)
        weight = self.weight.double()
        variance = (weight * (rest.mT @ rest / count @ weight)).sum(1)
        scale = torch.rsqrt(variance + norm.eps) * norm.weight
        return scale.float(), (norm.bias - (mean[:, 0] @ weight) * scale).float()

    def _windows(self, waves: Tensor) -> Tensor:
        return F.pad(waves, (self.padding, self.padding)).unfold(1, self.kernel, self.stride)


class AcousticBlock(nn.Module):
    def __init__(self, block: Any) -> None:
        super().__init__()
        units = (block.res_unit1, block.res_unit2, block.res_unit3)
        self.wide = nn.ModuleList(Product.of(unit.conv1) for unit in units)
        self.narrow = nn.ModuleList(Product.of(unit.conv2) for unit in units)
        self.down = Product.of(block.conv1)
        snakes = [snake for unit in units for snake in (unit.snake1, unit.snake2)]
        for number, snake in enumerate((*snakes, block.snake1)):
            self.register_buffer(f"alpha{number}", snake.alpha.detach().flatten().clone())

    def alpha(self, number: int) -> Tensor:
        """Of the snake before each product of the block."""
        found: Tensor = getattr(self, f"alpha{number}")
        return found

    def forward(self, x: Tensor, ready: Tensor, ends: Tensor, then: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
        """What comes in and what its first snake makes of it -> the same of what goes out."""
        wide: Any
        narrow: Any
        for number, (wide, narrow) in enumerate(zip(self.wide, self.narrow, strict=True)):
            ready = wide(ready, ends, then=self.alpha(2 * number + 1))
            last = number + 1 == len(self.wide)
            x, ready = narrow.both(ready, ends, add=x, then=self.alpha(2 * number + 2), keep=not last)
        return self.down.both(ready, ends, then=then, keep=keep)


class AcousticEncoder(nn.Module):
    """DAC's encoder: 24,000 samples a second to 25 frames."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.first = FirstProduct(encoder.conv1)
        self.blocks = nn.ModuleList(AcousticBlock(block) for block in encoder.block)
        self.alpha = nn.Buffer(encoder.snake1.alpha.detach().flatten().clone())
        self.last = Product.of(encoder.conv2)

    def forward(self, waves: Tensor, ends: Tensor) -> Tensor:
        """`ends` in samples."""
        blocks: list[Any] = list(self.blocks)
        alphas = [*(block.alpha(0) for block in blocks), self.alpha]
        x, ready = self.first(waves, ends, then=alphas[0], keep=True)
        for number, block in enumerate(blocks, start=1):
            x, ready = block(x, ready, ends, alphas[number], keep=number < len(blocks))
            ends = block.down.length(ends)
        out: Tensor = self.last(ready, ends)
        return out


class SpeechLayer(nn.Module):
    """A layer of HuBERT."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention, feed_forward = layer.attention, layer.feed_forward
        self.heads = attention.num_heads
        self.look = Product.linear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = Product.linear(attention.out_proj)
        self.up = Product.linear(feed_forward.intermediate_dense)
        self.down = Product.linear(feed_forward.output_dense)
        self.norm1, self.norm2 = layer.layer_norm, layer.final_layer_norm

    def forward(self, x: Tensor, ends: Tensor, seen: Tensor | None) -> Tensor:
        clips, time, channels = x.shape
        query, key, value = self.look(x, ends).view(clips, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        heard = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        heard = heard.transpose(1, 2).reshape(clips, time, channels)
        x = self.norm1(self.out(heard, ends, add=x))
        out: Tensor = self.norm2(self.down(self.up(x, ends, then="gelu"), ends, add=x))
        return out


class SpeechModel(nn.Module):
    """HuBERT as the codec uses it: 16,000 samples a second to the mean of its hidden states, 50 a second."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        first, *others = model.feature_extractor.conv_layers
        self.first = FirstProduct(first.conv)
        self.norm_over_time = first.layer_norm
        self.others = nn.ModuleList(Product.of(layer.conv) for layer in others)
        self.feature_norm = model.feature_projection.layer_norm
        self.projection = Product.linear(model.feature_projection.projection)
        self.place = Product.of(model.encoder.pos_conv_embed.conv)
        self.norm = model.encoder.layer_norm
        self.layers = nn.ModuleList(SpeechLayer(layer) for layer in model.encoder.layers)

    def forward(self, waves: Tensor, ends: Tensor, mixed: bool) -> Tensor:
        """`ends` in samples; whether they are `mixed` is said, since to look at them would keep the host waiting."""
        _, x = self.first(waves, ends, norm=self.norm_over_time, then="gelu")
        ends = self.first.length(ends)
        conv: Any
        for conv in self.others:
            x, ends = conv(x, ends, then="gelu"), conv.length(ends)
        x = self.projection(self.feature_norm(x), ends)
        x = self.norm(x + self.place(x, ends, then="gelu"))
        seen = inside(x, ends)[:, None, None, :, 0] if mixed else None
        total = x
        for layer in self.layers:
            x = layer(x, ends, seen)
            total = total + x
        mean: Tensor = total / (len(self.layers) + 1)
        return mean


class SemanticEncoder(nn.Module):
    """The few convolutions behind HuBERT."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.first = Product.of(encoder.conv)
        self.wide, self.narrow, self.last = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for block in encoder.conv_blocks:
            self.wide.append(nn.ModuleList(Product.of(unit.conv1) for unit in block.res_units))
            self.narrow.append(nn.ModuleList(Product.of(unit.conv2) for unit in block.res_units))
            self.last.append(Product.of(block.conv))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        x, ready = self.first.both(x, ends, then="elu")
        wides: Any
        narrows: Any
        last: Any
        for wides, narrows, last in zip(self.wide, self.narrow, self.last, strict=True):
            for wide, narrow in zip(wides, narrows, strict=True):
                x, ready = narrow.both(wide(ready, ends, then="elu"), ends, add=x, then="elu")
            x, ready = last.both(x, ends, then="elu")
            ends = last.length(ends)
        return x


class FastEncoder(nn.Module):
    """Waves to what the quantiser reads. Open it on the codec's model where that is to stay: its modules are not
    touched, and what is made of their weights depends on the device."""

    def __init__(self, model: Any, resample: Callable[[Tensor, int, int], Tensor]) -> None:
        super().__init__()
        config = model.config
        self.hop: int = config.hop_length
        self.rates: tuple[int, int] = (config.sample_rate, config.semantic_sample_rate)
        self.every: int = config.semantic_downsample_factor
        self.resample = resample
        self.acoustic = AcousticEncoder(model.acoustic_encoder)
        self.speech = SpeechModel(model.semantic_model)
        self.semantic = SemanticEncoder(model.encoder_semantic)
        self.join = Product.linear(model.fc)

    def forward(self, waves: Tensor, frames: Tensor | None = None) -> Tensor:
        """(clips, samples), and each clip's frames where they differ -> (clips, frames, channels).

        Where an activation is beyond what fp16 can hold, what comes out is not finite.
        """
        mixed = frames is not None
        if frames is None:
            frames = torch.full((len(waves),), waves.shape[1] // self.hop, device=waves.device)
        ends = frames * self.hop
        waves = torch.where(inside(waves[..., None], ends)[..., 0], waves, 0.0)
        acoustic, semantic = self.acoustic(waves, ends), self.listen(self.slower(waves, frames), frames, mixed)
        out: Tensor = self.join(torch.cat([acoustic, semantic], -1), frames)
        return out

    def slower(self, waves: Tensor, frames: Tensor) -> Tensor:
        """The waves at the rate of HuBERT, with the silence around them that the codec gives it."""
        slow = self.resample(waves, *self.rates)
        slow = torch.where(inside(slow[..., None], self._slow_ends(frames))[..., 0], slow, 0.0)
        return F.pad(slow, (160, 160))

    def listen(self, slow: Tensor, frames: Tensor, mixed: bool) -> Tensor:
        heard = self.speech(slow, self._slow_ends(frames) + 320, mixed)
        out: Tensor = self.semantic(heard[:, :: self.every].contiguous(), frames)
        return out

    def _slow_ends(self, frames: Tensor) -> Tensor:
        own, slow = self.rates
        return -(-frames * self.hop * slow // own)


def why_not(model: Any) -> str | None:
    """What keeps a codec from the fast encoder, which knows one form of HuBERT: that of the released codec."""
    config = model.config.semantic_model_config
    if config.model_type != "hubert" or config.do_stable_layer_norm or config.feat_extract_norm != "group":
        return "its semantic model is not a HuBERT with one norm over time"
    if {config.feat_extract_activation, config.hidden_act} != {"gelu"} or not config.feat_proj_layer_norm:
        return "its semantic model has other activations or norms than the released codec's"
    if getattr(config, "conv_pos_batch_norm", False):
        return "its semantic model places positions with a batch norm"
    ratio = model.config.hop_length * model.config.semantic_sample_rate
    if ratio % model.config.sample_rate:
        return "its two sample rates do not share a frame"
    return None
