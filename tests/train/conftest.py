"""The model and recordings that most training tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.resume_helper import make_workspace


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, six clips to learn and four to evaluate on, prepared."""
    return make_workspace(tmp_path_factory.mktemp("workspace"))
