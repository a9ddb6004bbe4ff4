"""Memory plans at true size: the paper's recipe fits a GPU with 24 GB and fp16 alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from myna.core.config import load_recipe, parse_recipe
from myna.data.conversation import Conversation
from myna.models import open_family
from myna.models.base import IGNORE_INDEX, RenderedSequence, TokenSpan
from myna.models.phi4.family import Phi4
from myna.train import memory_plan
from myna.train.memory_plan import LargestBatch, plan_memory
from myna.train.precision import Precision

RECIPE = Path(__file__).parents[3] / "src/myna/recipes" / "pronunciation_paper_r64.yaml"
PROMPT, ANSWER = 40, 130
"""Tokens of a usual sentence of SpeechOcean762."""


def heard(seconds: float) -> RenderedSequence:
    """Make a sequence without a tokenizer, which a built-in configuration does not have."""
    sound = int(seconds * 12.5)
    labels = np.full(PROMPT + sound + ANSWER, IGNORE_INDEX)
    labels[-ANSWER:] = 1
    piece = TokenSpan("audio", 10, 10 + sound, "", supervised=False)
    codes = np.zeros((sound, 640), np.int64)
    return RenderedSequence(
        "x", np.ones_like(labels), codes, labels, np.full_like(codes, IGNORE_INDEX), (piece,), seconds
    )


def test_the_papers_recipe_fits_a_24_gb_gpu_in_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "available_memory", lambda _: int(23.4 * 2**30))
    monkeypatch.setattr(memory_plan, "_is_ampere_or_later", lambda _: False)
    recipe = load_recipe(RECIPE)
    sequences = tuple(heard(6) for _ in range(recipe.train.micro_batch_size))
    planned = plan_memory(
        open_family("phi-4-multimodal"),
        recipe,
        Precision("fp16", "a Turing card"),
        torch.device("cuda"),
        LargestBatch(sequences, len(sequences[0])),
    )
    assert planned.fits and planned.trained == 4 * 92_274_688, planned.table()
    assert 7.5 * 2**30 < planned.frozen < 8.5 * 2**30


def test_training_in_full_can_be_planned_in_half_precision(family: Phi4, asked: list[Conversation]) -> None:
    """Weights are fp32 then, and autocast casts those of convolutions too."""
    tree = {
        "model": {"source": family.source},
        "data": {"train": "x"},
        "adapt": {"mode": "full"},
        "train": {"steps": 1},
    }
    sequences = tuple(family.render(one) for one in asked)
    planned = plan_memory(
        family,
        parse_recipe(tree, where="a test"),
        Precision("bf16", "a test"),
        torch.device("cpu"),
        LargestBatch(sequences, max(map(len, sequences))),
    )
    whole = family.load_model(dtype=torch.float32, device="meta", text_head=True)
    assert planned.trained == 4 * sum(parameter.numel() for parameter in whole.parameters())
