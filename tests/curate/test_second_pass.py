"""Speakers of a curation, linked over parts and recordings by their embeddings."""

from __future__ import annotations

import numpy as np
import pytest

from myna.curate.second_pass import link_table_speakers
from myna.curate.settings import SpeakerSettings
from tests.data.segment_rows import segment, segments_table

pytest.importorskip("scipy")
VOICES = np.eye(64, dtype=np.float32)


def test_many_speakers_with_little_each_stay_speakers() -> None:
    """A hundred books: each reader has a hundredth of all speech, and all of one book."""
    rows = [
        segment(f"{book}-{number}", f"book{book}.wav", 5000 * number, 5000 * (number + 1), "clip", local_speaker="0")
        | {"embedding": VOICES[book].tolist()}
        for book in range(60)
        for number in range(2)
    ]
    speakers = link_table_speakers(segments_table(rows), SpeakerSettings())["speaker"].to_pylist()
    assert len(set(speakers)) == 60 and "" not in speakers


def test_a_moment_of_another_voice_is_no_speaker() -> None:
    rows = [
        segment("a", "talk.wav", 0, 60_000, local_speaker="0", embedding=VOICES[0].tolist()),
        segment("b", "talk.wav", 60_000, 61_000, local_speaker="1", embedding=VOICES[1].tolist()),
        segment("c", "other.wav", 0, 9000, local_speaker="0", embedding=VOICES[0].tolist()),
    ]
    linked = link_table_speakers(segments_table(rows), SpeakerSettings())
    assert linked["speaker"].to_pylist() == ["speaker-1", "", "speaker-1"]
    everybody = link_table_speakers(segments_table(rows), SpeakerSettings(min_share=0.0))
    assert everybody["speaker"].to_pylist() == ["speaker-1", "speaker-2", "speaker-1"]


def test_a_guest_of_a_long_recording_is_a_speaker() -> None:
    rows = [
        segment("a", "day.wav", 0, 10_000_000, local_speaker="0", embedding=VOICES[0].tolist()),
        segment("b", "day.wav", 10_000_000, 10_020_000, local_speaker="1", embedding=VOICES[1].tolist()),
        segment("c", "day.wav", 10_020_000, 10_039_000, local_speaker="2", embedding=VOICES[2].tolist()),
    ]
    linked = link_table_speakers(segments_table(rows), SpeakerSettings())
    assert linked["speaker"].to_pylist() == ["speaker-1", "speaker-2", ""]


def test_one_known_speaker_is_everybody() -> None:
    rows = [
        segment(str(number), "memo.wav", 5000 * number, 5000 * (number + 1), local_speaker=str(number % 2))
        | {"embedding": VOICES[number % 2].tolist()}
        for number in range(4)
    ]
    linked = link_table_speakers(segments_table(rows), SpeakerSettings(number=1))
    assert set(linked["speaker"].to_pylist()) == {"speaker-1"}
