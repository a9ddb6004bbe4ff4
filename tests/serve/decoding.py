"""Decoding of the audio files that the server sends."""

from __future__ import annotations

import io

import av
import numpy as np
import soundfile

RATE = 24_000


def decode(data: bytes, format: str) -> np.ndarray:
    """Decode a file to samples in [-1, 1] with FFmpeg; raw audio of any sample rate as it is."""
    if format in ("mulaw", "alaw"):
        subtype = {"mulaw": "ULAW", "alaw": "ALAW"}[format]
        raw = {"format": "RAW", "samplerate": RATE, "channels": 1, "subtype": subtype}
        samples: np.ndarray = soundfile.read(io.BytesIO(data), dtype="float32", **raw)[0]
        return samples
    if format == "pcm":
        return np.frombuffer(data, "<i2") / np.float32(32767)
    with av.open(io.BytesIO(data), "r") as file:
        resampler = av.AudioResampler("flt", "mono", RATE)
        frames = [one for frame in file.decode(audio=0) for one in resampler.resample(frame)]
        frames += resampler.resample(None)
        return np.concatenate([frame.to_ndarray().reshape(-1) for frame in frames])
