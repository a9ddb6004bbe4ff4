"""CTC pretraining of the audio encoder; the rest of the model stays as it was."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import myna
import train_audio_encoder
from myna.models import open_family
from myna.models.base import get_base_model
from myna.models.phi4.tiny import save_tiny
from tests.tone_learners import TONES, record

STEPS = 150


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen recordings of tones, and a model with random weights."""
    folder = tmp_path_factory.mktemp("tones")
    save_tiny(folder / "model", hidden=64)
    myna.prepare(str(record(folder / "recordings")), folder / "prepared", model=str(folder / "model"), device="cpu")
    return folder


def dataset_of(prepared: Path) -> train_audio_encoder.PhoneDataset:
    return train_audio_encoder.PhoneDataset.open(prepared / "prepared", torch.device("cpu"))


def test_targets_are_the_spoken_phones(prepared: Path) -> None:
    dataset = dataset_of(prepared)
    assert dataset.names == tuple(sorted(TONES))
    assert {len(phones) for phones in dataset.phones} == {2} and len(dataset.phones) == 16


def test_collated_clips_are_padded(prepared: Path) -> None:
    dataset = dataset_of(prepared)
    (clips,) = dataset.batches(train_audio_encoder.MAX_BATCH_FRAMES, None)
    features, lengths = dataset.collate(clips)
    for clip, row, length in zip(clips, features, lengths.tolist(), strict=True):
        start = int(dataset.starts[clip])
        assert torch.equal(row[:length], dataset.features[start : start + length].float())
        assert not row[length:].any()


def test_every_clip_comes_once_an_epoch(prepared: Path) -> None:
    dataset = dataset_of(prepared)
    rounds = [list(dataset.batches(300, torch.Generator().manual_seed(seed))) for seed in (0, 1)]
    assert rounds[0] != rounds[1]
    for batches in rounds:
        assert len(batches) > 1 and sorted(clip for batch in batches for clip in batch) == list(range(16))


def test_the_encoder_learns_phones(prepared: Path) -> None:
    torch.manual_seed(0)
    model = open_family(str(prepared / "model")).load_model(dtype=torch.float32, device="cpu", text_head=True)
    dataset = dataset_of(prepared)
    ctc_model = train_audio_encoder.PhoneCTCModel(get_base_model(model), len(dataset.names))
    before = train_audio_encoder.phone_error_rate(ctc_model, dataset)
    train_audio_encoder.train(
        ctc_model,
        dataset,
        lambda steps: steps / STEPS,
        batch_frames=train_audio_encoder.MAX_BATCH_FRAMES,
        learning_rate=5e-3,
        seed=0,
    )
    assert before > 0.5 and train_audio_encoder.phone_error_rate(ctc_model, dataset) == 0.0


def test_only_the_encoder_changes(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_audio_encoder, "elapsed_share", lambda _: lambda steps: steps / 3)
    data, out = str(prepared / "prepared"), tmp_path / "encoder"
    options = ["--model", str(prepared / "model"), "--data", data, "--held-out", data, "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["train_audio_encoder.py", *options, "--device", "cpu"])
    train_audio_encoder.main()
    assert "phone error rate of held-out learners" in capsys.readouterr().out
    results = json.loads((out / "pretraining.json").read_text())
    assert results["phone_error_rate"] > 0 and results["curve"][-1]["steps"] == 3, "however short it was"
    trained, initial = (
        open_family(str(folder)).load_model(dtype=torch.float32, device="cpu", text_head=True).state_dict()
        for folder in (out, prepared / "model")
    )
    changed = {name for name in initial if not torch.equal(initial[name], trained[name])}
    assert changed and all("audio_embed" in name for name in changed)


def test_unknown_phones_are_named(prepared: Path) -> None:
    with pytest.raises(Exception, match="unknown phones: K, S, T"):
        train_audio_encoder.PhoneDataset.open(prepared / "prepared", torch.device("cpu"), ("M",))
