"""Faults around a server: clients that leave, full queues, signals, and a killed engine."""

from __future__ import annotations

import base64
import io
import json
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import numpy as np
import openai
import psutil  # type: ignore[import-untyped]
import pytest
import soundfile
from filelock import FileLock

from myna.provenance.speech_log import LOG_FILE
from tests.serve.conftest import RunningServer, start_server

pytestmark = pytest.mark.slow
LONG = "It was a fine day, and they walked along the river for a long time. " * 20
BODY = {"model": "fledgling", "input": LONG, "response_format": "pcm"}


def open_stream(server: RunningServer, **fields: object) -> socket.socket:
    """Open a raw connection that has read the first audio of a long speech."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    body = json.dumps(BODY | fields).encode()
    head = f"POST /v1/audio/speech HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    received = b""
    while b"\r\n\r\n" not in received or len(received) < 2000:
        piece = connection.recv(65536)
        assert piece, received
        received += piece
    assert received.startswith(b"HTTP/1.1 200")
    return connection


def test_a_client_that_leaves_frees_its_row(server: RunningServer) -> None:
    """A row is free long before the speech would have ended, and before the log is written, which may take its time.
    The audio that was sent is in the log then."""
    log, text = server.home / LOG_FILE, "Nobody hears this to its end. " + LONG
    connections = [open_stream(server, input=text) for _ in range(3)]
    server.wait_for("myna_streams_speaking", 3)
    began = time.monotonic()
    with FileLock(log.with_name(f".{log.name}.lock")):
        for connection in connections:
            connection.close()
        server.wait_for("myna_streams_speaking", 0, seconds=10)
        server.wait_for("myna_requests_in_flight", 0)
        assert time.monotonic() - began < 5

    def rows() -> list[str]:
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        return [row["finish_reason"] for row in lines if row["text"] == text]

    deadline = time.monotonic() + 20
    while len(rows()) < 3:
        assert time.monotonic() < deadline, rows()
        time.sleep(0.02)
    assert rows() == ["cancelled"] * 3


def test_a_client_that_leaves_the_queue_is_not_spoken(server: RunningServer) -> None:
    streams = [open_stream(server) for _ in range(3)]
    server.wait_for("myna_streams_speaking", 3)
    with pytest.raises(httpx2.TimeoutException):
        httpx2.post(f"{server.url}/v1/audio/speech", json=BODY, timeout=0.5)
    server.wait_for("myna_requests_in_flight", 3)
    for connection in streams:
        connection.close()
    server.wait_for("myna_requests_in_flight", 0)


def test_a_full_queue_refuses_and_recovers(server: RunningServer) -> None:
    """Three rows are spoken and five requests wait: the ninth is refused, and accepted later."""
    streams = [open_stream(server) for _ in range(3)]
    with ThreadPoolExecutor(5) as pool:
        short = BODY | {"input": "Yes."}
        waiting = [pool.submit(httpx2.post, f"{server.url}/v1/audio/speech", json=short, timeout=120) for _ in range(5)]
        server.wait_for("myna_requests_in_flight", 8)
        refused = httpx2.post(f"{server.url}/v1/audio/speech", json=short)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
        with pytest.raises(openai.RateLimitError, match="no more are taken"):
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0).audio.speech.create(
                model="fledgling", voice="default", input="Yes."
            )
        for connection in streams:
            connection.close()
        assert [one.result().status_code for one in waiting] == [200] * 5
    assert httpx2.post(f"{server.url}/v1/audio/speech", json=short, timeout=60).status_code == 200


def test_a_batch_waits_for_its_turns(server: RunningServer) -> None:
    """Send more items than rows and queue hold; one of them is wrong, and fails alone."""
    items = [{"input": "Yes."} for _ in range(9)] + [{"input": "No.", "voice": "nobody"}]
    response = httpx2.post(
        f"{server.url}/v1/audio/speech/batch",
        json={"items": items, "defaults": {"model": "fledgling", "response_format": "wav"}},
        timeout=120,
    )
    content = response.json()
    assert (content.get("succeeded"), content.get("failed")) == (9, 1), content.get("error", content)
    files = {base64.b64decode(item["audio"]) for item in content["results"][:9]}
    spoken = {soundfile.read(io.BytesIO(file), dtype="int16")[0].tobytes() for file in files}
    assert len(spoken) == 1 and len(spoken.pop()) > 1000 and len(files) == 9, "each is signed with its own id"
    assert content["results"][9]["error"]["param"] == "voice"


def test_a_killed_server_leaves_no_process(tmp_path: Path) -> None:
    """Neither its engine nor the process that decodes uploads is left."""
    recording = io.BytesIO()
    samples = np.random.default_rng(0).normal(0, 0.1, 48_000)
    soundfile.write(recording, samples, 24_000, format="WAV")
    reference = {"ref_audio": base64.b64encode(recording.getvalue()).decode(), "ref_text": "what is said"}
    with start_server(tmp_path, "--streams", "1", "--no-watermark") as server:
        body = BODY | reference | {"max_seconds": 0.1, "input": "Yes."}
        httpx2.post(f"{server.url}/v1/audio/speech", json=body, timeout=60)
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert len(children) >= 2
        server.process.kill()
        _, left = psutil.wait_procs(children, timeout=30)
        assert not left


def test_sigterm_finishes_current_speech_and_then_the_server(tmp_path: Path) -> None:
    with start_server(tmp_path, "--streams", "2", "--no-watermark") as server:
        body = BODY | {"input": "It was a fine day, and they walked along the river."}
        alone = httpx2.post(f"{server.url}/v1/audio/speech", json=body, timeout=60).content
        url, received = server.url, list[bytes]()
        is_started = threading.Event()

        def read() -> None:
            with httpx2.stream("POST", f"{url}/v1/audio/speech", json=body, timeout=60) as response:
                for piece in response.iter_raw():
                    received.append(piece)
                    is_started.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert is_started.wait(30)
        children = psutil.Process(server.process.pid).children(recursive=True)
        server.process.send_signal(signal.SIGTERM)
        reader.join(60)
        assert b"".join(received) == alone, "spoken to its end"
        assert server.process.wait(30) == 0, server.output
        psutil.wait_procs(children, timeout=10)
        assert not [child for child in children if child.is_running()]
        assert "Traceback" not in server.output


def test_a_killed_engine_is_replaced(tmp_path: Path) -> None:
    with start_server(tmp_path, "--streams", "2", "--queue", "4", "--no-watermark") as server:
        body = BODY | {"input": "Yes, it was."}
        before = httpx2.post(f"{server.url}/v1/audio/speech", json=body, timeout=60).content
        raw = open_stream(server)
        events, is_started = list[str](), threading.Event()

        def read_events() -> None:
            with httpx2.stream(
                "POST", f"{server.url}/v1/audio/speech", json=BODY | {"stream_format": "sse"}, timeout=60
            ) as response:
                for line in response.iter_lines():
                    events.append(line)
                    is_started.set()

        reader = threading.Thread(target=read_events)
        reader.start()
        assert is_started.wait(30)
        waiting = ThreadPoolExecutor(1).submit(httpx2.post, f"{server.url}/v1/audio/speech", json=BODY, timeout=60)
        server.wait_for("myna_requests_in_flight", 3)
        server.engine().kill()
        rest = b""
        while piece := raw.recv(65536):
            rest += piece
        assert not rest.endswith(b"0\r\n\r\n"), "raw audio is aborted, not ended"
        reader.join(30)
        assert json.loads([line for line in events if line][-1].removeprefix("data: "))["type"] == "speech.audio.error"
        told = waiting.result()
        assert told.status_code == 503 and "started again" in told.json()["error"]["message"]
        # What comes while the model is loaded again waits for it.
        assert httpx2.get(f"{server.url}/ready").status_code == 503
        again = httpx2.post(f"{server.url}/v1/audio/speech", json=body, timeout=120)
        assert again.status_code == 200 and again.content == before
        assert server.metric("myna_engine_restarts") == 1
        assert httpx2.get(f"{server.url}/health").json() == {"status": "ok", "engine_restarts": 1}
        assert httpx2.get(f"{server.url}/ready").status_code == 200


def test_an_engine_whose_server_is_killed_ends(tmp_path: Path) -> None:
    with start_server(tmp_path, "--streams", "1", "--no-watermark") as server:
        engine = server.engine()
        server.process.kill()
        server.process.wait()
        engine.wait(20)


def test_a_model_that_is_not_there_is_an_error_of_the_command(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="nowhere"), start_server(tmp_path, source="./nowhere"):
        pass
