"""What an answer may look like, byte by byte: JSON that `read_answer` reads, and nothing else.

A model that is held to it says whatever it would say anyway, as long as that is an answer. Keys may come in any order,
with blanks where JSON has them. Only what nobody writes is left out, though it could be read: scores with an exponent
or a minus, names of keys in escapes, and more than a few blanks in a row, which is how models lose themselves.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, Protocol

from myna.data.pronunciation.assessment import SCORES, Answer

KEYS = tuple(Answer.model_fields)
BLANKS = b" \t\n\r"
MOST_BLANKS = 16
MIDDLE = ord("5")
"""The score that is given for want of another, as for an answer that gives none."""
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})')
_UNFINISHED_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{0,3})?")


class Grammar(Protocol):
    """A language of bytes, as an automaton whose states are hashable and can all come to an end."""

    @property
    def start(self) -> Any: ...

    def step(self, state: Any, byte: int) -> Any:
        """The state after one more byte; None where that byte may not come."""

    def closing(self, state: Any) -> int | None:
        """The next byte on the shortest way to an end; None where there is one."""


class At(NamedTuple):
    """Where in an answer we are."""

    rule: str
    left: tuple[str, ...] = KEYS
    """Keys that are still to come."""
    key: str = ""
    """The key whose value it is."""
    inside: str = ""
    """What is known of the name, the number or the escape that is being written."""
    blanks: int = 0
    """In a row, up to here."""


class AnswerGrammar:
    start = At("open")

    def step(self, state: At, byte: int) -> At | None:
        if byte in BLANKS and state.rule not in ("naming", "string"):
            if state.rule == "number":
                return At("after", state.left, blanks=1) if _is_whole(state.inside) else None
            return state._replace(blanks=state.blanks + 1) if state.blanks < MOST_BLANKS else None
        state = state._replace(blanks=0)
        match state.rule:
            case "open":
                return state._replace(rule="name") if byte == ord("{") else None
            case "name":
                return state._replace(rule="naming") if byte == ord('"') else None
            case "naming":
                return _naming(state, chr(byte))
            case "colon":
                return state._replace(rule="value") if byte == ord(":") else None
            case "value":
                return _value(state, chr(byte))
            case "number":
                return _number(state, chr(byte))
            case "string":
                return _string(state, byte)
            case "after":
                return _after(state, chr(byte))
        return None

    def closing(self, state: At) -> int | None:
        match state.rule:
            case "open":
                return ord("{")
            case "name":
                return ord('"')
            case "naming":
                name = next(key for key in state.left if key.startswith(state.inside))
                return ord(f'{name}"'[len(state.inside)])
            case "colon":
                return ord(":")
            case "value":
                return MIDDLE if state.key in SCORES else ord('"')
            case "number" if not _is_whole(state.inside):
                return ord("0")
            case "string":
                return {"": ord('"'), "\\": ord("/")}.get(state.inside, ord("0"))
            case "number" | "after":
                return ord("," if state.left else "}")
        return None


def _naming(state: At, letter: str) -> At | None:
    if letter == '"' and state.inside in state.left:
        left = tuple(key for key in state.left if key != state.inside)
        return At("colon", left, key=state.inside)
    longer = state.inside + letter
    return state._replace(inside=longer) if any(key.startswith(longer) for key in state.left) else None


def _value(state: At, letter: str) -> At | None:
    if state.key in SCORES:
        return state._replace(rule="number", inside=letter) if letter in "0123456789" else None
    return state._replace(rule="string") if letter == '"' else None


def _number(state: At, letter: str) -> At | None:
    """From 0 to 10. How many digits a fraction has does not matter, so only its last one is kept."""
    known = state.inside
    if _is_whole(known) and letter in ",}":
        return _after(state, letter)
    whole, point, _ = known.partition(".")
    if letter == "." and not point:
        return state._replace(inside=f"{whole}.")
    if point and letter in ("0" if whole == "10" else "0123456789"):
        return state._replace(inside=f"{whole}.0")
    if known == "1" and letter == "0":
        return state._replace(inside="10")
    return None


def _is_whole(number: str) -> bool:
    return not number.endswith(".")


def _string(state: At, byte: int) -> At | None:
    if not state.inside:
        if byte == ord('"'):
            return At("after", state.left)
        return None if byte < ord(" ") else state._replace(inside="\\" if byte == ord("\\") else "")
    longer = state.inside + chr(byte)
    if _ESCAPE.fullmatch(longer):
        return state._replace(inside="")
    # Which digits they are does not matter, only how many.
    return state._replace(inside=re.sub("[0-9a-fA-F]", "0", longer)) if _UNFINISHED_ESCAPE.fullmatch(longer) else None


def _after(state: At, letter: str) -> At | None:
    if letter == "," and state.left:
        return At("name", state.left)
    return At("end", ()) if letter == "}" and not state.left else None
