"""Every system says every line, every ear hears it, and what is known already is not done again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from myna.audio.files import Samples, read, write
from myna.errors import ConfigError
from myna.evaluate.acoustics import REVISION
from myna.evaluate.dependencies import RATE
from myna.evaluate.items import EvalItem, EvalSet
from myna.evaluate.results import Results, file_name, write_rows
from myna.evaluate.scorers import Scorers
from myna.evaluate.scoring import ItemScores, Voices, listen_into, measure_into
from myna.evaluate.systems import System
from myna.io import bytes_hash

LISTEN_AT_A_TIME = 32
"""Rows between two times that results are put down."""
Tell = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and how much there is."""


@dataclass(frozen=True, slots=True)
class SystemScores:
    plan: EvalSet
    rows: dict[str, list[ItemScores]]
    """By system, in the order of the lines."""


def score_systems(
    plan: EvalSet,
    systems: Sequence[System],
    ears: Scorers,
    out: Path,
    *,
    batch: int = 16,
    at_once: int = 1,
    tell: Tell = lambda *_: None,
    before: Callable[[System], None] = lambda _: None,
) -> SystemScores:
    """Sounds and rows into `out`. Stopped at any moment, it goes on where it was. `before` is called for each system
    when its turn comes: it may put down what is known of it."""
    names = [system.name for system in systems]
    if len({file_name(name).casefold() for name in names}) < len(names):
        raise ConfigError(f"two systems have one name: {', '.join(names)}", hint="give them as NAME=MODEL_OR_RUN")
    voices = Voices(plan, ears.voice) if ears.voice is not None else None
    rows: dict[str, list[ItemScores]] = {}
    for system in systems:
        before(system)
        results = Results.of(out, system.name)
        tasks = [task for task in plan.tasks if system.can_say(task)]
        _speak(system, tasks, results, out, batch, tell)
        system.close()
        _listen(system.name, tasks, results, ears, voices, out, at_once, tell)
        rows[system.name] = [results.rows[task.id] for task in tasks]
    write_rows(out / "lines.parquet", itertools.chain.from_iterable(rows.values()))
    return SystemScores(plan, rows)


def _speak(system: System, tasks: Sequence[EvalItem], results: Results, out: Path, batch: int, tell: Tell) -> None:
    """What has not been said yet, several lines at once, those of like length together."""

    def is_known(task: EvalItem) -> bool:
        row = results.rows.get(task.id)
        if row is None or row.key != sound_key(system, task) or (row.sound and not (out / row.sound).is_file()):
            return False
        row.line = task.key  # rows of older evaluations do not have it
        return True

    missing = [task for task in tasks if not is_known(task)]
    done = len(tasks) - len(missing)
    tell(f"{system.name}: speaking", done, len(tasks))
    for chosen in _batches(missing, batch):
        for task, spoken in zip(chosen, system.speak(chosen), strict=True):
            sound = ""
            if len(spoken.samples):
                sound = f"sounds/{file_name(system.name)}/{file_name(task.id)}.flac"
                write(out / sound, np.clip(spoken.samples, -1.0, 1.0), system.sample_rate)
            results.rows[task.id] = ItemScores(
                system.name,
                task.id,
                sound_key(system, task),
                task.text,
                task.speaker,
                task.language,
                task.kind,
                sound,
                bytes_hash(spoken.samples.tobytes()),
                spoken.stopped,
                task.expected_seconds,
                task.key,
            )
        results.save()
        done += len(chosen)
        tell(f"{system.name}: speaking", done, len(tasks))


def _batches(tasks: Sequence[EvalItem], size: int) -> Iterator[list[EvalItem]]:
    """Lines of one cap each, since a batch lasts as long as its longest."""
    ordered = sorted(tasks, key=lambda task: (task.cap, len(task.text), task.id))
    for _, same in itertools.groupby(ordered, key=lambda task: task.cap):
        lines = list(same)
        yield from (lines[start : start + size] for start in range(0, len(lines), size))


def _listen(
    system: str,
    tasks: Sequence[EvalItem],
    results: Results,
    ears: Scorers,
    voices: Voices | None,
    out: Path,
    at_once: int,
    tell: Tell,
) -> None:
    by = {**ears.names, "measured": REVISION}
    if voices is not None:
        # The voices that a sound is compared with belong to what was heard of it.
        by["voice"] = f"{ears.names['voice']} {bytes_hash(voices.revision.encode())[:12]}"

    def is_heard(row: ItemScores) -> bool:
        return all(getattr(row, f"{ear}_by") == name for ear, name in by.items())

    missing = [task for task in tasks if not is_heard(results.rows[task.id])]
    if voices is not None and missing:
        voices.learn(lambda done, total: tell("listening to the real voices", done, total))
    done = len(tasks) - len(missing)
    tell(f"{system}: listening", done, len(tasks))

    def hear(task: EvalItem) -> None:
        row = results.rows[task.id]
        samples = sound_of(row, out)
        if row.measured_by != REVISION:
            measure_into(row, task, samples, RATE)
        listen_into(row, task, samples, ears, voices, by)

    with _cores_shared(at_once), ThreadPoolExecutor(at_once) as pool:
        for start in range(0, len(missing), LISTEN_AT_A_TIME):
            for _ in pool.map(hear, missing[start : start + LISTEN_AT_A_TIME]):
                done += 1
                tell(f"{system}: listening", done, len(tasks))
            results.save()


@contextmanager
def _cores_shared(at_once: int) -> Iterator[None]:
    """Ears that listen at once have a core each: more threads than cores fight over them and lose."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, before // at_once))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def sound_key(system: System, task: EvalItem) -> str:
    """Of the sound, and of what it is compared with."""
    return bytes_hash(repr((system.key(task), task.key, task.speaker, task.language)).encode())


def sound_of(row: ItemScores, out: Path, sample_rate: int = RATE) -> Samples:
    return read(out / row.sound, sample_rate=sample_rate) if row.sound else np.zeros(0, np.float32)
