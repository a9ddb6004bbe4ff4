"""The table of the optional losses: differences are over the same sentences and seeds."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.optional_losses import BASELINE, CODEBOOKS, OPTIONS, UNTUNED, page, recipe_tree, summary, table

from myna.core.config import parse_recipe
from myna.evaluate.scoring import ItemScores


def job(loss: float) -> dict[str, Any]:
    losses = {"mean": loss, "code0": loss - 1}
    return {"held_out": {"0": {"mean": 5.0, "code0": 4.0}, "9": losses}, "step_seconds": 0.1}


def items(errors: int) -> list[ItemScores]:
    texts = ("one two three four", "five six seven eight")
    rows = [
        ItemScores("system", f"line-{n}", "", text, "", "en", "sentence", "", "", True, 2.0)
        for n, text in enumerate(texts)
    ]
    for row in rows:
        row.word_errors, row.words = errors, 4
    return rows


def test_differences_are_from_the_baseline_of_the_same_seeds() -> None:
    trained = {
        "model": "fledgling",
        "steps": 9,
        "device": "CPU",
        "seeds": [0, 1],
        "options": {BASELINE: {}, "1/k": OPTIONS["1/k"]},
        "jobs": {f"{BASELINE}/0": job(4.0), f"{BASELINE}/1": job(4.2), "1/k/0": job(4.2), "1/k/1": job(4.3)},
    }
    rows = {
        UNTUNED: items(2),
        f"{BASELINE}/0": items(1),
        f"{BASELINE}/1": items(1),
        "1/k/0": items(0),
        "1/k/1": items(1),
    }
    result = table(trained, rows)
    assert result[UNTUNED]["loss"]["mean"] == 5.0
    assert result["1/k"]["loss_difference"]["by_seed"] == pytest.approx([0.2, 0.1])
    assert result["1/k"]["metrics"]["wer"]["value"]["mean"] == pytest.approx(1 / 8)
    assert result["1/k"]["metrics"]["wer"]["difference"]["mean"] == pytest.approx(-1 / 8)
    assert "difference" not in result[BASELINE]["metrics"]["wer"] and "similarity" not in result[BASELINE]["metrics"]
    text = page(trained | {"table": result})
    assert "| 1/k | 4.2500<br>+0.1500 (+0.1000 to +0.2000) | 0.125<br>-0.125" in text
    assert "| uniform | 4.1000 | 0.250 |" in text


def test_a_run_in_short() -> None:
    codes = dict.fromkeys(CODEBOOKS, 3.0)
    rows = [
        {"step": 0, "evaluation": codes},
        *({"step": n, "speed": {"seconds": 0.5}, "speaker_contrastive": 1.0 / n} | codes for n in range(1, 5)),
        {"step": 4, "evaluation": codes},
    ]
    result = summary(rows)
    assert [*result["held_out"]] == ["0", "4"] and result["held_out"]["4"]["mean"] == 3.0
    assert result["first_step"] == {"speaker_contrastive": 1.0} and result["train"]["speaker_contrastive"] == 0.25


@pytest.mark.parametrize("option", OPTIONS)
def test_recipes_are_valid(tmp_path: Any, option: str) -> None:
    tree = recipe_tree(tmp_path, option, 0, "cpu", 200, ["train.batch_size=2"])
    assert parse_recipe(tree, where="test").train.batch_size == 2
