"""Voice activity: the rule from probabilities to spans, and spans equal to faster-whisper's over several batches."""

from __future__ import annotations

import numpy as np
import pytest

from myna.listen.sounds import VAD_BATCH_WINDOWS, VAD_WINDOW_SAMPLES, speech_spans_of, voice_activity
from tests.curate.scripted import make_recording

WINDOW = VAD_WINDOW_SAMPLES / 16_000


def spans(*probabilities: float) -> list[tuple[float, float]]:
    return speech_spans_of(np.array(probabilities, np.float32), len(probabilities) * VAD_WINDOW_SAMPLES)


def test_speech_begins_above_a_half_and_ends_in_a_long_silence() -> None:
    silence = [0.0] * 6
    assert spans(*silence) == []
    [(start, end)] = spans(*silence, 0.9, 0.9, *silence)
    assert start == pytest.approx(6 * WINDOW - 0.03) and end == pytest.approx(8 * WINDOW + 0.03)
    assert len(spans(*silence, 0.9, 0.0, 0.0, 0.9, *silence)) == 1, "64 ms are too short to end it"
    assert len(spans(*silence, 0.9, *silence, 0.9, *silence)) == 2
    assert spans(*silence, 0.9, *[0.4] * 20, *silence)[0][1] > 27 * WINDOW, "0.4 goes on, but does not begin"
    assert spans(*silence, *[0.4] * 20) == []
    assert spans(0.9, 0.9) == [(0.0, 2 * WINDOW)], "within the recording"


@pytest.mark.extras
def test_spans_are_those_of_faster_whisper() -> None:
    vad = pytest.importorskip("faster_whisper.vad")
    samples, _ = make_recording(24)
    wave = np.asarray(samples[: len(samples) // 3 * 3].reshape(-1, 3)[:, :2].reshape(-1))
    assert len(wave) > 1.5 * VAD_BATCH_WINDOWS * VAD_WINDOW_SAMPLES
    options = vad.VadOptions(threshold=0.5, min_silence_duration_ms=100, speech_pad_ms=30)
    expected = [(one["start"] / 16_000, one["end"] / 16_000) for one in vad.get_speech_timestamps(wave, options)]
    assert len(expected) > 5 and voice_activity(wave, 16_000) == expected
