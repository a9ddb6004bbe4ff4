"""Consents and voices over HTTP, with OpenAI's client: checked by a real recogniser and a real speaker encoder."""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
import soundfile

import myna
from myna.audio.files import Samples
from myna.core.io import private_file
from myna.provenance import consent as sentences
from myna.provenance.speech_log import LOG_FILE
from myna.provenance.watermark import watermark
from tests.real_models import CURATION, WHISPER
from tests.serve.conftest import RunningServer, start_server

pytestmark = pytest.mark.extras
if os.environ.get("MYNA_EXTRAS") != "required" and not (CURATION.is_dir() and WHISPER.is_dir()):
    pytest.skip(
        "needs a speaker encoder and a Whisper: myna setup curation, myna setup metrics", allow_module_level=True
    )
RECORDINGS = Path(myna.__file__).parent / "demo" / "recordings"
NAME, TEXT = "Anna Berg", "The boats lay close together in the evening light."
WORDS = ("garden", "river")
"""Words of the day on which the server starts, which the model says well and the recogniser understands."""
SENTENCE = sentences.SENTENCES["en"].format(name=NAME, first=WORDS[0], second=WORDS[1])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Run a server that takes consents. Its speech without a mark stands for recordings of people."""
    home = tmp_path_factory.mktemp("server")
    (home / "ecapa").symlink_to(CURATION)
    private_file(home / sentences.SECRET_FILE, find_secret())
    with start_server(home, "--no-watermark", "--asr", str(WHISPER)) as one:
        yield one


def find_secret() -> bytes:
    """A secret that makes `WORDS` the words of today."""
    number = 0
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sentences, "private_file", lambda *_: number.to_bytes(32, "big"))
        while sentences.sentence_of_day(NAME, "en").words != WORDS:
            number += 1
    return number.to_bytes(32, "big")


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def speaker() -> dict[str, str]:
    """The fields of a request in the voice of the demo's recordings."""
    row = json.loads((RECORDINGS / "manifest.jsonl").read_text(encoding="utf-8").splitlines()[1])
    audio = base64.b64encode((RECORDINGS / row["audio"]).read_bytes()).decode()
    return {"ref_audio": audio, "ref_text": row["text"]}


def say(client: openai.OpenAI, text: str, fields: dict[str, str], seed: int = 0) -> bytes:
    """Record sentences, each spoken by itself."""
    parts = [
        client.audio.speech.create(
            model="fledgling", voice="default", input=one, response_format="wav", extra_body={"seed": seed, **fields}
        ).content
        for one in text.replace(". ", ".|").split("|")
    ]
    samples = np.concatenate([soundfile.read(io.BytesIO(part), dtype="float32")[0] for part in parts])
    return as_wav(samples)


def as_wav(samples: Samples, rate: int = 24_000) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV")
    return file.getvalue()


def test_a_voice_from_its_consent_to_its_speech(server: RunningServer, client: openai.OpenAI) -> None:
    consents = client.audio.voice_consents
    asked = httpx2.get(f"{server.url}/v1/audio/consent_sentence", params={"name": NAME, "language": "en"}).json()
    assert asked["sentence"].startswith(f"My name is {NAME}. I agree")
    with pytest.raises(openai.BadRequestError, match="is no consent of Anna Berg"):
        consents.create(name=NAME, recording=("other.wav", say(client, TEXT, speaker())), language="en")
    reading = say(client, SENTENCE, speaker())
    consent = consents.create(name=NAME, recording=("consent.wav", reading), language="en")
    assert consent.id.startswith("cons_") and consent.object == "audio.voice_consent"
    assert consents.retrieve(consent.id).name == NAME and [one.id for one in consents.list()] == [consent.id]

    marked = watermark(soundfile.read(io.BytesIO(reading), dtype="float32")[0], 24_000)
    with pytest.raises(openai.BadRequestError, match="spoken by a model"):
        consents.create(name=NAME, recording=("marked.wav", as_wav(marked)), language="en")

    assert consents.update(consent.id, name="Ana Berg").name == "Ana Berg"
    with pytest.raises(openai.BadRequestError, match="not the name that was read aloud"):
        consents.update(consent.id, name="Somebody Else")
    with pytest.raises(openai.NotFoundError):
        consents.update("cons_none", name=NAME)
    assert consents.retrieve(consent.id).name == "Ana Berg"

    other = soundfile.read(io.BytesIO(say(client, TEXT, {})), dtype="float32")[0]
    stranger = as_wav(other, 31_200)  # higher by a third: two voices of this model may be much alike
    with pytest.raises(openai.BadRequestError, match="not in the voice of the consent"):
        client.audio.voices.create(name=NAME, audio_sample=("s.wav", stranger), consent=consent.id)
    voice = client.audio.voices.create(
        name=NAME, audio_sample=("own.wav", say(client, TEXT, speaker())), consent=consent.id
    )
    assert voice.object == "audio.voice" and voice.id.startswith("voice_")
    names: list[Any] = [NAME, {"id": voice.id}, "default"]
    spoken = [
        client.audio.speech.create(model="fledgling", voice=one, input="Yes.", response_format="pcm").content
        for one in names
    ]
    assert spoken[0] == spoken[1] != spoken[2]
    rows = [json.loads(row) for row in (server.home / LOG_FILE).read_text(encoding="utf-8").splitlines()]
    assert [row["consent"] for row in rows[-3:]] == [consent.id, consent.id, ""]

    with pytest.raises(openai.ConflictError, match="rests on"):
        consents.delete(consent.id)
    client.audio.voices.delete(voice.id)
    assert consents.delete(consent.id).deleted
    with pytest.raises(openai.BadRequestError, match="no voice"):
        client.audio.speech.create(model="fledgling", voice=NAME, input="Yes.")
