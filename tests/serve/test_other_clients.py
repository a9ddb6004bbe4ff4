"""Requests and expectations of clients of other speech servers, taken from their sources."""

from __future__ import annotations

import io
from collections.abc import Iterator

import httpx2
import numpy as np
import pytest
import soundfile

from tests.serve.conftest import RunningServer, start_server
from tests.serve.decoding import decode

pytestmark = pytest.mark.slow
SITE, SPEECH, TEXT = "https://app.example.com", "/v1/audio/speech", "Good morning, how are you?"


@pytest.fixture(scope="module")
def open_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that pages of another site may ask."""
    home = tmp_path_factory.mktemp("open")
    with start_server(home, "--streams", "2", "--no-watermark", "--allow-origin", f"{SITE}/") as one:
        yield one


@pytest.fixture(scope="module")
def web(open_server: RunningServer) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=open_server.url, timeout=60) as client:
        yield client


def test_open_webui_finds_models_and_voices(web: httpx2.Client) -> None:
    """Open WebUI 0.10.2 reads `models` of /audio/models, and `id` and `name` of each of `voices`."""
    assert web.get("/v1/audio/models").json()["models"] == [{"id": "fledgling", "name": "fledgling"}]
    voices = web.get("/v1/audio/voices").json()["voices"]
    assert {voice["id"]: voice["name"] for voice in voices} == {"default": "default"}


def test_pages_of_an_allowed_site_may_ask(web: httpx2.Client) -> None:
    wanted = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    before = web.options(SPEECH, headers={"origin": SITE, **wanted})
    assert before.status_code == 200 and before.headers["access-control-allow-origin"] == SITE
    assert before.headers["access-control-allow-headers"] == "authorization,content-type"
    headers = {"origin": SITE, "sec-fetch-site": "cross-site"}
    spoken = web.post(SPEECH, json={"input": TEXT}, headers=headers)
    assert spoken.status_code == 200 and spoken.headers["access-control-allow-origin"] == SITE
    refused = web.post(SPEECH, json={"input": " "}, headers=headers)
    assert refused.status_code == 400 and refused.headers["access-control-allow-origin"] == SITE, "errors can be read"


def test_pages_of_other_sites_may_not(web: httpx2.Client) -> None:
    for origin in ("https://evil.example.com", f"{SITE}.evil.com", "null"):
        answer = web.post(SPEECH, json={"input": TEXT}, headers={"origin": origin})
        assert answer.status_code == 403 and "--allow-origin" in answer.json()["error"]["message"]
        assert "access-control-allow-origin" not in answer.headers


def test_fields_of_known_peers_are_left_out_with_a_warning(web: httpx2.Client, open_server: RunningServer) -> None:
    plain = web.post(SPEECH, json={"input": TEXT, "response_format": "pcm", "language": "en"})
    kokoro = {"lang_code": "en", "volume_multiplier": 1.0, "normalization_options": {"normalize": True}}
    peers = {**kokoro, "task_type": "Base", "max_new_tokens": 2048, "user": "anna", "backend": "vits"}
    told = web.post(SPEECH, json={"input": TEXT, "response_format": "pcm", **peers})
    assert told.content == plain.content and "x-ignored-fields" not in plain.headers
    assert told.headers["x-ignored-fields"].split(", ") == sorted(peers.keys() - {"lang_code"})
    assert "task_type" in open_server.output


def test_other_unknown_fields_are_refused_with_the_nearest_name(web: httpx2.Client) -> None:
    for name, words in (("temprature", "did you mean temperature?"), ("qqqq", "/docs lists all fields")):
        error = web.post(SPEECH, json={"input": TEXT, name: 1}).json()["error"]
        assert error["param"] == name and words in error["message"]


@pytest.fixture(scope="module")
def speech(web: httpx2.Client) -> np.ndarray:
    return decode(web.post(SPEECH, json={"input": TEXT, "response_format": "pcm"}).content, "pcm")


@pytest.mark.parametrize("format", ["mulaw", "alaw", "g711_ulaw", "ulaw"])
def test_telephony_is_8_khz_and_8_bits(web: httpx2.Client, speech: np.ndarray, format: str) -> None:
    answer = web.post(SPEECH, json={"input": TEXT, "response_format": format})
    assert (answer.headers["x-sample-rate"], answer.headers["x-bit-depth"]) == ("8000", "8")
    samples = decode(answer.content, "alaw" if format == "alaw" else "mulaw")
    assert len(samples) == pytest.approx(len(speech) / 3, abs=2)
    assert np.std(samples) == pytest.approx(np.std(speech), rel=0.2)


@pytest.mark.parametrize("rate", [8000, 16_000, 22_050, 44_100, 48_000])
def test_a_sample_rate_can_be_chosen(web: httpx2.Client, speech: np.ndarray, rate: int) -> None:
    body = {"input": TEXT, "response_format": "wav", "sample_rate": rate}
    answer = web.post(SPEECH, json=body)
    samples, found = soundfile.read(io.BytesIO(answer.content), dtype="float32")
    assert found == rate == int(answer.headers["x-sample-rate"])
    assert len(samples) == pytest.approx(len(speech) * rate / 24_000, abs=2)
    assert np.std(samples) == pytest.approx(np.std(speech), rel=0.1)
    batch = web.post(f"{SPEECH}/batch", json={"items": [{"input": TEXT}], "defaults": body | {"input": ""}}).json()
    assert batch["succeeded"] == 1


@pytest.mark.parametrize("format", ["mp3", "opus", "aac"])
def test_a_bit_rate_can_be_chosen(web: httpx2.Client, format: str) -> None:
    sizes = [
        len(web.post(SPEECH, json={"input": TEXT, "response_format": format, "bit_rate": rate}).content)
        for rate in (16_000, 64_000)
    ]
    assert 1.8 * sizes[0] < sizes[1]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_format": "opus", "sample_rate": 44_100}, "opus has the sample rates"),
        ({"response_format": "wav", "bit_rate": 64_000}, "only mp3, opus and aac"),
        ({"sample_rate": 11_000}, "sample_rate: Input should be 8000"),
        ({"bit_rate": 1}, "bit_rate: Input should be greater"),
    ],
)
def test_rates_that_a_format_lacks_are_refused(web: httpx2.Client, fields: dict[str, object], words: str) -> None:
    answer = web.post(SPEECH, json={"input": TEXT, **fields})
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]
