"""Requests that no program should send: each gets a clear error, and the server continues."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import pickle
import socket
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import soundfile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from myna.serve.schemas import SpeechBody
from tests.serve.conftest import RunningServer, start_server

pytestmark = pytest.mark.slow
SPEECH = "/v1/audio/speech"


@pytest.fixture(scope="module")
def web(server: RunningServer) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        yield client
    assert server.process.poll() is None and server.metric("myna_engine_restarts") == 0
    assert server.metric("myna_requests_in_flight") == 0, "nothing is left behind"
    assert "Traceback" not in server.output


def check_error(response: httpx2.Response, status: int, words: str = "") -> dict[str, Any]:
    assert response.status_code == status, response.text[:500]
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert words in error["message"], error["message"]
    assert len(response.content) < 2000, "what was sent is not sent back"
    return error


@pytest.mark.parametrize(
    "body",
    [b"", b"null", b"[]", b"42", b"{", b'{"input": }', b"\xff\xfe\x00", b'{"input": "\\ud800"}', b"[" * 50_000],
)
def test_a_body_that_is_not_a_request(web: httpx2.Client, body: bytes) -> None:
    check_error(web.post(SPEECH, content=body, headers={"content-type": "application/json"}), 400)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = tuple(name for name in SpeechBody.model_fields if name != "input")


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FIELDS), value=json_values)
def test_fields_of_any_type(web: httpx2.Client, name: str, value: Any) -> None:
    """A request without text is never spoken; its answer is one of our errors."""
    body = json.dumps({"input": "", name: value})  # Infinity too, which httpx would refuse to send
    response = web.post(SPEECH, content=body, headers={"content-type": "application/json"})
    assert response.status_code in (400, 404)
    assert check_error(response, response.status_code)["type"] in ("invalid_request_error", "not_found_error")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_values_that_are_not_numbers(web: httpx2.Client, number: str) -> None:
    body = f'{{"input": "Yes.", "temperature": {number}}}'
    check_error(web.post(SPEECH, content=body, headers={"content-type": "application/json"}), 400)


def test_ten_megabytes_of_text(web: httpx2.Client) -> None:
    check_error(web.post(SPEECH, json={"input": "a" * 10_000_000}), 400, "at most 4096 characters")


def test_a_body_without_end(web: httpx2.Client) -> None:
    def endless() -> Iterator[bytes]:
        yield b'{"input": "'
        while True:
            yield b"a" * 2**20

    try:
        response = web.post(SPEECH, content=endless(), headers={"content-type": "application/json"})
    except httpx2.TransportError:
        return  # it is closed while we still write
    check_error(response, 413, "at most 32 MiB")


@pytest.mark.parametrize("length", [str(2**40), "-1", "1_0", "x"])
def test_a_body_that_promises_too_much(server: RunningServer, length: str) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST {SPEECH} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {length}\r\n\r\n"
        connection.sendall(head.encode())
        connection.settimeout(15)
        assert connection.recv(1000).split()[1] in (b"413", b"400")


@pytest.mark.parametrize("text", ["<|begin_of_text|>hi", "hi <|AUDIO|>", "<|audio_eos|>"])
def test_control_tokens(web: httpx2.Client, text: str) -> None:
    check_error(web.post(SPEECH, json={"input": text}), 400, "control token")


@pytest.mark.parametrize("text", ["\0", "\x1b[2J", "\u202e\u200f", "😀😀", "...", "[SPEAKER1] hi", "a" * 4096])
def test_odd_texts_are_spoken_or_refused(web: httpx2.Client, text: str) -> None:
    response = web.post(SPEECH, json={"input": text, "max_seconds": 0.5, "response_format": "pcm"})
    if response.status_code != 200:
        assert response.status_code in (400, 500)
        check_error(response, response.status_code)


@pytest.mark.parametrize(
    "voice", ["../../etc/passwd", "/etc/passwd", "..", "voices/../x", "a\0b", "x" * 300, {"id": "../../x"}]
)
def test_paths_as_voices(web: httpx2.Client, voice: Any) -> None:
    check_error(web.post(SPEECH, json={"input": "Yes.", "voice": voice}), 400)


@pytest.mark.parametrize("path", ["..%2f..%2fetc%2fpasswd", "%2e%2e", "%00", "voice_..%5c"])
def test_paths_of_voices(web: httpx2.Client, path: str) -> None:
    assert web.get(f"/v1/audio/voices/{path}").status_code in (400, 404)
    assert web.delete(f"/v1/audio/voices/{path}").status_code in (400, 404, 405)
    assert web.get(f"/page/{path}").status_code == 404


@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1:1/x.wav",
        "https://example.com/a.wav",
        "file:///etc/passwd",
        "/etc/passwd",
        "../x.wav",
        "~/x.wav",
    ],
)
def test_addresses_are_never_opened(web: httpx2.Client, address: str) -> None:
    body = {"input": "Yes.", "ref_audio": address, "ref_text": "yes"}
    error = check_error(web.post(SPEECH, json=body), 400, "not opened")
    assert error["code"] == "url_not_allowed"


def speak_with(web: httpx2.Client, recording: bytes) -> httpx2.Response:
    encoded = base64.b64encode(recording).decode()
    return web.post(SPEECH, json={"input": "Yes.", "ref_audio": encoded, "ref_text": "yes", "max_seconds": 0.5})


UNPICKLED = Path(tempfile.gettempdir()) / "myna-was-unpickled"


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(UNPICKLED), "w"))


def recordings() -> dict[str, bytes]:
    """Files that are not recordings, or must not be read whole."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a.wav", bytes(50_000_000))
    hour = io.BytesIO()
    soundfile.write(hour, np.zeros(3600 * 8000, np.int16), 8000, format="FLAC")
    silence = io.BytesIO()
    soundfile.write(silence, np.zeros(48_000, np.int16), 24_000, format="WAV")
    lying = bytearray(silence.getvalue())
    lying[40:44] = (2**31 - 2).to_bytes(4, "little")
    return {
        "pickle": pickle.dumps(Bomb()),
        "zip": archive.getvalue(),
        "hour": hour.getvalue(),
        "silence": silence.getvalue(),
        "lying header": bytes(lying),
        "noise": np.random.default_rng(0).bytes(100_000),
        "playlist": b"#EXTM3U\nfile:///etc/passwd\n",
        "concat": b"ffconcat version 1.0\nfile /etc/passwd\n",
        "truncated": hour.getvalue()[:1000],
        "empty": b"",
    }


@pytest.mark.parametrize("name", recordings())
def test_files_that_are_not_recordings(web: httpx2.Client, name: str) -> None:
    error = check_error(speak_with(web, recordings()[name]), 400)
    assert error["param"] == "ref_audio" and "/tmp" not in error["message"]
    assert not UNPICKLED.exists()


def test_a_recording_that_is_too_large(web: httpx2.Client) -> None:
    check_error(speak_with(web, bytes(10 * 2**20 + 1)), 413)


def test_no_voice_without_a_consent_check(web: httpx2.Client) -> None:
    for path, field in (("/v1/audio/voices", "audio_sample"), ("/v1/audio/voice_consents", "recording")):
        data = {"name": "Marta", "consent": "cons_1", "language": "en"}
        response = web.post(path, data=data, files={field: ("a.wav", b"RIFF", "audio/wav")})
        assert check_error(response, 403, "no recogniser")["code"] == "consent_checks_unavailable"
    assert web.get("/v1/audio/voices").json()["voices"] == [{"id": "default", "name": "default"}]


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
def test_adapters_are_not_loaded_unless_allowed(web: httpx2.Client, path: str) -> None:
    body = {"lora_name": "x"} | ({"lora_path": "/etc"} if "unload" not in path else {})
    check_error(web.post(path, json=body), 403, "--allow-adapter-loading")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("GET", SPEECH, 405), ("PUT", "/v1/models", 405), ("GET", "/v1/models/none", 404)],
)
def test_routes_that_are_not_there(web: httpx2.Client, method: str, path: str, status: int) -> None:
    check_error(web.request(method, path), status)


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.test"},
        {"host": "evil.test:80"},
        {"origin": "https://evil.test"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_pages_of_other_sites(web: httpx2.Client, headers: dict[str, str]) -> None:
    response = web.post(SPEECH, json={"input": "Yes."}, headers=headers)
    check_error(response, 403)
    assert not [name for name in response.headers if name.startswith("access-control")]
    if "host" in headers:
        assert web.get("/", headers=headers).status_code == 403, "nor the page"


def test_a_form_of_another_page_is_no_request(web: httpx2.Client) -> None:
    response = web.post(SPEECH, content=b'{"input": "Yes."}', headers={"content-type": "text/plain"})
    check_error(response, 400)


def test_slow_headers_are_dropped(server: RunningServer) -> None:
    """Many connections never complete their headers: others are served meanwhile, and they are closed. Slow bodies
    are in test_server.py."""
    host, port = server.url.removeprefix("http://").split(":")
    connections = [socket.create_connection((host, int(port))) for _ in range(50)]
    for connection in connections:
        connection.sendall(b"POST /v1/audio/speech HTTP/1.1\r\nHost: ")
    assert httpx2.get(f"{server.url}/health").status_code == 200
    began = time.monotonic()
    for connection in connections:
        connection.settimeout(15)
        assert connection.recv(100) == b"", "closed"
    assert time.monotonic() - began < 14


def test_random_bytes_do_not_stop_the_server(server: RunningServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    for garbage in (b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n", b"\0" * 1000, b"A" * 100_000 + b"\r\n\r\n"):
        with socket.create_connection((host, int(port))) as connection:
            connection.settimeout(15)
            with contextlib.suppress(OSError):  # the server may have closed the connection by now
                connection.sendall(garbage)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1000)
    assert httpx2.get(f"{server.url}/health").status_code == 200


def test_a_key_is_asked_for(tmp_path: Path) -> None:
    with start_server(
        tmp_path, "--streams", "1", "--no-watermark", environment={"MYNA_API_KEY": "a secret ключ"}
    ) as server:
        url = f"{server.url}{SPEECH}"
        for value in (None, "", "Bearer", "Bearer wrong", "Basic a secret ключ", "Bearer a secret", "Bearer é"):
            headers = {"authorization": value.encode()} if value is not None else {}
            response = httpx2.post(url, json={"input": "Yes."}, headers=headers)  # type: ignore[arg-type]
            assert check_error(response, 401, "API key")["code"] == "invalid_api_key"
        assert httpx2.get(f"{server.url}/v1/models").status_code == 401
        assert httpx2.get(f"{server.url}/health").status_code == 200, "for those that watch over it"
        assert httpx2.get(f"{server.url}/").status_code == 200, "the page asks for the key"
        right = {"authorization": "Bearer a secret ключ".encode()}
        assert httpx2.post(url, json={"input": "Yes."}, headers=right, timeout=60).status_code == 200  # type: ignore[arg-type]
        assert "secret" not in server.output


def test_the_pages_load_nothing_from_elsewhere(web: httpx2.Client) -> None:
    for path in ("/", "/docs", "/page/page.js", "/page/page.css"):
        response = web.get(path)
        assert response.status_code == 200 and "default-src 'none'" in response.headers["content-security-policy"]
        assert "http://" not in response.text and "https://" not in response.text and "//cdn" not in response.text
    assert "/v1/audio/speech" in json.dumps(web.get("/openapi.json").json()["paths"])
    assert "temperature" in web.get("/docs").text
