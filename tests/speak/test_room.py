"""Room in a slot: cloning requests of usual sizes are spoken by a server with its default settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from myna.core.errors import SpeakError
from myna.data.conversation import AudioClip, Reference
from myna.models import open_family, save_tiny_model
from myna.models.base import require_speaking
from myna.models.ref import ModelRef
from myna.serve.messages import EngineSettings
from myna.speak.engine import Engine
from myna.speak.loading import load_engine
from myna.speak.request import SpeechRequest

POSITIONS = EngineSettings("fledgling").positions
SAID = "The birch canoe slid on the smooth planks, and the men on shore watched it go without a word. "
SENTENCE = "The wind blew over the hills all night, and in the morning the river had risen above its banks. "
END = 65
LONG_SENTENCE = "It is late. " + "and then the wind blew over the hills all night long without any end, " * 8


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load_engine(ModelRef.find_model("fledgling"), device="cpu")


def reference(engine: Engine, seconds: float) -> Reference:
    """A recording of so many seconds, spoken at a usual pace."""
    codec = engine.codec
    codes = np.random.default_rng(0).integers(
        0, codec.codebook_size, (int(seconds * codec.frame_rate), codec.codebooks)
    )
    return Reference((SAID * 12)[: int(14 * seconds)], AudioClip("voice", codes.astype(np.uint16)))


@pytest.mark.parametrize("seconds", [8, 15, 20, 30])
def test_ordinary_cloning_requests_are_accepted(engine: Engine, seconds: float) -> None:
    voice = reference(engine, seconds)
    for text in (*((SENTENCE * 7)[:length] for length in (150, 230, 300, 360, 420, 600)), LONG_SENTENCE):
        request = SpeechRequest(text, (voice,), max_seconds=60)
        plan = engine.plan(request, positions=POSITIONS)
        for segment, frames in zip(plan.segments, plan.least_frames, strict=True):
            prompt = engine.render(plan.request, plan.references, segment)
            assert len(prompt) + frames + 9 <= POSITIONS, f"{len(text)} characters: {segment}"
        assert " ".join(plan.segments) == " ".join(text.split())


def test_a_reference_that_leaves_no_room_is_refused_before_anything_is_spoken(engine: Engine) -> None:
    request = SpeechRequest(SENTENCE, (reference(engine, 60),))
    with pytest.raises(SpeakError, match=r"with 60\.0 s of references") as error:
        engine.plan(request, positions=POSITIONS)
    assert "--positions" in error.value.hint and SENTENCE[:20] not in error.value.what
    assert engine.plan(request).max_positions > POSITIONS, "the command line makes room"


def test_a_long_sentence_late_in_a_text_is_spoken_to_its_end(tmp_path: Path) -> None:
    """The model finds no end: each segment takes all of its frames."""
    family = open_family(str(save_tiny_model(tmp_path / "model")))
    model = family.load_model(dtype=torch.float32, device="cpu", text_head=False)
    engine = Engine(family, model, require_speaking(family).load_codec())
    config: Any = family.config
    never = torch.zeros(config.num_codebooks, config.codebook_size)
    never[:, END] = -1e6
    head: Any = engine.model.audio_lm_head
    head.register_forward_hook(lambda _module, _inputs, out: out + never.flatten())
    voice = reference(engine, 4)
    text = f"It is late. {LONG_SENTENCE}"
    batch = engine.open_batch(1, 768)
    plan = engine.plan(SpeechRequest(text, (voice,), seed=1), positions=batch.positions)
    running = batch.submit(plan)
    while batch.busy:
        batch.step()
    assert running.error is None and len(running.warnings) == len(plan.segments) > 2, "all segments were cut"
    assert sum(plan.least_frames) <= running.frames <= sum(plan.max_frames)


def test_an_exact_batch_takes_what_the_server_takes() -> None:
    exact = load_engine(ModelRef.find_model("fledgling"), device="cpu", exact=True)
    plan = exact.plan(SpeechRequest(SENTENCE * 4, (reference(exact, 15),)))
    assert exact.batch_of(1, plan.max_positions).positions == POSITIONS
