"""One raw recording of two voices to speech, without a transcript written by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import myna
from myna.audio.files import probe
from myna.curate.curation import CurationResult, run_curation
from myna.curate.settings import load_curate_settings
from myna.data.manifest import read_manifest
from myna.text.wer import ErrorCount, character_errors
from tests.curate.scripted import SpokenSentence, scripted_models, write_recording
from tests.real_models import CURATION, WHISPER

ROOT = Path(__file__).parents[2]
HAS_CURATION = (WHISPER / "model.bin").is_file() and (CURATION / "segmentation.safetensors").is_file()
REQUIRED = os.environ.get("MYNA_EXTRAS") == "required"


def train_and_speak(result: CurationResult, folder: Path) -> None:
    data = myna.prepare(result, folder / "prepared", model="fledgling", device="cpu")
    assert data.utterances == result.clips
    tree = {
        "name": "raw",
        "model": {"source": "fledgling"},
        "data": {"train": str(data.folder)},
        "train": {"steps": 2, "batch_size": 1, "device": "cpu"},
    }
    run = myna.train(tree, out=folder / "run")
    clip = read_manifest(result.folder / "manifest.jsonl")[0]
    voice = myna.load(run)
    voice.speak("Good morning.", reference=clip.audio, reference_text=clip.text, max_seconds=3).save(folder / "out.wav")
    assert probe(folder / "out.wav").seconds > 0.3


@pytest.mark.slow
def test_with_a_recogniser_that_knows_the_words(tmp_path: Path) -> None:
    path = tmp_path / "raw" / "talk.wav"
    models = scripted_models({path: write_recording(path, 9)})
    settings = load_curate_settings(None, ["keep.min_bandwidth_hz=0"])
    train_and_speak(run_curation([path], tmp_path / "out", settings, workers=1, open_models=models), tmp_path)


@pytest.mark.extras
@pytest.mark.skipif(not HAS_CURATION and not REQUIRED, reason="`make test-extras` fetches the models that it needs")
def test_with_whisper_by_the_command_line(tmp_path: Path) -> None:
    """Two voices are separated, the text is right, no sentence is cut, and a model learns from it."""
    path = tmp_path / "raw" / "talk.wav"
    sentences = write_recording(path, 12)
    command = [sys.executable, "-m", "myna", "curate", str(path), "--out", str(tmp_path / "out"), "--asr", str(WHISPER)]
    # The measures of noise, music and quality do not fit a slowed-down voice.
    measures = ["keep.min_snr_db=5", "keep.max_music_share=0.5", "keep.min_dnsmos_ovrl=2.5", "keep.min_bandwidth_hz=0"]
    options = [f"listen.models={CURATION}", *measures]
    done = subprocess.run(
        [*command, *(word for one in options for word in ("--set", one))], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "kept" in done.stdout
    utterances = read_manifest(tmp_path / "out" / "manifest.jsonl")
    errors = ErrorCount()
    voices: dict[str, set[str]] = {}
    heard: list[SpokenSentence] = []
    for utterance in utterances:
        start, end = utterance.extras["start_ms"] / 1000, utterance.extras["end_ms"] / 1000
        inside = [one for one in sentences if one.start < end - 0.05 and start + 0.05 < one.end]
        assert all(start < one.start + 0.05 and one.end - 0.05 < end for one in inside), utterance.text
        errors += character_errors(" ".join(one.text for one in inside), utterance.text)
        voices.setdefault(utterance.speaker, set()).update(one.voice for one in inside)
        heard += inside
    assert errors.rate <= 0.03
    assert all(len(group) == 1 for group in voices.values()), "no speaker of the table is two voices"
    assert sum(one.end - one.start for one in heard) >= 0.8 * sum(one.end - one.start for one in sentences)
    result = myna.curate([], tmp_path / "out")
    assert result.clips == len(utterances)
    train_and_speak(result, tmp_path)
