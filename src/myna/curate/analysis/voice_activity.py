"""Voice activity detection by Silero v6, whose ONNX file comes in faster-whisper's wheel."""

from __future__ import annotations

from myna.audio.files import Samples
from myna.audio.signal_measures import SpeechSpan
from myna.curate.analysis.models import INSTALL
from myna.evaluate.dependencies import SAMPLE_RATE, as_mono_16khz, import_optional

SPEECH_PROBABILITY = 0.5
MIN_GAP_SECONDS = 0.1
"""Shorter silences are part of the speech around them."""
PAD_SECONDS = 0.03
"""Added at both ends of a span."""


def voice_activity(samples: Samples, sample_rate: int) -> list[SpeechSpan]:
    """Stretches of speech in seconds, in order and apart from one another."""
    wave = as_mono_16khz(samples, sample_rate)
    if not len(wave):
        return []
    vad = import_optional("faster_whisper.vad", INSTALL)
    import_optional("onnxruntime", INSTALL)
    options = vad.VadOptions(
        threshold=SPEECH_PROBABILITY,
        min_silence_duration_ms=round(1000 * MIN_GAP_SECONDS),
        speech_pad_ms=round(1000 * PAD_SECONDS),
    )
    spans = vad.get_speech_timestamps(wave, options)
    return [(span["start"] / SAMPLE_RATE, span["end"] / SAMPLE_RATE) for span in spans]
