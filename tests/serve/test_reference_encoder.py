"""References are encoded beside the steps: no request waits for another's, and none loses its place."""

from __future__ import annotations

import gc
import itertools
import signal
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing import Pipe
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
import torch

from myna.audio.files import pcm16
from myna.data.conversation import AudioClip, Reference
from myna.models import open_family, save_tiny_model
from myna.models.base import require_speaking
from myna.models.codecs import full_precision
from myna.serve import engine_process
from myna.serve.engine_process import SpeechWorker
from myna.serve.messages import AudioPiece, CancelMessage, EngineInfo, EngineSettings, RequestEnd, SpeakMessage
from myna.speak.engine import Engine, encode_clip
from myna.speak.request import ReferenceRecording, SpeechRequest

SLOW_SECONDS = 3.0
"""Seconds an encoder takes that is not released."""
SAMPLING: dict[str, Any] = {"seed": 1, "max_seconds": 0.6}


class SlowEncoder:
    """Encoder that waits before it encodes, until it may continue."""

    def __init__(self, engine: Engine) -> None:
        self.encode, self.calls, self.begun, self.may_go_on = engine.codec.encode, 0, Event(), Event()

    def __call__(self, clips: Any) -> Any:
        self.calls += 1
        self.begun.set()
        self.may_go_on.wait(SLOW_SECONDS)
        return self.encode(clips)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    family = open_family(str(save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")))
    model = family.load_model(dtype=torch.float32, device="cpu", text_head=False).requires_grad_(False)
    return Engine(family, model, require_speaking(family).load_codec())


def make_worker(engine: Engine, rows: int = 2) -> SpeechWorker:
    return SpeechWorker(engine, EngineSettings("tiny", rows=rows, positions=512, max_waiting=2, watermark=False))


@pytest.fixture
def slow(engine: Engine) -> Iterator[SlowEncoder]:
    encoder = SlowEncoder(engine)
    yield encoder
    encoder.may_go_on.set()


def message(id: str, text: str, recording: Any = None, **settings: Any) -> SpeakMessage:
    references = () if recording is None else (ReferenceRecording(recording, "as I said"),)
    return SpeakMessage(SpeechRequest(text, references, watermark=False, **SAMPLING | settings), id=id)


def recording(seed: int) -> Any:
    return np.random.default_rng(seed).normal(0, 0.1, 16_000).astype(np.float32)


def finish(worker: SpeechWorker, ids: set[str]) -> list[Any]:
    """Step until all of them have ended."""
    events: list[Any] = []
    while not ids <= {event.id for event in events if isinstance(event, RequestEnd)}:
        assert worker.busy, "they have not ended"
        events += worker.step()
    return events


def ends(events: list[Any]) -> dict[str, RequestEnd]:
    return {event.id: event for event in events if isinstance(event, RequestEnd)}


def nothing_is_open(worker: SpeechWorker) -> bool:
    """Return whether no request is left after one more step."""
    assert not worker.busy or worker.step() == []
    return not worker.busy


def test_requests_do_not_wait_for_references_of_others(
    engine: Engine, slow: SlowEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker(engine)
    monkeypatch.setattr(engine.codec, "encode", slow)
    worker.handle(message("with", "hello", recording(1)))
    assert slow.begun.wait(SLOW_SECONDS)
    worker.handle(message("without", "two words"))
    events = finish(worker, {"without"})
    assert list(ends(events)) == ["without"] and worker.load[:2] == (0, 1)
    worker.handle(message("again", "hello", recording(1)))
    slow.may_go_on.set()
    events = finish(worker, {"with", "again"})
    assert slow.calls == 1, "one recording is encoded once"

    reference = Reference("as I said", AudioClip("reference", encode_clip(engine.codec, recording(1))))
    plan = engine.plan(SpeechRequest("hello", (reference,), **SAMPLING))
    expected = pcm16(next(engine.speak_plans([plan]))[1].samples)
    for id in ("with", "again"):
        assert b"".join(e.pcm for e in events if isinstance(e, AudioPiece) and e.id == id) == expected
    assert nothing_is_open(worker)


def test_a_request_keeps_its_place_while_it_is_encoded(
    engine: Engine, slow: SlowEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker(engine, rows=1)
    monkeypatch.setattr(engine.codec, "encode", slow)
    worker.handle(message("first", "what a long sentence this is", max_seconds=2.0))
    worker.step()
    worker.handle(message("second", "hello", recording(2)))
    worker.handle(message("third", "hello"))
    worker.step()
    assert worker.load[:2] == (1, 2)
    slow.may_go_on.set()
    worker._encoding["second"].clips[0].result(SLOW_SECONDS)
    assert list(ends(finish(worker, {"first", "second", "third"}))) == ["first", "second", "third"]


def test_a_cancelled_request_is_not_encoded_unless_another_needs_it(
    engine: Engine, slow: SlowEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker(engine)
    monkeypatch.setattr(engine.codec, "encode", slow)
    for id, seed in (("running", 3), ("queued", 4), ("shared", 5), ("stays", 5)):
        worker.handle(message(id, "hello", recording(seed)))
    assert slow.begun.wait(SLOW_SECONDS)
    for id in ("running", "queued", "shared"):
        assert worker.handle(CancelMessage(id)) == [RequestEnd(id, "cancelled")]
    assert worker.load.waiting == 1
    slow.may_go_on.set()
    done = ends(finish(worker, {"stays"}))
    assert list(done) == ["stays"] and done["stays"].failure is None
    assert slow.calls == 2, "the one that ran, and the one that stays"
    assert nothing_is_open(worker)
    worker.handle(message("anew", "hello", recording(4)))
    assert ends(finish(worker, {"anew"}))["anew"].failure is None, "what was cancelled can be asked for again"


def test_a_reference_that_cannot_be_encoded_fails_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    worker, encode = make_worker(engine), engine.codec.encode
    numbers, broken = itertools.count(), recording(6)
    broken[100] = np.nan

    def encode_but_the_second(clips: Any) -> Any:
        if next(numbers) == 1:
            raise RuntimeError("a bug")
        return encode(clips)

    monkeypatch.setattr(engine.codec, "encode", encode_but_the_second)
    for id, samples in (("broken", broken), ("bug", recording(7)), ("fine", recording(8))):
        worker.handle(message(id, "hello", samples))
    done = ends(finish(worker, {"broken", "bug", "fine"}))
    assert done["broken"].failure is not None and "not finite" in done["broken"].failure.message
    assert done["bug"].failure is not None and not done["bug"].failure.is_users
    assert done["fine"].failure is None and "RuntimeError: a bug" in capfd.readouterr().err
    assert nothing_is_open(worker)
    worker.handle(message("bug", "hello", recording(7)))
    assert ends(finish(worker, {"bug"}))["bug"].failure is None, "it is tried again"


def test_precision_is_full_in_each_of_two_threads() -> None:
    """A decoder that ends must not change the precision of an encoder in another thread."""
    started, seen, device = Event(), list[tuple[str, bool]](), torch.device("cpu")

    def settings() -> tuple[str, bool]:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    def encoder() -> None:
        started.set()
        with full_precision(device):
            seen.append(settings())
            time.sleep(0.1)
            seen.append(settings())

    thread = Thread(target=encoder)
    torch.set_float32_matmul_precision("medium")
    try:
        before = settings()
        with full_precision(device):
            thread.start()
            assert started.wait(SLOW_SECONDS)
            seen.append(settings())
        thread.join()
        assert settings() == before == ("medium", True) and seen == [("highest", False)] * 3
    finally:
        torch.set_float32_matmul_precision("highest")


def test_on_a_cpu_codecs_of_two_threads_need_not_wait() -> None:
    inside, device = Event(), torch.device("cpu")

    def encoder() -> None:
        with full_precision(device):
            inside.set()

    with full_precision(device):
        thread = Thread(target=encoder)
        thread.start()
        assert inside.wait(SLOW_SECONDS)
    thread.join()


def test_the_engine_process_collects_no_garbage_of_its_imports(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full collection takes hundreds of milliseconds with all that is imported, and every stream waits for it."""
    ours, theirs = Pipe()
    monkeypatch.setattr(engine_process, "open_worker", lambda _: make_worker(engine))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    ours.send(None)
    visited = Counter(before=len(gc.get_objects()))
    try:
        engine_process.run_engine(EngineSettings("tiny"), theirs)
        visited["after"] = len(gc.get_objects())
    finally:
        gc.unfreeze()
    assert isinstance(ours.recv(), EngineInfo)
    assert visited["after"] < visited["before"] / 10
