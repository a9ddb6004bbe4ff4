"""Every shipped recipe parses, says only what differs from the defaults, and fits the card it is named for."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from myna.core.config import Settings, load_recipe
from myna.models import open_family
from myna.train import memory_plan
from myna.train.memory_plan import LargestBatch, plan_memory
from myna.train.precision import Precision
from tests.train.rendered import speech

ROOT = Path(__file__).parents[1]
RECIPES = sorted([*(ROOT / "src/myna/recipes").glob("*.yaml"), *(ROOT / "training").glob("**/*.yaml")])
CARDS = {"8gb": (7.4, 7.3), "16gb": (15.4, 14.0), "24gb": (23.4, 22.0), "h200": (139.0, 60.0)}
"""GiB that a card has for us, less what the driver takes, and the most that its recipe may take of them."""
by_name = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)


def repeated(tree: dict[str, Any], settings: Settings, prefix: str = "") -> list[str]:
    """Keys a recipe sets to what they are anyway."""
    found = []
    for key, value in tree.items():
        parsed, field = getattr(settings, key), type(settings).model_fields[key]
        if isinstance(parsed, Settings):
            found += repeated(value, parsed, f"{prefix}{key}.")
        elif not field.is_required() and parsed == field.default:
            found.append(prefix + key)
    return found


def test_there_are_recipes() -> None:
    assert {path.stem for path in RECIPES} >= {"vietnamese_tts", "zero_shot_voice_cloning", "arabic_voice_cloning"}


@by_name
def test_it_parses_and_repeats_no_default(path: Path) -> None:
    recipe = load_recipe(path)
    assert repeated(yaml.safe_load(path.read_text(encoding="utf-8")), recipe) == []


@by_name
def test_it_is_named_after_its_file(path: Path) -> None:
    assert load_recipe(path).name == path.stem


def test_a_repeated_default_would_be_found(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(
        "model: {source: x}\ndata: {train: y, pack: true}\nadapt: {rank: 16}\ntrain: {steps: 1, max_grad_norm: 1}"
    )
    found = repeated(yaml.safe_load(path.read_text()), load_recipe(path))
    assert found == ["data.pack", "adapt.rank", "train.max_grad_norm"]


@pytest.mark.parametrize("card", CARDS)
def test_a_recipe_fits_its_card_and_says_what_it_takes(card: str, monkeypatch: pytest.MonkeyPatch) -> None:
    room, most = CARDS[card]
    path = next(path for path in RECIPES if path.stem == f"higgs_v2_lora_{card}")
    recipe, family = load_recipe(path), open_family("higgs-v2")
    monkeypatch.setattr(memory_plan, "available_memory", lambda _: int(room * 2**30))
    few = LargestBatch((speech(family, 150, 500),) * 2, 650)
    planned = plan_memory(family, recipe, Precision("bf16", "a test"), torch.device("cuda"), few)
    planned = replace(planned, tokens=recipe.data.row_tokens)
    planned = planned.with_least_recomputation() if planned.automatic else planned
    assert planned.total <= most * 2**30, planned.table()
    told = re.search(r"Planned peak: ([\d.]+) GiB", path.read_text(encoding="utf-8"))
    assert told and float(told[1]) == pytest.approx(planned.total / 2**30, rel=0.03)
    assert recipe.data.row_tokens * recipe.train.batch_size == 16_384, "one card learns as the other"
    assert planned.recomputed == (28 if card in ("8gb", "16gb") else 0)
