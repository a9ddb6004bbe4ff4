"""A command that is killed at any moment and given again leaves the same files: `tests/kill_commands.py` tries many."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from myna.core.config import parse_recipe
from myna.core.errors import OutputError, TrainingError
from myna.core.io import atomic_folder, claim_folder
from myna.core.run_folder import Run, lock_run

ROOT = Path(__file__).parents[1]
HALF_WRITTEN = ".0123456789ab.tmp"
"""Name of a file that a kill leaves behind in the moment before it gets its name."""


@pytest.mark.slow
def test_killed_at_random_moments_every_command_ends_as_undisturbed(tmp_path: Path) -> None:
    words = ["--kills", "6", "--fresh-every", "0", "--folder", tmp_path / "work", "--out", tmp_path / "kills.json"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.kill_commands", *map(str, words)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    report = json.loads((tmp_path / "kills.json").read_text())
    assert report["kills"] >= 6 and not report["faults"] and len(report["by_command"]) == 5


def test_a_run_killed_before_its_recipe_was_written_can_be_started_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for name in (HALF_WRITTEN, ".lock"):
        (folder / name).write_text("half")
    recipe = parse_recipe({"model": {"source": "m"}, "data": {"train": "d"}, "train": {"steps": 1}}, where="test")
    with lock_run(folder, new=True):
        Run.create(folder, recipe)
    assert (folder / "config.yaml").is_file()
    (folder / ".notes.tmp").write_text("a user's")
    with pytest.raises(TrainingError, match="already holds"):
        Run.create(folder, recipe)


def test_an_evaluation_killed_before_its_folder_was_marked_can_be_started_again(tmp_path: Path) -> None:
    (tmp_path / HALF_WRITTEN).write_text("eval")
    claim_folder(tmp_path, "evaluation")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("a user's")
    with pytest.raises(OutputError, match="not empty"):
        claim_folder(tmp_path / "other", "evaluation")


def test_what_a_killed_process_has_half_written_is_removed_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from myna.core.io import atomic_folder\n"
        "with atomic_folder(Path('out')) as folder:\n"
        "    (folder / 'large').write_text('half'); print('writing', flush=True); sys.stdin.read()"
    )

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None and process.stdout.readline() == "writing\n"
        return process

    killed = start()
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    (half,) = tmp_path.iterdir()
    living = start()
    (scratch,) = tmp_path.iterdir()
    assert scratch != half and (scratch / "new" / "large").is_file()
    with atomic_folder(tmp_path / "out") as folder:
        (folder / "mine").write_text("whole")
    assert {path.name for path in tmp_path.iterdir()} == {"out", scratch.name}
    living.communicate()
    assert living.returncode and {path.name for path in tmp_path.iterdir()} == {"out"}
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
