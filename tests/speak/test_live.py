"""The running batch: what each stream gives is what the engine gives it alone, whoever comes and goes beside it."""

from __future__ import annotations

from collections import defaultdict
from threading import Thread

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from myna.core.errors import SpeakError
from myna.data.codec import Samples
from myna.models import open_family, save_tiny_model
from myna.models.base import PendingStep, require_speaking
from myna.models.ref import ModelRef
from myna.provenance.watermark import StreamWatermark, watermark
from myna.speak import live
from myna.speak.engine import Engine, Speech
from myna.speak.live import HOLD_SECONDS, LEAD_SECONDS, LiveBatch, QueueFullError, StreamEnd, StreamEvent
from myna.speak.loading import load_engine
from myna.speak.request import SpeechRequest
from myna.speak.segments import SpeechPlan

TEXTS = ("hello", "a", "what a long sentence this is", "two words", "a third one", "x y z")
LONG = " ".join(f"Sentence number {number} is here to be spoken slowly." for number in range(12))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    family = open_family(str(save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")))
    model = family.load_model(dtype=torch.float32, device="cpu", text_head=False).requires_grad_(False)
    return Engine(family, model, require_speaking(family).load_codec())


def make_plan(engine: Engine, text: str, seed: int = 0, seconds: float = 0.8) -> SpeechPlan:
    return engine.plan(SpeechRequest(text, id=text, seed=seed, max_seconds=seconds))


def spoken(engine: Engine, plan: SpeechPlan) -> Speech:
    return next(engine.speak_plans([plan]))[1]


def join(events: list[StreamEvent]) -> tuple[dict[str, Samples], dict[str, StreamEnd]]:
    parts: dict[str, list[Samples]] = defaultdict(lambda: [np.zeros(0, np.float32)])
    ends: dict[str, StreamEnd] = {}
    for event in events:
        assert event.id not in ends, "nothing comes after the end"
        parts[event.id].append(event.samples)
        if event.end is not None:
            ends[event.id] = event.end
    return {id: np.concatenate(own) for id, own in parts.items()}, ends


def finish(batch: LiveBatch) -> list[StreamEvent]:
    events = []
    while batch.busy:
        events += batch.step()
    return events


@pytest.mark.parametrize("steps_ahead", [0, 2])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_streams_are_those_of_the_engine(engine: Engine, rows: int, steps_ahead: int) -> None:
    """Also where results are read behind the steps, as on a GPU."""
    batch = LiveBatch(engine, rows=rows, positions=512, max_waiting=8)
    batch._scheduler.decoder.steps_ahead = steps_ahead
    plans = {f"{n}": make_plan(engine, text, seed=n, seconds=0.3 + 0.2 * n) for n, text in enumerate(TEXTS)}
    events = []
    for id, plan in plans.items():
        batch.submit(id, plan)
        events += batch.step() + batch.step()
    samples, ends = join(events + finish(batch))
    for id, plan in plans.items():
        alone = spoken(engine, plan)
        assert np.array_equal(samples[id], alone.samples) and len(alone.samples)
        assert np.array_equal(ends[id].codes, alone.codes) and ends[id].finish_reason == alone.finish_reason
        assert ends[id].warnings == alone.warnings and ends[id].prompt_tokens == len(plan.prompt)
    assert (batch.speaking, batch.waiting) == (0, 0)


def test_a_long_text_keeps_its_row_for_all_segments(engine: Engine) -> None:
    long = make_plan(engine, LONG, seconds=0.4)
    assert len(long.segments) > 2
    batch = LiveBatch(engine, rows=1, positions=2048, max_waiting=2)
    batch.submit("long", long)
    batch.submit("next", make_plan(engine, "hello"))
    samples, ends = join(finish(batch))
    alone = spoken(engine, long)
    assert np.array_equal(samples["long"], alone.samples) and ends["long"].warnings == alone.warnings
    assert list(ends) == ["long", "next"]


def test_a_cancelled_stream_frees_its_row_with_the_next_step(engine: Engine) -> None:
    batch = LiveBatch(engine, rows=1, positions=512, max_waiting=2)
    for id in ("gone", "waits", "never"):
        batch.submit(id, make_plan(engine, "what a long sentence this is", seconds=4))
    for _ in range(3):
        batch.step()
    assert (batch.speaking, batch.waiting) == (1, 2)
    batch.cancel("gone")
    batch.cancel("never")
    batch.cancel("a stranger")
    events = batch.step()
    assert {event.id: event.end.finish_reason for event in events if event.end} == {
        "gone": "cancelled",
        "never": "cancelled",
    }
    assert (batch.speaking, batch.waiting) == (1, 0), "the one that waited has the row"
    assert batch._scheduler._rows[0].prompt.id == "what a long sentence this is"
    samples, ends = join(finish(batch))
    assert list(ends) == ["waits"] and np.array_equal(
        samples["waits"], spoken(engine, make_plan(engine, "what a long sentence this is", seconds=4)).samples
    )


def test_a_full_queue_refuses_and_recovers(engine: Engine) -> None:
    batch = LiveBatch(engine, rows=1, positions=512, max_waiting=1)
    plan = make_plan(engine, "hello")
    batch.submit("1", plan)
    batch.submit("2", plan)
    with pytest.raises(QueueFullError, match="2 requests are spoken or waiting"):
        batch.submit("3", plan)
    finish(batch)
    batch.submit("3", plan)
    assert list(join(finish(batch))[1]) == ["3"]


def test_whoever_is_waited_for_comes_first(engine: Engine) -> None:
    batch = LiveBatch(engine, rows=1, positions=512, max_waiting=4)
    for id, priority in (("batch", 1), ("first", 0), ("second", 0)):
        batch.submit(id, make_plan(engine, "hello"), priority=priority)
    assert list(join(finish(batch))[1]) == ["first", "second", "batch"]


def test_one_that_does_not_fit_fails_alone(engine: Engine) -> None:
    batch = LiveBatch(engine, rows=2, positions=128, max_waiting=2)
    batch.submit("wide", make_plan(engine, "hello " * 40, seconds=20))
    batch.submit("fine", make_plan(engine, "hello"))
    samples, ends = join(finish(batch))
    assert isinstance(ends["wide"].error, SpeakError) and "positions" in str(ends["wide"].error)
    assert np.array_equal(samples["fine"], spoken(engine, make_plan(engine, "hello")).samples)


class Tail:
    """A filter that holds half of what it is given back until the end."""

    def __init__(self) -> None:
        self.held = np.zeros(0, np.float32)

    def push(self, samples: Samples) -> Samples:
        together = np.concatenate([self.held, samples])
        self.held = together[len(together) // 2 :]
        return together[: len(together) // 2]

    def finish(self) -> Samples:
        return self.held


def test_filters_lose_nothing(engine: Engine) -> None:
    batch = LiveBatch(engine, rows=1, positions=512, max_waiting=1)
    plan = make_plan(engine, "hello")
    batch.submit("filtered", plan, filters=[Tail(), Tail()])
    assert np.array_equal(join(finish(batch))[0]["filtered"], spoken(engine, plan).samples)


def test_streams_are_marked_as_their_files_are(engine: Engine) -> None:
    batch, rate = LiveBatch(engine, rows=3, positions=512, max_waiting=8), engine.codec.sample_rate
    plans = {f"{n}": make_plan(engine, text, seed=n, seconds=0.3 + 0.3 * n) for n, text in enumerate(TEXTS)}
    for id, plan in plans.items():
        batch.submit(id, plan, watermark=StreamWatermark(rate))
    batch.submit("plain", plans["3"])
    samples, _ = join(finish(batch))
    for id, plan in plans.items():
        assert np.array_equal(samples[id], watermark(spoken(engine, plan).samples, rate))
    assert np.array_equal(samples["plain"], spoken(engine, plans["3"]).samples)


def test_a_stream_that_is_ahead_leaves_the_codec_to_others(engine: Engine) -> None:
    """A clock that stands still: the first second of sound comes, and the rest when the speech has ended."""
    batch = LiveBatch(engine, rows=1, positions=2048, max_waiting=1, clock=lambda: 0.0)
    plan = make_plan(engine, LONG, seconds=1)
    batch.submit("1", plan)
    pieces = [len(event.samples) / engine.codec.sample_rate for event in finish(batch)]
    assert LEAD_SECONDS <= sum(pieces[:-1]) < 2 * LEAD_SECONDS + 0.2 < sum(pieces)
    assert round(sum(pieces) * engine.codec.sample_rate) == len(spoken(engine, plan).samples)


def test_a_stream_that_is_ahead_waits_for_one_without_a_sound(engine: Engine) -> None:
    """A clock that stands still: whoever has been heard is ahead of its playback."""
    batch = LiveBatch(engine, rows=3, positions=2048, max_waiting=2, clock=lambda: 0.0)
    decoder, stepped = batch._scheduler.decoder, list[int]()
    step = decoder.step

    def counted_step(rows: int, longest: int) -> PendingStep:
        stepped.append(rows)
        return step(rows, longest)

    decoder.step = counted_step  # type: ignore[method-assign]
    plans = {name: make_plan(engine, LONG, seed, 2) for seed, name in enumerate("ab")}
    batch.submit("a", plans["a"])
    events: list[StreamEvent] = []
    while sum(len(event.samples) for event in events) <= 4 * HOLD_SECONDS * engine.codec.sample_rate:
        events += batch.step()
    stepped.clear()
    batch.submit("b", plans["b"])
    while not any(event.id == "b" for event in events):
        events += batch.step()
    assert set(stepped) == {1} and batch.speaking == 2
    stepped.clear()
    while batch.speaking == 2:
        events += batch.step()
    assert 2 in stepped, "both go on when both have been heard"
    samples, _ = join(events + finish(batch))
    for name, plan in plans.items():
        assert np.array_equal(samples[name], spoken(engine, plan).samples)


def test_a_stream_in_a_crowd_begins_with_more(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "START_SECONDS", ((2, 99, 1.0),))
    batch, rate = LiveBatch(engine, rows=3, positions=2048, max_waiting=2), engine.codec.sample_rate
    plans = {name: make_plan(engine, LONG, seed, 2) for seed, name in enumerate("ab")}
    plans["short"] = make_plan(engine, "hello", 3, 0.4)
    for name, plan in plans.items():
        batch.submit(name, plan)
    events = finish(batch)
    first = {event.id: len(event.samples) for event in reversed(events)}
    assert min(first["a"], first["b"]) >= 1.0 * rate > first["short"] > 0
    samples, _ = join(events)
    for name, plan in plans.items():
        assert np.array_equal(samples[name], spoken(engine, plan).samples)


def test_a_stream_begins_with_more_where_many_listen(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was given all of a text listens to it for as long as it is, and asks for the next then."""
    monkeypatch.setattr(live, "START_SECONDS", ((99, 2, 1.0),))
    now, rate, first = [0.0], engine.codec.sample_rate, list[float]()
    batch = LiveBatch(engine, rows=3, positions=2048, max_waiting=2, clock=lambda: now[0])
    for moment in (0.0, 0.0, 100.0):
        now[0] = moment
        batch.submit("a", make_plan(engine, LONG, seconds=2))
        first.append(len(finish(batch)[0].samples) / rate)
    assert first[0] < 0.2 and first[1] >= 1.0 and first[2] == first[0]
    assert len(batch._played_until) == 1, "what has been played is forgotten"


def test_no_stream_is_held_while_another_waits_for_a_row(engine: Engine) -> None:
    batch = LiveBatch(engine, rows=2, positions=1024, max_waiting=2, clock=lambda: 0.0)
    for seed, name in enumerate("abc"):
        batch.submit(name, make_plan(engine, "what a long sentence this is", seed, 2))
    while batch.waiting:
        batch.step()
        assert not any(generation.held for generation in batch._scheduler._rows)
    finish(batch)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 3), st.booleans(), st.integers(0, 12)), min_size=1, max_size=10
    )
)
def test_whatever_comes_and_goes_no_row_is_lost(engine: Engine, turns: list[tuple[int, int, bool, int]]) -> None:
    batch = LiveBatch(engine, rows=2, positions=512, max_waiting=20)
    events: list[StreamEvent] = []
    for number, (text, seed, cancelled, steps) in enumerate(turns):
        batch.submit(str(number), make_plan(engine, TEXTS[text], seed, 0.3))
        for _ in range(steps):
            events += batch.step()
        if cancelled:
            batch.cancel(str(number))
    samples, ends = join(events + finish(batch))
    assert len(ends) == len(turns) and batch._open == 0 and not batch._scheduler.busy
    for number, (text, seed, _, _) in enumerate(turns):
        if ends[str(number)].finish_reason != "cancelled":
            alone = spoken(engine, make_plan(engine, TEXTS[text], seed, 0.3))
            assert np.array_equal(samples[str(number)], alone.samples)


@pytest.mark.slow
def test_the_shipped_model_from_many_threads() -> None:
    engine = load_engine(ModelRef.find_model("fledgling"), device="cpu")
    texts = ("Good morning.", "How are you today?", "It is a fine day.", "Yes.")
    plans = {text: engine.plan(SpeechRequest(text, id=text)) for text in texts}
    batch = LiveBatch(engine, rows=3, positions=1024, max_waiting=4)
    threads = [Thread(target=batch.submit, args=(text, plan)) for text, plan in plans.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    samples, ends = join(finish(batch))
    for text, plan in plans.items():
        assert np.array_equal(samples[text], spoken(engine, plan).samples) and ends[text].finish_reason == "stop"
