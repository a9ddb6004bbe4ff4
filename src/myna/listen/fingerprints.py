"""Audio fingerprints (Haitsma and Kalker 2002), which find a recording again that was cut, shifted or compressed.

One word of 32 bits every 23 ms: signs of the differences of 33 band energies over band and time. Copies (shifted, in
noise at 20 dB, through mp3 at 32 kbit/s) differed in up to 28 % of their bits; other speech differs in 40 % or more.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import soxr  # type: ignore[import-untyped]

from myna.audio.files import Samples

FINGERPRINT_RATE = 8_000
FRAME_SAMPLES, HOP_SAMPLES = 2960, 184
"""Samples of a frame (0.37 s), and from one frame to the next (23 ms)."""
WORDS_PER_SECOND = FINGERPRINT_RATE / HOP_SAMPLES
BANDS, BAND_RANGE_HZ = 33, (300.0, 3000.0)
SILENCE_POWER = 1e-7
"""Mean square below which a frame has the word 0, which matches nothing."""
MAX_BIT_ERROR = 0.35
MIN_MATCH_SECONDS = 1.5
EDGE_WORDS = 13
"""Words (0.3 s) over which the ends of a match are found."""
MAX_WORD_OCCURRENCES = 32
"""Maximum occurrences of a word that is looked up: a frequent word identifies nothing."""
MIN_COMMON_WORDS = 2

Words = npt.NDArray[np.uint32]


class DuplicateMatch(NamedTuple):
    """Passage that occurs twice: the fingerprints by index, and times in seconds."""

    first: int
    second: int
    first_start: float
    second_start: float
    seconds: float


def fingerprint(samples: Samples, sample_rate: int) -> bytes:
    """Return the fingerprint of a mono clip, one word each 23 ms; empty for clips below 0.4 s."""
    wave = soxr.resample(samples, sample_rate, FINGERPRINT_RATE) if sample_rate != FINGERPRINT_RATE else samples
    if len(wave) < FRAME_SAMPLES + HOP_SAMPLES:
        return b""
    frames = np.lib.stride_tricks.sliding_window_view(wave, FRAME_SAMPLES)[::HOP_SAMPLES]
    energies = np.empty((len(frames), BANDS))
    loud = np.empty(len(frames), np.bool_)
    for start in range(0, len(frames), 1024):  # 24 s at a time
        block = frames[start : start + 1024].astype(np.float32)
        energies[start : start + 1024] = np.abs(np.fft.rfft(block * np.hanning(FRAME_SAMPLES))) ** 2 @ _bands()
        loud[start : start + 1024] = (block**2).mean(1) > SILENCE_POWER
    differences = np.diff(energies, axis=1)
    bits = (differences[1:] - differences[:-1]) > 0
    packed = np.packbits(bits, axis=1, bitorder="little").view("<u4")[:, 0]
    return bytes(np.where(loud[1:], packed, 0).astype("<u4").tobytes())


def find_duplicates(fingerprints: Sequence[bytes]) -> list[DuplicateMatch]:
    """Find passages that two fingerprints share, or that one holds twice; longest first.

    Candidates have words in common at equal distances (an inverted index); each is verified by its bit errors. Of the
    matches of one passage at neighbouring distances the longest stays.
    """
    clips = [np.frombuffer(content, "<u4").astype(np.uint32) for content in fingerprints]
    matches = [match for candidate in _candidates(clips) for match in _verify(clips, *candidate)]
    kept: dict[tuple[int, int], list[DuplicateMatch]] = {}
    longest = []
    for match in sorted(matches, key=lambda match: (-match.seconds, match)):
        others = kept.setdefault((match.first, match.second), [])
        middle = match.first_start + match.seconds / 2
        if not any(other.first_start <= middle <= other.first_start + other.seconds for other in others):
            others.append(match)
            longest.append(match)
    return longest


@functools.cache
def _bands() -> npt.NDArray[np.float64]:
    """Return the matrix that sums bins to bands (1481 x 33)."""
    edges = np.geomspace(*BAND_RANGE_HZ, BANDS + 1)
    bins = np.fft.rfftfreq(FRAME_SAMPLES, 1 / FINGERPRINT_RATE)
    return np.asarray((bins[:, None] >= edges[:-1]) & (bins[:, None] < edges[1:]), np.float64)


def _candidates(clips: Sequence[Words]) -> list[tuple[int, int, int]]:
    """Return pairs of clips with the distance between positions at which they have words in common."""
    sizes = [len(clip) for clip in clips]
    if not sum(sizes):
        return []
    everything = np.concatenate(clips)
    clip = np.repeat(np.arange(len(clips)), sizes)
    position = np.concatenate([np.arange(size) for size in sizes])
    used = everything != 0
    everything, clip, position = everything[used], clip[used], position[used]
    order = np.argsort(everything, kind="stable")
    everything, clip, position = everything[order], clip[order], position[order]
    starts = np.flatnonzero(np.concatenate([[True], everything[1:] != everything[:-1]]))
    counts = np.diff(np.append(starts, len(everything)))
    rare = np.repeat(counts <= MAX_WORD_OCCURRENCES, counts)
    everything, clip, position = everything[rare], clip[rare], position[rare]
    keys = []
    for step in range(1, MAX_WORD_OCCURRENCES):
        same = np.flatnonzero(everything[step:] == everything[:-step])
        if not len(same):
            break
        shift = position[same + step] - position[same]
        pairs = np.stack([clip[same], clip[same + step], shift], 1)
        # Neighbouring frames of one clip are alike: only a passage that comes again later counts.
        keys.append(pairs[(pairs[:, 0] != pairs[:, 1]) | (np.abs(shift) > MIN_MATCH_SECONDS * WORDS_PER_SECOND)])
    if not keys:
        return []
    found = np.concatenate(keys)
    swapped = (found[:, 0] == found[:, 1]) & (found[:, 2] < 0)
    found[swapped, 2] *= -1
    unique, votes = np.unique(found, axis=0, return_counts=True)
    return [(int(first), int(second), int(shift)) for first, second, shift in unique[votes >= MIN_COMMON_WORDS]]


def _verify(clips: Sequence[Words], first: int, second: int, shift: int) -> list[DuplicateMatch]:
    """Return the stretches along the diagonal whose running bit error stays below the limit."""
    start = max(0, -shift)
    end = min(len(clips[first]), len(clips[second]) - shift)
    size = round(MIN_MATCH_SECONDS * WORDS_PER_SECOND)
    if end - start < size:
        return []
    one, other = clips[first][start:end], clips[second][start + shift : end + shift]
    errors = np.where((one == 0) | (other == 0), 0.5, np.bitwise_count(one ^ other) / 32)
    sums = np.concatenate([[0.0], np.cumsum(errors)])
    good = (sums[size:] - sums[:-size]) / size <= MAX_BIT_ERROR
    edges = np.flatnonzero(np.diff(np.concatenate([[False], good, [False]])))
    near = np.convolve(errors, np.ones(EDGE_WORDS) / EDGE_WORDS, "same") <= MAX_BIT_ERROR
    matches = []
    for low, high in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        # The running mean reaches beyond both ends.
        alike = low + np.flatnonzero(near[low : high - 1 + size])
        if len(alike) and (alike[-1] + 1 - alike[0]) >= size:
            first_word, last_word = int(alike[0]), int(alike[-1]) + 1
            matches.append(
                DuplicateMatch(
                    first,
                    second,
                    (start + first_word) / WORDS_PER_SECOND,
                    (start + first_word + shift) / WORDS_PER_SECOND,
                    (last_word - first_word) / WORDS_PER_SECOND,
                )
            )
    return matches
