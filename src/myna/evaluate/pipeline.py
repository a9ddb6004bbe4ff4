"""Evaluation loop: every system speaks every item, every scorer scores it, and finished work is kept on disk.

OUT/audio/SYSTEM/ITEM.flac    generated audio
OUT/audio/SYSTEM/ITEM+reference.flac  clip that set its voice (-0, -1 for several), of `myna evaluate` and `compare`
OUT/items/SYSTEM.parquet      scores of each item, kept up to date during the evaluation
OUT/items.parquet             scores of all systems, at the end
"""

import itertools
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, get_args, get_type_hints

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from myna.audio.files import LISTENING_RATE, Samples, read_audio, write_audio
from myna.core.errors import ConfigError, DataError
from myna.core.io import atomic_write, bytes_hash, safe_file_name, save_text
from myna.core.progress import ProgressCallback, silent
from myna.core.statistics import Estimate
from myna.data.conversation import AudioClip, Reference
from myna.evaluate import metrics, scoring
from myna.evaluate.items import EvalItem, EvalSet, load_clip, recording_key
from myna.evaluate.metrics import METRICS, METRICS_BY_KEY, Metric, MetricEstimates, system_title
from myna.evaluate.scoring import SCORING_WORKERS, ItemScores, Scorers, SpeakerEmbeddings
from myna.models.base import Sampling
from myna.models.code_sampling import SAMPLING_REVISION
from myna.models.files import format_names
from myna.report import page
from myna.speak.batch import SpeechPlan
from myna.speak.engine import Engine, encode_clip
from myna.speak.request import SpeechRequest
from myna.text.normalization import normalise_text

ITEMS_FILE, ITEMS_FOLDER, AUDIO_FOLDER = "items.parquet", "items", "audio"
ARROW_TYPES = {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
PLAYER_SAMPLE_RATE = 24_000
ITEMS_PER_SAVE = 32
"""Number of items that are spoken or scored between two writes of the results."""


@dataclass(frozen=True, slots=True, eq=False)
class SystemOutput:
    samples: Samples
    stopped: bool | None
    """False if the length limit ended it; None for a recording."""


class System(Protocol):
    """Source of audio for evaluation items."""

    @property
    def name(self) -> str: ...

    @property
    def sample_rate(self) -> int: ...

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Run, model and loss, for the report."""

    def key(self, item: EvalItem) -> str:
        """Identify the audio of an item: audio with an equal key is not generated again."""

    def supports(self, item: EvalItem) -> bool: ...

    def speak(self, items: Sequence[EvalItem], batch_size: int) -> Iterator[tuple[EvalItem, SystemOutput]]:
        """Speak items of one maximum length, at most `batch_size` at the same time, and yield each when it ends. No
        output may depend on the other items."""

    def close(self) -> None:
        """Release the weights; `speak` loads them again."""


@dataclass(frozen=True, slots=True)
class Recordings:
    """Real recordings, or their codec round trip, the upper bound of every model that uses the codec."""

    name: str
    sample_rate: int
    revision: str = ""
    transform: Callable[[Samples], Samples] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def key(self, item: EvalItem) -> str:
        recording = item.recording
        return f"{recording_key(recording)}/{self.sample_rate}/{self.revision}" if recording is not None else ""

    def supports(self, item: EvalItem) -> bool:
        return item.recording is not None

    def speak(self, items: Sequence[EvalItem], batch_size: int) -> Iterator[tuple[EvalItem, SystemOutput]]:  # noqa: ARG002
        for item in items:
            assert item.recording is not None, "items without a recording are not supported"
            clip = load_clip(item.recording, self.sample_rate)
            yield item, SystemOutput(self.transform(clip) if self.transform is not None else clip, None)

    def close(self) -> None:
        pass


@dataclass(slots=True)
class SpeechSystem:
    """Speech engine as a system. Weights are loaded when they are needed, and released for the next system."""

    name: str
    load: Callable[[], Engine]
    seed: int
    metadata: Mapping[str, Any]
    fingerprint: Callable[[Engine], str] = Engine.fingerprint
    references: dict[str, Reference] = field(default_factory=dict)
    """Encoded references by clip, for reuse by systems of the same codec."""
    _engine: Engine | None = None
    _weights_hash: str = ""
    _sampling: Sampling | None = None

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            self._engine = self.load()
            self._weights_hash = self._weights_hash or self.fingerprint(self._engine)
        return self._engine

    @property
    def sampling(self) -> Sampling:
        """Sampling settings of the model, kept after `close` since they are part of the key."""
        if self._sampling is None:
            self._sampling = replace(self.engine.family.sampling, seed=self.seed)
        return self._sampling

    @property
    def sample_rate(self) -> int:
        return self.engine.codec.sample_rate

    def key(self, item: EvalItem) -> str:
        sampling = replace(self.sampling, max_seconds=item.max_seconds)
        return f"{self._weights_hash}/{SAMPLING_REVISION}/{asdict(sampling)}"

    def supports(self, item: EvalItem) -> bool:  # noqa: ARG002
        return True

    def speak(self, items: Sequence[EvalItem], batch_size: int) -> Iterator[tuple[EvalItem, SystemOutput]]:
        plans = map(self._plan, items)
        for place, speech in self.engine.speak_plans(plans, batch_size=batch_size):
            yield items[place], SystemOutput(speech.samples, speech.stopped)

    def close(self) -> None:
        self._engine = None

    def _plan(self, item: EvalItem) -> SpeechPlan:
        """Plan one segment, however long: the maximum length is that of the whole item."""
        codec, keys = self.engine.codec, [recording_key(clip) for clip in item.references]
        for key, clip in zip(keys, item.references, strict=True):
            if key not in self.references:
                codes = encode_clip(codec, load_clip(clip, codec.sample_rate))
                self.references[key] = Reference(normalise_text(clip.text), AudioClip(clip.id, codes))
        request = SpeechRequest(
            item.text,
            tuple(self.references[key] for key in keys),
            id=item.id,
            scene=item.scene,
            max_seconds=item.max_seconds,
            seed=self.seed,
        )
        return self.engine.plan(request, split=False)


def score_systems(
    eval_set: EvalSet,
    systems: Sequence[System],
    scorers: Scorers,
    out: Path,
    *,
    batch_size: int = 16,
    workers: int = SCORING_WORKERS,
    progress: ProgressCallback = silent,
    save_references: bool = False,
    reuse: Sequence[Path] = (),
    annotate: Callable[[dict[str, list[ItemScores]]], None] = lambda _: None,
) -> dict[str, list[ItemScores]]:
    """Write audio and scores into `out` and return the scores by system, in the order of the items; an interrupted
    evaluation continues where it was. `save_references` writes the clips that set the voice beside the speech. `reuse`
    holds folders of evaluations whose audio and scores are taken where they are the same. `annotate` may add to the
    rows before their file is written."""
    check_names([system.name for system in systems])
    encoder = scorers.speaker_encoder
    speakers = SpeakerEmbeddings(eval_set, encoder) if encoder is not None else None
    rows: dict[str, list[ItemScores]] = {}
    for system in systems:
        results = ItemScoresFile(out, system.name)
        items = [item for item in eval_set.items if system.supports(item)]
        _reuse(system, items, results, reuse)
        _generate(system, items, results, batch_size, progress)
        if save_references:
            _save_references(system, items, results)
        system.close()
        _score(items, results, scorers, speakers, workers, progress)
        rows[system.name] = [results.rows[item.id] for item in items]
    annotate(rows)
    write_item_scores(out / ITEMS_FILE, itertools.chain.from_iterable(rows.values()))
    return rows


def check_names(names: Sequence[str]) -> None:
    """Refuse systems whose names, and so whose files, are the same."""
    if len({safe_file_name(name).casefold() for name in names}) < len(names):
        raise ConfigError(f"two have one name: {', '.join(names)}", hint="give them as NAME=MODEL_OR_RUN")


def _reuse(system: System, items: Sequence[EvalItem], results: "ItemScoresFile", folders: Sequence[Path]) -> None:
    """Copy what evaluations have of a system, whatever its name there: equal keys are equal audio."""
    keys = {item.id: generation_key(system, item) for item in items} if folders else {}
    keys = {id: key for id, key in keys.items() if id not in results.rows or results.rows[id].key != key}
    needed = len(keys)
    for folder in folders if keys else ():
        for file in sorted((folder / ITEMS_FOLDER).glob("*.parquet")):
            for row in read_item_scores(file):
                if keys.get(row.id) != row.key or not _has_audio(row, folder):
                    continue
                audio = audio_path(system.name, row.id) if row.audio else ""
                if audio:
                    with atomic_write(results.out / audio) as temporary:
                        shutil.copyfile(folder / row.audio, temporary)
                results.rows[row.id] = replace(row, system=system.name, audio=audio)
                del keys[row.id]
    if len(keys) < needed:
        results.save()


def _generate(
    system: System, items: Sequence[EvalItem], results: "ItemScoresFile", batch_size: int, progress: ProgressCallback
) -> None:
    """Speak the items that have no audio yet. Items of one maximum length are a queue, from which a free slot of the
    batch is filled at once; the longest come first, so that no slot is left alone with one at the end."""

    def is_done(item: EvalItem) -> bool:
        row = results.rows.get(item.id)
        return row is not None and row.key == generation_key(system, item) and _has_audio(row, results.out)

    missing = [item for item in items if not is_done(item)]
    missing.sort(key=lambda item: (-item.max_seconds, -len(item.text), item.id))
    done = len(items) - len(missing)
    progress(f"{system.name}: speaking", done, len(items))
    try:
        for _, queue in itertools.groupby(missing, key=lambda item: item.max_seconds):
            for item, output in system.speak(list(queue), batch_size):
                audio = audio_path(system.name, item.id) if len(output.samples) else ""
                if audio:
                    write_audio(results.out / audio, np.clip(output.samples, -1.0, 1.0), system.sample_rate)
                results.rows[item.id] = ItemScores.unscored(
                    system.name, item, output.samples, output.stopped, key=generation_key(system, item), audio=audio
                )
                done += 1
                progress(f"{system.name}: speaking", done, len(items))
                if done % ITEMS_PER_SAVE == 0:
                    results.save()
    finally:
        if missing:
            # Rows follow the order of the items, whichever ended first; rows of other items come after them.
            places = {item.id: place for place, item in enumerate(items)}
            results.rows = dict(sorted(results.rows.items(), key=lambda row: places.get(row[0], len(places))))
            results.save()


def _save_references(system: System, items: Sequence[EvalItem], results: "ItemScoresFile") -> None:
    """Write the references of the items; those of earlier audio of the same name are replaced."""
    for item in items:
        row = results.rows[item.id]
        if not row.audio or row.stopped is None:  # nothing was spoken, or it is a recording
            continue
        audio = results.out / row.audio
        spoken = audio.stat().st_mtime_ns
        for file in saved_references(audio):
            if file.stat().st_mtime_ns < spoken:
                file.unlink()
        for number, clip in enumerate(item.references):
            # No item has `+` in its file name.
            file = audio.with_name(f"{audio.stem}+reference{f'-{number}' if len(item.references) > 1 else ''}.flac")
            if not file.is_file():
                write_audio(file, np.clip(load_clip(clip, system.sample_rate), -1.0, 1.0), system.sample_rate)


def _score(
    items: Sequence[EvalItem],
    results: "ItemScoresFile",
    scorers: Scorers,
    speakers: SpeakerEmbeddings | None,
    workers: int,
    progress: ProgressCallback,
) -> None:
    models = dict(scorers.names)
    if speakers is not None:
        # A similarity depends on the clips that a voice is compared with.
        models["speaker_encoder"] += f" {bytes_hash(speakers.revision.encode())[:12]}"

    def is_scored(row: ItemScores) -> bool:
        scored = all(getattr(row, f"{scorer}_model") == model for scorer, model in models.items())
        return scored and row.acoustics_revision == scoring.ACOUSTICS_REVISION

    missing = [item for item in items if not is_scored(results.rows[item.id])]
    if speakers is not None and missing:
        speakers.embed_all(progress)
    done = len(items) - len(missing)
    progress(f"{results.system}: scoring", done, len(items))

    def score(item: EvalItem) -> None:
        row = results.rows[item.id]
        scoring.score_item(row, item, load_audio(row, results.out), scorers, speakers, models)

    with torch_threads(max(1, torch.get_num_threads() // workers)), ThreadPoolExecutor(workers) as pool:
        for start in range(0, len(missing), ITEMS_PER_SAVE):
            for _ in pool.map(score, missing[start : start + ITEMS_PER_SAVE]):
                done += 1
                progress(f"{results.system}: scoring", done, len(items))
            results.save()


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Limit the threads of torch's operators on the CPU: more threads than cores slow each other down."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(count, before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def generation_key(system: System, item: EvalItem) -> str:
    """Identify the audio of an item by a system, and the clips that it is compared with."""
    return bytes_hash(repr((system.key(item), item.key, item.speaker, item.language)).encode())


def _has_audio(row: ItemScores, out: Path) -> bool:
    """Whether the audio is still there, or nothing was spoken."""
    return not row.audio or (out / row.audio).is_file()


def load_audio(row: ItemScores, out: Path, sample_rate: int = LISTENING_RATE) -> Samples:
    return read_audio(out / row.audio, sample_rate=sample_rate) if row.audio else np.zeros(0, np.float32)


SCHEMA = pa.schema(
    # Either `str | None`, whose first argument is the type, or the type itself.
    [(name, ARROW_TYPES[(*get_args(hint), hint)[0]]) for name, hint in get_type_hints(ItemScores).items()]
)


class ItemScoresFile:
    """Rows of one system by item."""

    def __init__(self, out: Path, system: str) -> None:
        self.out, self.system = out, system
        self.path = out / ITEMS_FOLDER / f"{safe_file_name(system)}.parquet"
        self.rows = {row.id: row for row in read_item_scores(self.path)} if self.path.is_file() else {}

    def save(self) -> None:
        write_item_scores(self.path, self.rows.values())


def write_item_scores(file: Path, rows: Iterable[ItemScores]) -> None:
    """Write rows to a Parquet file, whole or not at all."""
    with atomic_write(file) as temporary:
        pq.write_table(pa.Table.from_pylist([asdict(row) for row in rows], SCHEMA), temporary)


def read_item_scores(file: Path) -> list[ItemScores]:
    """Read rows of a Parquet file. Columns that did not exist when it was written count as not scored yet."""
    try:
        rows = pq.read_table(file).to_pylist()
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{file} cannot be read: {error}", hint="delete it; its items are then scored again") from None
    try:
        return [ItemScores(**{name: value for name, value in row.items() if name in SCHEMA.names}) for row in rows]
    except TypeError as error:
        raise DataError(f"{file} holds no results of an evaluation: {error}", hint="choose another --out") from None


def audio_path(system: str, item: str) -> str:
    """Path of an item's audio inside the results folder."""
    return f"{AUDIO_FOLDER}/{safe_file_name(system)}/{safe_file_name(item)}.flac"


def saved_references(audio: Path) -> list[Path]:
    """List the references beside an item's audio."""
    return sorted(audio.parent.glob(f"{audio.stem}+reference*.flac"))


def step_folder(step: int) -> str:
    """Name of the folder of a training step inside RUN/speech_eval."""
    return f"step-{step:06d}"


@dataclass(frozen=True, kw_only=True)
class Results:
    """Scores of systems on the same items: metrics, differences from one system, and what is missing."""

    folder: Path
    rows: Mapping[str, Sequence[ItemScores]]
    """Item scores by system."""
    base: str
    """System that differences are taken from."""
    unpaired: tuple[str, ...] = ()
    """Systems without differences."""
    unavailable: Mapping[str, str] = field(default_factory=dict)
    """Reason for each metric whose scorer could not be opened, by metric."""
    notes: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def estimates(self) -> dict[str, MetricEstimates]:
        """Metrics by system."""
        return {name: self._comparable(metrics.estimate_metrics(rows)) for name, rows in self.rows.items()}

    @cached_property
    def differences(self) -> dict[str, MetricEstimates]:
        """Differences from the base by system, on the items that both have spoken."""
        base = self.rows.get(self.base)
        names = [name for name in self.rows if name not in (self.base, *self.unpaired)]
        if base is None:
            return {}
        return {name: self._comparable(metrics.estimate_differences(self.rows[name], base)) for name in names}

    @cached_property
    def incomparable(self) -> dict[str, str]:
        """Reason for each metric that different scorers have measured, which says nothing about the systems."""
        found: dict[str, str] = {}
        for scorer in sorted({metric.scorer for metric in METRICS if metric.scorer}):
            names = sorted({getattr(row, f"{scorer}_model") for rows in self.rows.values() for row in rows} - {""})
            if len(names) > 1:
                reason = (
                    f"measured by different scorers or against other clips ({'; '.join(names)}); evaluate them alike"
                )
                found |= {metric.key: reason for metric in METRICS if metric.scorer == scorer}
        return found

    @property
    def missing(self) -> dict[str, str]:
        """Reason for each metric without a value, by metric."""
        return {**self.unavailable, **self.incomparable}

    def unmeasured(self, verb: str = "measured") -> list[str]:
        """Say each reason of `missing` once, with all metrics that it explains."""
        titles: dict[str, list[str]] = {}
        for key, reason in self.missing.items():
            title = METRICS_BY_KEY[key].title if key in METRICS_BY_KEY else system_title(key)
            titles.setdefault(reason, []).append(title)
        return [f"{', '.join(of)}: not {verb}. {reason}" for reason, of in titles.items()]

    @property
    def warnings(self) -> list[str]:
        """Sentences that belong above every figure: how many items each system had seen before."""
        warnings = []
        for system, scores in self.rows.items():
            trained = {row.id: row.trained_on for row in scores if row.trained_on}
            if trained:
                same = Counter(trained.values())
                warnings.append(
                    f"{system} was trained on {len(trained)} of these {len(scores)} items ({same['audio']} with the "
                    f"same audio, {same['words']} with the same words): {format_names(list(trained))}. Its scores on "
                    "them say nothing about new texts; hold items out before training: myna split DATA --texts 20"
                )
            if chose := sum(bool(row.chose_checkpoint) for row in scores):
                warnings.append(
                    f"{chose} of these {len(scores)} items chose the checkpoint of {system}: its gain on them is too "
                    "high. Evaluate it on other items; those that chose nothing are in speech_eval/report.html of the "
                    "run"
                )
        return warnings

    def to_json(self) -> dict[str, Any]:
        """Return the schema that `myna evaluate`, `myna compare` and `myna demo` write."""
        return {
            "warnings": self.warnings,
            "settings": dict(self.settings),
            "items": max(map(len, self.rows.values()), default=0),
            "looped": {name: metrics.count_looped(rows) for name, rows in self.rows.items()},
            "systems": estimates_to_json(self.estimates),
            "differences": estimates_to_json(self.differences),
            "missing": self.missing,
            "notes": list(self.notes),
        }

    def _comparable(self, estimates: MetricEstimates) -> MetricEstimates:
        return {key: estimate for key, estimate in estimates.items() if key not in self.incomparable}


def save_json(file: Path, content: Mapping[str, Any]) -> None:
    save_text(file, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def estimates_to_json(systems: Mapping[str, MetricEstimates]) -> dict[str, Any]:
    return {name: {key: value.to_json() for key, value in of.items()} for name, of in systems.items()}


def metrics_table(
    systems: Mapping[str, MetricEstimates],
    caption: str,
    shown: Sequence[Metric] = METRICS,
    *,
    differences: bool = False,
    keep_empty: bool = False,
) -> list[page.Section]:
    """Make a table of metrics by system, or of their differences from a base; rows without any value only with
    `keep_empty`."""
    rows: list[list[page.Cell]] = []
    for metric in shown:
        estimates = [of.get(metric.key, Estimate()) for of in systems.values()]
        if keep_empty or any(estimate.n for estimate in estimates):
            points = " (points)" if differences and metric.is_share else ""
            title = page.cell(metric.title + points, note="" if differences else metric.description)
            show = difference_cell if differences else Metric.format_estimate
            rows.append([title, *(show(metric, one) for one in estimates)])
    return [page.table(caption, ["", *map(system_title, systems)], rows)] if rows else []


def difference_cell(metric: Metric, figure: Estimate) -> page.Cell:
    """Show a difference, in color if it goes beyond its interval."""
    style = ""
    if figure.excludes_zero and figure.mean is not None:
        style = {True: "good", False: "bad", None: ""}[metric.is_improvement(figure.mean)]
    return page.cell(metric.format_estimate(figure, signed=True), style)


def item_section(
    row: ItemScores,
    outputs: Mapping[str, ItemScores],
    out: Path | Mapping[str, Path],
    notes: Callable[[ItemScores], list[page.Cell]] | None = None,
) -> page.Section:
    """Show one item as every system speaks it, on one time scale; `out` is the results folder, or that of each
    system."""

    def player(title: str, samples: Samples, max_seconds: float, notes: Sequence[page.Cell] = ()) -> page.Section:
        label = f"{row.id}, {title}"
        return page.clip(samples, PLAYER_SAMPLE_RATE, title=title, label=label, max_seconds=max_seconds, notes=notes)

    clips = []
    for recording in saved_references(out / row.audio) if isinstance(out, Path) and row.audio else []:
        samples = read_audio(recording, sample_rate=PLAYER_SAMPLE_RATE)
        clips.append(player(recording.stem.rpartition("+")[2], samples, len(samples) / PLAYER_SAMPLE_RATE))
    longest = max(output.seconds for output in outputs.values())
    for system, output in outputs.items():
        samples = load_audio(output, out if isinstance(out, Path) else out[system], PLAYER_SAMPLE_RATE)
        clips.append(player(system_title(system), samples, longest, (notes or _notes)(output)))
    return page.item(row.text, " · ".join(filter(None, (row.id, row.speaker, row.language))), clips)


def worst_first(rows: Sequence[ItemScores]) -> list[ItemScores]:
    """Sort items by most defects, then by highest character error rate, then by lowest similarity."""

    def badness(row: ItemScores) -> tuple[float, ...]:
        wrong = row.character_errors / row.characters if row.characters and row.character_errors is not None else 0.0
        return (-len(item_defects(row)), -wrong, row.similarity if row.similarity is not None else 1.0)

    return sorted(rows, key=badness)


def _notes(row: ItemScores) -> list[page.Cell]:
    notes = [page.cell(text, "bad") for text in (*item_defects(row), seen_before(row)) if text]
    if row.similarity is not None:
        notes.append(f"similarity {row.similarity:.2f}")
    if row.distillmos is not None:
        notes.append(f"DistillMOS {row.distillmos:.2f}")
    if row.transcript is not None:
        errors = f"{row.word_errors} of {row.words} words wrong: “{row.transcript}”"
        notes.append(errors if row.word_errors else "every word")
    return notes


def seen_before(row: ItemScores) -> str:
    trained = {"audio": "trained on", "words": "its words were trained on"}.get(row.trained_on or "", "")
    return trained or ("chose the checkpoint" if row.chose_checkpoint else "")


def item_defects(row: ItemScores) -> list[str]:
    defects = (
        (row.silent, "silent"),
        (row.stopped is False, "cut: it found no end"),
        (row.ended_early, "ends early"),
        (row.speaks_prompt, "the reference's words"),
        (row.looped, "the ASR loops"),
        (row.repeats, "says something twice"),
    )
    return [text for is_present, text in defects if is_present]
