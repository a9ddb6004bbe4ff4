"""Trainings in processes of their own that cost no imports, to be killed at moments of a test's choosing.

    python -m tests.train.resume_helper WORKSPACE

trains a step to have everything imported, then reads jobs from standard input, one JSON object a line, and forks a
child for each. It answers with the child's process id, and with its exit code once it has ended. Torch has one thread
here, or a child would wait for threads that were not forked with it.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from itertools import count
from pathlib import Path
from typing import Any

import torch

from myna import prepare
from myna.audio.files import write_audio
from myna.core.config import Recipe, parse_recipe
from myna.core.errors import MynaError
from myna.core.run_folder import Run
from myna.models.higgs_v2.tiny import save_tiny
from myna.train.loop import run_training
from tests.tone_corpus import SAMPLE_RATE, SPEAKER_PITCHES, tone_speech, write_recordings


class Notes:
    """Observer that keeps messages and metrics."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.rows: list[dict[str, Any]] = []

    def on_message(self, text: str) -> None:
        self.said.append(text)

    def on_start(self, *_: int) -> None: ...

    def on_metrics(self, row: dict[str, Any]) -> None:
        self.rows.append(row)


def make_workspace(folder: Path) -> Path:
    """Make a model, six clips to learn and four to evaluate on."""
    save_tiny(folder / "model", hidden=32)
    write_recordings(folder / "recordings")
    for speaker, pitch in SPEAKER_PITCHES.items():
        for number, text in enumerate(("hello", "you")):
            clip = folder / "others" / speaker / f"{number}.wav"
            write_audio(clip, tone_speech(text, pitch), SAMPLE_RATE)
            clip.with_suffix(".txt").write_text(text)
    for source, out in (("recordings", "prepared"), ("others", "evaluation")):
        prepare(str(folder / source), folder / out, model=str(folder / "model"), device="cpu")
    return folder


def recipe_for(workspace: Path, **changes: dict[str, Any]) -> Recipe:
    """Make the recipe of a training of a few rows a step; `changes` are settings by group."""
    tree: dict[str, dict[str, Any]] = {
        "model": {"source": str(workspace / "model"), "check_pretrained": False},
        "data": {
            "train": str(workspace / "prepared"),
            "row_tokens": 360,
            "packing_window": 4,
            "reference_seconds": [0.2, 10],
        },
        "adapt": {"rank": 4, "alpha": 8},
        "train": {"steps": 6, "batch_size": 2, "learning_rate": 2e-3, "warmup": 2, "device": "cpu"},
    }
    for group, values in changes.items():
        tree[group] = tree.get(group, {}) | values
    return parse_recipe(tree, where="test")


def metrics(folder: Path) -> list[str]:
    """Return the lines of a run's metrics without measured times."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.dumps({key: value for key, value in json.loads(line).items() if key != "speed"}) for line in lines]


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files of a folder except the model card, which names its run and its day."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "README.md"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


class TrainingForks:
    """Parent process of trainings, which imports everything once."""

    def __init__(self, workspace: Path, log: Path) -> None:
        quiet = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        words = [sys.executable, "-m", "tests.train.resume_helper", str(workspace)]
        self.log = log
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            env=quiet,
            cwd=Path(__file__).parents[2],
        )

    def __enter__(self) -> TrainingForks:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def start(self, folder: Path, **job: Any) -> int:
        """Train into the folder with a `recipe`, or go on with it, with `settings` changed; the child's process id.

        `file_limit` is the size in bytes beyond which the child can write no file. `deadly` is the name of a call,
        `fsync`, `rename` or `rmtree`, and its number: there it gets SIGKILL.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"folder": str(folder)} | job) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def wait(self) -> int:
        """Return the exit code of the child, negative for a signal."""
        return self._answer()

    def train(self, folder: Path, **job: Any) -> int:
        self.start(folder, **job)
        return self.wait()

    def _answer(self) -> int:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the helper is gone; it said: {self.log.read_text()[-2000:]}"
        return int(line)


def count_rows(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_rows(folder: Path, rows: int, seconds: float = 60.0) -> None:
    """Wait until a run has written so many lines of metrics, or is finished."""
    end = time.monotonic() + seconds
    while count_rows(folder) < rows and time.monotonic() < end and not (folder / "adapter").exists():
        time.sleep(0.002)


def kill(pid: int, number: signal.Signals, dice: random.Random) -> None:
    """Kill the child after a delay that may fall anywhere into a step or a save."""
    time.sleep(dice.uniform(0, 0.06))
    os.kill(pid, number)


def _work(job: dict[str, Any]) -> None:
    folder = Path(job["folder"])
    if "file_limit" in job:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_limit"], resource.RLIM_INFINITY))
    if "deadly" in job:
        _die_at(*job["deadly"])
    if "recipe" in job:
        recipe = parse_recipe(job["recipe"], where="job")
        run_training(recipe, Run.create(folder, recipe), Notes())
    else:
        run = Run.open(folder, job.get("settings"))
        run_training(run.recipe, run, Notes(), resume=True)


def _die_at(name: str, number: int) -> None:
    owner: Any = {"fsync": os, "rename": Path, "rmtree": shutil}[name]
    call, calls = getattr(owner, name), count(1)

    def deadly(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)

    setattr(owner, name, deadly)


def main(workspace: str) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        recipe = recipe_for(Path(workspace), train={"steps": 1})
        run_training(recipe, Run.create(Path(scratch), recipe), Notes())
    assert threading.active_count() == 1
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                _work(json.loads(line))
                code = 0
            except MynaError as error:
                print(error, file=sys.stderr, flush=True)
            except BaseException:  # noqa: BLE001  the child must never go on as its parent
                traceback.print_exc()
            os._exit(code)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
