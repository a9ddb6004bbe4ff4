"""The forward pass over the sorted stream equals transformers' model within fp32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from myna.data.conversation import Conversation, Turn
from myna.models.base import IGNORE_INDEX, RenderedSequence
from myna.models.higgs_v2.family import HiggsV2
from myna.models.higgs_v2.forward import HiggsObjective

from .conftest import cloning


def conversations(family: HiggsV2) -> list[RenderedSequence]:
    shapes: list[dict[str, Any]] = [
        {"text": "one", "reference": 5, "target": 7},
        {"text": "two, a good deal longer", "reference": 3, "target": 12, "scene": "A room."},
        {"text": "three", "reference": 9, "target": 4, "reference_placement": "system"},
        {"text": "four", "reference": 0, "target": 6},
    ]
    return [family.render(cloning(**shape, seed=n), supervise_text=True) for n, shape in enumerate(shapes)]


def stock_sums(model: Any, rendered: list[RenderedSequence], side: str) -> torch.Tensor:
    """Return the loss sums of transformers' own forward on a padded batch."""
    config = model.config
    longest = max(len(r) for r in rendered)
    ids = torch.full((len(rendered), longest), config.pad_token_id)
    mask = torch.zeros(len(rendered), longest, dtype=torch.long)
    starts = [0 if side == "right" else longest - len(r) for r in rendered]
    for row, (r, start) in enumerate(zip(rendered, starts, strict=True)):
        ids[row, start : start + len(r)] = torch.from_numpy(r.ids)
        mask[row, start : start + len(r)] = 1
    codes = torch.from_numpy(np.concatenate([r.codes for r in rendered]))[None]
    hidden = model.model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=mask.cumsum(-1).sub(1).clamp(min=0),
        audio_input_ids=codes,
        audio_input_ids_mask=torch.ones(codes.shape[:2], dtype=torch.bool),
    ).last_hidden_state
    sums = torch.zeros(9)
    for row, (r, start) in enumerate(zip(rendered, starts, strict=True)):
        own = hidden[row, start : start + len(r) - 1]
        labels = np.full((len(r), 8), IGNORE_INDEX)
        labels[np.isin(r.ids, (config.audio_token_id, config.audio_delay_token_id))] = r.code_labels
        logits = model.audio_lm_head(own).unflatten(-1, (8, config.codebook_size))
        for k in range(8):
            sums[1 + k] += F.cross_entropy(logits[:, k], torch.from_numpy(labels[1:, k]), reduction="sum")
        sums[0] += F.cross_entropy(model.text_lm_head(own), torch.from_numpy(r.labels[1:]), reduction="sum")
    return sums


@pytest.mark.parametrize("side", ["right", "left"])
def test_packed_equals_padded_transformers(family: HiggsV2, model: Any, side: str) -> None:
    rendered = conversations(family)
    batch = family.collate(rendered)
    ours = family.objective(model)(batch).sums / batch.counts
    stock = stock_sums(model, rendered, side) / batch.counts
    assert torch.allclose(ours, stock, atol=1e-5, rtol=0)


def test_packed_equals_single(family: HiggsV2, model: Any) -> None:
    rendered = conversations(family)
    objective, packed = family.objective(model), family.collate(rendered)
    single = [family.collate([r]) for r in rendered]
    assert torch.equal(packed.counts, torch.stack([batch.counts for batch in single]).sum(0))
    sums = sum(objective(batch).sums for batch in single)
    assert torch.allclose(objective(packed).sums / packed.counts, sums / packed.counts, atol=1e-5, rtol=0)


def test_gradients_equal_transformers(family: HiggsV2, model: Any) -> None:
    rendered = conversations(family)
    batch = family.collate(rendered)
    gradients = []
    for sums in (family.objective(model)(batch).sums, stock_sums(model, rendered, "right")):
        model.zero_grad()
        (sums / batch.counts).sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    model.zero_grad()
    assert gradients[0].keys() == gradients[1].keys() == dict(model.named_parameters()).keys()
    for name, ours in gradients[0].items():
        assert torch.allclose(ours, gradients[1][name], atol=1e-5), name


def test_no_sequence_sees_another_nor_its_own_future(family: HiggsV2, model: Any) -> None:
    """Changing the last frame of one clip must change nothing before it, in its own sequence or in any other."""
    rendered = conversations(family)
    before = family.collate(rendered)
    rendered[1].codes[-9] = (rendered[1].codes[-9] + 1) % 64
    after = family.collate(rendered)
    with torch.no_grad():
        a, b = (HiggsObjective(model).hidden(batch)[batch.to_sequence] for batch in (before, after))
    changed = (a != b).any(dim=1).nonzero().flatten()
    end = sum(before.lengths[:2])
    frame = end - 2 - 9  # `<|audio_eos|><|eot_id|>` close the turn
    assert changed.min() == frame and changed.max() < end


def test_offset_moves_the_labels_and_nothing_else(family: HiggsV2) -> None:
    rendered = conversations(family)[:1]
    right, wrong = family.collate(rendered), family.collate(rendered, offset=2)
    assert torch.equal(right.codes, wrong.codes)
    assert (right.to_stream[right.audio_predictors] - 1).tolist() == right.to_stream[wrong.audio_predictors].tolist()


def test_text_only_and_empty_targets_still_reach_every_parameter(family: HiggsV2, model: Any) -> None:
    """A micro-batch without audio must not leave audio parameters without a gradient, or DDP would wait for ever."""
    turns = (Turn("user", ("hi",)), Turn("assistant", ("hello",)))
    batch = family.collate([family.render(Conversation("text", turns), supervise_text=True)])
    assert batch.counts[0] > 0 and batch.counts[1:].sum() == 0
    model.zero_grad()
    family.objective(model)(batch).sums.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    model.zero_grad()


def test_label_smoothing_raises_the_loss_of_a_sure_model(family: HiggsV2, model: Any) -> None:
    batch = family.collate(conversations(family))
    plain, smooth = (family.objective(model, label_smoothing=s)(batch).sums for s in (0.0, 0.1))
    assert not torch.allclose(plain, smooth)


def test_stops_count_one_end_per_codebook(family: HiggsV2, model: Any) -> None:
    result = family.objective(model)(family.collate(conversations(family)))
    assert result.stops[1] == 4 * 8


def test_frames_that_only_add_up_in_total_are_refused(family: HiggsV2) -> None:
    """One frame too many in one sequence and one too few in the next would misalign codes without an error."""
    one, other = conversations(family)[:2]
    swapped = [
        replace(one, codes=np.concatenate([one.codes, other.codes[:1]])),
        replace(other, codes=other.codes[1:]),
    ]
    with pytest.raises(AssertionError, match="placeholders for"):
        family.collate(swapped)
