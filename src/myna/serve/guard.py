"""What is refused before a request reaches its route: wrong hosts, origins and keys, bodies too large or too slow."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from myna.serve.api_errors import ApiError

MAX_BODY_BYTES = 32 * 2**20
"""Of a body: a batch of texts, or a recording in base64 with its transcript."""
HEADER_SECONDS = 10.0
"""That a client may take to send the headers of a request."""
BODY_SECONDS = 60.0
"""The same for its body."""
SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")

RequestObserver = Callable[[Scope, int, float], None]
"""Called at the end of a request with its status and seconds."""


class RequestGuard:
    """ASGI middleware.

    - The Host must be one of `hosts`, where any are given: a name of another site that resolves to this machine is DNS
      rebinding.
    - An Origin, which browsers send, must be the Host: other sites get no answer, and there are no CORS headers.
    - Under /v1 the key must be given, where there is one.
    - Bodies have limits of size and time.
    """

    def __init__(self, app: ASGIApp, *, hosts: frozenset[str], api_key: str | None, observe: RequestObserver) -> None:
        self._app, self._hosts, self._observe = app, hosts, observe
        self._key = api_key.encode() if api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 0

        async def send_checked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], *SECURITY_HEADERS]}
            await send(message)

        try:
            self._check(scope)
            guarded = _LimitedBody(receive, scope) if scope["type"] == "http" else receive
            await self._app(scope, guarded, send_checked)
        except ApiError as error:
            await _refuse(error, scope, receive, send_checked)
        finally:
            if scope["type"] == "http":
                self._observe(scope, status, time.monotonic() - began)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self._hosts and host.lower() not in self._hosts:
            raise ApiError(403, f"this server is not {host[:80]}: it is for this machine alone (--allow-host, --host)")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            raise ApiError(403, "requests of pages of other sites are refused", code="origin_not_allowed")
        is_unsafe = scope["type"] == "websocket" or scope["method"] not in SAFE_METHODS
        if is_unsafe and headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise ApiError(403, "requests of pages of other sites are refused", code="origin_not_allowed")
        if self._key is not None and scope["path"].startswith("/v1"):
            kind, _, key = headers.get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(key.encode("latin-1"), self._key):
                message = "the API key is missing or wrong; send it as: Authorization: Bearer KEY"
                raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            raise _too_large()


def _too_large() -> ApiError:
    """What is left of the body is not read: the connection is of no use then."""
    message = f"a request has at most {MAX_BODY_BYTES // 2**20} MiB"
    return ApiError(413, message, code="body_too_large", headers={"connection": "close"})


class _LimitedBody:
    """`receive` of a request whose body may have so many bytes, and take so long."""

    def __init__(self, receive: Receive, scope: Scope) -> None:
        self._receive, self._scope = receive, scope
        self._bytes, self._complete = 0, False
        self._deadline = time.monotonic() + BODY_SECONDS

    async def __call__(self) -> Message:
        if self._complete:
            return await self._receive()
        try:
            async with asyncio.timeout(max(0.0, self._deadline - time.monotonic())):
                message = await self._receive()
        except TimeoutError:
            problem = f"the body did not come within {BODY_SECONDS:g} s"
            raise ApiError(408, problem, code="timeout", headers={"connection": "close"}) from None
        self._bytes += len(message.get("body", b""))
        self._complete = not message.get("more_body", False)
        if self._bytes > MAX_BODY_BYTES:
            raise _too_large()
        return message


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        if "websocket.http.response" in scope.get("extensions", {}):
            response = error.response()
            headers = [*response.raw_headers, *SECURITY_HEADERS]
            await send({"type": "websocket.http.response.start", "status": error.status, "headers": headers})
            await send({"type": "websocket.http.response.body", "body": response.body})
        else:
            await send({"type": "websocket.close", "code": 1008})
        return
    error.headers.setdefault("connection", "close")  # what is left of the body is not read
    await error.response()(scope, receive, send)


def local_hosts(host: str, port: int, allowed: Sequence[str] = ()) -> frozenset[str]:
    """The values of Host for a server on an address of this machine alone, with those that are `allowed` beside them;
    none, for all, on any other address: it has names that we do not know."""
    try:
        is_local = ip_address(host).is_loopback
    except ValueError:
        is_local = host == "localhost"
    names = {f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")} if is_local else set()
    return frozenset(names | {name.lower() for name in allowed})


class TimedHttpProtocol(HttpToolsProtocol):
    """HTTP connections that are closed where the headers of a request do not come in time."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._restart_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._restart_timer()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        super().on_headers_complete()

    def _restart_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(HEADER_SECONDS, self._drop)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _drop(self) -> None:
        self.transport.close()
