"""Transfer of a batch to the GPU and between processes."""

from __future__ import annotations

import pickle
from dataclasses import fields
from typing import Any

import pytest
import torch

from myna.models.base import Batch, Family

from .conftest import cloning


def tensors(batch: Batch) -> dict[str, torch.Tensor]:
    every = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: value for name, value in every.items() if isinstance(value, torch.Tensor)}


def make(family: Family) -> Batch:
    return family.collate([family.render(cloning(text, scene=""), supervise_text=True) for text in ("one", "another")])


def test_pinned_tensors_are_those_that_are_moved(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, pinned = make(family), []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    copy = batch.pin_memory()
    before, after, moved = tensors(batch), tensors(copy), tensors(batch.to(torch.device("meta")))
    assert len(pinned) >= 10
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name]) and tensor.dtype == before[name].dtype
        was_pinned = any(tensor is one for one in pinned)
        assert was_pinned == (moved[name].device.type == "meta"), name
    assert (copy.tokens, copy.target_seconds) == (batch.tokens, batch.target_seconds)


def test_a_batch_travels_between_processes_as_arrays(family: Family) -> None:
    batch, arrays = make(family), list[pickle.PickleBuffer]()
    sent = pickle.dumps(batch, protocol=5, buffer_callback=arrays.append)
    copy = pickle.loads(sent, buffers=arrays)
    assert len(arrays) == len(tensors(batch)) and len(sent) < 4000, "nothing was copied into the pickle"
    for name, tensor in tensors(batch).items():
        there = tensors(copy)[name]
        assert torch.equal(there, tensor) and (there.dtype, there.shape) == (tensor.dtype, tensor.shape)
    assert (copy.tokens, copy.target_seconds, type(copy)) == (batch.tokens, batch.target_seconds, type(batch))


def test_a_family_that_has_rendered_travels_to_workers(family: Family) -> None:
    here = family.render(cloning(), supervise_text=True)
    there = pickle.loads(pickle.dumps(family)).render(cloning(), supervise_text=True)
    assert here.ids.tolist() == there.ids.tolist() and here.code_labels.tolist() == there.code_labels.tolist()


@pytest.mark.gpu
def test_a_pinned_batch_arrives_as_it_was(family: Family) -> None:
    card, batch = torch.device("cuda"), make(family)
    pinned = batch.pin_memory()
    held: dict[str, Any] = {name: tensor for name, tensor in tensors(pinned).items() if name != "counts"}
    assert all(tensor.is_pinned() for tensor in held.values())
    arrived = tensors(pinned.to(card))
    torch.cuda.synchronize()
    for name, tensor in tensors(batch).items():
        assert torch.equal(arrived[name].cpu(), tensor)
