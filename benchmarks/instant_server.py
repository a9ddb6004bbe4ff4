"""Our HTTP process with an engine that takes no time: what a request costs beside its speech.

python benchmarks/instant_server.py            prints its address; `benchmarks/serve.py --instant` starts it

Everything but the engine is the real server: uvicorn, the checks of a request, the pipe between two processes, the
encoder of the audio. The engine answers with a second of a tone, in pieces as a stream has them.
"""

from __future__ import annotations

import argparse
import itertools
import socket
from multiprocessing.connection import Connection

import numpy as np

from myna.audio.files import pcm16
from myna.serve import engine_client
from myna.serve.context import ServerSettings
from myna.serve.messages import (
    AudioPiece,
    EngineInfo,
    EngineMessage,
    EngineSettings,
    RequestEnd,
    RequestEvent,
    SpeakMessage,
)
from myna.serve.server import bind, run_server

SAMPLE_RATE = 24_000
PIECES = (0.08, 0.16, 0.32, 0.44)
"""Seconds of the pieces of a stream, as windows of a codec give them."""


class InstantWorker:
    """An engine that has spoken before it was asked."""

    busy, speaking, waiting, adapters = False, 0, 0, ()

    def __init__(self) -> None:
        self.info = EngineInfo(SAMPLE_RATE, False, (), "", "none")
        tone = 0.3 * np.sin(2 * np.pi * 220 * np.arange(SAMPLE_RATE) / SAMPLE_RATE)
        pcm = pcm16(tone.astype(np.float32))
        edges = np.cumsum([0, *(2 * round(seconds * SAMPLE_RATE) for seconds in PIECES)])
        self._pieces = [pcm[start:end] for start, end in itertools.pairwise(edges)]

    def handle(self, message: EngineMessage) -> list[RequestEvent]:
        if not isinstance(message, SpeakMessage):
            return []
        return [*(AudioPiece(message.id, piece) for piece in self._pieces), RequestEnd(message.id, "stop")]

    def step(self) -> list[RequestEvent]:
        return []


def run_instant_engine(settings: EngineSettings, connection: Connection) -> None:
    """Main function of the engine process."""
    from myna.serve import engine_process

    engine_process.open_worker = lambda _: InstantWorker()
    engine_process.run_engine(settings, connection)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    listener: socket.socket = bind("127.0.0.1", parser.parse_args().port)
    host, port = listener.getsockname()[:2]
    engine_client._run_engine = run_instant_engine
    settings = ServerSettings(
        EngineSettings("fledgling", rows=256, max_waiting=4096, watermark=False), host=host, port=port
    )
    run_server(settings, listener, lambda _: print(f"http://{host}:{port} Ctrl+C ends it", flush=True))


if __name__ == "__main__":
    main()
