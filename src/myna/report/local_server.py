"""A page given to browsers on this machine alone, and what they send back."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock

from myna.errors import ConfigError, MynaError

HOST = "127.0.0.1"
LARGEST = 4_000_000
"""Bytes that a page may send at once."""
Receive = Callable[[bytes], None]
"""Takes what a page sent, or raises a `MynaError` that says what is wrong with it."""


def server(page: bytes, sent_to: str, receive: Receive, port: int) -> ThreadingHTTPServer:
    """Gives `page` at / and hands on what is posted to /`sent_to`, one at a time. Port 0 is any that is free."""
    one_at_a_time = Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self._is_ours():
                return
            if self.path != "/":
                self._answer(HTTPStatus.NOT_FOUND, b"there is one page here: /")
                return
            self._answer(HTTPStatus.OK, page, "text/html; charset=utf-8")

        def do_POST(self) -> None:
            if not self._is_ours():
                return
            if self.path != f"/{sent_to}":
                self._answer(HTTPStatus.NOT_FOUND, f"answers go to /{sent_to}".encode())
                return
            # Other sites can make a browser send forms and plain text, but not this without asking first.
            if self.headers.get_content_type() != "application/json":
                self._answer(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, b"answers are sent as application/json")
                return
            length = self.headers.get("Content-Length", "")
            if not length.isdecimal() or int(length) > LARGEST:
                self._answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {LARGEST} bytes are taken".encode())
                return
            content = self.rfile.read(int(length))
            try:
                with one_at_a_time:
                    receive(content)
            except MynaError as error:
                self._answer(HTTPStatus.BAD_REQUEST, str(error).encode())
                return
            self._answer(HTTPStatus.OK, b"saved")

        def _is_ours(self) -> bool:
            """Whether the browser meant this machine. Another site's name that leads here is a trick."""
            if self.headers.get("Host") in self._names():
                origin = self.headers.get("Origin")
                if origin is None or origin.removeprefix("http://") in self._names():
                    return True
            self._answer(HTTPStatus.FORBIDDEN, b"this page is for this machine alone")
            return False

        def _names(self) -> tuple[str, str]:
            bound = made.server_port
            return f"{HOST}:{bound}", f"localhost:{bound}"

        def _answer(self, status: HTTPStatus, content: bytes, kind: str = "text/plain; charset=utf-8") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Nothing: the terminal is for results."""

    try:
        made = ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise ConfigError(f"port {port} cannot be used: {error}", hint="name another one: --port 8766") from error
    made.daemon_threads = True
    return made
