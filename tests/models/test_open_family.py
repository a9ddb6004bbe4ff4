"""Models that come with the package, opened by name."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import myna.models
from myna.core.errors import ModelError
from myna.models import SHIPPED, open_family

ROOT = Path(__file__).parents[2]


def test_a_model_whose_weights_are_not_there_says_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(myna.models.SHIPPED, "fledgling", tmp_path / "fledgling")
    with pytest.raises(ModelError, match="not in this copy of Myna") as caught:
        open_family("fledgling")
    assert "pip install" in caught.value.hint


def test_a_model_of_the_package_has_no_revisions() -> None:
    with pytest.raises(ModelError, match="no revision main"):
        open_family("fledgling", revision="main")


def test_package_data_contains_the_shipped_folders() -> None:
    package_data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["myna"]
    for folder in SHIPPED.values():
        inside = folder.relative_to(ROOT / "src" / "myna")
        for file in (inside / "model-00001-of-00002.safetensors", inside / "codec" / "config.json"):
            assert any(file.match(pattern) for pattern in package_data), file
