"""A speech engine as a system: items are a queue in front of its batch, and none hears of the others."""

from __future__ import annotations

import numpy as np
import pytest

from myna.evaluate.items import EvalItem
from myna.evaluate.pipeline import SpeechSystem
from myna.models.higgs_v2.decode import HiggsDecoder
from myna.models.ref import ModelRef
from myna.speak.loading import load_engine

TEXTS = ("Seven ships sailed.", "Yes.", "No.", "Good day.", "Come in.")


def test_a_free_slot_takes_the_next_item(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_engine(ModelRef.find_model("fledgling"), device="cpu")
    system = SpeechSystem("model", lambda: engine, 0, {})
    items = [EvalItem(str(number), text, language="en") for number, text in enumerate(TEXTS)]
    assert {item.max_seconds for item in items} == {6.0}
    step, rows = HiggsDecoder.step, list[int]()

    def counted(self: HiggsDecoder, count: int, longest: int) -> object:
        rows.append(count)
        return step(self, count, longest)

    monkeypatch.setattr(HiggsDecoder, "step", counted)
    alone, steps = {}, {}
    for item in items:
        rows.clear()
        [(_, alone[item.id])] = system.speak([item], 1)
        steps[item.id] = len(rows)
    rows.clear()
    spoken = {item.id: output for item, output in system.speak(items, 2)}
    assert next(iter(spoken)) != "0", "it is the longest, and is waited for by none"
    assert max(rows) == 2
    in_batches = sum(max(steps[item.id] for item in items[start : start + 2]) for start in range(0, len(items), 2))
    assert len(rows) < in_batches
    for item in items:
        assert np.array_equal(spoken[item.id].samples, alone[item.id].samples)
        assert spoken[item.id].stopped == alone[item.id].stopped


def test_no_items_give_no_output() -> None:
    engine = load_engine(ModelRef.find_model("fledgling"), device="cpu")
    assert list(SpeechSystem("model", lambda: engine, 0, {}).speak([], 4)) == []
