"""Decoding of the audio files that the server sends."""

from __future__ import annotations

import io

import av
import numpy as np

RATE = 24_000


def decode(data: bytes, format: str) -> np.ndarray:
    """Decode a file to samples in [-1, 1] with FFmpeg."""
    if format == "pcm":
        return np.frombuffer(data, "<i2") / np.float32(32767)
    with av.open(io.BytesIO(data), "r") as file:
        resampler = av.AudioResampler("flt", "mono", RATE)
        frames = [one for frame in file.decode(audio=0) for one in resampler.resample(frame)]
        frames += resampler.resample(None)
        return np.concatenate([frame.to_ndarray().reshape(-1) for frame in frames])
