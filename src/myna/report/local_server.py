"""HTTP server of one page for browsers on this machine, and of what they post back."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock

from myna.core.errors import ConfigError, MynaError

HOST = "127.0.0.1"
MAX_POST_BYTES = 4_000_000
PostHandler = Callable[[bytes], None]
"""Takes the body of a POST, or raises a `MynaError` that says what is wrong with it."""


def local_page_server(page: bytes, post_path: str, on_post: PostHandler, port: int) -> ThreadingHTTPServer:
    """Serve `page` at / and pass what is posted to /`post_path` to `on_post`, one at a time. Port 0 is any free one."""
    lock = Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self._is_local():
                return
            if self.path != "/":
                self._respond(HTTPStatus.NOT_FOUND, b"there is one page here: /")
                return
            self._respond(HTTPStatus.OK, page, "text/html; charset=utf-8")

        def do_POST(self) -> None:
            if not self._is_local():
                return
            if self.path != f"/{post_path}":
                self._respond(HTTPStatus.NOT_FOUND, f"answers go to /{post_path}".encode())
                return
            # Other sites can make a browser send forms and plain text, but not JSON without a CORS preflight.
            if self.headers.get_content_type() != "application/json":
                self._respond(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, b"answers are sent as application/json")
                return
            length = self.headers.get("Content-Length", "")
            if not length.isdecimal() or int(length) > MAX_POST_BYTES:
                self._respond(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {MAX_POST_BYTES} bytes are taken".encode())
                return
            content = self.rfile.read(int(length))
            try:
                with lock:
                    on_post(content)
            except MynaError as error:
                self._respond(HTTPStatus.BAD_REQUEST, str(error).encode())
                return
            self._respond(HTTPStatus.OK, b"saved")

        def _is_local(self) -> bool:
            """Whether host and origin are this machine: another site's name that resolves here is DNS rebinding."""
            if self.headers.get("Host") in self._hosts():
                origin = self.headers.get("Origin")
                if origin is None or origin.removeprefix("http://") in self._hosts():
                    return True
            self._respond(HTTPStatus.FORBIDDEN, b"this page is for this machine alone")
            return False

        def _hosts(self) -> tuple[str, str]:
            port = server.server_port
            return f"{HOST}:{port}", f"localhost:{port}"

        def _respond(self, status: HTTPStatus, content: bytes, content_type: str = "text/plain; charset=utf-8") -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Log nothing: the terminal is for results."""

    try:
        server = ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise ConfigError(f"port {port} cannot be used: {error}", hint="name another one: --port 8766") from error
    server.daemon_threads = True
    return server
