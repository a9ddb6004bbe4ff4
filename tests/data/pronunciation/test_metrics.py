"""Figures of pronunciation: right where they can be worked out by hand, and honest about what cannot be read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from myna.data.pronunciation.assessment import SCORES, Assessment, read_assessment
from myna.data.pronunciation.metrics import F1, PAPER, PHONES, WORDS, canonical, correlation, mistakes, score_answers
from myna.evaluate.wer import edit_distance


def learner(number: int, heard: str = "T OW K", text: str = "tok tok") -> Assessment:
    scores = {name: (number * (place + 3)) % 11 for place, name in enumerate(SCORES)}
    word: dict[str, Any] = {"text": "tok", "phones": "T OW K", "heard": heard}
    return read_assessment({"text": text, "scores": scores, "words": [word]})


DUE = [learner(n, "S OW K" if n % 2 else "T OW K") for n in range(8)]


def test_whoever_says_what_was_due_is_right_in_everything() -> None:
    judged = score_answers(DUE, [each.answer.to_json() for each in DUE])
    assert judged.unreadable == {} and judged.utterances == 8
    for name in (*SCORES, F1):
        assert judged.figures[name].mean == pytest.approx(1.0)
    assert judged.figures[WORDS].mean == judged.figures[PHONES].mean == 0.0


def test_whoever_hears_no_mistake_is_told_so() -> None:
    judged = score_answers(DUE, canonical(DUE))
    assert judged.figures[F1].mean == 0.0
    assert judged.figures[PHONES].mean == pytest.approx(4 / 24), "four of eight have one wrong phone of three"


def test_an_answer_that_cannot_be_read_counts_against_the_model() -> None:
    said = [each.answer.to_json() for each in DUE]
    said[1], said[3] = "It was fine.", said[3][:-1]
    judged = score_answers(DUE, said)
    assert judged.unreadable == {"not JSON": 2}
    assert judged.figures[WORDS].mean == pytest.approx(4 / 16)
    assert judged.figures[PHONES].mean == pytest.approx(6 / 24)
    assert judged.figures[F1].mean == pytest.approx(2 * 2 / (4 + 2)), "two of the four mistakes are found"
    accuracy = judged.figures["accuracy"]
    assert accuracy.mean is not None and accuracy.mean < 1


def test_figures_have_the_names_of_the_paper() -> None:
    assert score_answers(DUE, canonical(DUE)).figures.keys() == PAPER.keys()


def test_the_papers_figures_stand_only_beside_the_same_recordings() -> None:
    judged, deaf = score_answers(DUE, [each.answer.to_json() for each in DUE]), score_answers(DUE, canonical(DUE))
    beside, alone = ({row[0]: row for row in judged.table(deaf, published=published)} for published in (True, False))
    assert beside["fluency"] == ("fluency", "1.000 (1.000 to 1.000)", "", "0.727")
    assert beside[PHONES][2].startswith("0.167") and alone[PHONES][3] == ""


def test_a_correlation_is_numpys_and_lies_in_its_interval() -> None:
    dice = np.random.default_rng(0)
    one = dice.normal(size=200)
    pairs = list(zip(one, one + dice.normal(size=200), strict=True))
    got = correlation(pairs)
    assert got.mean == pytest.approx(np.corrcoef(np.array(pairs).T)[0, 1])
    assert got.low is not None and got.high is not None and got.mean is not None
    assert got.low < got.mean < got.high and got.high - got.low < 0.25


def test_what_never_varies_correlates_with_nothing() -> None:
    assert correlation([(1.0, 5.0), (2.0, 5.0)]).mean is None
    assert correlation([]).mean is None


def test_mistakes_are_those_of_the_phones_that_were_meant() -> None:
    assert mistakes(["B", "EH", "R"], ["B", "EH", "L", "R"]) == (False, False, False), "nothing that was meant is wrong"
    assert mistakes(["B", "EH", "R"], ["B", "R"]) == (False, True, False)
    assert mistakes(["B", "EH", "R"], ["P", "EH"]) == (True, False, True)
    assert mistakes([], ["B"]) == ()


phones = st.lists(st.sampled_from("ABC"), max_size=7)


@given(phones, phones)
def test_there_are_never_more_mistakes_than_errors(meant: list[str], heard: list[str]) -> None:
    wrong = sum(mistakes(meant, heard))
    assert wrong <= edit_distance(meant, heard) <= wrong + len(heard)
    assert (wrong == 0) == (edit_distance(meant, heard) == max(0, len(heard) - len(meant)))
