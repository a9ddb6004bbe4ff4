"""Codes decoded as they are generated: the samples are those of the finished clip, bit for bit."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from myna.audio.files import join_samples
from myna.data.codec import Codec, Codes, PendingSamples, Samples
from myna.models import codecs
from myna.models.codecs import FIRST_WINDOW, MAX_WINDOW, Window


class CodeStream:
    """Codes of one stream that are not decoded yet, with the context that their windows need. Frames come in pieces of
    any size. Their windows depend only on their place in the stream. The first windows are short, unless `streamed` is
    off and long ones give the same samples."""

    def __init__(self, codec: Codec, *, streamed: bool = True) -> None:
        self._codec = codec
        self._first_window = FIRST_WINDOW if streamed else codecs.clip_first_window(codec)
        self._codes: Codes = np.zeros((0, codec.codebooks), np.uint16)
        self._start = 0
        """Number of the first frame in `_codes`."""
        self._done = 0
        self.next_frames = self._needed(0)
        """Number of frames that the next window needs."""
        self.ended = False

    @property
    def frames(self) -> int:
        """Number of frames so far."""
        return self._start + len(self._codes)

    @property
    def finished(self) -> bool:
        """Whether the stream has ended and every window was taken."""
        return self.ended and self._done == self.frames

    def _needed(self, done: int) -> int:
        return done + min(done + self._first_window, MAX_WINDOW) + self._codec.decode_reach

    def outlook(self, frames: int) -> tuple[int, int]:
        """Return how many of these frames could be decoded now, and how many frames the window after them lacks."""
        done, needed = self._done, self.next_frames
        while frames >= needed:
            done = needed - self._codec.decode_reach
            needed = self._needed(done)
        return done - self._done, needed - frames

    def push(self, codes: Codes) -> None:
        """Add frames, shape (frames, codebooks)."""
        assert not self.ended, "the stream has ended"
        codecs.check_codes(self._codec, codes)
        self._codes = np.concatenate([self._codes, codes])

    def end(self) -> None:
        """End the stream. Its last frames need no context after them."""
        self.ended = True

    def take_windows(self) -> list[tuple[Window, Codes]]:
        """Return the windows that can be decoded now, each with its codes and each only once."""
        reach = self._codec.decode_reach
        windows = list(codecs.plan_windows(reach, self._done, self.frames, self.ended, self._first_window))
        taken = [(window, self._codes[window.start - self._start : window.stop - self._start]) for window in windows]
        if windows:
            self._done = windows[-1].last
            self.next_frames = self._needed(self._done)
            keep = max(self._start, self._done - reach)
            self._codes, self._start = self._codes[keep - self._start :], keep
        return taken


def decode_streams(codec: Codec, streams: Sequence[CodeStream]) -> PendingSamples:
    """Start decoding all complete windows of these streams in one call. The returned function waits for the next
    samples of each stream, in the order of the streams."""
    taken = [(number, *window) for number, stream in enumerate(streams) for window in stream.take_windows()]
    pending = codec.decode_windows([codes for _, _, codes in taken])

    def fetch() -> list[Samples]:
        parts: list[list[Samples]] = [[] for _ in streams]
        for (number, window, _), samples in zip(taken, pending(), strict=True):
            parts[number].append(codecs.crop_window(window, samples, codec.hop))
        return [join_samples(own) for own in parts]

    return fetch


def warm_up(codec: Codec, streams: int) -> None:
    """Let a codec compile, capture and probe what it needs for this many streams, before the first comes."""
    codecs.clip_first_window(codec)
    lengths = {
        window.stop - window.start for window in codecs.plan_windows(codec.decode_reach, 0, 4 * MAX_WINDOW, ended=False)
    }
    count = 1
    while count <= streams:
        for frames in sorted(lengths):
            codec.decode_windows([np.zeros((frames, codec.codebooks), np.uint16)] * count)()
        count *= 2


MIN_FACTOR = 0.5
"""Smallest factor of one atempo filter; slower speech goes through two."""


class TempoFilter:
    """Change of tempo by 0.25 to 4 without a change of pitch, with FFmpeg's atempo."""

    def __init__(self, speed: float, sample_rate: int) -> None:
        import av.filter

        self._frame, self._sample_rate, self._pts = av.AudioFrame, sample_rate, 0
        self._graph = graph = av.filter.Graph()
        source = graph.add_abuffer(format="flt", sample_rate=sample_rate, layout="mono", time_base=None)
        factors = [MIN_FACTOR, speed / MIN_FACTOR] if speed < MIN_FACTOR else [speed]
        last: Any = source
        for factor in factors:
            tempo = graph.add("atempo", f"{factor:.6f}")
            last.link_to(tempo)
            last = tempo
        last.link_to(graph.add("abuffersink"))
        graph.configure()

    def push(self, samples: Samples, *, last: bool) -> Samples:
        """Take the next samples, and return those that are ready; after the last, all that are left."""
        import av

        if len(samples):
            frame = self._frame.from_ndarray(np.ascontiguousarray(samples[None]), format="flt", layout="mono")
            frame.sample_rate, frame.pts = self._sample_rate, self._pts
            self._pts += len(samples)
            self._graph.push(frame)
        if last:
            self._graph.push(None)
        pieces = [np.zeros(0, np.float32)]
        while True:
            try:
                pieces.append(np.asarray(self._graph.pull().to_ndarray(), np.float32).reshape(-1))
            except (av.BlockingIOError, av.EOFError):
                return np.concatenate(pieces)
