"""Export of a curation: FLAC clips and the manifest that `myna prepare` reads, from the decided table."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import soundfile

from myna.audio.files import write_audio
from myna.core.errors import DataError
from myna.core.io import safe_file_name
from myna.core.progress import ProgressCallback, silent
from myna.curate.first_pass import segment_id
from myna.curate.recordings import CURATION_RATE, SAMPLES_PER_MS
from myna.curate.settings import HoldOutSettings
from myna.data.manifest import Utterance
from myna.data.segments import set_columns
from myna.data.split import assign_subsets
from myna.text.normalization import base_language
from myna.text.spoken_forms import normalise_spoken_text

CLIPS_FOLDER = "clips"


def name_clips(table: pa.Table) -> pa.Table:
    """Set the file of each kept clip. The name follows from the contents, so that an existing file is right."""
    clip = np.full(len(table), "", object)
    for row in _kept(table, ("recording_hash", "start_ms", "end_ms", "gain_db", "speaker")):
        content = segment_id(row["recording_hash"], row["start_ms"], row["end_ms"])
        gain = round(10 * row["gain_db"])
        clip[row["row"]] = f"{CLIPS_FOLDER}/{safe_file_name(row['speaker'])}/{content}{gain:+d}.flac"
    return set_columns(table, {"clip": clip})


def _kept(table: pa.Table, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    kept = np.flatnonzero(table["status"].to_numpy(zero_copy_only=False) == "kept")
    for row, number in zip(table.select(columns).take(kept).to_pylist(), kept.tolist(), strict=True):
        yield row | {"row": number}


def add_diacritics(table: pa.Table) -> pa.Table:
    """Add vowel signs to the normalised text of kept Arabic clips."""
    columns = (table[name].to_pylist() for name in ("normalised_text", "language", "status"))
    spoken = [
        normalise_spoken_text(text, language, diacritics=True)
        if text and status == "kept" and base_language(language) == "ar"
        else text
        for text, language, status in zip(*columns, strict=True)
    ]
    return set_columns(table, {"normalised_text": spoken})


def write_clips(folder: Path, table: pa.Table, progress: ProgressCallback = silent) -> None:
    """Write the missing clips, then remove those that are no longer kept."""
    by_part: dict[str, list[dict[str, Any]]] = {}
    wanted = set()
    for row in _kept(table, ("audio", "audio_start_ms", "start_ms", "end_ms", "gain_db", "clip")):
        wanted.add(row["clip"])
        if not (folder / row["clip"]).is_file():
            by_part.setdefault(row["audio"], []).append(row)
    total = sum(map(len, by_part.values()))
    done = 0

    def write_part(audio: str) -> int:
        with soundfile.SoundFile(folder / audio) as file:
            for row in by_part[audio]:
                file.seek(row["audio_start_ms"] * SAMPLES_PER_MS)
                samples = file.read((row["end_ms"] - row["start_ms"]) * SAMPLES_PER_MS, dtype="float32")
                write_audio(folder / row["clip"], samples * np.float32(10 ** (row["gain_db"] / 20)), CURATION_RATE)
        return len(by_part[audio])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for count in pool.map(write_part, by_part):
            done += count
            progress("writing clips", done, total)
    for path in (folder / CLIPS_FOLDER).glob("*/*.flac"):
        if path.relative_to(folder).as_posix() not in wanted:
            path.unlink()
    for path in (folder / CLIPS_FOLDER).glob("*/"):
        with suppress(OSError):  # not empty
            path.rmdir()


def utterances_of(folder: Path, table: pa.Table) -> list[Utterance]:
    """Return kept clips as utterances, in the order of the table."""
    utterances = []
    names = ("id", "recording", "start_ms", "end_ms", "clip", "speaker", "text", "normalised_text", "language")
    for row in _kept(table, names):
        extras = {key: row[key] for key in ("recording", "start_ms", "end_ms")}
        if row["normalised_text"] != row["text"]:
            extras["normalised_text"] = row["normalised_text"]
        utterances.append(
            Utterance(row["id"], folder / row["clip"], row["text"], row["speaker"], row["language"], None, extras)
        )
    return utterances


def assign_splits(table: pa.Table, folder: Path, settings: HoldOutSettings) -> pa.Table:
    """Set `split` to what `myna split` will hold out of the kept clips with equal numbers and seed."""
    utterances = utterances_of(folder, table)
    subset_of: dict[str, str] = {}
    if utterances:
        # The requested number, but at most a tenth of all texts.
        texts = min(settings.texts, len({utterance.text for utterance in utterances}) // 10)
        try:
            subset_of |= assign_subsets(
                utterances, lambda one: one.id, speakers=settings.speakers, texts=texts, seed=settings.seed
            ).subset_of
        except DataError as error:
            hint = "hold out fewer: --set split.texts=0 --set split.speakers=0"
            raise DataError(f"the kept clips cannot be split: {error.what}", hint=hint) from None
    split = [subset_of.get(id, "") for id in table["id"].to_pylist()]
    return set_columns(table, {"split": split})
