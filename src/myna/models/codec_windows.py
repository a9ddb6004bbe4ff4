"""Windows of a stream of codes that a codec decodes one after another.

A decoder is not causal: a frame's samples depend on `Codec.decode_reach` frames on either side of it. A window is
decoded with that many frames around those whose samples are kept, fewer only where the stream begins or ends. Windows
lie at fixed frames of the stream, short ones first. Finished clips are decoded in long windows where that gives the
same samples, bit for bit, else in those of a stream: a stream always has the samples of its file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from myna.data.codec import Codec, Codes, Samples
from myna.models.codec_checks import check_codes

FIRST_WINDOW = 2
"""Frames of the first window: speech begins when these and the frames of the reach behind them are known."""
MAX_WINDOW = 128
"""Frames of the windows of a long stream: with a reach of 10 frames, one frame in seven is decoded twice."""

PROBE_FRAMES = 45
"""Few enough to be decoded in a moment; the windows have few rows, for which libraries have kernels of their own."""


class Window(NamedTuple):
    """Frames `first` to `last` of a stream, decoded from frames `start` to `stop`."""

    start: int
    first: int
    last: int
    stop: int


def plan_windows(reach: int, done: int, frames: int, ended: bool, first_window: int = FIRST_WINDOW) -> Iterator[Window]:
    """The windows behind frame `done` of a stream of which `frames` frames are known, all of them if it has `ended`.

    A window is as long as all before it and the first: a stream that is generated at twice the pace of its playback, or
    faster, always has its next window decoded before the last one has been played.
    """
    while True:
        last = done + min(done + first_window, MAX_WINDOW)
        if ended:
            last = min(last, frames)
        if last == done or (last + reach > frames and not ended):
            return
        yield Window(max(0, done - reach), done, last, min(last + reach, frames))
        done = last


def crop_window(window: Window, samples: Samples, hop: int) -> Samples:
    """The kept samples of a decoded window."""
    return samples[(window.first - window.start) * hop : (window.last - window.start) * hop]


def decode_in_windows(codec: Codec, codes: Codes) -> Samples:
    """Decode a whole clip: (frames, codebooks) -> (frames * hop,)."""
    check_codes(codec, codes)
    first_window = clip_first_window(codec)
    windows = list(plan_windows(codec.decode_reach, 0, len(codes), ended=True, first_window=first_window))
    decoded = codec.decode_windows([codes[window.start : window.stop] for window in windows])()
    kept = [crop_window(window, samples, codec.hop) for window, samples in zip(windows, decoded, strict=True)]
    return np.concatenate([np.zeros(0, np.float32), *kept])


def clip_first_window(codec: Codec) -> int:
    """Frames of the first window of a clip that need not be streamed."""
    return MAX_WINDOW if codec.window_independent else FIRST_WINDOW


def probe_window_independence(codec: Codec) -> bool:
    """Decode random codes in one piece, and the first and the last window of a stream of them; compare all bits."""
    shape, hop = (PROBE_FRAMES, codec.codebooks), codec.hop
    codes = np.random.default_rng(0).integers(0, codec.codebook_size, shape).astype(np.uint16)
    first, *_, last = plan_windows(codec.decode_reach, 0, len(codes), ended=True)
    whole, *parts = codec.decode_windows([codes, *(codes[window.start : window.stop] for window in (first, last))])()
    return all(
        np.array_equal(crop_window(window, part, hop), whole[window.first * hop : window.last * hop])
        for window, part in zip((first, last), parts, strict=True)
    )
