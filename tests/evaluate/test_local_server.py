"""A page for this machine alone: what it gives, what it takes, and whom it turns away."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator

import pytest

from myna.core.errors import ConfigError, DataError
from myna.evaluate.listening import MAX_POST_BYTES, local_page_server


class House:
    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.running = local_page_server(b"<p>the page</p>", "answers", self.receive, 0)
        self.port = self.running.server_port

    def receive(self, content: bytes) -> None:
        if content == b"bad":
            raise DataError("this is no answer", hint="send another")
        self.received.append(content)

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request(method, path, body, {"Content-Type": "application/json", **named})
        reply = connection.getresponse()
        content = reply.read()
        connection.close()
        return reply.status, content


@pytest.fixture
def house() -> Iterator[House]:
    made = House()
    thread = threading.Thread(target=made.running.serve_forever)
    thread.start()
    yield made
    made.running.shutdown()
    thread.join()
    made.running.server_close()


def test_the_page_is_served_and_answers_are_received(house: House) -> None:
    assert house.ask("GET", "/") == (200, b"<p>the page</p>")
    assert house.ask("GET", "/../secret")[0] == 404
    assert house.ask("POST", "/answers", b'{"a": 1}', Origin=f"http://127.0.0.1:{house.port}") == (200, b"saved")
    assert house.ask("POST", "/answers", b"two", Host=f"localhost:{house.port}")[0] == 200
    assert house.received == [b'{"a": 1}', b"two"]


def test_a_wrong_answer_gets_an_error_message(house: House) -> None:
    status, told = house.ask("POST", "/answers", b"bad")
    assert status == 400 and b"this is no answer" in told and b"send another" in told
    assert house.ask("POST", "/elsewhere", b"x")[0] == 404
    assert house.ask("POST", "/answers", b"x", Content_Type="text/plain")[0] == 415
    assert house.ask("POST", "/answers", b"", Content_Length=str(MAX_POST_BYTES + 1))[0] == 413
    assert house.received == []


def test_requests_of_other_sites_are_refused(house: House) -> None:
    assert house.ask("GET", "/", Host="evil.example")[0] == 403
    assert house.ask("POST", "/answers", b"x", Host=f"evil.example:{house.port}")[0] == 403
    assert house.ask("POST", "/answers", b"x", Origin="http://evil.example")[0] == 403
    assert house.ask("POST", "/answers", b"x", Origin="null")[0] == 403
    assert house.received == []


def test_the_server_is_local_and_a_used_port_is_an_error(house: House) -> None:
    assert house.running.server_address[0] == "127.0.0.1"
    with pytest.raises(ConfigError, match=f"port {house.port} cannot be used") as caught:
        local_page_server(b"", "answers", house.receive, house.port)
    assert "--port" in caught.value.hint
