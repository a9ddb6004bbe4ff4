"""`myna compare`: runs, models or evaluations on the same lines, a page to hear them blindly, and what listeners say.

OUT/compare.html       figures, differences, blind listening; one file, no network
OUT/compare.json       the same figures, who is who, and what listeners prefer
OUT/preferences/       the answers, a file for each listener
OUT/lines, OUT/sounds  what had to be said for it, kept as by `myna evaluate`
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from myna.compare.comparison import ComparedSystem, Comparison, compare_sides
from myna.compare.page import page
from myna.compare.preferences import (
    PreferenceCount,
    Preferences,
    Trial,
    add_listener,
    add_up,
    listeners_of,
    read_listener,
)
from myna.errors import ConfigError, DataError
from myna.evaluate import runner
from myna.evaluate.items import EvalSet
from myna.evaluate.metrics import METRICS
from myna.evaluate.pipeline import sound_key
from myna.evaluate.report import show, title
from myna.evaluate.results import Results, file_name, read_rows
from myna.evaluate.scorers import Scorers
from myna.evaluate.speaker_encoders import RESEMBLYZER
from myna.evaluate.speech_system import SpeechSystem
from myna.evaluate.systems import REAL, Recordings, System
from myna.io import replacing
from myna.report.document import save
from myna.report.local_server import server

COMPARED, PAGE, EVALUATED = "compare.json", "compare.html", "evaluation.json"


@dataclass(frozen=True, slots=True)
class Asked:
    """What a person typed."""

    subjects: tuple[str, ...]
    """Run folders, models, or folders of evaluations (FOLDER, or FOLDER:SYSTEM); NAME=... gives one a name."""
    data: Path | None = None
    lines: Path | None = None
    out: Path | None = None
    recogniser: str | None = None
    language: str = ""
    seed: int = 0
    limit: int | None = None
    listen: int = 20
    """Lines to be heard, of all that are compared."""
    batch: int = 16
    device: str = "auto"
    voices: str = RESEMBLYZER

    def for_one(self, subject: str) -> runner.Asked:
        return runner.Asked(
            subject,
            self.data,
            self.lines,
            language=self.language,
            seed=self.seed,
            limit=self.limit,
            batch=self.batch,
            device=self.device,
            recogniser=self.recogniser,
            voices=self.voices,
        )


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A folder that `myna evaluate` has left, and the system of it that is meant."""

    name: str
    folder: Path
    system: str
    told: dict[str, Any]

    @property
    def seed(self) -> int:
        return int(self.told.get("asked", {}).get("seed", 0))

    def side(self, system: str, name: str) -> ComparedSystem | None:
        rows = [row for row in read_rows(self.folder / "lines.parquet") if row.system == system]
        return ComparedSystem(name, rows, self.folder) if rows else None


def compare(asked: Asked, console: Console) -> tuple[Comparison, Path]:
    """Speak and hear what is missing, put down page and figures. Returns them with their folder."""
    if len(asked.subjects) < 2:
        raise ConfigError(
            "there is nothing to compare with", hint="name two or more: myna compare runs/marta runs/marta-again"
        )
    found = [_subject(subject) for subject in asked.subjects]
    names = [one.name if isinstance(one, Evaluated) else one[0] for one in found]
    if len({file_name(name).casefold() for name in names}) < len(names):
        raise ConfigError(f"two have one name: {', '.join(names)}", hint="give them as NAME=FOLDER")
    out = asked.out or Path("comparisons") / file_name("-and-".join(names))
    if (out / EVALUATED).is_file():
        raise ConfigError(f"{out} is the folder of an evaluation", hint="choose another --out")
    kept = [one for one in found if isinstance(one, Evaluated)]
    spoken = [one for one in found if not isinstance(one, Evaluated)]
    _check_seeds(kept, asked.seed if spoken else None)
    missing = {key: why for one in reversed(kept) for key, why in one.told.get("missing", {}).items()}
    sides = {one.name: _side(one) for one in kept}
    real = next((side for one in kept if (side := one.side(REAL, REAL)) is not None), None)
    if spoken:
        made, ears = _speak(asked, [subject for _, subject in spoken], kept, out, console)
        missing |= {column.key: ears.missing[column.ear] for column in METRICS if column.ear in ears.missing}
        real = made.pop(REAL)
        sides |= made
    comparison = compare_sides(
        [sides[name] for name in names],
        real if REAL not in names else None,
        seed=asked.seed,
        listen=asked.listen,
        missing=missing,
        asked=_told(asked),
    )
    preferences = add_up(comparison.trials, listeners_of(out), comparison.names)
    _save_json(out / COMPARED, comparison.to_json(preferences))
    save(out / PAGE, page(comparison))
    return comparison, out


def _subject(subject: str) -> Evaluated | tuple[str, str]:
    """An evaluation, or the name of a model with the subject as `myna evaluate` takes it."""
    name, separator, what = subject.partition("=")
    if not separator or Path(subject).exists():
        name, what = "", subject
    folder, system = Path(what), ""
    if not folder.is_dir():
        before, colon, after = what.rpartition(":")
        if colon and (Path(before) / EVALUATED).is_file():
            folder, system = Path(before), after
    if not (folder / EVALUATED).is_file():
        return runner.split_name(subject)[0], subject
    told = _read_json(folder / EVALUATED)
    system = system or str(told.get("model"))
    if system not in told.get("systems", {}):
        raise DataError(
            f"{folder} holds no {system}, but {', '.join(told.get('systems', {}))}",
            hint=f"name one of these: {folder}:{next(iter(told.get('systems', {})), 'base')}",
        )
    return Evaluated(name or system, folder, system, told)


def _side(one: Evaluated) -> ComparedSystem:
    side = one.side(one.system, one.name)
    if side is None:
        raise DataError(f"{one.folder} has no lines of {one.system}", hint="run `myna evaluate` there again")
    return side


def _check_seeds(kept: Sequence[Evaluated], seed: int | None) -> None:
    seeds = {one.name: one.seed for one in kept} | ({"this comparison": seed} if seed is not None else {})
    if len(set(seeds.values())) > 1:
        told = ", ".join(f"{name} by seed {number}" for name, number in seeds.items())
        raise ConfigError(
            f"lines were chosen and spoken by different seeds: {told}",
            hint="evaluate again with the same --seed, or give that --seed here",
        )


def _speak(
    asked: Asked, subjects: Sequence[str], kept: Sequence[Evaluated], out: Path, console: Console
) -> tuple[dict[str, ComparedSystem], Scorers]:
    """Those that can speak say what nobody has heard of them yet, and the recordings stand beside them."""
    plan = runner.plan_of(asked.for_one(subjects[0]))
    for note in plan.notes:
        console.print(note, markup=False, highlight=False)
    speakers: list[SpeechSystem] = [runner.speaker_of(subject, asked.for_one(subject)) for subject in subjects]
    systems: list[System] = [Recordings(REAL, speakers[0].sample_rate), *speakers]
    runs = [run for subject in subjects if (run := runner.run_at(runner.split_name(subject)[1])) is not None]
    folders = [one.folder for one in kept] + [
        folder for run in runs if (folder := run.folder / "evaluation") and (folder / EVALUATED).is_file()
    ]

    def before(system: System) -> None:
        adopt(system, plan, folders, out)

    judged, ears = runner.hear("comparing", plan, systems, asked.for_one(subjects[0]), out, before)
    return {name: ComparedSystem(name, rows, out) for name, rows in judged.rows.items()}, ears


def adopt(system: System, plan: EvalSet, folders: Sequence[Path], out: Path) -> int:
    """Take over what evaluations have of a system, whatever it was called there: equal keys are equal sound."""
    results = Results.of(out, system.name)
    wanted = {task.id: sound_key(system, task) for task in plan.tasks if system.can_say(task)}
    wanted = {id: key for id, key in wanted.items() if id not in results.rows or results.rows[id].key != key}
    taken = 0
    for folder in folders if wanted else ():
        for file in sorted((folder / "lines").glob("*.parquet")):
            for row in read_rows(file):
                if wanted.get(row.id) != row.key or (row.sound and not (folder / row.sound).is_file()):
                    continue
                sound = f"sounds/{file_name(system.name)}/{file_name(row.id)}.flac" if row.sound else ""
                if sound:
                    with replacing(out / sound) as temporary:
                        shutil.copyfile(folder / row.sound, temporary)
                results.rows[row.id] = replace(row, system=system.name, sound=sound)
                del wanted[row.id]
                taken += 1
    if taken:
        results.save()
    return taken


def is_comparison(folder: Path) -> bool:
    return (folder / COMPARED).is_file()


def add_preferences(folder: Path, files: Sequence[Path]) -> Preferences:
    """Answers of listeners into a comparison; then the sum of all."""
    told = _read_json(folder / COMPARED)
    for file in files:
        try:
            content = file.read_bytes()
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error}", hint="give the file that the page saved") from None
        add_listener(folder, read_listener(content, str(file)))
    trials = [Trial.from_json(trial) for trial in told["trials"]]
    preferences = add_up(trials, listeners_of(folder), told["names"])
    _save_json(folder / COMPARED, told | {"preferences": preferences.to_json()})
    return preferences


def serve(folder: Path, port: int, console: Console) -> None:
    """Give the page to browsers on this machine until Ctrl-C; answers are saved as they come."""

    def receive(content: bytes) -> None:
        listener = add_listener(folder, read_listener(content, "what the page sent"))
        add_preferences(folder, ())
        console.print(f"{listener.name or listener.id}: {len(listener.answers)} answers", markup=False, highlight=False)

    with server((folder / PAGE).read_bytes(), "preferences", receive, port) as running:
        address = f"http://127.0.0.1:{running.server_port}/"
        console.print(f"Open {address} and listen. Ctrl-C ends it.", highlight=False, soft_wrap=True)
        try:
            running.serve_forever()
        except KeyboardInterrupt:
            console.print("")


def show_comparison(comparison: Comparison, out: Path, console: Console) -> None:
    """For the terminal: figures, what cannot be compared, and where the page is."""
    table = Table("", *(title(name) for name in comparison.figures))
    for column in METRICS:
        figures = [one.get(column.key) for one in comparison.figures.values()]
        if any(figure is not None and figure.n for figure in figures):
            table.add_row(column.title, *(show(column, figure) if figure is not None else "" for figure in figures))
    console.print(table)
    for key, why in comparison.missing.items():
        console.print(f"{key}: not compared. {why}", markup=False, highlight=False)
    for note in comparison.notes:
        console.print(note, markup=False, highlight=False)
    console.print(f"Open {out / PAGE} to listen without knowing who it is,", markup=False, soft_wrap=True)
    console.print(f"or have answers saved: myna compare {out} --serve", markup=False, soft_wrap=True)


def show_preferences(preferences: Preferences, console: Console) -> None:
    if not preferences.lines:
        console.print("Nobody has listened yet.")
    for name, answers in preferences.listeners:
        console.print(f"{name}: {answers} answers", markup=False, highlight=False)
    if preferences.strange:
        console.print(f"{preferences.strange} answers are about sounds that are not here, and do not count")
    if preferences.lines:
        table = Table("line", "preferred", "interval")
        for line, count in preferences.lines:
            table.add_row(line, _wins(count), _interval(count))
        console.print(table)
    for pair in preferences.pairs:
        console.print(verdict(pair), markup=False, highlight=False, soft_wrap=True)


def verdict(pair: PreferenceCount) -> str:
    """One pair in a sentence."""
    if not pair.decided:
        return f"{' and '.join(pair.systems)}: no answer prefers one" + _ties(pair)
    told = f"{pair.preferred} is preferred" if pair.preferred else "no preference can be told"
    return f"{_wins(pair)}; {_interval(pair)}, sign test p = {pair.p:.3g}: {told}"


def _wins(count: PreferenceCount) -> str:
    (one, other), (first, second) = count.systems, count.wins
    return f"{one} {first}, {other} {second}" + _ties(count)


def _ties(count: PreferenceCount) -> str:
    return f", no difference {count.ties}" if count.ties else ""


def _interval(count: PreferenceCount) -> str:
    low, high = count.interval
    share = f"{count.share:.0%}" if count.share is not None else "nothing"
    return f"{count.systems[0]} {share} [{100 * low:.0f}, {100 * high:.0f}]"


def _told(asked: Asked) -> dict[str, Any]:
    return {key: str(value) if isinstance(value, Path) else value for key, value in asdict(asked).items()}


def _save_json(file: Path, told: dict[str, Any]) -> None:
    save(file, json.dumps(told, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        told: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {error}", hint="make it again with the command that made it") from None
    return told
