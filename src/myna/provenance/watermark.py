"""Watermark of speech: applied to a clip or, with the same bits, to streamed audio; and its detection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from myna.audio.files import Samples, join_samples
from myna.core.errors import AudioError
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
    "detect_spans",
    "mark_streams",
    "watermark",
    "watermark_score",
]

FIRST_BLOCKS = (5, 21, 53, 117)
"""Frames of 10 ms at which the first blocks end. They do not look ahead and end where the first windows of a codec end
(2, 4, 8 and 16 frames of 40 ms), so that little audio is held back."""
WHOLE_BLOCK, MAX_BLOCK = 230, 128
"""Frame at which the first block with look-ahead ends, and frames of each block after it."""
EARLY_HOPS = 2
"""Hops after its last frame up to which a block without look-ahead gives samples out."""
MAX_STACKED = 64
"""Maximum number of blocks computed in one call on a GPU."""
MARK_THRESHOLD = 0.5
"""Score above which a clip counts as marked."""
MIN_SAMPLE_RATE = 8_000
SPAN_SECONDS = 10.0
"""Approximate length of the spans by which long recordings are judged."""


class ScoredSpan(NamedTuple):
    """Score of a part of a recording; `start` and `end` are seconds."""

    start: float
    end: float
    score: float


def watermark(samples: Samples, sample_rate: int, *, device: str = "cpu") -> Samples:
    """Return a clip of the same length with the mark."""
    stream = StreamWatermark(sample_rate, device=device)
    return np.concatenate([stream.push(samples), stream.finish()])


def watermark_score(samples: Samples, sample_rate: int, *, device: str = "cpu") -> float:
    """Score whether a clip is marked, 0 to 1; above `MARK_THRESHOLD` it is. A long clip has the mean of its spans."""
    return mean_score(detect_spans(samples, sample_rate, device=device))


def mean_score(spans: Sequence[ScoredSpan]) -> float:
    """Return the mean score of spans, weighted by their lengths; 0 without any."""
    lengths = [span.end - span.start for span in spans]
    return float(np.average([span.score for span in spans], weights=lengths)) if spans else 0.0


def detect_spans(samples: Samples, sample_rate: int, *, device: str = "cpu") -> list[ScoredSpan]:
    """Score a recording in equal spans; one span if it is not longer than 15 s."""
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
    """Watermark of streamed audio: takes samples in pieces of any size, and returns marked samples a little later.

    Only the position of frames decides which are computed together, so the marked samples do not depend on the
    pieces. Frame n is centred on sample n * hop; the audio is mirrored before its first and after its last sample.
    `mark_streams` advances many of them together.
    """

    def __init__(self, sample_rate: int, *, device: str = "cpu") -> None:
        _check_rate(sample_rate)
        self.sample_rate, self.device = sample_rate, torch.device(device)
        self._window, self._hop = _frame_samples(sample_rate)
        self._length = self._done = self._start = 0
        """Number of samples received, number of frames marked, and the frame at which `_samples` begins."""
        self._samples = _NOTHING
        self._mirrored = False
        self._given = 0
        """Number of samples of the padded audio that were given out."""
        self._mark, self._weight = _NOTHING, _NOTHING
        """Sums of the mark's overlapping frames and of their squared windows, from sample `_given` on."""
        self._edge: float | None = None
        """Mark at the last sample, if it was given out before all frames that reach it were known."""
        self._finished = False

    def push(self, samples: Samples) -> Samples:
        """Add samples and return the marked samples that are ready, perhaps none."""
        self.add(samples)
        return mark_streams([self])[0]

    def finish(self) -> Samples:
        """End the audio and return its last marked samples."""
        self.add(_NOTHING, last=True)
        return mark_streams([self])[0]

    def add(self, samples: Samples, *, last: bool = False) -> None:
        """Add samples, which `mark_streams` marks; `last` ends the audio."""
        assert not self._finished, "the stream has ended"
        self._length += len(samples)
        self._samples = np.concatenate([self._samples, np.asarray(samples, np.float32)])
        self._finished = last
        half = self._window // 2
        if not self._mirrored and (self._length > half or (last and self._length)):
            self._samples, self._mirrored = np.pad(self._samples, (half, 0), mode="reflect"), True
        if last and self._length:
            end = np.pad(self._samples[-half - 1 :], (0, -self._length % self._hop))
            self._samples = np.concatenate([self._samples, np.pad(end, (0, half), mode="reflect")[half + 1 :]])

    def _blocks(self) -> list[_Block]:
        """Return the blocks that can be marked now."""
        frames = self._start + (len(self._samples) - self._window) // self._hop + 1 if self._mirrored else 0
        return list(_plan_blocks(self._done, frames, self._finished))

    def _block_samples(self, block: _Block) -> Samples:
        """Return all samples that a block is computed from."""
        first, last = block.start - self._start, block.stop - 1 - self._start
        return self._samples[first * self._hop : last * self._hop + self._window]

    def _give_out(self, block: _Block, mark: Samples) -> Samples:
        """Add the mark of the next block and return the samples that are complete with it."""
        frames, hop, known = block.last - block.first, self._hop, self._start * self._hop + len(self._samples)
        offset = block.first * hop - self._given  # negative if samples were given out early
        weight = _window_weight(self._window, hop, frames)
        self._mark, self._weight = _add(self._mark, mark, offset), _add(self._weight, weight, offset)
        # Up to the samples that the next block adds to, or a little into them.
        early = self._window // 2 + (EARLY_HOPS - 1) * hop if block.is_early else 0
        end = known if block.is_end else block.last * hop + early
        count = end - self._given
        change = self._mark[:count] / self._weight[:count].clip(1e-6)
        if self._edge is not None:  # no step after samples that were given out early
            change[:hop] += (self._edge - change[0]) * _fade(hop)[: len(change)]
        self._edge = float(change[-1]) if block.is_early and not block.is_end else None
        place = self._given - self._start * hop
        marked: Samples = self._samples[place : place + count] + change
        margin = self._window // 2 - self._given
        self._mark, self._weight, self._given, self._done = self._mark[count:], self._weight[count:], end, block.last
        start = max(0, min(block.last - FRAME_REACH, self._given // hop))
        self._samples, self._start = self._samples[(start - self._start) * hop :], start
        return marked[max(0, margin) : max(0, margin + self._length)]


def mark_streams(streams: Sequence[StreamWatermark]) -> list[Samples]:
    """Return the marked samples that are ready, for each stream; a GPU computes the blocks of all streams together.

    On a CPU the samples of a stream have the same bits alone and beside others; on a GPU they differ by rounding."""
    blocks = [(stream, block) for stream in streams for block in stream._blocks()]
    parts: dict[int, list[Samples]] = {id(stream): [] for stream in streams}
    size = _stack_size(blocks[0][0].device) if blocks else 1
    for first in range(0, len(blocks), size):
        batch = blocks[first : first + size]
        for (stream, block), mark in zip(batch, _compute_marks(batch), strict=True):
            parts[id(stream)].append(stream._give_out(block, mark))
    return [join_samples(parts[id(stream)]) for stream in streams]


def _stack_size(device: torch.device) -> int:
    return MAX_STACKED if device.type == "cuda" else 1


def _compute_marks(blocks: Sequence[tuple[StreamWatermark, _Block]]) -> list[Samples]:
    """Return the mark of each block: its frames, windowed and added up."""
    device, sample_rate = blocks[0][0].device, blocks[0][0].sample_rate
    window, hop = _frame_samples(sample_rate)
    inputs = [stream._block_samples(block) for stream, block in blocks]
    assert all((stream.device, stream.sample_rate) == (device, sample_rate) for stream, _ in blocks)
    own = [(block.first - block.start, block.last - block.start) for _, block in blocks]
    lengths = [block.stop - block.start for _, block in blocks]
    on_gpu = device.type == "cuda"
    samples = torch.empty(len(blocks), max(map(len, inputs)), pin_memory=on_gpu)
    for row, one in zip(samples.numpy(), inputs, strict=True):
        row[: len(one)], row[len(one) :] = one, 0
    # For every block: its number of frames, and the range of those it does not share.
    spans = torch.tensor([[length, *span] for length, span in zip(lengths, own, strict=True)], pin_memory=on_gpu)
    with _side_stream(device) if on_gpu else nullcontext(), torch.inference_mode():
        samples, spans = samples.to(device, non_blocking=True), spans.to(device, non_blocking=True)
        marks = _mark_frames(samples, spans, window, hop)
        marks = marks.to("cpu", non_blocking=True)
        if on_gpu:
            torch.cuda.current_stream(device).synchronize()
    spans_samples = [slice(first * hop, (last - 1) * hop + window) for first, last in own]
    return [mark[span] for mark, span in zip(marks.numpy(), spans_samples, strict=True)]


def _mark_frames(samples: Tensor, spans: Tensor, window: int, hop: int) -> Tensor:
    """Return the marks of stacked blocks: (blocks, samples) -> (blocks, samples). `spans` holds the number of frames of
    each, and its first and last own frame; values after a block's frames mean nothing."""
    hann, device = _hann(window, samples.device), samples.device
    spectra = torch.fft.rfft(samples.unfold(1, window, hop) * hann).transpose(1, 2)
    frame = torch.arange(spectra.shape[2], device=device)
    lengths, first, last = spans[:, :, None].unbind(1)
    is_padded = len(samples) > 1
    gain = load_perth(device).gain(levels_of(spectra, window), (frame < lengths)[:, None] if is_padded else None)
    is_own = ((frame >= first) & (frame < last))[:, None]
    change = torch.zeros_like(spectra)
    change[:, :MARKED_BINS] = spectra[:, :MARKED_BINS] * ((gain - 1) * is_own)
    frames = torch.fft.irfft(change, n=window, dim=1) * hann[:, None]
    return F.fold(frames, (1, samples.shape[1]), (1, window), stride=(1, hop)).flatten(1)


class _Block(NamedTuple):
    """Frames `first` to `last`, marked with the context `start` to `stop`."""

    start: int
    first: int
    last: int
    stop: int
    is_end: bool
    """Whether the audio ends with this block."""

    @property
    def is_early(self) -> bool:
        return self.last in FIRST_BLOCKS


def _plan_blocks(done: int, frames: int, ended: bool) -> Iterator[_Block]:
    """Yield the blocks after frame `done` that can be marked with `frames` known frames, all of them if the audio has
    `ended`."""
    while done < frames:
        last = next((end for end in (*FIRST_BLOCKS, WHOLE_BLOCK) if end > done), done + MAX_BLOCK)
        ahead = 0 if last in FIRST_BLOCKS else FRAME_REACH
        if last + ahead > frames and not ended:
            return
        last = min(last, frames)
        is_end = ended and last == frames
        yield _Block(max(0, done - FRAME_REACH), done, last, min(last + ahead, frames), is_end)
        done = last


_NOTHING: Samples = np.zeros(0, np.float32)


def _frame_samples(sample_rate: int) -> tuple[int, int]:
    """Return the samples of a spectrum (an even number), and the samples from one to the next."""
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


@lru_cache(maxsize=16)
def _window_weight(window: int, hop: int, frames: int) -> Samples:
    """Sum the squared windows of a number of frames. Only the last block has an unusual number."""
    squared, total = torch.hann_window(window).square().numpy(), np.zeros((frames - 1) * hop + window, np.float32)
    for frame in range(frames):
        total[frame * hop : frame * hop + window] += squared
    return total


def _add(carried: Samples, samples: Samples, offset: int) -> Samples:
    """Add two arrays; the second begins `-offset` samples before the first and ends after it."""
    total = samples[-offset:].copy()
    total[: len(carried)] += carried
    return total


@lru_cache(maxsize=8)
def _fade(samples: int) -> Samples:
    """Return a ramp from 1 to 0."""
    return np.linspace(1, 0, samples, endpoint=False, dtype=np.float32)


@contextmanager
def _side_stream(device: torch.device) -> Iterator[None]:
    """Compute on the CUDA stream of the watermark, which does not wait for the model."""
    with torch.cuda.stream(_cuda_stream(device)):
        yield


@lru_cache(maxsize=8)
def _cuda_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
