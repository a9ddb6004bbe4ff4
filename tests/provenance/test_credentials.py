"""Content credentials: signed files that say where they come from, and notice when they were changed."""

from __future__ import annotations

import stat
from pathlib import Path

import numpy as np
import pytest
import soundfile

from myna.audio.files import Samples, encode_audio_file, read_audio
from myna.provenance.credentials import KEY_FILE, read_credentials, sign_audio
from myna.provenance.speech_log import SpeechOrigin

ORIGIN = SpeechOrigin(
    "fledgling", adapter="marta", adapter_sha256="ab" * 32, voice="Marta", consent="cons_1", text="hi", watermark="w"
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MYNA_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def noise() -> Samples:
    return (0.1 * np.random.default_rng(0).standard_normal(24_000)).astype(np.float32)


@pytest.mark.parametrize("suffix", [".wav", ".flac", ".mp3", ".m4a"])
def test_signed_files_say_where_they_come_from(tmp_path: Path, suffix: str, home: Path) -> None:
    file = tmp_path / f"speech{suffix}"
    content = encode_audio_file(file, noise(), 24_000)
    signed = sign_audio(content, suffix, ORIGIN)
    assert signed is not None
    file.write_bytes(signed)
    found = read_credentials(file)
    assert found is not None
    assert (found.state, found.problems) == ("own", ())
    assert found.speech["adapter_sha256"] == "ab" * 32
    assert found.speech["consent"] == "cons_1"
    assert "text" not in found.speech
    assert found.generator.startswith("Myna ")
    assert stat.S_IMODE((home / KEY_FILE).stat().st_mode) == 0o600
    # The sound is what it was.
    plain = tmp_path / f"plain{suffix}"
    plain.write_bytes(content)
    assert np.array_equal(read_audio(file), read_audio(plain))


def test_a_changed_file_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "speech.wav"
    signed = bytearray(sign_audio(encode_audio_file(file, noise(), 24_000), ".wav", ORIGIN) or b"")
    signed[20_000] ^= 1
    file.write_bytes(bytes(signed))
    found = read_credentials(file)
    assert found is not None
    assert found.state == "invalid"
    assert found.problems == ("assertion.dataHash.mismatch",)


def test_a_file_of_another_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "speech.flac"
    file.write_bytes(sign_audio(encode_audio_file(file, noise(), 24_000), ".flac", ORIGIN) or b"")
    monkeypatch.setenv("MYNA_HOME", str(tmp_path / "elsewhere"))
    found = read_credentials(file)
    assert found is not None
    assert (found.state, found.problems) == ("valid", ())
    sign_audio(encode_audio_file(file, noise(), 24_000), ".flac", ORIGIN)  # now it has a key, another one
    again = read_credentials(file)
    assert again is not None
    assert again.state == "valid"


def test_files_without_credentials(tmp_path: Path) -> None:
    for suffix in (".wav", ".ogg", ".opus"):
        file = tmp_path / f"speech{suffix}"
        file.write_bytes(encode_audio_file(file, noise(), 24_000))
        assert read_credentials(file) is None
    assert sign_audio(b"OggS", ".ogg", ORIGIN) is None


def test_broken_credentials_are_no_crash(tmp_path: Path) -> None:
    file = tmp_path / "speech.wav"
    signed = sign_audio(encode_audio_file(file, noise(), 24_000), ".wav", ORIGIN) or b""
    for length in (100, 1_000, len(signed) - 500, len(signed) - 2_500):
        file.write_bytes(signed[:length])
        found = read_credentials(file)
        assert found is None or found.state == "invalid"
    file.write_bytes(signed)
    whole = read_credentials(file)
    assert whole is not None
    for at in range(48_100, len(signed), 97):
        damaged = bytearray(signed)
        damaged[at] ^= 0xFF
        file.write_bytes(bytes(damaged))
        found = read_credentials(file)
        # The signature is followed by padding that nothing depends on.
        assert found is None or found.state == "invalid" or found.speech == whole.speech, at


def test_samples_of_a_signed_wav_are_readable_elsewhere(tmp_path: Path) -> None:
    file = tmp_path / "speech.wav"
    file.write_bytes(sign_audio(encode_audio_file(file, noise(), 24_000), ".wav", ORIGIN) or b"")
    assert len(soundfile.read(file)[0]) == 24_000
