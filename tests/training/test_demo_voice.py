"""The demo's recordings: sentences of no corpus, in the form that the demo reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import demo_voice
from corpus_making.held_out import is_held_out_line
from corpus_making.kokoro import DEMO_VOICES, SAMPLE_RATE, Samples, SynthesisRequest
from myna.core.errors import DataError
from myna.data.manifest import read_manifest
from myna.demo.run import BUNDLED, select_voice
from myna.evaluate.items import clip_seconds


class Hum:
    """Instead of Kokoro: a hum between two silences, as long as the line."""

    def __init__(self, packages: Path, threads: int) -> None:
        assert packages and threads == 1

    def say(self, requests: Sequence[SynthesisRequest]) -> list[Samples]:
        return [self._hum(request) for request in requests]

    def _hum(self, request: SynthesisRequest) -> Samples:
        assert request.speaker.voices == ("ff_siwis", "ff_siwis") and 0.95 <= request.speed <= 1.05
        length = round(0.06 * len(request.text) * SAMPLE_RATE)
        quiet = np.zeros(SAMPLE_RATE // 2, np.float32)
        return np.concatenate([quiet, 0.3 * np.sin(np.arange(length) / 20), quiet]).astype(np.float32)


def test_what_is_made_is_what_the_demo_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_voice, "OnnxKokoro", Hum)
    monkeypatch.setattr(demo_voice, "TRAIN_SENTENCES", demo_voice.TRAIN_SENTENCES[:4])
    monkeypatch.setattr(demo_voice, "HELD_OUT_SENTENCES", demo_voice.HELD_OUT_SENTENCES[:3])
    seconds = demo_voice.make(tmp_path / "voice", tmp_path, "ff_siwis", seed=0)
    voice = select_voice(read_manifest(tmp_path / "voice" / "manifest.jsonl"), "here", seed=0)
    train = [clip for clip in voice.clips if clip.id not in voice.marked]
    assert (voice.speaker, len(train), voice.held_out_texts()) == ("siwis", 4, 3)
    assert sum(map(clip_seconds, train)) == pytest.approx(seconds, abs=0.1)


def test_a_line_that_a_corpus_may_have_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = next(line for line in ("One.", "Two.", "Three.") if not is_held_out_line(line))
    monkeypatch.setattr(demo_voice, "TRAIN_SENTENCES", (known,))
    with pytest.raises(DataError, match="may have read"):
        demo_voice.make(tmp_path, tmp_path, "ff_siwis", seed=0)


def test_a_clip_has_little_silence_and_the_common_level() -> None:
    silence = np.zeros(SAMPLE_RATE, np.float32)
    made = demo_voice.trim_and_level(np.concatenate([silence, np.full(SAMPLE_RATE, 0.5, np.float32), silence]))
    assert len(made) / SAMPLE_RATE == pytest.approx(
        1 + demo_voice.LEADING_SECONDS + demo_voice.TRAILING_SECONDS, abs=0.01
    )
    assert np.sqrt(np.mean(np.square(made))) == pytest.approx(demo_voice.TARGET_RMS, rel=0.01)


def test_the_bundled_voice_is_the_one_that_the_script_makes() -> None:
    utterances = read_manifest(BUNDLED / "manifest.jsonl")
    said = {utterance.text: bool(utterance.extras.get("held_out")) for utterance in utterances}
    assert said == dict.fromkeys(demo_voice.TRAIN_SENTENCES, False) | dict.fromkeys(demo_voice.HELD_OUT_SENTENCES, True)
    assert all(is_held_out_line(text) for text in said), "and no corpus reads its lines"
    assert {utterance.speaker for utterance in utterances} <= {voice.partition("_")[2] for voice in DEMO_VOICES}
