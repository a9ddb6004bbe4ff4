"""Corrections of a dataset by hand: an append-only log (`corrections.jsonl`), applied to tables and utterances.

A correction is a line of JSON: another text, a clip dropped or restored, another speaker, two speakers merged, edges
moved. The later one wins. Applying the log twice gives the same result as applying it once. Names such as `speaker-3`
change with every decision, so a correction of a speaker also lists clips of that person, by which they are found again.
"""

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from myna.core.config import Settings
from myna.core.errors import ConfigError, DataError
from myna.core.io import acquire_lock, is_file
from myna.data.dataset import MANIFEST_FILE
from myna.data.manifest import Span, Utterance, iterate_manifest
from myna.data.segments import RECOGNITION_MEASURES, SCHEMA, TABLE_FILE, empty_row, move_edges, set_columns
from myna.text.normalization import normalise_text
from myna.text.spoken_forms import normalise_spoken_text

CORRECTIONS_FILE = "corrections.jsonl"
LOCK_FILE = ".corrections.lock"
AUTOMATIC_SPEAKER = re.compile(r"speaker-\d+")
"""Speaker names assigned by rank (`speaker-1` speaks most). They may change after a new decision."""
MAX_SPEAKER_CLIPS = 20
"""Maximum number of clips by which a speaker is found again, the longest ones."""
NEEDED_COLUMNS = [name for name in SCHEMA.names if name not in ("embedding", "fingerprint")]
CORRECTED = "corrected"
"""Value of `text_source` for a text that a person gave."""
DROPPED_BY_HAND = "dropped by hand"


def _spoken_text(text: str) -> str:
    if not (plain := normalise_text(text)):
        raise ValueError("there is no text; drop the clip instead")
    return plain


Name = Annotated[str, Field(min_length=1)]
SpokenText = Annotated[str, AfterValidator(_spoken_text)]
Milliseconds = Annotated[int, Field(ge=0)]
Notify = Callable[[str], None]


class _CorrectionLine(Settings):
    time: str = Field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))


class TextCorrection(_CorrectionLine):
    """The right text of a clip."""

    action: Literal["text"] = "text"
    clip: Name
    text: SpokenText


class ClipDrop(_CorrectionLine):
    """Exclusion of a clip."""

    action: Literal["drop"] = "drop"
    clip: Name


class ClipRestore(_CorrectionLine):
    """Inclusion of a clip, whatever excluded it."""

    action: Literal["restore"] = "restore"
    clip: Name


class SpeakerCorrection(_CorrectionLine):
    """The right speaker of a clip; `clips` are others of theirs."""

    action: Literal["speaker"] = "speaker"
    clip: Name
    speaker: Name
    clips: tuple[Name, ...] = ()


class SpeakerMerge(_CorrectionLine):
    """Two speaker names for the same person, and clips of each. `into` may be a new name."""

    action: Literal["merge"] = "merge"
    speaker: Name
    into: Name
    clips: tuple[Name, ...] = ()
    into_clips: tuple[Name, ...] = ()


class EdgeMove(_CorrectionLine):
    """New edges of a clip in its recording; None leaves an edge unchanged."""

    action: Literal["edges"] = "edges"
    clip: Name
    start_ms: Milliseconds | None = None
    end_ms: Milliseconds | None = None


class TornLine(_CorrectionLine):
    """Incomplete line of a process that was killed while writing. It is kept, and has no effect."""

    action: Literal["torn"] = "torn"
    content: str


Correction = TextCorrection | ClipDrop | ClipRestore | SpeakerCorrection | SpeakerMerge | EdgeMove | TornLine
_LINE: TypeAdapter[Correction] = TypeAdapter(Annotated[Correction, Field(discriminator="action")])


def make_correction(
    clip: str | None,
    *,
    text: str | None = None,
    drop: bool = False,
    restore: bool = False,
    speaker: str | None = None,
    start: float | None = None,
    end: float | None = None,
) -> Correction:
    """Make a correction from command options: exactly one change, and a clip unless it merges two speakers, A=B."""
    moved = start is not None or end is not None
    if (text is not None) + drop + restore + (speaker is not None) + moved != 1:
        options = "--text, --drop, --restore, --speaker, or --start and --end"
        raise ConfigError("a correction is one thing", hint=f"give one of {options}")
    try:
        if speaker is not None and clip is None:
            name, equals, into = speaker.partition("=")
            if not equals:
                raise ConfigError(f"--speaker {speaker} names no clip and no second speaker", hint="--speaker A=B")
            return SpeakerMerge(speaker=name, into=into)
        if clip is None:
            raise ConfigError("which clip?", hint="name its id, which is on the X-ray: myna correct DIR CLIP ...")
        if text is not None:
            return TextCorrection(clip=clip, text=text)
        if speaker is not None:
            return SpeakerCorrection(clip=clip, speaker=speaker)
        if moved:
            edges = [None if seconds is None else round(1000 * seconds) for seconds in (start, end)]
            return EdgeMove(clip=clip, start_ms=edges[0], end_ms=edges[1])
        return ClipDrop(clip=clip) if drop else ClipRestore(clip=clip)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{where}: {first['msg']}", hint="see `myna correct --help`") from None


def load_corrections(folder: Path, notify: Notify = lambda _: None) -> list[Correction]:
    """Load the corrections of a folder in order; none without a file. Leaves out an incomplete last line with a
    note."""
    path = folder / CORRECTIONS_FILE
    if not is_file(path):
        return []
    whole, torn = _split_torn(path.read_bytes())
    corrections = []
    for number, line in enumerate(whole.split(b"\n"), start=1):
        if line.strip():
            try:
                corrections.append(_LINE.validate_json(line))
            except ValidationError as error:
                reason = error.errors(include_url=False)[0]
                where = ".".join(map(str, reason["loc"]))
                problem = f"{path}:{number} is no correction: {where + ': ' if where else ''}{reason['msg']}"
                raise DataError(problem, hint="mend or remove that line") from None
    if torn:
        notify(f"{path}: the last line was not written whole, and is left out: {torn.decode(errors='replace')[:80]}")
    return corrections


def _split_torn(content: bytes) -> tuple[bytes, bytes]:
    whole, newline, tail = content.rpartition(b"\n")
    try:
        _LINE.validate_json(tail)
    except ValidationError:
        return whole + newline, tail
    return content, b""


def append_correction(folder: Path, correction: Correction) -> None:
    """Append a correction to the log, under a lock: on the disk when this returns, or not at all if it raises."""
    path = folder / CORRECTIONS_FILE
    line = correction.model_dump_json(exclude_none=True).encode() + b"\n"
    with acquire_lock(folder / LOCK_FILE), path.open("a+b", buffering=0) as file:
        file.seek(0)
        whole, torn = _split_torn(file.read())
        if torn:
            left = TornLine(content=torn.decode(errors="backslashreplace"))
            line = left.model_dump_json().encode() + b"\n" + line
        elif whole and not whole.endswith(b"\n"):
            line = b"\n" + line
        file.truncate(len(whole))
        try:
            written = file.write(line)
            if written != len(line):
                raise OSError(28, os.strerror(28), str(path))
            os.fsync(file.fileno())
        except OSError:
            file.truncate(len(whole))
            file.write(torn)
            raise


# Tables


def apply_corrections(table: pa.Table, corrections: Sequence[Correction], notify: Notify = lambda _: None) -> pa.Table:
    """Apply corrections of texts, speakers and edges to a curation table, whose rows still tile every recording.

    Call it before the decision. A correction of a clip that no longer exists has no effect, with a note.
    """
    rows = _row_numbers(table, corrections)
    for correction in corrections:
        if (clip := getattr(correction, "clip", None)) is not None and clip not in rows:
            notify(f"there is no clip {clip} any more: its correction ({correction.action}) has no effect")
    texts = {rows[c.clip]: c.text for c in corrections if isinstance(c, TextCorrection) and c.clip in rows}
    table = _set_texts(table, texts)
    table = _set_speakers(table, corrections, rows, notify)
    moves = [(rows[c.clip], (c.start_ms, c.end_ms)) for c in corrections if isinstance(c, EdgeMove) and c.clip in rows]
    return move_edges(table, moves, notify) if moves else table


def apply_hand_decisions(table: pa.Table, corrections: Sequence[Correction]) -> pa.Table:
    """Apply exclusions and inclusions by hand to a decided table. Call it after the decision."""
    rows = _row_numbers(table, corrections)
    decisions = [c for c in corrections if isinstance(c, ClipDrop | ClipRestore) and c.clip in rows]
    keep = {rows[c.clip]: isinstance(c, ClipRestore) for c in decisions}
    if not keep:
        return table
    statuses, reasons = _strings(table, "status"), _strings(table, "reason")
    for row, is_kept in keep.items():
        statuses[row], reasons[row] = ("kept", "") if is_kept else ("dropped", DROPPED_BY_HAND)
    return set_columns(table, {"status": statuses, "reason": reasons})


def is_corrected(table: pa.Table, corrections: Sequence[Correction]) -> bool:
    """Whether a decided table holds all corrections already."""
    corrected = apply_hand_decisions(apply_corrections(table, corrections), corrections)
    columns = ["id", "start_ms", "end_ms", "speaker", "text", "status"]
    return bool(corrected.select(columns).equals(table.select(columns)))


def check_correction(table: pa.Table, corrections: Sequence[Correction], correction: Correction) -> None:
    """Raise an error for a correction that would have no effect on a table to which `corrections` were applied."""
    if isinstance(correction, SpeakerMerge | SpeakerCorrection):
        named = [correction.into, correction.speaker] if isinstance(correction, SpeakerMerge) else [correction.speaker]
        speakers = sorted(set(filter(None, table["speaker"].unique().to_pylist())))
        merged = {c.speaker: c.into for c in corrections if isinstance(c, SpeakerMerge) and c.speaker not in speakers}
        if named[0] in merged:
            raise DataError(f"{named[0]} was merged into {merged[named[0]]}", hint=f"use {merged[named[0]]} instead")
        unknown = [name for name in named[1:] if name not in speakers]
        unknown += [name for name in named[:1] if name not in speakers and AUTOMATIC_SPEAKER.fullmatch(name)]
        if unknown:
            raise DataError(f"there is no speaker {unknown[0]}", hint=f"the speakers are {', '.join(speakers[:20])}")
    if isinstance(correction, SpeakerMerge):
        if correction.speaker == correction.into:
            raise DataError(f"{correction.speaker} is one speaker already", hint="name two: --speaker A=B")
        return
    assert not isinstance(correction, TornLine)
    rows = _row_numbers(table, [correction])
    if correction.clip not in rows:
        raise DataError(f"there is no clip {correction.clip}", hint=f"the ids are in {TABLE_FILE} and on the X-ray")
    row = table.slice(rows[correction.clip], 1)
    if row["kind"][0].as_py() != "clip":
        raise DataError(
            f"{correction.clip} is a gap, not a clip", hint="a clip beside it can be made longer: --start, --end"
        )
    if isinstance(correction, ClipRestore) and not row["text"][0].as_py():
        raise DataError(f"{correction.clip} has no text", hint="give it one first: --text")
    if isinstance(correction, EdgeMove):
        problems: list[str] = []
        move_edges(table, [(rows[correction.clip], (correction.start_ms, correction.end_ms))], problems.append)
        if problems:
            raise DataError(problems[0], hint="the times of the clips around it are on the X-ray's timeline")


def _row_numbers(table: pa.Table, corrections: Iterable[Correction]) -> dict[str, int]:
    """Return the rows of the clips that corrections name."""
    fields = (getattr(c, name, ()) for c in corrections for name in ("clips", "into_clips"))
    named = {c.clip for c in corrections if not isinstance(c, SpeakerMerge | TornLine)}
    clips = sorted(named.union(*fields))
    found = pc.index_in(pa.array(clips, pa.string()), value_set=table["id"].combine_chunks()).to_pylist()
    return {clip: row for clip, row in zip(clips, found, strict=True) if row is not None}


def _strings(table: pa.Table, name: str) -> npt.NDArray[np.object_]:
    values: npt.NDArray[np.object_] = table[name].to_numpy(zero_copy_only=False).astype(object)
    return values.copy()


def _set_texts(table: pa.Table, texts: dict[int, str]) -> pa.Table:
    if not texts:
        return table
    at = np.fromiter(texts, np.int64)
    values = np.array(list(texts.values()), object)
    columns: dict[str, Any] = {name: _strings(table, name) for name in ("text", "text_source", "normalised_text")}
    languages = table["language"].take(pa.array(at)).to_pylist()
    spoken = [normalise_spoken_text(text, language or "") for text, language in zip(values, languages, strict=True)]
    columns["text"][at], columns["normalised_text"][at] = values, np.array(spoken, object)
    columns["text_source"][at] = CORRECTED
    for name in RECOGNITION_MEASURES:
        columns[name] = np.array(table[name].to_numpy(zero_copy_only=False), np.float32)
        columns[name][at] = math.nan
    return set_columns(table, columns)


def _set_speakers(table: pa.Table, corrections: Sequence[Correction], rows: dict[str, int], notify: Notify) -> pa.Table:
    changes = [c for c in corrections if isinstance(c, SpeakerMerge | SpeakerCorrection)]
    if not changes:
        return table
    encoded = table["speaker"].combine_chunks().dictionary_encode()
    codes = encoded.indices.to_numpy(zero_copy_only=False).copy()
    names = encoded.dictionary.to_pylist()
    # A clip that was moved by itself tells nothing about its former speaker.
    moved = {change.clip for change in changes if isinstance(change, SpeakerCorrection)}

    def find(name: str, clips: Sequence[str]) -> int | None:
        """Return the speaker of most of these clips, or without clips the one of that name, who may be new."""
        if votes := Counter(int(codes[rows[clip]]) for clip in clips if clip in rows and clip not in moved):
            return votes.most_common(1)[0][0]
        if clips and AUTOMATIC_SPEAKER.fullmatch(name):
            notify(f"there are no clips of {name} any more by which to find them: their correction has no effect")
            return None
        if name not in names:
            names.append(name)
        return int(names.index(name))

    for change in changes:
        if isinstance(change, SpeakerMerge):
            speaker, target = find(change.speaker, change.clips), find(change.into, change.into_clips)
            if speaker is not None and target is not None:
                codes[codes == speaker] = target
        elif change.clip in rows and (target := find(change.speaker, change.clips)) is not None:
            codes[rows[change.clip]] = target
    return set_columns(table, {"speaker": np.array(names, object)[codes]})


def list_speaker_clips(table: pa.Table, corrections: Sequence[Correction], correction: Correction) -> Correction:
    """Return a correction with the clips of the speakers that it names. `corrections` were applied to the table."""
    if not isinstance(correction, SpeakerMerge | SpeakerCorrection):
        return correction
    moved = {one.clip for one in (*corrections, correction) if isinstance(one, SpeakerCorrection)}
    rows = table.select(["id", "kind", "speaker", "start_ms", "end_ms"]).to_pylist()

    def clips_of(speaker: str) -> tuple[str, ...]:
        own = [one for one in rows if (one["kind"], one["speaker"]) == ("clip", speaker) and one["id"] not in moved]
        own.sort(key=lambda one: one["start_ms"] - one["end_ms"])
        return tuple(one["id"] for one in own[:MAX_SPEAKER_CLIPS])

    found = {"clips": clips_of(correction.speaker)}
    if isinstance(correction, SpeakerMerge):
        found["into_clips"] = clips_of(correction.into)
    return correction.model_copy(update=found)


# Folders


def add_correction(folder: Path, correction: Correction, notify: Notify = lambda _: None) -> None:
    """Check a correction against a curated or prepared folder as it was corrected before, and append it."""
    corrections = load_corrections(folder, notify)
    if (folder / TABLE_FILE).is_file():
        table = pq.read_table(folder / TABLE_FILE, columns=NEEDED_COLUMNS)
        table = apply_hand_decisions(apply_corrections(table, corrections), corrections)
        listed = list_speaker_clips(table, corrections, correction)
    else:
        table, listed = _manifest_table(folder, corrections, correction), correction
    check_correction(table, corrections, correction)
    append_correction(folder, listed)


def _manifest_table(folder: Path, corrections: Sequence[Correction], correction: Correction) -> pa.Table:
    """Build a table of the utterances, each as a recording of its own with unlimited room for a new edge."""
    utterances = correct_utterances(iterate_manifest(folder / MANIFEST_FILE), corrections, keep_dropped=True)
    rows = []
    for one in utterances:
        if isinstance(correction, EdgeMove) and one.id == correction.clip:
            _corrected(one, correction)
        row = {"id": one.id, "kind": "clip", "recording": one.id, "speaker": one.speaker, "text": one.text}
        start, end = (getattr(correction, name, None) for name in ("start_ms", "end_ms"))
        rows.append(empty_row() | row | {"start_ms": start or 0, "end_ms": (start or 0) + 1 if end is None else end})
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def check_corrections_applied(folder: Path) -> None:
    """Raise an error for a curated folder with corrections that were made after its last decision."""
    corrections = load_corrections(folder)
    if not corrections or not (folder / TABLE_FILE).is_file():
        return
    if not is_corrected(pq.read_table(folder / TABLE_FILE, columns=NEEDED_COLUMNS), corrections):
        problem = f"{folder / CORRECTIONS_FILE} has corrections that its clips do not have yet"
        raise DataError(problem, hint=f"myna curate --out {folder}")


def corrected_utterances(folder: Path, utterances: list[Utterance], notify: Notify = lambda _: None) -> list[Utterance]:
    """Apply the corrections of a folder to its utterances; in a curated folder `myna curate` has applied them."""
    corrections = load_corrections(folder, notify)
    if not corrections or (folder / TABLE_FILE).is_file():
        return utterances
    notify(f"{len(corrections)} corrections of {folder / CORRECTIONS_FILE} were applied")
    return correct_utterances(utterances, corrections)


def correct_utterances(
    utterances: Iterable[Utterance], corrections: Sequence[Correction], *, keep_dropped: bool = False
) -> list[Utterance]:
    """Apply corrections to the utterances of a manifest, and drop those that are excluded."""
    by_id, dropped = {utterance.id: utterance for utterance in utterances}, set[str]()
    for correction in corrections:
        for id in by_id if isinstance(correction, SpeakerMerge) else [getattr(correction, "clip", "")]:
            if id in by_id:
                by_id[id] = _corrected(by_id[id], correction)
        if isinstance(correction, ClipDrop):
            dropped.add(correction.clip)
        elif isinstance(correction, ClipRestore):
            dropped.discard(correction.clip)
    return [utterance for id, utterance in by_id.items() if keep_dropped or id not in dropped]


def _corrected(utterance: Utterance, correction: Correction) -> Utterance:
    match correction:
        case TextCorrection():
            return replace(utterance, text=correction.text)
        case SpeakerCorrection():
            return replace(utterance, speaker=correction.speaker)
        case SpeakerMerge() if utterance.speaker == correction.speaker:
            return replace(utterance, speaker=correction.into)
        case EdgeMove():
            span = utterance.span or Span(0.0, None)
            start = span.start if correction.start_ms is None else correction.start_ms / 1000
            end = span.end if correction.end_ms is None else correction.end_ms / 1000
            try:
                return replace(utterance, span=Span(start, end))
            except ValueError as error:
                problem = f"{utterance.id} cannot be moved: {error}"
                raise DataError(problem, hint="give --start and --end in seconds of its recording") from None
    return utterance
