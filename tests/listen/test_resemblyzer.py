"""Voices as directions, and Resemblyzer itself if it is installed."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from myna.audio.files import Samples
from myna.core.errors import AudioError, ConfigError
from myna.listen.speaker_encoders import ResemblyzerEncoder, SpeakerEmbedding, cosine_similarity, speaker_rank

COUNT = 16_000


def voice(*numbers: float) -> SpeakerEmbedding:
    return np.array(numbers, np.float32)


class FakeEncoder:
    def embed_utterance(self, wave: Samples) -> SpeakerEmbedding:
        return voice(len(wave), 1)


def test_similarity_is_the_angle_and_not_the_length() -> None:
    assert cosine_similarity(voice(1, 0), voice(3, 0)) == pytest.approx(1)
    assert cosine_similarity(voice(1, 0), voice(0, 2)) == 0
    assert cosine_similarity(voice(1, 0), voice(0, 0)) == 0, "nobody is like nobody"


@given(st.lists(st.tuples(st.floats(-1, 1, width=32), st.floats(-1, 1, width=32)), min_size=2, max_size=6), st.data())
def test_a_rank_counts_whoever_is_as_near(pairs: list[tuple[float, float]], data: st.DataObject) -> None:
    voices = [voice(*pair) for pair in pairs]
    own = data.draw(st.integers(0, len(voices) - 1))
    similarities = [cosine_similarity(voice(1, 0), one) for one in voices]
    place = speaker_rank(voice(1, 0), own, voices)
    assert 1 <= place <= len(voices)
    assert (place == 1) == all(similarities[own] > other for number, other in enumerate(similarities) if number != own)


def test_a_clone_without_a_voice_is_similar_to_no_speaker() -> None:
    assert speaker_rank(voice(0, 0), 1, [voice(1, 0), voice(0, 1), voice(1, 1)]) == 3


def test_silence_has_no_voice_and_sound_is_resampled() -> None:
    encoder = ResemblyzerEncoder(FakeEncoder(), lambda wave, rate: wave[rate // 2 :])
    assert not encoder.embed(np.zeros(COUNT, np.float32), 24_000).any()
    assert not encoder.embed(np.zeros(0, np.float32), 24_000).any()
    tone = np.sin(np.arange(24_000, dtype=np.float32))
    assert encoder.embed(tone, 24_000)[0] == 8_000
    assert not encoder.embed(tone[:100], 16_000).any(), "nothing is left when its silences are cut out"


@pytest.mark.parametrize("wrong", [np.zeros((2, 100), np.float32), np.full(100, np.nan, np.float32)])
def test_what_is_no_clip_is_refused(wrong: Samples) -> None:
    with pytest.raises(AudioError):
        ResemblyzerEncoder(FakeEncoder(), lambda wave, rate: wave[:rate]).embed(wrong, 16_000)


def test_what_to_type_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resemblyzer", None)
    with pytest.raises(ConfigError) as caught:
        ResemblyzerEncoder.open()
    assert caught.value.hint == 'pip install --no-deps resemblyzer==0.1.4 && pip install "myna[evaluate]"'


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_real_resemblyzer_tells_voices_apart() -> None:
    pytest.importorskip("resemblyzer", reason="pip install --no-deps resemblyzer==0.1.4")
    encoder = ResemblyzerEncoder.open()
    low, again, high = (
        encoder.embed(buzz(pitch, formant), 24_000) for pitch, formant in ((100, 500), (102, 510), (230, 900))
    )
    assert np.linalg.norm(low) == pytest.approx(1, abs=1e-5)
    assert cosine_similarity(low, again) > cosine_similarity(low, high) + 0.05


def buzz(pitch: float, formant: float) -> Samples:
    """Make two seconds of a simple vocal tract, enough for a voice detector."""
    time = np.arange(48_000) / 24_000
    made = sum(
        np.exp(-(((harmonic * pitch - formant) / 300) ** 2)) * np.sin(2 * np.pi * harmonic * pitch * time)
        for harmonic in range(1, 30)
    )
    return np.asarray(0.2 * made * (1 + np.sin(2 * np.pi * 4 * time)), np.float32)
