"""Recordings that clients send with every request are decoded once."""

from __future__ import annotations

import asyncio
import io
import mmap
import subprocess
import sys

import numpy as np
import pytest
import soundfile

from myna.audio.files import Samples
from myna.serve import transcoding
from myna.serve.transcoding import UploadDecoder


def recording(pitch: float) -> bytes:
    content = io.BytesIO()
    tone = 0.3 * np.sin(2 * np.pi * pitch * np.arange(12_000) / 24_000)
    soundfile.write(content, tone, 24_000, format="WAV", subtype="PCM_16")
    return content.getvalue()


def test_the_same_recording_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transcoding, "MAX_CACHED", 2)
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


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit the address space")
def test_what_is_mapped_at_the_start_is_not_counted() -> None:
    """On a machine with a GPU the libraries of the process take more addresses than a recording may."""
    child = f"""
import mmap, sys
from myna.serve.transcoding import MAX_DECODE_BYTES, _decode, _limit_memory
mapped = mmap.mmap(-1, MAX_DECODE_BYTES + 2**30, flags={mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}, prot={mmap.PROT_READ})
_limit_memory()
print(len(_decode(sys.stdin.buffer.read(), 24_000, 60.0)))
try:
    bytearray(MAX_DECODE_BYTES + 2**28)
except MemoryError:
    print("limited")
"""
    process = subprocess.run([sys.executable, "-c", child], input=recording(200), capture_output=True, check=True)
    assert process.stdout.split() == [b"12000", b"limited"]
