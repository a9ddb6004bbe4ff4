"""Long texts on a tiny real model: segments in one continuing context, joined into one clip."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from myna.data.conversation import AudioClip, Conversation, Reference
from myna.models import open_family, save_tiny_model
from myna.models.base import RenderedSequence, require_speaking
from myna.speak.batch import SpeechPlan
from myna.speak.engine import Engine, SpeechStream
from myna.speak.request import SpeechRequest
from myna.text.sentences import MAX_SEGMENT_SECONDS, estimate_seconds, frame_budget, voice_pace

SENTENCE = "The wind blew over the hills all night, and in the morning the river had risen above its banks. "
TEXT = " ".join(
    f"{name} says: the wind blew over the hills all night, and the river rose above its banks. "
    f"{name} has not slept at all, and does not want to talk about it."
    for name in ("Anna", "Berta", "Clara", "Dora", "Elsa")
)
SHORT: dict[str, Any] = {"max_seconds": 0.4, "seed": 5}
END = 65


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    family = open_family(str(save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")))
    model = family.load_model(dtype=torch.float32, device="cpu", text_head=False)
    return Engine(family, model, require_speaking(family).load_codec())


@pytest.fixture
def conversations(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Conversation]:
    """Conversations that are rendered, in order."""
    seen: list[Conversation] = []
    render = engine.family.render

    def record(conversation: Conversation) -> RenderedSequence:
        seen.append(conversation)
        return render(conversation)

    monkeypatch.setattr(engine.family, "render", record)
    return seen


@contextmanager
def ending(engine: Engine, *steps: int) -> Iterator[None]:
    """A model that ends its speech at these steps, counted from the first."""
    config: Any = engine.family.config
    bias = torch.zeros(config.num_codebooks * config.codebook_size)
    bias[END] = 1e6
    calls = iter(range(100_000))
    head: Any = engine.model.audio_lm_head
    hook = head.register_forward_hook(lambda _module, _inputs, out: out + bias * ((next(calls) in steps) * 2 - 1))
    yield
    hook.remove()


def speak(engine: Engine, plan: SpeechPlan) -> Any:
    [(_, speech)] = engine.speak_plans([plan])
    return speech


def reference(frames: int = 50) -> Reference:
    codes = np.random.default_rng(0).integers(0, 64, (frames, 8)).astype(np.uint16)
    return Reference("good morning to you", AudioClip("robin", codes))


def turns(conversation: Conversation) -> list[tuple[str, Any]]:
    return [
        (turn.role, part if isinstance(part, str) else part.codes.tobytes())
        for turn in conversation.turns
        for part in turn.parts
    ]


def test_a_text_of_thirty_seconds_is_one_segment_and_a_longer_one_is_split(engine: Engine) -> None:
    assert engine.plan(SpeechRequest(SENTENCE * 3, **SHORT)).segments == ((SENTENCE * 3).strip(),)
    plan = engine.plan(SpeechRequest(TEXT, **SHORT))
    assert len(plan.segments) > 2 and " ".join(plan.segments) == TEXT
    assert all(estimate_seconds(segment) <= MAX_SEGMENT_SECONDS for segment in plan.segments)
    unsplit = engine.plan(SpeechRequest(TEXT, **SHORT), split=False)
    assert unsplit.segments == (TEXT,) and unsplit.max_frames == (10,)


def test_a_text_with_tags_of_speakers_is_not_split(engine: Engine) -> None:
    assert len(engine.plan(SpeechRequest("[SPEAKER0] " + TEXT, **SHORT)).segments) == 1


def test_frames_are_budgeted_by_text_and_pace_and_never_above_the_limit(engine: Engine) -> None:
    long: dict[str, Any] = {"max_seconds": 60}
    [budget] = engine.plan(SpeechRequest("Good morning.", **long)).max_frames
    assert budget == frame_budget("Good morning.", 25.0) < 1500
    slow = reference()
    pace = voice_pace(slow.text, 2.0)
    assert pace != 1.0
    [budget] = engine.plan(SpeechRequest("Good morning.", (slow,), **long)).max_frames
    assert budget == frame_budget("Good morning.", 25.0, pace)
    assert set(engine.plan(SpeechRequest(TEXT, **long | {"max_seconds": 5})).max_frames) == {125}


def test_each_segment_continues_the_conversation(engine: Engine, conversations: list[Conversation]) -> None:
    voice = reference()
    plan = engine.plan(SpeechRequest(TEXT, (voice,), scene="A room.", max_seconds=2, seed=1))
    first, second, third = plan.segments[:3]
    del conversations[1:-1]
    with ending(engine, 4, 12 + 5):  # eight codebooks end one after another
        batch = engine.batch_of(1, plan.max_positions)
        running = batch.submit(plan)
        while len(running._finished) < 2:
            batch.step()
        batch.cancel(running)
    codes = [part.tobytes() for part in running._finished[:2]]
    assert [len(part) for part in running._finished[:2]] == [4, 5] and not running.warnings
    opening = [("user", voice.text), ("assistant", voice.clip.codes.tobytes())]
    said = [turns(conversation) for conversation in conversations if conversation.turns[-1].parts == (third,)]
    assert said[-1] == [*opening, ("user", second), ("assistant", codes[1]), ("user", third)], "the last one stays"
    said = [turns(conversation) for conversation in conversations if conversation.turns[-1].parts == (second,)]
    assert said[-1] == [*opening, ("user", first), ("assistant", codes[0]), ("user", second)]
    assert {conversation.scene for conversation in conversations} == {"A room."}


def test_without_a_reference_the_first_segment_stays_the_voice(
    engine: Engine, conversations: list[Conversation]
) -> None:
    plan = engine.plan(SpeechRequest(TEXT, max_seconds=2, seed=1))
    with ending(engine, 4, 12 + 5, 12 + 13 + 6):
        speech = speak(engine, plan)
    fourth = [turns(one) for one in conversations if turns(one)[-1][1] == plan.segments[3]][-1]
    texts = [part for role, part in fourth if role == "user"]
    assert texts == [plan.segments[0], plan.segments[2], plan.segments[3]]
    assert fourth[1][1] == speech.codes[:4].tobytes() and fourth[3][1] == speech.codes[9:15].tobytes()


def test_a_runaway_is_reported_and_is_no_context(engine: Engine, conversations: list[Conversation]) -> None:
    plan = engine.plan(SpeechRequest(TEXT, **SHORT))
    with ending(engine):
        speech = speak(engine, plan)
    assert speech.finish_reason == "length" and not speech.stopped
    assert len(speech.warnings) == len(plan.segments)
    assert speech.warnings[0].startswith('cut after 0.4 s without finding its end: "Anna says')
    assert all(len(conversation.turns) == 1 for conversation in conversations)


def test_an_empty_segment_is_reported(engine: Engine) -> None:
    plan = engine.plan(SpeechRequest(TEXT, max_seconds=2))
    with ending(engine, 3, 11, 19 + 2, 31 + 2):
        speech = speak(engine, plan)
    assert speech.warnings and speech.warnings[0].startswith("ended at once, nothing was said")


def test_the_clip_is_the_joined_codes_and_a_stream_has_its_samples(engine: Engine) -> None:
    plan = engine.plan(SpeechRequest(TEXT, (reference(),), max_seconds=1.2, seed=3))
    speech = speak(engine, plan)
    assert np.array_equal(speech.samples, engine.codec.decode(speech.codes)), "one clip: no boundary of its own"
    stream = SpeechStream(engine, plan)
    pieces = list(stream)
    assert len(plan.segments) > 2 and len(pieces) > 2
    assert np.array_equal(np.concatenate(pieces), speech.samples)
    assert (stream.finish_reason, stream.warnings) == (speech.finish_reason, speech.warnings)


def test_a_context_that_does_not_fit_is_left_out(engine: Engine, conversations: list[Conversation]) -> None:
    plan = engine.plan(SpeechRequest(TEXT, max_seconds=2, seed=1))
    roomy = engine._batch
    engine._batch = None
    try:
        tight = replace(plan, max_positions=len(plan.prompt) + max(plan.max_frames))
        with ending(engine, *range(4, 100, 12)):
            assert len(speak(engine, tight).codes)
    finally:
        engine._batch = roomy
    tried = [len(conversation.turns) for conversation in conversations]
    assert max(tried) == 5 and tried[-1] < 5


def test_takes_share_a_prompt_and_are_what_their_seeds_say(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = engine.plan(SpeechRequest("hello there", **SHORT))
    engine.batch_of(3, plan.max_positions)
    assert engine._batch is not None
    decoder, prefills = engine._batch.scheduler.decoder, list[int]()
    prefill = decoder.prefill

    def record(row: int, prompt: RenderedSequence) -> None:
        prefills.append(row)
        prefill(row, prompt)

    monkeypatch.setattr(decoder, "prefill", record)
    takes = dict(engine.speak_plans([plan.take(number) for number in range(3)]))
    assert prefills == [0]
    for number, take in takes.items():
        alone = speak(engine, engine.plan(SpeechRequest("hello there", **SHORT | {"seed": 5 + number})))
        assert np.array_equal(take.codes, alone.codes)
    assert len({take.codes.tobytes() for take in takes.values()}) == 3


def test_abandoned_plans_free_their_rows(engine: Engine) -> None:
    plans = [engine.plan(SpeechRequest("hello", id=str(n), max_seconds=0.2 + n)) for n in range(3)]
    spoken = engine.speak_plans(plans)
    assert next(spoken)[0] == 0
    spoken.close()  # type: ignore[attr-defined]
    assert engine._batch is not None
    engine._batch.step()
    assert not engine._batch.busy
