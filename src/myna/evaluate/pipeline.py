"""Evaluation loop: every system speaks every item, every scorer scores it, and finished work is kept on disk.

OUT/audio/SYSTEM/ITEM.flac    generated audio
OUT/audio/SYSTEM/ITEM+reference.flac  clip that set its voice (-0, -1 for several), of `myna evaluate` and `compare`
OUT/items/SYSTEM.parquet      scores of each item, kept up to date during the evaluation
OUT/items.parquet             scores of all systems, at the end
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from myna.audio.files import LISTENING_RATE, Samples, read_audio, write_audio
from myna.core.errors import ConfigError, DataError
from myna.core.io import atomic_write, bytes_hash, safe_file_name
from myna.core.progress import ProgressCallback, silent
from myna.evaluate import scoring
from myna.evaluate.items import EvalItem, EvalSet, load_clip
from myna.evaluate.scoring import SCORING_WORKERS, ItemScores, Scorers, SpeakerEmbeddings
from myna.evaluate.systems import System

ITEMS_FILE, ITEMS_FOLDER, AUDIO_FOLDER = "items.parquet", "items", "audio"
ARROW_TYPES = {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
ITEMS_PER_SAVE = 32
"""Number of items that are spoken or scored between two writes of the results."""


def score_systems(
    eval_set: EvalSet,
    systems: Sequence[System],
    scorers: Scorers,
    out: Path,
    *,
    batch_size: int = 16,
    workers: int = SCORING_WORKERS,
    progress: ProgressCallback = silent,
    before_system: Callable[[System], None] = lambda _: None,
    save_references: bool = False,
    annotate: Callable[[Mapping[str, Sequence[ItemScores]]], None] = lambda _: None,
) -> dict[str, list[ItemScores]]:
    """Write audio and scores into `out` and return the scores by system, in the order of the items; an interrupted
    evaluation continues where it was. `before_system` is called for each system when its turn comes, and may write
    known results of it. `save_references` writes the clips that set the voice beside the speech. `annotate` may add to
    all scores before their table is written, once."""
    names = [system.name for system in systems]
    if len({safe_file_name(name).casefold() for name in names}) < len(names):
        raise ConfigError(f"two systems have one name: {', '.join(names)}", hint="give them as NAME=MODEL_OR_RUN")
    encoder = scorers.speaker_encoder
    speakers = SpeakerEmbeddings(eval_set, encoder) if encoder is not None else None
    rows: dict[str, list[ItemScores]] = {}
    for system in systems:
        before_system(system)
        results = ItemScoresFile(out, system.name)
        items = [item for item in eval_set.items if system.supports(item)]
        _generate(system, items, results, out, batch_size, progress)
        if save_references:
            _save_references(system, items, results, out)
        system.close()
        _score(system.name, items, results, scorers, speakers, out, workers, progress)
        rows[system.name] = [results.rows[item.id] for item in items]
    annotate(rows)
    write_item_scores(out / ITEMS_FILE, itertools.chain.from_iterable(rows.values()))
    return rows


def _generate(
    system: System,
    items: Sequence[EvalItem],
    results: ItemScoresFile,
    out: Path,
    batch_size: int,
    progress: ProgressCallback,
) -> None:
    """Speak the items that have no audio yet. Items of one maximum length are a queue, from which a free slot of the
    batch is filled at once; the longest come first, so that no slot is left alone with one at the end."""

    def is_done(item: EvalItem) -> bool:
        row = results.rows.get(item.id)
        if row is None or row.key != generation_key(system, item) or (row.audio and not (out / row.audio).is_file()):
            return False
        row.item_key = item.key  # rows of older evaluations do not have it
        return True

    missing = [item for item in items if not is_done(item)]
    missing.sort(key=lambda item: (-item.max_seconds, -len(item.text), item.id))
    done = len(items) - len(missing)
    progress(f"{system.name}: speaking", done, len(items))
    try:
        for _, queue in itertools.groupby(missing, key=lambda item: item.max_seconds):
            for item, output in system.speak(list(queue), batch_size):
                audio = audio_path(system.name, item.id) if len(output.samples) else ""
                if audio:
                    write_audio(out / audio, np.clip(output.samples, -1.0, 1.0), system.sample_rate)
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


def _save_references(system: System, items: Sequence[EvalItem], results: ItemScoresFile, out: Path) -> None:
    """Write the references of the items; those of earlier audio of the same name are replaced."""
    for item in items:
        row = results.rows[item.id]
        if not row.audio or row.stopped is None:  # nothing was spoken, or it is a recording
            continue
        # No item has `+` in its file name.
        count, stem = len(item.references), row.audio.removesuffix(".flac")
        names = [f"{stem}+reference{'' if count == 1 else f'-{number}'}.flac" for number in range(count)]
        audio = out / row.audio
        spoken = audio.stat().st_mtime_ns
        for file in saved_references(audio):
            if file.stat().st_mtime_ns < spoken:
                file.unlink()
        for clip, name in zip(item.references, names, strict=True):
            if not (out / name).is_file():
                write_audio(out / name, np.clip(load_clip(clip, system.sample_rate), -1.0, 1.0), system.sample_rate)


def _score(
    system: str,
    items: Sequence[EvalItem],
    results: ItemScoresFile,
    scorers: Scorers,
    speakers: SpeakerEmbeddings | None,
    out: Path,
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
    progress(f"{system}: scoring", done, len(items))

    def score(item: EvalItem) -> None:
        row = results.rows[item.id]
        scoring.score_item(row, item, load_audio(row, out), scorers, speakers, models)

    with torch_threads(max(1, torch.get_num_threads() // workers)), ThreadPoolExecutor(workers) as pool:
        for start in range(0, len(missing), ITEMS_PER_SAVE):
            for _ in pool.map(score, missing[start : start + ITEMS_PER_SAVE]):
                done += 1
                progress(f"{system}: scoring", done, len(items))
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


def load_audio(row: ItemScores, out: Path, sample_rate: int = LISTENING_RATE) -> Samples:
    return read_audio(out / row.audio, sample_rate=sample_rate) if row.audio else np.zeros(0, np.float32)


SCHEMA = pa.schema(
    # Either `str | None`, whose first argument is the type, or the type itself.
    [(name, ARROW_TYPES[(*get_args(hint), hint)[0]]) for name, hint in get_type_hints(ItemScores).items()]
)


class ItemScoresFile:
    """Rows of one system by item."""

    def __init__(self, out: Path, system: str) -> None:
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
