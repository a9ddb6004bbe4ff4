"""An ear that is taught spells what it hears, and the rest of the model stays as it was."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import teach_ear
from myna import workflow
from myna.models import open_family
from myna.models.base import core_of
from myna.models.phi4.tiny import save_tiny
from tests.learners import TONES, record

STEPS = 150


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen learners who whistle, and a model that has heard nothing yet."""
    folder = tmp_path_factory.mktemp("whistlers")
    save_tiny(folder / "model", hidden=64)
    workflow.prepare(str(record(folder / "recordings")), folder / "prepared", model=str(folder / "model"), device="cpu")
    return folder


def lessons(prepared: Path) -> teach_ear.Lessons:
    return teach_ear.Lessons.open(prepared / "prepared", torch.device("cpu"))


def test_lessons_are_the_phones_that_were_heard(prepared: Path) -> None:
    learned = lessons(prepared)
    assert learned.names == tuple(sorted(TONES))
    assert {len(phones) for phones in learned.phones} == {2} and len(learned.phones) == 16


def test_clips_lie_side_by_side_as_they_are(prepared: Path) -> None:
    learned = lessons(prepared)
    (clips,) = learned.batches(teach_ear.SPECTRA, None)
    features, lengths = learned.side_by_side(clips)
    for clip, row, length in zip(clips, features, lengths.tolist(), strict=True):
        start = int(learned.starts[clip])
        assert torch.equal(row[:length], learned.features[start : start + length].float())
        assert not row[length:].any()


def test_every_clip_is_heard_once_a_round(prepared: Path) -> None:
    learned = lessons(prepared)
    rounds = [list(learned.batches(300, torch.Generator().manual_seed(seed))) for seed in (0, 1)]
    assert rounds[0] != rounds[1]
    for batches in rounds:
        assert len(batches) > 1 and sorted(clip for batch in batches for clip in batch) == list(range(16))


def test_an_ear_learns_to_spell(prepared: Path) -> None:
    torch.manual_seed(0)
    model = open_family(str(prepared / "model")).load_model(dtype=torch.float32, device="cpu", text_head=True)
    learned = lessons(prepared)
    speller = teach_ear.Speller(core_of(model), len(learned.names))
    before = teach_ear.phone_errors(speller, learned)
    teach_ear.teach(speller, learned, lambda steps: steps / STEPS, spectra=teach_ear.SPECTRA, rate=5e-3, seed=0)
    assert before > 0.5 and teach_ear.phone_errors(speller, learned) == 0.0


def test_only_the_ear_is_another_one(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(teach_ear, "within", lambda _: lambda steps: steps / 3)
    data, out = str(prepared / "prepared"), tmp_path / "hearing"
    words = ["--model", str(prepared / "model"), "--data", data, "--held-out", data, "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["teach_ear.py", *words, "--device", "cpu"])
    teach_ear.main()
    assert "of held-out phones are wrong" in capsys.readouterr().out
    told = json.loads((out / "hearing.json").read_text())
    assert told["phone_error_rate"] > 0 and told["curve"][-1]["steps"] == 3, "however short it was"
    taught, deaf = (
        open_family(str(folder)).load_model(dtype=torch.float32, device="cpu", text_head=True).state_dict()
        for folder in (out, prepared / "model")
    )
    changed = {name for name in deaf if not torch.equal(deaf[name], taught[name])}
    assert changed and all("audio_embed" in name for name in changed)


def test_phones_that_nobody_taught_are_named(prepared: Path) -> None:
    with pytest.raises(Exception, match="phones that are not learned: K, S, T"):
        teach_ear.Lessons.open(prepared / "prepared", torch.device("cpu"), ("M",))
