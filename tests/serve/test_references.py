"""Reference recordings that are sent with a request: cleaned, named and decoded without holding others up."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from myna.audio.files import Samples
from myna.provenance.speech_log import LOG_FILE
from myna.serve import transcoding
from myna.serve.schemas import ApiError
from myna.serve.transcoding import UploadDecoder, _limit_memory
from myna.speak.request import open_reference
from tests.serve.stub_engine import RATE, stub_of, stub_server

SPEECH = "/v1/audio/speech"


def wav(samples: Samples, rate: int = RATE, format: str = "WAV") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=format)
    return file.getvalue()


def quiet_speech() -> bytes:
    """Return something like quiet speech, between long silences."""
    rng = np.random.default_rng(0)
    time_of = np.arange(3 * RATE) / RATE
    voiced = np.sin(2 * np.pi * 140 * time_of) * (np.sin(2 * np.pi * 3 * time_of) > 0) * 0.014
    silence = rng.normal(0, 1e-5, 2 * RATE)
    return wav(np.concatenate([silence, voiced + rng.normal(0, 1e-5, len(voiced)), silence]).astype(np.float32))


def test_an_inline_reference_is_cleaned_as_one_of_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.wav").write_bytes(content := quiet_speech())
    expected = open_reference(tmp_path / "a.wav")
    assert len(expected.samples) < 5 * RATE and np.abs(expected.samples).max() > 0.02 and expected.problems
    fields = {"ref_audio": base64.b64encode(content).decode(), "ref_text": "as I said", "takes": 2}

    async def run() -> dict[str, Any]:
        async with stub_server(tmp_path, monkeypatch) as (context, web):
            answer = await web.post(SPEECH, json={"input": "Yes.", **fields}, timeout=120)
            for message in stub_of(context).requests:
                (reference,) = message.request.recordings
                assert np.array_equal(np.asarray(reference.audio), expected.samples)
            content: dict[str, Any] = answer.json()
            return content

    results = asyncio.run(run())["results"]
    told = [problem.replace(str(tmp_path / "a.wav"), "recording") for problem in expected.problems]
    assert [one["warnings"] for one in results] == [told, told]
    rows = [json.loads(line) for line in (tmp_path / LOG_FILE).read_text().splitlines()]
    name = f"reference sha256:{hashlib.sha256(content).hexdigest()}"
    assert [row["voice"] for row in rows] == [name, name], "another recording has another name in the log"


def test_a_recording_that_is_known_does_not_wait_for_the_decoder() -> None:
    async def run() -> None:
        decoder, first = UploadDecoder(), wav(np.full(RATE, 0.1, np.float32) * np.sin(np.arange(RATE)))
        try:
            known = await decoder.decode(first, RATE, param="file")
            async with decoder._turn:  # as while another recording is decoded
                again = await asyncio.wait_for(decoder.decode(first, RATE, param="file"), 1)
            assert again is known
        finally:
            decoder.close()

    asyncio.run(run())


def test_a_recording_of_many_samples_a_second_is_refused() -> None:
    """A small FLAC of 655 kHz and 8 channels takes seconds to decode, which others wait for."""
    noise = np.sin(np.arange(655_350 * 2)).astype(np.float32)[:, None].repeat(8, 1)
    content = wav(noise, 655_350, "FLAC")

    async def run() -> float:
        decoder = UploadDecoder()
        try:
            await decoder.decode(wav(noise[:RATE, 0]), RATE, param="file")  # the process has started then
            began = time.monotonic()
            with pytest.raises(ApiError, match="8 channels at 655350 Hz"):
                await decoder.decode(content, RATE, param="file")
            return time.monotonic() - began
        finally:
            decoder.close()

    assert asyncio.run(run()) < 5


@pytest.mark.parametrize("platform", ["darwin", "linux"])
def test_a_machine_that_refuses_limits_decodes_without_them(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS refuses RLIMIT_AS (cpython#78783)."""

    def refuse(*_: Any) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr("resource.setrlimit", refuse)
    _limit_memory()


def test_the_samples_of_a_proof_are_not_cleaned() -> None:
    content = quiet_speech()
    decoded = transcoding._decode(content, RATE, 60.0).samples
    assert len(decoded) == 7 * RATE


def test_a_reference_without_a_transcript_is_heard_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[int] = []

    def hear(samples: Samples, rate: int, asr: str | None, language: str) -> str:
        heard.append(len(samples))
        assert (rate, asr, language) == (RATE, None, "vi")
        return "xin chào"

    monkeypatch.setattr("myna.serve.context.hear_reference", hear)
    body = {"input": "Yes.", "language": "vi", "ref_audio": base64.b64encode(quiet_speech()).decode(), "takes": 2}

    async def run() -> dict[str, Any]:
        async with stub_server(tmp_path, monkeypatch) as (context, web):
            await web.post(SPEECH, json=body, timeout=120)
            answer = await web.post(SPEECH, json=body, timeout=120)
            assert {one.text for message in stub_of(context).requests for one in message.request.recordings} == {
                "xin chào"
            }
            content: dict[str, Any] = answer.json()
            return content

    content = asyncio.run(run())
    assert len(heard) == 1
    assert 'heard "xin chào"' in json.dumps(content, ensure_ascii=False).replace('\\"', '"')


def test_a_reference_without_a_transcript_or_a_recogniser_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("myna.speak.references.whisper_folder", lambda: tmp_path / "none")
    body = {"input": "Yes.", "ref_audio": base64.b64encode(quiet_speech()).decode()}

    async def run() -> dict[str, Any]:
        async with stub_server(tmp_path, monkeypatch) as (_, web):
            answer = await web.post(SPEECH, json=body, timeout=120)
            assert answer.status_code == 400
            error: dict[str, Any] = answer.json()["error"]
            return error

    error = asyncio.run(run())
    assert "no recogniser is installed" in error["message"] and error["param"] == "ref_text"
