"""Answers of listeners: kept apart, added up, and how sure their sum is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from myna.core.errors import DataError
from myna.core.statistics import share_interval
from myna.evaluate.listening import (
    TIE,
    ListenerAnswers,
    ListeningTrial,
    PreferenceCount,
    aggregate_preferences,
    load_listener_answers,
    parse_listener_answers,
    save_listener_answers,
)

TRIALS = (
    ListeningTrial("t1", "item-1", "Yes.", ("s1", "s2"), ("a", "b")),
    ListeningTrial("t2", "item-2", "No.", ("s3", "s4"), ("b", "a")),
    ListeningTrial("t3", "item-1", "Yes.", ("s1", "s5"), ("a", "c")),
)
ANNA, BEN = "anna0000", "ben00000"


def answers(**choices: str) -> dict[str, tuple[str, str]]:
    return {trial: (choice, "2026-11-15T10:00:00.000Z") for trial, choice in choices.items()}


def answered(wins: tuple[int, int], ties: int) -> PreferenceCount:
    """The answers of one listener, each to another item."""
    outcomes = [0] * wins[0] + [1] * wins[1] + [2] * ties
    return PreferenceCount(("a", "b"), np.eye(3)[outcomes].reshape(-1, 1, 3))


@pytest.mark.parametrize(
    ("wins", "preferred"), [((9, 1), "a"), ((1, 9), "b"), ((6, 4), None), ((0, 0), None), ((5, 0), None), ((6, 0), "a")]
)
def test_a_preference_needs_an_interval_beyond_one_half(wins: tuple[int, int], preferred: str | None) -> None:
    count = answered(wins, ties=2)
    assert count.preferred == preferred
    assert (count.p_value < 0.05) == (preferred is not None)
    assert json.loads(json.dumps(count.to_json()))["preferred"] == preferred


def test_ten_answers_to_one_item_are_not_ten_items() -> None:
    """Items differ, and no system is better: of a hundred tests about five may find a preference."""
    random, tests, found, pooled = np.random.default_rng(0), 150, 0, 0
    for _ in range(tests):
        share = np.clip(0.5 + random.normal(0, 0.25, 20), 0, 1)
        won = random.random((20, 10)) < share[:, None]
        count = PreferenceCount(("a", "b"), np.stack([won, ~won, np.zeros_like(won)], axis=2).astype(float))
        assert (count.p_value < 0.05) == (count.preferred is not None)
        found += count.preferred is not None
        low, high = share_interval(count.wins[0], count.decided)
        pooled += not low <= 0.5 <= high
    assert 0 < found <= 0.07 * tests and pooled > 0.2 * tests


def test_an_unlike_listener_widens_the_interval() -> None:
    won = np.ones((20, 4), bool)
    won[:, 3] = False
    alike = np.zeros((20, 4), bool)
    alike[:15] = True
    one, other = (
        PreferenceCount(("a", "b"), np.stack([of, ~of, np.zeros_like(of)], axis=2).astype(float)) for of in (won, alike)
    )
    assert one.wins == other.wins == (60, 20) and one.preferred is None and other.preferred == "a"


def test_answers_add_up_in_any_order_of_offering() -> None:
    anna, ben = (
        ListenerAnswers(ANNA, "Anna", answers(t1="s1", t2="s3", t3=TIE)),
        ListenerAnswers(BEN, "", answers(t1="s2", t2="s4")),
    )
    found = aggregate_preferences(TRIALS, [anna, ben], ["a", "b", "c"])
    assert [(pair.systems, pair.wins, pair.ties) for pair in found.pairs] == [
        (("a", "b"), (2, 2), 0),
        (("a", "c"), (0, 0), 1),
    ]
    assert [(line, count.systems, count.wins, count.ties) for line, count in found.items] == [
        ("item-1", ("a", "b"), (1, 1), 0),
        ("item-1", ("a", "c"), (0, 0), 1),
        ("item-2", ("a", "b"), (1, 1), 0),
    ]
    assert found.listeners == [("Anna", 3), (BEN, 2)] and found.not_counted == 0
    turned = aggregate_preferences(TRIALS, [anna], ["c", "b", "a"])
    assert turned.pairs[0].systems == ("b", "a") and turned.pairs[0].wins == (1, 1)


def test_answers_about_other_sounds_are_counted_apart() -> None:
    found = aggregate_preferences(
        TRIALS, [ListenerAnswers(ANNA, "Anna", answers(t1="s3", t9="s1", t2="s4"))], ["a", "b", "c"]
    )
    assert found.not_counted == 2 and found.listeners == [("Anna", 1)] and found.pairs[0].wins == (1, 0)
    assert found.to_json()["answers_not_counted"] == 2


def test_listeners_do_not_overwrite_each_other(tmp_path: Path) -> None:
    save_listener_answers(tmp_path, ListenerAnswers(ANNA, "Anna", answers(t1="s1")))
    save_listener_answers(tmp_path, ListenerAnswers(BEN, "Anna", answers(t1="s2")))
    later = {"t1": (TIE, "2026-11-15T11:00:00.000Z"), "t2": ("s3", "2026-11-15T11:00:01.000Z")}
    save_listener_answers(tmp_path, ListenerAnswers(ANNA, "Anna M.", later))
    save_listener_answers(tmp_path, ListenerAnswers(ANNA, "", {"t1": ("s2", "2026-11-15T09:00:00.000Z")}))
    anna, ben = load_listener_answers(tmp_path)
    assert anna == ListenerAnswers(ANNA, "Anna M.", later), "an older answer does not come back, and none is lost"
    assert ben == ListenerAnswers(BEN, "Anna", answers(t1="s2")), "two may have one name"
    assert not list((tmp_path / "preferences").glob(".*")), "nothing half-written is left"


def test_written_answers_are_read_again() -> None:
    listener = ListenerAnswers(ANNA, "Änna <b>", answers(t1="s1", t2=TIE))
    assert parse_listener_answers(json.dumps(listener.to_json()), "here") == listener


@pytest.mark.parametrize(
    "change",
    [
        {"format": "something else"},
        {"listener": {"id": "../../etc/passwd", "name": "x"}},
        {"listener": {"id": "UPPER123", "name": "x"}},
        {"listener": {"id": ANNA, "name": "x" * 1000}},
        {"listener": {"id": ANNA}},
        {"answers": {"t1": "s1"}},
        {"answers": {"t1": {"choice": 1, "at": "now"}}},
        {"answers": []},
    ],
)
def test_malformed_answers_are_refused(change: dict[str, Any]) -> None:
    whole = ListenerAnswers(ANNA, "Anna", answers(t1="s1")).to_json()
    with pytest.raises(DataError, match="the file sent") as caught:
        parse_listener_answers(json.dumps(whole | change), "the file sent")
    assert "myna compare" in caught.value.hint
    with pytest.raises(DataError):
        parse_listener_answers("[1, 2", "the file sent")
