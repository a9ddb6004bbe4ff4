"""Holding what a model says to a grammar: at each token, only those may be chosen that can still lead to its end.

A grammar reads bytes and a model says tokens, so each state of the grammar is asked once which tokens may come, all of
them at the same time, and what it says is kept. Tokens are weighed too: each is followed by so many others at least
until everything is closed, and where fewer are left than that, it may not come. So an answer ends before it is cut.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tokenizers.pre_tokenizers import ByteLevel

from myna.data.pronunciation.grammar import Grammar
from myna.errors import ModelError

REFUSED, UNKNOWN = -1, -2
"""In place of a state's number: that byte may not come there; nobody has asked yet."""
KEPT_MASKS = 1024
"""A mask has a byte for every token of the vocabulary."""

States = npt.NDArray[np.int32]


class Choices(NamedTuple):
    """What may be said in a state."""

    ids: npt.NDArray[np.int64]
    costs: npt.NDArray[np.int64]
    """Tokens that must follow each of them at least, the end included."""


class Vocabulary:
    """The bytes behind every token of a tokenizer; none behind a special one."""

    def __init__(self, tokenizer: Any) -> None:
        pieces = _pieces(tokenizer)
        self.size = len(pieces)
        self.lengths = np.array([len(piece) for piece in pieces], np.int32)
        self.bytes = np.zeros((self.size, int(self.lengths.max())), np.uint8)
        for id, piece in enumerate(pieces):
            self.bytes[id, : len(piece)] = np.frombuffer(piece, np.uint8)
        # The first of several that look alike.
        self.ids = {piece: id for id, piece in reversed(list(enumerate(pieces))) if piece}

    def first(self, text: bytes) -> bytes:
        """The longest token that a text begins with."""
        for length in range(min(len(text), self.bytes.shape[1]), 0, -1):
            if text[:length] in self.ids:
                return text[:length]
        raise ModelError(
            f"the tokenizer has no token for {text[:1]!r}, without which no answer can be closed",
            hint="leave --constrained out",
        )


class Constraint:
    """A grammar over the tokens of one tokenizer. `ends` are the tokens with which an answer is over."""

    def __init__(self, grammar: Grammar, vocabulary: Vocabulary, ends: Sequence[int]) -> None:
        self.grammar, self.vocabulary, self.ends = grammar, vocabulary, np.array(sorted(ends), np.int64)
        self._states: list[Any] = []
        self._numbers: dict[Any, int] = {}
        self._after = np.full((64, 256), UNKNOWN, np.int32)
        self._costs: dict[int, int] = {}
        self._choices: dict[int, Choices] = {}
        self._masks: dict[int, torch.Tensor] = {}
        self.start = self._number(grammar.start)

    @cached_property
    def fewest(self) -> int:
        """Tokens that the shortest answer takes, its end included."""
        return self.cost(self.start)

    def guide(self, count: int, max_tokens: int) -> Guide:
        """For so many answers side by side."""
        if max_tokens < self.fewest:
            raise ModelError(
                f"no answer can be closed within {max_tokens} tokens", hint=f"--max-tokens {self.fewest} or more"
            )
        return Guide(self, count, max_tokens)

    def cost(self, state: int) -> int:
        """Tokens from here to the end by the shortest closing text, each token as long as can be."""
        way = []
        while state not in self._costs:
            way.append(state)
            text = self._closing_text(state)
            if not text:
                self._costs[state] = 1
                break
            state = self.after(state, self.vocabulary.first(text))
        for state in reversed(way):
            text = self._closing_text(state)
            if text:
                self._costs[state] = 1 + self._costs[self.after(state, self.vocabulary.first(text))]
        return self._costs[way[0] if way else state]

    def after(self, state: int, text: bytes) -> int:
        for byte in text:
            if state == REFUSED:
                break
            state = int(self._row(state)[byte])
        return state

    def choices(self, state: int) -> Choices:
        if state not in self._choices:
            self._choices[state] = self._asked(state)
        return self._choices[state]

    def mask(self, state: int, left: int, size: int, device: torch.device) -> torch.Tensor:
        """(size,): what may be said where `left` tokens may come, this one included."""
        ids, costs = self.choices(state)
        within = costs < left
        if not within.all():
            return _mask(ids[within], size, device)
        if state not in self._masks or self._masks[state].device != device or len(self._masks[state]) != size:
            if len(self._masks) >= KEPT_MASKS:
                self._masks.clear()
            self._masks[state] = _mask(ids, size, device)
        return self._masks[state]

    def _asked(self, state: int) -> Choices:
        """All tokens at once, byte by byte, as far as they may come."""
        words = self.vocabulary
        alive = np.flatnonzero(words.lengths)
        reached = np.full(len(alive), state, np.int32)
        ids, costs = [], []
        for place in range(words.bytes.shape[1]):
            for known in np.unique(reached).tolist():
                self._row(known)
            reached = self._after[reached, words.bytes[alive, place]]
            alive, reached = alive[reached != REFUSED], reached[reached != REFUSED]
            whole = words.lengths[alive] == place + 1
            ids.append(alive[whole])
            ends, which = np.unique(reached[whole], return_inverse=True)
            costs.append(np.array([self.cost(end) for end in ends.tolist()], np.int64)[which])
            alive, reached = alive[~whole], reached[~whole]
            if not len(alive):
                break
        if self.grammar.closing(self._states[state]) is None:
            ids.append(self.ends)
            costs.append(np.zeros(len(self.ends), np.int64))
        return Choices(np.concatenate(ids), np.concatenate(costs))

    def _number(self, state: Any) -> int:
        if state not in self._numbers:
            self._numbers[state] = len(self._states)
            self._states.append(state)
        return self._numbers[state]

    def _row(self, state: int) -> States:
        """The states after each byte."""
        if state >= len(self._after):
            more = np.full((len(self._after) + len(self._states), 256), UNKNOWN, np.int32)
            self._after = np.concatenate([self._after, more])
        if self._after[state, 0] == UNKNOWN:
            reached = (self.grammar.step(self._states[state], byte) for byte in range(256))
            self._after[state] = [REFUSED if one is None else self._number(one) for one in reached]
        row: States = self._after[state]
        return row

    def _closing_text(self, state: int) -> bytes:
        """As much of it as a token can hold."""
        text = bytearray()
        at = self._states[state]
        while len(text) < self.vocabulary.bytes.shape[1] and (byte := self.grammar.closing(at)) is not None:
            text.append(byte)
            at = self.grammar.step(at, byte)
        return bytes(text)


class Guide:
    """Answers that are being said, side by side: `hold` before a token is chosen, `follow` after."""

    def __init__(self, constraint: Constraint, count: int, max_tokens: int) -> None:
        self.constraint, self.left = constraint, max_tokens
        self.states: list[int | None] = [constraint.start] * count

    def hold(self, logits: torch.Tensor) -> torch.Tensor:
        """(answers, tokens): what may not be said is beyond all hope, the rest as it was."""
        everything = torch.ones(logits.shape[1], dtype=torch.bool, device=logits.device)
        masks = [
            everything if state is None else self.constraint.mask(state, self.left, logits.shape[1], logits.device)
            for state in self.states
        ]
        return logits.masked_fill(~torch.stack(masks), -torch.inf)

    def follow(self, chosen: Sequence[int]) -> None:
        self.left -= 1
        for number, (state, id) in enumerate(zip(self.states, chosen, strict=True)):
            if state is None:
                continue
            if id in self.constraint.ends:
                self.states[number] = None
                continue
            words = self.constraint.vocabulary
            self.states[number] = self.constraint.after(state, words.bytes[id, : words.lengths[id]].tobytes())
            assert self.states[number] != REFUSED, f"token {id} was chosen, and may not come"


def _mask(ids: npt.NDArray[np.int64], size: int, device: torch.device) -> torch.Tensor:
    mask = torch.zeros(size, dtype=torch.bool)
    mask[torch.from_numpy(ids)] = True
    return mask.to(device)


def _pieces(tokenizer: Any) -> list[bytes]:
    """By id. What a token adds to a text, whatever stands before it."""
    special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    if "ByteLevel" in json.dumps(json.loads(tokenizer.backend_tokenizer.to_str())["decoder"]):
        letters = _letters()
        return [
            b"" if id in special or name is None else bytes(letters[letter] for letter in name)
            for id, name in enumerate(names)
        ]
    # Of another kind: what comes out behind a comma, which no tokenizer joins to what follows.
    [before] = tokenizer.encode(",", add_special_tokens=False)[-1:]
    alone = tokenizer.decode([before])
    behind = [tokenizer.decode([before, id]) for id in range(len(tokenizer))]
    return [
        b"" if id in special or "\ufffd" in text else text.removeprefix(alone).encode()
        for id, text in enumerate(behind)
    ]


def _letters() -> dict[str, int]:
    """The letters in which byte-level tokenizers write bytes, as GPT-2 has them."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {chr(byte): byte for byte in shown} | {chr(256 + n): byte for n, byte in enumerate(hidden)}
    assert set(letters) == set(ByteLevel.alphabet())
    return letters
