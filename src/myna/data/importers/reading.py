"""Files of a source, read so that a bad line rejects one record alone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from myna.core.io import is_file
from myna.data.importers.base import RecordError, SourceRecord

AUDIO_SUFFIXES = (".wav", ".flac", ".mp3", ".ogg", ".opus")
OTHER_AUDIO_SUFFIXES = (
    *(".m4a", ".m4b", ".aac", ".mp4", ".mov", ".m4v", ".mkv", ".mka", ".webm", ".avi", ".3gp", ".3g2", ".amr", ".wma"),
    *(".aiff", ".aif", ".caf", ".au", ".oga", ".wv", ".ape"),
)
"""Of files that may be the film, or the original, of a recording beside them; the likeliest first."""
OUTPUT_FILES = ("rejected.jsonl", "prepared.json")
"""One of these is in every folder that `myna import` and `myna prepare` have written to."""


def json_records(path: Path) -> Iterator[SourceRecord]:
    """The objects of a JSONL file by line, or of a JSON file as its list of samples or its only one."""
    tree = None if path.suffix == ".jsonl" else parse_json(path.read_bytes())
    if tree is None or (isinstance(tree, RecordError) and tree.detail.startswith("Extra data")):
        lines = ((number, parse_json(line)) for number, line in nonblank_lines(path))
        yield from _objects(path, lines, problem="`line` is {}, not dict")
    else:
        yield from json_samples(path, tree if isinstance(tree, list | RecordError) else [tree])


def json_samples(path: Path, samples: list[Any] | RecordError) -> Iterator[SourceRecord]:
    """The list of samples that a JSON file holds, or the error with which it was read."""
    return _objects(path, [(None, samples)] if isinstance(samples, RecordError) else enumerate(samples, start=1))


def _objects(
    path: Path, samples: Iterable[tuple[int | None, Any]], problem: str = "{}, not an object"
) -> Iterator[SourceRecord]:
    for number, sample in samples:
        if not isinstance(sample, dict | RecordError):
            sample = RecordError("malformed", problem.format(type(sample).__name__))
        yield SourceRecord(path, number, sample)


def parse_json(content: bytes) -> Any:
    """A JSON tree, or a `RecordError` that says why it is none."""
    try:
        return json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return RecordError("not UTF-8", str(error))
    except json.JSONDecodeError as error:
        return RecordError("malformed", str(error), error.lineno)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or thousands of nested lists
        return RecordError("malformed", str(error))


def nonblank_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers, without line ends or byte order mark."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(b"\xef\xbb\xbf").rstrip(b"\r\n")
            if line.strip():
                yield number, line


def read_transcript(path: Path) -> str:
    if not is_file(path):  # a device or a pipe may have no end
        raise RecordError("missing file", str(path))
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecordError("not UTF-8", f"{path}: {error}") from None
    except (OSError, ValueError):
        raise RecordError("missing file", str(path)) from None


def read_head(path: Path, *suffixes: str) -> str:
    """The first 64 KiB of a file, to detect its format; empty if it is none, or has none of the suffixes."""
    if (suffixes and path.suffix not in suffixes) or not path.is_file():
        return ""
    with path.open("rb") as file:
        return file.read(1 << 16).decode("utf-8", errors="replace")


def index_file(source: Path, name: str) -> Path:
    """The file that lists the items of a source: the source itself, or the file of this name in its folder."""
    return source / name if source.is_dir() else source


def list_files(folder: Path, *suffixes: str) -> list[Path]:
    """Files below a folder with one of the suffixes, sorted, without hidden ones (and the `._` files of macOS) and
    without what is in a folder that an import has written."""
    files: list[Path] = []
    for parent, folders, names in os.walk(folder):
        here = Path(parent)
        is_output = here != folder and any(name in OUTPUT_FILES for name in names)
        folders[:] = [] if is_output else [name for name in folders if not name.startswith(".")]
        if not is_output:
            files += [here / name for name in names if Path(name).suffix.lower() in suffixes and name[0] != "."]
    return sorted(path for path in files if is_file(path))


def list_recordings(folder: Path) -> list[Path]:
    """Recordings below a folder. One with another suffix than `AUDIO_SUFFIXES` counts if no other has its name."""
    recordings = list_files(folder, *AUDIO_SUFFIXES)
    others: dict[Path, Path] = {}
    for path in sorted(list_files(folder, *OTHER_AUDIO_SUFFIXES), key=_suffix_order):
        others.setdefault(path.with_suffix(""), path)
    names = {path.with_suffix("") for path in recordings}
    return sorted(recordings + [path for name, path in others.items() if name not in names])


def _suffix_order(path: Path) -> int:
    return OTHER_AUDIO_SUFFIXES.index(path.suffix.lower())


def find_file(name: str, *folders: Path) -> Path:
    """The path of a file that a source names: in the first folder that has it, else in the first."""
    candidates = [folder / name for folder in folders]
    return next((path for path in candidates if is_file(path)), candidates[0])
