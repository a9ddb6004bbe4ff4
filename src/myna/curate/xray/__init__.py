"""X-ray of a folder from end to end: numbers, pieces and the page, in a folder that appears whole."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from myna.core.io import atomic_folder, check_writable
from myna.core.progress import ProgressCallback, silent
from myna.curate.xray.numbers import xray_numbers
from myna.curate.xray.page import xray_page
from myna.curate.xray.pieces import choose_pieces, timelines, write_pieces
from myna.curate.xray.source import open_xray_source

FOLDER = "xray"
"""Name of the folder within the folder that is X-rayed."""
PAGE_FILE, NUMBERS_FILE = "report.html", "xray.json"


@dataclass(frozen=True, slots=True)
class Xray:
    """Result of an X-ray. It can be used as the path of its page."""

    page: Path
    numbers: dict[str, Any]
    pieces: int
    """Number of segments that were copied beside the page."""

    @property
    def verdict(self) -> list[str]:
        return [sentence["text"] for sentence in self.numbers["verdict"]]

    def __fspath__(self) -> str:
        return os.fspath(self.page)


def run_xray(folder: Path, *, model: str | None = None, progress: ProgressCallback = silent) -> Xray:
    """Write FOLDER/xray: report.html, xray.json and clips/. It replaces an earlier X-ray."""
    source = open_xray_source(folder, progress)
    check_writable(folder)
    numbers = xray_numbers(source, _tokenizer(model), progress)
    numbers["tokenizer"] = model
    examples = [id for speaker in numbers["speakers"]["speakers"] for id in speaker["examples"]]
    rows = choose_pieces(source.table, [part["reason"] for part in numbers["hours"]["parts"]], examples)
    out = folder / FOLDER
    with atomic_folder(out, replace=True) as new:
        pieces, unreadable = write_pieces(source, rows.all(), new, progress)
        numbers["sample"] = {"pieces": len(pieces), "unreadable": unreadable}
        names = [row["recording"] for row in numbers["recordings"]["shown"]] if source.is_curated else []
        lines = timelines(source, names, out)
        page = xray_page(numbers, rows, pieces, lines, _map_audio(source.table, numbers, out, folder))
        (new / PAGE_FILE).write_text(page, encoding="utf-8")
        text = json.dumps(numbers, indent=1, ensure_ascii=False, allow_nan=False)
        (new / NUMBERS_FILE).write_text(text + "\n", encoding="utf-8")
    return Xray(out / PAGE_FILE, numbers, len(pieces))


def _tokenizer(model: str | None) -> Any:
    if model is None:
        return None
    from myna.models import open_family

    return open_family(model).tokenizer


def _map_audio(table: pa.Table, numbers: dict[str, Any], out: Path, folder: Path) -> dict[str, list[Any]]:
    """Return file, first and last second of the clips on the map."""
    ids = [point["id"] for point in numbers["speakers"]["map"]["points"]]
    found = pc.index_in(pa.array(ids, pa.string()), value_set=table["id"].combine_chunks()).to_pylist()
    columns = ("id", "audio", "audio_start_ms", "start_ms", "end_ms")
    rows = table.select(columns).take(pa.array([row for row in found if row is not None], pa.int64())).to_pylist()
    return {
        row["id"]: [
            os.path.relpath(folder / row["audio"], out).replace(os.sep, "/"),
            row["audio_start_ms"] / 1000,
            (row["audio_start_ms"] + row["end_ms"] - row["start_ms"]) / 1000,
        ]
        for row in rows
    }
