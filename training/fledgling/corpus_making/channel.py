"""Channel simulation: random microphones and bandwidths for speakers; rooms, noise and distortion for references.

Synthetic speech has none of these, and a model trained on it alone fails on other recordings. A speaker's microphone
(`MICROPHONE`) is the same in all clips, so that a reference determines it; a third of the speakers has none. A clip
that only serves as a reference goes through a channel of its own (`REFERENCE`) besides: targets have neither noise nor
room, so that a model learns to take the voice of a poor recording, and not its faults.

A clip costs one FFT convolution. Drawing a channel costs more where there is noise: a reference takes some 20 ms.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from corpus_making.loudness import WINDOW_SECONDS, Samples, speech_power

Spectrum = npt.NDArray[np.float64]
"""Magnitudes at the frequencies of `FREQUENCIES`."""

SAMPLE_RATE = 24_000
CLEAN_SHARE = 1 / 3
"""Share of speakers without a channel."""
HIGH_PASS_HZ = (60.0, 150.0)
MAX_EQUALISER_DB = 6.0
ROOM_JITTER_DB, NOISE_JITTER_DB = 0.7, 1.0
"""Standard deviations from clip to clip."""


@dataclass(frozen=True, slots=True)
class ChannelRanges:
    """Shares of channels that have an effect, and ranges that its parameters are drawn from."""

    clean: float
    """Share without any effect."""
    equaliser: float = 0.9
    sharp: float = 0.3
    """Share whose band ends sharply, as that of a file with a lower sample rate."""
    gentle: float = 0.25
    """Share whose band fades out, of those where it does not end sharply."""
    high_pass: float = 0.5
    room: float = 0.0
    noise: float = 0.0
    hum: float = 0.15
    """Share of those with noise."""
    clipping: float = 0.0
    compression: float = 0.0
    cut_off_weights: dict[float, int] = field(default_factory=lambda: {8000.0: 4, 11025.0: 2})
    """Bandwidths in Hz and their weights."""
    gentle_cut_off_hz: tuple[float, float] = (6000.0, 11000.0)
    rt60_seconds: tuple[float, float] = (0.1, 0.9)
    direct_to_reverberant_db: tuple[float, float] = (0.0, 20.0)
    snr_db: tuple[float, float] = (6.0, 45.0)


MICROPHONE = ChannelRanges(clean=CLEAN_SHARE)
"""Ranges of the channel of a speaker."""
REFERENCE = ChannelRanges(
    clean=0.0,
    equaliser=0.6,
    room=0.55,
    noise=0.7,
    clipping=0.08,
    compression=0.12,
    cut_off_weights={4000.0: 2, 5512.5: 1, 8000.0: 4, 11025.0: 1},
    gentle_cut_off_hz=(3800.0, 11000.0),
)
"""Ranges of the channel of a reference: bandwidths of recordings of 8, 11.025, 16 and 22.05 kHz, speech 6 dB above
noise and more."""

EFFECTS = ("equaliser", "sharp", "gentle", "high_pass", "room", "noise", "hum")
FILTER_SAMPLES = 8192
"""FFT size of microphone filters, whose responses are far shorter."""
KEPT_SAMPLES = 1536
"""Number of samples of a response that are kept: 64 ms, after which nothing that can be drawn rings."""
FREQUENCIES = np.fft.rfftfreq(FILTER_SAMPLES, 1 / SAMPLE_RATE)
OCTAVES = np.log2(np.maximum(FREQUENCIES, 20.0) / 1000)
"""Octaves of each frequency above 1 kHz."""
NOISE_LOOP_SAMPLES = 2**16
"""Length of a noise loop: nearly three seconds, periodic."""
COMPRESSOR_WINDOW = np.hanning(13)[1:-1]
"""Windows over which a compressor follows loudness."""
FFT_ODD_FACTORS = (1, 3, 5, 9, 15, 25, 27, 45, 75, 81, 125)
"""Odd factors of fast FFT lengths."""


@dataclass(frozen=True, slots=True)
class Dynamics:
    """Clipping and compression of a cheap recorder, before the filters, so that harmonics stay in the band."""

    ceiling: float = math.inf
    """Times the root mean square of speech, near which samples are bent."""
    ratio: float = 1.0
    """Decibels of what comes in that make one of what goes out."""

    def apply(self, samples: Samples, loudness: float) -> Samples:
        if self.ratio > 1:
            samples = samples * self._gain(samples, loudness)
        if self.ceiling < math.inf:
            top = np.float32(self.ceiling * loudness)
            samples = top * np.tanh(samples / top)
        return samples

    def _gain(self, samples: Samples, loudness: float) -> Samples:
        """Pauses are not lifted further than 20 dB below speech would be."""
        size = round(WINDOW_SECONDS * SAMPLE_RATE)
        whole = -(-len(samples) // size)
        windows = np.pad(samples, (0, whole * size - len(samples))).reshape(whole, size)
        power = np.convolve(np.mean(np.square(windows), axis=1), COMPRESSOR_WINDOW / COMPRESSOR_WINDOW.sum())[
            len(COMPRESSOR_WINDOW) // 2 :
        ]
        gains = np.maximum(power[:whole] / loudness**2, 0.01) ** ((1 / self.ratio - 1) / 2)
        return np.interp(np.arange(len(samples)), (np.arange(whole) + 0.5) * size, gains).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Channel:
    """Recording channel of a speaker; the default changes nothing. `Channel.draw` derives one from a speaker's name."""

    response: Samples | None = None
    """Impulse response of microphone and band."""
    delay: int = 0
    """Samples of it before the moment itself, since a sharp band rings before and after."""
    room: Samples | None = None
    """Echoes after the direct sound, through the same microphone and band."""
    cut_off: float | None = None
    """Hertz above which there is nothing."""
    noise: Samples | None = None
    """A loop of power 1."""
    snr_db: float = math.inf
    dynamics: Dynamics | None = None
    clip_rng: random.Random = field(default_factory=random.Random, repr=False, compare=False)
    """Random source of what differs from clip to clip, in the order in which they are recorded."""

    @property
    def is_clean(self) -> bool:
        return self.response is None

    @classmethod
    def draw(cls, name: str, seed: int, ranges: ChannelRanges = MICROPHONE) -> Channel:
        """The channel of a speaker, or of whatever else has that name."""
        if has_clean_channel(name, seed, ranges):
            return cls()
        rng = random.Random(f"{seed}/channel/{name}")
        generator = np.random.default_rng(rng.getrandbits(64))
        has = {effect: rng.random() < getattr(ranges, effect) for effect in EFFECTS}
        weights = ranges.cut_off_weights
        cut_off = rng.choices(list(weights), list(weights.values()))[0] if has["sharp"] else None
        band = _draw_low_pass(cut_off, rng) if cut_off else np.ones(1)
        response = np.convolve(_draw_microphone(rng, has, ranges), band).astype(np.float32)
        tail = _draw_room(rng, generator, ranges) if has["room"] else None
        return cls(
            response=response,
            delay=len(band) // 2,
            room=None if tail is None else _convolve(response, tail),
            cut_off=cut_off,
            noise=_draw_noise(rng, generator, band, hum=has["hum"]) if has["noise"] else None,
            snr_db=rng.uniform(*ranges.snr_db) if has["noise"] else math.inf,
            dynamics=_draw_dynamics(rng, ranges),
            clip_rng=random.Random(f"{seed}/wavering/{name}"),
        )

    def record(self, samples: Samples) -> Samples:
        """Apply the channel. The length stays; the level is arbitrary."""
        rng = self.clip_rng
        if self.response is None:
            return samples
        if self.dynamics is not None:
            samples = self.dynamics.apply(samples, math.sqrt(speech_power(samples, SAMPLE_RATE)) or 1.0)
        response = self.response
        if self.room is not None:
            response = self.room * np.float32(_gain_of(rng.gauss(0, ROOM_JITTER_DB)))
            response[: len(self.response)] += self.response
        recorded = _convolve(samples, response)[self.delay : self.delay + len(samples)]
        if self.noise is not None:
            start, snr_db = rng.randrange(NOISE_LOOP_SAMPLES), self.snr_db + rng.gauss(0, NOISE_JITTER_DB)
            loudness = math.sqrt(speech_power(recorded, SAMPLE_RATE)) * _gain_of(-snr_db)
            stretch = np.resize(np.roll(self.noise, -start), len(samples))
            recorded = recorded + stretch * np.float32(loudness)
        return recorded


def has_clean_channel(name: str, seed: int, ranges: ChannelRanges = MICROPHONE) -> bool:
    """Whether this speaker has no channel, without drawing one."""
    return random.Random(f"{seed}/clean/{name}").random() < ranges.clean


def _gain_of(decibels: float) -> float:
    return 10 ** (decibels / 20)


def _draw_microphone(rng: random.Random, has: dict[str, bool], ranges: ChannelRanges) -> npt.NDArray[np.float64]:
    """Answers after the sound and never before it, as what is made of coils and membranes does."""
    decibels = _draw_equaliser(rng) if has["equaliser"] else np.zeros_like(FREQUENCIES)
    frequencies = np.maximum(FREQUENCIES, 5.0)  # no filter is deeper than it is there, or its logarithm would ring
    if has["high_pass"]:
        edge, order = rng.uniform(*HIGH_PASS_HZ), rng.choice((1, 2, 3))
        decibels = decibels - 10 * np.log10(1 + (edge / frequencies) ** (2 * order))
    if has["gentle"] and not has["sharp"]:
        low, high = ranges.gentle_cut_off_hz
        edge, order = low * (high / low) ** rng.random(), rng.randint(2, 10)
        decibels = decibels - 10 * np.log10(1 + (frequencies / edge) ** (2 * order))
    fade = np.ones(KEPT_SAMPLES)
    fade[KEPT_SAMPLES // 2 :] = np.hanning(KEPT_SAMPLES)[KEPT_SAMPLES // 2 :]
    return _minimum_phase(np.maximum(decibels, -80.0))[:KEPT_SAMPLES] * fade


def _draw_equaliser(rng: random.Random) -> Spectrum:
    """Decibels: a tilt, a shelf at either end, and a few broad bumps."""
    decibels = rng.uniform(-1.0, 1.0) * OCTAVES
    for low, high in ((100.0, 400.0), (2000.0, 6000.0)):
        at, width = math.log2(rng.uniform(low, high) / 1000), rng.uniform(0.5, 1.0)
        side = -1.0 if high < 1000 else 1.0
        decibels += rng.uniform(-4.0, 4.0) / (1 + np.exp(-side * (OCTAVES - at) * 4 / width))
    for _ in range(rng.randint(1, 4)):
        at, width = rng.uniform(-3.0, 3.3), rng.uniform(0.25, 0.8)
        decibels += rng.gauss(0.0, 3.0) * np.exp(-0.5 * ((OCTAVES - at) / width) ** 2)
    return np.asarray(MAX_EQUALISER_DB * np.tanh(decibels / MAX_EQUALISER_DB))


def _minimum_phase(decibels: Spectrum) -> npt.NDArray[np.float64]:
    """The impulse response of these magnitudes that comes as early as one can, by folding its cepstrum."""
    cepstrum = np.fft.irfft(decibels * (math.log(10) / 20), FILTER_SAMPLES)
    cepstrum[1 : FILTER_SAMPLES // 2] *= 2
    cepstrum[FILTER_SAMPLES // 2 + 1 :] = 0
    return np.fft.irfft(np.exp(np.fft.rfft(cepstrum)), FILTER_SAMPLES)


def _draw_low_pass(cut_off: float, rng: random.Random) -> npt.NDArray[np.float64]:
    """Draw a low-pass as a resampler cuts: flat, then nothing from here on, and the same to both sides in time."""
    width = cut_off * rng.uniform(0.04, 0.1)
    half = math.ceil(2.8 * SAMPLE_RATE / width)  # Blackman's window takes 5.6 / length from full to nothing
    times, middle = np.arange(-half, half + 1), 2 * (cut_off - width / 2) / SAMPLE_RATE
    return np.asarray(middle * np.sinc(middle * times) * np.blackman(2 * half + 1))


def _draw_room(rng: random.Random, generator: np.random.Generator, ranges: ChannelRanges) -> Samples:
    """One or two walls and a small table, then noise that fades, its high sounds soonest."""
    seconds, direct = rng.uniform(*ranges.rt60_seconds), rng.uniform(*ranges.direct_to_reverberant_db)
    times = np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    dark = rng.uniform(0.3, 0.8)
    tail = generator.standard_normal(len(times)) * 10 ** (-3 * times / seconds)
    dull = np.convolve(tail, np.full(4, 0.25))[: len(tail)]
    darkness = dark + (1 - dark) * times / seconds
    tail = (1 - darkness) * tail + darkness * dull
    tail[: round(rng.uniform(0.001, 0.004) * SAMPLE_RATE)] = 0
    for _ in range(rng.randint(1, 2)):
        at = round(rng.uniform(0.002, 0.015) * SAMPLE_RATE)
        tail[at] += rng.choice((-1, 1)) * rng.uniform(0.3, 1.0) * np.sqrt(np.sum(tail**2))
    return np.asarray(tail * _gain_of(-direct) / np.sqrt(np.sum(tail**2)), np.float32)


def _draw_noise(
    rng: random.Random, generator: np.random.Generator, band: npt.NDArray[np.float64], *, hum: bool
) -> Samples:
    """White to brown, with the hum of the mains now and then, as far up as the recording goes."""
    frequencies = np.fft.rfftfreq(NOISE_LOOP_SAMPLES, 1 / SAMPLE_RATE)
    colour = np.maximum(frequencies, 40.0) ** -rng.uniform(0.0, 1.0)
    spectrum = np.fft.rfft(generator.standard_normal(NOISE_LOOP_SAMPLES)) * colour
    spectrum /= np.sqrt(np.sum(np.abs(spectrum) ** 2))
    if hum:
        mains, strength = rng.choice((50, 60)), rng.uniform(0.3, 1.5)
        for overtone in range(1, 6):
            turned = np.exp(2j * np.pi * rng.random())
            spectrum[round(overtone * mains * NOISE_LOOP_SAMPLES / SAMPLE_RATE)] += strength / overtone * turned
    spectrum *= np.abs(np.fft.rfft(band, NOISE_LOOP_SAMPLES))
    loop = np.fft.irfft(spectrum, NOISE_LOOP_SAMPLES)
    return np.asarray(loop / loop.std(), np.float32)


def _draw_dynamics(rng: random.Random, ranges: ChannelRanges) -> Dynamics | None:
    kind = rng.random()
    if kind < ranges.clipping:
        return Dynamics(ceiling=rng.uniform(2.0, 4.0))
    return Dynamics(ratio=rng.uniform(1.3, 2.5)) if kind < ranges.clipping + ranges.compression else None


def _convolve(one: Samples, other: Samples) -> Samples:
    """Convolve; the result has as many samples as both, less one. Single precision is 100 dB and more, and twice as
    fast."""
    whole = len(one) + len(other) - 1
    size = min(odd << (-(-whole // odd) - 1).bit_length() for odd in FFT_ODD_FACTORS)
    return np.asarray(np.fft.irfft(np.fft.rfft(one, size) * np.fft.rfft(other, size), size)[:whole], np.float32)
