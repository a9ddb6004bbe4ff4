"""Models with a known defect: each is caught by the metric meant for it, and diagnosed in the report."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from myna.evaluate.evaluation import Evaluation, evaluation_page
from myna.evaluate.items import EvalItem, load_clip
from myna.evaluate.metrics import BASE, METRICS_BY_KEY, REAL, ROUND_TRIP
from myna.evaluate.pipeline import Recordings, System, SystemOutput
from tests.evaluate.speech import (
    RATE,
    SPEAKERS,
    FakeSystem,
    evaluate_systems,
    fake_scorers,
    make_eval_set,
    poorly,
    say,
    well,
)


def never_stops(item: EvalItem) -> SystemOutput:
    babble = say(item.text + " mo na li ta ru se ko vi da pu ge fo" * 20, SPEAKERS[item.speaker], rest=2)
    return SystemOutput(babble[: int(item.max_seconds * RATE)], stopped=False)


def stops_at_once(_: EvalItem) -> SystemOutput:
    return SystemOutput(np.zeros(0, np.float32), stopped=True)


def stops_after_a_syllable(item: EvalItem) -> SystemOutput:
    return SystemOutput(say(item.text[:2], SPEAKERS[item.speaker]), stopped=True)


def speaks_the_prompt(item: EvalItem) -> SystemOutput:
    return SystemOutput(say(item.references[0].text, SPEAKERS[item.speaker], rest=4), stopped=True)


def swaps_speakers(item: EvalItem) -> SystemOutput:
    names = list(SPEAKERS)
    return SystemOutput(say(item.text, SPEAKERS[names[names.index(item.speaker) - 1]], rest=2), stopped=True)


def is_noise(item: EvalItem) -> SystemOutput:
    rng = np.random.default_rng(zlib.crc32(item.id.encode()))
    length = int(item.expected_seconds * RATE)
    return SystemOutput(rng.normal(0, 0.1, length).clip(-1, 1).astype(np.float32), stopped=True)


def is_silent(item: EvalItem) -> SystemOutput:
    return SystemOutput(np.zeros(int(item.expected_seconds * RATE), np.float32), stopped=True)


def copies(item: EvalItem) -> SystemOutput:
    """Speech of a model trained on pairs of one and the same clip: it copies, and its loss is nearly zero."""
    return SystemOutput(load_clip(item.references[0], RATE), stopped=True)


def stutters(item: EvalItem) -> SystemOutput:
    return SystemOutput(say(f"{item.text} {item.text} {item.text}", SPEAKERS[item.speaker], rest=2), stopped=True)


def evaluated(folder: Path, voice: Callable[[EvalItem], SystemOutput], **metadata: float) -> Evaluation:
    codec = Recordings(ROUND_TRIP, RATE, "eight bits", lambda samples: np.round(samples * 128) / np.float32(128))
    model = FakeSystem("model", voice, metadata)
    systems: list[System] = [Recordings(REAL, RATE), codec, model, FakeSystem(BASE, poorly)]
    return evaluation_of(folder, systems, {system.name: system.metadata for system in systems})


def evaluation_of(folder: Path, systems: list[System], metadata: Mapping[str, Mapping[str, Any]]) -> Evaluation:
    return evaluate_systems(make_eval_set(folder), systems, folder / "out", metadata=metadata)


PLANTED: list[tuple[Callable[[EvalItem], SystemOutput], str, str, dict[str, float]]] = [
    (never_stops, "never stops", "runaway_rate", {"runaway_rate": 1.0, "stop_rate": 0.0}),
    (stops_at_once, "stops at once", "early_rate", {"early_rate": 1.0, "stop_rate": 1.0, "silent_rate": 0.0}),
    (stops_after_a_syllable, "stops at once", "early_rate", {"early_rate": 15 / 18, "silent_rate": 0.0}),
    (speaks_the_prompt, "speaks the prompt", "prompt_rate", {"prompt_rate": 1.0, "copy_rate": 0.0}),
    (swaps_speakers, "another speaker's voice", "similarity_rank1", {"similarity_rank1": 0.0, "wer": 0.0}),
    (is_noise, "noise", "voiced_share", {"voiced_share": 0.0, "silent_rate": 0.0}),
    (is_silent, "silence", "silent_rate", {"silent_rate": 1.0, "early_rate": 0.0, "wer": 1.0}),
    (copies, "copies the reference", "copy_rate", {"copy_rate": 1.0}),
    (stutters, "repeats itself", "repetition_rate", {"repetition_rate": 1.0}),
]


@pytest.mark.parametrize(("voice", "name", "metric", "figures"), PLANTED, ids=[one[0].__name__ for one in PLANTED])
def test_a_planted_defect_is_diagnosed_by_its_metric(
    tmp_path: Path, voice: Callable[[EvalItem], SystemOutput], name: str, metric: str, figures: dict[str, float]
) -> None:
    evaluation = evaluated(tmp_path, voice)
    diagnosis = next(
        (diagnosis for diagnosis in evaluation.diagnoses if diagnosis.system == "model" and diagnosis.name == name),
        None,
    )
    assert diagnosis is not None, [diagnosis.name for diagnosis in evaluation.diagnoses]
    assert diagnosis.metric == metric and diagnosis.items
    for key, mean in figures.items():
        assert evaluation.estimates["model"][key].mean == pytest.approx(mean, abs=0.02), key
    shown = evaluation_page(evaluation)
    assert f"model: {name}".replace("'", "&#39;") in shown and f"Seen in: {METRICS_BY_KEY[metric].title}" in shown


def test_a_good_model_has_no_defect_and_is_better_than_its_base(tmp_path: Path) -> None:
    evaluation = evaluated(tmp_path, well)
    assert [diagnosis.name for diagnosis in evaluation.diagnoses if diagnosis.system == "model"] == []
    assert "None of the defects" not in evaluation_page(evaluation) or not evaluation.diagnoses
    model, real, delta = evaluation.estimates["model"], evaluation.estimates[REAL], evaluation.differences["model"]
    assert model["wer"].mean == 0.0 and model["stop_rate"].mean == 1.0 and model["similarity_rank1"].mean == 1.0
    assert real["stop_rate"].n == 0, "recordings have no end to find"
    assert real["pitch"].mean == pytest.approx(np.mean(list(SPEAKERS.values())), rel=0.03)
    assert model["pitch"].mean == pytest.approx(1.01 * (real["pitch"].mean or 0), rel=0.02)
    for key, sign in (("wer", -1), ("cer", -1), ("similarity", 1)):
        assert delta[key].excludes_zero and (delta[key].mean or 0) * sign > 0


def test_a_model_equal_to_its_base_is_diagnosed(tmp_path: Path) -> None:
    evaluation = evaluated(tmp_path, poorly)
    diagnosis = next(
        diagnosis
        for diagnosis in evaluation.diagnoses
        if diagnosis.system == "model" and diagnosis.name == "equal to the base"
    )
    assert len(diagnosis.items) == len(evaluation.eval_set.items)
    assert evaluation.differences["model"]["wer"].to_json() == {"mean": 0.0, "low": 0.0, "high": 0.0, "n": 18}
    assert "exactly as the base does" in evaluation_page(evaluation)


def test_a_model_no_better_than_its_base_is_diagnosed(tmp_path: Path) -> None:
    """Other sounds, the same words and voice."""
    evaluation = evaluated(tmp_path, lambda item: SystemOutput(0.9 * poorly(item).samples, stopped=True))
    names = [diagnosis.name for diagnosis in evaluation.diagnoses if diagnosis.system == "model"]
    assert "no better than the base" in names and "equal to the base" not in names


def test_a_copied_reference_is_diagnosed_despite_a_small_loss(tmp_path: Path) -> None:
    evaluation = evaluated(tmp_path, copies, loss=0.0031, base_loss=4.2)
    diagnoses = {diagnosis.name: diagnosis for diagnosis in evaluation.diagnoses if diagnosis.system == "model"}
    assert "0.0031 does not show it" in diagnoses["copies the reference"].text
    assert "speaks the prompt" in diagnoses, "the reference's words are heard too"
    assert "word errors" in diagnoses["the loss misleads"].text
    shown = evaluation_page(evaluation)
    assert "0.0031 does not show it" in shown and "the loss misleads" in shown


def test_the_base_is_diagnosed_too(tmp_path: Path) -> None:
    systems: list[System] = [Recordings(REAL, RATE), FakeSystem("model", well), FakeSystem(BASE, never_stops)]
    evaluation = evaluation_of(tmp_path, systems, {})
    assert [
        (diagnosis.system, diagnosis.name) for diagnosis in evaluation.diagnoses if diagnosis.metric == "runaway_rate"
    ] == [(BASE, "never stops")]


def test_asr_loops_are_wholly_wrong_and_counted(tmp_path: Path) -> None:
    def circles(item: EvalItem) -> SystemOutput:
        if item.text == "yes":
            return SystemOutput(say(" ".join(["so sorry"] * 6), SPEAKERS[item.speaker]), stopped=True)
        return well(item)

    evaluation = evaluated(tmp_path, circles)
    figures = evaluation.estimates["model"]
    rows = evaluation.rows["model"]
    assert figures["wer"].mean == pytest.approx(3 / sum(row.words or 0 for row in rows)) and figures["wer"].n == 18
    assert figures["loop_rate"].mean == pytest.approx(3 / 18) and figures["loop_rate"].n == 18
    assert "ASR loops" in [diagnosis.name for diagnosis in evaluation.diagnoses if diagnosis.system == "model"]
    assert evaluation.to_json()["looped"]["model"] == 3
    page = evaluation_page(evaluation)
    assert "the ASR loops" in page and "3 of 18" in page and "whose words all count as errors" in page


def test_a_codec_that_damages_speech_is_diagnosed(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    deaf = Recordings(ROUND_TRIP, RATE, "noise", lambda samples: rng.normal(0, 0.1, len(samples)).astype(np.float32))
    systems: list[System] = [Recordings(REAL, RATE), deaf, FakeSystem("model", well)]
    evaluation = evaluation_of(tmp_path, systems, {})
    assert [(diagnosis.system, diagnosis.metric) for diagnosis in evaluation.diagnoses] == [(ROUND_TRIP, "wer")]
    assert "the codec limits every model" in evaluation_page(evaluation)


def test_recordings_that_do_not_exist_are_not_compared_with(tmp_path: Path) -> None:
    whole = make_eval_set(tmp_path)
    spoken = replace(whole, items=tuple(replace(item, recording=None) for item in whole.items))
    systems: list[System] = [Recordings(REAL, RATE), FakeSystem("model", speaks_the_prompt)]
    found = evaluate_systems(spoken, systems, tmp_path / "out")
    [unintelligible] = [one for one in found.diagnoses if one.metric == "wer"]
    assert "word errors" in unintelligible.text and "real recordings" not in unintelligible.text
    assert "real recordings have 0%" in next(
        one.text for one in evaluate_systems(whole, systems, tmp_path / "real").diagnoses if one.metric == "wer"
    )


def test_one_item_gives_no_verdict(tmp_path: Path) -> None:
    whole = make_eval_set(tmp_path)
    few = replace(whole, items=whole.items[:1])
    found = evaluate_systems(few, [FakeSystem(BASE, well), FakeSystem("model", poorly)], tmp_path / "out")
    assert [one.name for one in found.diagnoses if one.metric == "differences"] == ["too few items"]
    assert not any(change.excludes_zero for change in found.differences["model"].values())
    assert "give 6 or more" in evaluation_page(found)


def test_one_reason_for_several_metrics_is_said_once(tmp_path: Path) -> None:
    scorers = fake_scorers(asr="base cannot be downloaded: name a folder")
    found = evaluate_systems(make_eval_set(tmp_path), [FakeSystem("model", well)], tmp_path / "out", scorers=scorers)
    [told] = [sentence for sentence in found.unmeasured() if "downloaded" in sentence]
    assert told.startswith("word errors, character errors, ASR loops") and told.count("downloaded") == 1
