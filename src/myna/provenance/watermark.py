"""Watermark of speech: applied to a clip, or to a stream as it comes, with the same bits; and its detection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from myna.audio.files import Samples
from myna.errors import AudioError
from myna.provenance.packages import check_installed
from myna.provenance.perth import (
    FRAME_REACH,
    HOP_SECONDS,
    MARK_NAME,
    MARKED_BINS,
    WINDOW_SECONDS,
    levels_of,
    load_perth,
)

__all__ = [
    "MARK_NAME",
    "MARK_THRESHOLD",
    "StreamWatermark",
    "check_installed",
    "detect_spans",
    "watermark",
    "watermark_score",
]

FIRST_BLOCK, MAX_BLOCK = 8, 64
"""Frames of 10 ms that are marked at a time. A block is as long as all before it and the first."""
MARK_THRESHOLD = 0.5
"""Score above which a clip counts as marked."""
MIN_SAMPLE_RATE = 8_000
SPAN_SECONDS = 10.0
"""Long recordings are judged by spans of about this length."""


class ScoredSpan(NamedTuple):
    """The score of a part of a recording, from second to second."""

    start: float
    end: float
    score: float


def watermark(samples: Samples, sample_rate: int, *, device: str = "cpu") -> Samples:
    """A clip with the mark, as long as it was."""
    stream = StreamWatermark(sample_rate, device=device)
    return np.concatenate([stream.push(samples), stream.finish()])


def watermark_score(samples: Samples, sample_rate: int, *, device: str = "cpu") -> float:
    """How surely a clip is marked, 0 to 1; above `MARK_THRESHOLD` it is. A long one has the mean of its spans."""
    return mean_score(detect_spans(samples, sample_rate, device=device))


def mean_score(spans: Sequence[ScoredSpan]) -> float:
    """The score of a recording by those of its spans; 0 without any."""
    lengths = [span.end - span.start for span in spans]
    return float(np.average([span.score for span in spans], weights=lengths)) if spans else 0.0


def detect_spans(samples: Samples, sample_rate: int, *, device: str = "cpu") -> list[ScoredSpan]:
    """Scores of a recording in equal spans; one, if it is not longer than 15 s."""
    _check_rate(sample_rate)
    window, hop = _frame_samples(sample_rate)
    network, seconds = load_perth(torch.device(device)), len(samples) / sample_rate
    edges = np.linspace(0, len(samples), max(1, round(seconds / SPAN_SECONDS)) + 1).astype(int)
    spans = []
    for first, last in pairwise(edges):
        if last - first <= window // 2:
            continue  # not even one spectrum
        clip = torch.from_numpy(np.ascontiguousarray(samples[first:last], np.float32)).to(device)
        with torch.inference_mode():
            spectra = torch.stft(clip, window, hop, window=_hann(window, clip.device), return_complex=True)
            score = float(network.score(levels_of(spectra, window)[None])[0])
        spans.append(ScoredSpan(first / sample_rate, last / sample_rate, score))
    return spans


class StreamWatermark:
    """Watermark of one stream: samples in pieces of any size in, marked samples out, somewhat later.

    Which frames are computed together depends on their place in the stream alone, so that the marked samples do not
    depend on the pieces. Frame n is centred on sample n * hop; the stream is mirrored before its first sample and
    behind its last.
    """

    def __init__(self, sample_rate: int, *, device: str = "cpu") -> None:
        _check_rate(sample_rate)
        self._window, self._hop = _frame_samples(sample_rate)
        self._device = torch.device(device)
        self._network = load_perth(self._device)
        self._length = self._done = self._start = 0
        """Samples that have come, frames that are marked, and the frame at which `_samples` begins."""
        self._samples = _NOTHING
        self._mirrored = False
        self._mark, self._weight = _NOTHING, _NOTHING
        """Sums of the mark's overlapping frames and of their squared windows, from frame `_done` on."""
        self._finished = False

    def push(self, samples: Samples) -> Samples:
        """Add samples; the marked samples that are ready, perhaps none."""
        assert not self._finished, "the stream has ended"
        self._length += len(samples)
        self._samples = np.concatenate([self._samples, np.asarray(samples, np.float32)])
        if not self._mirrored and self._length <= self._window // 2:
            return _NOTHING
        self._mirror_start()
        return self._advance(self._start + (len(self._samples) - self._window) // self._hop + 1)

    def finish(self) -> Samples:
        """End the stream; its last marked samples."""
        assert not self._finished, "the stream has ended"
        self._finished = True
        if not self._length:
            return _NOTHING
        self._mirror_start()
        missing = -self._length % self._hop
        self._samples = np.pad(np.pad(self._samples, (0, missing)), (0, self._window // 2), mode="reflect")
        return self._advance((self._length + missing) // self._hop + 1)

    def _mirror_start(self) -> None:
        if not self._mirrored:
            self._samples, self._mirrored = np.pad(self._samples, (self._window // 2, 0), mode="reflect"), True

    def _advance(self, frames: int) -> Samples:
        """Mark the blocks that can be marked with so many known frames; the samples that are complete then."""
        pieces = [_NOTHING]
        for block in _plan_blocks(self._done, frames, self._finished):
            is_end = self._finished and block.last == frames
            mark, weight = self._mark_block(block), _window_weight(self._window, self._hop, block.last - block.first)
            self._mark, self._weight = _add(self._mark, mark), _add(self._weight, weight)
            # Padded samples from the block's first frame on, up to those that the next block adds to.
            count = len(mark) if is_end else (block.last - block.first) * self._hop
            offset = (block.first - self._start) * self._hop
            marked = self._samples[offset : offset + count] + self._mark[:count] / self._weight[:count].clip(1e-6)
            margin = self._window // 2 - block.first * self._hop
            pieces.append(marked[max(0, margin) : max(0, margin + self._length)])
            self._mark, self._weight, self._done = self._mark[count:], self._weight[count:], block.last
            start = max(0, block.last - FRAME_REACH)
            self._samples, self._start = self._samples[(start - self._start) * self._hop :], start
        return np.concatenate(pieces)

    def _mark_block(self, block: _Block) -> Samples:
        """The frames of a block's mark, windowed and added up."""
        window, hop = self._window, self._hop
        first, last = (block.start - self._start) * hop, (block.stop - 1 - self._start) * hop + window
        samples = torch.from_numpy(self._samples[first:last]).to(self._device)
        hann, own = _hann(window, self._device), slice(block.first - block.start, block.last - block.start)
        with torch.inference_mode():
            spectra = torch.fft.rfft(samples.unfold(0, window, hop) * hann).T
            gain = self._network.gain(levels_of(spectra, window)[None])[0]
            change = torch.zeros_like(spectra[:, own])
            change[:MARKED_BINS] = spectra[:MARKED_BINS, own] * (gain[:, own] - 1)
            frames = torch.fft.irfft(change, n=window, dim=0) * hann[:, None]
            length = (frames.shape[1] - 1) * hop + window
            return F.fold(frames[None], (1, length), (1, window), stride=(1, hop)).view(-1).cpu().numpy()


class _Block(NamedTuple):
    """Frames `first` to `last` of a stream, marked with the context `start` to `stop`."""

    start: int
    first: int
    last: int
    stop: int


def _plan_blocks(done: int, frames: int, ended: bool) -> Iterator[_Block]:
    """The blocks behind frame `done` that can be marked with `frames` known frames, all of them if the stream has
    `ended`. The first ones do not look ahead as far as the others: speech begins the sooner."""
    while done < frames:
        ahead = min(FRAME_REACH, done // 2)
        last = done + min(done + FIRST_BLOCK, MAX_BLOCK)
        if last + ahead > frames and not ended:
            return
        last = min(last, frames)
        yield _Block(max(0, done - FRAME_REACH), done, last, min(last + ahead, frames))
        done = last


_NOTHING: Samples = np.zeros(0, np.float32)


def _frame_samples(sample_rate: int) -> tuple[int, int]:
    """Samples of a spectrum, an even number, and from one to the next."""
    return 2 * round(WINDOW_SECONDS * sample_rate / 2), round(HOP_SECONDS * sample_rate)


def _check_rate(sample_rate: int) -> None:
    if sample_rate < MIN_SAMPLE_RATE:
        raise AudioError(
            f"audio of {sample_rate} Hz cannot carry the watermark",
            hint=f"resample it to {MIN_SAMPLE_RATE} Hz or more",
        )


@lru_cache(maxsize=8)
def _hann(window: int, device: torch.device) -> torch.Tensor:
    return torch.hann_window(window, device=device)


@lru_cache(maxsize=256)
def _window_weight(window: int, hop: int, frames: int) -> Samples:
    """Sum of the squared windows of so many frames."""
    squared, total = torch.hann_window(window).square().numpy(), np.zeros((frames - 1) * hop + window, np.float32)
    for frame in range(frames):
        total[frame * hop : frame * hop + window] += squared
    return total


def _add(carried: Samples, samples: Samples) -> Samples:
    """The sum of two arrays, the first of which may be shorter."""
    total = samples.copy()
    total[: len(carried)] += carried
    return total
