"""Lines to speak from a file: plain text, JSON objects, or the ChatML of other systems."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from myna.core.errors import OutputError, SpeakError
from myna.core.io import claim_folder, is_file, safe_file_name
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
from myna.speak.request import ReferenceRecording, SpeechRequest
from myna.text.normalization import normalise_text

SPOKEN_FILE, MEDIA_FOLDER = "spoken.jsonl", "media"
"""In the folder that lines are spoken into: a row for each, and clips that their file carried within it."""
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
    """Read and check all lines of a file. Settings that a line lacks are those of `defaults`, references too.

    `media` is the folder for clips that ChatML carries within it.
    """
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
    """Return the open words of the user; or those of the last clip, where the sample holds its answer."""
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
    """The name, or the name with a number; some file systems do not tell case apart."""
    numbered, count = name, 1
    while numbered.casefold() in taken:
        count += 1
        numbered = f"{name}-{count}"
    taken.add(numbered.casefold())
    return numbered
