"""Kokoro-82M as a PyTorch module that says many lines at once.

Its parameters have the names that the ONNX file keeps, with weight norm folded. What stands in a batch beside a longer
line is padded, and padding must not matter: it is zero before every convolution, the statistics of a norm do not
count it, and recurrent layers skip it. So a line says the same alone and in company.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

NOTHING = 1e-6
"""A magnitude below it is left by rounding, and so is its angle."""
UNVOICED = (torch.pi, 0.0, 2.49036, -2.1254, 0.79347, -2.12916, 0.17297, 2.9268, -1.34494, 2.73597, -1.54684)
"""Angles that stand where there is nothing: those that rounding gives in onnxruntime, so that what is not voiced sounds
the same on every machine."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of Kokoro-82M; tests take smaller ones."""

    symbols: int = 178
    positions: int = 512
    embedding: int = 128
    hidden: int = 768
    inner: int = 2048
    heads: int = 12
    layers: int = 12
    width: int = 512
    style: int = 128
    """Half of a row of styles: the first half is for the sound, the second for the manner."""
    longest_duration: int = 50
    decoder: int = 1024
    residual: int = 64
    kernels: tuple[int, ...] = (3, 7, 11)
    steps: tuple[int, int] = (10, 6)
    """Factors by which the generator makes time finer."""
    window: int = 20
    hop: int = 5
    harmonics: int = 9

    @property
    def samples_of_frame(self) -> int:
        return 2 * math.prod(self.steps) * self.hop


def moved(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Copy numbers to a device, without waiting for the work that it still does."""
    found = torch.tensor(numbers)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found


class Lengths:
    """Number of moments that each row of a batch has."""

    def __init__(self, each: Sequence[int], device: torch.device, count: Tensor | None = None) -> None:
        self.each = list(each)
        self.longest = max(self.each)
        self.count = moved(self.each, device) if count is None else count
        self.device = device
        self.mask: Tensor | None = None
        """(batch, 1, time), or nothing where nothing is padded."""
        if min(self.each) < self.longest:
            places = torch.arange(self.longest, device=device)
            self.mask = (places < self.count[:, None])[:, None].float()

    def finer(self, factor: int, more: int = 0) -> Lengths:
        each = [length * factor + more for length in self.each]
        return Lengths(each, self.device, self.count * factor + more)

    def clean(self, x: Tensor) -> Tensor:
        """(batch, channels, time) with nothing where nothing is."""
        return x if self.mask is None else x * self.mask


class Recurrent(nn.LSTM):
    """LSTM in both directions, over (batch, time, channels)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs // 2, batch_first=True, bidirectional=True)

    def over(self, x: Tensor, lengths: Lengths) -> Tensor:
        if lengths.mask is None:
            return self(x)[0]  # type: ignore[no-any-return]
        packed = pack_padded_sequence(x, torch.tensor(lengths.each), batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self(packed)[0], batch_first=True, total_length=lengths.longest)[0]


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.query, self.key, self.value, self.dense = (nn.Linear(sizes.hidden, sizes.hidden) for _ in range(4))
        self.LayerNorm = nn.LayerNorm(sizes.hidden, eps=1e-12)

    def forward(self, x: Tensor, visible: Tensor | None) -> Tensor:
        query, key, value = (
            each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(query, key, value, visible).transpose(1, 2).flatten(2)
        return self.LayerNorm(x + self.dense(attended))  # type: ignore[no-any-return]


class AlbertLayer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention = Attention(sizes)
        self.ffn, self.ffn_output = nn.Linear(sizes.hidden, sizes.inner), nn.Linear(sizes.inner, sizes.hidden)
        self.full_layer_layer_norm = nn.LayerNorm(sizes.hidden, eps=1e-12)

    def forward(self, x: Tensor, visible: Tensor | None) -> Tensor:
        x = self.attention(x, visible)
        return self.full_layer_layer_norm(  # type: ignore[no-any-return]
            x + self.ffn_output(F.gelu(self.ffn(x), approximate="tanh"))
        )


class AlbertEmbeddings(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(sizes.symbols, sizes.embedding)
        self.position_embeddings = nn.Embedding(sizes.positions, sizes.embedding)
        self.token_type_embeddings = nn.Embedding(2, sizes.embedding)
        self.LayerNorm = nn.LayerNorm(sizes.embedding, eps=1e-12)

    def forward(self, ids: Tensor) -> Tensor:
        places = self.position_embeddings.weight[: ids.shape[1]] + self.token_type_embeddings.weight[0]
        return self.LayerNorm(self.word_embeddings(ids) + places)  # type: ignore[no-any-return]


class Albert(nn.Module):
    """One layer, gone through many times."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.times = sizes.layers
        self.embeddings = AlbertEmbeddings(sizes)
        group = nn.ModuleDict({"albert_layers": nn.ModuleList([AlbertLayer(sizes)])})
        self.encoder = nn.ModuleDict(
            {
                "embedding_hidden_mapping_in": nn.Linear(sizes.embedding, sizes.hidden),
                "albert_layer_groups": nn.ModuleList([group]),
            }
        )
        self._layer = (group["albert_layers"][0],)  # type: ignore[index]  # a tuple, or it would be a second module

    def forward(self, ids: Tensor, lengths: Lengths) -> Tensor:
        visible = None if lengths.mask is None else lengths.mask[:, None].bool()
        x: Tensor = self.encoder["embedding_hidden_mapping_in"](self.embeddings(ids))
        for _ in range(self.times):
            x = self._layer[0](x, visible)
        return x


class ChannelNorm(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.transpose(1, 2), self.gamma.shape, self.gamma, self.beta).transpose(1, 2)


class TextEncoder(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.embedding = nn.Embedding(sizes.symbols, width)
        self.cnn = nn.ModuleList(
            nn.Sequential(nn.Conv1d(width, width, 5, padding=2), ChannelNorm(width), nn.LeakyReLU(0.2))
            for _ in range(3)
        )
        self.lstm = Recurrent(width, width)

    def forward(self, ids: Tensor, lengths: Lengths) -> Tensor:
        """(batch, time, channels)"""
        x = lengths.clean(self.embedding(ids).transpose(1, 2))
        for layer in self.cnn:
            x = lengths.clean(layer(x))
        return self.lstm.over(x.transpose(1, 2), lengths)


class StyledLayerNorm(nn.Module):
    def __init__(self, style: int, channels: int) -> None:
        super().__init__()
        self.fc = nn.Linear(style, 2 * channels)

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        gamma, beta = self.fc(style)[:, None].chunk(2, dim=-1)
        return torch.addcmul(beta, 1 + gamma, F.layer_norm(x, x.shape[-1:]))


class DurationEncoder(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.lstms = nn.ModuleList()
        for _ in range(3):
            self.lstms += [
                Recurrent(sizes.width + sizes.style, sizes.width),
                StyledLayerNorm(sizes.style, sizes.width),
            ]

    def forward(self, x: Tensor, style: Tensor, lengths: Lengths) -> Tensor:
        everywhere = style[:, None].expand(-1, x.shape[1], -1)
        x = torch.cat([x, everywhere], dim=-1)
        for layer in self.lstms:
            x = layer.over(x, lengths) if isinstance(layer, Recurrent) else torch.cat([layer(x, style), everywhere], -1)
        return x


class StyledNorm(nn.Module):
    """Every channel over time to a mean and a deviation that belong to the style."""

    def __init__(self, style: int, channels: int) -> None:
        super().__init__()
        self.fc = nn.Linear(style, 2 * channels)

    def forward(self, x: Tensor, style: Tensor, lengths: Lengths) -> Tensor:
        gamma, beta = self.fc(style)[..., None].chunk(2, dim=1)
        variance, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)
        if lengths.mask is not None:  # padding is zero, so it counts in nothing but the number
            share = (lengths.longest / lengths.count.to(x.dtype))[:, None, None]
            square, mean = (variance + mean.square()) * share, mean * share
            variance = (square - mean.square()).clamp_min(0)
        scale = (1 + gamma) * torch.rsqrt(variance + 1e-5)
        return torch.addcmul(beta - mean * scale, x, scale)


class StyledBlock(nn.Module):
    """Two convolutions beside a shortcut; some make time twice as fine."""

    def __init__(self, inputs: int, outputs: int, style: int, finer: bool = False) -> None:
        super().__init__()
        self.conv1, self.conv2 = (
            nn.Conv1d(inputs, outputs, 3, padding=1),
            nn.Conv1d(outputs, outputs, 3, padding=1),
        )
        self.norm1, self.norm2 = StyledNorm(style, inputs), StyledNorm(style, outputs)
        self.pool = (
            nn.ConvTranspose1d(inputs, inputs, 3, 2, padding=1, output_padding=1, groups=inputs) if finer else None
        )
        self.conv1x1 = nn.Conv1d(inputs, outputs, 1, bias=False) if inputs != outputs else None

    def forward(self, x: Tensor, style: Tensor, lengths: Lengths) -> tuple[Tensor, Lengths]:
        out = lengths.clean(F.leaky_relu(self.norm1(x, style, lengths), 0.2))
        if self.pool is not None:
            lengths = lengths.finer(2)
            out, x = lengths.clean(self.pool(out)), x.repeat_interleave(2, dim=-1)
        out = lengths.clean(self.conv1(out))
        out = self.conv2(lengths.clean(F.leaky_relu(self.norm2(out, style, lengths), 0.2)))
        if self.conv1x1 is not None:
            x = self.conv1x1(x)
        return lengths.clean((out + x) * math.sqrt(0.5)), lengths


class Predictor(nn.Module):
    """Predicts how long phonemes are, how high and how loud."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, style = sizes.width, sizes.style
        self.text_encoder = DurationEncoder(sizes)
        self.lstm, self.shared = Recurrent(width + style, width), Recurrent(width + style, width)
        self.duration_proj = nn.ModuleDict({"linear_layer": nn.Linear(width, sizes.longest_duration)})
        self.F0, self.N = (
            nn.ModuleList(
                [
                    StyledBlock(width, width, style),
                    StyledBlock(width, width // 2, style, finer=True),
                    StyledBlock(width // 2, width // 2, style),
                ]
            )
            for _ in range(2)
        )
        self.F0_proj, self.N_proj = nn.Conv1d(width // 2, 1, 1), nn.Conv1d(width // 2, 1, 1)

    def durations(self, encoded: Tensor, speed: Tensor, lengths: Lengths) -> Tensor:
        long = torch.sigmoid(self.duration_proj["linear_layer"](self.lstm.over(encoded, lengths))).sum(-1)
        frames = torch.round(long / speed[:, None]).clamp_min(1).long()
        return frames if lengths.mask is None else frames * lengths.mask[:, 0].long()

    def pitch_and_energy(self, x: Tensor, style: Tensor, lengths: Lengths) -> tuple[Tensor, Tensor]:
        """(batch, 1, twice the frames) each."""
        shared = lengths.clean(self.shared.over(x, lengths).transpose(1, 2))
        found = []
        for blocks, projection in ((self.F0, self.F0_proj), (self.N, self.N_proj)):
            curve, at = shared, lengths
            for block in blocks:
                curve, at = block(curve, style, at)
            found.append(at.clean(projection(curve)))
        return found[0], found[1]


class SnakeBlock(nn.Module):
    def __init__(self, channels: int, kernel: int, style: int) -> None:
        super().__init__()
        self.convs1, self.convs2 = (
            nn.ModuleList(
                nn.Conv1d(channels, channels, kernel, padding=(kernel - 1) * each // 2, dilation=each)
                for each in dilations
            )
            for dilations in ((1, 3, 5), (1, 1, 1))
        )
        self.adain1, self.adain2 = (nn.ModuleList(StyledNorm(style, channels) for _ in range(3)) for _ in range(2))
        self.alpha1, self.alpha2 = (nn.ParameterList(torch.ones(1, channels, 1) for _ in range(3)) for _ in range(2))

    def forward(self, x: Tensor, style: Tensor, lengths: Lengths) -> Tensor:
        for number in range(3):
            out = snake(self.adain1[number](x, style, lengths), self.alpha1[number])
            out = lengths.clean(self.convs1[number](lengths.clean(out)))
            out = snake(self.adain2[number](out, style, lengths), self.alpha2[number])
            x = x + lengths.clean(self.convs2[number](lengths.clean(out)))
        return x


def snake(x: Tensor, alpha: Tensor) -> Tensor:
    return torch.addcmul(x, (x * alpha).sin_().square_(), 1 / alpha)


class Generator(nn.Module):
    """Turns frames into samples: it shapes sines of the pitch, spectrum by spectrum."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        bins, (coarse, fine) = sizes.window + 2, sizes.steps
        first, second = sizes.width // 2, sizes.width // 4
        self.m_source = nn.ModuleDict({"l_linear": nn.Linear(sizes.harmonics, 1)})
        self.ups = nn.ModuleList(
            nn.ConvTranspose1d(inputs, outputs, 2 * step, step, padding=step // 2)
            for inputs, outputs, step in ((sizes.width, first, coarse), (first, second, fine))
        )
        self.noise_convs = nn.ModuleList(
            [nn.Conv1d(bins, first, 2 * fine, fine, padding=(fine + 1) // 2), nn.Conv1d(bins, second, 1)]
        )
        self.noise_res = nn.ModuleList([SnakeBlock(first, 7, sizes.style), SnakeBlock(second, 11, sizes.style)])
        self.resblocks = nn.ModuleList(
            SnakeBlock(channels, kernel, sizes.style) for channels in (first, second) for kernel in sizes.kernels
        )
        self.conv_post = nn.Conv1d(second, bins, 7, padding=3)
        self.hann: Tensor
        self.unvoiced: Tensor
        self.register_buffer("hann", torch.hann_window(sizes.window), persistent=False)
        angles = torch.tensor(UNVOICED)[: sizes.window // 2 + 1, None]
        self.register_buffer("unvoiced", angles, persistent=False)

    def forward(self, x: Tensor, style: Tensor, pitch: Tensor, lengths: Lengths) -> Tensor:
        """`x` and `pitch` at two places a frame; (batch, samples)."""
        coarse, fine = self.sizes.steps
        source = self.spectrum(self.sines(pitch), lengths.finer(coarse * fine * self.sizes.hop))
        finest = lengths.finer(coarse * fine, 1)
        source = finest.clean(source)
        for number, at in enumerate((lengths.finer(coarse), finest)):
            beside = at.clean(self.noise_convs[number](source))
            beside = self.noise_res[number](beside, style, at)
            x = self.ups[number](F.leaky_relu(x, 0.1))
            if number == 1:
                x = F.pad(x, (1, 0), mode="reflect")
            x = at.clean(x) + beside
            first, *others = self.resblocks[number * 3 : number * 3 + 3]
            out = first(x, style, at)
            for block in others:
                out += block(x, style, at)
            x = out / 3
        magnitude, angle = self.conv_post(F.leaky_relu(x)).chunk(2, dim=1)
        return self.samples(finest.clean(magnitude.exp()), angle.sin())

    def sines(self, pitch: Tensor) -> Tensor:
        """(batch, samples): the pitch and its overtones, which hold their phase from place to place."""
        times = math.prod(self.sizes.steps) * self.sizes.hop
        harmonic = torch.arange(1, self.sizes.harmonics + 1, device=pitch.device)[:, None]
        turns = (pitch * harmonic / 24_000) % 1
        phase = turns.cumsum(-1) * (2 * torch.pi) * times
        waves = F.interpolate(phase, scale_factor=times, mode="linear").sin_() * 0.1
        voiced = (pitch > 10).float().repeat_interleave(times, dim=-1)
        return torch.tanh(self.m_source["l_linear"]((waves * voiced).transpose(1, 2))).squeeze(-1)

    def spectrum(self, waves: Tensor, lengths: Lengths) -> Tensor:
        """Magnitudes and angles of what is mirrored at both ends of each line."""
        half = self.sizes.window // 2
        places = torch.arange(-half, lengths.longest + half, device=waves.device).abs()
        last = lengths.count[:, None] - 1
        places = torch.where(places > last, 2 * last - places, places).clamp_min(0)
        mirrored = waves.gather(1, places)
        found = torch.stft(
            mirrored, self.sizes.window, self.sizes.hop, window=self.hann, center=False, return_complex=True
        )
        # Of a negative number it is pi, even where a transform leaves a minus before a zero.
        angle = torch.where((found.imag == 0) & (found.real < 0), torch.pi, found.angle())
        magnitude = found.abs()
        return torch.cat([magnitude, torch.where(magnitude < NOTHING, self.unvoiced, angle)], dim=1)

    def samples(self, magnitude: Tensor, angle: Tensor) -> Tensor:
        """Windows added up. They overlap to one and a half, by which this is louder than it was recorded; so is the
        ONNX file, which divides by that nowhere but at the very beginning."""
        half = self.sizes.window // 2
        pieces = torch.fft.irfft(torch.polar(magnitude, angle), dim=1) * self.hann[:, None]
        return _added(pieces, self.sizes.hop)[:, half:-half]


def _added(pieces: Tensor, hop: int) -> Tensor:
    """(batch, window, frames) overlapping by all but `hop`."""
    size, frames = pieces.shape[1:]
    return F.fold(pieces, (1, (frames - 1) * hop + size), (1, size), stride=(1, hop))[:, 0, 0]


class Decoder(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        inside, style = sizes.decoder, sizes.style
        more = inside + 2 + sizes.residual
        self.encode = StyledBlock(sizes.width + 2, inside, style)
        self.decode = nn.ModuleList(
            [*(StyledBlock(more, inside, style) for _ in range(3)), StyledBlock(more, sizes.width, style, finer=True)]
        )
        self.F0_conv, self.N_conv = (nn.Conv1d(1, 1, 3, 2, padding=1) for _ in range(2))
        self.asr_res = nn.Sequential(nn.Conv1d(sizes.width, sizes.residual, 1))
        self.generator = Generator(sizes)

    def forward(self, text: Tensor, pitch: Tensor, energy: Tensor, style: Tensor, lengths: Lengths) -> Tensor:
        """Return the input of the generator: (batch, channels, twice the frames)."""
        curves = [lengths.clean(self.F0_conv(pitch)), lengths.clean(self.N_conv(energy))]
        beside = [lengths.clean(self.asr_res(text)), *curves]
        x, at = self.encode(torch.cat([text, *curves], dim=1), style, lengths)
        for block in self.decode:
            x, at = block(torch.cat([x, *beside], dim=1), style, at)
        return x  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class EncodedText:
    """Encoded lines, before synthesis."""

    manner: Tensor
    """(batch, phonemes, channels), for pitch and energy."""
    text: Tensor
    """(batch, phonemes, channels), for the sound."""
    durations: Tensor
    """(batch, phonemes), in frames."""
    styles: Tensor
    frames: list[int]

    def rows(self, which: Sequence[int]) -> EncodedText:
        at = moved(which, self.text.device)
        frames = [self.frames[number] for number in which]
        return EncodedText(self.manner[at], self.text[at], self.durations[at], self.styles[at], frames)


@dataclass(frozen=True, slots=True)
class GeneratorInput:
    """Lines as the generator takes them: all that is left is to make time finer."""

    x: Tensor
    """(batch, channels, twice the frames)"""
    pitch: Tensor
    """(batch, 1, twice the frames)"""
    style: Tensor
    frames: list[int]

    def rows(self, which: Sequence[int]) -> GeneratorInput:
        at, frames = moved(which, self.x.device), [self.frames[number] for number in which]
        longest = 2 * max(frames)
        return GeneratorInput(self.x[at, :, :longest], self.pitch[at, :, :longest], self.style[at], frames)

    @property
    def lengths(self) -> Lengths:
        return Lengths([2 * frames for frames in self.frames], self.x.device)


class KokoroNetwork(nn.Module):
    def __init__(self, sizes: Sizes | None = None) -> None:
        super().__init__()
        self.sizes = sizes = sizes or Sizes()
        self.bert = Albert(sizes)
        self.bert_encoder = nn.Linear(sizes.hidden, sizes.width)
        self.text_encoder = TextEncoder(sizes)
        self.predictor = Predictor(sizes)
        self.decoder = Decoder(sizes)

    def read(self, ids: Sequence[Sequence[int]], styles: Tensor, speeds: Tensor) -> EncodedText:
        """Phonemes with both of their ends; a row of styles for each line."""
        lengths = Lengths([len(line) for line in ids], styles.device)
        padded = torch.zeros(len(ids), lengths.longest, dtype=torch.long)
        for row, line in zip(padded, ids, strict=True):
            row[: len(line)] = torch.tensor(line)
        padded = padded.to(styles.device)
        manner = styles[:, self.sizes.style :]
        encoded = self.predictor.text_encoder(self.bert_encoder(self.bert(padded, lengths)), manner, lengths)
        durations = self.predictor.durations(encoded, speeds, lengths)
        return EncodedText(encoded, self.text_encoder(padded, lengths), durations, styles, durations.sum(1).tolist())

    def voice(self, read: EncodedText) -> GeneratorInput:
        """All that is done frame by frame: little work, but recurrent, so that it is best done for many lines."""
        lengths = Lengths(read.frames, read.styles.device)
        ends = read.durations.cumsum(1)
        places = torch.arange(lengths.longest, device=ends.device).expand(len(ends), -1).contiguous()
        spoken = torch.searchsorted(ends, places, right=True).clamp_max(ends.shape[1] - 1)
        manner, text = (
            each.gather(1, spoken[..., None].expand(-1, -1, each.shape[-1])) for each in (read.manner, read.text)
        )
        sound, style = read.styles.chunk(2, dim=1)
        pitch, energy = self.predictor.pitch_and_energy(manner, style, lengths)
        x = self.decoder(lengths.clean(text.transpose(1, 2)), pitch, energy, sound, lengths)
        return GeneratorInput(x, pitch, sound, read.frames)

    def say(self, read: EncodedText) -> list[Tensor]:
        """The samples of each line."""
        voiced = self.voice(read)
        samples = self.decoder.generator(voiced.x, voiced.style, voiced.pitch, voiced.lengths)
        return [row[: frames * self.sizes.samples_of_frame] for row, frames in zip(samples, read.frames, strict=True)]
