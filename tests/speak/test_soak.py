"""Two thousand requests, many of them cancelled: no row, generation, thread or memory is left."""

from __future__ import annotations

import gc
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from myna.models.base import SpeechDecoder
from myna.models.ref import ModelRef
from myna.speak.batch import RunningRequest
from myna.speak.engine import Engine, SpeechStream
from myna.speak.loading import load_engine
from myna.speak.request import SpeechRequest
from myna.speak.scheduler import BatchScheduler, Generation

REQUESTS, WARM_UP, OPEN, ROWS = 2_000, 400, 12, 8
MAX_GROWTH_BLOCKS = REQUESTS // 4
"""Blocks of Python's memory; one object kept for every request would be more."""
MAX_RESIDENT_GROWTH_BYTES = 24 * 2**20
"""Bytes of the process: allocators keep freed memory, and their pools grow by megabytes."""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Clients:
    """Listeners of many streams, each of which reads to the end or leaves, with `close` or without."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.random = engine, np.random.default_rng(0)
        self.streams: list[SpeechStream] = []
        self.opened = self.finished = self.left = 0

    def serve(self, requests: int) -> None:
        stop = self.opened + requests
        while self.opened < stop or self.streams:
            while self.opened < stop and len(self.streams) < OPEN:
                self._open()
            self._act(int(self.random.integers(len(self.streams))))

    def _open(self) -> None:
        text = " ".join(["word"] * int(self.random.integers(1, 4)))
        seconds = float(self.random.choice([0.04, 0.12, 0.2]))
        request = SpeechRequest(text, id=f"request {self.opened}", max_seconds=seconds, seed=self.opened)
        self.streams.append(self.engine.stream(request))
        self.opened += 1

    def _act(self, number: int) -> None:
        action = self.random.random()
        if action < 0.85:
            if next(self.streams[number], None) is None:
                del self.streams[number]
                self.finished += 1
            return
        stream = self.streams.pop(number)
        if action < 0.95:
            stream.close()
        self.left += 1  # or it is merely forgotten


def idle_batch(engine: Engine) -> BatchScheduler:
    """Return the scheduler of the engine's batch, when nothing is left in it."""
    assert engine._batch is not None
    while engine._batch.busy:
        engine._batch.step()
    return engine._batch.scheduler


def living(kind: type) -> int:
    gc.collect()
    return sum(type(one) is kind for one in gc.get_objects())


def soak(model: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_engine(ModelRef.find_model(str(model)), device=device)
    batches, make = list[SpeechDecoder](), engine.family.speech_decoder

    def count(*words: Any, **names: Any) -> SpeechDecoder:
        batches.append(make(*words, **names))
        return batches[-1]

    monkeypatch.setattr(engine.family, "speech_decoder", count)
    list(engine.speak_plans([engine.plan(SpeechRequest("word " * 4, max_seconds=0.2))] * ROWS))
    clients = Clients(engine)
    clients.serve(WARM_UP)
    idle_batch(engine)
    generations, threads, files = living(Generation), threading.active_count(), open_files()
    resident, card = resident_bytes(), torch.cuda.memory_allocated() if device == "cuda" else 0
    blocks = sys.getallocatedblocks()
    clients.serve(REQUESTS)
    scheduler = idle_batch(engine)
    gc.collect()
    grown = sys.getallocatedblocks() - blocks
    assert clients.opened == WARM_UP + REQUESTS == clients.finished + clients.left
    assert clients.left > REQUESTS / 5 and clients.finished > REQUESTS / 5, "both happen"
    assert len(batches) == 1, "one cache for all of them"
    assert not scheduler._rows and not scheduler._waiting and not scheduler._pending
    assert living(Generation) <= generations and living(RunningRequest) == 0
    assert (threading.active_count(), open_files()) == (threads, files)
    assert grown < MAX_GROWTH_BLOCKS, f"{grown:,} blocks of Python's memory"
    assert resident_bytes() - resident < MAX_RESIDENT_GROWTH_BYTES
    if device == "cuda":
        assert torch.cuda.memory_allocated() == card, "everything on the card is allocated at the start"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from myna.models import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.mark.slow
def test_two_thousand_requests_leave_memory_flat(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    soak(model, "cpu", monkeypatch)


@pytest.mark.gpu
def test_two_thousand_requests_leave_the_card_as_it_was(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    soak(model, "cuda", monkeypatch)
