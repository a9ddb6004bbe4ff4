"""Sound for the ear: players that carry their sound with them."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
import soundfile

from myna.report.markup import Markup, element
from myna.report.spectrogram import data_uri, spectrogram

Samples = npt.NDArray[np.float32]


def flac(samples: Samples, sample_rate: int) -> bytes:
    """Lossless, so that what is heard is what was measured, and half as large as a WAV; every browser plays it."""
    file = io.BytesIO()
    soundfile.write(file, np.clip(samples, -1, 1), sample_rate, format="FLAC", subtype="PCM_16")
    return file.getvalue()


def player(samples: Samples, sample_rate: int, *, label: str) -> Markup:
    """Controls for one sound; a note where there is nothing to hear."""
    if not len(samples):
        return element("p", "nothing to hear: the model ended at once", class_="missing")
    source = data_uri(flac(samples, sample_rate), "audio/flac")
    return element("audio", src=source, controls=True, preload="metadata", aria_label=label)


def clip(samples: Samples, sample_rate: int, *, title: str, label: str, longest: float, note: object = "") -> Markup:
    """A player under its picture, as wide as it is long beside the `longest` of its neighbours, in seconds."""
    seconds = len(samples) / sample_rate
    share = 100 * min(1.0, seconds / longest) if longest > 0 else 100.0
    picture = spectrogram(samples, sample_rate, label=f"spectrogram of {label}") if len(samples) else Markup()
    return element(
        "figure",
        element("figcaption", element("span", title), element("span", f"{seconds:.1f} s", class_="seconds")),
        element("div", element("div", picture, class_="picture", style=f"width:{share:.1f}%"), class_="track"),
        player(samples, sample_rate, label=f"play {label}"),
        element("p", note, class_="note") if note else Markup(),
        class_="clip",
    )
