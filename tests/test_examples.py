"""What newcomers type: the notebook and the README's tour run as they stand there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "first_voice.ipynb"
README = ROOT / "README.md"


@pytest.mark.slow
def test_the_notebook_runs_and_speaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    namespace: dict[str, Any] = {}
    for number, cell in enumerate(cells):
        assert not cell["outputs"], "the notebook is committed without outputs"
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), namespace)
    assert (tmp_path / "good-morning.wav").stat().st_size > 10_000
    assert "<audio" in namespace["speech"]._repr_html_()


def tour() -> list[str]:
    """The commands of the README's tour, lines that end in a backslash joined with the next."""
    block = re.search(r"## A short tour\n.*?```bash\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert block
    return block[1].replace("\\\n", "").splitlines()


@pytest.mark.slow
def test_the_tour_of_the_readme_runs_as_it_stands(tmp_path: Path) -> None:
    """In a folder in which `make demo` was run, here with two steps of training and no ASR."""
    script = tmp_path / "bin" / "myna"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m myna "$@"\n')
    script.chmod(0o755)
    environment = os.environ | {"PATH": f"{script.parent}{os.pathsep}{os.environ['PATH']}"}
    commands = tour()
    assert commands[0] == "source .venv/bin/activate"
    for command in ["myna demo --out demo --set train.steps=2 --set train.evaluate_every=2", *commands[1:]]:
        result = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    assert (tmp_path / "good-morning.wav").is_file()
