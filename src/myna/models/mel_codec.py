"""Mel codec of the shipped model fledgling.

A mel spectrogram of a few subframes per code frame goes through ConvNeXt blocks, first per subframe, then per frame, to
one short vector per frame, which a residual vector quantizer turns into codes. The decoder mirrors this and ends in
spectra and an inverse STFT. No layer works at the sample rate, so the network is small and fast.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from huggingface_hub import save_torch_state_dict
from torch import nn
from torch.nn import functional as F

from myna.core.errors import CheckpointError, ModelError
from myna.core.io import atomic_folder
from myna.data.codec import Codes, EncodedBatch, NotifyCallback, PendingSamples, Samples, encode_equal_lengths
from myna.models import codecs, files

SPECTRUM_OVERLAP = 4
"""Overlapping spectra per output sample of the decoder."""
MIN_MEL_MAGNITUDE = 1e-5
"""Floor of mel magnitudes before the logarithm."""
MAX_LOG_MAGNITUDE = 3.0
"""Upper limit of log magnitudes: above any full-scale sine, and low enough that its exponential cannot overflow."""
INITIAL_LOG_MAGNITUDE = -4.0
"""Initial log magnitude of the decoder's spectra, near that of speech."""
MODEL_TYPE = "myna_mel_codec"
MAX_SHARD_BYTES = 15_900_000
"""Bytes of tensors in one file, which stays below 16 MB with its header."""
COPY_AGAIN_HINT = "copy the codec's folder again; it came with the model"


@dataclass(frozen=True, slots=True)
class MelCodecConfig:
    """Rates and sizes; the defaults are fledgling's, whose half-precision weights fit one file of 16 MB."""

    sample_rate: int = 24_000
    hop: int = 960
    """Samples per frame of codes."""
    codebooks: int = 8
    codebook_size: int = 1024
    latent: int = 64
    """Values per frame that are quantized."""
    subframes: int = 4
    """Mel frames, and spectra of the decoder, per frame of codes."""
    mel_bins: int = 100
    mel_window: int = 1024
    """Samples per mel frame."""
    kernel: int = 7
    expansion: int = 3
    encoder_width: int = 192
    encoder_fine: int = 4
    """Blocks at the rate of subframes."""
    encoder_frame_width: int = 240
    encoder_coarse: int = 2
    """Blocks at the rate of frames."""
    decoder_frame_width: int = 320
    decoder_coarse: int = 3
    decoder_width: int = 288
    decoder_fine: int = 6

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{field.name} must be a whole number above 0, not {value!r}")
        if self.hop % (2 * self.subframes):
            raise ValueError(f"hop must be a multiple of {2 * self.subframes}, twice the subframes, not {self.hop}")
        if self.mel_window < self.mel_hop or (self.mel_window - self.mel_hop) % 2:
            raise ValueError(f"mel_window must be {self.mel_hop} or more by an even number, not {self.mel_window}")
        if not self.kernel % 2:
            raise ValueError(f"kernel must be odd, not {self.kernel}")
        if self.codebook_size > 2**16:
            raise ValueError(f"codebook_size must fit 16 bits, not {self.codebook_size}")

    @property
    def mel_hop(self) -> int:
        """Samples per subframe."""
        return self.hop // self.subframes

    @property
    def window(self) -> int:
        """Samples of one spectrum of the decoder."""
        return SPECTRUM_OVERLAP * self.mel_hop

    @property
    def decode_reach(self) -> int:
        """Frames on either side of a frame that its samples depend on: the reach of the convolutions per frame, and, in
        subframes, of the finer convolutions and of overlapping spectra."""
        around = self.kernel // 2
        subframes = self.decoder_fine * around + SPECTRUM_OVERLAP // 2
        return self.decoder_coarse * around - -subframes // self.subframes


class ConvNeXtBlock(nn.Module):
    """ConvNeXt block, (clips, time, width): depthwise convolution, then a pointwise MLP."""

    def __init__(self, width: int, kernel: int, expansion: int) -> None:
        super().__init__()
        self.around = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width)
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, expansion * width)
        self.contract = nn.Linear(expansion * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.around(x.transpose(1, 2)).transpose(1, 2)
        update: torch.Tensor = self.scale * self.contract(F.gelu(self.expand(self.norm(mixed))))
        return x + update


class MelSpectrogram(nn.Module):
    """(clips, samples) -> (clips, samples / hop, bins): mel magnitudes, each frame centred on its hop, zero-padded."""

    window: torch.Tensor
    filters: torch.Tensor

    def __init__(self, sample_rate: int, window: int, hop: int, bins: int) -> None:
        super().__init__()
        self.hop = hop
        self.register_buffer("window", torch.hann_window(window), persistent=False)
        self.register_buffer("filters", mel_filters(sample_rate, window, bins), persistent=False)

    def forward(self, waves: torch.Tensor) -> torch.Tensor:
        size = len(self.window)
        frames = F.pad(waves, ((size - self.hop) // 2, (size - self.hop) // 2)).unfold(1, size, self.hop)
        spectra = torch.fft.rfft(frames * self.window)
        # The gradient of `abs` is NaN in digital silence.
        magnitudes = (spectra.real.square() + spectra.imag.square() + 1e-14).sqrt()
        return magnitudes @ self.filters  # type: ignore[no-any-return]


def mel_filters(sample_rate: int, window: int, bins: int) -> torch.Tensor:
    """(window / 2 + 1, bins): triangles of equal area on Slaney's scale, linear to 1 kHz and logarithmic above."""
    linear, per_octave = 200 / 3, torch.log(torch.tensor(6.4, dtype=torch.float64)) / 27
    highest = 15 + torch.log(torch.tensor(sample_rate / 2 / 1000, dtype=torch.float64)) / per_octave
    mels = torch.linspace(0, 1, bins + 2, dtype=torch.float64) * highest
    corners = torch.where(mels < 15, mels * linear, 1000 * torch.exp((mels - 15) * per_octave))
    hertz = torch.linspace(0, sample_rate / 2, window // 2 + 1, dtype=torch.float64)[:, None]
    low, middle, high = corners[:-2], corners[1:-1], corners[2:]
    rising, falling = (hertz - low) / (middle - low), (high - hertz) / (high - middle)
    return (torch.minimum(rising, falling).clamp(min=0) * (2 / (high - low))).float()


class MelEncoder(nn.Module):
    """Encoder: (clips, subframes, mel bins) -> (clips, frames, latent)."""

    def __init__(self, config: MelCodecConfig) -> None:
        super().__init__()
        width, frame_width = config.encoder_width, config.encoder_frame_width
        self.subframes = config.subframes
        self.enter = nn.Linear(config.mel_bins, width)
        self.fine = _blocks(config.encoder_fine, width, config)
        self.gather = nn.Linear(config.subframes * width, frame_width)
        self.coarse = _blocks(config.encoder_coarse, frame_width, config)
        self.norm = nn.LayerNorm(frame_width)
        self.leave = nn.Linear(frame_width, config.latent)

    def forward(self, mels: torch.Tensor) -> torch.Tensor:
        x = self.fine(self.enter(mels))
        x = self.coarse(self.gather(x.reshape(len(x), x.shape[1] // self.subframes, -1)))
        return self.leave(self.norm(x))  # type: ignore[no-any-return]


class ResidualVectorQuantizer(nn.Module):
    """Residual vector quantizer. Each codebook encodes the residual of the codebooks before it."""

    books: torch.Tensor

    def __init__(self, codebooks: int, codebook_size: int, latent: int) -> None:
        super().__init__()
        # A buffer, because entries are trained as running means without gradients.
        self.register_buffer("books", torch.randn(codebooks, codebook_size, latent))

    def nearest(self, residual: torch.Tensor, number: int) -> torch.Tensor:
        """Index of the nearest entry of one codebook: (..., latent) -> (...)."""
        book = self.books[number]
        return (book.square().sum(1) - 2 * residual @ book.T).argmin(-1)

    def encode(self, latent: torch.Tensor) -> torch.Tensor:
        """(..., latent) -> (..., codebooks)."""
        residual, codes = latent, []
        for number, book in enumerate(self.books):
            codes.append(self.nearest(residual, number))
            residual = residual - book[codes[-1]]
        return torch.stack(codes, -1)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """(..., codebooks) -> (..., latent)."""
        return sum((book[codes[..., number]] for number, book in enumerate(self.books)), torch.zeros(()))


class MelDecoder(nn.Module):
    """Decoder: (clips, frames, latent) -> (clips, frames * hop)."""

    window: torch.Tensor

    def __init__(self, config: MelCodecConfig) -> None:
        super().__init__()
        width, frame_width = config.decoder_width, config.decoder_frame_width
        self.subframes = config.subframes
        self.enter = nn.Linear(config.latent, frame_width)
        self.coarse = _blocks(config.decoder_coarse, frame_width, config)
        self.spread = nn.Linear(frame_width, config.subframes * width)
        self.fine = _blocks(config.decoder_fine, width, config)
        self.norm = nn.LayerNorm(width)
        self.spectrum = nn.Linear(width, config.window + 2)
        self.register_buffer("window", torch.hann_window(config.window), persistent=False)
        with torch.no_grad():
            self.spectrum.bias[: config.window // 2 + 1] += INITIAL_LOG_MAGNITUDE

    def forward(self, latent: torch.Tensor) -> torch.Tensor:
        x = self.spread(self.coarse(self.enter(latent)))
        x = self.norm(self.fine(x.reshape(len(x), x.shape[1] * self.subframes, -1)))
        # Phases can be many multiples of 2 pi; half precision is too coarse for them.
        with torch.autocast(x.device.type, enabled=False):
            logs, phases = self.spectrum(x.float()).chunk(2, -1)
            spectra = torch.polar(logs.clamp(max=MAX_LOG_MAGNITUDE).exp(), phases)
            return inverse_stft(spectra, self.window)


def inverse_stft(spectra: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
    """Return (clips, spectra * hop) samples of (clips, spectra, bins): windowed overlap-add over the sum of squared
    windows. torch's own function checks that sum on the host, which waits for the GPU at every call."""
    frames = torch.fft.irfft(spectra, len(window), norm="ortho") * window
    return _overlap_add(frames) / _overlap_add(window.square().expand(1, frames.shape[1], -1))


def _overlap_add(frames: torch.Tensor) -> torch.Tensor:
    clips, count, size = frames.shape
    hop, spare = size // SPECTRUM_OVERLAP, (size - size // SPECTRUM_OVERLAP) // 2
    parts = frames.reshape(clips, count, SPECTRUM_OVERLAP, hop)
    added = sum(F.pad(parts[:, :, n], (0, 0, n, SPECTRUM_OVERLAP - 1 - n)) for n in range(SPECTRUM_OVERLAP))
    assert isinstance(added, torch.Tensor)
    return added.flatten(1)[:, spare : spare + count * hop]


class MelCodecNetwork(nn.Module):
    """Encoder, quantizer and decoder of the mel codec."""

    def __init__(self, config: MelCodecConfig) -> None:
        super().__init__()
        self.config = config
        self.mel = MelSpectrogram(config.sample_rate, config.mel_window, config.mel_hop, config.mel_bins)
        self.encoder = MelEncoder(config)
        self.quantiser = ResidualVectorQuantizer(config.codebooks, config.codebook_size, config.latent)
        self.decoder = MelDecoder(config)

    def log_mel(self, waves: torch.Tensor) -> torch.Tensor:
        """(clips, samples) -> (clips, subframes, mel bins), on a scale where speech lies around 0."""
        with torch.autocast(waves.device.type, enabled=False):
            mels: torch.Tensor = self.mel(waves.float())
            return mels.clamp(min=MIN_MEL_MAGNITUDE).log() / 5 + 1

    def encode(self, waves: torch.Tensor) -> torch.Tensor:
        """Encode (clips, frames * hop) samples to codes (clips, frames, codebooks)."""
        return self.quantiser.encode(self.encoder(self.log_mel(waves)))

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Decode codes (clips, frames, codebooks) to samples (clips, frames * hop)."""
        return self.decoder(self.quantiser.decode(codes))  # type: ignore[no-any-return]


def _blocks(count: int, width: int, config: MelCodecConfig) -> nn.Sequential:
    return nn.Sequential(*(ConvNeXtBlock(width, config.kernel, config.expansion) for _ in range(count)))


class MelCodec:
    """Codec of fledgling: 24 kHz, 25 frames a second, 8 codebooks."""

    def __init__(self, network: MelCodecNetwork, revision: str, device: torch.device) -> None:
        self.revision = revision
        self.sample_rate = network.config.sample_rate
        self.hop = network.config.hop
        self.codebooks = network.config.codebooks
        self.codebook_size = network.config.codebook_size
        self.frame_rate = self.sample_rate / self.hop
        self.decode_reach = network.config.decode_reach
        self._device = device
        self._network = network.to(device).float().eval().requires_grad_(False)

    @classmethod
    def open(cls, folder: Path, device: torch.device | str = "cpu") -> Self:
        config, tensors = read_mel_codec_config(folder), read_mel_codec_tensors(folder)
        network = MelCodecNetwork(config)
        problems = files.state_dict_problems(files.shapes_of(network.state_dict()), files.shapes_of(tensors))
        bad = [name for name, x in tensors.items() if not x.is_floating_point() or not x.isfinite().all()]
        problems += [f"{len(bad)} not finite: {files.format_names(bad)}"] if bad else []
        if problems:
            raise CheckpointError(
                f"the codec in {folder} does not fit its configuration: {'; '.join(problems)}", hint=COPY_AGAIN_HINT
            )
        network.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
        return cls(network, codecs.codec_revision(asdict(config), tensors.items()), torch.device(device))

    def encode(self, clips: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
        """Encode (clips, samples) to (clips, frames, codebooks). One frame is enough, nothing is padded. Clips are
        encoded one by one: sums are ordered differently in another batch, and a code must not depend on its batch."""
        codecs.check_clips(self, clips)
        with codecs.full_precision(self._device):
            waves = torch.from_numpy(np.ascontiguousarray(clips, dtype=np.float32)).to(self._device)
            codes = torch.cat([self._network.encode(wave[None]) for wave in waves])
        return codes.cpu().numpy().astype(np.uint16)

    def encode_batches(
        self, clips: Sequence[Samples], batch_seconds: float, _: NotifyCallback
    ) -> Iterator[EncodedBatch]:
        if self._device.type != "cpu":
            yield from encode_equal_lengths(self, clips, batch_seconds)
            return
        # Layers are so small that threads within them mostly wait for one another: each clip gets one thread.
        threads = torch.get_num_threads()
        try:
            with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                codes = pool.map(lambda clip: self.encode(clip[None]), clips)
                yield from (([position], list(each)) for position, each in enumerate(codes))
        finally:
            torch.set_num_threads(threads)  # threads that begin later take this number

    @cached_property
    def window_independent(self) -> bool:
        """Whether long windows give the same bits. Probed once: it depends on the matrix libraries of this machine."""
        return codecs.probe_window_independence(self)

    def decode(self, codes: Codes) -> Samples:
        return codecs.decode_in_windows(self, codes)

    def decode_windows(self, windows: Sequence[Codes]) -> PendingSamples:
        """Decode windows one by one, because sums may be ordered differently in another batch."""
        decoded = [self._decode_window(window) for window in windows]
        return lambda: decoded

    def _decode_window(self, codes: Codes) -> Samples:
        codecs.check_codes(self, codes)
        with codecs.full_precision(self._device):
            ids = torch.from_numpy(codes.astype(np.int64)).to(self._device)
            wave = self._network.decode(ids[None])[0]
        return wave.clamp(-1, 1).cpu().numpy()


def save_mel_codec(network: MelCodecNetwork, folder: Path) -> None:
    """Write config.json and half-precision safetensors, replacing a codec in that folder."""
    half = {name: tensor.detach().half().cpu().contiguous() for name, tensor in network.state_dict().items()}
    with atomic_folder(folder, replace=True) as written:
        save_torch_state_dict(half, written, max_shard_size=MAX_SHARD_BYTES)
        files.write_json(written / "config.json", {"model_type": MODEL_TYPE} | asdict(network.config))


def read_mel_codec_config(folder: Path) -> MelCodecConfig:
    path = folder / "config.json"
    settings = files.read_json(path)
    if (kind := settings.pop("model_type", None)) != MODEL_TYPE:
        raise ModelError(f"{path}: model_type is {kind!r}, not {MODEL_TYPE}", hint="name the codec's folder")
    names = {field.name for field in fields(MelCodecConfig)}
    if wrong := sorted(settings.keys() ^ names):
        raise ModelError(f"{path}: settings missing or unknown: {', '.join(wrong)}", hint=COPY_AGAIN_HINT)
    try:
        return MelCodecConfig(**settings)
    except ValueError as error:
        raise ModelError(f"{path}: {error}", hint=COPY_AGAIN_HINT) from None


def read_mel_codec_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Read the weights of a codec from one file or several, in the precision of the files."""
    return {tensor.name: tensor.read() for tensor in files.stored_tensors(folder, pickle_hint=COPY_AGAIN_HINT)}
