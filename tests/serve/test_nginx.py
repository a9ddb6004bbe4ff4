"""deploy/nginx.conf in a real nginx, in front of two real servers."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import openai
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from websockets.sync.client import connect

from tests.serve.conftest import RunningServer, start_server

pytestmark = pytest.mark.extras
NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
if NGINX is None and os.environ.get("MYNA_EXTRAS") != "required":
    pytest.skip("there is no nginx: apt install nginx", allow_module_level=True)
CONFIG = Path(__file__).parents[2] / "deploy" / "nginx.conf"
LONG = "It was a fine day, and they walked along the river for a long time. " * 20


@dataclass
class Proxy:
    """nginx with two servers behind it, each of which speaks one request at a time and lets none wait."""

    port: int
    tls: ssl.SSLContext
    servers: list[RunningServer]

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}"

    def client(self) -> openai.OpenAI:
        http_client = openai.DefaultHttpxClient(verify=self.tls)
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, http_client=http_client)

    def in_flight(self) -> float:
        return sum(server.metric("myna_requests_in_flight") for server in self.servers)

    def wait_for(self, in_flight: int) -> None:
        deadline = time.monotonic() + 20
        while self.in_flight() != in_flight:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    @contextmanager
    def stream(self, text: str = LONG) -> Iterator[tuple[str, Iterator[bytes]]]:
        """Return the id of the server that speaks a text, and its audio as it comes."""
        with self.client().audio.speech.with_streaming_response.create(
            model="fledgling", voice="default", input=text, response_format="pcm"
        ) as response:
            yield response.headers["x-server-id"], response.iter_bytes(4096)


def write_certificate(folder: Path) -> Path:
    """A certificate of localhost, signed by itself, beside its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    pem = serialization.Encoding.PEM
    (folder / "speech.pem").write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(pem))
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "speech.key").write_bytes(key.private_bytes(pem, *plain))
    return folder / "speech.pem"


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp("nginx")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ("--streams", "1", "--queue", "0", "--no-watermark", "--no-api-key", "--allow-host", f"localhost:{port}")
    with ExitStack() as stack:
        homes = [tmp_path_factory.mktemp("home") for _ in range(2)]
        servers = [stack.enter_context(start_server(home, *options)) for home in homes]
        text = CONFIG.read_text(encoding="utf-8").replace("listen 443", f"listen 127.0.0.1:{port}")
        for written, server in zip(("127.0.0.1:8001", "127.0.0.1:8002"), servers, strict=True):
            text = text.replace(f"server {written}", f"server {server.url.removeprefix('http://')}")
        text = text.replace("/etc/nginx/", f"{folder}/")
        paths = f"pid {folder}/pid; error_log {folder}/error.log;"
        temporary = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy"))
        main = f"{paths} events {{}} http {{ access_log off; {temporary} {text} }}"
        (folder / "nginx.conf").write_text(main, encoding="utf-8")
        certificate = write_certificate(folder)
        command = [str(NGINX), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
        check = subprocess.run([*command, "-t"], capture_output=True, text=True)
        assert check.returncode == 0 and "warn" not in check.stderr, check.stderr
        process = subprocess.Popen([*command, "-g", "daemon off;"])
        stack.callback(process.wait)
        stack.callback(process.terminate)
        tls = ssl.create_default_context(cafile=str(certificate))
        deadline = time.monotonic() + 20
        while not (folder / "pid").exists():
            assert process.poll() is None and time.monotonic() < deadline, (folder / "error.log").read_text()
            time.sleep(0.05)
        yield Proxy(port, tls, servers)


def test_audio_is_passed_on_as_it_is_made(proxy: Proxy) -> None:
    assert [model.id for model in proxy.client().models.list()] == ["fledgling"]
    with proxy.stream() as (_, pieces):
        assert next(pieces)
        assert proxy.in_flight() == 1, "it is still being spoken"
        next(pieces)
    proxy.wait_for(0)  # long before it would have ended by itself


def test_servers_share_requests_and_a_full_one_refuses(proxy: Proxy) -> None:
    with proxy.stream() as (first, one), proxy.stream() as (second, two):
        assert next(one) and next(two) and first != second
        for _ in range(4):  # also when it has been so for a while
            with pytest.raises(openai.RateLimitError) as refused, proxy.stream("Yes."):
                pass
            assert int(refused.value.response.headers["retry-after"]) >= 1
    proxy.wait_for(0)
    with proxy.stream("Yes.") as (_, pieces):
        assert sum(map(len, pieces)) > 4096


def test_a_websocket_is_passed_on(proxy: Proxy) -> None:
    with connect(f"wss://localhost:{proxy.port}/v1/audio/speech/stream", ssl=proxy.tls, open_timeout=30) as socket:
        socket.send(json.dumps({"type": "input.text", "text": "Yes."}))
        socket.send(json.dumps({"type": "input.done"}))
        messages = [socket.recv(timeout=60)]
        while isinstance(messages[-1], bytes) or json.loads(messages[-1])["type"] != "session.done":
            messages.append(socket.recv(timeout=60))
    assert sum(isinstance(message, bytes) for message in messages) > 1


def test_the_page_works_and_figures_are_not_given_out(proxy: Proxy) -> None:
    with httpx2.Client(verify=proxy.tls) as client:
        assert "<script" in client.get(proxy.url).text
        headers = {"origin": proxy.url, "sec-fetch-site": "same-origin"}
        body = {"input": "Yes.", "response_format": "wav"}
        assert client.post(f"{proxy.url}/v1/audio/speech", json=body, headers=headers).status_code == 200
        headers["origin"] = "https://elsewhere.example.com"
        assert client.post(f"{proxy.url}/v1/audio/speech", json=body, headers=headers).status_code == 403
        assert client.get(f"{proxy.url}/metrics").status_code == 403


def test_requests_avoid_a_killed_server(proxy: Proxy) -> None:
    proxy.servers[0].process.kill()
    proxy.servers[0].process.wait()

    for _ in range(4):
        with proxy.stream("Yes.") as (_, pieces):
            assert sum(map(len, pieces)) > 4096
