"""The benchmark of the paper's recipe at toy size on the CPU."""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.pronunciation import ROWS, RandomPhi4, is_valid, make_recipe, random_steps, utterances

from benchmarks import pronunciation
from myna.core.config import load_recipe
from myna.models.base import IGNORE_INDEX

CPU = torch.device("cpu")


def test_utterances_are_a_clip_and_a_supervised_answer() -> None:
    family = RandomPhi4.of(tiny=False, rng_device=CPU)
    samples = list(islice(utterances(family), 300))
    for one in samples[:20]:
        placeholders = one.ids == family.config.audio_config.audio_token_id
        assert placeholders.sum() == len(one.codes) == one.spans[0].stop - one.spans[0].start
        assert placeholders[one.spans[0].start : one.spans[0].stop].all()
        learned = one.labels != IGNORE_INDEX
        assert learned.sum() == pronunciation.ANSWER_TOKENS and learned[-pronunciation.ANSWER_TOKENS :].all()
        assert one.ids.max() < family.config.vocab_size
    assert 3.7 < np.mean([one.target_seconds for one in samples]) < 4.6


def test_the_batch_is_the_papers() -> None:
    recipe = make_recipe("full", CPU)
    [step] = random_steps(RandomPhi4.of(tiny=True, rng_device=CPU), recipe, 1)
    assert [len(one) for one in step] == [8] * 8 and recipe.adapt.rank == 64


def test_all_rows_are_measured_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = ["train.batch_size=4", "train.micro_batch_size=2", "train.device=cpu", "train.precision=fp32"]
    monkeypatch.setattr(pronunciation, "load_recipe", lambda path, settings: load_recipe(path, [*settings, *few]))
    argv = ["pronunciation.py", "--tiny", "--device", "cpu", "--steps", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", argv)
    assert pronunciation.main() == 0
    facts = json.loads((tmp_path / "full_size.json").read_text())
    assert [row["name"] for row in facts["rows"]] == list(ROWS)
    every, planned = facts["rows"]
    assert every["recomputed_layers"] == 2 and planned["recomputed_layers"] == 0
    for row in facts["rows"]:
        assert row["adapters"] == row["finite_gradients"] == row["gradients_not_zero"] == 16 and row["batch"] == "2 x 2"
        assert len(row["losses"]) == 2 + pronunciation.WARM_UP_STEPS and row["seconds_per_step"] > 0
    assert every["losses"] == pytest.approx(planned["losses"], rel=1e-5), "recomputing changes nothing"


@pytest.mark.parametrize(
    "fault",
    [{"finite_gradients": 15}, {"gradients_not_zero": 8}, {"losses": [float("nan")]}, {"skipped_after_warm_up": 7}],
)
def test_a_fault_is_seen(fault: dict[str, object]) -> None:
    good = {"adapters": 16, "finite_gradients": 16, "gradients_not_zero": 16, "losses": [2.0]}
    good |= {"skipped_after_warm_up": 0, "steps": 8}
    assert is_valid(good) and not is_valid(good | fault)
