"""Audio in and out of the server: uploads are decoded once, and encoded pieces decode to what was encoded."""

from __future__ import annotations

import asyncio
import io
import mmap
import subprocess
import sys
import wave
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from myna.audio.files import Samples, pcm16, read_audio
from myna.provenance.credentials import read_credentials
from myna.provenance.speech_log import SpeechOrigin
from myna.serve import transcoding
from myna.serve.schemas import AudioFormat, SpeechSettings
from myna.serve.speech_routes import _finished_file
from myna.serve.transcoding import MEDIA_TYPES, AudioEncoder, UploadDecoder, encode_whole
from myna.speak.streaming import TempoFilter
from tests.serve.decoding import RATE, decode


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
def test_memory_mapped_at_the_start_is_not_counted() -> None:
    """GPU libraries map more addresses at the start of a process than a recording is allowed."""
    child = f"""
import mmap, sys
from myna.serve.transcoding import MAX_DECODE_BYTES, _decode, _limit_memory
mapped = mmap.mmap(-1, MAX_DECODE_BYTES + 2**30, flags={mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}, prot={mmap.PROT_READ})
_limit_memory()
print(len(_decode(sys.stdin.buffer.read(), 24_000, 60.0).samples))
try:
    bytearray(MAX_DECODE_BYTES + 2**28)
except MemoryError:
    print("limited")
"""
    process = subprocess.run([sys.executable, "-c", child], input=recording(200), capture_output=True, check=True)
    assert process.stdout.split() == [b"12000", b"limited"]


def tone(seconds: float) -> np.ndarray:
    return (0.4 * np.sin(2 * np.pi * 220 * np.arange(round(seconds * RATE)) / RATE)).astype(np.float32)


@pytest.mark.parametrize("format", MEDIA_TYPES)
@settings(max_examples=10, deadline=None)
@given(cuts=st.lists(st.integers(0, 36_000), max_size=6))
def test_pieces_of_any_size_are_one_file(format: AudioFormat, cuts: list[int]) -> None:
    samples = tone(1.5)
    encoder, data = AudioEncoder(format, RATE), b""
    for piece in np.split(samples, sorted(cuts)):
        data += encoder.push(pcm16(piece))
    data += encoder.finish()
    decoded = decode(data, format)
    assert abs(len(decoded) - len(samples)) < 0.1 * RATE
    level = np.sqrt(np.mean(decoded[RATE // 4 : RATE] ** 2))
    assert level == pytest.approx(0.4 / np.sqrt(2), rel=0.06), "LAME takes 5 % off"
    crossings = int((np.diff(decoded[RATE // 4 : RATE // 4 + RATE // 2] > 0)).sum())
    assert abs(crossings - 220) <= 2, "half a second of 220 Hz"


@settings(max_examples=20, deadline=None)
@given(rate=st.sampled_from([8000, 16_000, 44_100, 48_000]), cuts=st.lists(st.integers(0, 36_000), max_size=6))
def test_another_sample_rate_is_the_same_in_pieces(rate: int, cuts: list[int]) -> None:
    samples = tone(1.5)
    encoder = AudioEncoder("pcm", RATE, rate)
    pieces = b"".join(encoder.push(pcm16(piece)) for piece in np.split(samples, sorted(cuts))) + encoder.finish()
    whole = np.frombuffer(encode_whole(pcm16(samples), "pcm", RATE, rate), "<i2").astype(int)
    assert len(whole) == pytest.approx(1.5 * rate, abs=1)
    assert np.abs(np.frombuffer(pieces, "<i2") - whole).max() <= 1


@pytest.mark.parametrize("format", ["flac", "wav", "pcm"])
def test_lossless_formats_lose_nothing(format: AudioFormat) -> None:
    samples = tone(0.5)
    decoded = decode(encode_whole(pcm16(samples), format, RATE), format)
    assert np.abs(decoded - samples).max() < 1.1 / 32767 * 2


@pytest.mark.parametrize("format", MEDIA_TYPES)
def test_the_first_bytes_come_early(format: AudioFormat) -> None:
    """Bytes come before a quarter of a second of audio was pushed. A format that waits for its end would not stream."""
    encoder, bytes_at = AudioEncoder(format, RATE), 0
    for piece in np.split(pcm16_array(tone(0.24)), 6):
        bytes_at += len(encoder.push(piece.tobytes()))
    assert bytes_at > 300, "more than a header"
    encoder.close()


def pcm16_array(samples: np.ndarray) -> np.ndarray:
    return np.frombuffer(pcm16(samples), "<i2")


@pytest.mark.parametrize("format", MEDIA_TYPES)
def test_no_samples_are_no_error(format: AudioFormat) -> None:
    encode_whole(b"", format, RATE)


def test_a_streamed_wav_is_read_by_others(tmp_path: Path) -> None:
    encoder = AudioEncoder("wav", RATE)
    data = encoder.push(pcm16(tone(0.2))) + encoder.push(pcm16(tone(0.2))) + encoder.finish()
    assert data.count(b"RIFF") == 1
    (tmp_path / "speech.wav").write_bytes(data)
    assert len(read_audio(tmp_path / "speech.wav", sample_rate=RATE)) == round(0.4 * RATE)
    with wave.open(io.BytesIO(encode_whole(pcm16(tone(0.2)), "wav", RATE))) as file:
        assert (file.getnframes(), file.getframerate(), file.getnchannels()) == (round(0.2 * RATE), RATE, 1)


@pytest.mark.parametrize("speed", [0.25, 0.5, 0.8, 1.5, 4.0])
def test_a_tempo_keeps_the_pitch(speed: float) -> None:
    tempo, samples = TempoFilter(speed, RATE), tone(2.0)
    pieces = [tempo.push(piece, last=False) for piece in np.split(samples, [5, 960, 20_000, 20_001])]
    changed = np.concatenate([*pieces, tempo.push(samples[:0], last=True)])
    assert len(changed) == pytest.approx(len(samples) / speed, rel=0.06)
    part = changed[len(changed) // 4 : len(changed) // 4 + RATE // 10]
    crossings = int((np.diff(part > 0)).sum())
    assert abs(crossings - 44) <= 3, "a tenth of a second of 220 Hz"


@pytest.mark.parametrize("format", MEDIA_TYPES)
def test_finished_files_have_credentials_where_there_is_a_place(
    format: AudioFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MYNA_HOME", str(tmp_path / "home"))
    origin = SpeechOrigin("fledgling", voice="anna", consent="cons_1")
    content, is_signed = _finished_file(
        pcm16(tone(1.0)), SpeechSettings(response_format=format, sample_rate=24_000), RATE, origin
    )
    file = tmp_path / f"speech.{format}"
    file.write_bytes(content)
    found = read_credentials(file)
    assert is_signed == (found is not None) == (format in ("wav", "mp3", "flac"))
    assert len(decode(content, format)) == pytest.approx(RATE, abs=3_000)
    if found is not None:
        assert (found.state, found.is_synthetic, found.speech["consent"]) == ("own", True, "cons_1")
