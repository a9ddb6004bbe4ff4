"""HTML page of an X-ray: opens from disk, plays what lies beside it, and moves thresholds without a server."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from myna.curate.xray.numbers import DiffPiece, alone_ms, clock, spoken_length, text_diff
from myna.curate.xray.pieces import MAX_PIECE_SECONDS, PieceRows
from myna.data.segments import DROP_REASONS
from myna.report.document import html_document, page_asset, render_template
from myna.report.markup import element, join_html
from myna.report.plot import axis_ticks

PACKAGE = "myna.curate.xray"
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
"""Of a histogram, in SVG units; the margin is for the numbers below it."""


def xray_page(
    numbers: Mapping[str, Any],
    rows: PieceRows,
    pieces: Mapping[int, Mapping[str, Any]],
    timelines: Sequence[Mapping[str, Any]],
    map_audio: Mapping[str, Sequence[Any]],
) -> str:
    """The page of these numbers. `pieces` are by row; `map_audio` tells where the clips of the map can be heard."""
    folder = numbers["folder"]
    by_id = {piece["id"]: piece for piece in pieces.values()}
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
        data=_json(data),
        reasons=[
            part | {"pieces": [pieces[row] for row in rows.reasons.get(part["reason"], ())]}
            for part in numbers["hours"]["parts"]
        ],
        doubtful=[
            ("Kept, the least certain first", [pieces[row] for row in rows.doubtful_kept]),
            ("Dropped, the nearest to being kept first", [pieces[row] for row in rows.doubtful_dropped]),
        ],
        pairs=[(pieces[first], pieces[second]) for first, second in rows.duplicates],
        by_id=by_id,
        timelines=timelines,
        sampled=len(pieces),
        max_seconds=MAX_PIECE_SECONDS,
        histogram=histogram_figure,
        voice_map=_voice_map(numbers["speakers"]["map"]["points"]),
        alone_ms=alone_ms,
        color=reason_class,
        clock=clock,
        length=spoken_length,
        diff=lambda piece: _diff(text_diff(piece["text"], piece["check_text"], piece["language"])),
        quote=shlex.quote,
        settings_text=json.dumps(numbers["settings"], indent=1) if numbers["settings"] else "",
    )
    css = page_asset("xray.css", PACKAGE) + _reason_colors()
    script = page_asset("xray.js", PACKAGE)
    return html_document(f"X-ray of {folder}", body, css=css, script=script, allow_audio_files=True)


MEASURE_KEYS = ("measure", "setting", "side", "limits", "edges", "pass_ms", "missing_kept_ms", "kept_ms")


def _json(tree: object) -> Markup:
    """JSON for a script element: no text in it can end the element."""
    text = json.dumps(tree, ensure_ascii=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))


def reason_class(reason: str) -> str:
    names = ("kept", *DROP_REASONS)
    return f"reason{names.index(reason)}" if reason in names else "reason-other"


def _reason_colors() -> str:
    """A hue for each group, from dark to light within it."""
    hues = {"kept": 178, "silence": 80, "sound": 45, "voices": 335, "words": 265, "cut": 105, "other": 20}
    rules = []
    for group, members in REASON_GROUPS.items():
        chroma = 0.01 if group == "silence" else 0.03 if group == "other" else 0.12
        for number, reason in enumerate(members):
            lightness = 0.82 if group == "silence" else 0.52 + 0.3 * number / len(members)
            color = f"oklch({lightness:.2f} {chroma} {hues[group]})"
            rules.append(f".{reason_class(reason)} {{ --reason: {color}; }}")
    return "\n".join(rules) + "\n"


def _diff(pieces: Sequence[DiffPiece]) -> Markup:
    parts: list[object] = []
    for piece in pieces:
        if piece.equal:
            parts.append(piece.equal)
        if piece.first:
            parts.append(element("del", piece.first))
        if piece.second:
            parts.append(element("ins", piece.second))
    return join_html(parts, " ")


def histogram_figure(measure: Mapping[str, Any], number: int) -> Markup:
    """Hours by value as bars: all clips behind, kept ones in front; a line at each limit, which the script moves."""
    edges, count = measure["edges"], len(measure["ms"])
    highest = max(*measure["ms"], 1)
    step = WIDTH / count
    plot_height = HEIGHT - MARGIN
    bars = []
    for name in ("ms", "now_ms"):
        shapes = []
        for at, value in enumerate(measure[name]):
            if value:
                height = max(1.0, plot_height * value / highest)
                shapes.append(f"M{at * step + 0.5:.1f} {plot_height:.1f}v-{height:.1f}h{step - 1:.1f}v{height:.1f}z")
        bars.append(element("path", d="".join(shapes), class_="all" if name == "ms" else "now"))
    low, high = edges[0], edges[-1]

    def place(value: float) -> str:
        return f"{np.interp(value, edges, step * (1 + np.arange(len(edges)))):.1f}"

    labels = [
        element("text", f"{tick:g}", x=place(tick), y=HEIGHT - 6, text_anchor="middle")
        for tick in axis_ticks(low, high, 6)
        if low <= tick <= high
    ]
    lines = [
        element("line", x1=place(limit), x2=place(limit), y1=0, y2=plot_height, class_="limit", data_limit=at)
        for at, limit in enumerate(measure["limits"])
    ]
    return element(
        "svg",
        *bars,
        element("line", x1=0, x2=WIDTH, y1=plot_height, y2=plot_height, class_="grid"),
        *labels,
        *lines,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=f"{measure['title']}: hours of clips by {measure['unit']}, from {low:g} to {high:g}",
        data_histogram=number,
        data_step=f"{step:.4f}",
    )


def _voice_map(points: Sequence[Mapping[str, Any]]) -> Markup:
    """Clips as dots, where their voices are; colored by speaker."""
    names = list(dict.fromkeys(point["speaker"] for point in points))
    dots = [
        element(
            "circle",
            element("title", f"{point['speaker']}, {point['id']}"),
            cx=f"{260 + 240 * point['x']:.1f}",
            cy=f"{170 - 150 * point['y']:.1f}",
            r=5,
            class_=f"color{names.index(point['speaker']) % 6}",
            data_clip=point["id"],
        )
        for point in points
    ]
    if not dots:
        return Markup()
    label = "Clips by their voices, colored by speaker"
    svg = element("svg", *dots, viewBox="0 0 520 340", role="img", aria_label=label)
    legend = [element("li", name, class_=f"color{at % 6}") for at, name in enumerate(names)]
    return element("div", svg, element("ul", *legend, class_="legend"), class_="plot map")
