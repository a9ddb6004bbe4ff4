"""Files of a source, read so that a bad line rejects one record alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from myna.data.importers.base import RecordError, RejectedRecord, SourceRecord
from myna.data.importers.fields import require_type
from myna.io import is_file


def json_records(path: Path) -> Iterator[SourceRecord | RejectedRecord]:
    """The objects of a JSONL file by line, or of a JSON file as its list of samples or its only one."""
    tree = None if path.suffix == ".jsonl" else parse_json_file(path)
    if tree is None or (isinstance(tree, RejectedRecord) and tree.detail.startswith("Extra data")):
        yield from _json_lines(path)
    elif isinstance(tree, RejectedRecord):
        yield tree
    else:
        yield from json_objects(path, tree if isinstance(tree, list) else [tree])


def parse_json_file(path: Path) -> Any:
    """A JSON file's content, or a `RejectedRecord` if it cannot be parsed."""
    try:
        return json.loads(path.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return RejectedRecord(str(path), None, None, "not UTF-8", str(error))
    except json.JSONDecodeError as error:
        return RejectedRecord(str(path), error.lineno, None, "malformed", str(error))


def json_objects(path: Path, samples: Iterable[Any]) -> Iterator[SourceRecord | RejectedRecord]:
    for number, sample in enumerate(samples, start=1):
        if isinstance(sample, dict):
            yield SourceRecord(path, number, sample)
        else:
            yield RejectedRecord(str(path), number, None, "malformed", f"{type(sample).__name__}, not an object")


def _json_lines(path: Path) -> Iterator[SourceRecord | RejectedRecord]:
    for number, line in nonblank_lines(path):
        record = SourceRecord(path, number, None)
        try:
            record.data = require_type(json.loads(line.decode("utf-8")), dict, "line")
            yield record
        except UnicodeDecodeError as error:
            yield record.rejected(RecordError("not UTF-8", str(error)))
        except json.JSONDecodeError as error:
            yield record.rejected(RecordError("malformed", str(error)))
        except RecordError as error:
            yield record.rejected(error)


def nonblank_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers, without line ends or byte order mark."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(b"\xef\xbb\xbf").rstrip(b"\r\n")
            if line.strip():
                yield number, line


def read_transcript(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, ValueError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise RecordError("not UTF-8", f"{path}: {error}") from None
        raise RecordError("missing file", str(path)) from None


def read_head(path: Path) -> str:
    """The first 64 KiB of a file, to detect its format."""
    with path.open("rb") as file:
        return file.read(1 << 16).decode("utf-8", errors="replace")


def list_files(folder: Path, *suffixes: str) -> list[Path]:
    """Files below a folder with one of the suffixes, sorted, without hidden ones (and the `._` files of macOS)."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in suffixes
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and path.is_file()
    )


def find_file(name: str, *folders: Path) -> Path:
    """The path of a file that a source names: in the first folder that has it, else in the first."""
    candidates = [folder / name for folder in folders]
    return next((path for path in candidates if is_file(path)), candidates[0])
