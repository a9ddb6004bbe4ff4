"""`myna compare`: runs, models or evaluations on the same items, with a page for blind listening.

OUT/compare.html       metrics, differences and the listening test; one file, no network
OUT/compare.json       the same metrics, which system made which sound, and what listeners prefer
OUT/preferences/       the answers, a file for each listener
OUT/items, OUT/audio   what had to be generated and scored for it, kept as by `myna evaluate`
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from myna.core.errors import ConfigError, DataError
from myna.core.io import atomic_write, claim_folder, lock_folder, safe_file_name, save_text
from myna.core.progress import ProgressCallback, silent
from myna.evaluate.comparison import ComparedSystem, Comparison, build_comparison
from myna.evaluate.comparison_page import comparison_page
from myna.evaluate.items import EvalSet
from myna.evaluate.metrics import METRICS
from myna.evaluate.pipeline import generation_key, score_systems
from myna.evaluate.preferences import (
    ListeningTrial,
    Preferences,
    aggregate_preferences,
    load_listener_answers,
    parse_listener_answers,
    save_listener_answers,
)
from myna.evaluate.results import ITEMS_FILE, ITEMS_FOLDER, ItemScoresFile, audio_path, read_item_scores
from myna.evaluate.runner import parse_subject, resolve_eval_set, resolve_system, subject_name
from myna.evaluate.scorers import Scorers
from myna.evaluate.seen_items import mark_seen_items
from myna.evaluate.systems import REAL, Recordings, System
from myna.listen.speaker_encoders import RESEMBLYZER
from myna.models.ref import ModelRef, split_name
from myna.report.local_server import local_page_server

COMPARISON_FILE, PAGE_FILE, EVALUATION_FILE = "compare.json", "compare.html", "evaluation.json"


@dataclass(frozen=True, slots=True)
class EvaluatedSystem:
    """A system of an evaluation folder."""

    name: str
    folder: Path
    system: str
    evaluation: dict[str, Any]
    """Content of the folder's evaluation.json."""

    def load_scores(self, system: str, name: str) -> ComparedSystem | None:
        rows = [row for row in read_item_scores(self.folder / ITEMS_FILE) if row.system == system]
        return ComparedSystem(name, rows, self.folder) if rows else None

    def load(self) -> ComparedSystem:
        scores = self.load_scores(self.system, self.name)
        if scores is None:
            raise DataError(f"{self.folder} has no items of {self.system}", hint="run `myna evaluate` there again")
        return scores


def compare_systems(
    subjects: Sequence[str],
    *,
    data: Path | None = None,
    sentences: Path | None = None,
    out: Path | None = None,
    asr: str | None = None,
    speaker_encoder: str = RESEMBLYZER,
    language: str = "",
    seed: int = 0,
    limit: int | None = None,
    trials: int = 20,
    batch_size: int = 16,
    device: str = "auto",
    model: str | None = None,
    force: bool = False,
    progress: ProgressCallback = silent,
) -> Comparison:
    """Compare two or more subjects: runs, adapters, models, or evaluation folders (FOLDER, or FOLDER:SYSTEM);
    NAME=SUBJECT gives one a name. Generates and scores what is missing, and writes the page and the metrics.

    `trials` is how many of the compared items are in the listening test; `model` is the base model of the runs and
    adapters, where it is not the one that they name.
    """
    settings = {key: value for key, value in locals().items() if key not in ("force", "progress")}
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in settings.items()}
    if len(subjects) < 2:
        raise ConfigError(
            "there is nothing to compare with", hint="name two or more: myna compare runs/marta runs/marta-again"
        )
    parsed = [_parse_subject(subject) for subject in subjects]
    names = [subject.name if isinstance(subject, EvaluatedSystem) else subject_name(subject) for subject in parsed]
    if len({safe_file_name(name).casefold() for name in names}) < len(names):
        raise ConfigError(f"two have one name: {', '.join(names)}", hint="give them as NAME=FOLDER")
    out = out or Path("comparisons") / safe_file_name("-and-".join(names))
    if (out / EVALUATION_FILE).is_file():
        raise ConfigError(f"{out} is the folder of an evaluation", hint="choose another --out")
    inputs = [
        *(Path(split_name(subject)[1]) for subject in subjects),
        *(p for p in (data, sentences) if p is not None),
    ]
    claim_folder(out, "comparison", known=(COMPARISON_FILE,), inputs=inputs, force=force)
    with lock_folder(out, "comparing in"):
        evaluated = [subject for subject in parsed if isinstance(subject, EvaluatedSystem)]
        sources = [subject for subject in parsed if not isinstance(subject, EvaluatedSystem)]
        _check_seeds(evaluated, seed if sources else None)
        missing = {
            key: reason for one in reversed(evaluated) for key, reason in one.evaluation.get("missing", {}).items()
        }
        systems = {subject.name: subject.load() for subject in evaluated}
        real = next((rows for one in evaluated if (rows := one.load_scores(REAL, REAL)) is not None), None)
        notes: tuple[str, ...] = ()
        if sources:
            refs = [parse_subject(source, model) for source in sources]
            eval_set = resolve_eval_set(refs[0][1], data, sentences, seed=seed, limit=limit, language=language)
            scorers = Scorers.open(asr, speaker_encoder, device=device)
            generated = [resolve_system(*ref, seed=seed, device=device) for ref in refs]
            folders = [subject.folder for subject in evaluated] + _evaluation_folders(ref for _, ref in refs)
            scores = score_systems(
                eval_set,
                [Recordings(REAL, generated[0].sample_rate), *generated],
                scorers,
                out,
                batch_size=batch_size,
                progress=progress,
                before_system=lambda system: reuse_scores(system, eval_set, folders, out),
                save_references=True,
            )
            missing |= {
                metric.key: scorers.missing[metric.scorer] for metric in METRICS if metric.scorer in scorers.missing
            }
            seen_notes = mark_seen_items(generated, eval_set.items, scores.rows)
            scored = {name: ComparedSystem(name, items, out) for name, items in scores.rows.items()}
            real, notes = scored.pop(REAL), (*eval_set.notes, *scorers.notes, *seen_notes)
            systems |= scored
        comparison = build_comparison(
            [systems[name] for name in names],
            real if REAL not in names else None,
            folder=out,
            seed=seed,
            trials=trials,
            missing=missing,
            notes=notes,
            settings=settings,
        )
        preferences = aggregate_preferences(comparison.trials, load_listener_answers(out), comparison.names)
        _save_json(out / COMPARISON_FILE, comparison.to_json(preferences))
        save_text(out / PAGE_FILE, comparison_page(comparison))
        return comparison


def _parse_subject(subject: str) -> EvaluatedSystem | str:
    """A system of an evaluation folder, or the subject as `myna evaluate` takes it."""
    name, separator, source = subject.partition("=")
    if not separator or Path(subject).exists():
        name, source = "", subject
    folder, system = Path(source), ""
    if not folder.is_dir():
        before, colon, after = source.rpartition(":")
        if colon and (Path(before) / EVALUATION_FILE).is_file():
            folder, system = Path(before), after
    if not (folder / EVALUATION_FILE).is_file():
        return subject
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


def _evaluation_folders(refs: Iterable[ModelRef]) -> list[Path]:
    """Evaluations that `myna evaluate` has left in the run folders among the sources."""
    runs = [ref.run for ref in refs if ref.run is not None]
    return [run.folder / "evaluation" for run in runs if (run.folder / "evaluation" / EVALUATION_FILE).is_file()]


def reuse_scores(system: System, eval_set: EvalSet, folders: Sequence[Path], out: Path) -> None:
    """Copy what evaluations have of a system, under whatever name: equal keys are equal audio."""
    results = ItemScoresFile(out, system.name)
    keys = {item.id: generation_key(system, item) for item in eval_set.items if system.supports(item)}
    keys = {id: key for id, key in keys.items() if id not in results.rows or results.rows[id].key != key}
    needed = len(keys)
    for folder in folders if keys else ():
        for file in sorted((folder / ITEMS_FOLDER).glob("*.parquet")):
            for row in read_item_scores(file):
                if keys.get(row.id) != row.key or (row.audio and not (folder / row.audio).is_file()):
                    continue
                audio = audio_path(system.name, row.id) if row.audio else ""
                if audio:
                    with atomic_write(out / audio) as temporary:
                        shutil.copyfile(folder / row.audio, temporary)
                results.rows[row.id] = replace(row, system=system.name, audio=audio)
                del keys[row.id]
    if len(keys) < needed:
        results.save()


def is_comparison(folder: Path) -> bool:
    return (folder / COMPARISON_FILE).is_file()


def add_preferences(folder: Path, files: Sequence[Path]) -> Preferences:
    """Add answers of listeners to a comparison; the sum of all answers."""
    comparison = _read_json(folder / COMPARISON_FILE)
    for file in files:
        try:
            content = file.read_bytes()
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error}", hint="give the file that the page saved") from None
        save_listener_answers(folder, parse_listener_answers(content, str(file)))
    trials = [ListeningTrial.from_json(trial) for trial in comparison["trials"]]
    preferences = aggregate_preferences(trials, load_listener_answers(folder), comparison["names"])
    _save_json(folder / COMPARISON_FILE, comparison | {"preferences": preferences.to_json()})
    return preferences


def serve_comparison(folder: Path, port: int, notify: Callable[[str], None]) -> None:
    """Serve the page to browsers on this machine until Ctrl-C; answers are saved as they come."""

    def receive(content: bytes) -> None:
        listener = save_listener_answers(folder, parse_listener_answers(content, "what the page sent"))
        add_preferences(folder, ())
        notify(f"{listener.name or listener.id}: {len(listener.answers)} answers")

    with local_page_server((folder / PAGE_FILE).read_bytes(), "preferences", receive, port) as server:
        notify(f"Open http://127.0.0.1:{server.server_port}/ and listen. Ctrl-C ends it.")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            notify("")


def _save_json(file: Path, content: dict[str, Any]) -> None:
    save_text(file, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {error}", hint="make it again with the command that made it") from None
    return content
