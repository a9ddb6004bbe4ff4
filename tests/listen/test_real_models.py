"""Real weights compared with the outputs of each package's original code (reference.json)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import myna.demo
from myna.audio.files import Samples, read_audio
from myna.curate.models import FILES, NO_ASR, CurationModels, measure
from myna.curate.settings import ListenSettings
from myna.listen.sounds import log_mel_patches, voice_activity
from myna.listen.speaker_encoders import cosine_similarity
from tests.listen.signals import babble
from tests.real_models import CURATION

RECORDINGS = Path(myna.demo.__file__).parent / "recordings"
REFERENCE: dict[str, Any] = json.loads(Path(__file__).with_name("reference.json").read_text(encoding="utf-8"))
HAS_MODELS = all((CURATION / file).is_file() for files in FILES.values() for file in files)
REQUIRED = os.environ.get("MYNA_EXTRAS") == "required"
pytestmark = [
    pytest.mark.extras,
    pytest.mark.skipif(not HAS_MODELS and not REQUIRED, reason="`make test-extras` fetches the models that it needs"),
]


@pytest.fixture(scope="module")
def models() -> CurationModels:
    return CurationModels.open(ListenSettings(asr=NO_ASR, models=str(CURATION)), threads=1)


@pytest.fixture(scope="module")
def speech() -> Samples:
    samples = read_audio(RECORDINGS / REFERENCE["recording"], sample_rate=16_000)
    return np.resize(samples, 144_160)


def test_segmentation_equals_pyannotes_own_code(models: CurationModels) -> None:
    assert models.segmentation is not None
    [probabilities] = models.segmentation.segment(babble(10, 7, 16_000))
    assert probabilities[::40] == pytest.approx(np.array(REFERENCE["segmentation"]), abs=1e-4)


def test_music_equals_keras(models: CurationModels) -> None:
    assert models.music is not None
    wave = babble(10, 7, 16_000) + np.random.default_rng(3).normal(0, 0.02, 160_000)
    patches = log_mel_patches(wave.astype(np.float32), step=100)
    with torch.inference_mode():
        probabilities = models.music(torch.from_numpy(patches)).numpy()
    assert probabilities == pytest.approx(np.array(REFERENCE["speech_music_noise"]), abs=1e-4)


@pytest.mark.parametrize("snr_db", [99, 10])
def test_noise_and_quality_equal_the_packages_own(models: CurationModels, speech: Samples, snr_db: int) -> None:
    """DeepFilterNet's own runtime skips stages without noise, which explains the tolerance of a decibel."""
    noise = np.random.default_rng(3).normal(size=len(speech))
    noisy = speech + noise * np.sqrt((speech**2).mean() / 10 ** (snr_db / 10))
    values = measure(noisy.astype(np.float32), 16_000, models)
    expected = dict(REFERENCE[f"speech_{snr_db}_db"])
    assert values["snr_db"] == pytest.approx(expected.pop("snr_db"), abs=1.0 if snr_db == 99 else 0.2)
    assert {name: values[name] for name in expected} == pytest.approx(expected, abs=0.01)
    assert values["music_share"] < 0.2


def test_voice_activity_finds_the_speech_between_silences(speech: Samples) -> None:
    silence = np.zeros(2 * 16_000, np.float32)
    spans = voice_activity(np.concatenate([silence, speech[: 3 * 16_000], silence]), 16_000)
    assert spans
    assert spans[0][0] > 1.8
    assert spans[-1][1] < 5.3
    assert all(end > start for start, end in spans)
    assert voice_activity(silence, 16_000) == []


def test_embeddings_tell_a_voice_from_another(models: CurationModels) -> None:
    first, second = (read_audio(file, sample_rate=16_000) for file in sorted(RECORDINGS.glob("nicola-*.opus"))[:2])
    other = babble(3, 1, 16_000)
    encoder = models.speaker_encoder
    assert encoder is not None
    same = cosine_similarity(encoder.embed(first, 16_000), encoder.embed(second, 16_000))
    assert same > 0.45
    assert same > cosine_similarity(encoder.embed(first, 16_000), encoder.embed(other, 16_000)) + 0.2
