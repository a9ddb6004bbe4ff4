"""Tiny model of the real classes, and conversations of random codes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from myna.data.codec import Codes
from myna.data.conversation import AudioClip, Conversation, Reference, speech_conversation
from myna.models import open_family
from myna.models.base import Family, RenderedSequence, Sampling, require_speaking
from myna.models.higgs_v2.tiny import save_tiny
from myna.speak.scheduler import BatchScheduler, Generation


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def family(checkpoint: Path) -> Family:
    return open_family(str(checkpoint))


@pytest.fixture(scope="session")
def model(family: Family) -> nn.Module:
    return family.load_model(dtype=torch.float32, device="cpu", text_head=True)


def random_codes(frames: int, seed: int = 0) -> Codes:
    return np.random.default_rng(seed).integers(0, 64, (frames, 8)).astype(np.uint16)


def cloning(text: str = "hello", reference: int = 5, target: int | None = 7, seed: int = 0, **how: str) -> Conversation:
    """Return a cloning conversation with random codes; `target=None` leaves it open."""
    return speech_conversation(
        text,
        id=text,
        references=(Reference("as I said", AudioClip("reference", random_codes(reference, seed))),)
        if reference
        else (),
        target=AudioClip("target", random_codes(target, seed + 1), target=True) if target else None,
        **how,  # type: ignore[arg-type]
    )


def generate(
    family: Family, model: nn.Module, prompts: Sequence[RenderedSequence], sampling: Sampling
) -> list[Generation]:
    """Generate for prompts in a batch of their own, up to `max_seconds` each."""
    speaking = require_speaking(family)
    scheduler = BatchScheduler(speaking.speech_decoder(model, len(prompts), 256))
    frames = int(sampling.max_seconds * speaking.frame_rate)
    generations = [scheduler.submit(prompt, sampling, frames) for prompt in prompts]
    while scheduler.busy:
        scheduler.advance()
    return generations
