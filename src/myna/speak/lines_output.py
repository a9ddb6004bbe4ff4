"""Lines of a file spoken into a folder, which can be gone on with after an interruption.

OUT/NAME.wav             the line of that name, in this or another format; of several takes the best
OUT/NAME+take-2.wav      another take of it, where they are kept
OUT/NAME+reference.wav   the clip that set its voice (-0, -1 for several)
OUT/spoken.jsonl         a row for each line, written as soon as its audio is there
OUT/media/               clips that the file of lines carried within it
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from myna.audio.files import write_audio
from myna.core.errors import MynaError, SpeakError
from myna.core.io import bytes_hash, file_hash, lock_folder, save_text
from myna.core.progress import ProgressCallback, silent
from myna.data.conversation import Reference
from myna.models.code_sampling import SAMPLING_REVISION
from myna.speak.batch import SpeechPlan
from myna.speak.engine import Engine, Speech
from myna.speak.fingerprint import weights_fingerprint
from myna.speak.lines import SPOKEN_FILE, SpeechLine
from myna.speak.marking import SpeechMarker
from myna.speak.request import ReferenceRecording, SpeechRequest, read_reference
from myna.speak.scheduler import SPARE_POSITIONS


@dataclass(frozen=True, slots=True)
class SpokenLines:
    """The folder of spoken lines, with its rows in the order of the file."""

    folder: Path
    rows: list[dict[str, Any]]
    """id, text, file, seconds, finish_reason, seed, key, warnings, references; and `takes`, ranked, if several."""
    kept: int
    """Lines that had been spoken before, and were not spoken again."""

    @property
    def warnings(self) -> list[str]:
        """Of all lines, each with its id."""
        return [f"{row['id']}: {warning}" for row in self.rows for warning in row["warnings"]]


@dataclass(frozen=True, slots=True)
class LineTakes:
    """Several takes of every line, of which the best is its audio."""

    count: int
    rank: Callable[[SpeechRequest, Sequence[Speech]], Sequence[Mapping[str, Any]]]
    """The takes of a line from the best on, each as its number `take`, from 1, and its scores."""
    ranked_by: str
    """Identifies the metrics: others may choose another take."""
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
    """Speak lines in batches. Those that are there, with the same text, voice, settings and weights, stay as they are.

    A line is what its text alone gives with its seed: lines with the same words, voice and seed sound the same. Lines
    are planned as the batch comes to them, so that the first of very many is spoken at once.
    """
    with lock_folder(out, "speaking into"):
        known = _read_rows(out / SPOKEN_FILE)
        weights = cache(partial(weights_fingerprint, engine))
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
    """Return the hash of all that decides the audio: equal keys give equal audio."""
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
    if len(plan.segments) > 1:
        return plan
    # Many rows together: none has more room than its budget allows it to use.
    return replace(plan, max_positions=len(plan.prompt) + plan.max_frames[0] + SPARE_POSITIONS)


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
        """Return a take as it is given out. Those that are not are ranked, and neither marked nor logged."""
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
    """The name of the file; empty where nothing was said."""
    if not len(speech.samples):
        file.unlink(missing_ok=True)  # of another text
        return ""
    speech.save(file, force=True)
    return file.name


def _read_rows(file: Path) -> dict[str, dict[str, Any]]:
    """Rows by id, the last of each. A line that a kill has cut short is spoken again."""
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
