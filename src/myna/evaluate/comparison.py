"""`myna compare`: runs, models or evaluations on the items that all have spoken, with a page for blind listening.

OUT/compare.html       metrics, differences and the listening test; one file, no network
OUT/compare.json       the same metrics, which system made which sound, and what listeners prefer
OUT/preferences/       the answers, a file for each listener
OUT/items, OUT/audio   what had to be generated and scored for it, as by `myna evaluate`
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from myna.audio.files import Samples
from myna.core.errors import ConfigError, DataError
from myna.core.io import bytes_hash, claim_folder, lock_folder, safe_file_name, save_text
from myna.core.progress import ProgressCallback, silent
from myna.core.statistics import CONFIDENCE_LEVEL, share_lower_bounds
from myna.evaluate import listening, pipeline
from myna.evaluate.evaluation import EVALUATION_FILE, EvaluationSettings, Subject
from myna.evaluate.metrics import METRICS, METRICS_BY_KEY, REAL, MetricEstimates, missing_metrics
from myna.evaluate.pipeline import Recordings
from myna.report import page

COMPARISON_FILE, PAGE_FILE = "compare.json", "compare.html"
COMPARED_METRICS = (
    *("wer", "cer", "loop_rate", "similarity", "similarity_rank1", "distillmos", "dnsmos"),
    *("stop_rate", "early_rate", "speaking_rate"),
)
"""Metrics of a comparison that are seen at once; the others are a click away."""
TARGET_RMS, MAX_PEAK = 0.06, 0.97
"""Speech level in the listening test, and the maximum peak, which may force a lower level."""
FRAME_SAMPLES, PAUSE_SHARE = 480, 0.03
"""Share of the loudest frame's level below which a frame is a pause and does not count."""


@dataclass(frozen=True, kw_only=True)
class Comparison(pipeline.Results):
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
    pipeline.check_names(names)
    out = out or Path("comparisons") / safe_file_name("-and-".join(names))
    if (out / EVALUATION_FILE).is_file():
        raise ConfigError(f"{out} is the folder of an evaluation", hint="choose another --out")
    evaluated = [subject for subject in parsed if isinstance(subject, listening.ComparedSystem)]
    sources = [subject for subject in parsed if isinstance(subject, Subject)]
    inputs = [*(one.folder for one in evaluated), *(Path(one.ref.source) for one in sources), *settings.inputs]
    claim_folder(out, "comparison", known=(COMPARISON_FILE,), inputs=inputs, force=settings.force)
    with lock_folder(out, "comparing in"):
        _check_seeds(evaluated, settings.seed if sources else None)
        missing = {
            key: reason for one in reversed(evaluated) for key, reason in one.evaluation.get("missing", {}).items()
        }
        systems = {one.name: one for one in evaluated}
        real = next((found for one in evaluated if (found := _read_system(REAL, one.folder, REAL)).rows), None)
        notes: list[str] = []
        if sources:
            eval_set = settings.eval_set(sources[0])
            generated = [source.system(seed=settings.seed, device=settings.device) for source in sources]
            # `myna evaluate` leaves its results in the folders of runs.
            of_runs = [source.ref.run.folder / "evaluation" for source in sources if source.ref.run is not None]
            folders = [one.folder for one in evaluated] + [one for one in of_runs if (one / EVALUATION_FILE).is_file()]
            spoken: list[pipeline.System] = [Recordings(REAL, generated[0].sample_rate), *generated]
            rows, scorers, notes = settings.score(eval_set, spoken, out, folders, progress)
            missing |= missing_metrics(scorers.missing)
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
        pipeline.save_json(out / COMPARISON_FILE, comparison.to_json())
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


def _parse_subject(text: str, base: str | None) -> listening.ComparedSystem | Subject:
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
    found = _read_system(name or system, folder, system)
    if not found.rows:
        raise DataError(f"{folder} has no items of {system}", hint="run `myna evaluate` there again")
    return replace(found, evaluation=evaluation)


def _read_system(name: str, folder: Path, system: str) -> listening.ComparedSystem:
    """Read what an evaluation folder has of a system, if anything, and give it a name."""
    rows = [row for row in pipeline.read_item_scores(folder / pipeline.ITEMS_FILE) if row.system == system]
    return listening.ComparedSystem(name, rows, folder)


def _check_seeds(evaluated: Sequence[listening.ComparedSystem], seed: int | None) -> None:
    seeds = {subject.name: int(subject.evaluation.get("settings", {}).get("seed", 0)) for subject in evaluated}
    seeds |= {"this comparison": seed} if seed is not None else {}
    if len(set(seeds.values())) > 1:
        by_seed = ", ".join(f"{name} by seed {number}" for name, number in seeds.items())
        raise ConfigError(
            f"items were chosen and spoken by different seeds: {by_seed}",
            hint="evaluate again with the same --seed, or give that --seed here",
        )


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
    pipeline.save_json(folder / COMPARISON_FILE, comparison | {"preferences": preferences.to_json()})
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


def comparison_page(comparison: Comparison) -> str:
    """Render metrics with intervals, paired differences, and a blind listening test."""
    names, first = ", ".join(comparison.names), comparison.names[0]
    rows = comparison.systems[0].rows
    speakers = len({row.speaker for row in rows if row.speaker})
    listen = "Listen without knowing who it is"
    sections = [
        page.heading(f"{names}: side by side", 1),
        page.paragraph(
            f"{len(rows)} items{f' of {speakers} speakers' if speakers > 1 else ''}, the same for all. Every mean has "
            f"an interval that holds {CONFIDENCE_LEVEL:.0%} of what other draws of such items would give; differences "
            "are taken item by item.",
            "lead",
        ),
        *(page.paragraph(f"{warning}.", "missing bad") for warning in comparison.warnings),
        page.paragraph(listen, href="#blind"),
        *(page.paragraph(f"{note}.", "note") for note in comparison.notes),
        page.heading("Scores"),
        *_compared_metrics(comparison.estimates, "Scores by system"),
        *(page.paragraph(sentence, "missing") for sentence in comparison.unmeasured("compared")),
        page.heading(f"Against {first}, on the same items"),
        *_compared_metrics(comparison.differences, f"Differences from {first}", differences=True),
        page.paragraph("In color: what differs beyond its interval.", "note"),
        page.heading(listen),
        *_listening_test(comparison),
        page.footer("Every figure is in compare.json."),
    ]
    return page.render_page(f"Comparison of {names}", sections, allow_post=True)


def _compared_metrics(
    systems: Mapping[str, MetricEstimates], caption: str, *, differences: bool = False
) -> list[page.Section]:
    main = [METRICS_BY_KEY[key] for key in COMPARED_METRICS]
    others = [metric for metric in METRICS if metric.key not in COMPARED_METRICS]
    rest = pipeline.metrics_table(systems, f"{caption}, the rest", others, differences=differences)
    more = [page.details("More figures", *rest)] if rest else []
    return [*pipeline.metrics_table(systems, caption, main, differences=differences), *more]


def _listening_test(comparison: Comparison) -> list[page.Section]:
    if not comparison.trials:
        return [page.paragraph("There is nothing to choose between: all items sound the same.", "missing")]
    items = len({trial.item for trial in comparison.trials})
    pairs = len(comparison.systems) * (len(comparison.systems) - 1) // 2
    count = f"{pairs} pairs on {items} items" if pairs > 1 else f"{items} items"
    instructions = (
        f"{count}. For each, play A and B and say which you would rather hear as a reading of the text. Which system "
        "is A changes at random from item to item; both are equally loud. No spectrogram is shown, since it could give "
        "one away. Answers stay in this browser until you save them as a file."
    )
    sounds, real = _encode_sounds(comparison)
    rows = {row.id: row for row in comparison.systems[0].rows}
    offered = [
        {
            "id": trial.id,
            "text": trial.text,
            "note": " · ".join(filter(None, (rows[trial.item].speaker, rows[trial.item].language))),
            "language": rows[trial.item].language,
            "sounds": trial.sounds,
            "names": trial.systems,
            "real": real.get(trial.item),
        }
        for trial in comparison.trials
    ]
    intervals = [share_lower_bounds(n, range(n + 1)).tolist() for n in range(items + 1)]
    test = page.blind_test(offered, sounds, name=comparison.id, intervals=intervals, level=CONFIDENCE_LEVEL)
    return [page.paragraph(instructions), test]


def _encode_sounds(comparison: Comparison) -> tuple[dict[str, str | None], dict[str, str]]:
    """Return data URIs by sound id, all sounds of an item equally loud; and ids of the real recordings by item."""
    uris: dict[str, str | None] = {}
    real_ids: dict[str, str] = {}
    systems, real = {system.name: system for system in comparison.systems}, comparison.real
    for number, item in enumerate(dict.fromkeys(trial.item for trial in comparison.trials)):
        samples = {
            sound: systems[system].load_audio(item, pipeline.PLAYER_SAMPLE_RATE)
            for trial in comparison.trials
            if trial.item == item
            for sound, system in zip(trial.sounds, trial.systems, strict=True)
        }
        if real is not None and any(row.id == item for row in real.rows):
            real_ids[item] = f"real-{number}"
            samples[real_ids[item]] = real.load_audio(item, pipeline.PLAYER_SAMPLE_RATE)
        for id, sound in match_loudness(samples).items():
            uris[id] = page.audio_uri(sound, pipeline.PLAYER_SAMPLE_RATE)
    return uris, real_ids


def match_loudness(sounds: Mapping[str, Samples]) -> dict[str, Samples]:
    """Bring all sounds to one level without clipping any: of two sounds the louder one seems better."""
    levels = {name: speech_rms(samples) for name, samples in sounds.items()}
    reachable = [
        MAX_PEAK * levels[name] / float(np.abs(samples).max()) for name, samples in sounds.items() if levels[name] > 0
    ]
    level = min([TARGET_RMS, *reachable])
    return {
        name: np.asarray(samples * (level / levels[name]) if levels[name] > 0 else samples, np.float32)
        for name, samples in sounds.items()
    }


def speech_rms(samples: Samples) -> float:
    """Compute the root mean square without pauses; 0 for silence."""
    frames = np.pad(samples, (0, -len(samples) % FRAME_SAMPLES)).reshape(-1, FRAME_SAMPLES).astype(np.float64)
    levels = np.sqrt(np.square(frames).mean(axis=1))
    loudest = levels.max(initial=0.0)
    return float(np.sqrt(np.square(levels[levels >= PAUSE_SHARE * loudest]).mean())) if loudest > 1e-5 else 0.0
