"""Change of tempo without a change of pitch, for the `speed` of a request: FFmpeg's atempo, sample by sample."""

from __future__ import annotations

from typing import Any

import numpy as np

from myna.audio.files import Samples

MIN_FACTOR = 0.5
"""Of one atempo filter; slower speech goes through two."""


class TempoFilter:
    """`SampleFilter` that plays a stream at another speed, 0.25 to 4."""

    def __init__(self, speed: float, sample_rate: int) -> None:
        import av
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

    def push(self, samples: Samples) -> Samples:
        if len(samples):
            frame = self._frame.from_ndarray(np.ascontiguousarray(samples[None]), format="flt", layout="mono")
            frame.sample_rate, frame.pts = self._sample_rate, self._pts
            self._pts += len(samples)
            self._graph.push(frame)
        return self._pull()

    def finish(self) -> Samples:
        self._graph.push(None)
        return self._pull()

    def _pull(self) -> Samples:
        import av

        pieces = [np.zeros(0, np.float32)]
        while True:
            try:
                pieces.append(np.asarray(self._graph.pull().to_ndarray(), np.float32).reshape(-1))
            except (av.BlockingIOError, av.EOFError):
                return np.concatenate(pieces)
