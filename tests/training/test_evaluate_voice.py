"""Evaluation of voice cloning, with a tiny model and fake metrics."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

import evaluate_voice
from corpus_making.held_out import is_held_out, is_held_out_line
from init_fledgling import Size, make
from myna.audio.files import Samples
from myna.core.errors import ConfigError, DataError
from myna.data.manifest import Utterance, write_manifest
from myna.listen.asr import ASR, Transcript
from myna.listen.mos import DistillMOS
from myna.listen.speaker_encoders import ResemblyzerEncoder, SpeakerEmbedding
from myna.models.base import Sampling
from myna.models.mel_codec import MelCodecNetwork, save_mel_codec
from train_codec import TINY
from voice_evaluation.plan import MIN_SCORED_WORDS, make_plan, read_lines
from voice_evaluation.scoring import VoiceMetrics, mean_scores

STRANGERS = [name for name in (f"bird{n}" for n in range(99)) if is_held_out(name)][:3]
LINES = [
    f"{first} {then} over the {last}."
    for first in ("Birds", "Larks")
    for then in ("fly", "sing")
    for last in ("sea", "hill", "roof")
]
LINES += ["Go on.", "All day long."]
SMALL = [
    "--speakers",
    "2",
    "--per-speaker",
    "2",
    "--words",
    "3",
    "--more",
    "1",
    "--max-seconds",
    "0.2",
    "--batch-size",
    "3",
    "--threads",
    "1",
]


class FakeASR(ASR):
    """Returns a wrong transcript, and counts the calls."""

    def __init__(self) -> None:
        self.calls = 0

    def transcribe(self, samples: Samples, sample_rate: int, language: str | None = "en") -> Transcript:
        assert language == "en" and len(samples) and sample_rate
        self.calls += 1
        return Transcript("nothing at all", looped=False)


class FakeEncoder:
    def embed_utterance(self, wave: Samples) -> SpeakerEmbedding:
        spectrum = np.abs(np.fft.rfft(wave, 2048))[:256]
        return np.asarray(spectrum / np.linalg.norm(spectrum), np.float32)


class FakeMOS(DistillMOS):
    def __init__(self) -> None:
        pass

    def score(self, samples: Samples, sample_rate: int) -> float:
        assert len(samples) and sample_rate
        return 3.5


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, utterances = tmp_path_factory.mktemp("evaluated"), []
    for place, speaker in enumerate([*STRANGERS, "anna"]):
        for number, seconds in enumerate((1.0, 3.2, 1.2, 9.0, 1.4)):
            path = made / f"{speaker}-{number}.wav"
            wave = 0.3 * np.sin(2 * np.pi * 200 * (place + 1) * np.arange(int(24_000 * seconds)) / 24_000)
            soundfile.write(path, wave, 24_000)
            utterances.append(Utterance(path.stem, path, f"Clip {number} of {speaker}.", speaker))
    write_manifest(made / "manifest.jsonl", utterances)
    with gzip.open(made / "held_out.txt.gz", "wt", encoding="utf-8") as file:
        file.write("\n".join(LINES))
    torch.manual_seed(0)
    save_mel_codec(MelCodecNetwork(TINY), made / "codec")
    make(made / "model", made / "codec", size=Size(hidden=32, layers=2, ffn=32, heads=2, keys=1))
    return made


@pytest.fixture
def asr(monkeypatch: pytest.MonkeyPatch) -> FakeASR:
    made = FakeASR()
    metrics = VoiceMetrics(made, ResemblyzerEncoder(FakeEncoder(), lambda wave, _: wave), FakeMOS())
    monkeypatch.setattr(VoiceMetrics, "open", lambda *_: metrics)
    return made


def options(home: Path, out: Path, *more: str) -> list[str]:
    lines = home / "held_out.txt.gz"
    found = ["--model", str(home / "model"), "--source", str(home), "--sentences", str(lines), "--out", str(out)]
    return [*found, *SMALL, *more]


def test_every_voice_is_a_stranger_with_a_reference_of_other_words(home: Path) -> None:
    made = make_plan(home, LINES, seed=0, speakers=3, per_speaker=2, words=4, more=2)
    assert sorted(speaker.name for speaker in made.speakers) == sorted(STRANGERS), "and never anna"
    for speaker in made.speakers:
        assert speaker.reference.id == f"{speaker.name}-1", "the only clip of three to eight seconds"
        assert not is_held_out_line(speaker.reference.text)
        assert len(speaker.originals) == 2 and speaker.reference.id not in {one.id for one in speaker.originals}
    scored = [task for task in made.tasks if task.is_scored]
    others = [task for task in made.tasks if not task.is_scored]
    assert [task.speaker for task in scored] == [0, 1, 2, 0, 1, 2]
    assert min(len(task.text.split()) for task in scored) >= MIN_SCORED_WORDS
    assert len({task.text for task in made.tasks}) == len({task.id for task in made.tasks}) == 12
    assert sum(task.is_one_word for task in others) == 4 and len(others) == 6


def test_the_choice_follows_from_the_seed_alone(home: Path) -> None:
    first, again, other = (
        make_plan(home, lines, seed, 2, 2, 2, 1) for lines, seed in ((LINES, 0), (LINES[::-1], 0), (LINES, 1))
    )
    assert first == again
    assert [task.text for task in first.tasks] != [task.text for task in other.tasks]


def test_too_little_data_is_refused(home: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has 3 held-out speakers"):
        make_plan(home, LINES, 0, 4, 2, 1, 1)
    with pytest.raises(DataError, match="14 held-out sentences are not enough"):
        make_plan(home, LINES, 0, 3, 4, 1, 3)
    with pytest.raises(DataError, match=r"there is no .*held_out\.txt\.gz"):
        read_lines(tmp_path / "held_out.txt.gz")


def test_a_model_is_scored_beside_real_speech(
    home: Path, tmp_path: Path, asr: FakeASR, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate_voice.main(options(home, tmp_path))
    report = json.loads((tmp_path / "default" / "scores.json").read_text())
    assert list(report["systems"]) == ["originals", "round_trips", "clones"]
    real = report["systems"]["originals"]
    assert real["top-1 speaker accuracy"] == 1 and real["similarity"] > 0.9 > real["similarity to others"]
    assert {system["sentences"] for system in report["systems"].values()} == {4}
    assert report["systems"]["clones"]["DistillMOS"] == 3.5
    assert report["systems"]["clones"]["word error rate"] == 1.0
    assert report["stopping"]["sentences"] == 8 and report["stopping"]["longest"] <= 0.2
    assert report["sampling"]["max_seconds"] == 0.2 and report["speed"]["times real time"] > 0
    shown = capsys.readouterr().out
    assert "<= 0.15 missed" in shown and ">= 3.00 reached" in shown
    assert len(list((tmp_path / "default" / "clones").glob("*.wav"))) == 8
    assert asr.calls == 12


def test_real_people_are_cloned_from_the_one_recording_they_have(
    home: Path, tmp_path: Path, asr: FakeASR, capsys: pytest.CaptureFixture[str]
) -> None:
    utterances = [Utterance(f"{name}-x", home / f"{name}-3.wav", "Nine seconds.", name) for name in STRANGERS]
    write_manifest(
        tmp_path / "people" / "manifest.jsonl", [*utterances, replace(utterances[0], id="a", speaker="anna")]
    )
    write_manifest(tmp_path / "also" / "manifest.jsonl", [replace(utterances[1], id="o", speaker="studio", text="")])
    more = ["--real-people", "--source", str(tmp_path / "people"), "--also", str(tmp_path / "also"), "--speakers", "3"]
    evaluate_voice.main(options(home, tmp_path / "out", *more, "--per-speaker", "1", "--words", "1", "--more", "0"))
    report = json.loads((tmp_path / "out" / "default" / "scores.json").read_text())
    assert set(report["references"]) == {*(f"{name}-x" for name in STRANGERS), "o"}, "and never anna"
    assert report["groups"].keys() == {*STRANGERS, "studio"}
    assert report["systems"].keys() == {"clones"}, "nobody has another recording"
    assert asr.calls == 5, "four clones, and the reference without a text"
    assert "<= 0.08 missed" in capsys.readouterr().out


def test_run_again_it_does_what_is_missing(home: Path, tmp_path: Path, asr: FakeASR) -> None:
    evaluate_voice.main(options(home, tmp_path))
    spoken = {file: file.read_bytes() for file in (tmp_path / "default" / "clones").glob("*.wav")}
    lost = sorted(spoken)[0]
    before, asr.calls = asr.calls, 0
    for file in (lost, lost.with_suffix(".json"), tmp_path / "default" / "scores" / "clones" / f"{lost.stem}.json"):
        file.unlink(missing_ok=True)
    times = {file: file.stat().st_mtime_ns for file in spoken if file != lost}
    evaluate_voice.main(options(home, tmp_path))
    assert {file: file.read_bytes() for file in spoken} == spoken, "a line sounds the same in other company"
    assert {file: file.stat().st_mtime_ns for file in times} == times
    assert before == 12 and asr.calls == ("-line-" in lost.stem)


@pytest.mark.usefixtures("asr")
def test_a_folder_of_other_settings_is_refused(home: Path, tmp_path: Path) -> None:
    evaluate_voice.main(options(home, tmp_path))
    with pytest.raises(SystemExit, match="was begun with another sampling"):
        evaluate_voice.main(options(home, tmp_path, "--temperature", "0.5"))
    with pytest.raises(SystemExit, match="was begun with another"):
        evaluate_voice.main(options(home, tmp_path, "--plan-seed", "1"))


def test_a_sweep_scores_real_speech_once(
    home: Path, tmp_path: Path, asr: FakeASR, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate_voice.main(options(home, tmp_path, "--sweep", "temperature=0,0.9", "--sweep", "top-k=10"))
    reports: list[dict[str, Any]] = json.loads((tmp_path / "sweep.json").read_text())
    assert [report["settings"] for report in reports] == ["temperature-0_top_k-10", "temperature-0.9_top_k-10"]
    assert [report["sampling"]["temperature"] for report in reports] == [0, 0.9]
    assert asr.calls == 8 + 2 * 4
    assert "temperature-0.9_top_k-10" in capsys.readouterr().out


def test_unknown_settings_are_refused() -> None:
    assert list(evaluate_voice.sweep_settings([], Sampling())) == [("default", Sampling())]
    for wrong in ("warmth=1", "temperature=hot", "temperature"):
        with pytest.raises(ConfigError, match="cannot sweep"):
            list(evaluate_voice.sweep_settings([wrong], Sampling()))


def row(**more: Any) -> dict[str, Any]:
    usual = {"errors": 0, "words": 4, "looped": False, "similarity": 0.9, "similarity to others": 0.6, "rank": 1}
    return usual | {"DistillMOS": 4.0} | more


def test_loops_count_and_are_reported() -> None:
    made = mean_scores([row(), row(errors=2, words=6, rank=2), row(errors=40, words=10, looped=True)])
    assert made["word error rate"] == pytest.approx(42 / 20)
    assert made["word error rate without loops"] == pytest.approx(2 / 10)
    assert made["loops"] == pytest.approx(1 / 3) and made["top-1 speaker accuracy"] == pytest.approx(2 / 3)
    assert mean_scores([row(looped=True)])["word error rate without loops"] == 1.0, (
        "nothing understood is no faultless model"
    )
