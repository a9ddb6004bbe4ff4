"""Augmentation of speech on the device that trains: other voices, microphones, rooms, noise, levels and band limits.

Pure functions of (clips, samples) with one parameter per clip, and `Augmentation`, which draws the parameters. Nothing
synchronises with the host, so that all of it is part of a captured training step. Randomness comes from one generator
(torch's own by default), so that equal seeds give equal clips.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from codec_training.backgrounds import background_bank
from myna.models.mel_codec import SPECTRUM_OVERLAP, inverse_stft

SPEEDS = tuple(round(0.75 * (1.4 / 0.75) ** (step / 40), 4) for step in range(41))
"""Playback speeds, which move pitch and formants together: from a large man to a child, or an actor of one."""
SINC_TAPS, SINC_PHASES = 8, 512
"""Samples that an interpolated one is computed of, and fractions of a sample that have weights of their own."""
FORMANT_WINDOW, ENVELOPE_CEPSTRA = 960, 45
"""Samples of an STFT frame, and cepstral coefficients of its envelope: 45 samples are the period of 530 Hz."""
MAX_FORMANT_GAIN = math.log(10.0)
"""Log gain by which moving an envelope may change a bin: 20 dB."""
ROOM_SECONDS = 0.5
EQUALISER_KNOTS = 12
BAND_EDGES = (4000.0, 5512.5, 8000.0, 11025.0)
"""Half the sample rates of telephones, old files, speech recordings and files of 22 kHz."""


class Draws:
    """Random parameters, one per clip as (clips, 1), of one generator."""

    def __init__(self, clips: int, device: torch.device, generator: torch.Generator | None = None) -> None:
        self.clips, self.device, self.generator = clips, device, generator

    def uniform(self, low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(self.clips, 1, device=self.device, generator=self.generator)

    def logarithmic(self, low: float, high: float) -> torch.Tensor:
        """Uniform on a logarithmic scale."""
        return self.uniform(math.log(low), math.log(high)).exp()

    def chance(self, share: float) -> torch.Tensor:
        return torch.rand(self.clips, 1, device=self.device, generator=self.generator) < share

    def index(self, count: int) -> torch.Tensor:
        """(clips,): one of `count` places."""
        return (self.uniform(0, count)[:, 0]).long().clamp(max=count - 1)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(self.clips, *shape, device=self.device, generator=self.generator)


def sinc_table(speeds: Sequence[float] = SPEEDS) -> torch.Tensor:
    """(speeds * phases, taps): weights of windowed-sinc interpolation, low-passed where a clip is played faster."""
    taps = torch.arange(SINC_TAPS, dtype=torch.float64) - (SINC_TAPS // 2 - 1)
    fractions = torch.arange(SINC_PHASES, dtype=torch.float64) / SINC_PHASES
    distance = taps - fractions[:, None]
    window = torch.cos(math.pi * distance / (SINC_TAPS + 1)).square()
    rows = []
    for speed in speeds:
        cutoff = min(1.0, 1 / speed)
        weights = cutoff * torch.sinc(cutoff * distance) * window
        rows.append(weights / weights.sum(1, keepdim=True))
    return torch.cat(rows).float()


def interpolate(
    bank: torch.Tensor, first: torch.Tensor, last: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """Samples of a bank between its samples.

    `positions` (clips, samples) are in samples of the bank, in float64; `first` and `last` (clips, 1) are the bounds of
    each clip in it; `rows` (speeds' phases, taps) has the weights of each clip's speed: (clips, phases, taps).
    """
    whole = positions.floor()
    phase = ((positions - whole) * SINC_PHASES).long()
    base = whole.long() - (SINC_TAPS // 2 - 1)
    result = torch.zeros(positions.shape, device=positions.device)
    for tap in range(SINC_TAPS):
        place = torch.minimum(torch.maximum(base + tap, first), last)
        result += bank[place] * rows[:, :, tap].gather(1, phase)
    return result


def warp_formants(waves: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Move the spectral envelope up by a factor (clips, 1) and leave the harmonics where they are: other vocal tracts
    at the same pitch. The number of samples is a multiple of a quarter of `FORMANT_WINDOW`."""
    size, hop = FORMANT_WINDOW, FORMANT_WINDOW // SPECTRUM_OVERLAP
    window = torch.hann_window(size, device=waves.device)
    around = (size - hop) // 2
    spectra = torch.fft.rfft(F.pad(waves, (around, around)).unfold(1, size, hop) * window, norm="ortho")
    logs = (spectra.real.square() + spectra.imag.square() + 1e-10).log() / 2
    cepstra = torch.fft.irfft(logs, size)
    quefrency = torch.arange(size, device=waves.device)
    envelope = torch.fft.rfft(cepstra * (torch.minimum(quefrency, size - quefrency) <= ENVELOPE_CEPSTRA)).real
    bins = envelope.shape[-1]
    source = (torch.arange(bins, device=waves.device) / factors).clamp(max=bins - 1.001)
    low = source.long()
    share = (source - low)[:, None]
    low = low[:, None].expand(-1, envelope.shape[1], -1)
    moved = envelope.gather(2, low) * (1 - share) + envelope.gather(2, low + 1) * share
    return inverse_stft(spectra * (moved - envelope).clamp(-MAX_FORMANT_GAIN, MAX_FORMANT_GAIN).exp(), window)


def equaliser(draws: Draws, hertz: torch.Tensor, strength_db: torch.Tensor) -> torch.Tensor:
    """(clips, bins): a gain that is smooth over the logarithm of frequency, of knots with that deviation in dB."""
    knots = draws.normal(EQUALISER_KNOTS) * strength_db
    octaves = (hertz.clamp(min=50.0) / 50.0).log2()
    place = (octaves / octaves[-1] * (EQUALISER_KNOTS - 1)).clamp(max=EQUALISER_KNOTS - 1.001)
    low = place.long()
    share = place - low
    return 10 ** ((knots[:, low] * (1 - share) + knots[:, low + 1] * share) / 20)


def low_pass(hertz: torch.Tensor, edges: torch.Tensor, widths: torch.Tensor) -> torch.Tensor:
    """(clips, bins): falls from 1 to 0 around each clip's edge, within some of its widths in Hz."""
    return torch.sigmoid((edges - hertz) / widths)


def room_impulses(draws: Draws, samples: int, sample_rate: int, on: torch.Tensor) -> torch.Tensor:
    """(clips, samples): the direct sound and, where `on`, a decaying tail that grows darker, after Polack."""
    seconds = torch.arange(samples, device=draws.device) / sample_rate
    reverberation = draws.logarithmic(0.08, 0.9)
    delay = draws.uniform(0.001, 0.012)
    tail = draws.normal(samples) * torch.exp(-6.9 * (seconds - delay) / reverberation) * (seconds >= delay)
    # A one-pole low-pass would be a loop; the mean of two neighbours is enough of one.
    tail = (tail + F.pad(tail, (1, 0))[:, :-1]) / 2
    energy = tail.square().sum(1, keepdim=True).clamp(min=1e-12).sqrt()
    tail = tail / energy * 10 ** (draws.uniform(-22.0, 0.0) / 20) * on
    tail[:, 0] += 1
    return tail


def filter_waves(waves: torch.Tensor, response: torch.Tensor, impulses: torch.Tensor, size: int) -> torch.Tensor:
    """Convolve with impulse responses and with zero-phase responses over `size` / 2 + 1 bins."""
    spectra = torch.fft.rfft(waves, size) * torch.fft.rfft(impulses, size) * response
    filtered: torch.Tensor = torch.fft.irfft(spectra, size)[:, : waves.shape[1]]
    return filtered


def mix_at_snr(waves: torch.Tensor, noise: torch.Tensor, snr_db: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
    """Add noise of a level relative to that of speech over its `active` samples. Noise is measured as a whole, since
    another voice may be silent just there."""
    ratio = level(waves, active) / level(noise, torch.ones_like(active)).clamp(min=1e-4)
    return waves + noise * ratio * 10 ** (-snr_db / 20)


def level(waves: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
    """(clips, 1): root mean square over the active samples."""
    power = (waves.square() * active).sum(1, keepdim=True) / active.sum(1, keepdim=True).clamp(min=1)
    return power.clamp(min=1e-14).sqrt()


def set_level(waves: torch.Tensor, level_db: torch.Tensor, active: torch.Tensor, peak: float = 0.99) -> torch.Tensor:
    """Scale to a level in dB of full scale, or as near to it as the peak allows. Silence stays silent."""
    gain = 10 ** (level_db / 20) / level(waves, active).clamp(min=1e-6)
    return waves * torch.minimum(gain, peak / waves.abs().amax(1, keepdim=True).clamp(min=1e-6))


def mu_law(waves: torch.Tensor) -> torch.Tensor:
    """8-bit mu-law and back, of samples within 1."""
    compressed = waves.sign() * torch.log1p(255 * waves.abs().clamp(max=1)) / math.log(256)
    decoded = ((compressed + 1) * 127.5).round() / 127.5 - 1
    return decoded.sign() * ((decoded.abs() * math.log(256)).exp() - 1) / 255


def quantise(waves: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Round samples within 1 to so many bits (clips, 1)."""
    steps = 2 ** (bits - 1)
    return (waves * steps).round() / steps


def babble(waves: torch.Tensor, voices: int) -> torch.Tensor:
    """Other clips of the batch, added up."""
    return sum((waves.roll(3 * voice + 1, 0) for voice in range(voices)), torch.zeros_like(waves))


@dataclass(frozen=True, slots=True)
class AugmentationShares:
    """Shares of the clips that are changed in each way, of those that are not left as they are."""

    clean: float = 0.3
    """Clips of which only speed, vocal tract and level change."""
    equalised: float = 0.6
    high_passed: float = 0.3
    room: float = 0.35
    noise: float = 0.4
    other_voices: float = 0.1
    band_limited: float = 0.4
    clipped: float = 0.07
    compressed: float = 0.07
    mu_law: float = 0.05
    quantised: float = 0.05
    non_speech: float = 0.03
    """Clips that are replaced by a background alone, so that the codec fails softly."""


class Augmentation:
    """Draws and applies everything but the speed, which is applied where samples are read (`device_dataset.py`)."""

    def __init__(
        self,
        samples: int,
        sample_rate: int,
        device: torch.device,
        shares: AugmentationShares | None = None,
        backgrounds: torch.Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """`backgrounds` are (rows, samples) recordings without speech, beside those that are made here."""
        self.samples, self.device, self.generator = samples, device, generator
        self.shares = shares or AugmentationShares()
        self.room_samples = int(ROOM_SECONDS * sample_rate)
        self.sample_rate = sample_rate
        self.size = fft_size(samples + self.room_samples)
        self.hertz = torch.linspace(0, sample_rate / 2, self.size // 2 + 1, device=device)
        self.band_hertz = torch.linspace(0, sample_rate / 2, samples // 2 + 1, device=device)
        self.band_edges = torch.tensor(BAND_EDGES, device=device)
        self.sinc_rows = sinc_table().to(device).reshape(len(SPEEDS), SINC_PHASES, SINC_TAPS)
        self.speeds = torch.tensor(SPEEDS, dtype=torch.float64, device=device)
        made = background_bank(sample_rate, device, generator)
        self.bank = made if backgrounds is None else torch.cat([made, _tiled(backgrounds.to(made), made.shape[1])])

    def draw_speeds(self, clips: int) -> torch.Tensor:
        """(clips,): places in `SPEEDS`."""
        return Draws(clips, self.device, self.generator).index(len(SPEEDS))

    def __call__(self, waves: torch.Tensor, active: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(clips, samples) speech with its active samples; the augmented clips, and where speech was replaced
        (clips,)."""
        draws, shares = Draws(len(waves), self.device, self.generator), self.shares
        changed = ~draws.chance(shares.clean)
        # Every third clip: clips are drawn at random, so that these are as good as any.
        waves = waves.clone()
        some = waves[::3]
        waves[::3] = warp_formants(some, Draws(len(some), self.device, self.generator).logarithmic(0.84, 1.2))

        waves = self._through_room(waves, draws, changed)
        background = self.backgrounds(draws)
        snr = draws.uniform(4.0, 45.0)
        noisy = mix_at_snr(waves, background, snr, active)
        waves = torch.where(changed & draws.chance(shares.noise), noisy, waves)
        crowd = torch.where(draws.chance(0.5), babble(waves, 1), babble(waves, 4))
        crowded = mix_at_snr(waves, crowd, draws.uniform(6.0, 30.0), active)
        waves = torch.where(changed & draws.chance(shares.other_voices), crowded, waves)
        replaced = draws.chance(shares.non_speech)
        waves = torch.where(replaced, background, waves)

        waves = self._distorted(waves, draws, changed)
        waves = self._band_limited(waves, draws, changed)
        return set_level(waves, self._levels(draws), active), replaced[:, 0]

    def backgrounds(self, draws: Draws) -> torch.Tensor:
        """(clips, samples) without speech, from random places of the bank."""
        rows, length = self.bank.shape
        start = draws.index(length - self.samples + 1)
        places = start[:, None] + torch.arange(self.samples, device=self.device)
        return self.bank[draws.index(rows)[:, None], places].float()

    def _through_room(self, waves: torch.Tensor, draws: Draws, changed: torch.Tensor) -> torch.Tensor:
        shares = self.shares
        strength = draws.uniform(0.0, 7.0) * (changed & draws.chance(shares.equalised))
        response = equaliser(draws, self.hertz, strength)
        low = draws.uniform(50.0, 300.0)
        high_pass = 1 - low_pass(self.hertz, low, low / 8)
        response = response * torch.where(changed & draws.chance(shares.high_passed), high_pass, 1.0)
        impulses = room_impulses(draws, self.room_samples, self.sample_rate, changed & draws.chance(shares.room))
        return filter_waves(waves, response, impulses, self.size)

    def _distorted(self, waves: torch.Tensor, draws: Draws, changed: torch.Tensor) -> torch.Tensor:
        shares = self.shares
        waves = waves / waves.abs().amax(1, keepdim=True).clamp(min=1e-6)
        ceiling = draws.logarithmic(0.15, 0.9)
        waves = torch.where(changed & draws.chance(shares.clipped), waves.clamp(-ceiling, ceiling) / ceiling, waves)
        drive = draws.uniform(1.0, 5.0)
        waves = torch.where(
            changed & draws.chance(shares.compressed), torch.tanh(drive * waves) / torch.tanh(drive), waves
        )
        waves = torch.where(changed & draws.chance(shares.mu_law), mu_law(waves), waves)
        bits = draws.uniform(7.0, 12.0).round()
        return torch.where(changed & draws.chance(shares.quantised), quantise(waves, bits), waves)

    def _band_limited(self, waves: torch.Tensor, draws: Draws, changed: torch.Tensor) -> torch.Tensor:
        """Limit the band as at a lower sample rate: sharply, or fading out anywhere above 3.4 kHz."""
        sharp = self.band_edges[draws.index(len(BAND_EDGES))][:, None] * draws.uniform(0.86, 0.99)
        is_sharp = draws.chance(0.6)
        edges = torch.where(is_sharp, sharp, draws.logarithmic(3400.0, 10_500.0))
        widths = torch.where(is_sharp, 30.0, draws.uniform(100.0, 500.0))
        response = low_pass(self.band_hertz, edges, widths)
        response = torch.where(changed & draws.chance(self.shares.band_limited), response, 1.0)
        limited: torch.Tensor = torch.fft.irfft(torch.fft.rfft(waves) * response, self.samples)
        return limited

    def _levels(self, draws: Draws) -> torch.Tensor:
        """Draw levels in dB of full scale: mostly as recordings are, sometimes very quiet ones."""
        usual = (-24 + 5 * draws.normal(1)).clamp(-36, -12)
        return torch.where(draws.chance(0.15), draws.uniform(-50.0, -30.0), usual)


def fft_size(at_least: int) -> int:
    """The smallest product of 2, 3 and 5, even, that is large enough: a fast FFT."""
    size = at_least + at_least % 2
    while True:
        rest = size
        for factor in (2, 3, 5):
            while rest % factor == 0:
                rest //= factor
        if rest == 1:
            return size
        size += 2


def _tiled(rows: torch.Tensor, length: int) -> torch.Tensor:
    """Rows of another length, cut or repeated."""
    return rows.repeat(1, -(-length // rows.shape[1]))[:, :length]
