"""Constrained decoding with several kinds of tokenizers: any logits give an answer that can be parsed."""

from __future__ import annotations

import json
import sys
from functools import cache

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from myna.core.errors import ModelError
from myna.data.pronunciation import ParsedAnswers, answer_grammar, read_answer
from myna.models.phi4.generate import ConstrainedDecoder, TokenGrammar
from myna.models.phi4.tiny import SPECIAL_TOKENS, tiny_tokenizer

LINES = [
    '{"accuracy": 8, "fluency": 9, "prosodic": 10, "total": 8, "text": "we call it a bear", "phones": "W IY K AO L"}',
    '{"accuracy": 0, "fluency": 1.5, "prosodic": 2, "total": 1, "text": "café", "phones": "K AE F EY"}',
]
PADDED = 5
"""Rows of a head that belong to no token, as in large models."""


def fast(core: Tokenizer) -> PreTrainedTokenizerFast:
    core.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)


def pairs_of_bytes() -> PreTrainedTokenizerFast:
    """Make a tokenizer with tokens of several bytes, some of which reach out of a string; some end within a letter."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core.train_from_iterator(LINES * 9, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet))
    return fast(core)


def pieces_of_text() -> PreTrainedTokenizerFast:
    """Make a tokenizer like SentencePiece: letters, a bar for a blank, and bytes for unknown characters."""
    letters = sorted({letter for line in LINES for letter in line.replace(" ", "▁")} | set("0123456789{}[]\\"))
    words = ["▁we", '":', '",', "▁call", "ab", "acc", "uracy", "10"]
    spare = [f"<0x{byte:02X}>" for byte in range(256)]
    core = Tokenizer(models.BPE({w: n for n, w in enumerate([*spare, *letters, *words])}, [], byte_fallback=True))
    core.normalizer = normalizers.Replace(" ", "▁")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return fast(core)


KINDS = {"bytes": tiny_tokenizer, "pairs": pairs_of_bytes, "pieces": pieces_of_text}


@cache
def compiled(kind: str) -> tuple[PreTrainedTokenizerFast, TokenGrammar]:
    tokenizer = KINDS[kind]()
    eos_ids = [tokenizer.convert_tokens_to_ids(token) for token in ("<|end|>", "<|endoftext|>")]
    return tokenizer, TokenGrammar(answer_grammar(), tokenizer, eos_ids, len(tokenizer) + PADDED)


def fewest(grammar: TokenGrammar) -> int:
    """Return the tokens of the shortest answer, its end included."""
    return len(grammar.completion) + 1


def decode(
    grammar: TokenGrammar, logits: torch.Tensor, *, max_tokens: int, sampled: torch.Generator | None = None
) -> list[tuple[list[int], bool]]:
    """Decode answers for logits (steps, answers, tokens), which repeat when they are used up. With `sampled`, Gumbel
    noise makes the likeliest token a draw."""
    answers = logits.shape[1]
    decoder = ConstrainedDecoder(grammar, answers, max_tokens)
    output: list[list[int]] = [[] for _ in range(answers)]
    ended = [False] * answers
    for step in range(max_tokens):
        now = logits[step % len(logits)]
        if sampled is not None:
            now = now - torch.empty_like(now).exponential_(generator=sampled).log()
        for number, id in enumerate(decoder.choose(now)):
            ended[number] = ended[number] or id in grammar.eos_ids
            if not ended[number]:
                output[number].append(id)
    return list(zip(output, ended, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@given(
    seed=st.integers(0, 2**32), spare=st.integers(0, 60), sharp=st.sampled_from([0.0, 1.0, 30.0]), sample=st.booleans()
)
@example(seed=47, spare=17, sharp=1.0, sample=False)  # ends after as many blanks as there may be
@settings(max_examples=25, deadline=None)
def test_any_logits_give_an_answer(kind: str, seed: int, spare: int, sharp: float, sample: bool) -> None:
    """Greedy and random choices, with the fewest tokens that an answer can take and with more."""
    tokenizer, grammar = compiled(kind)
    stream = torch.Generator().manual_seed(seed)
    logits = sharp * torch.randn(7, 3, len(tokenizer) + PADDED, generator=stream)
    for ids, ended in decode(grammar, logits, max_tokens=fewest(grammar) + spare, sampled=stream if sample else None):
        assert ended
        read_answer(tokenizer.decode(ids))


@pytest.mark.parametrize("kind", KINDS)
@given(line=st.sampled_from(LINES), noise=st.integers(0, 2**32), indent=st.sampled_from([None, 1]))
@settings(max_examples=10, deadline=None)
def test_a_valid_answer_is_not_changed(kind: str, line: str, noise: int, indent: int | None) -> None:
    tokenizer, grammar = compiled(kind)
    wanted = json.dumps(json.loads(line), indent=indent, ensure_ascii=False)
    ids = tokenizer.encode(wanted, add_special_tokens=False)
    assert tokenizer.decode(ids) == wanted
    due = [*ids, tokenizer.convert_tokens_to_ids("<|end|>")]
    logits = torch.randn(len(due), 1, len(tokenizer) + PADDED, generator=torch.Generator().manual_seed(noise))
    logits[torch.arange(len(due)), 0, due] += 20
    [(said, ended)] = decode(grammar, logits, max_tokens=len(due) + 40)
    assert ended and said == ids


@pytest.mark.parametrize("kind", KINDS)
def test_a_runaway_is_closed_before_it_is_cut(kind: str) -> None:
    """The head prefers to write one letter for ever, wherever it is allowed."""
    tokenizer, grammar = compiled(kind)
    logits = torch.zeros(1, 1, len(tokenizer) + PADDED)
    logits[..., tokenizer.encode("a", add_special_tokens=False)[-1]] = 9
    for max_tokens in (fewest(grammar), 400):
        [(ids, ended)] = decode(grammar, logits, max_tokens=max_tokens)
        answer = read_answer(tokenizer.decode(ids))
        assert ended and len(ids) < max_tokens
        assert ("aaaa" in answer.text + answer.phones) == (max_tokens > fewest(grammar))


def test_special_and_unused_tokens_are_never_chosen() -> None:
    tokenizer, grammar = compiled("bytes")
    audio = tokenizer.convert_tokens_to_ids("<|audio|>")
    logits = torch.zeros(1, 1, len(tokenizer) + PADDED)
    logits[..., audio], logits[..., len(tokenizer) :] = 9, 99
    [(ids, _)] = decode(grammar, logits, max_tokens=200)
    assert audio not in ids and max(ids) < len(tokenizer)


def test_the_end_comes_only_at_the_end() -> None:
    tokenizer, grammar = compiled("pairs")
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    logits = torch.zeros(1, 1, len(tokenizer) + PADDED)
    logits[..., end] = 9
    [(ids, ended)] = decode(grammar, logits, max_tokens=300)
    assert ended and not ParsedAnswers.of([tokenizer.decode(ids)]).unreadable


def test_answers_do_not_depend_on_the_batch() -> None:
    tokenizer, grammar = compiled("pairs")
    logits = torch.randn(50, 4, len(tokenizer) + PADDED, generator=torch.Generator().manual_seed(1))
    together = decode(grammar, logits, max_tokens=150)
    assert [decode(grammar, logits[:, one : one + 1], max_tokens=150)[0] for one in range(4)] == together
    assert len({tuple(ids) for ids, _ in together}) == 4


def test_too_few_tokens_are_refused() -> None:
    _, grammar = compiled("bytes")
    with pytest.raises(ModelError, match="no answer can be closed") as caught:
        ConstrainedDecoder(grammar, 1, fewest(grammar) - 1)
    assert str(fewest(grammar)) in caught.value.hint


def test_a_tokenizer_without_brackets_is_refused() -> None:
    core = Tokenizer(models.BPE({"w": 0, ",": 1, '"': 2}, []))
    core.decoder = decoders.ByteLevel()
    with pytest.raises(ModelError, match="no token for"):
        TokenGrammar(answer_grammar(), fast(core), [3], 9 + PADDED)


def test_a_tokenizer_of_another_kind_is_refused() -> None:
    core = Tokenizer(models.WordLevel({"we": 0, ",": 1, "?": 2}, unk_token="?"))
    with pytest.raises(ModelError, match="cannot read this tokenizer"):
        TokenGrammar(answer_grammar(), fast(core), [3], 9 + PADDED)


def test_a_missing_llguidance_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ModelError, match="needs llguidance") as caught:
        TokenGrammar(answer_grammar(), tiny_tokenizer(), [256], 263)
    assert "myna[answer]" in caught.value.hint
