"""Audio clips with their spectrograms, and plots, as data of a page.

A palette PNG takes twenty lines of numpy and zlib, so that neither Pillow nor matplotlib is a dependency.
"""

from __future__ import annotations

import io
import math
import struct
import zlib
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import soundfile

from myna.report.page import Cell, Section, render_template

Samples = npt.NDArray[np.float32]
Pixels = npt.NDArray[np.uint8]
"""Palette indices, (height, width)."""

BANDS, MIN_HZ, MAX_HZ = 96, 40.0, 10_000.0
"""Mel bands, one image row each, and the frequency range they cover."""
WINDOW_SECONDS, HOP_SECONDS = 0.04, 0.01
DYNAMIC_RANGE_DB = 65.0
"""Level below the loudest band from which pixels are black."""
COLOR_STOPS = ((3, 5, 18), (32, 18, 77), (92, 22, 112), (160, 42, 99), (220, 80, 57), (249, 142, 8), (252, 255, 164))
"""Perceptually uniform RGB stops (inferno), from silence to the loudest."""
PLOT_WIDTH, PLOT_HEIGHT = 1040, 340
"""Size of a plot in SVG units, as are its margins."""
LEFT, RIGHT, TOP, BOTTOM = 48, 16, 30, 42
FILE_COLORS = ("#1668a8", "#c2571a", "#2e7d4f", "#b0418c", "#8a7a1f", "#333333")
"""Colors of the curves in an SVG file of its own."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Named series of (x, y) points. `color` is one of six of the page's style sheet; curves may share one."""

    name: str
    points: Sequence[tuple[float, float]]
    style: Literal["faint", "line", "dots"] = "line"
    color: int = 0


def data_uri(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{b64encode(content).decode()}"


def encode_flac(samples: Samples, sample_rate: int) -> bytes:
    """Encode a FLAC file. It is lossless, so that a page plays what was scored, at half the size of a WAV."""
    file = io.BytesIO()
    soundfile.write(file, np.clip(samples, -1, 1), sample_rate, format="FLAC", subtype="PCM_16")
    return file.getvalue()


def clip(
    samples: Samples, sample_rate: int, *, title: str, label: str, max_seconds: float, notes: Sequence[Cell] = ()
) -> dict[str, Any]:
    """Make a player under its spectrogram, whose width is the clip's share of `max_seconds`, the longest clip beside
    it."""
    seconds = len(samples) / sample_rate
    audio = image = None
    if len(samples):
        pixels = mel_spectrogram_pixels(samples, sample_rate)
        height, width = pixels.shape
        image = {"src": data_uri(encode_png(pixels), "image/png"), "width": width, "height": height}
        audio = data_uri(encode_flac(samples, sample_rate), "audio/flac")
    share = 100 * min(1.0, seconds / max_seconds) if max_seconds > 0 else 100.0
    return {
        "title": title,
        "label": label,
        "seconds": f"{seconds:.1f} s",
        "share": f"{share:.1f}",
        "audio": audio,
        "image": image,
        "notes": list(notes),
    }


def line_plot(curves: Sequence[Curve], *, title: str, x_label: str, y_label: str) -> Section:
    """Draw all curves on one pair of axes, without points that are not finite, and describe them for screen readers."""
    points = [point for curve in curves for point in curve.points if all(map(math.isfinite, point))]
    plot = {"kind": "plot", "title": title, "curves": []}
    if not points:
        return plot
    xs, ys = zip(*points, strict=True)
    first, last = min(xs), max(xs)
    y_ticks = axis_ticks(min(ys), max(ys))
    low, high = y_ticks[0], y_ticks[-1]
    right, bottom = PLOT_WIDTH - RIGHT, PLOT_HEIGHT - BOTTOM

    def across(x: float) -> float:
        return round(float(LEFT + (right - LEFT) * (x - first) / ((last - first) or 1.0)), 1)

    def down(y: float) -> float:
        return round(TOP + (bottom - TOP) * (high - y) / (high - low), 1)

    return plot | {
        "width": PLOT_WIDTH,
        "height": PLOT_HEIGHT,
        "left": LEFT,
        "right": right,
        "bottom": bottom,
        "description": " ".join(
            f"{curve.name}: from {curve.points[0][1]:.3g} to {curve.points[-1][1]:.3g}."
            for curve in curves
            if curve.points
        ),
        "x_label": x_label,
        "y_label": y_label,
        "x_ticks": [
            {"place": across(tick), "label": f"{tick:g}"} for tick in axis_ticks(first, last) if first <= tick <= last
        ],
        "y_ticks": [{"place": down(tick), "label": f"{tick:g}"} for tick in y_ticks],
        "curves": [
            {
                "name": curve.name,
                "style": curve.style,
                "color": curve.color,
                "points": [(across(x), down(y)) for x, y in curve.points if math.isfinite(x) and math.isfinite(y)],
            }
            for curve in curves
        ],
    }


def plot_file(curves: Sequence[Curve], *, title: str, x_label: str, y_label: str) -> str:
    """Draw a plot as an SVG file that needs no style sheet, with its legend in it; empty without a point."""
    plot = line_plot(curves, title=title, x_label=x_label, y_label=y_label)
    if not plot["curves"]:
        return ""
    style = "text{font:13px sans-serif;fill:#333}.grid{stroke:#ddd}polyline{fill:none;stroke-width:2}"
    for number, color in enumerate(FILE_COLORS):
        style += f".color{number}{{fill:{color}}}.color{number} polyline{{stroke:{color}}}"
    return str(render_template("report/plot.svg", plot=plot, style=style + ".faint{opacity:.35}"))


@dataclass(frozen=True, slots=True)
class BarColumn:
    """Column of horizontal bars, a bar for each row of a chart, with a line at a `limit`."""

    title: str
    values: Sequence[float]
    labels: Sequence[str]
    limit: float | None = None
    is_logarithmic: bool = False


def bars_file(names: Sequence[str], columns: Sequence[BarColumn], *, faint: Sequence[bool] = ()) -> str:
    """Draw bars of the named rows as an SVG file, with columns side by side; `faint` rows are grey."""
    width, left = 640 // len(columns), 245

    def length(column: BarColumn, value: float) -> float:
        most = max(*column.values, column.limit or 0.0, 1e-9)
        room = width - 16 - 7 * max(map(len, column.labels), default=0)
        share = math.log1p(value) / math.log1p(most) if column.is_logarithmic else value / most
        return round(room * max(0.0, share), 1)

    drawn = [
        {
            "title": column.title,
            "left": left + number * width,
            "limit": None if column.limit is None else left + number * width + length(column, column.limit),
            "bars": [(length(column, value), label) for value, label in zip(column.values, column.labels, strict=True)],
        }
        for number, column in enumerate(columns)
    ]
    rows = list(zip(names, faint or [False] * len(names), strict=True))
    return str(render_template("report/bars.svg", rows=rows, columns=drawn, width=900, height=40 + 26 * len(rows)))


def smooth_curve(points: Sequence[tuple[float, float]], decay: float) -> list[tuple[float, float]]:
    """Compute the exponential moving average with bias correction."""
    smoothed, mean, weight = [], 0.0, 0.0
    for x, y in points:
        mean, weight = decay * mean + (1 - decay) * y, decay * weight + (1 - decay)
        smoothed.append((x, mean / weight))
    return smoothed


def axis_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Choose about `count` round numbers; the first is at most `low`, the last at least `high`."""
    if high <= low:
        low, high = low - 0.5, low + 0.5
    rough = (high - low) / count
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def mel_spectrogram_pixels(samples: npt.NDArray[np.float32], sample_rate: int) -> Pixels:
    """Compute levels relative to the loudest, (bands, frames), low frequencies at the bottom; all zero for silence."""
    size, hop = round(WINDOW_SECONDS * sample_rate), round(HOP_SECONDS * sample_rate)
    columns = max(1, len(samples) // hop)
    padded = np.pad(np.asarray(samples, np.float64), (size // 2, size + hop))
    starts = np.arange(columns) * hop
    frames = padded[starts[:, None] + np.arange(size)] * np.hanning(size)
    power = np.square(np.abs(np.fft.rfft(frames, axis=1)))
    mel = power @ _mel_filterbank(sample_rate, size)
    loudest = float(mel.max())
    if loudest <= 0:
        return np.zeros((BANDS, columns), np.uint8)
    level = 10 * np.log10(np.maximum(mel / loudest, 10 ** (-DYNAMIC_RANGE_DB / 10)))
    return np.ascontiguousarray(np.round((1 + level / DYNAMIC_RANGE_DB) * 255).astype(np.uint8).T[::-1])


def encode_png(pixels: Pixels) -> bytes:
    """Encode an indexed PNG, one byte a pixel, with `color_palette`."""
    height, width = pixels.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels], axis=1)  # filter type 0: none
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
            _chunk(b"PLTE", color_palette().tobytes()),
            _chunk(b"IDAT", zlib.compress(lines.tobytes(), 9)),
            _chunk(b"IEND", b""),
        )
    )


def color_palette() -> Pixels:
    """Compute the RGB colors of the 256 levels, (256, 3)."""
    stops = np.array(COLOR_STOPS, np.float64)
    at = np.linspace(0, len(stops) - 1, 256)
    channels = [np.interp(at, np.arange(len(stops)), stops[:, channel]) for channel in range(3)]
    return np.round(np.stack(channels, axis=1)).astype(np.uint8)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def _mel_filterbank(sample_rate: int, size: int) -> npt.NDArray[np.float64]:
    """Compute triangular filters, (frequencies, bands), equally wide on the mel scale."""
    max_hz = min(MAX_HZ, sample_rate / 2)
    edges = np.linspace(_mel(np.array(MIN_HZ)), _mel(np.array(max_hz)), BANDS + 2)
    hertz = 700 * (10 ** (edges / 2595) - 1)
    frequencies = np.fft.rfftfreq(size, 1 / sample_rate)[:, None]
    low, middle, high = hertz[:-2], hertz[1:-1], hertz[2:]
    rising, falling = (frequencies - low) / (middle - low), (high - frequencies) / (high - middle)
    weights = np.maximum(0.0, np.minimum(rising, falling))
    # A low band may lie between two frequencies; it takes the nearest one.
    nearest = np.abs(frequencies - middle).argmin(axis=0)
    empty = weights.sum(axis=0) == 0
    weights[nearest[empty], np.flatnonzero(empty)] = 1.0
    return np.asarray(weights / weights.sum(axis=0))


def _mel(hertz: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.asarray(2595 * np.log10(1 + hertz / 700))
