"""Tones, and recordings in containers encoded by FFmpeg."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import numpy as np

from myna.audio.files import Samples

RATE = 48_000


def sine(seconds: float, rate: int, hertz: float = 440.0, level: float = 0.5) -> Samples:
    return (level * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def peak_hertz(samples: Samples, rate: int) -> float:
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return float(np.argmax(spectrum) * rate / len(samples))


def write_container(path: Path, samples: Samples, codec: str, **options: str) -> Path:
    """Write samples at `RATE`, mono or as (channels, frames), in the container that the suffix names."""
    channels = np.atleast_2d(samples)
    layout = "mono" if len(channels) == 1 else "stereo"
    with av.open(str(path), "w", format="adts" if path.suffix == ".aac" else None, options=options) as container:
        stream: Any = container.add_stream(codec, rate=RATE, layout=layout)
        frame = av.AudioFrame.from_ndarray(channels, format="fltp", layout=layout)
        frame.sample_rate, frame.pts = RATE, 0
        resampler = av.AudioResampler(stream.format, layout, RATE, stream.codec_context.frame_size or 1024)
        for part in (*resampler.resample(frame), *resampler.resample(None), None):
            container.mux(stream.encode(part))
    return path
