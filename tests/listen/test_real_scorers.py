"""Defects of real speech found by the real scorers. Skipped if these are not installed."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from myna.audio.files import Samples
from myna.data.manifest import read_manifest
from myna.demo.run import BUNDLED
from myna.evaluate.items import EvalItem, EvalSet, load_clip
from myna.evaluate.metrics import REAL
from myna.evaluate.pipeline import Recordings, System, SystemOutput
from myna.evaluate.scoring import Scorers
from tests.evaluate.speech import FakeSystem, evaluate_systems
from tests.real_models import CURATION

RATE = 24_000


def fast(samples: Samples) -> Samples:
    """Change the voice: the words stay, a third higher and faster."""
    places = np.arange(0, len(samples) - 1, 1.35)
    return np.asarray(np.interp(places, np.arange(len(samples)), samples), np.float32)


def test_real_scorers_tell_speech_from_noise_copies_and_another_voice(tmp_path: Path) -> None:
    pytest.importorskip("faster_whisper", reason="docs/guides/evaluate.md says how to install the scorers")
    if not (ecapa := CURATION / "ecapa.safetensors").is_file():
        pytest.skip("there is no speaker encoder: myna setup curation")
    if not (asr := os.environ.get("MYNA_WHISPER")):
        pytest.skip("MYNA_WHISPER does not name the folder of a Whisper")
    clips = read_manifest(BUNDLED / "manifest.jsonl")[:6]
    reference, lines = clips[0], clips[1:4]
    items = [EvalItem(one.id, one.text, one.speaker, "en", (reference,), one) for one in lines]
    scorers = Scorers.open(asr, f"ecapa:{ecapa}")
    noise = np.random.default_rng(0).normal(0, 0.1, 3 * RATE).astype(np.float32)
    systems: list[System] = [
        Recordings(REAL, RATE),
        FakeSystem("noise", lambda _: SystemOutput(noise, stopped=True), sample_rate=RATE),
        FakeSystem(
            "copy", lambda item: SystemOutput(load_clip(item.references[0], RATE), stopped=True), sample_rate=RATE
        ),
        FakeSystem(
            "other",
            lambda item: SystemOutput(fast(load_clip(item.recording or reference, RATE)), True),
            sample_rate=RATE,
        ),
    ]
    eval_set = EvalSet(tuple(items), {reference.speaker: tuple(clips)})
    evaluation = evaluate_systems(eval_set, systems, tmp_path, name="copy", scorers=scorers)
    mean = {
        name: {key: figure.mean for key, figure in figures.items()} for name, figures in evaluation.estimates.items()
    }
    assert (mean[REAL]["wer"] or 0) < 0.2 and (mean[REAL]["similarity"] or 0) > 0.6
    assert (mean["other"]["similarity"] or 0) < (mean[REAL]["similarity"] or 0) - 0.1
    assert (mean["other"]["copy_rate"], mean["copy"]["copy_rate"], mean["copy"]["prompt_rate"]) == (0, 1, 1)
    if "distillmos" in scorers.names:
        assert (mean["noise"]["distillmos"] or 0) < 2 < 3.5 < (mean[REAL]["distillmos"] or 0)
    named = {(diagnosis.system, diagnosis.name) for diagnosis in evaluation.diagnoses}
    assert {("noise", "noise"), ("copy", "copies the reference"), ("copy", "speaks the prompt")} <= named
