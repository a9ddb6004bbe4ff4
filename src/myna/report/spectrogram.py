"""Sound for the eye: a mel spectrogram as a PNG, with numpy and zlib alone."""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode

import numpy as np
import numpy.typing as npt

from myna.report.markup import Markup, element

Pixels = npt.NDArray[np.uint8]
"""(height, width), each a place in the palette."""

BANDS, LOWEST, HIGHEST = 96, 40.0, 10_000.0
"""Rows of a picture, and the pitches of the lowest and the highest, in hertz."""
WINDOW, STEP = 0.04, 0.01
"""Seconds: what one column hears, and how far apart columns are."""
RANGE = 65.0
"""Decibels below the loudest moment at which a picture is black."""
STOPS = ((3, 5, 18), (32, 18, 77), (92, 22, 112), (160, 42, 99), (220, 80, 57), (249, 142, 8), (252, 255, 164))
"""From silence to the loudest: a scale whose steps look equal, to the colour-blind too."""


def data_uri(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{b64encode(content).decode()}"


def spectrogram(samples: npt.NDArray[np.float32], sample_rate: int, *, label: str) -> Markup:
    """An image of the sound, low pitches at the bottom, ten milliseconds a column."""
    pixels = mel_pixels(samples, sample_rate)
    height, width = pixels.shape
    return element("img", src=data_uri(png(pixels), "image/png"), alt=label, width=width, height=height)


def mel_pixels(samples: npt.NDArray[np.float32], sample_rate: int) -> Pixels:
    """Loudness by band and moment, relative to the loudest; all black where there is no sound."""
    size, step = round(WINDOW * sample_rate), round(STEP * sample_rate)
    columns = max(1, len(samples) // step)
    padded = np.pad(np.asarray(samples, np.float64), (size // 2, size + step))
    starts = np.arange(columns) * step
    frames = padded[starts[:, None] + np.arange(size)] * np.hanning(size)
    power = np.square(np.abs(np.fft.rfft(frames, axis=1)))
    mel = power @ _bands(sample_rate, size)
    loudest = float(mel.max())
    if loudest <= 0:
        return np.zeros((BANDS, columns), np.uint8)
    level = 10 * np.log10(np.maximum(mel / loudest, 10 ** (-RANGE / 10)))
    return np.ascontiguousarray(np.round((1 + level / RANGE) * 255).astype(np.uint8).T[::-1])


def png(pixels: Pixels) -> bytes:
    """One byte a pixel, with the palette of `STOPS`."""
    height, width = pixels.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels], axis=1)  # 0: a line is stored as it is
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
            _chunk(b"PLTE", palette().tobytes()),
            _chunk(b"IDAT", zlib.compress(lines.tobytes(), 9)),
            _chunk(b"IEND", b""),
        )
    )


def palette() -> Pixels:
    """(256, 3): red, green and blue of each level."""
    stops = np.array(STOPS, np.float64)
    at = np.linspace(0, len(stops) - 1, 256)
    colours = [np.interp(at, np.arange(len(stops)), stops[:, channel]) for channel in range(3)]
    return np.round(np.stack(colours, axis=1)).astype(np.uint8)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def _bands(sample_rate: int, size: int) -> npt.NDArray[np.float64]:
    """(frequencies, bands): triangles, equally wide to the ear."""
    highest = min(HIGHEST, sample_rate / 2)
    edges = np.linspace(_mel(np.array(LOWEST)), _mel(np.array(highest)), BANDS + 2)
    hertz = 700 * (10 ** (edges / 2595) - 1)
    frequencies = np.fft.rfftfreq(size, 1 / sample_rate)[:, None]
    low, middle, high = hertz[:-2], hertz[1:-1], hertz[2:]
    rising, falling = (frequencies - low) / (middle - low), (high - frequencies) / (high - middle)
    weights = np.maximum(0.0, np.minimum(rising, falling))
    # A low band may lie between two frequencies; it then hears the nearest one.
    nearest = np.abs(frequencies - middle).argmin(axis=0)
    empty = weights.sum(axis=0) == 0
    weights[nearest[empty], np.flatnonzero(empty)] = 1.0
    return np.asarray(weights / weights.sum(axis=0))


def _mel(hertz: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.asarray(2595 * np.log10(1 + hertz / 700))
