"""The report of the small pronunciation model: scores of its answers, and whether they reach the targets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import report
from myna.data.importers import import_source, write_import
from myna.data.pronunciation import read_assessment
from myna.models.phi4.tiny import save_tiny
from tests.tone_learners import lines, record


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that was stopped by the clock: a checkpoint, no result."""
    save_tiny(tmp_path / "run" / "checkpoints" / "step-000007" / "model")
    rows: list[dict[str, Any]] = [{"step": 0, "evaluation": {"loss": 5.0}}]
    for step in range(1, 901):
        speed = {"seconds": 0.1, "audio_per_second": 100.0}
        rows.append({"step": step, "epoch": step / 9, "loss": 5 / step, "speed": speed})
    rows.append({"step": 900, "evaluation": {"loss": 1.0}})
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run" / "log.txt").write_text("12 targets, 0.05 h, 4 speakers from here\n")
    return tmp_path / "run"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    source = record(tmp_path / "recordings")
    write_import(import_source(str(source), media=tmp_path / "media"), tmp_path / "test", max_bad=0.0)
    return tmp_path / "test"


def answers(data: Path, folder: Path, *, right: bool) -> Path:
    """All answers right, or the canonical phones with constant scores."""
    rows_of_manifest = [json.loads(line) for line in (data / "manifest.jsonl").read_text().splitlines()]
    rows = []
    for row, line in zip(rows_of_manifest, lines(), strict=True):
        due = read_assessment({key: line[key] for key in ("text", "scores", "words")})
        canonical = due.answer.model_copy(update={"phones": "T K", "accuracy": 5.0, "fluency": 5.0})
        said = (due.answer if right else canonical).to_json()
        rows.append({"id": row["id"], "answer": said, "due": due.answer.to_json(), "stopped": True})
    path = folder / "answers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("right", [True, False])
def test_targets_are_reached_or_not(run: Path, data: Path, tmp_path: Path, right: bool) -> None:
    facts = report.collect_results(run, answers(data, tmp_path, right=right), data, None)
    assert [good for _, good in report.check_targets(facts).values()] == [right] * 3
    assert facts["training"]["steps"] == 900 and facts["training"]["parameters"] > 10_000
    assert facts["held_out"] == {"speakers": 4, "sentences": 16}
    assert facts["canonical"]["figures"]["phone error rate"]["mean"] == pytest.approx(24 / 32)


def test_page_and_curve_can_be_written_again_from_results(run: Path, data: Path, tmp_path: Path) -> None:
    pretraining = tmp_path / "pretraining.json"
    curve = [{"steps": 9, "seconds": 10.5, "loss": 3.0}, {"steps": 1234, "seconds": 61.0, "loss": 0.2}]
    pretraining.write_text(json.dumps({"curve": curve, "phone_error_rate": 0.054}))
    facts = report.collect_results(run, answers(data, tmp_path, right=True), data, pretraining)
    row = {"name": "as-planned", "recomputed_layers": 3, "seconds_per_step": 1.5, "peak_gib": 20.0, "skipped_steps": 1}
    row |= {"finite_gradients": 256, "adapters": 256}
    full_size = {"machine": "a GPU", "gpu_gib": 24.0, "old_system_seconds_per_step": 15.3, "rows": [row]}
    report.write(tmp_path / "one", facts, full_size)
    again = json.loads((tmp_path / "one" / "pronunciation.json").read_text())
    report.write(tmp_path / "two", {key: again[key] for key in again if key != "full_size"}, again["full_size"])
    for kind in ("json", "md", "svg"):
        one, two = ((tmp_path / name / f"pronunciation.{kind}").read_text() for name in ("one", "two"))
        assert one == two
    page = (tmp_path / "one" / "pronunciation.md").read_text()
    assert "| as-planned | 3 | 1.50 | 20.0 | 1 | 256 of 256 |" in page
    assert "1,234 steps in\n61 s, with a phone error rate of 5.4% on held-out learners" in page
    assert len(again["training"]["losses"]) <= 460, "no more points than can be seen"
    drawn = ElementTree.fromstring((tmp_path / "one" / "pronunciation.svg").read_text())
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}circle"))) == 2
