"""`myna compare`: runs, models or evaluations on the items that all have spoken, with a page for blind listening.

OUT/compare.html       metrics, differences and the listening test; one file, no network
OUT/compare.json       the same metrics, which system made which sound, and what listeners prefer
OUT/preferences/       the answers, a file for each listener
OUT/items, OUT/audio   what had to be generated and scored for it, as by `myna evaluate`
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from myna.core.errors import ConfigError, DataError
from myna.core.io import atomic_write, bytes_hash, claim_folder, lock_folder, safe_file_name, save_text
from myna.core.progress import ProgressCallback, silent
from myna.evaluate import listening, pipeline
from myna.evaluate.evaluation import EVALUATION_FILE, EvaluationSettings, Results, mark_seen_items, save_json
from myna.evaluate.items import EvalSet
from myna.evaluate.metrics import missing_metrics
from myna.evaluate.pages import comparison_page
from myna.evaluate.systems import REAL, Recordings, Subject, System

COMPARISON_FILE, PAGE_FILE = "compare.json", "compare.html"


@dataclass(frozen=True, slots=True)
class EvaluatedSystem:
    """System of an evaluation folder."""

    name: str
    folder: Path
    system: str
    """Name of the system in the evaluation."""
    evaluation: dict[str, Any]
    """Content of the folder's evaluation.json."""

    def load_scores(self, system: str, name: str) -> listening.ComparedSystem | None:
        rows = [row for row in pipeline.read_item_scores(self.folder / pipeline.ITEMS_FILE) if row.system == system]
        return listening.ComparedSystem(name, rows, self.folder) if rows else None

    def load(self) -> listening.ComparedSystem:
        scores = self.load_scores(self.system, self.name)
        if scores is None:
            raise DataError(f"{self.folder} has no items of {self.system}", hint="run `myna evaluate` there again")
        return scores


@dataclass(frozen=True, kw_only=True)
class Comparison(Results):
    """Results of several systems on their common items, and blind trials. Differences are from the first system."""

    systems: tuple[listening.ComparedSystem, ...]
    """Systems with the same items in the same order."""
    real: listening.ComparedSystem | None
    """Recordings of those items, if there are any."""
    trials: tuple[listening.ListeningTrial, ...]

    @property
    def names(self) -> list[str]:
        return [system.name for system in self.systems]

    @property
    def id(self) -> str:
        """Hash of the trials: answers to one comparison do not count for another with other audio."""
        return bytes_hash(repr([trial.id for trial in self.trials]).encode())[: listening.ID_LENGTH]

    def to_json(self) -> dict[str, Any]:
        listeners = listening.load_listener_answers(self.folder)
        return super().to_json() | {
            "comparison": self.id,
            "names": self.names,
            "trials": [trial.to_json() for trial in self.trials],
            "preferences": listening.aggregate_preferences(self.trials, listeners, self.names).to_json(),
        }


def compare_systems(
    subjects: Sequence[str],
    settings: EvaluationSettings,
    *,
    out: Path | None = None,
    trials: int = 20,
    progress: ProgressCallback = silent,
) -> Comparison:
    """Compare two or more subjects: runs, adapters, models, or evaluation folders (FOLDER, or FOLDER:SYSTEM);
    NAME=SUBJECT gives one a name. Generates and scores what is missing, and writes the page and the metrics.

    `trials` is how many of the compared items are in the listening test.
    """
    if len(subjects) < 2:
        raise ConfigError(
            "there is nothing to compare with", hint="name two or more: myna compare runs/marta runs/marta-again"
        )
    parsed = [_parse_subject(subject, settings.model) for subject in subjects]
    names = [subject.name for subject in parsed]
    if len({safe_file_name(name).casefold() for name in names}) < len(names):
        raise ConfigError(f"two have one name: {', '.join(names)}", hint="give them as NAME=FOLDER")
    out = out or Path("comparisons") / safe_file_name("-and-".join(names))
    if (out / EVALUATION_FILE).is_file():
        raise ConfigError(f"{out} is the folder of an evaluation", hint="choose another --out")
    evaluated = [subject for subject in parsed if isinstance(subject, EvaluatedSystem)]
    sources = [subject for subject in parsed if isinstance(subject, Subject)]
    inputs = [*(one.folder for one in evaluated), *(Path(one.ref.source) for one in sources), *settings.inputs]
    claim_folder(out, "comparison", known=(COMPARISON_FILE,), inputs=inputs, force=settings.force)
    with lock_folder(out, "comparing in"):
        _check_seeds(evaluated, settings.seed if sources else None)
        missing = {
            key: reason for one in reversed(evaluated) for key, reason in one.evaluation.get("missing", {}).items()
        }
        systems = {subject.name: subject.load() for subject in evaluated}
        real = next((found for one in evaluated if (found := one.load_scores(REAL, REAL)) is not None), None)
        notes: list[str] = []
        if sources:
            eval_set, scorers = settings.eval_set(sources[0]), settings.open_scorers()
            generated = [source.system(seed=settings.seed, device=settings.device) for source in sources]
            # `myna evaluate` leaves its results in the folders of runs.
            of_runs = [source.ref.run.folder / "evaluation" for source in sources if source.ref.run is not None]
            folders = [one.folder for one in evaluated] + [one for one in of_runs if (one / EVALUATION_FILE).is_file()]
            rows = pipeline.score_systems(
                eval_set,
                [Recordings(REAL, generated[0].sample_rate), *generated],
                scorers,
                out,
                batch_size=settings.batch_size,
                progress=progress,
                before_system=lambda system: reuse_scores(system, eval_set, folders, out),
                save_references=True,
            )
            missing |= missing_metrics(scorers.missing)
            notes += [*eval_set.notes, *scorers.notes, *mark_seen_items(generated, eval_set.items, rows)]
            scored = {name: listening.ComparedSystem(name, items, out) for name, items in rows.items()}
            real = scored.pop(REAL)
            systems |= scored
        comparison = build_comparison(
            [systems[name] for name in names],
            real if REAL not in names else None,
            folder=out,
            seed=settings.seed,
            trials=trials,
            missing=missing,
            notes=notes,
            settings={"subjects": list(subjects), "out": str(out), "trials": trials, **settings.to_json()},
        )
        save_json(out / COMPARISON_FILE, comparison.to_json())
        save_text(out / PAGE_FILE, comparison_page(comparison))
        return comparison


def build_comparison(
    systems: Sequence[listening.ComparedSystem],
    real: listening.ComparedSystem | None,
    *,
    folder: Path,
    seed: int,
    trials: int,
    missing: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
) -> Comparison:
    """Compare `systems` on their common items, with blind trials on at most `trials` of these."""
    compared, item_notes = common_items(systems)
    if real is not None:
        recordings = {row.id: row for row in real.rows}
        rows = [recordings[row.id] for row in compared[0].rows if row.id in recordings]
        real = listening.ComparedSystem(real.name, rows, real.folder) if rows else None
    chosen, identical = listening.listening_trials(compared, seed, trials)
    for (first, second), count in identical.items():
        item_notes.append(f"{first} and {second} have the very same audio for {count} items, which are not in the test")
    return Comparison(
        folder=folder,
        rows={system.name: system.rows for system in (*([real] if real is not None else []), *compared)},
        base=compared[0].name,
        unavailable=missing or {},
        notes=[*notes, *item_notes],
        settings=settings or {},
        systems=tuple(compared),
        real=real,
        trials=tuple(chosen),
    )


def common_items(systems: Sequence[listening.ComparedSystem]) -> tuple[list[listening.ComparedSystem], list[str]]:
    """Return each system with the items that all have, matched by text, references and language; and notes on the
    rest."""
    indexed = [
        {(row.id, row.item_key, row.speaker, row.language): row for row in system.rows if row.item_key}
        for system in systems
    ]
    common = [key for key in indexed[0] if all(key in rows for rows in indexed)]
    if not common:
        counts = ", ".join(f"{system.name} has {len(system.rows)}" for system in systems)
        raise DataError(
            f"there is no item that all have spoken: {counts}, and their texts, references or languages differ",
            hint="evaluate them on the same --data or --sentences with the same --seed; or name the runs themselves, "
            "and what is missing is spoken",
        )
    notes = [
        f"{system.name} has {len(rows)} items, of which {len(common)} are compared: the others lack the rest"
        for system, rows in zip(systems, indexed, strict=True)
        if len(rows) > len(common)
    ]
    compared = [
        listening.ComparedSystem(system.name, [rows[key] for key in common], system.folder)
        for system, rows in zip(systems, indexed, strict=True)
    ]
    return compared, notes


def _parse_subject(text: str, base: str | None) -> EvaluatedSystem | Subject:
    """Resolve a system of an evaluation folder, or a subject as `myna evaluate` takes it."""
    name, separator, source = text.partition("=")
    if not separator or Path(text).exists():
        name, source = "", text
    folder, system = Path(source), ""
    if not folder.is_dir():
        before, colon, after = source.rpartition(":")
        if colon and (Path(before) / EVALUATION_FILE).is_file():
            folder, system = Path(before), after
    if not (folder / EVALUATION_FILE).is_file():
        return Subject.parse(text, base)
    evaluation = _read_json(folder / EVALUATION_FILE)
    systems = evaluation.get("systems", {})
    system = system or str(evaluation.get("model"))
    if system not in systems:
        raise DataError(
            f"{folder} holds no {system}, but {', '.join(systems)}",
            hint=f"name one of these: {folder}:{next(iter(systems), 'base')}",
        )
    return EvaluatedSystem(name or system, folder, system, evaluation)


def _check_seeds(evaluated: Sequence[EvaluatedSystem], seed: int | None) -> None:
    seeds = {subject.name: int(subject.evaluation.get("settings", {}).get("seed", 0)) for subject in evaluated}
    seeds |= {"this comparison": seed} if seed is not None else {}
    if len(set(seeds.values())) > 1:
        by_seed = ", ".join(f"{name} by seed {number}" for name, number in seeds.items())
        raise ConfigError(
            f"items were chosen and spoken by different seeds: {by_seed}",
            hint="evaluate again with the same --seed, or give that --seed here",
        )


def reuse_scores(system: System, eval_set: EvalSet, folders: Sequence[Path], out: Path) -> None:
    """Copy what evaluations have of a system, whatever its name there: equal keys are equal audio."""
    results = pipeline.ItemScoresFile(out, system.name)
    keys = {item.id: pipeline.generation_key(system, item) for item in eval_set.items if system.supports(item)}
    keys = {id: key for id, key in keys.items() if id not in results.rows or results.rows[id].key != key}
    needed = len(keys)
    for folder in folders if keys else ():
        for file in sorted((folder / pipeline.ITEMS_FOLDER).glob("*.parquet")):
            for row in pipeline.read_item_scores(file):
                if keys.get(row.id) != row.key or (row.audio and not (folder / row.audio).is_file()):
                    continue
                audio = pipeline.audio_path(system.name, row.id) if row.audio else ""
                if audio:
                    with atomic_write(out / audio) as temporary:
                        shutil.copyfile(folder / row.audio, temporary)
                results.rows[row.id] = replace(row, system=system.name, audio=audio)
                del keys[row.id]
    if len(keys) < needed:
        results.save()


def is_comparison(folder: Path) -> bool:
    return (folder / COMPARISON_FILE).is_file()


def add_preferences(folder: Path, files: Sequence[Path]) -> listening.Preferences:
    """Add answers of listeners to a comparison, and return the sum of all answers."""
    comparison = _read_json(folder / COMPARISON_FILE)
    for file in files:
        try:
            content = file.read_bytes()
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error}", hint="give the file that the page saved") from None
        listening.save_listener_answers(folder, listening.parse_listener_answers(content, str(file)))
    trials = [listening.ListeningTrial.from_json(trial) for trial in comparison["trials"]]
    preferences = listening.aggregate_preferences(trials, listening.load_listener_answers(folder), comparison["names"])
    save_json(folder / COMPARISON_FILE, comparison | {"preferences": preferences.to_json()})
    return preferences


def serve_comparison(folder: Path, port: int, notify: Callable[[str], None]) -> None:
    """Serve the page to browsers on this machine until Ctrl-C; answers are saved as they come."""

    def receive(content: bytes) -> None:
        listener = listening.save_listener_answers(
            folder, listening.parse_listener_answers(content, "what the page sent")
        )
        add_preferences(folder, ())
        notify(f"{listener.name or listener.id}: {len(listener.answers)} answers")

    with listening.local_page_server((folder / PAGE_FILE).read_bytes(), "preferences", receive, port) as server:
        notify(f"Open http://127.0.0.1:{server.server_port}/ and listen. Ctrl-C ends it.")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            notify("")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {error}", hint="make it again with the command that made it") from None
    return content
