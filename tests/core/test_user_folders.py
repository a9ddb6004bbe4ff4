"""Files that only their user may read."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

from myna.core.user_folders import private_file

THREADS = 16


def test_threads_that_make_a_private_file_have_the_same_content(tmp_path: Path) -> None:
    """As the first requests to a server do, which are signed at the same time."""
    start = Barrier(THREADS)

    def make(file: Path, number: int) -> bytes:
        start.wait()
        return private_file(file, bytes([number]) * 4096)

    with ThreadPoolExecutor(THREADS) as pool:
        for attempt in range(20):
            file = tmp_path / f"{attempt}.pem"
            contents = set(pool.map(make, [file] * THREADS, range(THREADS)))
            assert contents == {file.read_bytes()} and file.stat().st_mode & 0o777 == 0o600
    assert len(list(tmp_path.iterdir())) == 20, "nothing else is left"
