"""Every shipped recipe parses, and says only what differs from the defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from myna.config import Settings, load_recipe

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("**/*.yaml"))
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
    path.write_text("model: {source: x}\ndata: {train: y, pack: true}\nadapt: {rank: 16}\ntrain: {steps: 1, clip: 1}")
    found = repeated(yaml.safe_load(path.read_text()), load_recipe(path))
    assert found == ["data.pack", "adapt.rank", "train.clip"]
