"""A curation from end to end: one pass that listens to recordings, and one that decides and exports the table."""

import hashlib
import json
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

import pyarrow as pa

from myna.audio.files import AudioFileError, probe, read_audio, write_audio
from myna.core.errors import ConfigError, DataError
from myna.core.io import atomic_write, claim_folder, fsync, lock_folder, save_text
from myna.core.pools import Pool, open_pool
from myna.core.progress import ProgressCallback, silent
from myna.curate import first_pass, second_pass
from myna.curate.decision import THRESHOLDS, decide
from myna.curate.first_pass import CurationWorker, findings_path
from myna.curate.models import NO_ASR, CurationModels, OpenModels
from myna.curate.recordings import (
    CURATION_RATE,
    PARTS_FOLDER,
    RECORDINGS_FOLDER,
    DecodedRecording,
    Part,
    RecordingFile,
    find_recordings,
)
from myna.curate.settings import CurateSettings
from myna.curate.texts import apply_scripts, read_script
from myna.data.corrections import apply_corrections, apply_hand_decisions, load_corrections
from myna.data.manifest import write_manifest
from myna.data.segments import TABLE_FILE
from myna.listen.speaker_encoders import SpeakerEmbedding

INDEX_FILE = "recordings.json"
MANIFEST_FILE = "manifest.jsonl"
FOLDER_KIND = "curation"
LITTLE_KEPT = 0.25
"""Share of the audio below which a note names the threshold that costs most."""
MAX_NAMED_FILES = 5
"""Maximum number of unreadable files that a note names."""


@dataclass(frozen=True, slots=True)
class IndexedRecording:
    """Recording of a curated folder."""

    name: str
    file_hash: str
    script: str | None


@dataclass(frozen=True, slots=True)
class CurationIndex:
    """Contents of `recordings.json`: the recordings and models that the table of a folder is made of."""

    first_pass: str
    """Hash of the settings and models of the first pass."""
    models: list[str]
    recordings: list[IndexedRecording]

    def save(self, folder: Path) -> None:
        save_text(folder / INDEX_FILE, json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Self:
        try:
            tree = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
            return cls(tree["first_pass"], tree["models"], [IndexedRecording(**one) for one in tree["recordings"]])
        except FileNotFoundError:
            problem = f"{folder} is no curated folder: it has no {INDEX_FILE}"
            raise DataError(problem, hint="name recordings: myna curate SOURCE --out DIR") from None
        except (ValueError, KeyError, TypeError) as error:
            problem = f"{folder / INDEX_FILE} is damaged: {error}"
            raise DataError(problem, hint="delete it, and give the sources again") from None


@dataclass(frozen=True, slots=True)
class CurationResult:
    """Curated folder, which can be used as a path."""

    folder: Path
    recordings: int
    seconds: float
    """Seconds of all recordings."""
    kept_seconds: float
    clips: int
    speakers: dict[str, float]
    """Seconds kept of each speaker, in decreasing order."""
    dropped: dict[str, float]
    """Seconds dropped by reason, in decreasing order."""
    notes: tuple[str, ...] = ()

    def __fspath__(self) -> str:
        return str(self.folder)


def run_curation(
    sources: Sequence[Path],
    out: Path,
    settings: CurateSettings,
    *,
    script: Path | None = None,
    workers: int | None = None,
    ray: str | None = None,
    limit: int | None = None,
    open_models: OpenModels = CurationModels.open,
    progress: ProgressCallback = silent,
) -> CurationResult:
    """Curate the sources into a folder, or go on with it; without sources, decide again about its contents."""
    claim_folder(out, FOLDER_KIND, known=(TABLE_FILE, INDEX_FILE), inputs=sources)
    with lock_folder(out, "curating into"):
        notes: list[str] = []
        enrolled = None
        if settings.speakers.enrolment:
            settings = second_pass.keep_enrolments(out, settings)
            models = open_models(settings.listen.model_copy(update={"asr": NO_ASR, "check_asr": None}), 0)
            enrolled = second_pass.enrolment_embeddings(settings, models)
        if sources:
            absolute = first_pass.with_absolute_paths(settings)
            make_worker = partial(CurationWorker, out.absolute(), absolute, open_models)
            number = workers or (first_pass.default_workers(settings.listen.device) if ray is None else None)
            with open_pool(make_worker, number, ray, settings.listen.device) as pool:
                index = _listen(sources, out, settings, script, limit, pool, progress, notes)
        else:
            index = CurationIndex.load(out)
            if index.first_pass != settings.first_pass_hash(index.models):
                raise ConfigError(
                    "settings under `listen` or `cut` were changed, and need the recordings to be listened to again",
                    hint=f"name the recordings: myna curate SOURCE --out {out}",
                )
        table = _decide_table(out, index, settings, enrolled, notes)
        progress("deciding", 1, 1)
        if unused := second_pass.write_clips(out, table, progress):
            notes.append(
                f"{len(unused)} clips of earlier decisions stay, for datasets that were prepared from them; to remove "
                f"them: rm -r {out / second_pass.CLIPS_FOLDER} && myna curate --out {out}"
            )
        second_pass.write_segments(out, table)
        write_manifest(out / MANIFEST_FILE, second_pass.utterances_of(out, table))
        settings.save(out)
    result = summarize(out, table)
    if settings.listen.asr == NO_ASR and not result.clips:
        notes.append("nothing was kept: no clip has a text, without a recogniser")
        notes.append(f"To have one:  myna curate SOURCE --out {out} --asr base")
        return replace(result, notes=tuple(notes))
    costly = [(reason, seconds) for reason, seconds in result.dropped.items() if reason in THRESHOLDS]
    if costly and result.kept_seconds < LITTLE_KEPT * result.seconds:
        reason, seconds = costly[0]
        setting = THRESHOLDS[reason]
        now = getattr(settings.keep, setting)
        notes.append(f"little was kept: {seconds / result.seconds:.0%} is `{reason}`, by keep.{setting}={now:g}")
        notes.append(f"To keep more of it:  myna curate --out {out} --set keep.{setting}=VALUE")
    return replace(result, notes=tuple(notes))


def _listen(
    sources: Sequence[Path],
    out: Path,
    settings: CurateSettings,
    script: Path | None,
    limit: int | None,
    pool: Pool[CurationWorker],
    progress: ProgressCallback,
    notes: list[str],
) -> CurationIndex:
    """Run the first pass over everything that it has not listened to yet."""
    files = find_recordings(sources, out=out)[:limit]
    decoded: dict[Path, DecodedRecording] = {}
    for path, one in pool.map(CurationWorker.decode, (file.path.absolute() for file in files)):
        decoded[path] = one
        progress("decoding", len(decoded), len(files))
    recordings = [(file, decoded[file.path.absolute()]) for file in files]
    _check_none_is_lost(out, {one.file_hash for one in decoded.values()})
    names, *others = pool.call_each(CurationWorker.model_names)
    if different := [one for one in others if one != names]:
        raise ConfigError(
            f"nodes of the cluster have different models: {names} and {different[0]}",
            hint="copy one folder of models to all of them; myna doctor --ray ADDRESS compares them",
        )
    parts = part_list(recordings, settings.first_pass_hash(names))
    unique = [part for group in parts.values() for part in group]
    pending = [part for part in unique if not findings_path(out, part).is_file()]
    total = round(sum(part.seconds for part in unique))
    done = total - sum(part.seconds for part in pending)
    progress("listening", round(done), total)
    longest_first = sorted(pending, key=lambda part: -part.seconds)
    for part, _ in pool.map(CurationWorker.run_first_pass, longest_first, describe=lambda part: part.audio):
        done += part.seconds
        progress("listening", round(done), total)
    damaged = [f"could not be read to its end: {file.name}: {one.problem}" for file, one in recordings if one.problem]
    notes += damaged[:MAX_NAMED_FILES]
    if len(damaged) > MAX_NAMED_FILES:
        notes.append(f"and {len(damaged) - MAX_NAMED_FILES} more; the table has all, with the reason `unreadable`")
    entries = []
    for file, one in recordings:
        text = script or file.script
        entries.append(IndexedRecording(file.name, one.file_hash, str(text.absolute()) if text else None))
    index = CurationIndex(settings.first_pass_hash(names), names, entries)
    index.save(out)
    return index


def _check_none_is_lost(out: Path, hashes: set[str]) -> None:
    """Refuse sources without a recording that the folder holds: its clips would leave the dataset without a message."""
    earlier = CurationIndex.load(out).recordings if (out / INDEX_FILE).is_file() else []
    if lost := [one.name for one in earlier if one.file_hash not in hashes]:
        listed = ", ".join(lost[:MAX_NAMED_FILES]) + (", ..." if len(lost) > MAX_NAMED_FILES else "")
        raise DataError(
            f"{out} holds {len(lost)} recordings that are not among the sources: {listed}",
            hint="name all sources at once (an edited one is another), or another folder: --out NEW; to leave "
            f"these recordings out of the dataset, first type: rm {out / INDEX_FILE}",
        )


def part_list(recordings: second_pass.Recordings, first_pass_hash: str) -> dict[str, list[Part]]:
    """Return the parts of the first pass by recording, without recordings that are copies of another one."""
    copies = second_pass.find_copies(recordings)
    parts: dict[str, list[Part]] = {}
    for file, decoded in recordings:
        if file.name not in copies:
            parts[file.name] = []
            for one in decoded.parts:
                key = f"{decoded.recording_hash} {one.pcm_hash} {one.start_ms} {one.end_ms} {first_pass_hash}"
                part_id = hashlib.sha256(key.encode()).hexdigest()
                parts[file.name].append(replace(one, id=part_id, recording_hash=decoded.recording_hash))
    return parts


def _decide_table(
    out: Path,
    index: CurationIndex,
    settings: CurateSettings,
    enrolled: dict[str, SpeakerEmbedding] | None,
    notes: list[str],
) -> pa.Table:
    """Run the second pass: everything that follows from the rows of the parts."""
    recordings = []
    for one in index.recordings:
        decoded = DecodedRecording.load(out, one.file_hash)
        if decoded is None:
            raise DataError(f"{one.name} is gone from {out}", hint="give the sources again")
        recordings.append((RecordingFile(Path(one.name), one.name), decoded))
    parts = part_list(recordings, index.first_pass)
    findings = {part.id: findings_path(out, part) for group in parts.values() for part in group}
    if missing := [path for path in findings.values() if not path.is_file()]:
        raise DataError(f"{missing[0]} is gone", hint="give the sources again")
    table = second_pass.assemble_table(recordings, parts, findings)
    scripts = {one.name: read_script(Path(one.script)) for one in index.recordings if one.script}
    table = apply_scripts(table, scripts)
    table = second_pass.link_table_speakers(table, settings.speakers, enrolled)
    table = second_pass.mark_duplicates(table)
    corrections = load_corrections(out, notes.append)
    table = apply_corrections(table, corrections, notes.append)
    table = apply_hand_decisions(decide(table, settings), corrections)
    table = second_pass.add_diacritics(table) if settings.text.diacritics else table
    table = second_pass.name_clips(second_pass.loudness_gains(table, settings.loudness))
    return second_pass.assign_splits(table, out, settings.split)


def summarize(folder: Path, table: pa.Table) -> CurationResult:
    """Sum up the hours kept and dropped of a decided table. They add up to the length of all recordings, exactly."""
    columns = [table[name].to_pylist() for name in ("start_ms", "end_ms", "status", "reason", "speaker")]
    kept: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    for start, end, status, reason, speaker in zip(*columns, strict=True):
        if status == "kept":
            kept[speaker] += end - start
        else:
            dropped[reason] += end - start
    return CurationResult(
        folder,
        len(set(table["recording"].to_pylist())),
        (kept.total() + dropped.total()) / 1000,
        kept.total() / 1000,
        columns[2].count("kept"),
        {name: length / 1000 for name, length in kept.most_common()},
        {name: length / 1000 for name, length in dropped.most_common()},
    )


SAMPLE_SECONDS, PIECE_SECONDS = 600.0, 120.0


@dataclass(frozen=True, slots=True)
class CurationForecast:
    """Prediction for all recordings from a sample."""

    seconds: float
    sampled_seconds: float
    kept_seconds: float
    """Predicted seconds kept of all recordings."""
    dropped: dict[str, float]
    """Share of the sample dropped by reason."""
    work_seconds: float
    """Predicted seconds of work on this machine for all recordings."""
    notes: tuple[str, ...] = ()


def forecast(
    sources: Sequence[Path],
    settings: CurateSettings,
    *,
    out: Path | None = None,
    limit: int | None = None,
    workers: int | None = None,
    open_models: OpenModels = CurationModels.open,
    progress: ProgressCallback = silent,
) -> CurationForecast:
    """Curate pieces of two minutes, drawn evenly over all recordings, and extrapolate.

    Sources of up to ten minutes are curated as they are, and `out` gets what was heard: a curation goes on from there.
    """
    with tempfile.TemporaryDirectory(prefix="myna-forecast-") as scratch:
        folder = Path(scratch)
        lengths, notes = {}, []
        for file in find_recordings(sources, out=out or folder)[:limit]:
            try:
                lengths[file.path] = probe(file.path).seconds
            except AudioFileError as error:
                notes.append(error.what)
        total = sum(lengths.values())
        is_whole = total <= SAMPLE_SECONDS
        sample = list(lengths) if is_whole else [folder / "sample"]
        sampled = total if is_whole else _write_sample(lengths, sample[0], notes)
        if not sampled:
            raise DataError("no recording could be read", hint="; ".join(notes) or "name other files")
        began = time.monotonic()
        processes = workers or first_pass.default_workers(settings.listen.device)
        curated = folder / "curated"
        result = run_curation(sample, curated, settings, workers=processes, open_models=open_models, progress=progress)
        took = time.monotonic() - began
        if is_whole and out is not None:
            claim_folder(out, FOLDER_KIND, known=(TABLE_FILE, INDEX_FILE), inputs=sources)
            with lock_folder(out, "curating into"):
                _copy_findings(curated, out)
    return CurationForecast(
        total,
        sampled,
        result.kept_seconds / result.seconds * total,
        {name: seconds / result.seconds for name, seconds in result.dropped.items()},
        took / sampled * total,
        tuple(notes),
    )


def _write_sample(lengths: dict[Path, float], folder: Path, notes: list[str]) -> float:
    """Write pieces of the recordings into a folder; return their seconds."""
    sampled = 0.0
    for number, (path, start, end) in enumerate(sample_pieces(lengths)):
        try:
            samples = read_audio(path, sample_rate=CURATION_RATE, span=(start, end))
        except AudioFileError as error:
            notes.append(error.what)
            continue
        write_audio(folder / f"{number:02}.flac", samples, CURATION_RATE)
        sampled += len(samples) / CURATION_RATE
    return sampled


def _copy_findings(curated: Path, out: Path) -> None:
    """Copy what the first pass found, so that a curation into `out` does not listen again."""
    for folder in (PARTS_FOLDER, RECORDINGS_FOLDER):  # a recording counts as decoded once its parts are there
        for file in sorted((curated / folder).glob("*")):
            with atomic_write(out / folder / file.name) as temporary:
                shutil.copyfile(file, temporary)
                fsync(temporary)


def sample_pieces(lengths: dict[Path, float]) -> list[tuple[Path, float, float]]:
    """Return spans of recordings of ten minutes together."""
    total = sum(lengths.values())
    rng = random.Random(0)
    count = int(SAMPLE_SECONDS // PIECE_SECONDS)
    pieces = []
    for number in range(count):
        # One piece at a random place in each equal share of the whole.
        at = total * (number + rng.random()) / count
        for path, seconds in lengths.items():
            if at < seconds:
                start = max(0.0, min(at, seconds - PIECE_SECONDS))
                pieces.append((path, start, min(seconds, start + PIECE_SECONDS)))
                break
            at -= seconds
    return sorted(set(pieces))
