"""Processes that tests of distributed training start, as a launcher would."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


ROOT = Path(__file__).parents[2]


@contextmanager
def started(*words: object, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A process that does not outlive the test."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES} | variables
    process = subprocess.Popen(
        [sys.executable, "-m", *map(str, words)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
