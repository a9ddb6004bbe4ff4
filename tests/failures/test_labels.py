"""Labels and their alignment: loss curves look healthy while something wrong is learned."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from myna.core.errors import DataError, ModelError, TrainingError
from myna.models import convert_checkpoint, open_family
from myna.models.attention import packed_causal_attention
from myna.models.base import IGNORE_INDEX, Family, RenderedSequence
from myna.models.higgs_v2 import forward
from myna.models.higgs_v2.batch import HiggsBatch
from myna.models.higgs_v2.family import HiggsV2
from myna.models.higgs_v2.forward import HiggsObjective
from myna.models.higgs_v2.render import DelayPattern
from myna.train.trainer import Trainer

from .conftest import TrainWith
from .tiny_setup import cloning, code_loss, load, make_recipe, overfit, sequences_of, stock_code_sums, stock_inputs

Patch = pytest.MonkeyPatch


def shift_labels(patch: Patch, by: int) -> None:
    """A collator that moves the labels."""
    collate = HiggsV2.collate

    def wrong(self: HiggsV2, sequences: Any, *, offset: int = 1) -> HiggsBatch:
        return collate(self, sequences, offset=offset + by)

    patch.setattr(HiggsV2, "collate", wrong)


# Loss 0 on empty logits


def test_a_batch_cannot_lose_an_input_by_name(family: Family) -> None:
    batch = family.collate([family.render(cloning())])
    assert isinstance(batch, HiggsBatch)
    given = {field.name: getattr(batch, field.name) for field in fields(batch)}
    for name in given:
        with pytest.raises(TypeError, match=name):
            HiggsBatch(**{key: value for key, value in given.items() if key != name})
    with pytest.raises(TypeError, match="label_ids"):
        HiggsBatch(**given | {"label_ids": given["audio_targets"]})


def test_samples_without_labels_are_refused_and_not_learned_at_a_loss_of_zero(
    train_with: TrainWith, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(DelayPattern, "labels", lambda self, codes: np.full_like(self.apply(codes), IGNORE_INDEX))
    with pytest.raises(TrainingError, match=r"6 of 6 samples have no label: all is masked in \w+/\w+") as caught:
        train_with()
    assert "myna render" in caught.value.hint


def test_labels_that_the_batch_loses_are_missed(train_with: TrainWith, monkeypatch: Patch) -> None:
    collate = HiggsV2.collate

    def forgetful(self: HiggsV2, sequences: list[RenderedSequence], *, offset: int = 1) -> HiggsBatch:
        batch = collate(self, sequences, offset=offset)
        targets = batch.audio_targets[:0]
        return replace(
            batch, audio_output_index=batch.audio_output_index[:0], audio_targets=targets, counts=torch.zeros(9)
        )

    monkeypatch.setattr(HiggsV2, "collate", forgetful)
    with pytest.raises(TrainingError, match=r"has \d+ labels, of which 0 reach the batch"):
        train_with()


# Labels cut to fit


@pytest.mark.parametrize("part", ["codes", "code_labels", "labels"])
@pytest.mark.parametrize("change", ["short", "long"])
def test_lengths_that_disagree_are_an_error(family: Family, part: str, change: str) -> None:
    sound = family.render(cloning(), supervise_text=True)
    whole = getattr(sound, part)
    other: Any = whole[:-1] if change == "short" else np.concatenate([whole, whole[-1:]])
    changed: Any = {part: other}
    with pytest.raises((AssertionError, ValueError, IndexError)):
        family.collate([replace(sound, **changed)])


def test_a_frame_too_many_here_and_one_too_few_there_do_not_make_up_for_each_other(family: Family) -> None:
    one, two = (family.render(cloning(text)) for text in ("one", "two"))
    longer = replace(
        one, codes=one.codes[[*range(len(one.codes)), -1]], code_labels=one.code_labels[[*range(len(one.codes)), -1]]
    )
    shorter = replace(two, codes=two.codes[:-1], code_labels=two.code_labels[:-1])
    with pytest.raises((AssertionError, ValueError, IndexError)):
        family.collate([longer, shorter])


def test_a_sequence_longer_than_a_row_is_refused_and_not_cut(train_with: TrainWith) -> None:
    with pytest.raises(
        DataError, match=r"takes \d+ tokens .* a row holds 120; cutting it would lose its end"
    ) as caught:
        train_with(data={"row_tokens": 120})
    needed = int(caught.value.hint.split("data.row_tokens=")[1].split(",")[0])
    with pytest.raises(DataError, match=f"a row holds {needed - 1}"):
        train_with(data={"row_tokens": needed - 1})
    train_with(data={"row_tokens": needed}, train={"steps": 1})


# Missing label shift


def test_labels_without_their_shift_are_found_by_the_leak_test(train_with: TrainWith, monkeypatch: Patch) -> None:
    """The input at a position must not be its target, for any model."""
    shift_labels(monkeypatch, by=-1)
    with pytest.raises(TrainingError, match=r"changes its own loss: .* would learn to copy"):
        train_with()


def test_a_loss_too_good_to_be_true_is_an_alarm(
    workspace: Path, family: Family, train_with: TrainWith, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Other systems trained to a loss of 0.001 this way, and generated silence."""
    copyist, sequences = load(family), sequences_of(family, make_recipe(workspace))
    copied = overfit(family, copyist, family.collate(sequences, offset=0), steps=40)
    assert copied[-1] < 0.05, "the cause: a copy task is learned at once"
    assert code_loss(family, copyist, family.collate(sequences)) > math.log(66), "and it cannot speak"
    family.save_model(copyist, tmp_path / "copyist")

    shift_labels(monkeypatch, by=-1)
    with pytest.raises(
        TrainingError, match=r"before the first step (9\d|100)\.\d% of the targets are right.* labels are visible"
    ):
        train_with(model={"source": str(tmp_path / "copyist"), "check_pretrained": False})


def test_the_shift_is_made_in_one_place(family: Family, model: Any) -> None:
    """The objective predicts at each position the label of the next one, as transformers does."""
    rendered = family.render(cloning())
    batch = family.collate([rendered])
    with torch.no_grad():
        ours = family.objective(model)(batch).sums[1:]
        logits = model(**stock_inputs(rendered)).logits[0]
    assert torch.allclose(ours, stock_code_sums(model, rendered, logits), atol=1e-3)
    assert isinstance(batch, HiggsBatch)
    predicted_from = batch.to_stream[batch.audio_predictors]
    audio = np.flatnonzero(np.isin(rendered.ids, (model.config.audio_token_id, model.config.audio_delay_token_id)))
    labelled = audio[(rendered.code_labels != IGNORE_INDEX).any(axis=1)]
    assert predicted_from.tolist() == (labelled - 1).tolist()


# The delay pattern switched off


def test_the_delay_pattern_comes_from_the_models_configuration(workspace: Path, tmp_path: Path) -> None:
    convert_checkpoint(workspace / "model", tmp_path / "original", "original")
    config = tmp_path / "original" / "config.json"
    stored = json.loads(config.read_text())
    family = open_family(str(tmp_path / "original"))
    assert isinstance(family, HiggsV2) and family.delay == DelayPattern(8, 64, 65)
    assert stored["use_delay_pattern"] is True
    config.write_text(json.dumps(stored | {"use_delay_pattern": False}))
    with pytest.raises(ModelError, match="use_delay_pattern is False"):
        open_family(str(tmp_path / "original"))


def test_codes_without_the_delay_are_unknown_to_a_base_with_it(
    workspace: Path, pretrained_base: Path, monkeypatch: Patch
) -> None:
    family = open_family(str(pretrained_base))
    model, recipe = load(family), make_recipe(workspace)
    with_delay = code_loss(family, model, family.collate(sequences_of(family, recipe)))
    original_apply = DelayPattern.apply

    def undelayed(self: DelayPattern, codes: Any) -> Any:
        """Return codes as other systems write them: all codebooks at once, the rest of the turn filled with ends."""
        out = np.full_like(original_apply(self, codes), self.end)
        out[0], out[1 : 1 + len(codes)] = self.begin, codes
        return out

    monkeypatch.setattr(DelayPattern, "apply", undelayed)
    without = code_loss(family, model, family.collate(sequences_of(family, recipe)))
    assert without > with_delay + 0.3, "worse from the start, which is what people heard"


def test_only_codes_and_one_end_per_codebook_are_learned(family: Family) -> None:
    labels = family.render(cloning(reference=5, target=7)).code_labels
    assert (labels[: 5 + 9] == IGNORE_INDEX).all(), "nothing of the reference"
    assert not (labels == 64).any(), "no begin of stream"
    assert ((labels == 65).sum(axis=0) == 1).all()
    assert ((labels != IGNORE_INDEX).sum(axis=0) == 7 + 1).all()


# Model no better than chance


def test_chance_is_known_for_every_stream() -> None:
    family = open_family("higgs-v2")
    assert family.chance[0] == pytest.approx(11.76, abs=0.01) and family.loss_terms[0] == "text"
    assert family.chance[1:] == pytest.approx([6.93] * 8, abs=0.01)


def test_a_base_at_chance_is_refused_with_its_loss(train_with: TrainWith) -> None:
    with pytest.raises(
        TrainingError, match=r"no better than chance on this data: 4\.2\d, where .* guess has 4\.19"
    ) as caught:
        train_with(model={"check_pretrained": True})
    assert "model.check_pretrained=false" in caught.value.hint and "myna prepare" in caught.value.hint


def test_the_bases_loss_is_printed_beside_chance(train_with: TrainWith, pretrained_base: Path) -> None:
    _, callback = train_with(model={"source": str(pretrained_base), "check_pretrained": True}, train={"steps": 1})
    result = next(line for line in callback.messages if line.startswith("before training: loss "))
    loss = float(result.split("loss ")[1].split(",")[0])
    assert loss < 0.6 * math.log(66) and "where chance is 4.19" in result and "code7" in result
    assert callback.steps[0]["loss"] == pytest.approx(loss, abs=0.4), "and the first step begins there"


# Gradients that never come


def test_a_dummy_loss_is_found_by_its_gradients(train_with: TrainWith, monkeypatch: Patch) -> None:
    """A dummy loss has a plausible value and is connected to all weights."""
    original_losses = HiggsObjective._losses

    def dummy(self: HiggsObjective, logits: torch.Tensor, targets: torch.Tensor) -> Any:
        sums, hits = original_losses(self, logits.detach(), targets)
        return sums + 0 * logits.sum(), hits

    monkeypatch.setattr(HiggsObjective, "_losses", dummy)
    with pytest.raises(TrainingError, match=r"all \d+ gradients are zero: nothing would be learned"):
        train_with()


def test_weights_that_the_loss_does_not_reach_are_named(train_with: TrainWith, monkeypatch: Patch) -> None:
    whole = forward.run_layer

    def cut_off(layer: Any, stream: torch.Tensor, texts: int, attend: Any) -> torch.Tensor:
        return whole(layer, stream.detach(), texts, attend)

    monkeypatch.setattr(forward, "run_layer", cut_off)
    with pytest.raises(TrainingError, match=r"20 of 40 trainable weights get no gradient: .*layers\.0"):
        train_with(train={"fused_lora": False})


def test_an_optimizer_made_too_early_is_found(train_with: TrainWith, monkeypatch: Patch) -> None:
    make = Trainer.from_recipe

    def stale(*given: Any) -> Trainer:
        student = make(*given)
        group = student.optimizer.param_groups[0]
        group["params"] = [torch.nn.Parameter(parameter.detach().clone()) for parameter in group["params"]]
        return student

    monkeypatch.setattr(Trainer, "from_recipe", stale)
    with pytest.raises(TrainingError, match=r"the optimizer does not hold 40 of 40 trainable weights"):
        train_with()


def test_a_gradient_that_is_not_finite_stops_the_run(train_with: TrainWith, monkeypatch: Patch) -> None:
    original_losses = HiggsObjective._losses

    def endless(self: HiggsObjective, logits: torch.Tensor, targets: torch.Tensor) -> Any:
        sums, hits = original_losses(self, logits, targets)
        return sums * math.inf, hits

    monkeypatch.setattr(HiggsObjective, "_losses", endless)
    with pytest.raises(TrainingError, match="is not finite"):
        train_with()


# Labels at the wrong frame


@pytest.mark.parametrize(("by", "best"), [(1, r"\+0"), (-1, r"\+2")])
def test_labels_at_the_wrong_frame_are_found_by_the_base(
    train_with: TrainWith, pretrained_base: Path, monkeypatch: Patch, by: int, best: str
) -> None:
    shift_labels(monkeypatch, by)
    with pytest.raises(TrainingError, match=rf"(?s)predicts them best at offset {best} instead of \+1\n.*code7"):
        train_with(model={"source": str(pretrained_base), "check_pretrained": True})


def test_labels_at_the_right_frame_pass(train_with: TrainWith, pretrained_base: Path) -> None:
    _, callback = train_with(model={"source": str(pretrained_base), "check_pretrained": True}, train={"steps": 1})
    assert any(line.startswith("preflight passed") for line in callback.messages)


# Packed clips that see one another


def hidden_logits(model: Any, *sequences: RenderedSequence, mask: bool) -> torch.Tensor:
    """transformers' own logits of a packed row, with positions that start over."""
    inputs = stock_inputs(*sequences)
    inputs["position_ids"] = torch.cat([torch.arange(len(sequence)) for sequence in sequences])[None]
    if mask:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    with torch.no_grad():
        logits: torch.Tensor = model(**inputs).logits[0]
    return logits


def test_packed_sequences_do_not_see_one_another(family: Family, model: Any) -> None:
    sequences = [family.render(cloning(text, seed=seed)) for seed, text in enumerate(("one", "another", "a third"))]
    leaking = hidden_logits(model, *sequences, mask=True)[-len(sequences[-1]) :]
    alone = hidden_logits(model, sequences[-1], mask=True)
    assert (leaking - alone).abs().max() > 0.01, "the cause: an all-ones mask lets the third hear the others"

    objective = family.objective(model).eval()
    batches = [family.collate([sequence]) for sequence in sequences]
    with torch.no_grad():
        packed, separate = objective(family.collate(sequences)).sums, sum(objective(batch).sums for batch in batches)
    assert torch.allclose(packed, separate, atol=1e-4, rtol=0)


def test_sequences_that_see_one_another_are_found_before_the_first_step(
    train_with: TrainWith, monkeypatch: Patch
) -> None:
    within = packed_causal_attention
    monkeypatch.setattr(forward, "packed_causal_attention", lambda q, k, v, lengths: within(q, k, v, (sum(lengths),)))
    with pytest.raises(TrainingError, match="packed sequences see one another"):
        train_with()


def test_attention_to_the_future_is_found_too(train_with: TrainWith, monkeypatch: Patch) -> None:
    attention = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *given, **how: attention(*given, **how | {"is_causal": False}),
    )
    with pytest.raises(TrainingError, match="sees its own future"):
        train_with()
