"""Adapters beside their base, and a model that answers, each in a server of its own."""

from __future__ import annotations

import hashlib
import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import numpy as np
import openai
import pytest
import soundfile

from myna.audio.files import pcm16
from myna.models import open_family, save_tiny_model
from myna.models.ref import ModelRef
from myna.provenance.speech_log import LOG_FILE
from myna.provenance.watermark import MARK_NAME, watermark
from myna.speak.loading import load_engine
from myna.speak.request import SpeechRequest
from tests.models.helpers import random_adapter
from tests.serve.conftest import start_server

pytestmark = pytest.mark.slow
TEXT = "two words"


def merged_speech(adapter: Path | None, model: str | Path) -> bytes:
    """Return the speech of the model into which the adapter was merged."""
    engine = load_engine(ModelRef.find(adapter or model), device="cpu")
    plan = engine.plan(SpeechRequest(TEXT, id=TEXT, max_seconds=1.0, seed=0))
    return pcm16(next(engine.speak_plans([plan]))[1].samples)


def test_two_adapters_and_their_base_in_one_batch(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tiny")
    family = open_family(str(model))
    allowed = tmp_path / "adapters"
    first = random_adapter(family, allowed / "first", 0.05)
    second = random_adapter(family, allowed / "second", 0.2)
    (allowed / "link").symlink_to("/etc")
    poisoned = allowed / "pickled"
    poisoned.mkdir()
    (poisoned / "adapter_config.json").write_text((first / "adapter_config.json").read_text())
    (poisoned / "adapter_model.bin").write_bytes(pickle.dumps({"a": 1}))
    expected = {
        "tiny": merged_speech(None, model),
        "one": merged_speech(first, model),
        "two": merged_speech(second, model),
    }
    assert len(set(expected.values())) == 3
    arguments = (f"one={first}", "--allow-adapter-loading", str(allowed), "--streams", "4", "--no-watermark")
    with start_server(tmp_path, *arguments, source=str(model)) as server:

        def load(name: str, path: str) -> httpx2.Response:
            body = {"lora_name": name, "lora_path": path}
            return httpx2.post(f"{server.url}/v1/load_lora_adapter", json=body, timeout=60)

        for path in ("../tiny", "/etc", str(tmp_path), "link", "link/..", "second/../../tiny", "a\0b"):
            assert load("bad", path).status_code == 403, path
        assert load("bad", "nothing").status_code == 404
        assert "pickle" in load("bad", "pickled").json()["error"]["message"]
        assert load("one", "second").status_code == 400, "a name that is taken"
        assert load("../x", "second").status_code == 400
        assert load("two", "second").text == "Success: LoRA adapter 'two' added successfully."

        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        assert {model.id: getattr(model, "parent", "") for model in client.models.list()} == {
            "tiny": None,
            "one": "tiny",
            "two": "tiny",
        }

        def speak(name: str) -> bytes:
            return client.audio.speech.create(
                model=name, voice="default", input=TEXT, response_format="pcm", extra_body={"max_seconds": 1.0}
            ).content

        names = ["tiny", "one", "two", "tiny:two", "one", "tiny"]
        with ThreadPoolExecutor(len(names)) as pool:
            for name, spoken in zip(names, pool.map(speak, names), strict=True):
                assert spoken == expected[name.removeprefix("tiny:")], name
        server.engine().kill()
        server.wait_for("myna_engine_restarts", 1)
        assert speak("two") == expected["two"], "an engine that is started again has them again"
        unload = httpx2.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": "two"})
        assert unload.status_code == 200
        with pytest.raises(openai.NotFoundError):
            speak("two")
        assert speak("one") == expected["one"]


def test_adapters_of_the_shipped_model_in_one_batch(tmp_path: Path) -> None:
    """Each adapter speaks as its merged model, with half its strength as neither, without any as the base."""
    family = open_family("fledgling")
    folders = {
        name: random_adapter(family, tmp_path / name, scale, text_head=False)
        for name, scale in (("one", 0.01), ("two", 0.02))
    }
    expected = {name: merged_speech(folder, "fledgling") for name, folder in folders.items()}
    expected["fledgling"] = merged_speech(None, "fledgling")
    assert len(set(expected.values())) == 3
    adapters = [f"{name}={folder}" for name, folder in folders.items()]
    with start_server(tmp_path, *adapters, "--streams", "5", "--no-watermark") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

        def speak(model: str, strength: float) -> bytes:
            fields = {"max_seconds": 1.0, "strength": strength}
            return client.audio.speech.create(
                model=model, voice="default", input=TEXT, response_format="pcm", extra_body=fields
            ).content

        asked = [("fledgling", 1.0), ("one", 1.0), ("two", 1.0), ("two", 0.5), ("two", 0.0)]
        with ThreadPoolExecutor(len(asked)) as pool:
            *whole, half, none = pool.map(speak, *zip(*asked, strict=True))
        assert whole == [expected[name] for name, _ in asked[:3]]
        assert none == expected["fledgling"] and half not in expected.values()


def test_a_model_that_answers(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "listener", answers=True)
    soundfile.write(tmp_path / "a.wav", np.sin(np.arange(16_000) / 9) / 3, 16_000)
    with start_server(tmp_path, source=str(model)) as server:
        path = f"{server.url}/v1/audio/assessments"
        files = {"file": ("a.wav", (tmp_path / "a.wav").read_bytes(), "audio/wav")}
        answer = httpx2.post(path, files=files, data={"max_tokens": "5"}, timeout=60)
        assert answer.status_code == 200 and set(answer.json()) == {"text", "finish_reason"}
        assert answer.json() == httpx2.post(path, files=files, data={"max_tokens": "5"}, timeout=60).json()
        for data, sent, words in (
            ({"max_tokens": "many"}, files, "max_tokens"),
            ({}, {"file": ("a.wav", b"nothing", "audio/wav")}, "unreadable"),
            ({"model": "nobody"}, files, "there is no model"),
            ({}, {}, "file: Field required"),
        ):
            refused = httpx2.post(path, files=sent, data=data, timeout=60)
            assert refused.status_code in (400, 404) and words in refused.json()["error"]["message"]
        spoken = httpx2.post(f"{server.url}/v1/audio/speech", json={"input": "Hello."}, timeout=60)
        assert spoken.status_code == 400 and "does not speak" in spoken.json()["error"]["message"]


def test_speech_is_marked_unless_told_otherwise(tmp_path: Path) -> None:
    """The mark of a stream is that of the file, bit for bit."""
    model = save_tiny_model(tmp_path / "tiny")
    with start_server(tmp_path, "--streams", "2", source=str(model)) as server:
        body = {"input": TEXT, "response_format": "pcm", "max_seconds": 1.0}
        response = httpx2.post(f"{server.url}/v1/audio/speech", json=body, timeout=60)
    assert response.headers["x-watermark"] == MARK_NAME and "speech is marked" in server.output
    plain = np.frombuffer(merged_speech(None, model), "<i2")
    engine = load_engine(ModelRef.find_model(str(model)), device="cpu")
    plan = engine.plan(SpeechRequest(TEXT, id=TEXT, max_seconds=1.0, seed=0))
    samples = next(engine.speak_plans([plan]))[1].samples
    assert response.content == pcm16(watermark(samples, engine.codec.sample_rate)) != plain.tobytes()
    row = json.loads((tmp_path / LOG_FILE).read_text().splitlines()[-1])
    assert (row["model"], row["watermark"], row["text"], row["finish_reason"]) == ("tiny", MARK_NAME, TEXT, "stop")
    assert row["audio_sha256"] == hashlib.sha256(response.content).hexdigest()
