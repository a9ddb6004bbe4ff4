"""Typing errors: what was meant is named, and nothing is downloaded by a name that is a path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

import myna
from myna.core.errors import MynaError
from tests.command_line import run_command


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def offline(*_: Any, **__: Any) -> str:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    monkeypatch.chdir(tmp_path)
    myna.make_tiny(Path("data/tiny"))
    (tmp_path / "runs" / "vi").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("option", "typed", "meant"),
    [
        ("--model", "data/tinny", "data/tiny"),
        ("--model", "./data/tinny", "data/tiny"),
        ("--model", "dta/tiny", "data/tiny"),
        ("--run", "runs/vii", "runs/vi"),
        ("--run", "runs/vii/adapter", ""),
        ("--run", "rums", "runs"),
    ],
)
def test_a_mistyped_folder_is_answered_with_the_one_that_is_there(
    folders: Path, option: str, typed: str, meant: str
) -> None:
    assert folders.is_dir()
    failed = run_command(["speak", "hi", "--out", "x.wav", option, typed], catch=True).exception
    assert isinstance(failed, MynaError)
    assert typed.removeprefix("./") in failed.what
    assert failed.hint == f"did you mean {meant}?" if meant else "did you mean" not in failed.hint
    assert "hf download" not in failed.hint


def test_a_hub_name_that_is_like_no_folder_is_still_explained(folders: Path) -> None:
    assert folders.is_dir()
    failed = run_command(["speak", "hi", "--out", "x.wav", "--model", "someone/model"], catch=True).exception
    assert isinstance(failed, MynaError) and "hf download someone/model" in failed.hint
