"""Best of n: takes in known voices with known words, ranked by scorers that can tell them apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import myna
from myna.audio.files import Samples, read_audio, write_audio
from myna.core.errors import ConfigError, SpeakError
from myna.core.io import bytes_hash
from myna.evaluate.scoring import Scorers
from myna.evaluate.takes import TakeRanker
from myna.listen.asr import Transcript
from myna.speak.engine import Speech
from myna.speak.request import FinishReason, ReferenceRecording, SpeechRequest
from tests.command_line import run_command
from tests.evaluate.speech import RATE, REFERENCE, SPEAKERS, fake_scorers, record, say
from tests.evaluate.tiny_scorers import save_whisper

TEXT = "good morning to you"
WREN = SPEAKERS["wren"]


def take(samples: Samples, finish_reason: FinishReason = "stop") -> Speech:
    return Speech(samples, np.zeros((1, 8), np.uint16), finish_reason, RATE)


@pytest.fixture
def reference(tmp_path: Path) -> ReferenceRecording:
    clip = record(tmp_path, "wren", REFERENCE, "wren")
    return ReferenceRecording(clip.audio, clip.text)


def order(scorers: Scorers, takes: list[Speech], *references: ReferenceRecording, text: str = TEXT) -> list[int]:
    request = SpeechRequest(text, references, language="en")
    return [one.number for one in TakeRanker(scorers).rank(request, takes).takes]


def test_takes_are_ranked_by_end_then_words_then_similarity_then_quality(
    reference: ReferenceRecording,
) -> None:
    right = say(TEXT, WREN, rest=2)
    noisy = right + np.random.default_rng(0).normal(0, 0.004, len(right)).astype(np.float32)
    takes = [
        take(right, "length"),
        take(say("good evening to you", WREN, rest=2)),
        take(say(TEXT, SPEAKERS["heron"], rest=2)),
        take(noisy),
        take(right),
    ]
    assert order(fake_scorers(), takes, reference) == [5, 4, 3, 2, 1]
    [best, *_] = TakeRanker(fake_scorers()).rank(SpeechRequest(TEXT, (reference,), language="en"), takes).takes
    assert best.scores.word_errors == 0 and best.scores.words == 4
    assert best.to_json()["take"] == 5 and best.to_json()["transcript"] == TEXT
    without = fake_scorers(asr="none", distillmos="none", dnsmos="none")
    assert order(without, takes, reference)[:2] == [2, 4], "equal in voice: the order of the seeds"


def test_a_missing_metric_is_named_and_the_others_rank(reference: ReferenceRecording) -> None:
    takes = [take(say(TEXT, SPEAKERS["heron"], rest=2)), take(say("good evening to you", WREN, rest=2))]
    scorers = fake_scorers(asr="no ASR model was named")
    ranking = TakeRanker(scorers).rank(SpeechRequest(TEXT, (reference,)), takes)
    assert [one.number for one in ranking.takes] == [2, 1] and ranking.best is takes[1]
    assert ranking.notes == ("asr: not measured. no ASR model was named",)


def test_silence_early_ends_and_copies_of_the_reference_come_after_speech(reference: ReferenceRecording) -> None:
    said = say(TEXT, SPEAKERS["heron"], rest=2)
    copy = read_audio(reference.file, sample_rate=RATE)
    takes = [take(np.zeros_like(said)), take(said[:0]), take(copy), take(said)]
    only_voice = fake_scorers(asr="none", distillmos="none", dnsmos="none")
    ranking = TakeRanker(only_voice).rank(SpeechRequest(TEXT, (reference,)), takes)
    assert ranking.takes[0].number == 4 and not ranking.takes[0].defects
    defects = {one.number: one.defects for one in ranking.takes}
    assert defects == {1: ["silent"], 2: ["ended early"], 3: ["copies the reference"], 4: []}


def test_speaker_tags_do_not_count_as_words() -> None:
    tagged = f"[SPEAKER0] {TEXT}"
    assert order(fake_scorers(), [take(say("good evening", WREN)), take(say(TEXT, WREN, rest=2))], text=tagged) == [
        2,
        1,
    ]


def test_ranking_without_a_metric_names_what_to_install(reference: ReferenceRecording) -> None:
    reasons = {"asr": "no ASR", "distillmos": "pip install distillmos", "dnsmos": "pip install speechmos"}
    voice_only = TakeRanker(fake_scorers(**reasons))
    voice_only.check(1)
    with pytest.raises(ConfigError, match="no metric is installed") as caught:
        voice_only.check(0)
    assert "pip install distillmos" in caught.value.hint and "--reference REF.wav" in caught.value.hint
    with pytest.raises(ConfigError, match="pip install resemblyzer"):
        TakeRanker(fake_scorers(**reasons, speaker_encoder="pip install resemblyzer")).check(1)
    with pytest.raises(ConfigError, match="ranked by the asr that was named"):
        TakeRanker.open(str(reference.file.parent / "nowhere"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return myna.make_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A real Whisper, small and random: it writes other letters for other sounds."""
    return str(save_whisper(tmp_path_factory.mktemp("whisper") / "whisper"))


SETTINGS: dict[str, Any] = {"max_seconds": 0.4, "seed": 3}


class ScriptedASR:
    """Understands as many words as the sound says, always the same for one sound."""

    def transcribe(self, samples: Samples, sample_rate: int, language: str | None) -> Transcript:  # noqa: ARG002
        heard = int.from_bytes(bytes_hash(samples.tobytes())[:8].encode(), "big") % 6
        return Transcript(" ".join(["a", "b", "c", "d", "e", "f"][:heard]), looped=False)


def test_the_best_take_is_the_one_with_the_fewest_word_errors(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    voice = myna.load(model, device="cpu")
    scorers = Scorers(asr=ScriptedASR(), names={"asr": "scripted"})
    monkeypatch.setattr(Scorers, "open", lambda *_, **__: scorers)
    ranking = voice.speak_best("a b c d e f", 6, **SETTINGS)
    takes = voice.speak_takes("a b c d e f", 6, **SETTINGS)
    for one in ranking.takes:
        assert np.array_equal(one.speech.samples, takes[one.number - 1].samples)
    ends = [(not one.speech.stopped, bool(one.defects), one.scores.word_errors or 0) for one in ranking.takes]
    assert ends == sorted(ends) and len({errors for _, _, errors in ends}) > 2
    assert [one.number for one in ranking.takes] != sorted(one.number for one in ranking.takes)


def run(*words: object, command: str = "speak") -> str:
    result = run_command([command, *words, "--device", "cpu", "--max-seconds", "0.4"])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_best_take_is_saved_under_the_requested_name(model: Path, whisper: str, tmp_path: Path) -> None:
    words = ("a b c", "-m", model, "--takes", 3, "--best", "--asr", whisper, "--seed", 3)
    output = run(*words, "-o", tmp_path / "alone" / "abc.wav")
    assert [file.name for file in (tmp_path / "alone").iterdir()] == ["abc.wav"]
    assert "word errors" in output and "of 3" in output
    run(*words, "-o", tmp_path / "all" / "abc.wav", "--keep-takes")
    names = {file.name for file in (tmp_path / "all").iterdir()}
    stages: set[str] = set()
    ranking = myna.load(model, device="cpu").speak_best(
        "a b c", 3, asr=whisper, progress=lambda stage, *_: stages.add(stage), **SETTINGS
    )
    assert "ranking takes" in stages
    others = {f"abc-{one.number}.wav" for one in ranking.takes[1:]}
    assert names == {"abc.wav", *others}
    best = read_audio(tmp_path / "all" / "abc.wav")
    assert np.abs(best - ranking.best.samples.clip(-1, 1)).max() < 1e-3


@pytest.mark.slow
def test_every_line_keeps_its_best_take(model: Path, whisper: str, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("a b c\nd e f\n")
    lines, out = tmp_path / "lines.txt", tmp_path / "out"
    words = (lines, "-o", out, "-m", model, "--takes", 3, "--seed", 3, "--asr", whisper, "--format", "flac")

    def speak_lines(*more: object) -> str:
        return run(*words, *more, command="speak-lines")

    speak_lines()
    rows = [json.loads(row) for row in (tmp_path / "out" / "spoken.jsonl").read_text().splitlines()]
    assert {file.name for file in (tmp_path / "out").glob("*.flac")} == {"line-0001.flac", "line-0002.flac"}
    ranking = myna.load(model, device="cpu").speak_best("a b c", 3, asr=whisper, **SETTINGS)
    assert [one["take"] for one in rows[0]["takes"]] == [one.number for one in ranking.takes]
    assert rows[0]["seed"] == 3 + ranking.takes[0].number - 1
    assert rows[0]["takes"][0]["word_errors"] == ranking.takes[0].scores.word_errors
    best = read_audio(tmp_path / "out" / "line-0001.flac")
    assert np.abs(best - ranking.best.samples.clip(-1, 1)).max() < 1e-3
    before = (tmp_path / "out" / "line-0001.flac").stat().st_mtime_ns
    assert "2 of them before" in speak_lines()
    assert (tmp_path / "out" / "line-0001.flac").stat().st_mtime_ns == before
    speak_lines("--keep-takes")
    assert len(list((tmp_path / "out").glob("line-0001+take-*.flac"))) == 2
    assert "2 of them before" in speak_lines("--keep-takes")


def test_options_that_exclude_takes_are_refused(model: Path, tmp_path: Path) -> None:
    for words, message in (
        (("hi", "--best"), "--best is one of several takes"),
        (("hi", "--keep-takes"), "--keep-takes goes with --best"),
        (("hi", "--takes", 2, "--best", "--codes", "x.npy"), "--best does not go with --codes"),
        (("hi", "--takes", 2, "--best", "--play"), "--play does not go with --takes"),
    ):
        with pytest.raises(SpeakError, match=message):
            run(*words, "-m", model, "-o", tmp_path / "hi.wav")
    assert not list(tmp_path.iterdir())
    write_audio(tmp_path / "hi.wav", np.full(9, 0.5, np.float32), RATE)
    with pytest.raises(myna.MynaError, match=r"hi\.wav exists"):
        run("hi", "--takes", 2, "--best", "-m", model, "-o", tmp_path / "hi.wav")
