"""Mel spectrograms as PNG images.

With numpy and zlib alone: Pillow and matplotlib are no dependencies, and a palette PNG takes twenty lines.
"""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from myna.report.markup import element

Pixels = npt.NDArray[np.uint8]
"""(height, width) palette indices."""

BANDS, MIN_HZ, MAX_HZ = 96, 40.0, 10_000.0
"""Mel bands, one image row each, and the frequency range they cover."""
WINDOW_SECONDS, HOP_SECONDS = 0.04, 0.01
DYNAMIC_RANGE_DB = 65.0
"""Below the loudest band, from where on pixels are black."""
COLOR_STOPS = ((3, 5, 18), (32, 18, 77), (92, 22, 112), (160, 42, 99), (220, 80, 57), (249, 142, 8), (252, 255, 164))
"""Perceptually uniform RGB stops (inferno), from silence to the loudest."""


def data_uri(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{b64encode(content).decode()}"


def spectrogram_image(samples: npt.NDArray[np.float32], sample_rate: int, *, label: str) -> Markup:
    """An `<img>` of the spectrogram, low frequencies at the bottom."""
    pixels = mel_spectrogram_pixels(samples, sample_rate)
    height, width = pixels.shape
    return element("img", src=data_uri(encode_png(pixels), "image/png"), alt=label, width=width, height=height)


def mel_spectrogram_pixels(samples: npt.NDArray[np.float32], sample_rate: int) -> Pixels:
    """(bands, frames) levels relative to the loudest; all zero for silence."""
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
    """Indexed PNG, one byte a pixel, with `color_palette`."""
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
    """(256, 3) RGB."""
    stops = np.array(COLOR_STOPS, np.float64)
    at = np.linspace(0, len(stops) - 1, 256)
    channels = [np.interp(at, np.arange(len(stops)), stops[:, channel]) for channel in range(3)]
    return np.round(np.stack(channels, axis=1)).astype(np.uint8)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def _mel_filterbank(sample_rate: int, size: int) -> npt.NDArray[np.float64]:
    """(frequencies, bands) triangular filters, equally wide on the mel scale."""
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
