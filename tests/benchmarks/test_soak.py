"""The soak test's figures: memory that a process has allocated, and the line through them."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import psutil  # type: ignore[import-untyped]
import pytest
from benchmarks.soak import anonymous_mib, fitted_growth, send_request

MIB = 64
READER = """
import mmap, os, sys
with open(sys.argv[1], "rb") as file:
    pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
sum(pages[:: mmap.PAGESIZE])
print("mapped", flush=True)
held = bytearray(os.urandom(2**20)) * int(sys.stdin.readline())
print("allocated", flush=True)
sys.stdin.readline()
"""


class Reader:
    """A process that maps a file, as every process with torch maps libtorch."""

    def __init__(self, file: Path) -> None:
        command = [sys.executable, "-c", READER, str(file)]
        self.popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.process = psutil.Process(self.popen.pid)
        self.wait_for("mapped")

    def wait_for(self, line: str) -> None:
        assert self.popen.stdout is not None and self.popen.stdout.readline() == line + "\n"

    def allocate(self, mib: int) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(f"{mib}\n")
        self.popen.stdin.flush()
        self.wait_for("allocated")

    def end(self) -> None:
        self.popen.kill()
        self.popen.communicate()

    def uss_mib(self) -> float:
        return float(self.process.memory_full_info().uss) / 2**20


@pytest.mark.skipif(not psutil.LINUX, reason="only Linux tells anonymous memory")
def test_memory_is_what_a_process_allocates_and_not_what_another_gives_up(tmp_path: Path) -> None:
    file = tmp_path / "library.so"
    file.write_bytes(os.urandom(2**20) * MIB)
    reader, other = Reader(file), Reader(file)
    try:
        uss, anonymous = reader.uss_mib(), anonymous_mib(reader.process)
        other.end()
        assert reader.uss_mib() - uss == pytest.approx(MIB, abs=1), "the file's pages are its own now"
        assert anonymous_mib(reader.process) == pytest.approx(anonymous, abs=0.1)
        reader.allocate(MIB)
        assert anonymous_mib(reader.process) - anonymous == pytest.approx(MIB, abs=2)
    finally:
        other.end()
        reader.end()


def test_growth_is_the_slope_behind_the_warm_up() -> None:
    samples = [
        {"request": 250 * number, "engine": {"anonymous_mib": 800 + max(0, number - 8) * 0.5}} for number in range(41)
    ]
    growth = fitted_growth(samples, "engine", "anonymous_mib")
    assert growth["per_1000_requests"] == pytest.approx(2.0)
    assert growth["over_the_run"] == pytest.approx(16.0)


def test_a_refused_request_is_told_by_its_status_whatever_its_kind() -> None:
    async def content() -> AsyncIterator[bytes]:
        yield b"{}"

    async def ends() -> set[str]:
        rng, refusal = random.Random(0), httpx2.MockTransport(lambda _: httpx2.Response(400, content=content()))
        async with httpx2.AsyncClient(base_url="http://server", transport=refusal) as web:
            return {await send_request(web, rng, max_seconds=0.3) for _ in range(100)}

    assert asyncio.run(ends()) - {"given up"} == {"status 400"}, "given up: within milliseconds, on a busy machine"
