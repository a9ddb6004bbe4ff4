"""Sounds and codecs for tests of listen."""

from __future__ import annotations

import io

import av
import numpy as np
import soundfile

from myna.audio.files import Samples

SAMPLE_RATE = 24_000


def babble(seconds: float, seed: int, sample_rate: int = SAMPLE_RATE) -> Samples:
    """Make harmonics that glide and stop like speech; every seed gives another passage."""
    rng = np.random.default_rng(seed)
    count = round(seconds * sample_rate)
    syllables = max(1, int(seconds * 5))
    pitch = np.interp(np.linspace(0, syllables, count), np.arange(syllables + 1), rng.uniform(90, 260, syllables + 1))
    level = np.interp(np.linspace(0, syllables, count), np.arange(syllables + 1), rng.uniform(0, 1, syllables + 1))
    phase = 2 * np.pi * np.cumsum(pitch) / sample_rate
    wave = np.zeros(count)
    for harmonic in range(1, 25):
        tone = np.interp(np.linspace(0, syllables, count), np.arange(syllables + 1), rng.uniform(0, 1, syllables + 1))
        wave += tone * np.sin(harmonic * phase) / harmonic
    return np.asarray(0.3 * level * wave, np.float32)


def through_mp3(samples: Samples, bit_rate: int = 32_000) -> Samples:
    """Encode samples with LAME and decode them again."""
    content = io.BytesIO()
    with av.open(content, "w", format="mp3") as container:
        stream = container.add_stream("libmp3lame", rate=SAMPLE_RATE)
        stream.bit_rate, stream.layout = bit_rate, "mono"
        stream.codec_context.open()
        pcm = (np.clip(samples, -1, 1) * 32767).astype(np.int16)[None]
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(pcm), format="s16", layout="mono")
        frame.sample_rate = SAMPLE_RATE
        context = stream.codec_context
        resampler = av.AudioResampler(context.format.name, "mono", SAMPLE_RATE, frame_size=context.frame_size)
        for one in [*resampler.resample(frame), *resampler.resample(None)]:
            container.mux(stream.encode(one))
        container.mux(stream.encode(None))
    content.seek(0)
    return np.asarray(soundfile.read(content, dtype="float32")[0], np.float32)
