"""A running server: uvicorn in this process, the engine in another."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from myna.core.errors import ConfigError, SpeakError
from myna.serve.app import create_app
from myna.serve.context import ServerContext, ServerSettings
from myna.serve.guard import TimedHttpProtocol
from myna.serve.messages import EngineInfo

MAX_CONNECTIONS_PER_REQUEST = 4
"""Connections, in multiples of the requests that are taken: keep-alives, pages and checks of health."""
MIN_CONNECTIONS = 512
MAX_MESSAGE_BYTES = 16 * 2**20
"""Of a message over a WebSocket: a session's configuration may carry a recording."""


def run_server(settings: ServerSettings, listener: socket.socket, on_ready: Callable[[EngineInfo], None]) -> None:
    """Serve on a socket of `bind` until SIGTERM or SIGINT. What is being spoken then is spoken to its end, for
    `drain_seconds` at most.

    `on_ready` is called when the model is loaded and warm. A model that cannot be loaded at the start is an error.
    """
    context = ServerContext.create(settings)
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

    async def serve() -> None:
        running = asyncio.ensure_future(server.serve(sockets=[listener]))
        loading = asyncio.ensure_future(_announce(context, on_ready))
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


async def _announce(context: ServerContext, on_ready: Callable[[EngineInfo], None]) -> None:
    await context.client.wait_until_loaded()
    assert context.client.info is not None
    on_ready(context.client.info)


@contextmanager
def _quiet_signals() -> Iterator[None]:
    """uvicorn raises the signal that ended it once more, behind its shutdown; by then it has been obeyed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, before anything heavy is loaded."""
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(info[0], socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(info[4])
    except OSError as error:
        raise ConfigError(
            f"{host}:{port} cannot be served on: {error}", hint="name another port: --port 8001"
        ) from error
    return listener
