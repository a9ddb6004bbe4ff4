"""Models that are wrong in a known way: each is caught by the column meant for it, and named in the report."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from myna.evaluate.items import EvalItem, samples_of
from myna.evaluate.metrics import BY_KEY
from myna.evaluate.pipeline import score_systems
from myna.evaluate.report import page
from myna.evaluate.summary import Summary, summarise
from myna.evaluate.systems import BASE, REAL, ROUND_TRIP, Recordings, System, SystemOutput
from tests.evaluate.speech import RATE, SPEAKERS, Puppet, ears, plan, poorly, say, well


def never_stops(task: EvalItem) -> SystemOutput:
    babble = say(task.text + " mo na li ta ru se ko vi da pu ge fo" * 20, SPEAKERS[task.speaker], rest=2)
    return SystemOutput(babble[: int(task.cap * RATE)], stopped=False)


def stops_at_once(_: EvalItem) -> SystemOutput:
    return SystemOutput(np.zeros(0, np.float32), stopped=True)


def stops_after_a_syllable(task: EvalItem) -> SystemOutput:
    return SystemOutput(say(task.text[:2], SPEAKERS[task.speaker]), stopped=True)


def speaks_the_prompt(task: EvalItem) -> SystemOutput:
    return SystemOutput(say(task.references[0].text, SPEAKERS[task.speaker], rest=4), stopped=True)


def swaps_speakers(task: EvalItem) -> SystemOutput:
    names = list(SPEAKERS)
    return SystemOutput(say(task.text, SPEAKERS[names[names.index(task.speaker) - 1]], rest=2), stopped=True)


def is_noise(task: EvalItem) -> SystemOutput:
    dice = np.random.default_rng(zlib.crc32(task.id.encode()))
    length = int(task.expected_seconds * RATE)
    return SystemOutput(dice.normal(0, 0.1, length).clip(-1, 1).astype(np.float32), stopped=True)


def is_silent(task: EvalItem) -> SystemOutput:
    return SystemOutput(np.zeros(int(task.expected_seconds * RATE), np.float32), stopped=True)


def copies(task: EvalItem) -> SystemOutput:
    """What training on pairs of one and the same clip comes to: the loss is as good as nothing."""
    return SystemOutput(samples_of(task.references[0], RATE), stopped=True)


def stutters(task: EvalItem) -> SystemOutput:
    return SystemOutput(say(f"{task.text} {task.text} {task.text}", SPEAKERS[task.speaker], rest=2), stopped=True)


def evaluated(folder: Path, voice: Callable[[EvalItem], SystemOutput], **about: float) -> Summary:
    codec = Recordings(ROUND_TRIP, RATE, "eight bits", lambda samples: np.round(samples * 128) / np.float32(128))
    model = Puppet("model", voice, about)
    systems: list[System] = [Recordings(REAL, RATE), codec, model, Puppet(BASE, poorly)]
    judged = score_systems(plan(folder), systems, ears(), folder / "out")
    return summarise(judged, ears(), "model", {system.name: system.about for system in systems})


PLANTED: list[tuple[Callable[[EvalItem], SystemOutput], str, str, dict[str, float]]] = [
    (never_stops, "never stops", "runaway_rate", {"runaway_rate": 1.0, "stop_rate": 0.0}),
    (stops_at_once, "stops at once", "early_rate", {"early_rate": 1.0, "stop_rate": 1.0, "silent_rate": 0.0}),
    (stops_after_a_syllable, "stops at once", "early_rate", {"early_rate": 15 / 18, "silent_rate": 0.0}),
    (speaks_the_prompt, "speaks the prompt", "prompt_rate", {"prompt_rate": 1.0, "copy_rate": 0.0}),
    (swaps_speakers, "another's voice", "similarity_rank1", {"similarity_rank1": 0.0, "wer": 0.0}),
    (is_noise, "noise", "voiced", {"voiced": 0.0, "silent_rate": 0.0}),
    (is_silent, "silence", "silent_rate", {"silent_rate": 1.0, "early_rate": 0.0, "wer": 1.0}),
    (copies, "copies the reference", "copy_rate", {"copy_rate": 1.0}),
    (stutters, "repeats itself", "repetition_rate", {"repetition_rate": 1.0}),
]


@pytest.mark.parametrize(("voice", "name", "column", "figures"), PLANTED, ids=[one[0].__name__ for one in PLANTED])
def test_a_planted_fault_is_caught_by_its_column_and_named(
    tmp_path: Path, voice: Callable[[EvalItem], SystemOutput], name: str, column: str, figures: dict[str, float]
) -> None:
    summary = evaluated(tmp_path, voice)
    fault = next((one for one in summary.faults if one.system == "model" and one.name == name), None)
    assert fault is not None, [one.name for one in summary.faults]
    assert fault.column == column and fault.lines
    for key, mean in figures.items():
        assert summary.systems["model"][key].mean == pytest.approx(mean, abs=0.02), key
    shown = page(summary, tmp_path / "out")
    assert f"model: {name}".replace("'", "&#x27;") in shown and f"Seen in: {BY_KEY[column].title}" in shown


def test_a_good_model_has_no_fault_and_is_better_than_its_base(tmp_path: Path) -> None:
    summary = evaluated(tmp_path, well)
    assert [fault.name for fault in summary.faults if fault.system == "model"] == []
    assert "None of the faults" not in page(summary, tmp_path / "out") or not summary.faults
    model, real, delta = summary.systems["model"], summary.systems[REAL], summary.deltas["model"]
    assert model["wer"].mean == 0.0 and model["stop_rate"].mean == 1.0 and model["similarity_rank1"].mean == 1.0
    assert real["stop_rate"].n == 0, "recordings have no end to find"
    assert real["pitch"].mean == pytest.approx(np.mean(list(SPEAKERS.values())), rel=0.03)
    assert model["pitch"].mean == pytest.approx(1.01 * (real["pitch"].mean or 0), rel=0.02)
    for key, sign in (("wer", -1), ("cer", -1), ("similarity", 1)):
        assert delta[key].excludes_zero and (delta[key].mean or 0) * sign > 0


def test_a_model_that_is_its_base_is_told(tmp_path: Path) -> None:
    summary = evaluated(tmp_path, poorly)
    fault = next(one for one in summary.faults if one.system == "model" and one.name == "equal to the base")
    assert len(fault.lines) == len(summary.judged.plan.tasks)
    assert summary.deltas["model"]["wer"].to_json() == {"mean": 0.0, "low": 0.0, "high": 0.0, "n": 18}
    assert "exactly as the base does" in page(summary, tmp_path / "out")


def test_a_model_that_cannot_be_told_from_its_base_is_told(tmp_path: Path) -> None:
    """Other sounds, the same words and voice."""
    summary = evaluated(tmp_path, lambda task: SystemOutput(0.9 * poorly(task).samples, stopped=True))
    names = [fault.name for fault in summary.faults if fault.system == "model"]
    assert "no better than the base" in names and "equal to the base" not in names


def test_a_copy_is_told_however_small_its_loss(tmp_path: Path) -> None:
    summary = evaluated(tmp_path, copies, loss=0.0031, base_loss=4.2)
    faults = {fault.name: fault for fault in summary.faults if fault.system == "model"}
    assert "0.0031 does not show it" in faults["copies the reference"].text
    assert "speaks the prompt" in faults, "the reference's words are heard too"
    assert "word errors" in faults["the loss misleads"].text
    shown = page(summary, tmp_path / "out")
    assert "0.0031 does not show it" in shown and "the loss misleads" in shown


def test_the_base_itself_is_looked_at(tmp_path: Path) -> None:
    systems: list[System] = [Recordings(REAL, RATE), Puppet("model", well), Puppet(BASE, never_stops)]
    summary = summarise(score_systems(plan(tmp_path), systems, ears(), tmp_path / "out"), ears(), "model", {})
    assert [(fault.system, fault.name) for fault in summary.faults if fault.column == "runaway_rate"] == [
        (BASE, "never stops")
    ]


def test_loops_of_the_recogniser_are_marked_and_not_averaged_in(tmp_path: Path) -> None:
    def circles(task: EvalItem) -> SystemOutput:
        if task.text == "yes":
            return SystemOutput(say(" ".join(["so sorry"] * 6), SPEAKERS[task.speaker]), stopped=True)
        return well(task)

    summary = evaluated(tmp_path, circles)
    figures = summary.systems["model"]
    assert figures["wer"].mean == 0.0 and figures["wer"].n == 15
    assert figures["loop_rate"].mean == pytest.approx(3 / 18) and figures["loop_rate"].n == 18
    assert "not understood" in [fault.name for fault in summary.faults if fault.system == "model"]
    assert "the recogniser went round in circles" in page(summary, tmp_path / "out")


def test_a_codec_that_damages_speech_is_told(tmp_path: Path) -> None:
    dice = np.random.default_rng(0)
    deaf = Recordings(ROUND_TRIP, RATE, "noise", lambda samples: dice.normal(0, 0.1, len(samples)).astype(np.float32))
    systems: list[System] = [Recordings(REAL, RATE), deaf, Puppet("model", well)]
    summary = summarise(score_systems(plan(tmp_path), systems, ears(), tmp_path / "out"), ears(), "model", {})
    assert [(fault.system, fault.column) for fault in summary.faults] == [(ROUND_TRIP, "wer")]
    assert "the codec limits every model" in page(summary, tmp_path / "out")
