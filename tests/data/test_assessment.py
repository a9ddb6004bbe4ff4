"""Answers of pronunciation assessments: one way of writing, strict parsing, and counts of unreadable ones."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myna.data.pronunciation import (
    SCORES,
    AnswerFormatError,
    AssessmentAnswer,
    ParsedAnswers,
    read_answer,
    read_assessment,
)

GOOD = '{"phones": "W IY K AO L", "text": "we call", "accuracy": 8, "fluency": 9.5, "prosodic": 9, "total": 8}'

scores = st.integers(0, 10) | st.floats(0, 10)
answers = st.builds(
    AssessmentAnswer,
    **{name: scores.map(float) for name in SCORES},
    text=st.text(),
    phones=st.lists(st.sampled_from(["AH", "B", "<UNK>"])).map(" ".join),
)


@given(answers)
def test_what_is_written_is_read_back(answer: AssessmentAnswer) -> None:
    line = answer.to_json()
    assert read_answer(line) == answer
    assert read_answer(line).to_json() == line and "\n" not in line


@given(st.text() | answers.map(AssessmentAnswer.to_json), st.data())
def test_nothing_but_an_answer_is_read_and_nothing_else_is_raised(line: str, data: st.DataObject) -> None:
    cut = line[: data.draw(st.integers(0, len(line)))]
    for said in (line, cut, cut + line):
        try:
            answer = read_answer(said)
        except AnswerFormatError as error:
            assert error.reason
        else:
            assert json.loads(said) == json.loads(answer.to_json())


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("", "not JSON"),
        ("Here it is: " + GOOD, "not JSON"),
        (GOOD + GOOD, "not JSON"),
        (GOOD[:-1], "not JSON"),
        ("[" * 100_000, "not JSON"),
        (GOOD.replace("9.5", "NaN"), "not JSON"),
        ("[8, 9]", "no object"),
        (GOOD.replace(', "total": 8', ""), "other keys"),
        (GOOD.replace("{", '{"mood": 3, '), "other keys"),
        (GOOD.replace("{", '{"total": 8, '), "a key twice"),
        (GOOD.replace("9.5", "10.5"), "no score from 0 to 10"),
        (GOOD.replace("9.5", "-1"), "no score from 0 to 10"),
        (GOOD.replace("9.5", '"9"'), "no score from 0 to 10"),
        (GOOD.replace("9.5", "true"), "no score from 0 to 10"),
        (GOOD.replace('"we call"', "null"), "no text"),
    ],
)
def test_what_is_no_answer_is_told_why(line: str, reason: str) -> None:
    with pytest.raises(AnswerFormatError) as caught:
        read_answer(line)
    assert caught.value.reason == reason


def test_unreadable_answers_are_counted_and_keep_their_place() -> None:
    readings = ParsedAnswers.of(["no", GOOD, "[]", "nor"])
    assert [answer is None for answer in readings.answers] == [True, False, True, True]
    assert readings.unreadable == {"not JSON": 2, "no object": 1}


def sentence(**changed: Any) -> dict[str, Any]:
    word = {"text": "bear", "accuracy": 7, "phones": "B EH0 R", "phone_scores": [2, 0.4, 1], "pronounced": ["B", "AE1"]}
    scores: dict[str, Any] = {"accuracy": 8, "fluency": 9, "prosodic": 9, "total": 8.5}
    return {"text": "bear", "scores": scores, "words": [word]} | changed


def test_an_answer_says_what_was_heard_without_stress() -> None:
    assessment = read_assessment(sentence())
    assert assessment.phones == ("B", "EH", "R") and assessment.pronounced == ("B", "AE")
    assert assessment.answer.to_json() == (
        '{"phones": "B AE", "text": "bear", "accuracy": 8, "fluency": 9, "prosodic": 9, "total": 8.5}'
    )


def test_what_was_meant_was_heard_where_nothing_else_is_said() -> None:
    assert read_assessment(sentence(words=[{"text": "bear", "phones": ["B", "EH", "R"]}])).pronounced == (
        "B",
        "EH",
        "R",
    )


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"scores": {"accuracy": 8, "fluency": 9, "prosodic": 9}}, "there is no `scores.total`"),
        ({"scores": {"accuracy": 11, "fluency": 9, "prosodic": 9, "total": 8}}, "`scores.accuracy` is 11"),
        ({"scores": {"accuracy": "8", "fluency": 9, "prosodic": 9, "total": 8}}, "`scores.accuracy` is '8'"),
        ({"words": [{"text": "bear", "phones": "B", "phone_scores": [3]}]}, "`words.1.phone_scores.1` is 3"),
        ({"words": [{"text": "bear", "phones": "B", "phone_scores": [1, 2]}]}, "2 phone scores for 1 phones"),
        ({"words": [{"text": "bear", "phones": [7]}]}, "`words.1.phones.1` is 7"),
        ({"words": [{"text": "bear", "acuracy": 7}]}, "`words.1.acuracy` is 7"),
    ],
)
def test_a_score_that_is_wrong_or_missing_is_named(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_assessment(sentence(**changed))
    assert told in str(caught.value)
