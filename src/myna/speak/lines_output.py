"""Lines of a file spoken into a folder, which can be gone on with after an interruption.

OUT/NAME.wav             the line of that name
OUT/NAME+reference.wav   the clip that set its voice (-0, -1 for several)
OUT/spoken.jsonl         a row for each line, written as soon as its audio is there
OUT/media/               clips that the file of lines carried within it
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from myna.audio.files import write_audio
from myna.data.conversation import Reference
from myna.errors import SpeakError
from myna.io import bytes_hash, file_hash, save_text
from myna.models.base import Sampling
from myna.models.code_sampling import SAMPLING_REVISION
from myna.progress import ProgressCallback, silent
from myna.speak.engine import Engine, Speech, SpeechRequest
from myna.speak.fingerprint import weights_fingerprint
from myna.speak.lines import SPOKEN_FILE, SpeechLine
from myna.speak.scheduler import SPARE_POSITIONS
from myna.speak.segments import SpeechPlan
from myna.speak.validation import read_reference

LOCK_FILE = ".lock"


@dataclass(frozen=True, slots=True)
class SpokenLines:
    """The folder of spoken lines, with its rows in the order of the file."""

    folder: Path
    rows: list[dict[str, Any]]
    """id, text, file, seconds, finish_reason, seed, key, warnings, references."""
    kept: int
    """Lines that had been spoken before, and were not spoken again."""

    @property
    def warnings(self) -> list[str]:
        """Of all lines, each with its id."""
        return [f"{row['id']}: {warning}" for row in self.rows for warning in row["warnings"]]


def speak_lines(
    engine: Engine,
    lines: Sequence[SpeechLine],
    out: Path,
    sampling: Sampling,
    *,
    scene: str | None = None,
    batch_size: int | None = None,
    progress: ProgressCallback = silent,
) -> SpokenLines:
    """Speak lines in batches. Those that are there, with the same text, voice, settings and weights, stay as they are.

    A line is what its text alone gives with its seed: lines with the same words, voice and seed sound the same.
    """
    with _locked(out):
        known = _read_rows(out / SPOKEN_FILE)
        weights = weights_fingerprint(engine)
        recording_hash = cache(file_hash)
        samplings = [sampling if line.seed is None else replace(sampling, seed=line.seed) for line in lines]
        scenes = [_first_given(line.scene, scene, engine.scene) for line in lines]
        keys = [
            _key(line, weights, line_scene, line_sampling, recording_hash)
            for line, line_scene, line_sampling in zip(lines, scenes, samplings, strict=True)
        ]
        new = [number for number, line in enumerate(lines) if not _is_spoken(known.get(line.id), keys[number], out)]
        encoded = cache(lambda reference: engine.reference(reference.audio, reference.text, reference.span))
        plans = [_plan(engine, lines[number], scenes[number], samplings[number], encoded) for number in new]
        save_text(out / SPOKEN_FILE, "".join(map(_json_line, known.values())))
        done = len(lines) - len(new)
        progress("speaking", done, len(lines))
        for place, speech in engine.speak_plans(plans, batch_size=batch_size):
            number = new[place]
            row = _write(lines[number], speech, samplings[number].seed, keys[number], out)
            _append(out / SPOKEN_FILE, row)
            known[row["id"]] = row
            done += 1
            progress("speaking", done, len(lines))
        rows = [known.pop(line.id) for line in lines]
        save_text(out / SPOKEN_FILE, "".join(map(_json_line, [*rows, *known.values()])))
    return SpokenLines(out, rows, len(lines) - len(new))


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """One process at a time."""
    try:
        with FileLock(out / LOCK_FILE, timeout=0):
            yield
    except Timeout:
        raise SpeakError(
            f"another process is speaking into {out}", hint="wait for it, or choose another --out"
        ) from None


def _first_given(*values: str | None) -> str:
    return next(value for value in values if value is not None)


def _key(line: SpeechLine, weights: str, scene: str, sampling: Sampling, recording_hash: Any) -> str:
    """Equal keys give equal audio."""
    voices = [
        (recording_hash(one.audio), one.text, asdict(one.span) if one.span is not None else None)
        for one in line.references
    ]
    parts = (weights, SAMPLING_REVISION, asdict(sampling), line.text, line.language, scene, voices)
    return bytes_hash(repr(parts).encode())


def _is_spoken(row: Mapping[str, Any] | None, key: str, out: Path) -> bool:
    files = [] if row is None else [name for name in (row["file"], *row["references"]) if name]
    return row is not None and row["key"] == key and all((out / name).is_file() for name in files)


def _plan(engine: Engine, line: SpeechLine, scene: str, sampling: Sampling, encoded: Any) -> SpeechPlan:
    references: tuple[Reference, ...] = tuple(map(encoded, line.references))
    request = SpeechRequest(line.text, references, scene, id=line.text)
    plan = engine.plan(request, sampling, language=line.language)
    if len(plan.segments) > 1:
        return plan
    # Many rows together: none has more room than its budget allows it to use.
    return replace(plan, max_positions=len(plan.prompt) + plan.max_frames[0] + SPARE_POSITIONS)


def _write(line: SpeechLine, speech: Speech, seed: int, key: str, out: Path) -> dict[str, Any]:
    name = f"{line.name}.wav" if len(speech.samples) else ""
    count = len(line.references)
    references = [f"{line.name}+reference{f'-{n}' if count > 1 else ''}.wav" for n in range(count)]
    for recording, file in zip(line.references, references, strict=True):
        samples = read_reference(recording.audio, speech.sample_rate, recording.span)
        write_audio(out / file, np.clip(samples, -1.0, 1.0), speech.sample_rate)
    if name:
        speech.save(out / name, force=True)
    else:
        (out / f"{line.name}.wav").unlink(missing_ok=True)  # of another text
    return {
        "id": line.id,
        "text": line.text,
        "file": name,
        "seconds": round(speech.seconds, 3),
        "finish_reason": speech.finish_reason,
        "seed": seed,
        "key": key,
        "warnings": list(speech.warnings),
        "references": references,
    }


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
