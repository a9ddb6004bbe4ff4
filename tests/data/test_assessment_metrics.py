"""Pronunciation metrics against values worked out by hand, and unreadable answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rapidfuzz.distance.Levenshtein import distance

from myna.data.manifest import Utterance
from myna.data.pronunciation import (
    MISPRONUNCIATION_F1,
    PER,
    PUBLISHED_FIGURES,
    SCORES,
    WER,
    Assessment,
    assessment_table,
    canonical_answers,
    mispronounced,
    pearson_correlation,
    read_assessment,
    score_answers,
)


def learner(number: int, pronounced: str = "T OW K", text: str = "tok tok") -> Assessment:
    scores = {name: (number * (place + 3)) % 11 for place, name in enumerate(SCORES)}
    word: dict[str, Any] = {"text": "tok", "phones": "T OW K", "pronounced": pronounced}
    return read_assessment({"text": text, "scores": scores, "words": [word]})


DUE = [learner(n, "S OW K" if n % 2 else "T OW K") for n in range(8)]


def test_whoever_says_what_was_due_is_right_in_everything() -> None:
    judged = score_answers(DUE, [each.answer.to_json() for each in DUE])
    assert judged.unreadable == {} and judged.utterances == 8
    for name in (*SCORES, MISPRONUNCIATION_F1):
        assert judged.figures[name].mean == pytest.approx(1.0)
    assert judged.figures[WER].mean == judged.figures[PER].mean == 0.0


def test_whoever_hears_no_mistake_is_told_so() -> None:
    judged = score_answers(DUE, canonical_answers(DUE))
    assert judged.figures[MISPRONUNCIATION_F1].mean == 0.0
    assert judged.figures[PER].mean == pytest.approx(4 / 24), "four of eight have one wrong phone of three"


def test_an_answer_that_cannot_be_read_counts_against_the_model() -> None:
    said = [each.answer.to_json() for each in DUE]
    said[1], said[3] = "It was fine.", said[3][:-1]
    judged = score_answers(DUE, said)
    assert judged.unreadable == {"not JSON": 2}
    assert judged.figures[WER].mean == pytest.approx(4 / 16)
    assert judged.figures[PER].mean == pytest.approx(6 / 24)
    assert judged.figures[MISPRONUNCIATION_F1].mean == pytest.approx(2 * 2 / (4 + 2)), (
        "two of the four mistakes are found"
    )
    accuracy = judged.figures["accuracy"]
    assert accuracy.mean is not None and accuracy.mean < 1


def test_figures_have_the_names_of_the_paper() -> None:
    assert score_answers(DUE, canonical_answers(DUE)).figures.keys() == PUBLISHED_FIGURES.keys()


def test_the_papers_figures_stand_only_beside_the_same_recordings() -> None:
    def rows(corpus: str) -> dict[str, tuple[str, ...]]:
        lines = [
            Utterance(str(n), Path("a.wav"), ref.text, "s", extras={"corpus": corpus, "assessment": ref.model_dump()})
            for n, ref in enumerate(DUE)
        ]
        table = assessment_table(lines, {str(n): ref.answer.to_json() for n, ref in enumerate(DUE)})
        assert table is not None and table.title == "8 utterances, 0 answers that cannot be read"
        assert all(len(row) == len(table.header) for row in table.rows)
        return {row[0]: row for row in table.rows}

    published = rows("speechocean762")["fluency, correlation"]
    assert published[1:] == ("1.000 (1.000 to 1.000)", "right by definition", "right by definition", "0.727")
    alone = rows("another")[PER]
    assert alone[2].startswith("0.167") and alone[3].startswith("1.000") and len(alone) == 4


def test_other_answers_have_no_table() -> None:
    assert assessment_table([Utterance("a", Path("a.wav"), "hi", "s", extras={"answer": "hello"})], {"a": "hi"}) is None


def test_a_correlation_is_numpys_and_lies_in_its_interval() -> None:
    dice = np.random.default_rng(0)
    one = dice.normal(size=200)
    pairs = list(zip(one, one + dice.normal(size=200), strict=True))
    got = pearson_correlation(pairs)
    assert got.mean == pytest.approx(np.corrcoef(np.array(pairs).T)[0, 1])
    assert got.low is not None and got.high is not None and got.mean is not None
    assert got.low < got.mean < got.high and got.high - got.low < 0.25


def test_what_never_varies_correlates_with_nothing() -> None:
    assert pearson_correlation([(1.0, 5.0), (2.0, 5.0)]).mean is None
    assert pearson_correlation([]).mean is None


def test_mistakes_are_those_of_the_phones_that_were_meant() -> None:
    assert mispronounced(["B", "EH", "R"], ["B", "EH", "L", "R"]) == (False, False, False), (
        "nothing that was meant is wrong"
    )
    assert mispronounced(["B", "EH", "R"], ["B", "R"]) == (False, True, False)
    assert mispronounced(["B", "EH", "R"], ["P", "EH"]) == (True, False, True)
    assert mispronounced([], ["B"]) == ()


phones = st.lists(st.sampled_from("ABC"), max_size=7)


@given(phones, phones)
def test_there_are_never_more_mistakes_than_errors(canonical: list[str], pronounced: list[str]) -> None:
    wrong = sum(mispronounced(canonical, pronounced))
    assert wrong <= distance(canonical, pronounced) <= wrong + len(pronounced)
    assert (wrong == 0) == (distance(canonical, pronounced) == max(0, len(pronounced) - len(canonical)))
