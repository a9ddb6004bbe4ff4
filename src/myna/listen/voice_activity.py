"""Voice activity detection by Silero v6, whose ONNX file comes in faster-whisper's wheel."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from myna.audio.files import LISTENING_RATE, Samples, as_mono_16khz
from myna.audio.signal_measures import SpeechSpan
from myna.core.errors import import_optional
from myna.listen.models import INSTALL

SPEECH_PROBABILITY, SILENCE_PROBABILITY = 0.5, 0.35
"""Probability at which speech begins, and below which it may end."""
MIN_GAP_SECONDS = 0.1
"""Silences shorter than this, in seconds, belong to the speech around them."""
PAD_SECONDS = 0.03
"""Seconds added at both ends of a span."""
WINDOW_SAMPLES, CONTEXT_SAMPLES = 512, 64
"""Samples of a window that has a probability, and of the context before it that the network sees."""
STATE_SIZE = 128
BATCH_WINDOWS = 1024
"""Windows per batch (32.8 s). The network's state goes on to the next batch, so that memory stays bounded."""


def voice_activity(samples: Samples, sample_rate: int) -> list[SpeechSpan]:
    """Return the stretches of speech in seconds, in order and without overlap."""
    wave = as_mono_16khz(samples, sample_rate)
    return speech_spans_of(speech_probabilities(wave), len(wave)) if len(wave) else []


def speech_probabilities(wave: Samples) -> npt.NDArray[np.float32]:
    """Return the probability of speech of each 32 ms of mono audio at 16 kHz; the last window is padded with
    silence."""
    import_optional("onnxruntime", INSTALL)
    session = import_optional("faster_whisper.vad", INSTALL).get_vad_model().session
    count = len(wave) // WINDOW_SAMPLES + 1
    state = {name: np.zeros((1, 1, STATE_SIZE), np.float32) for name in ("h", "c")}
    context = np.zeros(CONTEXT_SAMPLES, np.float32)
    probabilities = []
    for first in range(0, count, BATCH_WINDOWS):
        after = min(count, first + BATCH_WINDOWS)
        audio = wave[first * WINDOW_SAMPLES : after * WINDOW_SAMPLES]
        audio = np.pad(audio, (0, (after - first) * WINDOW_SAMPLES - len(audio)))
        joined = np.concatenate([context, audio])
        windows = np.lib.stride_tricks.sliding_window_view(joined, CONTEXT_SAMPLES + WINDOW_SAMPLES)[::WINDOW_SAMPLES]
        output, state["h"], state["c"] = session.run(None, {"input": np.ascontiguousarray(windows), **state})
        probabilities.append(output.reshape(-1))
        context = joined[-CONTEXT_SAMPLES:]
    return np.concatenate(probabilities)


def speech_spans_of(probabilities: npt.NDArray[np.float32], samples: int) -> list[SpeechSpan]:
    """Return the spans of speech by Silero's rule: a span ends at a silence that is long enough."""
    spans: list[tuple[int, int]] = []
    start = silent_from = None
    for window, probability in enumerate(probabilities.tolist()):
        position = window * WINDOW_SAMPLES
        if probability >= SPEECH_PROBABILITY:
            silent_from = None
            start = position if start is None else start
        elif start is not None and probability < SILENCE_PROBABILITY:
            silent_from = position if silent_from is None else silent_from
            if position - silent_from >= MIN_GAP_SECONDS * LISTENING_RATE:
                spans.append((start, silent_from))
                start = silent_from = None
    if start is not None and start < samples:
        spans.append((start, samples))
    pad = round(PAD_SECONDS * LISTENING_RATE)
    return [(max(0, start - pad) / LISTENING_RATE, min(samples, end + pad) / LISTENING_RATE) for start, end in spans]
