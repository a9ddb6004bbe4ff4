"""The way from a mouth to a file: a microphone, a room, a noise and a band, drawn for each speaker.

Synthesisers speak without any of them, and a model that hears nothing else does not know what to make of any other
recording. A channel is the same in all clips of a speaker, as a microphone and a room are, so that a reference tells
it; how near the speaker is and how loud the noise is differ a little from clip to clip. A third of the speakers has
none.

A clip costs one convolution, by way of its spectrum. What can be is made once for the speaker: the impulse response of
microphone, room and band, and some seconds of noise, of which each clip takes another stretch.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from corpus_making.sound import WINDOW, Samples, speech_power

Spectrum = npt.NDArray[np.float64]
"""Magnitudes at the frequencies of `FREQUENCIES`."""

SAMPLE_RATE = 24_000
CLEAN = 1 / 3
"""The share of speakers without a channel."""
CUT_OFFS = {4000.0: 1, 5512.5: 1, 8000.0: 4, 11025.0: 2}
"""Where recordings of 8, 11.025, 16 and 22.05 kHz end, and how often each is drawn beside the others. The third is what
most people have, and what a model of clean speech knew least of; the last it hardly noticed."""
GENTLE_CUT_OFF = (3800.0, 11000.0)
"""Where microphones, synthesisers and lossy files fade out instead."""
HIGH_PASS = (60.0, 150.0)
LOUDEST_BUMP = 6.0
"""Decibels by which equalisation lifts or lowers anything at most."""
REVERBERATION, DIRECT = (0.1, 0.5), (5.0, 20.0)
"""Seconds until a room has faded by 60 dB, and decibels by which it is weaker than what comes straight."""
NOISE = (25.0, 55.0)
"""Decibels by which noise is weaker than speech."""
NEARER, QUIETER = 0.7, 1.0
"""Decibels by which room and noise differ from clip to clip, as standard deviations."""
SHARES = {"equaliser": 0.9, "sharp": 0.3, "gentle": 0.25, "high-pass": 0.5, "room": 0.5, "noise": 0.7, "hum": 0.15}
"""How many of the speakers with a channel have each; hum is a share of noise, and no sharp band fades gently too."""
CLIPPED, COMPRESSED = 0.06, 0.10

FILTER = 8192
"""Samples in which microphones are designed: their responses are far shorter."""
KEPT = 1536
"""Of these, how many are kept: 64 ms, after which nothing that can be drawn rings."""
FREQUENCIES = np.fft.rfftfreq(FILTER, 1 / SAMPLE_RATE)
OCTAVES = np.log2(np.maximum(FREQUENCIES, 20.0) / 1000)
"""From 1 kHz."""
LOOP = 2**17
"""Samples of noise that are made for a speaker: five seconds, whose end meets their beginning."""
FOLLOWING = np.hanning(13)[1:-1]
"""Windows over which a compressor follows loudness."""
QUICK = (1, 3, 5, 9, 15, 25, 27, 45, 75, 81, 125)
"""Odd factors of lengths whose spectrum is quickly found."""


@dataclass(frozen=True, slots=True)
class Press:
    """What a cheap recorder does to loudness. It comes before the filters, so that no overtone is above the band."""

    ceiling: float = math.inf
    """Times the root mean square of speech, near which samples are bent."""
    ratio: float = 1.0
    """Decibels of what comes in that make one of what goes out."""

    def of(self, samples: Samples, loudness: float) -> Samples:
        if self.ratio > 1:
            samples = samples * self._gain(samples, loudness)
        if self.ceiling < math.inf:
            top = np.float32(self.ceiling * loudness)
            samples = top * np.tanh(samples / top)
        return samples

    def _gain(self, samples: Samples, loudness: float) -> Samples:
        """Pauses are not lifted further than 20 dB below speech would be."""
        size = round(WINDOW * SAMPLE_RATE)
        whole = -(-len(samples) // size)
        windows = np.pad(samples, (0, whole * size - len(samples))).reshape(whole, size)
        power = np.convolve(np.mean(np.square(windows), axis=1), FOLLOWING / FOLLOWING.sum())[len(FOLLOWING) // 2 :]
        gains = np.maximum(power[:whole] / loudness**2, 0.01) ** ((1 / self.ratio - 1) / 2)
        return np.interp(np.arange(len(samples)), (np.arange(whole) + 0.5) * size, gains).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Channel:
    """`Channel.draw` makes one out of a speaker's name; as it stands here, nothing is changed."""

    response: Samples | None = None
    """Of microphone and band: an impulse becomes this."""
    delay: int = 0
    """Samples of it before the moment itself, since a sharp band rings before and after."""
    room: Samples | None = None
    """What comes after the direct sound, through the same microphone and band."""
    cut_off: float | None = None
    """Hertz above which there is nothing."""
    noise: Samples | None = None
    """A loop of power 1."""
    below: float = math.inf
    """Decibels between speech and noise."""
    press: Press | None = None
    wavering: random.Random = field(default_factory=random.Random, repr=False, compare=False)
    """What differs from clip to clip, in the order in which they are recorded."""

    @property
    def is_clean(self) -> bool:
        return self.response is None

    @classmethod
    def draw(cls, speaker: str, seed: int) -> Channel:
        if has_clean_channel(speaker, seed):
            return cls()
        dice = random.Random(f"{seed}/channel/{speaker}")
        generator = np.random.default_rng(dice.getrandbits(64))
        has = {part: dice.random() < share for part, share in SHARES.items()}
        cut_off = dice.choices(list(CUT_OFFS), list(CUT_OFFS.values()))[0] if has["sharp"] else None
        band = _sharp_band(cut_off, dice) if cut_off else np.ones(1)
        response = np.convolve(_microphone(dice, has), band).astype(np.float32)
        tail = _room(dice, generator) if has["room"] else None
        return cls(
            response=response,
            delay=len(band) // 2,
            room=None if tail is None else _convolved(response, tail),
            cut_off=cut_off,
            noise=_noise(dice, generator, band, hum=has["hum"]) if has["noise"] else None,
            below=dice.uniform(*NOISE) if has["noise"] else math.inf,
            press=_press(dice),
            wavering=random.Random(f"{seed}/wavering/{speaker}"),
        )

    def record(self, samples: Samples) -> Samples:
        """As long as it was; how loud it is then means nothing."""
        dice = self.wavering
        if self.response is None:
            return samples
        if self.press is not None:
            samples = self.press.of(samples, math.sqrt(speech_power(samples, SAMPLE_RATE)) or 1.0)
        response = self.response
        if self.room is not None:
            response = self.room * np.float32(_ratio(dice.gauss(0, NEARER)))
            response[: len(self.response)] += self.response
        heard = _convolved(samples, response)[self.delay : self.delay + len(samples)]
        if self.noise is not None:
            start, below = dice.randrange(LOOP), self.below + dice.gauss(0, QUIETER)
            loudness = math.sqrt(speech_power(heard, SAMPLE_RATE)) * _ratio(-below)
            stretch = np.resize(np.roll(self.noise, -start), len(samples))
            heard = heard + stretch * np.float32(loudness)
        return heard


def has_clean_channel(speaker: str, seed: int) -> bool:
    """Whether nothing is done to this speaker, without drawing what would be."""
    return random.Random(f"{seed}/clean/{speaker}").random() < CLEAN


def _ratio(decibels: float) -> float:
    return 10 ** (decibels / 20)


def _microphone(dice: random.Random, has: dict[str, bool]) -> npt.NDArray[np.float64]:
    """Answers after the sound and never before it, as what is made of coils and membranes does."""
    decibels = _equaliser(dice) if has["equaliser"] else np.zeros_like(FREQUENCIES)
    frequencies = np.maximum(FREQUENCIES, 5.0)  # no filter is deeper than it is there, or its logarithm would ring
    if has["high-pass"]:
        edge, order = dice.uniform(*HIGH_PASS), dice.choice((1, 2, 3))
        decibels = decibels - 10 * np.log10(1 + (edge / frequencies) ** (2 * order))
    if has["gentle"] and not has["sharp"]:
        low, high = GENTLE_CUT_OFF
        edge, order = low * (high / low) ** dice.random(), dice.randint(2, 10)
        decibels = decibels - 10 * np.log10(1 + (frequencies / edge) ** (2 * order))
    fade = np.ones(KEPT)
    fade[KEPT // 2 :] = np.hanning(KEPT)[KEPT // 2 :]
    return _minimum_phase(np.maximum(decibels, -80.0))[:KEPT] * fade


def _equaliser(dice: random.Random) -> Spectrum:
    """Decibels: a tilt, a shelf at either end, and a few broad bumps."""
    decibels = dice.uniform(-1.0, 1.0) * OCTAVES
    for low, high in ((100.0, 400.0), (2000.0, 6000.0)):
        at, width = math.log2(dice.uniform(low, high) / 1000), dice.uniform(0.5, 1.0)
        side = -1.0 if high < 1000 else 1.0
        decibels += dice.uniform(-4.0, 4.0) / (1 + np.exp(-side * (OCTAVES - at) * 4 / width))
    for _ in range(dice.randint(1, 4)):
        at, width = dice.uniform(-3.0, 3.3), dice.uniform(0.25, 0.8)
        decibels += dice.gauss(0.0, 3.0) * np.exp(-0.5 * ((OCTAVES - at) / width) ** 2)
    return np.asarray(LOUDEST_BUMP * np.tanh(decibels / LOUDEST_BUMP))


def _minimum_phase(decibels: Spectrum) -> npt.NDArray[np.float64]:
    """The impulse response of these magnitudes that comes as early as one can, by folding its cepstrum."""
    cepstrum = np.fft.irfft(decibels * (math.log(10) / 20), FILTER)
    cepstrum[1 : FILTER // 2] *= 2
    cepstrum[FILTER // 2 + 1 :] = 0
    return np.fft.irfft(np.exp(np.fft.rfft(cepstrum)), FILTER)


def _sharp_band(cut_off: float, dice: random.Random) -> npt.NDArray[np.float64]:
    """As a resampler cuts: flat, then nothing from here on, and the same to both sides in time."""
    width = cut_off * dice.uniform(0.04, 0.1)
    half = math.ceil(2.8 * SAMPLE_RATE / width)  # Blackman's window takes 5.6 / length from full to nothing
    times, middle = np.arange(-half, half + 1), 2 * (cut_off - width / 2) / SAMPLE_RATE
    return np.asarray(middle * np.sinc(middle * times) * np.blackman(2 * half + 1))


def _room(dice: random.Random, generator: np.random.Generator) -> Samples:
    """One or two walls and a small table, then noise that fades, its high sounds soonest."""
    seconds, direct = dice.uniform(*REVERBERATION), dice.uniform(*DIRECT)
    times = np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    dark = dice.uniform(0.3, 0.8)
    tail = generator.standard_normal(len(times)) * 10 ** (-3 * times / seconds)
    dull = np.convolve(tail, np.full(4, 0.25))[: len(tail)]
    darkness = dark + (1 - dark) * times / seconds
    tail = (1 - darkness) * tail + darkness * dull
    tail[: round(dice.uniform(0.001, 0.004) * SAMPLE_RATE)] = 0
    for _ in range(dice.randint(1, 2)):
        at = round(dice.uniform(0.002, 0.015) * SAMPLE_RATE)
        tail[at] += dice.choice((-1, 1)) * dice.uniform(0.3, 1.0) * np.sqrt(np.sum(tail**2))
    return np.asarray(tail * _ratio(-direct) / np.sqrt(np.sum(tail**2)), np.float32)


def _noise(dice: random.Random, generator: np.random.Generator, band: npt.NDArray[np.float64], *, hum: bool) -> Samples:
    """White to brown, with the hum of the mains now and then, as far up as the recording goes."""
    frequencies = np.fft.rfftfreq(LOOP, 1 / SAMPLE_RATE)
    colour = np.maximum(frequencies, 40.0) ** -dice.uniform(0.0, 1.0)
    spectrum = np.fft.rfft(generator.standard_normal(LOOP)) * colour
    spectrum /= np.sqrt(np.sum(np.abs(spectrum) ** 2))
    if hum:
        mains, strength = dice.choice((50, 60)), dice.uniform(0.3, 1.5)
        for overtone in range(1, 6):
            turned = np.exp(2j * np.pi * dice.random())
            spectrum[round(overtone * mains * LOOP / SAMPLE_RATE)] += strength / overtone * turned
    spectrum *= np.abs(np.fft.rfft(band, LOOP))
    loop = np.fft.irfft(spectrum, LOOP)
    return np.asarray(loop / loop.std(), np.float32)


def _press(dice: random.Random) -> Press | None:
    kind = dice.random()
    if kind < CLIPPED:
        return Press(ceiling=dice.uniform(2.0, 4.0))
    return Press(ratio=dice.uniform(1.3, 2.5)) if kind < CLIPPED + COMPRESSED else None


def _convolved(one: Samples, other: Samples) -> Samples:
    """Of as many samples as both have, less one. Single precision is 100 dB and more, and twice as fast."""
    whole = len(one) + len(other) - 1
    size = min(odd << (-(-whole // odd) - 1).bit_length() for odd in QUICK)
    return np.asarray(np.fft.irfft(np.fft.rfft(one, size) * np.fft.rfft(other, size), size)[:whole], np.float32)
