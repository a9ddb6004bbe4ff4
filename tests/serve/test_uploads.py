"""Recordings that clients send with every request are decoded once."""

from __future__ import annotations

import asyncio
import io

import numpy as np
import pytest
import soundfile

from myna.audio.files import Samples
from myna.serve import uploads
from myna.serve.uploads import UploadDecoder


def recording(pitch: float) -> bytes:
    content = io.BytesIO()
    tone = 0.3 * np.sin(2 * np.pi * pitch * np.arange(12_000) / 24_000)
    soundfile.write(content, tone, 24_000, format="WAV", subtype="PCM_16")
    return content.getvalue()


def test_the_same_recording_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "MAX_CACHED", 2)
    decoder = UploadDecoder()

    async def decode(pitch: float, sample_rate: int = 24_000) -> Samples:
        return await decoder.decode(recording(pitch), sample_rate, param="ref_audio")

    async def run() -> None:
        first = await decode(200)
        assert len(first) == 12_000 and await decode(200) is first
        assert len(await decode(200, 16_000)) == 8_000, "another rate is another recording"
        assert await decode(200) is first
        await decode(300)
        assert len(decoder._decoded) == 2 and await decode(200) is first
        again = await decode(200, 16_000)
        assert len(again) == 8_000 and len(decoder._decoded) == 2, "what was used last is kept"

    try:
        asyncio.run(run())
    finally:
        decoder.close()
