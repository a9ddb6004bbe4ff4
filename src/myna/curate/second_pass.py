"""Second pass: the rows of all parts in one table, with linked speakers, duplicates and gains; then clips and manifest.

The segments of the table tile each recording, which is checked. `myna prepare` reads the manifest.
"""

import math
import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import soundfile

from myna.audio.files import FloatArray, read_audio, write_audio
from myna.core.errors import DataError, ModelError
from myna.core.io import atomic_write, file_hash, fsync
from myna.core.progress import ProgressCallback, silent
from myna.curate.first_pass import cosine, segment_id
from myna.curate.models import CurationModels, models_folder
from myna.curate.recordings import CURATION_RATE, SAMPLES_PER_MS, DecodedRecording, Part, RecordingFile
from myna.curate.settings import CurateSettings, HoldOutSettings, LoudnessSettings, SpeakerSettings, split_enrolment
from myna.data.manifest import Utterance
from myna.data.segments import SCHEMA, TABLE_FILE, empty_row, lengths_ms, set_columns, values_of
from myna.data.split import assign_subsets
from myna.listen.diarization import LINKED_SPEAKER_COSINE, NOBODY, cluster_embeddings, fewest_seconds
from myna.listen.fingerprints import find_duplicates
from myna.listen.models import FETCH_COMMAND
from myna.listen.speaker_encoders import unit_vectors
from myna.text.normalization import base_language
from myna.text.spoken_forms import normalise_spoken_text

ROW_GROUP_ROWS = 100_000
ENROLMENT_FOLDER = "enrolment"

Recordings = Sequence[tuple[RecordingFile, DecodedRecording]]


def find_copies(recordings: Recordings) -> dict[str, str]:
    """Return the recordings whose samples equal an earlier one's, by name, with the name of that one."""
    first: dict[str, str] = {}
    copies = {}
    for file, decoded in recordings:
        if decoded.recording_hash and first.setdefault(decoded.recording_hash, file.name) != file.name:
            copies[file.name] = first[decoded.recording_hash]
    return copies


def assemble_table(
    recordings: Recordings, parts: Mapping[str, Sequence[Part]], findings: Mapping[str, Path]
) -> pa.Table:
    """Join all rows, sorted by recording and start. `parts` are by recording, `findings` the files of parts by id."""
    copies = find_copies(recordings)
    tables = [SCHEMA.empty_table()]
    for file, decoded in sorted(recordings, key=lambda pair: pair[0].name):
        done = 0
        if file.name in copies:
            row = _whole_row(file, decoded, 0, "duplicate") | {"duplicate_of": copies[file.name]}
            tables.append(pa.Table.from_pylist([row], SCHEMA))
            continue
        for part in parts.get(file.name, ()):
            table = pq.read_table(findings[part.id], schema=SCHEMA)
            name = pa.array([file.name] * len(table), pa.string())
            tables.append(table.set_column(SCHEMA.get_field_index("recording"), "recording", name))
            done = part.end_ms
        if done < decoded.duration_ms or not decoded.duration_ms:
            tables.append(pa.Table.from_pylist([_whole_row(file, decoded, done, "unreadable")], SCHEMA))
    table = pa.concat_tables(tables).combine_chunks()
    check_tiling(table, {file.name: decoded.duration_ms for file, decoded in recordings})
    return table


def _whole_row(file: RecordingFile, decoded: DecodedRecording, start: int, reason: str) -> dict[str, Any]:
    """Return a row for the rest of a recording, which was not listened to."""
    source = decoded.recording_hash if reason == "unreadable" else ""
    return empty_row() | {
        "id": segment_id(source or decoded.file_hash, start, decoded.duration_ms),
        "recording": file.name,
        "recording_hash": decoded.recording_hash,
        "start_ms": start,
        "end_ms": decoded.duration_ms,
        "kind": "gap",
        "status": "dropped",
        "reason": reason,
    }


def check_tiling(table: pa.Table, durations: Mapping[str, int]) -> None:
    """Check that every millisecond of every recording is in exactly one row."""
    names, starts, ends = (values_of(table, name) for name in ("recording", "start_ms", "end_ms"))
    first = np.flatnonzero(np.r_[True, names[1:] != names[:-1]]) if len(names) else np.empty(0, np.int64)
    last = np.r_[first[1:] - 1, len(names) - 1] if len(names) else first
    joined = np.ones(len(names), np.bool_)
    joined[1:] = starts[1:] == ends[:-1]
    joined[first] = starts[first] == 0
    found = dict(zip(names[first], ends[last].tolist(), strict=True))
    if not joined.all() or (ends < starts).any() or found != dict(durations) or len(found) != len(first):
        wrong = names[~joined][:1].tolist() or sorted(set(found.items()) ^ set(durations.items()))
        raise DataError(
            f"the segments do not tile their recordings: {wrong}",
            hint="this is a bug, or a file in parts/ is damaged: delete DIR/parts and curate again",
        )


def write_segments(folder: Path, table: pa.Table) -> None:
    with atomic_write(folder / TABLE_FILE) as temporary:
        pq.write_table(table, temporary, compression="zstd", row_group_size=ROW_GROUP_ROWS)
        fsync(temporary)


MIN_COVERED_SHARE = 0.5
"""Minimum share of a clip that earlier clips must hold for it to be a duplicate."""


def mark_duplicates(table: pa.Table) -> pa.Table:
    """Set `duplicate_of` of clips that mostly occurred before to the clip that holds most of them."""
    clips = np.flatnonzero(values_of(table, "kind") == "clip")
    found: dict[int, list[tuple[float, float, int]]] = {}
    for match in find_duplicates(table["fingerprint"].take(clips).to_pylist()):
        (start, earlier), (again, later) = (match.first_start, match.first), (match.second_start, match.second)
        if earlier > later:
            again, earlier, later = start, later, earlier
        if earlier != later:
            found.setdefault(later, []).append((again, again + match.seconds, earlier))
    seconds = lengths_ms(table) / 1000
    ids, original = table["id"].to_pylist(), table["duplicate_of"].to_pylist()
    for later, spans in found.items():
        row = int(clips[later])
        covered = reached = 0.0
        for start, end, _ in sorted(spans):
            covered += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        if covered >= MIN_COVERED_SHARE * seconds[row]:
            _, earlier = max((end - start, -earlier) for start, end, earlier in spans)
            original[row] = original[clips[-earlier]] or ids[clips[-earlier]]
    return set_columns(table, {"duplicate_of": original})


def keep_enrolments(out: Path, settings: CurateSettings) -> CurateSettings:
    """Copy the recordings of enrolled speakers into the folder; return settings that name the copies.

    Later decisions need them, whatever becomes of the originals, which may be pieces of an X-ray.
    """
    enrolment = []
    for name, file in map(split_enrolment, settings.speakers.enrolment):
        file = file.expanduser().absolute()
        moved = out.absolute() / ENROLMENT_FOLDER / file.name
        if file.parent.name == ENROLMENT_FOLDER and not file.is_file() and moved.is_file():
            file = moved  # the folder was moved with its copies
        if file.is_file():
            original, file = file, out.absolute() / ENROLMENT_FOLDER / f"{file_hash(file)[:16]}{file.suffix}"
            if not file.is_file():
                with atomic_write(file) as temporary:
                    shutil.copyfile(original, temporary)
        enrolment.append(f"{name}={file}")
    speakers = settings.speakers.model_copy(update={"enrolment": tuple(enrolment)})
    return settings.model_copy(update={"speakers": speakers})


def enrolment_embeddings(settings: CurateSettings, models: CurationModels) -> dict[str, FloatArray]:
    """Return the embeddings of the enrolled speakers by name."""
    if models.speaker_encoder is None:
        raise ModelError(
            f"the speaker encoder is missing, by which enrolled speakers are found: it is not in "
            f"{models_folder(settings.listen)}",
            hint=FETCH_COMMAND,
        )
    embeddings = {}
    for name, path in map(split_enrolment, settings.speakers.enrolment):
        if not path.is_file():
            hint = "put it back, or name another: --enrol NAME=FILE; for all speakers: --set speakers.enrolment=[]"
            raise DataError(f"the recording of the enrolled speaker {name} is not there: {path}", hint=hint)
        embeddings[name] = next(models.embed([read_audio(path, sample_rate=CURATION_RATE)]))
    return embeddings


def link_table_speakers(
    table: pa.Table, settings: SpeakerSettings, enrolled: dict[str, FloatArray] | None = None
) -> pa.Table:
    """Set `speaker` and `speaker_similarity`. Without embeddings each recording has one speaker."""
    embeddings = table["embedding"].to_pylist()
    clips = [row for row, kind in enumerate(table["kind"].to_pylist()) if kind == "clip"]
    speaker = np.full(len(table), "", object)
    similarity = np.full(len(table), math.nan, np.float32)
    voiced = [row for row in clips if embeddings[row]]
    if enrolled and clips and not voiced:
        problem = "these recordings were listened to without the speaker encoder, so enrolled speakers are not found"
        raise DataError(problem, hint="name the recordings, to listen to them again: myna curate SOURCE --out DIR")
    if not voiced:
        recordings = table["recording"].to_pylist()
        speaker[clips] = [str(PurePosixPath(recordings[row]).with_suffix("")) for row in clips]
        return set_columns(table, {"speaker": speaker, "speaker_similarity": similarity})
    # Rows of each speaker of each part; clips that no turn covers stand alone.
    by_turn: dict[tuple[str, str, int], list[int]] = {}
    parts, locals_ = table["part"].to_pylist(), table["local_speaker"].to_pylist()
    for row in voiced:
        by_turn.setdefault((parts[row], locals_[row], -1 if locals_[row] else row), []).append(row)
    groups = [(bool(local), rows) for (_, local, _), rows in by_turn.items()]
    seconds = lengths_ms(table) / 1000
    vectors = np.array([embeddings[row] for row in voiced], np.float32)
    vector_of = dict(zip(voiced, vectors, strict=True))
    means = np.array([_mean([vector_of[row] for row in rows], seconds[rows]) for _, rows in groups], np.float32)
    # Speech outside all turns never starts a new speaker; it is assigned to the nearest one.
    weights = np.array([seconds[rows].sum() if named else 0.0 for named, rows in groups])
    names = list(enrolled or {})
    labels = cluster_embeddings(
        means,
        weights if weights.any() else [seconds[rows].sum() for _, rows in groups],
        speakers=settings.number,
        threshold=settings.threshold if settings.threshold is not None else LINKED_SPEAKER_COSINE,
        enrolment=np.array([enrolled[name] for name in names], np.float32) if enrolled else None,
        enrolment_threshold=settings.enrolment_threshold,
        min_share=settings.min_share if settings.number else 0.0,
    )
    heard = {*labels.tolist()} - _marginal(table, labels, [rows for _, rows in groups], settings.min_share)
    for label, (_, rows) in zip(labels.tolist(), groups, strict=True):
        if label in heard and not (names and label >= len(names)):  # with enrolments, all other speakers are dropped
            speaker[rows] = names[label] if names else f"speaker-{label + 1}"
    for name in sorted(set(speaker[voiced]) - {""}):
        rows = [row for row in voiced if speaker[row] == name]
        mean = _mean([vector_of[row] for row in rows], seconds[rows])
        similarity[rows] = [cosine(vector_of[row], mean) for row in rows]
    return set_columns(table, {"speaker": speaker, "speaker_similarity": similarity})


def _marginal(
    table: pa.Table, labels: npt.NDArray[np.int64], groups: Sequence[list[int]], min_share: float
) -> set[int]:
    """Return the labels without a speaker, and those with too little speech in every recording."""
    length = lengths_ms(table)
    recordings = table["recording"].to_pylist()
    spoken: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for label, rows in zip(labels.tolist(), groups, strict=True):
        for row in rows:
            spoken[recordings[row]][label] += int(length[row])
    main = set()
    for shares in spoken.values():
        fewest = fewest_seconds(shares.total() / 1000, min_share)
        main |= {label for label, milliseconds in shares.items() if milliseconds / 1000 >= fewest}
    return ({*labels.tolist()} - main) | {NOBODY}


def _mean(vectors: Sequence[FloatArray], weights: npt.NDArray[np.float64]) -> FloatArray:
    return unit_vectors(np.average(np.array(vectors), axis=0, weights=weights))


def loudness_gains(table: pa.Table, settings: LoudnessSettings) -> pa.Table:
    """Set `gain_db`: one gain for the kept clips of each speaker in each recording, to a tenth of a decibel."""
    gain = np.full(len(table), math.nan, np.float32)
    kept = np.flatnonzero(values_of(table, "status") == "kept")
    speakers, recordings = table["speaker"].to_pylist(), table["recording"].to_pylist()
    loudness, peak = values_of(table, "loudness_lufs"), values_of(table, "peak_dbfs")
    seconds = lengths_ms(table) / 1000
    groups: dict[tuple[str, str], list[int]] = {}
    for row in kept.tolist():
        groups.setdefault((speakers[row], recordings[row]), []).append(row)
    for rows in groups.values():
        known = [row for row in rows if math.isfinite(loudness[row])]
        if settings.target_lufs is None or not known:
            gain[rows] = 0.0
            continue
        power = np.average(10 ** (loudness[known] / 10), weights=seconds[known])
        headroom = settings.max_peak_dbfs - np.nanmax(peak[rows])
        wanted = min(settings.target_lufs - 10 * math.log10(power), float(headroom))
        gain[rows] = math.floor(10 * wanted) / 10
    return set_columns(table, {"gain_db": gain})


CLIPS_FOLDER = "clips"


def name_clips(table: pa.Table) -> pa.Table:
    """Set the file of each kept clip. The name follows from the sound alone, so that an existing file is right."""
    clip = np.full(len(table), "", object)
    for row in _kept(table, ("recording_hash", "start_ms", "end_ms", "gain_db")):
        content = segment_id(row["recording_hash"], row["start_ms"], row["end_ms"])
        gain = round(10 * row["gain_db"])
        clip[row["row"]] = f"{CLIPS_FOLDER}/{content[:2]}/{content}{gain:+d}.flac"
    return set_columns(table, {"clip": clip})


def _kept(table: pa.Table, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    kept = np.flatnonzero(values_of(table, "status") == "kept")
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


def write_clips(folder: Path, table: pa.Table, progress: ProgressCallback = silent) -> list[Path]:
    """Write the missing clips; return those of earlier decisions, which stay: prepared folders may point to them."""
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
    present = (folder / CLIPS_FOLDER).glob("*/*.flac")
    return [path for path in present if path.relative_to(folder).as_posix() not in wanted]


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
