"""Server: checks of all requests, the application with its routes, and uvicorn that runs it."""

import asyncio
import gc
import hmac
import json
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from importlib.resources import files
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from myna import __version__
from myna.core.errors import ConfigError, SpeakError
from myna.serve import catalog_routes, speech_routes
from myna.serve.context import Context, ServerContext, ServerSettings, is_loopback
from myna.serve.messages import EngineInfo
from myna.serve.schemas import ApiError

MAX_BODY_BYTES = 32 * 2**20
"""Largest body in bytes: a batch of texts, or a recording in base64 with its transcript."""
HEADER_SECONDS = 10.0
"""Seconds a client may take to send the headers of a request."""
BODY_SECONDS = 60.0
"""Seconds a client may take to send the body of a request."""
SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
PAGE_FILES = {"page.js": "text/javascript", "page.css": "text/css"}
OPEN_PATHS = {"/", "/docs", "/openapi.json", "/health", "/ready", "/metrics", *(f"/page/{name}" for name in PAGE_FILES)}
"""Routes without a key: pages, which ask for it, and what monitoring reads."""

RequestObserver = Callable[[Scope, int, float], None]
"""Function that is called at the end of a request with its status and seconds."""


class RequestGuard:
    """ASGI middleware that refuses requests before they reach a route.

    - The Host must be one of `hosts`, if any are given: another name that resolves to this machine is DNS rebinding.
    - An Origin, which browsers send, must be the Host or one of `origins`: other sites get no answer.
    - The key must be given, if there is one, except for `OPEN_PATHS`. A new route is never open by mistake.
    - Bodies have limits of size and time.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: frozenset[str],
        api_key: str | None,
        observe: RequestObserver,
        origins: Sequence[str] = (),
    ) -> None:
        self._app, self._hosts, self._observe, self._origins = app, hosts, observe, origins
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
        is_own = origin is None or origin.partition("://")[2].lower() == host.lower()
        is_unsafe = scope["type"] == "websocket" or scope["method"] not in SAFE_METHODS
        is_foreign = is_unsafe and headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none")
        if (not is_own or is_foreign) and not {origin, "*"} & set(self._origins):
            problem = "requests of pages of other sites are refused (--allow-origin names sites that may ask)"
            raise ApiError(403, problem, code="origin_not_allowed")
        # The path as the router sees it, below the prefix of a proxy such as Ray's.
        path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
        if self._key is not None and path not in OPEN_PATHS:
            kind, _, key = headers.get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(key.encode("latin-1"), self._key):
                message = "the API key is missing or wrong; send it as: Authorization: Bearer KEY"
                raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            raise _too_large()


def _too_large() -> ApiError:
    """Make an error for large bodies. The rest of the body is not read, so the connection is closed."""
    message = f"a request has at most {MAX_BODY_BYTES // 2**20} MiB"
    return ApiError(413, message, code="body_too_large", headers={"connection": "close"})


class _LimitedBody:
    """Callable `receive` of a request whose body is limited in bytes and seconds."""

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
    """Return the accepted values of Host for a server that is bound to this machine. On any other address all are
    accepted, since its names are not known."""
    names = {"127.0.0.1", "localhost", "[::1]", f"[{host}]" if ":" in host else host} if is_loopback(host) else set()
    own = {f"{name}:{port}" for name in names} | (names if port == 80 else set())  # which clients leave out
    return frozenset(own | {name.lower() for name in allowed})


class TimedHttpProtocol(HttpToolsProtocol):
    """HTTP protocol that closes connections whose headers do not come in time."""

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
        self._timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src 'self' blob:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = {"content-security-policy": PAGE_POLICY, "cache-control": "no-store"}


def create_app(context: ServerContext) -> FastAPI:
    """Make the application of a server. The engine starts with it, and ends after the last request."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await context.start()
        gc.collect()
        gc.freeze()  # a full collection would stop all streams for as long as it takes to visit every imported object
        try:
            yield
        finally:
            await context.close()

    app = FastAPI(
        title="Myna speech server",
        version=__version__,
        description="Speech in the contract of OpenAI's API.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
    )
    app.state.context = context
    for routes in (speech_routes.router, catalog_routes.voice_router, catalog_routes.model_router, router):
        app.include_router(routes)
    for error in (ApiError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(error, refuse)
    settings = context.settings
    app.add_middleware(
        RequestGuard,
        hosts=local_hosts(settings.host, settings.port, settings.allowed_hosts),
        api_key=settings.api_key,
        observe=context.metrics.observe_request,
        origins=settings.allowed_origins,
    )
    if settings.allowed_origins:
        everything = ("*",)
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=everything,
            allow_headers=everything,
            expose_headers=everything,
            allow_private_network=True,
        )
    return app


router = APIRouter()


@router.get("/health", tags=["status"])
async def health(context: Context) -> Response:
    """Return whether the server and its engine work."""
    client = context.client
    state = {"status": "ok" if client.healthy else "failed", "engine_restarts": client.restarts}
    return JSONResponse(state, 200 if client.healthy else 503)


@router.get("/ready", tags=["status"])
async def ready(context: Context) -> Response:
    """Return whether the model is loaded and warm."""
    is_ready = context.client.ready
    return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)


@router.get("/metrics", tags=["status"], response_class=PlainTextResponse)
async def metrics(context: Context) -> Response:
    """Return figures for Prometheus."""
    return Response(await context.render_metrics(), media_type="text/plain; version=0.0.4")


@router.get("/", include_in_schema=False)
async def page() -> Response:
    return HTMLResponse(_page_file("page.html"), headers=PAGE_HEADERS)


@router.get("/page/{name}", include_in_schema=False)
async def page_file(name: str) -> Response:
    if name not in PAGE_FILES:
        raise ApiError(404, "there is no such file")
    return Response(_page_file(name), media_type=PAGE_FILES[name], headers=PAGE_HEADERS)


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> Response:
    """Return the interface as a page. FastAPI's own page loads scripts from elsewhere."""
    from jinja2 import Environment, Undefined

    environment, schema = Environment(autoescape=True), request.app.openapi()
    environment.filters["json"] = lambda default: "null" if isinstance(default, Undefined) else json.dumps(default)
    template = environment.from_string(_page_file("docs.html").decode())
    shown = template.render(paths=schema["paths"], schemas=schema["components"]["schemas"], version=__version__)
    return HTMLResponse(shown, headers=PAGE_HEADERS)


@cache
def _page_file(name: str) -> bytes:
    return files("myna.serve").joinpath(name).read_bytes()


async def refuse(request: Request, error: Exception) -> Response:
    """Answer an error of a route in the shape of OpenAI's API."""
    match error:
        case ApiError():
            return error.response()
        case RequestValidationError():
            return ApiError.of_body(error.errors()).response()
        case HTTPException(__cause__=ApiError() as cause):  # FastAPI's own words for anything that happens to a body
            return cause.response()
        case HTTPException():
            texts = {404: f"there is no {request.url.path[:200]}", 405: f"{request.method} is not for this path"}
            message = texts.get(error.status_code, str(error.detail))
            return ApiError(error.status_code, message, headers=error.headers).response()
    return ApiError.of_bug().response()


MAX_CONNECTIONS_PER_REQUEST = 4
"""Maximum number of connections for each request that is taken: keep-alives, pages and health checks."""
MIN_CONNECTIONS = 512
MAX_MESSAGE_BYTES = 16 * 2**20
"""Largest WebSocket message in bytes: the configuration of a session may carry a recording."""


def run_server(settings: ServerSettings, listener: socket.socket, on_ready: Callable[[EngineInfo], None]) -> None:
    """Serve on a socket of `bind` until SIGTERM or SIGINT, and then finish current speech within `drain_seconds`.
    `on_ready` is called when the model is loaded and warm. A model that cannot be loaded at the start is an error."""
    context = ServerContext(settings)
    config = uvicorn.Config(
        create_app(context),
        http=TimedHttpProtocol,
        ws="websockets-sansio",
        ws_max_size=MAX_MESSAGE_BYTES,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=round(settings.drain_seconds),
        limit_concurrency=max(MIN_CONNECTIONS, MAX_CONNECTIONS_PER_REQUEST * context.client.capacity),
        backlog=2048,
    )
    server = uvicorn.Server(config)

    async def announce() -> None:
        await context.client.wait_until_loaded()
        assert context.client.info is not None
        on_ready(context.client.info)

    async def serve() -> None:
        running = asyncio.ensure_future(server.serve(sockets=[listener]))
        loading = asyncio.ensure_future(announce())
        await asyncio.wait({running, loading}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done() and loading.exception() is not None:
            server.should_exit = True
        await running
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)

    with _quiet_signals(), asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(serve())
    failure = context.client.load_failure
    if failure is not None and context.client.known is None:
        raise SpeakError(failure.message, hint=failure.hint)


@contextmanager
def _quiet_signals() -> Iterator[None]:
    """Ignore signals: uvicorn raises the signal that ended it again after its shutdown."""
    handlers = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def bind(host: str, port: int) -> socket.socket:
    """Open a listening socket, before anything heavy is loaded."""
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(info[0], socket.SOCK_STREAM)
        # On Windows SO_REUSEADDR would let two servers share the port.
        exclusive = "SO_EXCLUSIVEADDRUSE" if sys.platform == "win32" else "SO_REUSEADDR"
        listener.setsockopt(socket.SOL_SOCKET, getattr(socket, exclusive), 1)
        listener.bind(info[4])
    except OSError as error:
        raise ConfigError(
            f"{host}:{port} cannot be served on: {error}", hint="name another port: --port 8001"
        ) from error
    return listener
