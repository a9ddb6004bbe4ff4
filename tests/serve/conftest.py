"""A real server: `myna serve` in a process of its own, with its engine process, on the shipped model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import psutil  # type: ignore[import-untyped]
import pytest

START_SECONDS = 180


@dataclass
class RunningServer:
    """A server process."""

    process: subprocess.Popen[str]
    home: Path
    lines: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        found = re.search(r"http://127\.0\.0\.1:\d+", self.output)
        assert found, self.output
        return found[0]

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    def engine(self) -> psutil.Process:
        """Return the engine process, which is the one with the most memory."""
        children = psutil.Process(self.process.pid).children()
        return max(children, key=lambda child: child.memory_info().rss)

    def metric(self, name: str) -> float:
        text = httpx2.get(f"{self.url}/metrics").text
        return sum(float(line.split()[-1]) for line in text.splitlines() if re.match(rf"{name}(\{{.*\}})? ", line))

    def wait_for(self, name: str, value: float, seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while self.metric(name) != value:
            assert time.monotonic() < deadline, f"{name} is {self.metric(name)}, not {value}\n{self.output}"
            time.sleep(0.02)


@contextmanager
def start_server(
    home: Path, *arguments: str, source: str = "fledgling", environment: Mapping[str, str] | None = None
) -> Iterator[RunningServer]:
    """Run `myna serve` with its own folder for voices and logs, and wait until it is ready."""
    command = [sys.executable, "-m", "myna", "serve", source, *arguments, "--port", "0", "--device", "cpu"]
    variables = {**os.environ, "MYNA_HOME": str(home), "PYTHONUNBUFFERED": "1", **(environment or {})}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables, cwd=home
    )
    server = RunningServer(process, home)
    reader = threading.Thread(target=server.read, daemon=True)
    reader.start()
    try:
        deadline = time.monotonic() + START_SECONDS
        while "Ctrl+C ends it" not in server.output:
            assert process.poll() is None and time.monotonic() < deadline, server.output
            time.sleep(0.05)
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        reader.join(5)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Run one server for all tests that leave it as it was."""
    with start_server(tmp_path_factory.mktemp("server"), "--streams", "3", "--queue", "5", "--no-watermark") as one:
        yield one
