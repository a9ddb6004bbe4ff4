"""Answers equal transformers' own `generate`, alone or in a batch."""

from __future__ import annotations

import copy
from itertools import takewhile
from typing import Any

import pytest
import torch

from myna.core.errors import ModelError
from myna.data.codec import Samples
from myna.data.conversation import Conversation
from myna.data.pronunciation import ParsedAnswers, answer_grammar, read_answer
from myna.models.phi4.checkpoint import eos_ids
from myna.models.phi4.family import Phi4
from tests.models.phi4.conftest import transformers_features

TOKENS = 12


def lively(model: Any) -> Any:
    """Scale the head, because a random head repeats itself for every clip."""
    torch.manual_seed(4)  # with some other seeds it generates <|audio|>, at which transformers fails
    with torch.no_grad():
        model.lm_head.weight.normal_()
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(30)
            layer.self_attn.qkv_proj.weight.mul_(10)
            layer.self_attn.o_proj.weight.mul_(10)
    return model


def test_answers_equal_transformers(
    family: Phi4, model: Any, stock: Any, left_open: list[Conversation], waves: list[Samples]
) -> None:
    stock = lively(copy.deepcopy(stock))
    lively(model)
    prompts, ends = [family.render(one) for one in left_open], eos_ids(family.config)
    due = []
    for prompt, wave in zip(prompts, waves, strict=True):
        ids = torch.from_numpy(prompt.ids)[None]
        said = stock.generate(input_ids=ids, do_sample=False, max_new_tokens=TOKENS, **transformers_features(wave))
        answer = said[0, len(prompt) :].tolist()
        due.append(family.tokenizer.decode(list(takewhile(lambda id: id not in ends, answer))))
    answers = family.answer(model, prompts, TOKENS)
    assert [answer.text for answer in answers] == due
    assert len(set(due)) > 1, "or it would not matter who is answered"
    assert [family.answer(model, [prompt], TOKENS)[0] for prompt in prompts] == answers


def test_an_answer_ends_where_the_model_ends_it(family: Phi4, model: Any, left_open: list[Conversation]) -> None:
    """The head sees only ones, so that it never ends, or at once."""
    prompts = [family.render(one) for one in left_open[:2]]
    end = family.tokenizer.convert_tokens_to_ids("<|end|>")
    model.model.norm.forward = lambda hidden: torch.ones_like(hidden)
    with torch.no_grad():
        model.lm_head.weight.zero_()[0] = 1
    first = family.tokenizer.decode([0])
    assert [tuple(answer) for answer in family.answer(model, prompts, 3)] == [(3 * first, [0] * 3, False)] * 2
    with torch.no_grad():
        model.lm_head.weight[end] = 2
    assert [tuple(answer) for answer in family.answer(model, prompts, 3)] == [("", [], True)] * 2


def test_nan_logits_are_an_error_and_no_answer(family: Phi4, model: Any, left_open: list[Conversation]) -> None:
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    for grammar in (None, answer_grammar()):
        with pytest.raises(ModelError, match="logits are not finite"):
            family.answer(model, [family.render(left_open[0])], 150, grammar)


def test_constrained_answers_can_be_parsed(family: Phi4, model: Any, left_open: list[Conversation]) -> None:
    """A random model writes nothing that can be parsed unless it is constrained, and its answers do not depend on the
    batch."""
    lively(model)
    prompts, grammar = [family.render(one) for one in left_open], answer_grammar()
    free = ParsedAnswers.of(answer.text for answer in family.answer(model, prompts, 150))
    assert sum(free.unreadable.values()) == len(prompts)
    held = family.answer(model, prompts, 150, grammar)
    assert all(answer.stopped for answer in held) and len({answer.text for answer in held}) > 1
    for answer in held:
        read_answer(answer.text)
    assert [family.answer(model, [prompt], 150, grammar)[0] for prompt in prompts] == held
