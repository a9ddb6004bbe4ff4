"""Features equal those of the model's own extractor, in 16 bits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from myna.core.errors import AudioError, ModelError
from myna.data.codec import Codes, Samples
from myna.models.phi4.codec import CODES_PER_UNIT, MAX_CODE, MelFeatureEncoder, valid_frames
from myna.models.phi4.family import Phi4
from tests.models.phi4.conftest import FEATURE_EXTRACTOR


def test_features_equal_the_extractors_within_half_a_step(waves: list[Samples], codes: list[Codes]) -> None:
    for wave, one in zip(waves, codes, strict=True):
        assert one.shape == (len(wave) // 160, 80) and one.dtype == np.uint16
        due = FEATURE_EXTRACTOR(torch.from_numpy(wave), sampling_rate=16_000, return_tensors="pt")[
            "audio_input_features"
        ][0]
        assert np.abs(valid_frames(one) / CODES_PER_UNIT - due.numpy()).max() <= 0.51 / CODES_PER_UNIT


def test_the_loudest_sound_fits_into_16_bits() -> None:
    """Full scale at every other sample is the loudest sound of 16-bit audio."""
    loud = np.where(np.arange(1600) % 2, 1.0, -1.0).astype(np.float32)
    square = np.where(np.arange(1600) // 8 % 2, 1.0, -1.0).astype(np.float32)
    assert MelFeatureEncoder({}).encode(np.stack([loud, square])).max() < MAX_CODE


def test_features_do_not_depend_on_the_batch(waves: list[Samples], codes: list[Codes]) -> None:
    twice = MelFeatureEncoder({}).encode(np.stack([waves[0], np.zeros_like(waves[0])]))
    assert (twice[0] == codes[0]).all()


def test_a_clip_too_short_for_one_spectrum_has_none() -> None:
    assert valid_frames(MelFeatureEncoder({}).encode(np.zeros((1, 320), np.float32))[0]).size == 0


def test_samples_that_are_not_finite_are_refused() -> None:
    with pytest.raises(AudioError, match="finite"):
        MelFeatureEncoder({}).encode(np.full((1, 1600), np.nan, np.float32))


def test_another_extractor_is_another_revision() -> None:
    assert MelFeatureEncoder({}).revision != MelFeatureEncoder({"mel_max_frequency": 7000}).revision
    assert MelFeatureEncoder({"n_fft": 512}).revision == MelFeatureEncoder({"n_fft": 512}).revision


def test_settings_are_found_in_either_file(family: Phi4, folder: Path, tmp_path: Path) -> None:
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (tmp_path / "processor_config.json").write_text(json.dumps({"audio_processor": settings}))
    assert MelFeatureEncoder.open(tmp_path).revision == family.load_encoder().revision


def test_a_folder_without_settings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="settings of its feature extractor"):
        MelFeatureEncoder.open(tmp_path)
