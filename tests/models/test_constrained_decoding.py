"""Tokens held to a grammar, for tokenizers of several kinds: whatever a model would like to say, it can be read."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from myna.data.pronunciation.assessment import Readings, read_answer
from myna.data.pronunciation.grammar import AnswerGrammar
from myna.errors import ModelError
from myna.models.constrained_decoding import Constraint, Vocabulary
from myna.models.phi4.tiny import SPECIAL_TOKENS, tiny_tokenizer

LINES = [
    '{"accuracy": 8, "fluency": 9, "prosodic": 10, "total": 8, "text": "we call it a bear", "phones": "W IY K AO L"}',
    '{"accuracy": 0, "fluency": 1.5, "prosodic": 2, "total": 1, "text": "café", "phones": "K AE F EY"}',
]
PADDED = 5
"""Rows of a head that belong to no token, as large models have them."""


def fast(core: Tokenizer) -> PreTrainedTokenizerFast:
    core.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)


def pairs_of_bytes() -> PreTrainedTokenizerFast:
    """Tokens of several bytes, some of which reach out of a string; some end within a letter."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core.train_from_iterator(LINES * 9, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet))
    return fast(core)


def pieces_of_text() -> PreTrainedTokenizerFast:
    """As SentencePiece has them: letters, a bar for a blank, and bytes for what is not known."""
    letters = sorted({letter for line in LINES for letter in line.replace(" ", "▁")} | set("0123456789{}[]\\"))
    words = ["▁we", '":', '",', "▁call", "ab", "acc", "uracy", "10"]
    spare = [f"<0x{byte:02X}>" for byte in range(256)]
    core = Tokenizer(models.BPE({w: n for n, w in enumerate([*spare, *letters, *words])}, [], byte_fallback=True))
    core.normalizer = normalizers.Replace(" ", "▁")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return fast(core)


KINDS = {"bytes": tiny_tokenizer, "pairs": pairs_of_bytes, "pieces": pieces_of_text}
MADE: dict[str, tuple[PreTrainedTokenizerFast, Constraint]] = {}


def made(kind: str) -> tuple[PreTrainedTokenizerFast, Constraint]:
    if kind not in MADE:
        tokenizer = KINDS[kind]()
        ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|end|>", "<|endoftext|>")]
        MADE[kind] = tokenizer, Constraint(AnswerGrammar(), Vocabulary(tokenizer), ends)
    return MADE[kind]


def say(
    constraint: Constraint, logits: torch.Tensor, *, max_tokens: int, sampled: torch.Generator | None = None
) -> list[tuple[list[int], bool]]:
    """Answers to logits (steps, answers, tokens), which come round again when they are over."""
    answers = logits.shape[1]
    guide = constraint.guide(answers, max_tokens)
    said: list[list[int]] = [[] for _ in range(answers)]
    ended = [False] * answers
    for step in range(max_tokens):
        held = guide.hold(logits[step % len(logits)])
        if sampled is None:
            chosen = held.argmax(-1).tolist()
        else:
            chosen = torch.multinomial(held.softmax(-1), 1, generator=sampled)[:, 0].tolist()
        guide.follow(chosen)
        for number, id in enumerate(chosen):
            ended[number] = ended[number] or id in constraint.ends
            if not ended[number]:
                said[number].append(id)
    return list(zip(said, ended, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@given(
    seed=st.integers(0, 2**32), spare=st.integers(0, 60), sharp=st.sampled_from([0.0, 1.0, 30.0]), sample=st.booleans()
)
@settings(max_examples=25, deadline=None)
def test_any_logits_give_an_answer(kind: str, seed: int, spare: int, sharp: float, sample: bool) -> None:
    """Greedily and by dice, in as few tokens as an answer can take and in more."""
    tokenizer, constraint = made(kind)
    stream = torch.Generator().manual_seed(seed)
    logits = sharp * torch.randn(7, 3, len(tokenizer) + PADDED, generator=stream)
    for ids, ended in say(constraint, logits, max_tokens=constraint.fewest + spare, sampled=stream if sample else None):
        assert ended
        read_answer(tokenizer.decode(ids))


@pytest.mark.parametrize("kind", KINDS)
@given(line=st.sampled_from(LINES), noise=st.integers(0, 2**32), indent=st.sampled_from([None, 1]))
@settings(max_examples=10, deadline=None)
def test_what_is_an_answer_already_is_left_alone(kind: str, line: str, noise: int, indent: int | None) -> None:
    tokenizer, constraint = made(kind)
    wanted = json.dumps(json.loads(line), indent=indent, ensure_ascii=False)
    ids = tokenizer.encode(wanted, add_special_tokens=False)
    assert tokenizer.decode(ids) == wanted
    due = [*ids, tokenizer.convert_tokens_to_ids("<|end|>")]
    logits = torch.randn(len(due), 1, len(tokenizer), generator=torch.Generator().manual_seed(noise))
    logits[torch.arange(len(due)), 0, due] += 20
    [(said, ended)] = say(constraint, logits, max_tokens=len(due) + 40)
    assert ended and said == ids


@pytest.mark.parametrize("kind", KINDS)
def test_a_runaway_is_closed_before_it_is_cut(kind: str) -> None:
    """A head that wants to write one letter for ever, wherever it may."""
    tokenizer, constraint = made(kind)
    logits = torch.zeros(1, 1, len(tokenizer))
    logits[..., tokenizer.encode("a", add_special_tokens=False)[-1]] = 9
    for max_tokens in (constraint.fewest, 400):
        [(ids, ended)] = say(constraint, logits, max_tokens=max_tokens)
        answer = read_answer(tokenizer.decode(ids))
        assert ended and len(ids) < max_tokens
        assert ("aaaa" in answer.text + answer.phones) == (max_tokens > constraint.fewest)


def test_special_tokens_and_what_is_none_never_come() -> None:
    tokenizer, constraint = made("bytes")
    audio = tokenizer.convert_tokens_to_ids("<|audio|>")
    logits = torch.zeros(1, 1, len(tokenizer) + PADDED)
    logits[..., audio], logits[..., len(tokenizer) :] = 9, 99
    [(ids, _)] = say(constraint, logits, max_tokens=200)
    assert audio not in ids and max(ids) < len(tokenizer)


def test_the_end_comes_only_at_the_end() -> None:
    tokenizer, constraint = made("pairs")
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    logits = torch.zeros(1, 1, len(tokenizer))
    logits[..., end] = 9
    [(ids, ended)] = say(constraint, logits, max_tokens=300)
    assert ended and not Readings.of([tokenizer.decode(ids)]).unreadable


def test_answers_side_by_side_are_those_of_each_alone() -> None:
    tokenizer, constraint = made("pairs")
    logits = torch.randn(50, 4, len(tokenizer), generator=torch.Generator().manual_seed(1))
    together = say(constraint, logits, max_tokens=150)
    assert [say(constraint, logits[:, one : one + 1], max_tokens=150)[0] for one in range(4)] == together
    assert len({tuple(ids) for ids, _ in together}) == 4


def test_a_state_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = pairs_of_bytes()
    constraint = Constraint(AnswerGrammar(), Vocabulary(tokenizer), [len(tokenizer) - 1])
    asked: list[int] = []
    ask = constraint._asked

    def count(state: int) -> Any:
        asked.append(state)
        return ask(state)

    monkeypatch.setattr(constraint, "_asked", count)
    logits = torch.randn(9, 3, len(tokenizer), generator=torch.Generator().manual_seed(2))
    first = say(constraint, logits, max_tokens=200)
    assert len(asked) == len(set(asked))
    before = len(asked)
    assert say(constraint, logits, max_tokens=200) == first and len(asked) == before


def test_too_few_tokens_are_refused() -> None:
    _, constraint = made("bytes")
    with pytest.raises(ModelError, match="no answer can be closed") as caught:
        constraint.guide(1, constraint.fewest - 1)
    assert str(constraint.fewest) in caught.value.hint


def test_a_tokenizer_without_brackets_is_refused() -> None:
    core = Tokenizer(models.WordLevel({"we": 0, ",": 1, "?": 2}, unk_token="?"))
    constraint = Constraint(AnswerGrammar(), Vocabulary(fast(core)), [3])
    with pytest.raises(ModelError, match="no token for"):
        constraint.guide(1, 99)
