"""X-ray of a folder: numbers, pieces and an HTML page, in a folder that appears whole.

The page opens from disk, plays what lies beside it, and moves thresholds without a server.
"""

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from myna.core.io import atomic_folder, check_writable
from myna.core.progress import ProgressCallback, silent
from myna.curate.xray import source as sources
from myna.curate.xray.numbers import alone_ms, clock, spoken_length, text_diff, xray_numbers
from myna.data.segments import DROP_REASONS
from myna.report.page import axis_ticks, page_asset, render_page, render_template

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
    source = sources.open_xray_source(folder, progress)
    check_writable(folder)
    tokenizer = None
    if model is not None:
        from myna.models import open_family

        tokenizer = open_family(model).tokenizer
    numbers = xray_numbers(source, tokenizer, progress)
    numbers["tokenizer"] = model
    examples = [id for speaker in numbers["speakers"]["speakers"] for id in speaker["examples"]]
    rows = sources.choose_pieces(source.table, [part["reason"] for part in numbers["hours"]["parts"]], examples)
    out = folder / FOLDER
    with atomic_folder(out, replace=True) as new:
        pieces, unreadable = sources.write_pieces(source, rows.all(), new, progress)
        numbers["sample"] = {"pieces": len(pieces), "unreadable": unreadable}
        names = [row["recording"] for row in numbers["recordings"]["shown"]] if source.is_curated else []
        lines = sources.timelines(source, names, out)
        page = xray_page(numbers, rows, pieces, lines, _map_audio(source.table, numbers, out, folder))
        (new / PAGE_FILE).write_text(page, encoding="utf-8")
        text = json.dumps(numbers, indent=1, ensure_ascii=False, allow_nan=False)
        (new / NUMBERS_FILE).write_text(text + "\n", encoding="utf-8")
    return Xray(out / PAGE_FILE, numbers, len(pieces))


def _map_audio(table: pa.Table, numbers: dict[str, Any], out: Path, folder: Path) -> dict[str, list[Any]]:
    """Return file, first and last second of the clips on the map."""
    ids = [point["id"] for point in numbers["speakers"]["map"]["points"]]
    found = [row for row in sources.rows_of(table, pa.array(ids, pa.string())) if row is not None]
    columns = ("id", "audio", "audio_start_ms", "start_ms", "end_ms")
    rows = table.select(columns).take(pa.array(found, pa.int64())).to_pylist()
    return {
        row["id"]: [
            os.path.relpath(folder / row["audio"], out).replace(os.sep, "/"),
            row["audio_start_ms"] / 1000,
            (row["audio_start_ms"] + row["end_ms"] - row["start_ms"]) / 1000,
        ]
        for row in rows
    }


PACKAGE = "myna.curate.xray"
MEASURE_KEYS = ("measure", "setting", "side", "limits", "edges", "pass_ms", "missing_kept_ms", "kept_ms")
"""Values of a measure that the script needs to move its threshold."""
REASON_GROUPS = {
    "kept": ("kept",),
    "silence": ("no speech",),
    "sound": ("music", "noisy", "low quality", "narrow band", "clipped"),
    "voices": ("overlap", "mixed speakers", "other speaker"),
    "words": ("doubtful text", "wrong language", "pace"),
    "cut": ("too short", "too long", "no silent cut"),
    "other": ("duplicate", "unreadable", "dropped by hand"),
}
"""Reasons that share a hue."""
WIDTH, HEIGHT, MARGIN = 520, 130, 22
"""Size of a histogram in SVG units; the margin is for the numbers below it."""


def xray_page(
    numbers: Mapping[str, Any],
    rows: sources.PieceRows,
    pieces: Mapping[int, Mapping[str, Any]],
    timelines: Sequence[Mapping[str, Any]],
    map_audio: Mapping[str, Sequence[Any]],
) -> str:
    """Render the page. `pieces` are by row; `map_audio` tells where the clips of the map can be heard."""
    folder = numbers["folder"]
    data = {
        "folder": shlex.quote(folder),
        "measures": [{key: measure[key] for key in MEASURE_KEYS} for measure in numbers["measures"]],
        "timelines": timelines,
        "map": map_audio,
    }
    body = render_template(
        "curate/xray/page.html",
        numbers=numbers,
        folder=shlex.quote(folder),
        folder_name=folder.rstrip("/").rpartition("/")[2] or folder,
        data=data,
        reasons=[
            part | {"pieces": [pieces[row] for row in rows.reasons.get(part["reason"], ())]}
            for part in numbers["hours"]["parts"]
        ],
        doubtful=[
            ("Kept, the least certain first", [pieces[row] for row in rows.doubtful_kept]),
            ("Dropped, the nearest to being kept first", [pieces[row] for row in rows.doubtful_dropped]),
        ],
        pairs=[(pieces[first], pieces[second]) for first, second in rows.duplicates],
        by_id={piece["id"]: piece for piece in pieces.values()},
        timelines=timelines,
        sampled=len(pieces),
        max_seconds=sources.MAX_PIECE_SECONDS,
        histogram=histogram_shape,
        map_speakers=list(dict.fromkeys(point["speaker"] for point in numbers["speakers"]["map"]["points"])),
        alone_ms=alone_ms,
        color=reason_class,
        clock=clock,
        length=spoken_length,
        diff=lambda piece: text_diff(piece["text"], piece["check_text"], piece["language"]),
        quote=shlex.quote,
        settings_text=json.dumps(numbers["settings"], indent=1) if numbers["settings"] else "",
    )
    return render_page(
        f"X-ray of {folder}",
        [{"kind": "markup", "markup": body}],
        css=page_asset("xray.css", PACKAGE) + _reason_colors(),
        script=page_asset("xray.js", PACKAGE),
        allow_audio_files=True,
    )


def reason_class(reason: str) -> str:
    """Return the style class of a reason."""
    names = ("kept", *DROP_REASONS)
    return f"reason{names.index(reason)}" if reason in names else "reason-other"


def _reason_colors() -> str:
    """Return style rules with a hue for each group, from dark to light within it."""
    hues = {"kept": 178, "silence": 80, "sound": 45, "voices": 335, "words": 265, "cut": 105, "other": 20}
    rules = []
    for group, members in REASON_GROUPS.items():
        chroma = 0.01 if group == "silence" else 0.03 if group == "other" else 0.12
        for number, reason in enumerate(members):
            lightness = 0.82 if group == "silence" else 0.52 + 0.3 * number / len(members)
            color = f"oklch({lightness:.2f} {chroma} {hues[group]})"
            rules.append(f".{reason_class(reason)} {{ --reason: {color}; }}")
    return "\n".join(rules) + "\n"


def histogram_shape(measure: Mapping[str, Any]) -> dict[str, Any]:
    """Compute the shapes of a histogram of hours: bars of all and of kept clips, labels, and lines for limits."""
    edges, highest, bottom = measure["edges"], max(*measure["ms"], 1), HEIGHT - MARGIN
    step = WIDTH / len(measure["ms"])

    def bars(values: Sequence[int]) -> str:
        heights = [(at, max(1.0, bottom * value / highest)) for at, value in enumerate(values) if value]
        return "".join(f"M{at * step + 0.5:.1f} {bottom}v-{up:.1f}h{step - 1:.1f}v{up:.1f}z" for at, up in heights)

    def place(value: float) -> str:
        return f"{np.interp(value, edges, step * (1 + np.arange(len(edges)))):.1f}"

    low, high = edges[0], edges[-1]
    return {
        "width": WIDTH,
        "height": HEIGHT,
        "bottom": bottom,
        "step": f"{step:.4f}",
        "all": bars(measure["ms"]),
        "kept": bars(measure["now_ms"]),
        "labels": [(place(tick), f"{tick:g}") for tick in axis_ticks(low, high, 6) if low <= tick <= high],
        "limits": [place(limit) for limit in measure["limits"]],
        "description": f"{measure['title']}: hours of clips by {measure['unit']}, from {low:g} to {high:g}",
    }
