"""Files of a source, read so that one bad line costs one line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from myna.data.importers.base import Bad, Record, Rejected
from myna.data.importers.fields import typed
from myna.io import is_file


def json_records(path: Path) -> Iterator[Record | Rejected]:
    """The objects of a JSONL file by line, or of a JSON file as its list of samples or its only one."""
    tree = None if path.suffix == ".jsonl" else parsed(path)
    if tree is None or (isinstance(tree, Rejected) and tree.detail.startswith("Extra data")):
        yield from _json_lines(path)
    elif isinstance(tree, Rejected):
        yield tree
    else:
        yield from objects(path, tree if isinstance(tree, list) else [tree])


def parsed(path: Path) -> Any:
    """A whole JSON file, or the `Rejected` that it is."""
    try:
        return json.loads(path.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return Rejected(str(path), None, None, "not UTF-8", str(error))
    except json.JSONDecodeError as error:
        return Rejected(str(path), error.lineno, None, "malformed", str(error))


def objects(path: Path, samples: Iterable[Any]) -> Iterator[Record | Rejected]:
    for number, sample in enumerate(samples, start=1):
        if isinstance(sample, dict):
            yield Record(path, number, sample)
        else:
            yield Rejected(str(path), number, None, "malformed", f"{type(sample).__name__}, not an object")


def _json_lines(path: Path) -> Iterator[Record | Rejected]:
    for number, line in lines(path):
        record = Record(path, number, None)
        try:
            record.data = typed(json.loads(line.decode("utf-8")), dict, "line")
        except UnicodeDecodeError as error:
            yield record.rejected(Bad("not UTF-8", str(error)))
        except json.JSONDecodeError as error:
            yield record.rejected(Bad("malformed", str(error)))
        except Bad as bad:
            yield record.rejected(bad)
        else:
            yield record


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers, without line ends or byte order mark."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(b"\xef\xbb\xbf").rstrip(b"\r\n")
            if line.strip():
                yield number, line


def read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, ValueError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise Bad("not UTF-8", f"{path}: {error}") from None
        raise Bad("missing file", str(path)) from None


def head(path: Path) -> str:
    """The first stretch of a file, for a look at what it is."""
    with path.open("rb") as file:
        return file.read(1 << 16).decode("utf-8", errors="replace")


def visible(folder: Path, *suffixes: str) -> list[Path]:
    """Files below a folder, by name; hidden ones and `._` twins from other systems are not there for us."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in suffixes
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and path.is_file()
    )


def locate(name: str, *folders: Path) -> Path:
    """Where a source's file lies: the first folder that has it, else where it was expected."""
    candidates = [folder / name for folder in folders]
    return next((path for path in candidates if is_file(path)), candidates[0])
