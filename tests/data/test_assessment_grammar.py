"""Grammar of answers: every accepted text can be read, and the usual ways of writing an answer are accepted."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from myna.data.pronunciation import (
    KEYS,
    MAX_BLANKS,
    MIDDLE_SCORE,
    SCORES,
    AnswerFormatError,
    AssessmentAnswer,
    answer_grammar,
    read_answer,
)
from myna.models.phi4.generate import _closing_bytes

MATCHER = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(answer_grammar()))
PLAIN = {"accuracy": 8, "fluency": 9, "prosodic": 9, "total": 8, "text": "we call", "phones": "W IY"}


def after(text: str) -> Any:
    """Return the grammar's state after a text; None if the text is not allowed."""
    matcher = MATCHER.deep_copy()
    content = list(text.encode("utf-8", "surrogatepass"))
    return matcher if matcher.try_consume_tokens(content) == len(content) else None


def is_answer(text: str) -> bool:
    matcher = after(text)
    return matcher is not None and matcher.is_accepting()


scores = st.one_of(st.integers(0, 10), st.floats(0, 10).map(lambda score: round(score, 3)))
said = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
trees = st.fixed_dictionaries(
    {key: scores if key in SCORES else said for key in KEYS},
).flatmap(lambda tree: st.permutations(list(tree.items())).map(dict))


@given(trees, st.sampled_from([None, 1, 2]), st.booleans(), st.sampled_from(["", " ", "\n"]))
def test_an_answer_that_can_be_read_is_let_through(tree: Any, indent: int | None, ascii: bool, blank: str) -> None:
    text = blank + json.dumps(tree, indent=indent, ensure_ascii=ascii) + blank
    read_answer(text)
    if "e" not in json.dumps([tree[key] for key in SCORES]):
        assert is_answer(text)


@given(scores, scores, scores, scores, said, said)
def test_the_one_way_to_write_it_is_let_through(a: float, b: float, c: float, d: float, text: str, phones: str) -> None:
    answer = AssessmentAnswer(accuracy=a, fluency=b, prosodic=c, total=d, text=text, phones=phones)
    if "e-" not in answer.to_json().split('"text"')[0]:
        assert is_answer(answer.to_json())


@given(st.randoms(use_true_random=False), st.integers(0, 120))
@settings(deadline=None)
def test_every_walk_can_be_closed_and_read(rng: random.Random, steps: int) -> None:
    """Random bytes that know nothing of JSON, control characters and escapes among them."""
    matcher, walked = MATCHER.deep_copy(), bytearray()
    for _ in range(steps):
        tried = [*b'\\"u0dD8cC,}{:.', *(range(256) if rng.random() >= 0.3 else ())]
        allowed = [byte for byte in tried if matcher.validate_tokens([byte])]
        if not allowed:
            break
        walked.append(rng.choice(allowed))
        assert matcher.consume_token(walked[-1])
    read_answer((walked + _closing_bytes(matcher)).decode())


@pytest.mark.parametrize(
    "changed",
    [
        {"accuracy": 11},
        {"accuracy": -1},
        {"accuracy": "8"},
        {"accuracy": None},
        {"fluency": 10.5},
        {"text": 8},
        {"text": ["we"]},
        {"words": "we"},
    ],
)
def test_what_is_no_answer_is_not(changed: dict[str, Any]) -> None:
    assert is_answer(json.dumps(PLAIN))
    text = json.dumps(PLAIN | changed)
    with pytest.raises(AnswerFormatError):
        read_answer(text)
    assert not is_answer(text)


@pytest.mark.parametrize("key", KEYS)
def test_each_key_comes_once(key: str) -> None:
    assert not is_answer(json.dumps({name: value for name, value in PLAIN.items() if name != key}))
    assert not is_answer(json.dumps(PLAIN)[:-1] + f', "{key}": {json.dumps(PLAIN[key])}}}')


@pytest.mark.parametrize("number", ["0", "10", "9.75", "0.0", "10.00"])
def test_scores(number: str) -> None:
    assert is_answer(json.dumps(PLAIN).replace(": 8", f": {number}", 1))


@pytest.mark.parametrize("number", ["11", "100", "10.1", "01", "5.", ".5", "1e1", "+5", "-0", "NaN", "true", ""])
def test_no_scores(number: str) -> None:
    assert not is_answer(json.dumps(PLAIN).replace(": 8", f": {number}", 1))


@pytest.mark.parametrize("escape", [r"\n", r"\"", r"\\", r"\/", r"\u00e9", r"\u00E9", r"\uD83D\uDE00"])
def test_escapes(escape: str) -> None:
    text = json.dumps(PLAIN).replace("we call", f"we {escape} call")
    read_answer(text)
    assert is_answer(text)


@pytest.mark.parametrize("escape", [r"\x41", r"\U0041", r"\B", r"\u12", r"\u12g4", "\n", "\0"])
def test_no_escapes(escape: str) -> None:
    text = json.dumps(PLAIN).replace("we call", f"we {escape} call")
    with pytest.raises(AnswerFormatError):
        read_answer(text)
    assert not is_answer(text)


def test_blanks_come_to_an_end() -> None:
    assert after("{" + MAX_BLANKS * " ") is not None
    assert after("{" + MAX_BLANKS * " " + " ") is None


def test_the_shortest_answer_is_in_the_middle() -> None:
    assert read_answer(_closing_bytes(MATCHER).decode()).accuracy == MIDDLE_SCORE
