"""Gradient checkpointing: layers are computed again in the backward pass, and every gradient stays the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from myna.data.loader import Share
from myna.models import open_family
from myna.models.higgs_v2.tiny import save_tiny
from myna.train.loop import make_loader
from myna.train.precision import Precision
from myna.train.processes import start
from myna.train.streams import Tally, stream_weights
from myna.train.student import Student
from tests.train.resume_helper import make_birds, recipe_for


@pytest.fixture(scope="module")
def birds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With four layers, of which every second is not every one."""
    folder = make_birds(tmp_path_factory.mktemp("birds"))
    save_tiny(folder / "deep", hidden=32, layers=4)
    return folder


def gradients(birds: Path, checkpointing: Any, adapt: dict[str, Any]) -> tuple[dict[str, Any], int]:
    recipe = recipe_for(
        birds,
        model={"source": str(birds / "deep")},
        adapt=adapt,
        loss={"text_weight": 0.5},
        train={"checkpointing": checkpointing},
    )
    precision = Precision("fp32", "a test")
    accelerator = start(recipe, precision, torch.device("cpu"), birds)
    family = open_family(recipe.model.source)
    student = Student.make(recipe, family, precision, accelerator, lambda _: None)
    runs = 0

    def count(*_: Any) -> None:
        nonlocal runs
        runs += 1

    for layer in family.layers(accelerator.unwrap_model(student.objective)):
        layer.register_forward_pre_hook(count)
    stream = make_loader(recipe, family, recipe.data.train).steps(2, 1, Share())
    passes, tally = next(stream), Tally.of(len(family.streams))
    stream.close()
    tally.counts = torch.stack([batch.counts for batch in passes]).sum(0)
    torch.manual_seed(5)
    student.backward(passes, stream_weights(family.streams, recipe.loss), tally)
    found: dict[str, Any] = {name: parameter.grad for name, parameter in student.trainables.items()}
    return found | {"losses": tally.sums}, runs


@pytest.mark.parametrize(
    "adapt",
    [
        {"dropout": 0.5, "train_modules": ["audio_head", "audio_embedding"]},
        {"dora": True, "dropout": 0.1},
        {"mode": "full", "rank": 16, "alpha": 32},
    ],
    ids=["lora", "dora", "full"],
)
def test_gradients_are_the_same(birds: Path, adapt: dict[str, Any]) -> None:
    plain, plain_runs = gradients(birds, "none", adapt)
    assert plain_runs == 2 * 4, "two passes through four layers"
    assert all(gradient is not None for gradient in plain.values())
    for checkpointing, extra in (("full", 4), (2, 2)):
        found, runs = gradients(birds, checkpointing, adapt)
        assert runs == 2 * (4 + extra), "the layers really are computed again"
        assert found.keys() == plain.keys()
        for name, gradient in plain.items():
            assert torch.equal(found[name], gradient), (checkpointing, name)
