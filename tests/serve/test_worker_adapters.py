"""Adapters in the engine process: prompted as they were trained, loaded beside the steps, or gone at a restart."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from pathlib import Path
from threading import Event, get_ident
from typing import Any

import pytest
import torch

from myna.core.errors import MynaError, SpeakError
from myna.models import open_family, save_tiny_model
from myna.models.base import require_speaking
from myna.models.files import WeightsMetadata, save_metadata
from myna.serve.engine_client import EngineClient
from myna.serve.engine_process import SpeechWorker, _attempt
from myna.serve.messages import (
    AdapterMessage,
    EngineInfo,
    EngineSettings,
    Failure,
    RequestEnd,
    SpeakMessage,
    StepReport,
)
from myna.speak.engine import Engine
from myna.speak.request import SpeechRequest
from tests.models.helpers import random_adapter
from tests.serve.stub_engine import RATE, spoken, stub_of, stub_server

SCENE = "Audio is recorded in a small kitchen."
SECONDS = 20.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and an adapter that was trained with a scene."""
    root = tmp_path_factory.mktemp("models")
    family = open_family(str(save_tiny_model(root / "tiny")))
    adapter = random_adapter(family, root / "adapter")
    save_metadata(adapter, WeightsMetadata(scene=SCENE))
    return root


def open_engine(folder: Path) -> Engine:
    family = open_family(str(folder / "tiny"))
    model = family.load_model(dtype=torch.float32, device="cpu", text_head=False).requires_grad_(False)
    return Engine(family, model, require_speaking(family).load_codec(), scene="Audio is recorded in a hall.")


def settings(folder: Path, **changed: Any) -> EngineSettings:
    known: dict[str, Any] = {"rows": 2, "positions": 512, "adapter_rank": 8, "watermark": False, "device": "cpu"}
    return EngineSettings(str(folder / "tiny"), **known | changed)


def load(worker: SpeechWorker, name: str, source: Path) -> RequestEnd:
    message = AdapterMessage(name, str(source))
    events = worker.handle(message)
    while not any(isinstance(event, RequestEnd) and event.id == message.id for event in events):
        events += worker.step()
    return next(event for event in events if isinstance(event, RequestEnd) and event.id == message.id)


def test_an_adapter_is_prompted_with_the_scene_of_its_training(folder: Path) -> None:
    engine = open_engine(folder)
    worker = SpeechWorker(engine, settings(folder))
    assert load(worker, "kitchen", folder / "adapter").failure is None
    for adapter, scene in (("kitchen", SCENE), ("", "Audio is recorded in a hall.")):
        request = SpeechRequest("two words", adapter=adapter, max_seconds=0.2, watermark=False)
        plain = dataclasses.replace(request, scene=scene)
        assert worker._plan(request, ()).prompt.ids.tolist() == worker._plan(plain, ()).prompt.ids.tolist()


def test_an_adapter_is_read_beside_the_steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, may_go_on, threads = open_engine(folder), Event(), set[int]()
    worker, read = SpeechWorker(engine, settings(folder)), engine.read_adapter

    def read_slowly(name: str, source: Any) -> Any:
        threads.add(get_ident())
        assert may_go_on.wait(SECONDS)
        return read(name, source)

    monkeypatch.setattr(engine, "read_adapter", read_slowly)
    adapter = AdapterMessage("kitchen", str(folder / "adapter"))
    assert worker.handle(adapter) == []
    is_busy = worker.busy
    assert is_busy
    speech = SpeakMessage(SpeechRequest("two words", max_seconds=0.4, watermark=False))
    events = worker.handle(speech)
    while not any(isinstance(event, RequestEnd) for event in events):
        events += worker.step()
    assert events[-1].id == speech.id and not list(engine.adapters), "it is spoken meanwhile"
    may_go_on.set()
    while worker.busy:
        events += worker.step()
    assert events[-1] == RequestEnd(adapter.id) and list(engine.adapters) == ["kitchen"]
    assert get_ident() not in threads
    failed = load(worker, "kitchen", folder / "adapter").failure
    assert failed is not None and "loaded already" in failed.message


def test_a_restarted_engine_leaves_out_an_adapter_that_has_gone(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    gone = {"gone": str(folder / "nowhere"), "kitchen": str(folder / "adapter")}
    with pytest.raises(MynaError, match="nowhere"):
        SpeechWorker(open_engine(folder), settings(folder, adapters=gone))
    worker = SpeechWorker(open_engine(folder), settings(folder, adapters=gone, is_restart=True))
    assert worker.info.adapters == ("kitchen",) and "the adapter gone is left out" in capfd.readouterr().err


def test_only_an_engine_that_spoke_before_is_restarted_without_an_adapter(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = list[EngineSettings]()

    class Context:
        """Stand-in for multiprocessing whose processes do not start."""

        def Pipe(self) -> Any:  # noqa: N802 - the name of multiprocessing
            return object(), object()

        def Process(self, *, args: tuple[Any, ...], **_: Any) -> Any:  # noqa: N802
            started.append(args[0])
            raise KeyboardInterrupt

    monkeypatch.setattr("multiprocessing.get_context", lambda _: Context())

    async def run() -> None:
        client = EngineClient(settings(folder))
        for known in (None, EngineInfo(sample_rate=RATE, device="cpu")):
            client.known = known
            with pytest.raises(KeyboardInterrupt):
                client._run()

    asyncio.run(run())
    assert [one.is_restart for one in started] == [False, True]


def test_a_model_that_cannot_be_loaded_again_is_no_fault_of_the_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with stub_server(tmp_path, monkeypatch) as (context, web):
            client = stub_of(context)
            client.answer = lambda _: []
            waiting = asyncio.create_task(web.post("/v1/audio/speech", json={"input": "Yes."}))
            while not client.in_flight:
                await asyncio.sleep(0.01)
            client._receive(Failure("the disk has gone", "mount it"))
            assert (await waiting).status_code == 503

    asyncio.run(run())


def test_an_adapter_that_has_gone_is_told_without_the_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    named = settings(folder, adapters={"kitchen": str(folder / "adapter")})

    async def run() -> None:
        async with stub_server(tmp_path, monkeypatch, engine=named) as (context, web):
            client = stub_of(context)
            client._receive(StepReport((), 0.0, client.load._replace(adapters=())))
            gone = Failure(f"{folder} is not there", "bring it back")
            client.answer = lambda message: [RequestEnd(message.id, failure=gone)]
            answer = await web.post("/v1/audio/speech", json={"input": "Yes.", "model": "kitchen"})
            assert answer.status_code == 503 and str(folder) not in answer.text
            assert "adapter kitchen" in answer.json()["error"]["message"] and str(folder) in caplog.text

    asyncio.run(run())


def test_a_request_does_not_wait_while_another_adapter_is_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = str(folder / "adapter")
    named = settings(folder, adapters={"one": source, "two": source}, max_adapters=1)

    async def run() -> None:
        async with stub_server(tmp_path, monkeypatch, engine=named) as (context, web):
            client = stub_of(context)
            client.answer = lambda one: spoken(one) if isinstance(one, SpeakMessage) else []
            client._receive(StepReport((), 0.0, client.load._replace(adapters=("one", "other"))))
            body = {"input": "Yes.", "model": "one"}
            assert (await web.post("/v1/audio/speech", json=body)).status_code == 200
            waiting = asyncio.create_task(web.post("/v1/audio/speech", json=body | {"model": "two"}))
            while not any(isinstance(one, AdapterMessage) for one in client.sent):
                await asyncio.sleep(0.01)
            (unload,) = (one for one in client.sent if isinstance(one, AdapterMessage))
            stays = ({"one", "other"} - {unload.name}).pop()
            assert unload.source is None and context.adapters._is_loaded(stays)
            await asyncio.wait_for(context.adapters.load(stays), 5)
            assert not context.adapters._is_loaded(unload.name), "a request for it would come too late"
            waiting.cancel()

    asyncio.run(run())


def test_an_error_does_not_repeat_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Errors name a request by its text, which would be in the log of the server, with its line ends."""
    text = "A secret.\n2026-01-01 myna: the key was changed"
    error = SpeakError(f"{text} needs 2438 positions, the batch has 2048", hint="serve with more --positions")
    assert Failure.of(error, text).message == "the text needs 2438 positions, the batch has 2048"
    assert Failure.of(SpeakError("top_k is -1", hint=""), "a").message == "top_k is -1"

    async def run() -> None:
        async with stub_server(tmp_path, monkeypatch) as (context, web):
            failed = Failure("a line\nanother line", is_users=False)
            stub_of(context).answer = lambda one: (
                [*spoken(one)[:1], RequestEnd(one.id, failure=failed)] if isinstance(one, SpeakMessage) else []
            )
            body = {"input": "Yes.", "response_format": "pcm", "stream_format": "sse"}
            with caplog.at_level(logging.ERROR):
                assert "speech.audio.error" in (await web.post("/v1/audio/speech", json=body)).text
            assert "failed after its first audio" in caplog.text and "line\nanother" not in caplog.text

    asyncio.run(run())


def test_the_whole_of_a_long_text_is_left_out_of_errors(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error that the scheduler raises for a request, as the engine process reports it."""
    engine = open_engine(folder)
    worker = SpeechWorker(engine, settings(folder, positions=256))
    text = "a secret text of many words " * 20
    message = SpeakMessage(SpeechRequest(text, max_seconds=30.0, watermark=False))
    events = _attempt(message, lambda: worker.handle(message))
    while worker.busy:
        events += worker.step()
    (end,) = [event for event in events if isinstance(event, RequestEnd)]
    assert end.failure is not None and "secret" not in end.failure.message
    assert "secret" not in capsys.readouterr().err
