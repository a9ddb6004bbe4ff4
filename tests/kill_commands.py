"""SIGKILL at random moments of prepare, train, resume, evaluate and merge: run again, each must end as undisturbed.

    python -m tests.kill_commands --kills 200 --seed 0 --out kills.json

The commands are those of the command line, on a tiny model. A command is started, its process group is killed at a
random moment of its life, or right before or after one of the operations by which it changes files, and it is given
again until it ends, at times killed once more. What then lies there is compared, byte for byte, with what one
undisturbed command has written; and right after each kill, whatever has its name must already be whole. Most processes
are forked from one that has imported everything; every tenth is started as a user would.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml
from tqdm import tqdm  # type: ignore[import-untyped]

from myna.audio.files import write_audio
from tests.tone_corpus import SAMPLE_RATE, SPEAKER_PITCHES, tone_speech

SECOND_KILL_SHARE = 0.3
"""Share of the commands given again that are killed once more."""
OPERATION_SHARE = 0.5
"""Share of the kills of forked processes that come at an operation on files, and not at a moment of time."""
FRESH_START_EVERY = 10
TIMEOUT_SECONDS = 300.0
LINES = ("follow me", "good morning", "what a fine day", "hello you", "oh no", "come along", "so it is", "never mind")
HELD_OUT = ("one two", "at noon")
TEMPORARY = re.compile(r"^\.(.*\.)?(tmp|old)$|^\.[\w-]+\.\w{8}$")
"""Names of what is half-written or half-removed."""
CLOCK_KEYS = ("speed",)
ABSENT = dict.fromkeys(("resemblyzer", "distillmos", "xls_r_sqa", "faster_whisper"))
"""Scorers that need not be there: they take most of the time."""
FRESH_COMMAND = f"import sys; sys.modules.update({ABSENT}); from myna.commands import main; main()"


@dataclass(slots=True)
class KillReport:
    """Counts of what was killed, and how it ended."""

    kills: int = 0
    commands: int = 0
    """Commands that were killed at least once and then brought to their end."""
    by_command: dict[str, int] = field(default_factory=dict)
    at_operations: int = 0
    """Kills right before or after an operation that changes files."""
    too_late: int = 0
    """Moments at which the command had already ended: no kills."""
    fresh_starts: int = 0
    killed_at: dict[str, list[float]] = field(default_factory=dict)
    """Share of the command's undisturbed life."""
    leftovers: dict[str, int] = field(default_factory=dict)
    """Temporary files and folders that were still there at the end, by command."""
    faults: list[str] = field(default_factory=list)
    operations: dict[str, int] = field(default_factory=dict)
    """Operations on files of each command."""
    undisturbed_seconds: dict[str, list[float]] = field(default_factory=dict)
    """Seconds by command, forked and started anew."""
    seconds: float = 0.0


FILE_EVENTS = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate", "shutil.rmtree")
"""Audit events of operations that change files, beside `open`."""


@dataclass(frozen=True, slots=True)
class FileOperation:
    """A moment to be killed at: the `number`th operation that changes files below `folder`, before or after it."""

    folder: Path
    number: int
    after: bool
    count_file: Path
    """File for the number of operations, written if the process ends by itself."""

    def watch(self) -> Callable[[], None]:
        """Kill this process at the operation; call what is returned at the end."""
        count = 0

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal count
            is_opened = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            if not is_opened and event not in FILE_EVENTS:
                return
            if not any(isinstance(name, str | os.PathLike) and self._is_below(name) for name in arguments[:2]):
                return
            count += 1
            if count == self.number:
                if self.after:
                    self._perform(event, arguments)
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)

        def save_count() -> None:
            self.count_file.write_text(str(count))

        return save_count

    def _is_below(self, name: str | os.PathLike[str]) -> bool:
        return os.fspath(name).startswith(str(self.folder))

    def _perform(self, event: str, arguments: tuple[Any, ...]) -> None:
        match event:
            case "open":
                os.open(arguments[0], arguments[2], 0o644)  # the file is there, or emptied, and nothing is written yet
            case "os.rename":
                Path(arguments[0]).replace(arguments[1])


class CommandError(Exception):
    """A command did not end as it should."""


class Commands:
    """Starts commands in process groups of their own, forked from this process or as a user would."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def start(self, words: list[str], *, fresh: bool = False, at: FileOperation | None = None) -> int:
        """The id of the process and of its group."""
        if fresh:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            with self.log.open("a") as log:
                return subprocess.Popen(
                    [sys.executable, "-c", FRESH_COMMAND, *words],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                ).pid
        pid = os.fork()
        if pid:
            return pid
        code = 70
        try:
            os.setsid()
            for number in (1, 2):
                os.dup2(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
            finish = at.watch() if at is not None else lambda: None
            code = run_command(words)
            finish()
        except BaseException:  # noqa: BLE001 - a child must never go on as its parent
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def wait(self, pid: int, seconds: float = TIMEOUT_SECONDS) -> int | None:
        """Return the exit code, negative for a signal; None if it has not ended by then."""
        end = time.monotonic() + seconds
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() >= end:
                return None
            time.sleep(min(0.005, max(0.0, end - time.monotonic())))

    def finish(self, words: list[str], *, fresh: bool = False, at: FileOperation | None = None) -> float:
        """Run a command to its end; its seconds."""
        self.log.write_text("")
        start = time.monotonic()
        pid = self.start(words, fresh=fresh, at=at)
        code = self.wait(pid)
        if code is None:
            os.killpg(pid, signal.SIGKILL)
            self.wait(pid)
        if code != 0:
            raise CommandError(f"myna {' '.join(words)} ended with {code}:\n{self.log.read_text()[-3000:]}")
        return time.monotonic() - start

    def kill(self, words: list[str], moment: float | FileOperation, *, fresh: bool = False) -> bool:
        """Start a command and kill its process group after so many seconds, or at an operation; whether it lived."""
        self.log.write_text("")
        at = moment if isinstance(moment, FileOperation) else None
        pid = self.start(words, fresh=fresh, at=at)
        code = self.wait(pid, TIMEOUT_SECONDS if isinstance(moment, FileOperation) else moment)
        if code is None:
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:  # the process was killed before it made its group, and has no children
                os.kill(pid, signal.SIGKILL)
            self.wait(pid)
            return True
        if code == -signal.SIGKILL:
            return True
        if code != 0:
            raise CommandError(f"myna {' '.join(words)} ended with {code}:\n{self.log.read_text()[-3000:]}")
        return False


def run_command(words: list[str]) -> int:
    """A command as `myna` runs it; its exit code."""
    from myna.commands import main

    sys.argv = ["myna", *words]
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


# The workspace and what the commands write undisturbed


def record(folder: Path, lines: tuple[str, ...]) -> None:
    for speaker, pitch in SPEAKER_PITCHES.items():
        for number, text in enumerate(lines):
            clip = folder / speaker / f"{speaker}-{number}.wav"
            write_audio(clip, tone_speech(text, pitch), SAMPLE_RATE)
            clip.with_suffix(".txt").write_text(text + "\n", encoding="utf-8")


def make_workspace(folder: Path) -> None:
    """Recordings, a tiny model and a recipe; the held-out recordings are prepared."""
    from myna.models import save_tiny_model

    record(folder / "recordings", LINES)
    record(folder / "others", HELD_OUT)
    save_tiny_model(folder / "model")
    recipe = {
        "name": "tones",
        "model": {"source": str(folder / "model"), "check_pretrained": False},
        "data": {
            "train": str(folder / "undisturbed" / "prepare"),
            "evaluation": str(folder / "others-prepared"),
            "row_tokens": 512,
            "reference_seconds": [0.2, 10],
        },
        "adapt": {"rank": 4, "alpha": 8, "dropout": 0.1},
        "train": {
            "steps": 12,
            "batch_size": 2,
            "learning_rate": 2e-3,
            "warmup": 2,
            "evaluate_every": 4,
            "save_every": 2,
            "keep_checkpoints": 100,
            "ema_decay": 0.9,
            "device": "cpu",
        },
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder but temporary ones and locks."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not any(TEMPORARY.match(part) or part.startswith(".lock") for part in name.split("/")):
            found[name] = path.read_bytes()
    return found


def count_leftovers(folder: Path) -> int:
    """Temporary files and folders in a folder or beside it."""
    beside = [path for path in folder.parent.iterdir() if path.name.startswith(f".{folder.name}.")]
    inside = [path for path in folder.rglob("*") if TEMPORARY.match(path.name)] if folder.is_dir() else []
    return len(beside) + len(inside)


def without_paths(data: bytes, folder: Path) -> bytes:
    return data.replace(str(folder).encode(), b"OUT")


def training_rows(data: bytes) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in data.decode().splitlines()]
    return [{key: value for key, value in row.items() if key not in CLOCK_KEYS} for row in rows]


class Command:
    """A command to be killed: its words, and how its output compares with the undisturbed one."""

    def __init__(self, name: str, words: Callable[[Path], list[str]], again: Callable[[Path], list[str]]) -> None:
        self.name, self.words, self.again = name, words, again
        self.undisturbed: dict[str, bytes] = {}
        self.reference = Path()
        self.seconds = {False: 0.0, True: 0.0}
        """Seconds of an undisturbed command, forked and fresh."""
        self.operations = 0
        """Number of operations that change files."""
        self.begin: Path | None = None
        """Folder that the command starts from, if any."""

    def problems(self, folder: Path, *, finished: bool) -> list[str]:
        """Tell how a folder differs from the undisturbed one; after a kill, files may be missing, but not be torn."""
        expected = self.undisturbed
        found = contents(folder) if folder.is_dir() else {}
        problems = []
        for name in sorted({*expected, *found} if finished else found):
            if name not in expected:
                if not self.may_come_and_go(name):
                    problems.append(f"{name} is there, and undisturbed it is not")
            elif name not in found:
                problems.append(f"{name} is missing")
            elif problem := self.difference(name, found[name], folder, finished=finished):
                problems.append(problem)
        if not finished:
            problems += self.half_folders(found)
        return problems

    def half_folders(self, found: dict[str, bytes]) -> list[str]:
        """Folders that appear whole or not at all, and lack something."""
        problems = []
        for folder in {name.rsplit("/", 1)[0] for name in found if re.match(WHOLE_FOLDERS, name)}:
            whole = re.match(WHOLE_FOLDERS, folder + "/")
            assert whole
            lacking = [name for name in self.undisturbed if name.startswith(whole[0]) and name not in found]
            if lacking:
                problems.append(f"{whole[0]} has its name and lacks {lacking[0]}")
        return problems

    def may_come_and_go(self, name: str) -> bool:
        return name in (".continued",)

    def difference(self, name: str, found: bytes, folder: Path, *, finished: bool) -> str:
        expected, ours = self.undisturbed[name], without_paths(found, folder)
        if ours == expected or name in ("log.txt", "preflight.txt"):  # a diary, and what each start has measured
            return ""
        if name == "report.html" and not finished:  # a view of the steps so far, which comes whole
            return "" if ours.rstrip().endswith(b"</html>") else "report.html is torn"
        if name == "metrics.jsonl":
            lines = ours if finished else ours[: ours.rfind(b"\n") + 1]  # the last line may be torn
            rows, expected_rows = training_rows(lines), training_rows(expected)
            if rows != (expected_rows if finished else expected_rows[: len(rows)]):
                return f"metrics.jsonl has steps {[row['step'] for row in rows]}, or other numbers than undisturbed"
            return ""
        if name.endswith(".parquet"):
            rows, expected_rows = (
                pq.read_table(io.BytesIO(data)).sort_by([("system", "ascending"), ("id", "ascending")]).to_pylist()
                for data in (found, self.undisturbed[name])
            )
            # Scores come in steps, and a table of some of them is whole.
            return "" if rows == expected_rows or (not finished and name.startswith("items/")) else f"{name} differs"
        return f"{name} differs: {len(found)} bytes, undisturbed {len(expected)}"


WHOLE_FOLDERS = r"(checkpoints/step-\d+|adapter|best)/"


def make_commands(folder: Path) -> list[Command]:
    model = str(folder / "model")
    run = folder / "undisturbed" / "train"

    def prepare(out: Path) -> list[str]:
        return ["prepare", str(folder / "recordings"), "--out", str(out), "--model", model, "--device", "cpu"]

    def train(out: Path) -> list[str]:
        return ["train", str(folder / "recipe.yaml"), "--out", str(out)]

    def train_on(out: Path) -> list[str]:
        return ["train", "--resume", str(out)] if (out / "metrics.jsonl").exists() else train(out)

    def evaluate(out: Path) -> list[str]:
        words = ["evaluate", str(run), "--data", str(folder / "others-prepared"), "--out", str(out)]
        return [*words, "--limit", "3", "--batch-size", "1", "--device", "cpu", "--language", "en"]

    def merge(out: Path) -> list[str]:
        return ["merge", str(run), "--out", str(out)]

    def resume(out: Path) -> list[str]:
        return ["train", "--resume", str(out)]

    return [
        Command("prepare", prepare, prepare),
        Command("train", train, train_on),
        Command("resume", resume, resume),
        Command("evaluate", evaluate, evaluate),
        Command("merge", merge, lambda out: merge(out)),
    ]


def run_undisturbed(commands: Commands, folder: Path, every: list[Command], *, fresh: bool) -> None:
    """Write what each command writes undisturbed, twice: what differs between the two cannot be compared."""
    others = ["prepare", str(folder / "others"), "--out", str(folder / "others-prepared"), "--model"]
    commands.finish([*others, str(folder / "model"), "--device", "cpu"])
    for command in every:
        out = folder / "undisturbed" / command.name
        if command.name == "resume":
            make_half_run(folder / "undisturbed" / "train", folder / "half")
            command.begin = folder / "half"
        again = folder / "again" / command.name
        for place in (out, again):
            if command.begin is not None:
                shutil.copytree(command.begin, place)
            never = FileOperation(place.parent, 0, False, folder / "operations.txt")
            command.seconds[False] = commands.finish(command.words(place), at=never)
            command.operations = int(never.count_file.read_text())
        command.undisturbed = {name: without_paths(data, out) for name, data in contents(out).items()}
        if problems := command.problems(again, finished=True):
            raise CommandError(f"{command.name} is not the same twice: {problems[:5]}")
        shutil.rmtree(again)
        if fresh:
            place = folder / "fresh" / command.name
            if command.begin is not None:
                shutil.copytree(command.begin, place)
            command.seconds[True] = commands.finish(command.words(place), fresh=True)
            if problems := command.problems(place, finished=True):
                raise CommandError(f"{command.name} writes other things when started anew: {problems[:5]}")


def make_half_run(whole: Path, half: Path) -> None:
    """A run as one that was stopped after its sixth step."""
    shutil.copytree(whole, half)
    shutil.rmtree(half / "adapter")
    for step in (8, 10, 12):
        shutil.rmtree(half / "checkpoints" / f"step-{step:06d}")
    rows = (half / "metrics.jsonl").read_text().splitlines(keepends=True)
    (half / "metrics.jsonl").write_text("".join(row for row in rows if json.loads(row)["step"] <= 6))


# Killing


def kill_once(
    commands: Commands, command: Command, folder: Path, dice: random.Random, report: KillReport, *, fresh: bool
) -> None:
    """Kill a command at a random moment, at times its successors too, bring it to its end, and compare."""
    out = folder / "killed" / command.name
    shutil.rmtree(out.parent, ignore_errors=True)
    out.parent.mkdir(parents=True)
    if command.begin is not None:
        shutil.copytree(command.begin, out)
    words, moments = command.words(out), list[str]()
    while True:
        share, moment = dice.random(), "time"
        at: float | FileOperation = share * command.seconds[fresh]
        if not fresh and dice.random() < OPERATION_SHARE:
            number, after = 1 + int(share * command.operations), dice.random() < 0.5
            at = FileOperation(out.parent, number, after, folder / "operations.txt")
            moment = f"operation {number}, {'after' if after else 'before'} it"
        if commands.kill(words, at, fresh=fresh):
            report.kills += 1
            report.fresh_starts += fresh
            report.by_command[command.name] = report.by_command.get(command.name, 0) + 1
            report.at_operations += isinstance(at, FileOperation)
            report.killed_at.setdefault(command.name, []).append(round(share, 3))
            moments.append(f"{moment} ({share:.3f})")
            if problems := command.problems(out, finished=False):
                raise CommandError(f"right after the kill at {moments}: {problems[:5]}")
        else:
            report.too_late += 1
            if not moments:
                return
            break
        if command.name == "merge" and out.is_dir():
            break  # it is whole, as was just seen, and is not written twice
        words = command.again(out)
        if dice.random() > SECOND_KILL_SHARE:
            try:
                commands.finish(words, fresh=fresh)
            except CommandError as error:
                raise CommandError(f"killed at {moments}, it does not go on: {error}") from None
            break
    if problems := command.problems(out, finished=True):
        raise CommandError(f"brought to its end after kills at {moments}: {problems[:5]}")
    report.commands += 1
    if left := count_leftovers(out):
        report.leftovers[command.name] = report.leftovers.get(command.name, 0) + left


def warm_up(folder: Path) -> None:
    """Import all that the commands import, with nothing left running, so that forked processes start at once."""
    import torch

    torch.set_num_threads(1)
    for words in (["--help"], ["version"]):
        run_quietly(words)
    made = folder / "warm"
    record(made / "recordings", LINES[:3])
    model = ["--model", str(folder / "model"), "--device", "cpu"]
    run_quietly(["prepare", str(made / "recordings"), "--out", str(made / "prepared"), *model])
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    recipe["data"] = {"train": str(made / "prepared"), "row_tokens": 512, "reference_seconds": [0.2, 10]}
    recipe["train"] |= {"steps": 1, "save_every": 1}
    del recipe["train"]["evaluate_every"]
    (made / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    run_quietly(["train", str(made / "recipe.yaml"), "--out", str(made / "run")])
    words = ["evaluate", str(made / "run"), "--data", str(made / "prepared"), "--out", str(made / "evaluation")]
    run_quietly([*words, "--limit", "1", "--device", "cpu"])
    run_quietly(["merge", str(made / "run"), "--out", str(made / "merged")])


def run_quietly(words: list[str]) -> None:
    """A command in this process; where it fails, its output is shown."""
    with tempfile.TemporaryFile() as output:
        saved = [os.dup(1), os.dup(2)]
        try:
            for number in (1, 2):
                os.dup2(output.fileno(), number)
            code = run_command(words)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, copy in zip((1, 2), saved, strict=True):
                os.dup2(copy, number)
                os.close(copy)
        output.seek(0)
        if code:
            raise CommandError(f"myna {' '.join(words)} ended with {code}:\n{output.read().decode()[-3000:]}")


def kill_at_random(kills: int, seed: int, folder: Path, *, fresh_every: int = FRESH_START_EVERY) -> KillReport:
    """Kill commands so many times or more, each at least once; `fresh_every` 0 forks them all."""
    began, dice, report = time.monotonic(), random.Random(seed), KillReport()
    sys.modules.update(ABSENT)  # type: ignore[arg-type]
    tqdm.monitor_interval = 0  # or it starts a thread
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    make_workspace(folder)
    warm_up(folder)
    running = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    assert not running, f"a forked process would wait for threads that it does not have: {running}"
    commands, every = Commands(folder / "log.txt"), make_commands(folder)
    run_undisturbed(commands, folder, every, fresh=bool(fresh_every))
    report.operations = {one.name: one.operations for one in every}
    report.undisturbed_seconds = {one.name: [round(one.seconds[fresh], 2) for fresh in (False, True)] for one in every}
    number = 0
    while report.kills < kills or len(report.by_command) < len(every):  # some are killed several times in a row
        command = min(every, key=lambda one: report.by_command.get(one.name, 0))
        number += 1
        fresh = bool(fresh_every) and number % fresh_every == 0
        try:
            kill_once(commands, command, folder, dice, report, fresh=fresh)
        except CommandError as error:
            report.faults.append(f"{command.name}{' (fresh)' * fresh}: {error}")
            kept = folder / "faults" / str(len(report.faults))
            if (folder / "killed").is_dir():
                shutil.copytree(folder / "killed", kept)
        if sys.stderr.isatty() or os.environ.get("MYNA_KILLS_PROGRESS"):
            print(f"{report.kills} kills, {len(report.faults)} faults", file=sys.stderr, flush=True)
    report.seconds = round(time.monotonic() - began, 1)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fresh-every", type=int, default=FRESH_START_EVERY, help="0: every process is forked")
    parser.add_argument("--folder", type=Path, help="Where to work; kept, with what faults have left.")
    parser.add_argument("--out", type=Path, help="JSON file for the report.")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="myna-kills-") as scratch:
        folder = arguments.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        report = kill_at_random(arguments.kills, arguments.seed, folder, fresh_every=arguments.fresh_every)
    text = json.dumps(asdict(report), indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    raise SystemExit(bool(report.faults))


if __name__ == "__main__":
    main()
