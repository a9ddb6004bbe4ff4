"""Encoding by pools of workers, for tests that kill them: a slow codec, and one that kills its process."""

from __future__ import annotations

import os
import random
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import soundfile

from myna.core.pools import open_pool
from myna.data.encoding import EncodeReport, ShardEncoder, encode_dataset
from tests.data.kill_helper import SHARD_SECONDS, FakeCodec, corpus

SHARDS = 24


class SlowCodec(FakeCodec):
    def encode(self, clips: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
        time.sleep(0.02)
        return super().encode(clips)


class DeadlyCodec(SlowCodec):
    """Codec that kills its process in that share of the calls, as a lack of memory does, until it has done so `times`
    times."""

    def __init__(self, deaths: Path, times: int, share: float = 1 / 6) -> None:
        super().__init__()
        self._deaths, self._times, self._share = deaths, times, share

    def encode(self, clips: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
        if len(list(self._deaths.iterdir())) < self._times and random.random() < self._share:
            (self._deaths / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(clips)


def write_source(folder: Path) -> Path:
    """Recordings of many lengths, one of them too short for a frame; about `SHARDS` shards."""
    rng = np.random.default_rng(1)
    folder.mkdir()
    for number, length in enumerate([*rng.integers(100, 480, 40), 6, *rng.integers(8, 300, 15)]):
        soundfile.write(folder / f"{number:03}.wav", rng.uniform(-0.9, 0.9, length), FakeCodec.sample_rate)
    return folder


def encode_pooled(source: Path, out: Path, workers: int | None, ray: str | None = None, **options: Any) -> EncodeReport:
    """`encode_dataset` with so many processes, or on a cluster; without either in this process."""
    open_codec = options.pop("open_codec", SlowCodec)
    options |= {"shard_seconds": SHARD_SECONDS}
    if workers is None and ray is None:
        return encode_dataset(corpus(source), open_codec(), out, **options)
    with open_pool(partial(ShardEncoder, open_codec), workers, ray) as pool:
        return encode_dataset(corpus(source), FakeCodec(), out, pool=pool, **options)


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".tmp"))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}
