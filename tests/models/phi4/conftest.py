"""Tiny Phi-4-multimodal, and a few clips of unequal length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Phi4MultimodalFeatureExtractor, Phi4MultimodalForCausalLM

from myna.data.codec import Codes, Samples
from myna.data.conversation import AudioClip, Conversation, answer_conversation
from myna.models import open_family
from myna.models.phi4.family import Phi4
from myna.models.phi4.tiny import save_tiny

FRAMES = (57, 100, 33, 19)
FEATURE_EXTRACTOR = Phi4MultimodalFeatureExtractor()


def transformers_features(wave: Samples) -> dict[str, Any]:
    return dict(FEATURE_EXTRACTOR(torch.from_numpy(wave), sampling_rate=16_000, return_tensors="pt"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("phi4") / "model")


@pytest.fixture(scope="session")
def family(folder: Path) -> Phi4:
    opened = open_family(str(folder))
    assert isinstance(opened, Phi4)
    return opened


@pytest.fixture
def model(family: Phi4) -> Any:
    return family.load_model(dtype=torch.float32, device="cpu", text_head=True)


@pytest.fixture(scope="session")
def stock(folder: Path) -> Any:
    """transformers' own model with its own forward."""
    return Phi4MultimodalForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="session")
def waves() -> list[Samples]:
    dice = np.random.default_rng(0)
    return [(0.1 * dice.standard_normal(160 * frames)).astype(np.float32) for frames in FRAMES]


@pytest.fixture(scope="session")
def codes(family: Phi4, waves: list[Samples]) -> list[Codes]:
    ear = family.load_encoder()
    return [ear.encode(wave[None])[0] for wave in waves]


@pytest.fixture(scope="session")
def asked(codes: list[Codes]) -> list[Conversation]:
    """Answered conversations."""
    return [
        answer_conversation("How?", AudioClip(f"c{n}", one), id=f"q{n}", answer=f"answer {n}")
        for n, one in enumerate(codes)
    ]


@pytest.fixture(scope="session")
def left_open(codes: list[Codes]) -> list[Conversation]:
    return [answer_conversation("How?", AudioClip(f"c{n}", one), id=f"q{n}") for n, one in enumerate(codes)]
