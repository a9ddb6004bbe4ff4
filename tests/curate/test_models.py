"""Models of a curation that are missing or damaged, and measures without them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soxr  # type: ignore[import-untyped]
from safetensors.torch import save_file

from myna.audio.signal_measures import bandwidth_hz
from myna.core.errors import CheckpointError
from myna.curate.models import FILES, LOST, NO_ASR, CurationModels, measure, missing_models
from myna.curate.settings import ListenSettings
from myna.data.segments import MEASURES
from myna.listen.diarization import SegmentationNetwork
from myna.listen.sounds import SpeechMusicNoiseNetwork
from tests.listen.signals import SAMPLE_RATE, babble


def networks_in(folder: Path) -> CurationModels:
    return CurationModels.open(ListenSettings(asr=NO_ASR, models=str(folder)))


def test_an_empty_folder_gives_no_models_and_says_what_is_lost(tmp_path: Path) -> None:
    models = networks_in(tmp_path)
    assert models == CurationModels()
    notes = {note.partition(":")[0]: note for note in missing_models(ListenSettings(models=str(tmp_path)))}
    assert set(FILES) <= set(notes)
    assert all("myna setup curation" in notes[name] and LOST[name] in notes[name] for name in FILES)
    assert all(str(tmp_path) in notes[name] for name in ("music", "quality")), "the folder that was searched"


def test_weights_in_the_folder_are_loaded_and_named_by_their_hash(tmp_path: Path) -> None:
    save_file(SegmentationNetwork().state_dict(), tmp_path / "segmentation.safetensors")
    save_file(SpeechMusicNoiseNetwork().state_dict(), tmp_path / "speech_music_noise.safetensors")
    models = networks_in(tmp_path)
    assert models.segmentation is not None
    assert models.music is not None
    assert set(models.versions) == {"segmentation", "music"}


def test_a_file_with_other_weights_is_refused(tmp_path: Path) -> None:
    save_file(SpeechMusicNoiseNetwork().state_dict(), tmp_path / "segmentation.safetensors")
    with pytest.raises(CheckpointError, match="does not fit SegmentationNetwork"):
        networks_in(tmp_path)


def test_without_models_measures_are_nan_and_signal_measures_are_there() -> None:
    values = measure(babble(3, 1), SAMPLE_RATE, CurationModels())
    assert set(values) <= set(MEASURES)
    missing = {name for name, value in values.items() if np.isnan(value)}
    assert missing == {"music_share", "snr_db", "dnsmos_ovrl", "dnsmos_bak", "dnsmos_sig"}
    assert values["clipped_share"] == 0
    assert values["bandwidth_hz"] > 3000


def test_a_telephone_that_begins_in_a_clip_makes_its_band_narrow() -> None:
    wide = (babble(6, 1) + 0.01 * np.random.default_rng(0).normal(size=6 * SAMPLE_RATE)).astype(np.float32)
    narrow = soxr.resample(soxr.resample(wide, SAMPLE_RATE, 8_000), 8_000, SAMPLE_RATE)[: len(wide)]
    from_here = len(wide) - round(2.2 * SAMPLE_RATE)
    mixed = np.concatenate([wide[:from_here], narrow[from_here:]])
    assert bandwidth_hz(mixed, SAMPLE_RATE) > 7_000  # the mean of the clip hides it
    assert measure(mixed, SAMPLE_RATE, CurationModels())["bandwidth_hz"] < 4_200
    assert measure(wide, SAMPLE_RATE, CurationModels())["bandwidth_hz"] > 7_000
    assert measure(wide[:100], SAMPLE_RATE, CurationModels())["bandwidth_hz"] > 0
