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
from myna.core.progress import ProgressCallback
from myna.data.importers import conversations, records
from myna.data.importers.records import RecordError, SourceRecord, require_type
from myna.speak.references import transcribed_reference
from myna.speak.request import ReferenceRecording, SpeechRequest, read_reference
from myna.text.normalization import normalise_text

if TYPE_CHECKING:
    from myna.data.conversation import Reference
    from myna.data.manifest import Span
    from myna.evaluate.takes import TakeRanker
    from myna.speak.batch import SpeechPlan
    from myna.speak.engine import Engine, Speech

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
    """File name without a suffix, unique among the lines."""


def read_lines(file: Path, media: Path, defaults: SpeechRequest, asr: str | None = None) -> list[SpeechLine]:
    """Read and check all lines of a file. Settings that a line lacks are those of `defaults`, references too; their
    transcripts are heard by `asr`. `media` is the folder for clips that ChatML carries within it."""
    is_json = file.suffix in (".jsonl", ".json")
    lines: list[SpeechLine] = []
    context, ids, names = records.ImportContext(media), dict[str, int](), set[str]()
    for record in records.json_records(file) if is_json else _text_records(file):
        try:
            if isinstance(record.data, RecordError):
                raise record.data
            is_chatml = "messages" in record.data
            line = _from_chatml(record, context, defaults, asr) if is_chatml else _from_fields(record, defaults, asr)
            line.request.check()
        except (RecordError, MynaError) as error:
            what = error.what if isinstance(error, MynaError) else error.detail or error.reason
            hint = error.hint if isinstance(error, MynaError) else LINES_HINT
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
    file: Path, out: Path, defaults: SpeechRequest, *, suffix: str, asr: str | None = None, force: bool
) -> list[SpeechLine]:
    """Read and check the lines of a file, and make the folder for them, before a model is opened."""
    if not is_file(file):
        raise SpeakError(f"{file} is not there", hint="give a file: text, .jsonl or .json")
    claim_folder(out, "spoken lines", known=(SPOKEN_FILE,), inputs=(file,), force=force)
    lines = read_lines(file, out / MEDIA_FOLDER, defaults, asr)
    inputs = {one.file.resolve() for line in lines for one in line.request.recordings}
    for line in lines:
        if (out / f"{line.name}{suffix}").resolve() in inputs:
            raise OutputError(
                f"{out / line.name}{suffix} is an input, which is never replaced", hint="choose another --out"
            )
    return lines


def _text_records(file: Path) -> Iterator[SourceRecord]:
    for number, content in records.nonblank_lines(file):
        try:
            yield SourceRecord(file, number, {"text": content.decode("utf-8")})
        except UnicodeDecodeError as error:
            yield SourceRecord(file, number, RecordError("not UTF-8", f"not UTF-8: {error}"))


def _reference(
    file: Path, text: str | None, asr: str | None, language: str, span: Span | None = None
) -> ReferenceRecording:
    if not is_file(file):
        raise RecordError("missing file", f"the reference {file} is not there")
    return transcribed_reference(file, None if text is None else normalise_text(text), asr, language, span)


def _from_fields(record: SourceRecord, defaults: SpeechRequest, asr: str | None) -> SpeechLine:
    assert record.line is not None and not isinstance(record.data, RecordError)
    data: Mapping[str, Any] = record.data
    if unknown := sorted(data.keys() - set(FIELDS)):
        raise RecordError("malformed", f"unknown: {', '.join(unknown)}; a line has {', '.join(FIELDS)}")
    audio, texts = (_listed(data.get(name), name) for name in ("reference", "reference_text"))
    if texts and len(audio) != len(texts):
        raise RecordError("malformed", f"{len(audio)} references but {len(texts)} reference texts")
    seed, scene, id = data.get("seed"), data.get("scene"), data.get("id")
    if seed is not None and type(seed) is not int:
        raise RecordError("malformed", f"`seed` is {seed!r}, not a whole number")
    if id is not None and type(id) not in (str, int):
        raise RecordError("malformed", f"`id` is {id!r}, not a name")
    language = require_type(data.get("language") or "", str, "language") or defaults.language
    said: list[str | None] = [*texts] if texts else [None] * len(audio)
    references = tuple(
        _reference(records.find_file(path, record.source.parent, Path()), text, asr, language)
        for path, text in zip(audio, said, strict=True)
    )
    request = replace(
        defaults,
        text=normalise_text(records.require_field(data, "text", str)),
        references=references or defaults.references,
        scene=defaults.scene if scene is None else require_type(scene, str, "scene"),
        seed=defaults.seed if seed is None else seed,
        language=language,
    )
    return SpeechLine(request, f"line-{record.line:04d}" if id in (None, "") else str(id), record.line)


def _listed(value: Any, name: str) -> list[str]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    return [require_type(one, str, name) for one in values]


def _from_chatml(
    record: SourceRecord, context: records.ImportContext, defaults: SpeechRequest, asr: str | None
) -> SpeechLine:
    """Make a line of the user's text that has no answer yet, or else of the text of the assistant's last clip."""
    sample = conversations.parse_conversation(record, context)
    clips = [(clip, text) for clip, text, _ in conversations.transcribed_clips(sample)]
    text = conversations.open_text(sample)
    if not text and clips and sample.turns[-1].role == "assistant":
        text = clips.pop()[1] or sample.target_text
    if len(clips) == 1 and not clips[0][1]:
        clips = [(clips[0][0], sample.reference_text)]
    scene, language = sample.extras.get("scene"), sample.language or defaults.language
    request = replace(
        defaults,
        text=normalise_text(text),
        references=tuple(_reference(clip.audio, said or None, asr, language, clip.span) for clip, said in clips)
        or defaults.references,
        scene=str(scene) if scene else defaults.scene,
        language=language,
    )
    assert record.line is not None
    return SpeechLine(request, sample.id, record.line)


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
class LineSpeaker:
    """Speaker of lines into a folder. Files that exist for the same text, voice, settings and weights stay as they are.
    A line depends on its text and seed alone: lines with the same words, voice and seed sound the same."""

    engine: Engine
    mark: Callable[[Speech, SpeechRequest], Speech]
    """Adds the watermark and the origin, as the request asks."""
    out: Path
    suffix: str
    takes: int
    """Takes of each line, of which the best is kept."""
    ranker: TakeRanker | None
    """Judge of several takes."""
    keep_takes: bool
    """Write the other takes too."""

    def speak(self, lines: Sequence[SpeechLine], batch_size: int, progress: ProgressCallback) -> SpokenLines:
        """Speak lines in batches. They are planned as the batch comes to them, so that the first of very many is spoken
        at once."""
        engine, file = self.engine, self.out / SPOKEN_FILE
        with lock_folder(self.out, "speaking into"):
            known = _read_rows(file)
            weights, recording_hash = cache(engine.fingerprint), cache(file_hash)
            keys = [self._key(line.request, weights, recording_hash) for line in lines]
            new = [n for n, line in enumerate(lines) if not self._is_spoken(known.get(line.id), keys[n])]
            encoded = cache(engine.encode_reference)
            plans = (_plan(engine, lines[number], encoded) for number in new)
            all_takes = (plan.take(take) for plan in plans for take in range(self.takes))
            save_text(file, "".join(map(_json_line, known.values())))
            done = len(lines) - len(new)
            progress("speaking", done, len(lines))
            spoken: dict[int, dict[int, Speech]] = {}
            for place, speech in engine.speak_plans(all_takes, batch_size=batch_size):
                number, take = new[place // self.takes], place % self.takes
                spoken.setdefault(number, {})[take] = speech
                if len(spoken[number]) < self.takes:
                    continue
                own = spoken.pop(number)
                row = self._write(lines[number], [own[take] for take in range(self.takes)], keys[number])
                with file.open("a", encoding="utf-8") as opened:
                    opened.write(_json_line(row))
                    opened.flush()
                    os.fsync(opened.fileno())
                known[row["id"]] = row
                done += 1
                progress("speaking", done, len(lines))
            listed = [known.pop(line.id) for line in lines]
            save_text(file, "".join(map(_json_line, [*listed, *known.values()])))
        return SpokenLines(self.out, listed, len(lines) - len(new))

    def _key(
        self, request: SpeechRequest, weights: Callable[[str, float], str], recording_hash: Callable[[Path], str]
    ) -> str:
        """Return the hash of everything that decides the audio: equal keys give equal audio."""
        from myna.models.code_sampling import SAMPLING_REVISION
        from myna.provenance.watermark import MARK_NAME

        voices = [
            (recording_hash(one.file), one.text, asdict(one.span) if one.span is not None else None)
            for one in request.recordings
        ]
        sampling = asdict(request.sampling(self.engine.family.sampling))
        parts = (weights(request.adapter, request.strength), SAMPLING_REVISION, sampling, request.text)
        settings = (request.language, self.engine.resolve(request).scene, voices)
        chosen = (self.takes, self.ranker.name) if self.ranker is not None else ()
        marked = (MARK_NAME,) if request.watermark else ()
        respelled = (dict(request.spellings),) if request.spellings else ()
        return bytes_hash(repr((*parts, *settings, *chosen, *marked, *respelled)).encode())

    def _is_spoken(self, row: Mapping[str, Any] | None, key: str) -> bool:
        if row is None or row["key"] != key:
            return False
        files = [name for name in (row["file"], *row["references"]) if name]
        if self.keep_takes:
            others = row.get("takes", ())[1:]
            if not all("file" in other for other in others):
                return False
            files += [other["file"] for other in others if other["file"]]
        return all(name.endswith(self.suffix) and (self.out / name).is_file() for name in files)

    def _write(self, line: SpeechLine, speeches: Sequence[Speech], key: str) -> dict[str, Any]:
        request, recordings, ranking = line.request, line.request.recordings, [dict[str, Any](take=1)]
        if self.ranker is not None:
            ranking = [take.to_json() for take in self.ranker.rank(request, speeches).takes]
        best = ranking[0]["take"]
        speech, count = self.mark(speeches[best - 1], request.take(best - 1)), len(recordings)
        references = [f"{line.name}+reference{f'-{n}' if count > 1 else ''}{self.suffix}" for n in range(count)]
        for recording, file in zip(recordings, references, strict=True):
            samples = read_reference(recording.file, speech.sample_rate, recording.span)
            write_audio(self.out / file, np.clip(samples, -1.0, 1.0), speech.sample_rate)
        for other in ranking[1:] if self.keep_takes else ():
            take = other["take"]  # takes that are not saved are neither marked nor logged
            marked = self.mark(speeches[take - 1], request.take(take - 1))
            other["file"] = self._save(marked, f"{line.name}+take-{take}{self.suffix}")
        row = {
            "id": line.id,
            "text": request.text,
            "file": self._save(speech, f"{line.name}{self.suffix}"),
            "seconds": round(speech.seconds, 3),
            "finish_reason": speech.finish_reason,
            "seed": request.seed + best - 1,
            "key": key,
            "warnings": list(speech.warnings),
            "references": references,
            "watermark": speech.origin.watermark or None if speech.origin is not None else None,
        }
        return row | ({"takes": ranking} if self.ranker is not None else {})

    def _save(self, speech: Speech, name: str) -> str:
        """Save a speech, and return the name of its file; empty if there are no samples."""
        if not len(speech.samples):
            (self.out / name).unlink(missing_ok=True)  # file of an earlier text
            return ""
        return speech.save(self.out / name, force=True).name


def _plan(engine: Engine, line: SpeechLine, encoded: Callable[[ReferenceRecording], Reference]) -> SpeechPlan:
    try:
        references = tuple(map(encoded, line.request.recordings))
        plan = engine.plan(replace(line.request, references=references))
    except MynaError as error:
        raise SpeakError(f"line {line.line}, {line.id}: {error.what}", hint=error.hint) from error
    return plan.tight()  # reserve only the budgeted positions, so that more lines fit


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
