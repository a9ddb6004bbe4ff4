"""Judge a model that clones voices, by held-out speakers and held-out lines.

    python training/fledgling/judge_voice.py --model fledgling --source data/fledgling/natural_shaped \\
        --lines data/fledgling/texts/held_out.txt.gz --whisper WHISPER_FOLDER --out runs/judged

Ten speakers say ten lines each, cloned from one clip of three to eight seconds. Word errors by Whisper, similarity to
the reference and its rank among the ten by Resemblyzer, DistillMOS, how often it stops by itself (a hundred more lines,
half of them single words), and how fast it speaks. Beside it stand real recordings of the same speakers and their
round trips through the codec. Run again, it does what is missing; all sounds are kept.

`--sweep temperature=0.6,0.8,1.0` judges each value in a folder of its own; values of several settings are combined.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from myna.errors import ConfigError, MynaError
from myna.evaluate.resemblyzer import Voice
from myna.models.base import Sampling
from myna.speak.engine import Engine
from myna.workflow import open_engine
from voice_judging.hearing import Ears, Row, cloned_clips, known_voices, listen, real_clips, scores
from voice_judging.plan import Plan, plan, read_lines
from voice_judging.speaking import Tell, begin, fingerprint, lay_out_real, pace, references, speak_missing, write_json

TARGETS = {
    "word errors": ("<=", 0.15),
    "similarity": (">=", 0.80),
    "nearest is its own": (">=", 0.80),
    "DistillMOS": (">=", 3.0),
    "stops by itself": (">=", 0.99),
    "times real time": (">=", 1.5),
}
"""What fledgling is to reach."""
PACED = 11
"""Lines that are spoken one at a time to see how fast it is, the first of them to warm up."""
LONGEST = 20.0
"""Seconds. No held-out line takes so long: who is still speaking then has not found the end."""


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    try:
        reports = judge_all(options)
    except MynaError as error:
        sys.exit(f"{error}")
    print(table(reports[0]) if len(reports) == 1 else sweep_table(reports))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("--model", help="a folder, a hub name, or fledgling")
    add("--run", type=Path, help="or the folder of a run")
    add("--source", type=Path, required=True, help="natural speech: a folder of shape_natural.py, or of parquet files")
    add("--lines", type=Path, required=True, metavar="FILE", help="held_out.txt.gz of texts.py")
    add("--whisper", default="base", help="a CTranslate2 Whisper model, or a name to download")
    add("--out", type=Path, required=True, help="folder for sounds and figures")
    add("--real", type=Path, help="folder for what does not depend on the model; OUT/real if not given")
    add("--voices", type=int, default=10, help="speakers")
    add("--each", type=int, default=10, help="lines of each that are judged in full")
    add("--words", type=int, default=50, help="one-word lines, for the stopping")
    add("--more", type=int, default=50, help="other lines, for the stopping")
    add("--choice", type=int, default=0, help="seed of who says what; the figures on the card are of 0")
    add("--batch", type=int, default=20, help="lines spoken at once")
    add("--threads", type=int, default=2, help="cores to use")
    add("--device", default="cpu", help="where it speaks; the ears listen on the CPU")
    add("--sweep", action="append", default=[], metavar="SETTING=A,B", help="judge these values; may be repeated")
    for name, default in asdict(Sampling()).items():
        said = f"{LONGEST:g}" if name == "max_seconds" else "as the model asks"
        add(f"--{name.replace('_', '-')}", type=type(default), help=f"sampling, {said} if not given")
    return made


def judge_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    counts = (options.voices, options.each, options.words, options.more)
    asked = plan(options.source, read_lines(options.lines), options.choice, *counts)
    ears = Ears.open(options.whisper, options.threads)
    engine = open_engine(run=options.run, model=options.model, codec=None, device=options.device)
    chosen = list(settings(options.sweep, sampling_of(engine, options)))
    heard = hear_real(options.real or options.out / "real", asked, engine, ears, options)
    reports = []
    for name, sampling in chosen:
        report = {"settings": name, **judge(options.out / name, asked, engine, ears, sampling, heard, options)}
        write_json(options.out / name / "judged.json", report)
        (options.out / name / "judged.txt").write_text(table(report) + "\n", encoding="utf-8")
        reports.append(report)
    if options.sweep:
        write_json(options.out / "sweep.json", reports)
        (options.out / "sweep.txt").write_text(sweep_table(reports) + "\n", encoding="utf-8")
    return reports


def sampling_of(engine: Engine, options: argparse.Namespace) -> Sampling:
    """As the model asks, but for what was typed."""
    typed = {field.name: getattr(options, field.name) for field in fields(Sampling)}
    said = {name: value for name, value in typed.items() if value is not None}
    return replace(engine.family.sampling, **({"max_seconds": LONGEST} | said))


def settings(sweep: list[str], given: Sampling) -> Iterator[tuple[str, Sampling]]:
    """Every combination of the values that are swept, each with a name for its folder; all as given where none are."""
    kinds: dict[str, type[float]] = {name: type(value) for name, value in asdict(Sampling()).items()}
    swept: dict[str, list[Any]] = {}
    for one in sweep:
        name, _, values = one.partition("=")
        name = name.replace("-", "_")
        try:
            swept[name] = [kinds[name](value) for value in values.split(",")]
        except (KeyError, ValueError):
            raise ConfigError(
                f"cannot sweep {one}", hint=f"--sweep temperature=0.6,0.8; settings are {', '.join(kinds)}"
            ) from None
    for combined in itertools.product(*swept.values()):
        changed = dict(zip(swept, combined, strict=True))
        called = "_".join(f"{name}-{value:g}" for name, value in changed.items())
        yield called or "spoken", replace(given, **changed)


@dataclass(frozen=True, slots=True)
class Real:
    """What a clone is measured against: the voices of the references, and what the ears make of real recordings."""

    voices: list[Voice]
    rows: dict[str, list[Row]]


def hear_real(folder: Path, asked: Plan, engine: Engine, ears: Ears, options: argparse.Namespace) -> Real:
    begin(
        folder,
        {
            "codec": engine.codec.revision,
            "recogniser": options.whisper,
            "references": [voice.reference.id for voice in asked.voices],
            "originals": [original.id for voice in asked.voices for original in voice.originals],
        },
    )
    torch.set_num_threads(options.threads)
    todo = real_clips(asked)
    with telling("originals and round trips", len(todo) // 2) as tell:
        lay_out_real(folder, asked, engine, tell)
    voices = known_voices(folder, asked, ears.voice)
    with telling("listening to them", len(todo)) as tell:
        return Real(voices, listen(folder, todo, voices, ears, options.threads, tell))


def judge(
    folder: Path,
    asked: Plan,
    engine: Engine,
    ears: Ears,
    sampling: Sampling,
    real: Real,
    options: argparse.Namespace,
) -> dict[str, Any]:
    about = {
        "model": str(options.run or options.model),
        "weights": fingerprint(engine),
        "codec": engine.codec.revision,
        "sampling": asdict(sampling),
        "recogniser": options.whisper,
        "references": [voice.reference.id for voice in asked.voices],
        "tasks": {task.id: task.text for task in asked.tasks},
    }
    begin(folder, about)
    torch.set_num_threads(options.threads)
    known = references(asked, engine)
    with telling(f"{folder.name}: speaking", len(asked.tasks)) as tell:
        notes = speak_missing(folder, asked.tasks, known, engine, sampling, options.batch, tell)
    speed = pace(folder / "pace.json", [task for task in asked.tasks if task.judged][:PACED], known, engine, sampling)
    todo = cloned_clips(asked)
    with telling(f"{folder.name}: listening", len(todo)) as tell:
        rows = real.rows | listen(folder, todo, real.voices, ears, options.threads, tell)
    single = [notes[task.id]["stopped"] for task in asked.tasks if task.is_one_word]
    stopping = {
        "stops by itself": sum(note["stopped"] for note in notes.values()) / len(notes),
        "stops by itself, one word": sum(single) / len(single) if single else None,
        "lines": len(notes),
        "longest": max(note["seconds"] for note in notes.values()),
    }
    systems = {system: scores(heard) for system, heard in rows.items()}
    return {**about, "systems": systems, "stopping": stopping, "pace": speed}


@contextmanager
def telling(what: str, total: int) -> Iterator[Tell]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        task = bar.add_task(what, total=total)
        yield lambda more: bar.advance(task, more)


def table(report: dict[str, Any]) -> str:
    """Systems as columns, measures as rows, and what is to be reached beside them."""
    systems = report["systems"]
    lines = [f"{'':<28}" + "".join(f"{name.replace('_', ' '):>13}" for name in systems) + f"{'to reach':>12}"]
    for measure in next(iter(systems.values())):
        row = "".join(f"{system[measure]:>13.3f}" for system in systems.values())
        lines.append(f"{measure:<28}{row}{_target(measure, systems['clones'][measure])}")
    for part in ("stopping", "pace"):
        for measure, value in report[part].items():
            shown = f"{value:>13.3f}" if value is not None else f"{'':>13}"
            lines.append(f"{measure:<28}{'':>26}{shown}{_target(measure, value)}")
    return "\n".join(lines)


def _target(measure: str, value: float) -> str:
    if measure not in TARGETS:
        return ""
    sign, bound = TARGETS[measure]
    reached = value <= bound if sign == "<=" else value >= bound
    return f"{sign:>7} {bound:.2f} {'reached' if reached else 'missed'}"


def sweep_table(reports: list[dict[str, Any]]) -> str:
    """Settings as rows, so that the best can be picked by eye."""
    measures = ("word errors", "loops", "similarity", "nearest is its own", "DistillMOS")
    lines = [f"{'':<44}" + "".join(f"{name:>20}" for name in (*measures, "stops by itself"))]
    for report in reports:
        values = [report["systems"]["clones"][name] for name in measures] + [report["stopping"]["stops by itself"]]
        lines.append(f"{report['settings']:<44}" + "".join(f"{value:>20.3f}" for value in values))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
