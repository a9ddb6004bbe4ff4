"""Evaluation of codecs, as far as it goes without optional metrics."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
import torch
from safetensors.torch import save_file

import evaluate_codec
from codec_evaluation import metrics, real_speech
from corpus_making.held_out import is_held_out
from myna.audio.files import Samples
from myna.core.errors import CheckpointError, ConfigError, DataError
from myna.data.manifest import Utterance, write_manifest
from myna.listen.speaker_encoders import EcapaNetwork
from myna.models.mel_codec import MelCodecNetwork, save_mel_codec
from tests.models.helpers import SMALL_MEL_CODEC, calibrated_network

STRANGERS = [name for name in (f"bert{n}" for n in range(99)) if is_held_out(name)][:2]
QUIET = ["--no-stoi", "--no-pesq"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, utterances = tmp_path_factory.mktemp("sounds"), []
    for number, speaker in enumerate([*STRANGERS, "anna"]):
        path = made / f"{speaker}.wav"
        wave = 0.3 * np.sin(2 * np.pi * 200 * (number + 1) * np.arange(24_500) / 24_000)
        soundfile.write(path, wave, 24_000)
        utterances.append(Utterance(f"{speaker}-0", path, "Two words.", speaker))
    write_manifest(made / "manifest.jsonl", utterances)
    return made


def test_the_identity_adds_no_errors(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(text: str, original: Samples, copy: Samples) -> dict[str, float]:
        assert text == "Two words." and np.array_equal(original, copy)
        assert len(original) == pytest.approx(24_500 * 2 / 3, abs=1)
        return {"words": 2, "errors in original": 1, "errors in copy": 1}

    monkeypatch.setattr(metrics, "word_error_metric", lambda *_: measure)
    out = tmp_path / "evaluation.json"
    evaluate_codec.main(["--codec", "identity", "--source", str(folder), "--whisper", "x", "--out", str(out), *QUIET])
    found = json.loads(out.read_text())["sources"][folder.stem]
    assert found["clips"] == found["speakers"] == 2, "those held out, and nobody else"
    errors = {"word errors before": 0.5, "word errors after": 0.5, "word errors added": 0.0}
    assert found["scores"] == errors | {"+/-": 0.0}
    assert "<= 0.01" in capsys.readouterr().out


def test_the_confidence_interval_shrinks_with_more_clips() -> None:
    few, many = (
        evaluate_codec._confidence_half_width([0, 2] * clips, [1, 1] * clips, [10, 10] * clips) for clips in (10, 1000)
    )
    assert 0.03 < few < 0.06, "two standard errors of a mean of 20 that are 0.1 off"
    assert many == pytest.approx(few / 10, rel=0.3)


def test_a_codec_is_scored_and_its_codes_are_counted(folder: Path, tmp_path: Path) -> None:
    save_mel_codec(calibrated_network(SMALL_MEL_CODEC), tmp_path / "codec")
    options = ["--codec", str(tmp_path / "codec"), "--source", str(folder), "--samples", str(tmp_path / "samples")]
    report = evaluate_codec.evaluate(evaluate_codec.parser().parse_args([*options, *QUIET, "--all-speakers"]))
    found = report["sources"][folder.stem]
    assert found["speakers"] == 3 and len(report["revision"]) == 32
    assert len(found["perplexity"]) == 8 and max(found["codes used"]) <= 64 and min(found["codes used"]) >= 1
    files = [tmp_path / "samples" / f"{folder.stem}-0-{which}.wav" for which in ("original", "copy")]
    assert [len(soundfile.read(path)[0]) for path in files] == [25 * 960] * 2


def test_a_missing_metric_is_named_with_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pystoi", None)
    with pytest.raises(ConfigError) as caught:
        metrics.stoi()
    assert caught.value.hint == "pip install pystoi"


def test_short_clips_are_left_out(folder: Path, tmp_path: Path) -> None:
    wave = 0.3 * np.sin(2 * np.pi * 200 * np.arange(12_000) / 24_000)
    soundfile.write(tmp_path / "short.wav", wave, 24_000)
    utterances = [
        Utterance("short", tmp_path / "short.wav", "", STRANGERS[0]),
        Utterance("long", folder / f"{STRANGERS[1]}.wav", "", STRANGERS[1]),
    ]
    write_manifest(tmp_path / "manifest.jsonl", utterances)
    options = ["--codec", "identity", "--source", str(tmp_path), *QUIET]
    report = evaluate_codec.evaluate(evaluate_codec.parser().parse_args(options))
    assert report["sources"][tmp_path.stem]["clips"] == 1


def test_a_corpus_without_held_out_speakers_is_refused(folder: Path, tmp_path: Path) -> None:
    write_manifest(tmp_path / "manifest.jsonl", [Utterance("x", folder / "anna.wav", "", "anna")])
    with pytest.raises(SystemExit, match="has no held-out speaker"):
        evaluate_codec.main(["--codec", "identity", "--source", str(tmp_path), *QUIET])


def test_ecapa_takes_its_own_weights_and_no_others(tmp_path: Path) -> None:
    torch.manual_seed(0)
    save_file(EcapaNetwork().state_dict(), tmp_path / "ecapa.safetensors")
    metric = metrics.ecapa_similarity(tmp_path / "ecapa.safetensors")
    wave = np.random.default_rng(0).standard_normal(16_000).astype(np.float32)
    assert metric("", wave, wave)["ecapa"] == pytest.approx(1.0, abs=1e-5)
    save_file(MelCodecNetwork(SMALL_MEL_CODEC).state_dict(), tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"other\.safetensors does not fit"):
        metrics.ecapa_similarity(tmp_path / "other.safetensors")


class FakeMetrics:
    """Hears the level of a clip as words, and counts how often it is asked."""

    def __init__(self) -> None:
        self.calls = 0

    def measure(self, samples: Samples, rate: int, language: str) -> dict[str, Any]:
        assert rate == 24_000 and language == "es"
        self.calls += 1
        loud = float(np.sqrt(np.mean(samples**2))) > 0.1
        text = "uno dos tres cuatro" if loud else "uno dos"
        return {"transcript": text, "looped": False, "embedding": [1.0, 0.0], "level": -20.0}


class QuietCodec:
    """A codec that loses half of everything."""

    revision, sample_rate, hop = "quiet", 24_000, 960

    def encode(self, clips: Samples) -> Samples:
        return clips

    def decode(self, codes: Samples) -> Samples:
        return 0.1 * codes


def real_clips(folder: Path, name: str, speakers: list[str]) -> None:
    rows = []
    for number, speaker in enumerate(speakers):
        content = io.BytesIO()
        wave = 0.3 * np.sin(2 * np.pi * 200 * np.arange(48_000) / 24_000)
        soundfile.write(content, wave, 24_000, format="OGG", subtype="OPUS")
        audio = {"bytes": content.getvalue(), "path": "x.ogg"}
        rows.append(
            {"id": f"{name}-{number}", "text": "", "speaker": speaker, "language": "es", "seconds": 2.0, "audio": audio}
        )
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}-0.parquet")


def test_words_that_change_are_counted_against_the_original(tmp_path: Path) -> None:
    real_clips(tmp_path / "judge", "studio", ["anna", "bert", "anna"])
    (sets,) = real_speech.real_sets([tmp_path / "judge"], [], 2).items()
    assert sets[0] == "studio" and len(sets[1]) == 2
    measured = list(real_speech.measure_clips(*sets, QuietCodec(), tmp_path / "work", FakeMetrics()))
    scores = real_speech.score_set(measured)
    assert scores["words changed"] == 0.5 and scores["ECAPA original / round trip"] == 1.0
    assert "word errors before" not in scores, "no texts are known"


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    real_clips(tmp_path / "judge", "studio", ["anna", "bert", "anna"])
    ((name, clips),) = real_speech.real_sets([tmp_path / "judge"], [], 9).items()
    metrics_used = FakeMetrics()
    list(real_speech.measure_clips(name, clips[:1], QuietCodec(), tmp_path / "work", metrics_used))
    assert metrics_used.calls == 2
    first = list(real_speech.measure_clips(name, clips, QuietCodec(), tmp_path / "work", metrics_used))
    assert metrics_used.calls == 6
    other = QuietCodec()
    other.revision = "another"
    again = list(real_speech.measure_clips(name, clips, other, tmp_path / "work", metrics_used))
    assert metrics_used.calls == 9, "originals are heard once for all codecs"
    assert real_speech.score_set(first) == real_speech.score_set(again)


def test_of_a_corpus_that_is_trained_on_only_held_out_speakers_judge(tmp_path: Path) -> None:
    real_clips(tmp_path / "en-real", "part", [*STRANGERS, "anna"])
    assert not is_held_out("anna")
    sets = real_speech.real_sets([], [tmp_path / "en-real"], 9)
    assert {clip["speaker"] for clip in sets["en-real"]} == set(STRANGERS)


def test_a_folder_of_audio_files_is_a_set_of_its_own(tmp_path: Path) -> None:
    for place, seconds in (("anna/one.wav", 2), ("anna/long.flac", 20), ("bert/one.wav", 2), ("click.wav", 1)):
        file = tmp_path / "mine" / place
        file.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(file, 0.3 * np.sin(np.arange(seconds * 16_000) / 12), 16_000)
    sets = real_speech.real_sets([tmp_path / "mine"], [], 9, language="es")
    clips = {clip["id"]: clip for clip in sets["mine"]}
    assert {id: (clip["speaker"], clip["seconds"]) for id, clip in clips.items()} == {
        "anna_one.wav": ("anna", 2.0),
        "anna_long.flac": ("anna", 12.0),
        "bert_one.wav": ("bert", 2.0),
    }
    measured = list(real_speech.measure_clips("mine", sets["mine"], QuietCodec(), tmp_path / "work", FakeMetrics()))
    assert real_speech.score_set(measured)["words changed"] == 0.5


def test_what_cannot_be_compared_is_left_out(tmp_path: Path) -> None:
    """A set of one clip per speaker has no same speaker, one of one speaker no others: no NaN in the report."""
    real_clips(tmp_path / "judge", "studio", ["anna", "bert"])
    ((name, clips),) = real_speech.real_sets([tmp_path / "judge"], [], 9).items()
    measured = list(real_speech.measure_clips(name, clips, QuietCodec(), tmp_path / "work", FakeMetrics()))
    assert "ECAPA same speaker" not in real_speech.score_set(measured)
    assert real_speech.other_speaker_similarity({name: measured}) == 1.0
    assert real_speech.other_speaker_similarity({name: measured[:1]}) is None
    report = {"real": {name: {"clips": 2, "speakers": 2, "scores": real_speech.score_set(measured)}}}
    assert evaluate_codec.real_table(report).splitlines()[-1].split()[-1] == "-"


def test_real_recordings_need_the_models_that_hear_them(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="real recordings need"):
        evaluate_codec.main(["--codec", "identity", "--judge", str(tmp_path)])
    with pytest.raises(SystemExit, match="nothing to evaluate"):
        evaluate_codec.main(["--codec", "identity"])


def test_a_folder_without_recordings_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds neither parquet files nor recordings"):
        real_speech.real_sets([tmp_path], [], 9)


def test_a_shifted_copy_is_the_recording_again(tmp_path: Path) -> None:
    samples = (0.3 * np.sin(2 * np.pi * 200 * np.arange(24_000) / 24_000)).astype(np.float32)
    copy = real_speech.ShiftedCopy().decode(samples)
    assert np.corrcoef(samples, copy[250:])[0, 1] > 0.9999 and np.abs(copy).max() == pytest.approx(0.21, abs=0.01)
    real_clips(tmp_path / "judge", "studio", ["anna", "bert"])
    ((name, clips),) = real_speech.real_sets([tmp_path / "judge"], [], 9).items()
    measured = list(real_speech.measure_clips(name, clips, real_speech.ShiftedCopy(), tmp_path, FakeMetrics()))
    assert real_speech.score_set(measured)["words changed"] == 0
