"""The client of OpenAI against a running server."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from myna.audio.files import pcm16, read_audio
from myna.models.ref import ModelRef
from myna.serve.schemas import TELEPHONY_RATES
from myna.serve.transcoding import MEDIA_TYPES
from myna.speak.loading import load_engine
from myna.speak.request import SpeechRequest
from tests.serve.conftest import RunningServer
from tests.serve.decoding import decode

pytestmark = pytest.mark.slow
TEXT = "Good morning, how are you?"
LONG = "It was a fine day, and they walked along the river for a long time. " * 4


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as one:
        yield one


@pytest.fixture(scope="module")
def expected() -> bytes:
    """Return the speech of the engine without a server."""
    engine = load_engine(ModelRef.find_model("fledgling"), device="cpu")
    plan = engine.plan(SpeechRequest(TEXT, id=TEXT, max_seconds=60.0, seed=0))
    return pcm16(next(engine.speak_plans([plan]))[1].samples)


def create(client: openai.OpenAI, **fields: Any) -> bytes:
    options: dict[str, Any] = {
        "model": "fledgling",
        "voice": "default",
        "input": TEXT,
        "response_format": "pcm",
    } | fields
    return client.audio.speech.create(**options).content


def test_speech_is_what_the_engine_says(client: openai.OpenAI, expected: bytes) -> None:
    assert create(client) == expected
    assert create(client, extra_body={"seed": 1}) != expected


def test_a_temperature_of_zero_needs_no_seed(client: openai.OpenAI, expected: bytes) -> None:
    first, second = (create(client, extra_body={"temperature": 0, "max_seconds": 1, "seed": n}) for n in range(2))
    assert first == second and first != expected[: len(first)]


def test_the_client_by_default_gets_mp3(client: openai.OpenAI, expected: bytes, tmp_path: Path) -> None:
    response = client.audio.speech.create(model="tts-1", voice="alloy", input=TEXT)
    assert response.response.headers["content-type"] == "audio/mpeg"
    response.write_to_file(tmp_path / "speech.mp3")
    assert len(read_audio(tmp_path / "speech.mp3")) == pytest.approx(len(expected) // 2, abs=3000)


@pytest.mark.parametrize("format", [format for format in MEDIA_TYPES if format not in TELEPHONY_RATES])
def test_every_format_decodes_to_the_speech(client: openai.OpenAI, expected: bytes, format: Any) -> None:
    response = client.audio.speech.create(model="fledgling", voice="default", input=TEXT, response_format=format)
    assert response.response.headers["content-type"] == MEDIA_TYPES[format]
    samples, original = decode(response.content, format), decode(expected, "pcm")
    assert len(samples) == pytest.approx(len(original), abs=3000)
    if format in ("wav", "flac", "pcm"):
        assert np.abs(samples - original).max() < 1e-4
    assert np.std(samples) == pytest.approx(np.std(original), rel=0.15)


def test_audio_comes_before_the_end(client: openai.OpenAI) -> None:
    """Audio comes in pieces, the first long before the last."""
    times, size = [], 0
    options: Any = {"model": "fledgling", "voice": "default", "input": LONG, "response_format": "pcm"}
    with client.audio.speech.with_streaming_response.create(**options) as response:
        for piece in response.iter_bytes():
            times.append(time.monotonic())
            size += len(piece)
    assert size > 5 * 48_000 and len(times) > 5
    assert times[-1] - times[0] > 0.3


def test_an_asynchronous_client_streams(server: RunningServer, expected: bytes) -> None:
    """Stream raw audio and events at the same time."""

    async def read(client: openai.AsyncOpenAI, stream_format: Any) -> list[bytes]:
        async with client.audio.speech.with_streaming_response.create(
            model="fledgling", voice="default", input=TEXT, response_format="pcm", stream_format=stream_format
        ) as response:
            if stream_format == "audio":
                return [piece async for piece in response.iter_bytes()]
            events = [json.loads(line.removeprefix("data: ")) async for line in response.iter_lines() if line]
            return [base64.b64decode(event["audio"]) for event in events if event["type"] == "speech.audio.delta"]

    async def read_both() -> list[list[bytes]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return list(await asyncio.gather(read(client, "audio"), read(client, "sse")))

    for pieces in asyncio.run(read_both()):
        assert len(pieces) > 1 and b"".join(pieces) == expected


def test_events(client: openai.OpenAI, expected: bytes) -> None:
    options: Any = {"model": "fledgling", "voice": "default", "input": TEXT, "response_format": "pcm"}
    with client.audio.speech.with_streaming_response.create(**options, stream_format="sse") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line]
    *deltas, done = events
    assert {event["type"] for event in deltas} == {"speech.audio.delta"} and len(deltas) > 1
    assert b"".join(base64.b64decode(event["audio"]) for event in deltas) == expected
    assert done["type"] == "speech.audio.done" and done["finish_reason"] == "stop"
    usage = done["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["output_tokens"] * 1920 == len(expected), "a frame is 960 samples"


def test_concurrent_requests_are_each_as_alone(server: RunningServer, expected: bytes) -> None:
    async def speak_all() -> list[bytes]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def speak(text: str) -> bytes:
                response = await client.audio.speech.create(
                    model="fledgling", voice="default", input=text, response_format="pcm"
                )
                return response.content

            return list(await asyncio.gather(*(speak(text) for text in [TEXT, LONG, "Yes.", TEXT, "No, thank you."])))

    spoken = asyncio.run(speak_all())
    assert spoken[0] == spoken[3] == expected and len({len(audio) for audio in spoken}) > 2


def test_figures_are_those_of_the_speech(server: RunningServer, client: openai.OpenAI) -> None:
    names = {
        "audio": "myna_audio_seconds_total",
        "first": "myna_first_audio_seconds_count",
        "whole": "myna_speech_request_seconds_count",
        "ends": "myna_requests_finished_total",
    }
    server.wait_for("myna_requests_in_flight", 0)
    before = {key: server.metric(name) for key, name in names.items()}
    seconds = len(create(client)) / 48_000
    grown = {key: server.metric(name) - before[key] for key, name in names.items()}
    assert grown == {"audio": pytest.approx(seconds, abs=1e-6), "first": 1, "whole": 1, "ends": 1}
    assert (server.metric("myna_rows"), server.metric("myna_requests_in_flight")) == (3, 0)


def test_takes_are_seeds(client: openai.OpenAI, expected: bytes) -> None:
    response = json.loads(create(client, extra_body={"takes": 2}))
    first, second = (base64.b64decode(item["audio"]) for item in response["results"])
    assert first == expected and second == create(client, extra_body={"seed": 1})
    assert [item["seed"] for item in response["results"]] == [0, 1]


def test_speed_changes_the_length(client: openai.OpenAI, expected: bytes) -> None:
    fast = create(client, speed=2.0)
    assert len(fast) == pytest.approx(len(expected) / 2, rel=0.1)


def test_max_seconds_is_reported_as_length(client: openai.OpenAI) -> None:
    options: Any = {"model": "fledgling", "voice": "default", "input": LONG, "response_format": "pcm"}
    with client.audio.speech.with_streaming_response.create(
        **options,
        stream_format="sse",
        extra_body={"max_seconds": 0.4},
    ) as response:
        done = [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line][-1]
    assert done["finish_reason"] == "length" and "cut after 0.4 s" in done["warnings"][0]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fledgling"]
    assert client.models.retrieve("fledgling").owned_by == "myna"
    with pytest.raises(openai.NotFoundError, match="there is no model 'nobody'"):
        client.models.retrieve("nobody")


@pytest.mark.parametrize(
    ("fields", "error", "words", "param"),
    [
        ({"model": "nobody"}, openai.NotFoundError, "there is no model", "model"),
        ({"voice": "nobody"}, openai.BadRequestError, "there is no voice 'nobody'; there are: default", "voice"),
        ({"input": " \n"}, openai.BadRequestError, "there is no text", "input"),
        ({"input": "hello <|eot_id|>"}, openai.BadRequestError, "control token", None),
        ({"response_format": "midi"}, openai.BadRequestError, "response_format: Input should be", "response_format"),
        ({"speed": 9}, openai.BadRequestError, "speed: Input should be less than or equal to 4", "speed"),
        ({"extra_body": {"sead": 1}}, openai.BadRequestError, "sead: there is no such field", "sead"),
        ({"extra_body": {"seed": "one"}}, openai.BadRequestError, "seed: Input should be a valid integer", "seed"),
        ({"extra_body": {"ref_text": "hi"}}, openai.BadRequestError, "ref_audio, which is missing", "ref_audio"),
    ],
)
def test_errors_have_the_shape_the_client_knows(
    client: openai.OpenAI, fields: dict[str, Any], error: type[openai.APIStatusError], words: str, param: str | None
) -> None:
    with pytest.raises(error) as caught:
        create(client, **fields)
    assert words in caught.value.message and caught.value.param == param
    assert caught.value.type in ("invalid_request_error", "not_found_error")


def test_a_reference_sets_the_voice(client: openai.OpenAI, expected: bytes) -> None:
    recording = next((Path(__file__).parents[2] / "src/myna/demo/recordings").glob("*.opus"))
    audio = base64.b64encode(recording.read_bytes()).decode()
    fields = {"ref_audio": f"data:audio/ogg;base64,{audio}", "ref_text": "what is said in the recording"}
    spoken = create(client, extra_body=fields)
    assert spoken != expected and spoken == create(client, extra_body=fields)
    assert spoken == create(client, extra_body={"reference": {"audio": audio, "text": fields["ref_text"]}})
