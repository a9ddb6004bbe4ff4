"""The grammar of answers: what it lets through can be read, and what is written as people write it is let through."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myna.data.pronunciation.assessment import SCORES, Answer, UnreadableError, read_answer
from myna.data.pronunciation.grammar import KEYS, MOST_BLANKS, AnswerGrammar, At

GRAMMAR = AnswerGrammar()
PLAIN = {"accuracy": 8, "fluency": 9, "prosodic": 9, "total": 8, "text": "we call", "phones": "W IY"}


def after(text: str, state: At | None = GRAMMAR.start) -> At | None:
    for byte in text.encode("utf-8", "surrogatepass"):
        if state is None:
            return None
        state = GRAMMAR.step(state, byte)
    return state


def is_answer(text: str) -> bool:
    state = after(text)
    return state is not None and GRAMMAR.closing(state) is None


def closed(state: At) -> str:
    said = bytearray()
    while (byte := GRAMMAR.closing(state)) is not None:
        said.append(byte)
        following = GRAMMAR.step(state, byte)
        assert following is not None, "the way out is not open"
        state = following
    return said.decode()


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
    answer = Answer(accuracy=a, fluency=b, prosodic=c, total=d, text=text, phones=phones)
    if "e-" not in answer.to_json().split('"text"')[0]:
        assert is_answer(answer.to_json())


@given(st.randoms(use_true_random=False), st.integers(0, 120))
def test_every_walk_can_be_closed_and_read(dice: random.Random, steps: int) -> None:
    """Dice that know nothing of JSON; control characters and escapes among what they try."""
    state, walked = GRAMMAR.start, bytearray()
    for _ in range(steps):
        odd = dice.random() < 0.3
        tried = [*b'\\"u0dD8cC,}{:.', *(range(256) if not odd else ())]
        ways = [byte for byte in tried if GRAMMAR.step(state, byte) is not None]
        if not ways:
            break
        walked.append(dice.choice(ways))
        following = GRAMMAR.step(state, walked[-1])
        assert following is not None
        state = following
    text = walked.decode("utf-8", "replace") + closed(state)
    read_answer(text)


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
    with pytest.raises(UnreadableError):
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
    with pytest.raises(UnreadableError):
        read_answer(text)
    assert not is_answer(text)


def test_blanks_come_to_an_end() -> None:
    assert after("{" + MOST_BLANKS * " ") is not None
    assert after("{" + MOST_BLANKS * " " + " ") is None


def test_the_shortest_answer_is_in_the_middle() -> None:
    assert read_answer(closed(GRAMMAR.start)).accuracy == 5
