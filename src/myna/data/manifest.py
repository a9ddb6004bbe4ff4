"""`manifest.jsonl`: one utterance a line, beside the folder it describes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from myna.data.utterance import Span, Utterance
from myna.errors import DataError
from myna.io import replacing

REQUIRED = ("id", "audio", "text", "speaker")
KINDS = {"id": str, "audio": str, "text": str, "speaker": str, "language": str, "extras": dict}


class SpanError(ValueError):
    """A line's `span` is no stretch of time."""


def write_manifest(path: Path, utterances: Iterable[Utterance]) -> None:
    """Write the lines whole or not at all. Audio inside the manifest's folder is stored relative to it."""
    stored, encoded = _Stored(path.parent.absolute()), json.JSONEncoder(ensure_ascii=False).encode
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        for utterance in utterances:
            file.write(encoded(utterance.to_line(stored(utterance.audio))) + "\n")


def read_manifest(path: Path) -> list[Utterance]:
    """Every utterance, or a `DataError` that names the first bad line."""
    return list(iterate_manifest(path))


def iterate_manifest(path: Path, wanted: Callable[[bytes], bool] = bool) -> Iterator[Utterance]:
    """The same, one by one: a manifest may be longer than memory. Lines that are not `wanted` are not even read."""
    try:
        file = path.open("rb")
    except (FileNotFoundError, IsADirectoryError):
        raise no_manifest(path) from None
    with file:
        for number, line in enumerate(file, start=1):
            if line.strip() and wanted(line):
                try:
                    yield parse_line(json.loads(line.decode("utf-8-sig")), path.parent)
                except UnicodeDecodeError as error:
                    raise DataError(f"{path}:{number} is not UTF-8: {error}", hint="save the file as UTF-8") from None
                except ValueError as error:
                    raise DataError(f"{path}:{number}: {error}", hint="mend or drop that line") from None


def no_manifest(path: Path) -> DataError:
    return DataError(f"there is no manifest {path}", hint="myna prepare SOURCE --out FOLDER makes one")


def parse_line(line: Any, folder: Path) -> Utterance:
    """One manifest line as an utterance; a `ValueError` says what is wrong with it."""
    if not isinstance(line, dict):
        raise ValueError("the line is not a JSON object")
    for key in REQUIRED:
        if key not in line:
            raise ValueError(f"there is no `{key}`")
    for key, kind in KINDS.items():
        if key in line and not isinstance(line[key], kind):
            raise ValueError(f"`{key}` is {line[key]!r}, which is no {kind.__name__}")
    if "extras" in line:
        references = line["extras"].get("references", [])
        if not isinstance(references, list) or not all(isinstance(id, str) for id in references):
            raise ValueError(f"`references` is {references!r}, not a list of ids")
    if line.get("span") is not None:
        _check_span(line["span"])
    return Utterance.from_json(line, folder)


def _check_span(span: Any) -> None:
    match span:
        case {"start": int() | float() as start, "end": int() | float() | None as end} if len(span) == 2:
            try:
                Span(start, end)
            except ValueError as error:
                raise SpanError(str(error)) from None
        case _:
            raise SpanError(f"`span` is {span!r}; it wants start and end in seconds")


class _Stored:
    """How the manifest of a folder names audio: relative to the folder inside it, absolute elsewhere."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._inside, self._here = (f"{place.as_posix().rstrip('/')}/" for place in (folder, Path.cwd()))

    def __call__(self, audio: Path) -> str:
        """By spelling alone where that is enough: paths are most of the time that a long manifest takes."""
        place = audio.as_posix()
        if ".." in place or place == "." or audio.drive:
            return self._followed(audio)
        place = place if audio.is_absolute() else self._here + place
        return place.removeprefix(self._inside) if place + "/" != self._inside else "."

    def _followed(self, audio: Path) -> str:
        audio = audio.resolve() if ".." in audio.parts else audio.absolute()
        return (audio.relative_to(self._folder) if audio.is_relative_to(self._folder) else audio).as_posix()
