"""Self-contained HTML pages from sections: one file, no network, light and dark color schemes.

A page is a list of sections, which are plain JSON values made by the functions below. `sections.html` renders them, so
that tables and texts can be read without scripts; `page.js` adds playing, and the blind listening test. A palette PNG
takes twenty lines of numpy and zlib, so that neither Pillow nor matplotlib is a dependency.
"""

import io
import math
import struct
import zlib
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import soundfile
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

CONTENT_POLICY = (
    "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
)
"""Content security policy: a page may load only what it holds itself."""
Section = dict[str, Any]
"""Part of a page: its `kind`, a macro of `sections.html`, and the values that this macro shows."""
Cell = str | dict[str, str]
"""Text of a table cell, or what `cell` makes."""
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


def render_page(
    title: str,
    sections: Iterable[Section],
    *,
    css: str = "",
    script: str = "",
    allow_post: bool = False,
    allow_audio_files: bool = False,
) -> str:
    """Render a whole page. `css` and `script` are added to those of every page; `allow_post` permits requests to the
    server that the page came from, `allow_audio_files` permits audio files beside the page."""
    media = "media-src data:"
    policy = CONTENT_POLICY.replace(media, f"{media} 'self' file:") if allow_audio_files else CONTENT_POLICY
    page = render_template(
        "report/page.html",
        title=title,
        sections=sections,
        policy=f"{policy}; connect-src 'self'" if allow_post else policy,
        css=Markup(page_asset("page.css") + css),
        script=Markup(page_asset("page.js") + script),
    )
    return str(page)


def render_template(name: str, **context: object) -> Markup:
    """Render a template of the package, escaping `context` except for markup; `name` is relative to `myna`."""
    return Markup(_environment().get_template(name).render(**context))


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("myna", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # `tojson` escapes whatever could end a script element.
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    return environment


@cache
def page_asset(name: str, package: str = "myna.report") -> str:
    """Read a style sheet or a script of a package."""
    return (files(package) / name).read_text(encoding="utf-8")


def heading(text: str, level: int = 2) -> Section:
    return {"kind": "heading", "text": text, "level": level}


def paragraph(text: str, style: str = "", href: str = "") -> Section:
    """Make a paragraph; its style is `lead`, `note`, `missing`, `good` or `bad`, or several of them."""
    return {"kind": "paragraph", "text": text, "style": style, "href": href}


def cell(text: str, style: str = "", *, note: str = "", href: str = "") -> Cell:
    """Make a table cell in a style (good or bad), with a note below it or as a link."""
    return {"text": text, "style": style, "note": note, "href": href}


def table(caption: str, header: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Section:
    """Make a table whose first cells name the rows; the caption is for screen readers."""
    return {"kind": "table", "caption": caption, "header": list(header), "rows": [list(row) for row in rows]}


def figures(numbers: Iterable[tuple[str, str]]) -> Section:
    """Make large numbers, each with what it counts."""
    return {"kind": "figures", "figures": [list(pair) for pair in numbers]}


def card(title: str, *sections: Section, style: str = "") -> Section:
    return {"kind": "card", "title": title, "style": style, "sections": list(sections)}


def details(summary: str, *sections: Section, is_open: bool = False) -> Section:
    """Make sections that are shown when the summary is clicked."""
    return {"kind": "details", "summary": summary, "sections": list(sections), "is_open": is_open}


def code(text: str) -> Section:
    return {"kind": "code", "text": text}


def bullets(items: Iterable[str]) -> Section:
    return {"kind": "bullets", "items": list(items)}


def item(title: str, note: str, clips: Iterable[Section]) -> Section:
    """Make a card with audio clips side by side, made by `myna.report.page.clip`."""
    return {"kind": "item", "title": title, "note": note, "clips": list(clips)}


def footer(text: str) -> Section:
    return {"kind": "footer", "text": text}


KEYS = (
    ("Space", "play what is still to be heard, then pause and go on"),
    ("1 and 2", "play A, play B, from the start"),
    ("X", "change to the other one, at the same place"),
    ("R", "play the real recording, where there is one"),
    ("A and B", "this one is better"),
    ("= or T", "no difference"),
    ("← and →", "the pair before, the next pair"),
    ("?", "these keys"),
)


def blind_test(
    pairs: Sequence[Mapping[str, Any]],
    sounds: Mapping[str, str | None],
    *,
    name: str,
    intervals: Sequence[Sequence[float]],
    level: float,
) -> Section:
    """Make a blind listening test (A or B), usable by keyboard or mouse, and with a screen reader.

    A pair has an `id`, its `text`, `note` and `language`, two `sounds` in playing order, the `names` of their systems,
    which are shown at the end, and perhaps a `real` recording. `sounds` are data URIs by name, None for an empty clip;
    the browser stores answers under `name`; `intervals[n][k]` is the lower bound of the preference for k of n answers
    at the confidence `level`.
    """
    data = {
        "name": name,
        "pairs": [dict(pair) for pair in pairs],
        "sounds": dict(sounds),
        "intervals": [[round(low, 4) for low in lows] for lows in intervals],
        "level": level,
    }
    return {"kind": "blind_test", "data": data, "keys": KEYS}


@dataclass(frozen=True, slots=True)
class Curve:
    """Named series of (x, y) points. `color` is one of six of the page's style sheet; curves may share one."""

    name: str
    points: Sequence[tuple[float, float]]
    style: Literal["faint", "line", "dots"] = "line"
    color: int = 0


def data_uri(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{b64encode(content).decode()}"


def audio_uri(samples: Samples, sample_rate: int) -> str | None:
    """Encode a clip for a player; None for an empty one."""
    return data_uri(encode_flac(samples, sample_rate), "audio/flac") if len(samples) else None


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
    image = None
    if len(samples):
        pixels = mel_spectrogram_pixels(samples, sample_rate)
        height, width = pixels.shape
        image = {"src": data_uri(encode_png(pixels), "image/png"), "width": width, "height": height}
    share = 100 * min(1.0, seconds / max_seconds) if max_seconds > 0 else 100.0
    return {
        "title": title,
        "label": label,
        "seconds": f"{seconds:.1f} s",
        "share": f"{share:.1f}",
        "audio": audio_uri(samples, sample_rate),
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


def smooth_curve(points: Sequence[tuple[float, float]], decay: float) -> list[tuple[float, float]]:
    """Compute the exponential moving average with bias correction."""
    smoothed, mean, weight = [], 0.0, 0.0
    for x, y in points:
        mean, weight = decay * mean + (1 - decay) * y, decay * weight + (1 - decay)
        smoothed.append((x, mean / weight))
    return smoothed


def axis_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Choose about `count` round numbers; the first is at most `low`, the last at least `high`."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # equal but for rounding
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
