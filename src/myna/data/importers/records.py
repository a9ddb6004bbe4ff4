"""Records of a source: items with file and line, their fields and files, and the `Importer` of a layout."""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from myna.audio.files import AudioDefect
from myna.core.io import atomic_write, bytes_hash, is_file, sniff_suffix
from myna.data.manifest import TASKS, Span, Utterance
from myna.text.normalization import normalise_text

RecordDefect = Literal[
    "malformed", "not UTF-8", "empty text", "control token", "implausible pace", "wrong duration", "duplicate id",
    "placeholder without clip", "bad score", "missing reference", "reference equals target",
]  # fmt: skip
RejectionReason = Literal[AudioDefect, RecordDefect]


@dataclass(frozen=True, slots=True)
class RejectedRecord:
    """Item that cannot be used. `line` counts lines, samples or rows of `source` from 1."""

    source: str
    line: int | None
    id: str | None
    reason: RejectionReason
    detail: str = ""

    def to_json(self) -> dict[str, Any]:
        line = {"source": self.source, "line": self.line, "id": self.id, "reason": self.reason}
        return line | ({"detail": self.detail} if self.detail else {})

    def __str__(self) -> str:
        place = self.source if self.line is None else f"{self.source}:{self.line}"
        return f"{place}{f' ({self.id})' if self.id else ''} {self.reason}{self.detail and ': ' + self.detail}"


class RecordError(Exception):
    """Error of one record that cannot be used, caught by the importers; `line` is for a file that is one record."""

    def __init__(self, reason: RejectionReason, detail: str = "", line: int | None = None) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail, self.line = reason, detail, line


@dataclass(frozen=True, slots=True)
class ImportedUtterance:
    utterance: Utterance
    source: str
    line: int | None

    def rejected(self, error: RecordError) -> RejectedRecord:
        return RejectedRecord(self.source, self.line, self.utterance.id, error.reason, error.detail)


ImportItem = ImportedUtterance | RejectedRecord


@dataclass(slots=True)
class SourceRecord:
    """Raw item of a source with its file and line; `id` is set as soon as the layout knows it."""

    source: Path
    line: int | None
    data: Any
    """Fields of the item; a `RecordError` if the item cannot be read."""
    id: str | None = None

    def rejected(self, error: RecordError) -> RejectedRecord:
        return RejectedRecord(str(self.source), self.line or error.line, self.id, error.reason, error.detail)


@dataclass(slots=True)
class ImportContext:
    """Settings of an import, and the references its records share."""

    media: Path
    """Folder for audio embedded in the source."""
    language: str = ""
    speaker: str = ""
    _reference_ids: dict[tuple[Path, Span | None, str], str] = field(default_factory=dict)

    def save_embedded_audio(self, data: bytes) -> Path:
        """Write embedded audio once, named after its hash."""
        path = self.media / f"{bytes_hash(data)}{sniff_suffix(data)}"
        if not path.exists():
            with atomic_write(path) as temporary:
                temporary.write_bytes(data)
        return path

    def register_reference(
        self, id: str, audio: Path, text: str, speaker: str, language: str, span: Span | None = None
    ) -> tuple[str, list[Utterance]]:
        """Return the id under which targets name this reference, and its utterance if it is new."""
        key = (audio, span, normalise_text(text))
        if key in self._reference_ids:
            return self._reference_ids[key], []
        self._reference_ids[key] = id
        return id, [Utterance(id, audio, text, speaker, language, span, {"reference_only": True})]


class Importer(NamedTuple):
    """One layout of source data, as a line of `FORMATS`."""

    matches: Callable[[Path], bool]
    """Whether a source looks like this layout, by its names and first bytes."""
    read: Callable[[Path, ImportContext], Iterator[ImportItem]]
    """Function that yields the items of a source. The first line of its docstring describes the layout to users."""


def build_utterances(
    records: Iterable[SourceRecord], make: Callable[[SourceRecord], Iterable[Utterance]]
) -> Iterator[ImportItem]:
    """Build the utterances of each record; text that cannot be decoded, or a `RecordError`, rejects only its record."""
    for record in records:
        try:
            if isinstance(record.data, RecordError):
                raise record.data
            for utterance in make(record):
                yield ImportedUtterance(utterance, str(record.source), record.line)
        except RecordError as error:
            yield record.rejected(error)
        except UnicodeDecodeError as error:
            yield record.rejected(RecordError("not UTF-8", str(error)))
        except RecursionError:
            yield record.rejected(RecordError("malformed", "its fields are nested too deeply"))


# Fields of a record

MAX_DURATION_ERROR_SECONDS = 1.0
"""Seconds by which `duration` may differ from the recording's length, since sources round."""

T = TypeVar("T")


def require_type(value: Any, kind: type[T], name: str) -> T:
    if isinstance(value, RecordError):
        raise value
    if not isinstance(value, kind):
        raise RecordError("malformed", f"`{name}` is {type(value).__name__}, not {kind.__name__}")
    return value


def require_field(data: Mapping[str, Any], key: str, kind: type[T]) -> T:
    if data.get(key) is None:
        raise RecordError("malformed", f"there is no `{key}`")
    return require_type(data[key], kind, key)


def parse_span(start: Any, end: Any = None, duration: Any = None) -> Span | None:
    """Make a span from start, end or duration in seconds; None if the source gives none of them."""
    if start is None and end is None and duration is None:
        return None
    try:
        first = float(start or 0)
        if end is None and duration is not None:
            end = first + float(duration)
        return Span(first, None if end is None else float(end))
    except (TypeError, ValueError, OverflowError) as error:
        raise RecordError("bad span", str(error)) from None


def collect_extras(data: Mapping[str, Any]) -> dict[str, Any]:
    """Collect fields without an attribute as JSON values. Names reserved by Myna get a prefix unless they fit."""
    extras = {}
    for key, value in data.items():
        value = _to_json_value(value)
        is_reserved = key in ("references", "reference_only") or (key == "task" and value not in TASKS)
        if value not in (None, ""):
            extras[f"source_{key}" if is_reserved else key] = value
    return extras


def _to_json_value(value: Any) -> Any:
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case list() | tuple():
            return [_to_json_value(item) for item in value]
        case dict():
            return {str(key): _to_json_value(item) for key, item in value.items()}
        case bytes():
            return f"{len(value)} bytes"
        case _:
            return str(value)


# Files of a source

AUDIO_SUFFIXES = (".wav", ".flac", ".mp3", ".ogg", ".opus")
OTHER_AUDIO_SUFFIXES = (
    *(".m4a", ".m4b", ".aac", ".mp4", ".mov", ".m4v", ".mkv", ".mka", ".webm", ".avi", ".3gp", ".3g2", ".amr", ".wma"),
    *(".aiff", ".aif", ".caf", ".au", ".oga", ".wv", ".ape"),
)
"""Suffixes of files that may be the film or the original of a recording beside them, the most likely first."""
RECORDING_SUFFIXES = AUDIO_SUFFIXES + OTHER_AUDIO_SUFFIXES
OUTPUT_FILES = ("rejected.jsonl", "prepared.json")
"""Files of which at least one is in every folder that `myna import` or `myna prepare` wrote."""


def json_records(path: Path) -> Iterator[SourceRecord]:
    """Yield the objects of a JSONL file by line, or of a JSON file, which holds a list of samples or one sample."""
    tree = None if path.suffix == ".jsonl" else parse_json(path.read_bytes())
    if tree is None or (isinstance(tree, RecordError) and tree.detail.startswith("Extra data")):
        return json_samples(path, ((number, parse_json(line)) for number, line in nonblank_lines(path)))
    if isinstance(tree, RecordError):
        return json_samples(path, [(None, tree)])
    return json_samples(path, enumerate(tree if isinstance(tree, list) else [tree], start=1))


def json_samples(path: Path, samples: Iterable[tuple[int | None, Any]]) -> Iterator[SourceRecord]:
    """Yield numbered samples of a file, each an object or the error of reading it."""
    for number, sample in samples:
        if not isinstance(sample, dict | RecordError):
            sample = RecordError("malformed", f"`line` is {type(sample).__name__}, not dict")
        yield SourceRecord(path, number, sample)


def parse_json(content: bytes) -> Any:
    """Parse a JSON tree; a `RecordError` that is returned says why it is invalid."""
    try:
        return json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return RecordError("not UTF-8", str(error))
    except json.JSONDecodeError as error:
        return RecordError("malformed", str(error), error.lineno)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or thousands of nested lists
        return RecordError("malformed", str(error))


def nonblank_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the nonblank lines with their numbers, without line ends or byte order mark."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(b"\xef\xbb\xbf").rstrip(b"\r\n")
            if line.strip():
                yield number, line


def read_transcript(path: Path) -> str:
    if not is_file(path):  # reading a device or a pipe might never end
        raise RecordError("missing file", str(path))
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecordError("not UTF-8", f"{path}: {error}") from None
    except (OSError, ValueError):
        raise RecordError("missing file", str(path)) from None


def read_head(path: Path, *suffixes: str) -> str:
    """Read the first 64 KiB of a file to detect its layout; empty without a file or with another suffix."""
    if (suffixes and path.suffix not in suffixes) or not path.is_file():
        return ""
    with path.open("rb") as file:
        return file.read(1 << 16).decode("utf-8", errors="replace")


def index_file(source: Path, name: str) -> Path:
    """Return the file that lists the items of a source: the source itself, or the file of this name in its folder."""
    return source / name if source.is_dir() else source


def list_files(folder: Path, *suffixes: str) -> list[Path]:
    """List files below a folder with one of the suffixes, sorted, without hidden ones (and the `._` files of macOS) and
    without folders that an import wrote."""
    files: list[Path] = []
    for parent, folders, names in os.walk(folder):
        here = Path(parent)
        is_output = here != folder and any(name in OUTPUT_FILES for name in names)
        folders[:] = [] if is_output else [name for name in folders if not name.startswith(".")]
        if not is_output:
            files += [here / name for name in names if Path(name).suffix.lower() in suffixes and name[0] != "."]
    return sorted(path for path in files if is_file(path))


def list_recordings(folder: Path) -> list[Path]:
    """List recordings below a folder. Suffixes outside `AUDIO_SUFFIXES` count if no other file has the name."""
    recordings = list_files(folder, *AUDIO_SUFFIXES)
    others: dict[Path, Path] = {}
    found = list_files(folder, *OTHER_AUDIO_SUFFIXES)
    for path in sorted(found, key=lambda path: OTHER_AUDIO_SUFFIXES.index(path.suffix.lower())):
        others.setdefault(path.with_suffix(""), path)
    names = {path.with_suffix("") for path in recordings}
    return sorted(recordings + [path for name, path in others.items() if name not in names])


def find_file(names: str | list[str], *folders: Path) -> Path:
    """Return the first file that exists, of the possible names in each folder; the first of all if there is none."""
    candidates = [folder / name for folder in folders for name in ([names] if isinstance(names, str) else names)]
    return next((path for path in candidates if is_file(path)), candidates[0])
