"""The batch loop: each request gives what the engine gives it alone, with any others beside it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from threading import Thread
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from myna.core.errors import SpeakError
from myna.data.codec import Codes, Samples
from myna.models import open_family, save_tiny_model
from myna.models.base import PendingStep, require_speaking
from myna.models.ref import ModelRef
from myna.provenance.watermark import StreamWatermark, watermark
from myna.speak import batch as batch_module
from myna.speak.batch import HOLD_SECONDS, LEAD_SECONDS, RunningRequest, SpeechBatch, SpeechPlan
from myna.speak.engine import Engine, Speech
from myna.speak.loading import load_engine
from myna.speak.request import SpeechRequest
from myna.speak.streaming import TempoFilter

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


class Event(NamedTuple):
    """News of a request in one step."""

    id: str
    samples: Samples
    ended: bool
    running: RunningRequest


def step(batch: SpeechBatch) -> list[Event]:
    return [Event(one.id, one.take_samples(), one.ended, one) for one in batch.step()]


def join(events: list[Event]) -> tuple[dict[str, Samples], dict[str, RunningRequest]]:
    parts: dict[str, list[Samples]] = defaultdict(lambda: [np.zeros(0, np.float32)])
    ends: dict[str, RunningRequest] = {}
    for event in events:
        assert event.id not in ends, "nothing comes after the end"
        parts[event.id].append(event.samples)
        if event.ended:
            ends[event.id] = event.running
    return {id: np.concatenate(own) for id, own in parts.items()}, ends


def finish(batch: SpeechBatch) -> list[Event]:
    events = []
    while batch.busy:
        events += step(batch)
    return events


@pytest.mark.parametrize("steps_ahead", [0, 2])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_requests_give_the_samples_of_the_engine(engine: Engine, rows: int, steps_ahead: int) -> None:
    """Compare with the engine, also with results that are read behind the steps, as on a GPU."""
    batch = engine.open_batch(rows, 512)
    batch.scheduler.decoder.steps_ahead = steps_ahead
    plans = {f"{n}": make_plan(engine, text, seed=n, seconds=0.3 + 0.2 * n) for n, text in enumerate(TEXTS)}
    events = []
    for id, plan in plans.items():
        batch.submit(plan, id=id)
        events += step(batch) + step(batch)
    samples, ends = join(events + finish(batch))
    for id, plan in plans.items():
        alone = spoken(engine, plan)
        assert np.array_equal(samples[id], alone.samples) and len(alone.samples)
        assert np.array_equal(ends[id].codes(), alone.codes) and ends[id].finish_reason == alone.finish_reason
        assert tuple(ends[id].warnings) == alone.warnings
    assert (batch.speaking, batch.waiting) == (0, 0)


def test_a_long_text_keeps_its_row_for_all_segments(engine: Engine) -> None:
    long = make_plan(engine, LONG, seconds=0.4)
    assert len(long.segments) > 2
    batch = engine.open_batch(1, 2048)
    batch.submit(long, id="long")
    batch.submit(make_plan(engine, "hello"), id="next")
    samples, ends = join(finish(batch))
    alone = spoken(engine, long)
    assert np.array_equal(samples["long"], alone.samples) and tuple(ends["long"].warnings) == alone.warnings
    assert list(ends) == ["long", "next"]


def test_a_cancelled_stream_frees_its_row_with_the_next_step(engine: Engine) -> None:
    batch = engine.open_batch(1, 512)
    plan = make_plan(engine, "what a long sentence this is", seconds=4)
    gone, _, never = (batch.submit(plan, id=id) for id in ("gone", "waits", "never"))
    for _ in range(3):
        step(batch)
    assert (batch.speaking, batch.waiting) == (1, 2)
    for running in (gone, never, gone):
        batch.cancel(running)
    ended = [(event.id, event.running.finish_reason) for event in step(batch) if event.ended]
    assert ended == [("gone", "cancelled"), ("never", "cancelled")]
    assert (batch.speaking, batch.waiting) == (1, 0), "the one that waited has the row"
    assert batch.scheduler._rows[0].prompt.id == "what a long sentence this is"
    samples, ends = join(finish(batch))
    assert list(ends) == ["waits"] and np.array_equal(samples["waits"], spoken(engine, plan).samples)
    batch.cancel(gone)
    assert not batch.busy, "one that has ended stays as it is"


def test_lower_priorities_come_first(engine: Engine) -> None:
    batch = engine.open_batch(1, 512)
    for id, priority in (("batch", 1), ("first", 0), ("second", 0)):
        batch.submit(engine.plan(SpeechRequest("hello", priority=priority, max_seconds=0.8)), id=id)
    assert list(join(finish(batch))[1]) == ["first", "second", "batch"]


def test_a_request_that_does_not_fit_fails_alone(engine: Engine) -> None:
    batch = engine.open_batch(2, 128)
    batch.submit(make_plan(engine, "hello " * 40, seconds=20), id="wide")
    batch.submit(make_plan(engine, "hello"), id="fine")
    samples, ends = join(finish(batch))
    assert isinstance(ends["wide"].error, SpeakError) and "positions" in str(ends["wide"].error)
    assert np.array_equal(samples["fine"], spoken(engine, make_plan(engine, "hello")).samples)


def test_a_changed_tempo_loses_nothing(engine: Engine) -> None:
    batch = engine.open_batch(1, 512)
    plan = make_plan(engine, "hello", seconds=2)
    batch.submit(replace(plan, request=replace(plan.request, speed=0.8)), id="slow")
    expected = TempoFilter(0.8, engine.codec.sample_rate).push(spoken(engine, plan).samples, last=True)
    assert np.array_equal(join(finish(batch))[0]["slow"], expected)


def test_speech_too_short_for_its_speed_is_refused(engine: Engine) -> None:
    """One frame at four times the tempo is no sample: a file without sound, or a client that waits."""
    with pytest.raises(SpeakError, match=r"nothing would be left of 0\.04 s of speech at speed 4") as error:
        engine.plan(SpeechRequest("hello", speed=4.0, max_seconds=0.04))
    assert "0.08" in error.value.hint
    for speed, seconds in ((1.5, 0.04), (2.0, 0.04), (3.0, 0.08), (4.0, 0.08)):
        batch = engine.open_batch(1, 512)
        batch.submit(engine.plan(SpeechRequest("hello", speed=speed, max_seconds=seconds)), id="short")
        assert len(join(finish(batch))[0]["short"])


def test_streams_are_marked_as_their_files_are(engine: Engine) -> None:
    batch, rate = engine.open_batch(3, 512), engine.codec.sample_rate
    plans = {f"{n}": make_plan(engine, text, seed=n, seconds=0.3 + 0.3 * n) for n, text in enumerate(TEXTS)}
    for id, plan in plans.items():
        batch.submit(plan, id=id, watermark=StreamWatermark(rate))
    batch.submit(plans["3"], id="plain")
    samples, _ = join(finish(batch))
    for id, plan in plans.items():
        assert np.array_equal(samples[id], watermark(spoken(engine, plan).samples, rate))
    assert np.array_equal(samples["plain"], spoken(engine, plans["3"]).samples)


def test_a_stream_that_is_ahead_leaves_the_codec_to_others(engine: Engine) -> None:
    """Use a clock that stands still: the first second of sound comes, and the rest when the speech has ended."""
    batch = engine.open_batch(1, 2048, clock=lambda: 0.0)
    plan = make_plan(engine, LONG, seconds=1)
    batch.submit(plan, id="1")
    pieces = [len(event.samples) / engine.codec.sample_rate for event in finish(batch)]
    assert LEAD_SECONDS <= sum(pieces[:-1]) < 2 * LEAD_SECONDS + 0.2 < sum(pieces)
    assert round(sum(pieces) * engine.codec.sample_rate) == len(spoken(engine, plan).samples)


def test_a_stream_that_is_ahead_waits_for_one_without_a_sound(engine: Engine) -> None:
    """Use a clock that stands still: a request that has been heard is ahead of its playback."""
    batch = engine.open_batch(3, 2048, clock=lambda: 0.0)
    decoder, stepped = batch.scheduler.decoder, list[int]()
    decode = decoder.step

    def counted_step(rows: int, longest: int) -> PendingStep:
        stepped.append(rows)
        return decode(rows, longest)

    decoder.step = counted_step  # type: ignore[method-assign]
    plans = {name: make_plan(engine, LONG, seed, 2) for seed, name in enumerate("ab")}
    batch.submit(plans["a"], id="a")
    events: list[Event] = []
    while sum(len(event.samples) for event in events) <= 4 * HOLD_SECONDS * engine.codec.sample_rate:
        events += step(batch)
    stepped.clear()
    batch.submit(plans["b"], id="b")
    while not any(event.id == "b" for event in events):
        events += step(batch)
    assert set(stepped) == {1} and batch.speaking == 2
    stepped.clear()
    while batch.speaking == 2:
        events += step(batch)
    assert 2 in stepped, "both go on when both have been heard"
    samples, _ = join(events + finish(batch))
    for name, plan in plans.items():
        assert np.array_equal(samples[name], spoken(engine, plan).samples)


def test_a_stream_in_a_crowd_begins_with_more(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "START_SECONDS", ((2, 99, 1.0),))
    batch, rate = engine.open_batch(3, 2048), engine.codec.sample_rate
    plans = {name: make_plan(engine, LONG, seed, 2) for seed, name in enumerate("ab")}
    plans["short"] = make_plan(engine, "hello", 3, 0.4)
    for name, plan in plans.items():
        batch.submit(plan, id=name)
    events = finish(batch)
    first = {event.id: len(event.samples) for event in reversed(events)}
    assert min(first["a"], first["b"]) >= 1.0 * rate > first["short"] > 0
    samples, _ = join(events)
    for name, plan in plans.items():
        assert np.array_equal(samples[name], spoken(engine, plan).samples)


def test_a_stream_begins_with_more_where_many_listen(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener who was given all of a text plays it for its whole length, and then asks for the next."""
    monkeypatch.setattr(batch_module, "START_SECONDS", ((99, 2, 1.0),))
    now, rate, first = [0.0], engine.codec.sample_rate, list[float]()
    batch = engine.open_batch(3, 2048, clock=lambda: now[0])
    for moment in (0.0, 0.0, 100.0):
        now[0] = moment
        batch.submit(make_plan(engine, LONG, seconds=2), id="a")
        first.append(len(finish(batch)[0].samples) / rate)
    assert first[0] < 0.2 and first[1] >= 1.0 and first[2] == first[0]
    assert len(batch._played_until) == 1, "what has been played is forgotten"


def test_no_stream_is_held_while_another_waits_for_a_row(engine: Engine) -> None:
    batch = engine.open_batch(2, 1024, clock=lambda: 0.0)
    for seed, name in enumerate("abc"):
        batch.submit(make_plan(engine, "what a long sentence this is", seed, 2), id=name)
    while batch.waiting:
        step(batch)
        assert not any(generation.held for generation in batch.scheduler._rows)
    finish(batch)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 3), st.booleans(), st.integers(0, 12)), min_size=1, max_size=10
    )
)
def test_no_row_is_lost_under_random_requests(engine: Engine, turns: list[tuple[int, int, bool, int]]) -> None:
    batch = engine.open_batch(2, 512)
    events: list[Event] = []
    for number, (text, seed, cancelled, steps) in enumerate(turns):
        running = batch.submit(make_plan(engine, TEXTS[text], seed, 0.3), id=str(number))
        for _ in range(steps):
            events += step(batch)
        if cancelled:
            batch.cancel(running)
    samples, ends = join(events + finish(batch))
    assert len(ends) == len(turns) and not batch.busy
    for number, (text, seed, _, _) in enumerate(turns):
        if ends[str(number)].finish_reason != "cancelled":
            alone = spoken(engine, make_plan(engine, TEXTS[text], seed, 0.3))
            assert np.array_equal(samples[str(number)], alone.samples)


@pytest.mark.slow
def test_the_shipped_model_from_many_threads() -> None:
    engine = load_engine(ModelRef.find_model("fledgling"), device="cpu")
    texts = ("Good morning.", "How are you today?", "It is a fine day.", "Yes.")
    plans = {text: engine.plan(SpeechRequest(text, id=text)) for text in texts}
    batch = engine.open_batch(3, 1024)
    threads = [Thread(target=batch.submit, args=(plan,), kwargs={"id": text}) for text, plan in plans.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    samples, ends = join(finish(batch))
    for text, plan in plans.items():
        assert np.array_equal(samples[text], spoken(engine, plan).samples) and ends[text].finish_reason == "stop"


# Numbers that are not finite


@pytest.fixture(scope="module")
def broken_engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A model in which one code of the first codebook has no embedding: what comes after that code is not finite."""
    family = require_speaking(open_family(str(save_tiny_model(tmp_path_factory.mktemp("broken") / "model"))))
    model = family.load_model(dtype=torch.float32, device="cpu", text_head=False).requires_grad_(False)
    model.get_parameter("model.embed_audio_tokens.embed_audio_tokens.weight")[5] = torch.nan
    return Engine(family, model, family.load_codec())


@pytest.mark.parametrize("slots", [1, 3])
def test_nan_logits_end_their_request_alone_and_leave_nothing_in_its_slot(broken_engine: Engine, slots: int) -> None:
    plans = [make_plan(broken_engine, f"text {number}", seed=number, seconds=0.5) for number in range(24)]
    batch = SpeechBatch(broken_engine, slots, 256)
    for plan in plans:
        batch.submit(plan, id=plan.request.id)
    ended: dict[str, RunningRequest] = {}
    while batch.busy:
        ended |= {event.id: event.running for event in step(batch) if event.ended}
    failed = {id for id, running in ended.items() if running.error is not None}
    assert 2 < len(failed) < 22 and len(ended) == 24
    for id in failed:
        assert isinstance(ended[id].error, SpeakError) and f"{id}: the model's logits are not finite" in str(
            ended[id].error
        )
    for plan in plans:
        alone = SpeechBatch(broken_engine, 1, 256)
        running = alone.submit(plan, id=plan.request.id)
        while alone.busy:
            alone.step()
        assert (running.error is not None) == (plan.request.id in failed)
        if running.error is None:
            assert np.array_equal(running.codes(), ended[plan.request.id].codes())


def test_speaking_with_nan_logits_raises_the_error(broken_engine: Engine) -> None:
    plans = [make_plan(broken_engine, f"text {number}", seed=number, seconds=0.5) for number in range(24)]
    with pytest.raises(SpeakError, match="not finite"):
        list(broken_engine.speak_plans(plans))


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-31])
def test_denormal_temperatures_are_greedy(engine: Engine, temperature: float) -> None:
    def codes(temperature: float) -> Codes:
        request = SpeechRequest("hello", id="a", max_seconds=0.8, temperature=temperature)
        return spoken(engine, engine.plan(request)).codes

    assert np.array_equal(codes(0.0), codes(temperature))
