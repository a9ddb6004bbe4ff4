"""Audio players with embedded audio."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
import soundfile
from markupsafe import Markup

from myna.report.markup import element
from myna.report.spectrogram import data_uri, spectrogram_image

Samples = npt.NDArray[np.float32]


def encode_flac(samples: Samples, sample_rate: int) -> bytes:
    """FLAC file content. Lossless, so that the page plays what was scored, at half the size of a WAV."""
    file = io.BytesIO()
    soundfile.write(file, np.clip(samples, -1, 1), sample_rate, format="FLAC", subtype="PCM_16")
    return file.getvalue()


def audio_player(samples: Samples, sample_rate: int, *, label: str) -> Markup:
    """An `<audio>` element, or a note if the clip is empty."""
    if not len(samples):
        return element("p", "nothing to hear: the model ended at once", class_="missing")
    source = data_uri(encode_flac(samples, sample_rate), "audio/flac")
    return element("audio", src=source, controls=True, preload="metadata", aria_label=label)


def audio_figure(
    samples: Samples, sample_rate: int, *, title: str, label: str, max_seconds: float, note: object = ""
) -> Markup:
    """A player under its spectrogram, whose width is the clip's share of `max_seconds`, the longest clip beside it."""
    seconds = len(samples) / sample_rate
    share = 100 * min(1.0, seconds / max_seconds) if max_seconds > 0 else 100.0
    image = spectrogram_image(samples, sample_rate, label=f"spectrogram of {label}") if len(samples) else Markup()
    return element(
        "figure",
        element("figcaption", element("span", title), element("span", f"{seconds:.1f} s", class_="seconds")),
        element("div", element("div", image, class_="picture", style=f"width:{share:.1f}%"), class_="track"),
        audio_player(samples, sample_rate, label=f"play {label}"),
        element("p", note, class_="note") if note else Markup(),
        class_="clip",
    )
