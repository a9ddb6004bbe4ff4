"""Lines of a file: read, and spoken into a folder, which can be continued after an interruption.

The file is plain text, JSON objects, or the ChatML of other systems. The folder:

OUT/NAME.wav             the line of that name, in this or another format; of several takes the best
OUT/NAME+take-2.wav      another take of it, if they are kept
OUT/NAME+reference.wav   the clip that set its voice (-0, -1 for several)
OUT/spoken.jsonl         one JSON object a line, written as soon as its audio is there
OUT/media/               clips that the file of lines carried within it
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from myna.audio.files import write_audio
from myna.core.errors import MynaError, OutputError, SpeakError
from myna.core.io import bytes_hash, claim_folder, file_hash, is_file, lock_folder, safe_file_name, save_text
from myna.core.progress import ProgressCallback, silent
from myna.data.importers.conversations import ImportedClip, open_text, parse_conversation, transcribed_clips
from myna.data.importers.records import (
    ImportContext,
    RecordError,
    SourceRecord,
    find_file,
    json_records,
    nonblank_lines,
    require_field,
    require_type,
)
from myna.speak.request import ReferenceRecording, SpeechRequest, read_reference
from myna.text.normalization import normalise_text

if TYPE_CHECKING:
    from myna.data.conversation import Reference
    from myna.speak.batch import SpeechPlan
    from myna.speak.engine import Engine, Speech
    from myna.speak.voice import SpeechMarker

SPOKEN_FILE, MEDIA_FOLDER = "spoken.jsonl", "media"
"""Names in the folder: an object for each line, and clips that the file of lines carried within it."""
FIELDS = ("id", "text", "reference", "reference_text", "scene", "seed", "language")
LINES_HINT = (
    'one text a line; or JSON lines such as {"text": "Good morning.", "id": "greeting", "reference": "anna.wav", '
    '"reference_text": "...", "scene": "...", "seed": 1}; or ChatML: {"messages": [...]}'
)


@dataclass(frozen=True, slots=True)
class SpeechLine:
    """One line to speak."""

    request: SpeechRequest
    id: str
    line: int
    """Number of its line, or its place in a JSON list, from 1."""
    name: str = ""
    """File name without a suffix, unlike that of any other line."""


def read_lines(file: Path, media: Path, defaults: SpeechRequest) -> list[SpeechLine]:
    """Read and check all lines of a file. Settings that a line lacks are those of `defaults`, references too. `media`
    is the folder for clips that ChatML carries within it."""
    _check_file(file)
    is_json = file.suffix in (".jsonl", ".json")
    lines: list[SpeechLine] = []
    context, ids, names = ImportContext(media), dict[str, int](), set[str]()
    for record in json_records(file) if is_json else _text_records(file):
        try:
            line = _parse(record, context, defaults)
            line.request.check()
            for reference in line.request.recordings:
                if not is_file(reference.file):
                    raise RecordError("missing file", f"the reference {reference.file} is not there")
        except (RecordError, SpeakError) as error:
            what = error.what if isinstance(error, SpeakError) else error.detail or error.reason
            hint = error.hint if isinstance(error, SpeakError) else LINES_HINT
            number = record.line or getattr(error, "line", None)
            raise SpeakError(f"{file}:{number}: {what}" if number else f"{file}: {what}", hint=hint) from None
        if line.id in ids:
            raise SpeakError(
                f"{file}:{line.line}: the id {line.id!r} is that of line {ids[line.id]} too",
                hint="give each line an id of its own, or none",
            )
        ids[line.id] = line.line
        lines.append(replace(line, name=_unique(safe_file_name(line.id) or "line", names)))
    if not lines:
        raise SpeakError(f"{file} has no lines", hint=LINES_HINT)
    return lines


def open_lines(
    file: Path, out: Path, defaults: SpeechRequest, *, suffix: str = ".wav", force: bool = False
) -> list[SpeechLine]:
    """Read and check the lines of a file, and make the folder for them, before a model is opened."""
    _check_file(file)
    claim_folder(out, "spoken lines", known=(SPOKEN_FILE,), inputs=(file,), force=force)
    lines = read_lines(file, out / MEDIA_FOLDER, defaults)
    inputs = {one.file.resolve() for line in lines for one in line.request.recordings}
    for line in lines:
        if (out / f"{line.name}{suffix}").resolve() in inputs:
            raise OutputError(
                f"{out / line.name}{suffix} is an input, which is never replaced", hint="choose another --out"
            )
    return lines


def _check_file(file: Path) -> None:
    if not is_file(file):
        raise SpeakError(f"{file} is not there", hint="give a file: text, .jsonl or .json")


def _text_records(file: Path) -> Iterator[SourceRecord]:
    for number, content in nonblank_lines(file):
        try:
            yield SourceRecord(file, number, {"text": content.decode("utf-8")})
        except UnicodeDecodeError as error:
            yield SourceRecord(file, number, RecordError("not UTF-8", f"not UTF-8: {error}"))


def _parse(record: SourceRecord, context: ImportContext, defaults: SpeechRequest) -> SpeechLine:
    if isinstance(record.data, RecordError):
        raise record.data
    assert record.line is not None
    if "messages" in record.data:
        return _from_chatml(record, record.line, context, defaults)
    return _from_fields(record, record.line, defaults)


def _from_fields(record: SourceRecord, number: int, defaults: SpeechRequest) -> SpeechLine:
    data: Mapping[str, Any] = record.data
    if unknown := sorted(data.keys() - set(FIELDS)):
        raise RecordError("malformed", f"unknown: {', '.join(unknown)}; a line has {', '.join(FIELDS)}")
    audio, texts = (_listed(data.get(name), name) for name in ("reference", "reference_text"))
    if len(audio) != len(texts):
        raise RecordError("malformed", f"{len(audio)} references but {len(texts)} reference texts")
    seed, scene, id = data.get("seed"), data.get("scene"), data.get("id")
    if seed is not None and type(seed) is not int:
        raise RecordError("malformed", f"`seed` is {seed!r}, not a whole number")
    if id is not None and type(id) not in (str, int):
        raise RecordError("malformed", f"`id` is {id!r}, not a name")
    references = tuple(
        ReferenceRecording(find_file(path, record.source.parent, Path()), normalise_text(text))
        for path, text in zip(audio, texts, strict=True)
    )
    request = replace(
        defaults,
        text=normalise_text(require_field(data, "text", str)),
        references=references or defaults.references,
        scene=defaults.scene if scene is None else require_type(scene, str, "scene"),
        seed=defaults.seed if seed is None else seed,
        language=require_type(data.get("language") or "", str, "language") or defaults.language,
    )
    return SpeechLine(request, f"line-{number:04d}" if id in (None, "") else str(id), number)


def _listed(value: Any, name: str) -> list[str]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    return [require_type(one, str, name) for one in values]


def _from_chatml(record: SourceRecord, number: int, context: ImportContext, defaults: SpeechRequest) -> SpeechLine:
    """Make a line of the open words of the user; or of the last clip, if the sample holds its answer."""
    sample = parse_conversation(record, context)
    clips = [(clip, text) for clip, text, _ in transcribed_clips(sample)]
    text = open_text(sample)
    if not text and clips and sample.turns[-1].role == "assistant":
        text = clips.pop()[1] or sample.target_text
    if len(clips) == 1 and not clips[0][1]:
        clips = [(clips[0][0], sample.reference_text)]
    scene = sample.extras.get("scene")
    request = replace(
        defaults,
        text=normalise_text(text),
        references=tuple(_reference(clip, transcript) for clip, transcript in clips) or defaults.references,
        scene=str(scene) if scene else defaults.scene,
        language=sample.language or defaults.language,
    )
    return SpeechLine(request, sample.id, number)


def _reference(clip: ImportedClip, transcript: str) -> ReferenceRecording:
    return ReferenceRecording(clip.audio, normalise_text(transcript), clip.span)


def _unique(name: str, taken: set[str]) -> str:
    """Return the name, with a number if it is taken. Some file systems do not tell case apart."""
    numbered, count = name, 1
    while numbered.casefold() in taken:
        count += 1
        numbered = f"{name}-{count}"
    taken.add(numbered.casefold())
    return numbered


@dataclass(frozen=True, slots=True)
class SpokenLines:
    """Folder of spoken lines, with an object for each in the order of the file."""

    folder: Path
    rows: list[dict[str, Any]]
    """Objects with id, text, file, seconds, finish_reason, seed, key, warnings, references; `takes`, if several."""
    kept: int
    """Lines that had been spoken before, and were not spoken again."""

    @property
    def warnings(self) -> list[str]:
        """Warnings of all lines, each with its id."""
        return [f"{row['id']}: {warning}" for row in self.rows for warning in row["warnings"]]


@dataclass(frozen=True, slots=True)
class LineTakes:
    """Choice of the best of several takes of every line."""

    count: int
    rank: Callable[[SpeechRequest, Sequence[Speech]], Sequence[Mapping[str, Any]]]
    """Function that ranks the takes of a request, the best first: number `take` from 1, and scores."""
    ranked_by: str
    """Name of the metrics: others may choose another take."""
    keep_all: bool = False
    """Write the other takes too."""


def speak_lines(
    engine: Engine,
    lines: Sequence[SpeechLine],
    out: Path,
    *,
    batch_size: int | None = None,
    suffix: str = ".wav",
    takes: LineTakes | None = None,
    marker: SpeechMarker | None = None,
    progress: ProgressCallback = silent,
) -> SpokenLines:
    """Speak lines in batches. Files that exist for the same text, voice, settings and weights stay as they are. A line
    depends on its text and seed alone: lines with the same words, voice and seed sound the same. Lines are planned as
    the batch comes to them, so that the first of very many is spoken at once."""
    with lock_folder(out, "speaking into"):
        known = _read_rows(out / SPOKEN_FILE)
        weights = cache(engine.fingerprint)
        recording_hash = cache(file_hash)
        keys = [_key(engine, line.request, weights, takes, marker, recording_hash) for line in lines]
        new = [
            number
            for number, line in enumerate(lines)
            if not _is_spoken(known.get(line.id), keys[number], out, suffix, keep_all=bool(takes and takes.keep_all))
        ]
        encoded = cache(engine.encode_reference)
        count = takes.count if takes is not None else 1
        plans = (_plan(engine, lines[number], encoded) for number in new)
        all_takes = (plan.take(take) for plan in plans for take in range(count))
        save_text(out / SPOKEN_FILE, "".join(map(_json_line, known.values())))
        done = len(lines) - len(new)
        progress("speaking", done, len(lines))
        spoken: dict[int, dict[int, Speech]] = {}
        for place, speech in engine.speak_plans(all_takes, batch_size=batch_size):
            number, take = new[place // count], place % count
            spoken.setdefault(number, {})[take] = speech
            if len(spoken[number]) < count:
                continue
            own = spoken.pop(number)
            speeches = [own[take] for take in range(count)]
            row = _write(lines[number], speeches, keys[number], out, suffix, takes, marker)
            _append(out / SPOKEN_FILE, row)
            known[row["id"]] = row
            done += 1
            progress("speaking", done, len(lines))
        rows = [known.pop(line.id) for line in lines]
        save_text(out / SPOKEN_FILE, "".join(map(_json_line, [*rows, *known.values()])))
    return SpokenLines(out, rows, len(lines) - len(new))


def _key(
    engine: Engine,
    request: SpeechRequest,
    weights: Callable[[str, float], str],
    takes: LineTakes | None,
    marker: SpeechMarker | None,
    recording_hash: Callable[[Path], str],
) -> str:
    """Return the hash of everything that decides the audio: equal keys give equal audio."""
    from myna.models.code_sampling import SAMPLING_REVISION

    voices = [
        (recording_hash(one.file), one.text, asdict(one.span) if one.span is not None else None)
        for one in request.recordings
    ]
    sampling = asdict(request.sampling(engine.family.sampling))
    own_weights = weights(request.adapter, request.strength)
    parts = (own_weights, SAMPLING_REVISION, sampling, request.text, request.language, engine.scene_of(request), voices)
    chosen = (takes.count, takes.ranked_by) if takes is not None else ()
    marked = (marker.origin.watermark,) if marker is not None and marker.origin.watermark else ()
    return bytes_hash(repr((*parts, *chosen, *marked)).encode())


def _is_spoken(row: Mapping[str, Any] | None, key: str, out: Path, suffix: str, *, keep_all: bool) -> bool:
    if row is None or row["key"] != key:
        return False
    files = [name for name in (row["file"], *row["references"]) if name]
    if keep_all:
        others = row.get("takes", ())[1:]
        if not all("file" in other for other in others):
            return False
        files += [other["file"] for other in others if other["file"]]
    return all(name.endswith(suffix) and (out / name).is_file() for name in files)


def _plan(engine: Engine, line: SpeechLine, encoded: Callable[[ReferenceRecording], Reference]) -> SpeechPlan:
    try:
        references = tuple(map(encoded, line.request.recordings))
        plan = engine.plan(replace(line.request, references=references))
    except MynaError as error:
        raise SpeakError(f"line {line.line}, {line.id}: {error.what}", hint=error.hint) from error
    return plan.tight()  # many together: none has more room than its budget allows it to use


def _write(
    line: SpeechLine,
    speeches: Sequence[Speech],
    key: str,
    out: Path,
    suffix: str,
    takes: LineTakes | None,
    marker: SpeechMarker | None,
) -> dict[str, Any]:
    request, recordings = line.request, line.request.recordings
    ranking: list[dict[str, Any]] = (
        [dict(one) for one in takes.rank(request, speeches)] if takes is not None else [{"take": 1}]
    )
    best = ranking[0]["take"]

    def marked(take: int) -> Speech:
        """Return a marked take. Takes that are not given out are ranked, and neither marked nor logged."""
        speech = speeches[take - 1]
        return speech if marker is None else marker.mark(speech, request.take(take - 1))

    speech, count = marked(best), len(recordings)
    references = [f"{line.name}+reference{f'-{n}' if count > 1 else ''}{suffix}" for n in range(count)]
    for recording, file in zip(recordings, references, strict=True):
        samples = read_reference(recording.file, speech.sample_rate, recording.span)
        write_audio(out / file, np.clip(samples, -1.0, 1.0), speech.sample_rate)
    if takes is not None and takes.keep_all:
        for other in ranking[1:]:
            other["file"] = _save(marked(other["take"]), out / f"{line.name}+take-{other['take']}{suffix}")
    row = {
        "id": line.id,
        "text": request.text,
        "file": _save(speech, out / f"{line.name}{suffix}"),
        "seconds": round(speech.seconds, 3),
        "finish_reason": speech.finish_reason,
        "seed": request.seed + best - 1,
        "key": key,
        "warnings": list(speech.warnings),
        "references": references,
        **({"watermark": marker.origin.watermark or None} if marker is not None else {}),
    }
    return row | ({"takes": ranking} if takes is not None else {})


def _save(speech: Speech, file: Path) -> str:
    """Save a speech, and return the name of its file; empty if nothing was said."""
    if not len(speech.samples):
        file.unlink(missing_ok=True)  # of another text
        return ""
    speech.save(file, force=True)
    return file.name


def _read_rows(file: Path) -> dict[str, dict[str, Any]]:
    """Read the objects by id, the last of each. A line that was cut short by a kill is spoken again."""
    rows: dict[str, dict[str, Any]] = {}
    for text in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else ():
        try:
            row = json.loads(text)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and {"id", "key", "file", "references", "warnings"} <= row.keys():
            rows[row["id"]] = row
    return rows


def _json_line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def _append(file: Path, row: Mapping[str, Any]) -> None:
    with file.open("a", encoding="utf-8") as rows:
        rows.write(_json_line(row))
        rows.flush()
        os.fsync(rows.fileno())
