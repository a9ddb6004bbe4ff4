"""Faults of stored voices and of consent checks, seen through the server."""

from __future__ import annotations

import asyncio
import hashlib
import io
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile

from myna.core.io import save_text
from myna.provenance.voice_store import VOICE_FILE, Consent, StoredRecording, StoredVoice, VoiceStore
from myna.serve import catalog_routes
from tests.serve.stub_engine import stub_of, stub_server

SPEECH = "/v1/audio/speech"


def recording(seed: int, seconds: float = 1.0) -> bytes:
    file = io.BytesIO()
    samples = np.random.default_rng(seed).normal(0, 0.1, round(24_000 * seconds))
    soundfile.write(file, samples, 24_000, format="WAV")
    return file.getvalue()


def store_voice(folder: Path, name: str) -> Path:
    """Store a voice without its consent checks, and return its folder."""
    own, content = folder / "voices" / f"voice_{name}", recording(len(name))
    own.mkdir(parents=True)
    (own / "recording-0.wav").write_bytes(content)
    known = StoredRecording(file="recording-0.wav", sha256=hashlib.sha256(content).hexdigest(), text="as I said")
    consent = Consent(id="cons_1", name=name, language="en", created_at=1, sentence="", recording=known)
    voice = StoredVoice(
        id=own.name, name=name, language="en", created_at=1, recordings=(known,), consent=consent, consent_file=""
    )
    save_text(own / VOICE_FILE, voice.model_dump_json())
    return own


@pytest.mark.parametrize("content", ["", "{", '{"id": 3}', "\0"])
def test_a_damaged_voice_is_never_spoken_in_another_one(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store_voice(tmp_path, "marta")
    damaged = store_voice(tmp_path, "alloy") / VOICE_FILE
    damaged.write_text(content)

    async def run() -> None:
        async with stub_server(tmp_path, monkeypatch) as (context, web):
            for voice in ("alloy", "nova", "nobody"):
                answer = await web.post(SPEECH, json={"input": "Yes.", "voice": voice})
                assert answer.status_code == 500 and "is damaged" in answer.json()["error"]["message"]
                assert str(tmp_path) not in answer.text and str(damaged) in caplog.text
            assert (await web.post(SPEECH, json={"input": "Yes.", "voice": "marta"})).status_code == 200
            assert (await web.post(SPEECH, json={"input": "Yes.", "voice": "default"})).status_code == 200
            assert [one.request.voice for one in stub_of(context).requests] == ["marta", ""]
            with pytest.warns(UserWarning, match="is damaged"):
                listed = await web.get("/v1/audio/voices")
            assert [voice["id"] for voice in listed.json()["voices"]] == ["default", "voice_marta"]
            assert (await web.get("/v1/audio/voices/nobody")).status_code == 500

    asyncio.run(run())


def test_a_changed_recording_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (store_voice(tmp_path, "alloy") / "recording-0.wav").write_bytes(recording(9))

    async def run() -> None:
        async with stub_server(tmp_path, monkeypatch) as (_, web):
            answer = await web.post(SPEECH, json={"input": "Yes.", "voice": "alloy"})
            assert answer.status_code == 500 and "is damaged" in answer.json()["error"]["message"]

    asyncio.run(run())


def test_voices_are_listed_while_one_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("marta", "anna"):
        store_voice(tmp_path, name)
    read, store = Path.read_bytes, VoiceStore(tmp_path)

    def read_too_late(path: Path) -> bytes:
        if path.parent.name == "voice_anna":
            shutil.rmtree(path.parent)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_too_late)
    assert [voice.name for voice in store.list_voices()] == ["marta"]


def test_no_half_of_a_removed_voice_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_voice(tmp_path, "marta")
    store, listed = VoiceStore(tmp_path), list[str]()

    def remove_a_part(folder: Path) -> None:
        (folder / "recording-0.wav").unlink()
        listed.extend(voice.name for voice in store.list_voices())

    monkeypatch.setattr(shutil, "rmtree", remove_a_part)
    store.delete_voice("marta")
    assert listed == []


def test_consent_checks_do_not_hold_up_speech(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_check(_: str) -> None:
        time.sleep(1.0)
        raise RuntimeError("a slow check")

    monkeypatch.setattr(catalog_routes, "_open_checker", slow_check)

    async def run() -> float:
        async with stub_server(tmp_path, monkeypatch, asr="base") as (_, web):
            form = {"name": "Marta", "language": "en"}
            files = {"recording": ("a.wav", recording(1), "audio/wav")}
            checks = [
                asyncio.create_task(web.post("/v1/audio/voice_consents", data=form, files=files)) for _ in range(40)
            ]
            await asyncio.sleep(0.3)
            began = time.monotonic()
            assert (await web.post(SPEECH, json={"input": "Yes."})).status_code == 200
            taken = time.monotonic() - began
            for check in checks:
                check.cancel()
            return taken

    assert asyncio.run(run()) < 0.8
