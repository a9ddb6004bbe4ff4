"""The memory plan: bytes counted by hand, activations that a real pass keeps, and ways out that can be typed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from myna.config import Recipe, override, parse_recipe
from myna.data.loader import Share
from myna.demo import record
from myna.errors import TrainingError
from myna.models import open_family, save_tiny
from myna.models.base import IGNORED, Family, Rendered
from myna.models.stats import stats
from myna.train.loop import make_loader
from myna.train.lora import adapt
from myna.train.memory import (
    MemoryPlan,
    Pass,
    check_room,
    is_out_of_memory,
    longest_pass,
    out_of_memory,
    plan,
    room,
    size,
    spread,
    ways_out,
)
from myna.train.precision import Name, Precision
from myna.workflow import prepare

CPU = torch.device("cpu")
LORA, BASE = 39_452_672, 5_377_281_024
"""Weights of the true model and of its LoRA of rank 16, counted in facts/higgs-v2.md."""


def recipe(**changes: dict[str, Any]) -> Recipe:
    tree: dict[str, Any] = {"model": {"source": "x"}, "data": {"train": "y"}, "train": {"steps": 1}}
    for branch, values in changes.items():
        tree[branch] = tree.get(branch, {}) | values
    return parse_recipe(tree, where="test")


def speech(family: Any, text: int, audio: int, books: int = 8) -> Rendered:
    """A sequence of the right shape, all of its audio learned."""
    ids = np.array([5] * text + [family.config.audio_token_id] * audio)
    codes = np.zeros((audio, books), np.int64)
    return Rendered("speech", ids, codes, np.full(text + audio, IGNORED), codes, (), audio / 25)


@pytest.fixture(scope="module")
def true_size() -> Family:
    return open_family("higgs-v2")


@pytest.fixture(scope="module")
def pass_(true_size: Family) -> Pass:
    return Pass(tuple(speech(true_size, 150, 500) for _ in range(3)), 650)


@pytest.fixture(scope="module")
def lora(true_size: Family, pass_: Pass) -> MemoryPlan:
    """The true model with a LoRA in bf16."""
    return planned(true_size, pass_)


def planned(
    family: Family, pass_: Pass, precision: Name = "bf16", world: int = 1, **changes: dict[str, Any]
) -> MemoryPlan:
    return plan(family, recipe(**changes), Precision(precision, "asked for"), CPU, pass_, world)


# Bytes that can be counted by hand


def test_the_true_model_with_a_lora_in_bf16(lora: MemoryPlan) -> None:
    assert lora.frozen == pytest.approx(2 * BASE, rel=1e-4)
    assert lora.trained == lora.gradients == 4 * LORA
    assert lora.moments == 8 * LORA
    assert lora.averages == 0
    assert lora.tokens == 1950
    # Of the work itself: no less than the floor of facts/performance.md, 2.5 MB a token, no more than twice as much.
    assert 2.5e6 < lora.activations / lora.tokens < 5e6
    lines = lora.table().splitlines()
    assert "bf16" in lines[0] and "10.0 GiB" in lines[1] and lines[-1].endswith(f"of {size(room(CPU))}")


@pytest.mark.parametrize(
    ("precision", "frozen", "trained", "moments"),
    [("fp32", 4, 4, 8), ("bf16", 2, 4, 8), ("fp16", 2, 4, 8), ("pure-fp16", 2, 2, 10)],
)
def test_every_precision_has_its_bytes(tiny: Path, precision: Name, frozen: int, trained: int, moments: int) -> None:
    family = open_family(str(tiny / "model"))
    pass_ = Pass((speech(family, 20, 60),), 80)
    base = family.load_model(dtype=torch.bfloat16, device="meta", text_head=False)
    weights, learning = sum(p.numel() for p in base.parameters()), stats(family, recipe().adapt)["trainable"]
    counted = planned(family, pass_, precision, train={"ema": 0.9})
    assert counted.frozen == pytest.approx(weights * frozen, rel=1e-3)
    assert counted.trained == counted.gradients == learning * trained
    assert counted.moments == learning * moments
    assert counted.averages == learning * 4


def test_full_training_holds_everything_four_times_and_parts_of_it_when_shared_out(tiny: Path) -> None:
    family = open_family(str(tiny / "model"))
    pass_ = Pass((speech(family, 20, 60),), 80)
    alone, shared = (planned(family, pass_, world=world, adapt={"mode": "full"}) for world in (1, 4))
    assert alone.gradients == alone.trained and alone.moments == 2 * alone.trained
    assert shared.trained == alone.trained // 4 and shared.moments == alone.moments // 4
    assert shared.gradients == alone.gradients // 4, "FSDP has no buckets"
    lora, ranks = (planned(family, pass_, world=world) for world in (1, 4))
    assert ranks.trained == lora.trained and ranks.gradients == 2 * lora.gradients, "DDP has"


# Activations


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder / "model")
    record(folder / "recordings")
    prepare(str(folder / "recordings"), folder / "prepared", model=str(folder / "model"), device="cpu")
    return folder


@pytest.mark.parametrize(
    ("mode", "precision"), [("comprehensive", "fp32"), ("comprehensive", "bf16"), ("full", "bf16")]
)
def test_the_plan_is_what_a_real_pass_keeps(tiny: Path, mode: str, precision: Name) -> None:
    family = open_family(str(tiny / "model"))
    sequences = tuple(speech(family, 40 + n, 150 - n) for n in range(4))
    chosen = recipe(adapt={"mode": mode})
    dtype = Precision(precision, "").frozen
    counted = plan(family, chosen, Precision(precision, ""), CPU, Pass(sequences, 190))

    model = adapt(family.load_model(dtype=dtype, device="cpu", text_head=False), family, chosen.adapt)
    objective = family.objective(model).train()
    own = {tensor.untyped_storage().data_ptr() for tensor in (*objective.parameters(), *objective.buffers())}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        torch.autocast("cpu", dtype, enabled=dtype != torch.float32),
    ):
        result = objective(family.collate(sequences))
    # The backward pass begins with the logits' gradient in two types.
    assert counted.activations == pytest.approx(sum(kept.values()) + 2 * max(kept.values()), rel=0.1)
    del result


def test_recomputing_saves_and_fewer_tokens_save_in_proportion(
    true_size: Family, pass_: Pass, lora: MemoryPlan
) -> None:
    every = [replace(lora, every=n).activations for n in (0, 4, 2, 1)]
    assert every == sorted(every, reverse=True)
    # 0.17 MB a token and one whole layer: facts/performance.md.
    assert 0.17e6 * lora.tokens < every[-1] < 0.6e6 * lora.tokens
    third = planned(true_size, Pass(pass_.sequences[:1], 650), train={"checkpointing": "full"})
    assert third.activations == pytest.approx(every[-1] / 3, rel=0.05)
    assert third.activations == pytest.approx(replace(lora, every=1, tokens=650).activations, rel=1e-3)


# The longest pass


@pytest.mark.parametrize("rows", [1, 3])
def test_the_longest_pass_is_made_of_the_fullest_rows(tiny: Path, rows: int) -> None:
    family = open_family(str(tiny / "model"))
    pace = {"rows_per_pass": rows, "rows_per_step": rows}
    chosen, alone = (recipe(data={"row_tokens": 400, "pack": pack}, train=pace) for pack in (True, False))
    loader = make_loader(chosen, family, tiny / "prepared")
    longest = longest_pass(loader, chosen, Share())
    lengths = [len(loader.sequence(target, 0)) for target in loader.pairing.targets]
    assert longest.longest == max(lengths)
    assert rows * max(lengths) <= sum(map(len, longest.sequences)) <= rows * 400
    single = longest_pass(loader, alone, Share())
    assert sorted(map(len, single.sequences)) == sorted(lengths, reverse=True)[:rows][::-1]


def test_spread_is_even() -> None:
    assert spread(range(100), 4) == [0, 25, 50, 75]
    assert spread("ab", 5) == ["a", "b"]


# Ways out


def test_what_costs_least_comes_first_and_can_be_typed(lora: MemoryPlan) -> None:
    chosen = recipe(data={"row_tokens": 2048}, train={"rows_per_pass": 4, "rows_per_step": 8})
    start = replace(lora, precision="fp32", frozen=2 * lora.frozen)
    ways = list(ways_out(start, chosen, lambda: lora))
    assert [typed for typed, _ in ways][:7] == [
        {"train.rows_per_pass": 2},
        {"train.rows_per_pass": 1},
        {"data.row_tokens": 1024, "train.rows_per_step": 16},
        {"train.checkpointing": 4},
        {"train.checkpointing": 2},
        {"train.checkpointing": "full"},
        {"train.precision": "bf16"},
    ]
    assert ways[-1][0].keys() == {
        "train.precision",
        "train.rows_per_pass",
        "data.row_tokens",
        "train.rows_per_step",
        "train.checkpointing",
    }
    for typed, lighter in ways:
        assert lighter.total < start.total
        tree = chosen.model_dump(mode="json")
        for key, value in typed.items():
            override(tree, f"{key}={value}")
        parse_recipe(tree, where="what was typed")


@pytest.mark.parametrize(
    ("share", "typed"),
    [(0.9, "train.rows_per_pass=2"), (0.75, "train.rows_per_pass=1"), (0.67, "train.checkpointing=full")],
)
def test_out_of_memory_names_the_cheapest_change_that_fits(
    true_size: Family, lora: MemoryPlan, share: float, typed: str
) -> None:
    chosen = recipe(data={"pack": False}, train={"rows_per_pass": 4, "rows_per_step": 4})
    error = out_of_memory(replace(lora, room=int(share * lora.total)), true_size, chosen, CPU)
    assert f"--set {typed} " in error.hint
    assert "1,950 tokens" in error.what and "activations" in error.what


def test_where_nothing_helps_a_lora_or_another_card_does(true_size: Family, pass_: Pass, lora: MemoryPlan) -> None:
    full = planned(true_size, pass_, adapt={"mode": "full"})
    small = replace(full, room=10 * 2**30)
    assert "adapt.mode=comprehensive" in out_of_memory(small, true_size, recipe(adapt={"mode": "full"}), CPU).hint
    with pytest.raises(TrainingError, match=r"weights alone take 20\.0 GiB.*10\.0 GiB"):
        check_room(small)
    check_room(replace(full, room=2**40))
    assert "device with more memory" in out_of_memory(replace(lora, room=2**30), true_size, recipe(), CPU).hint


def test_out_of_memory_is_known_by_its_class_and_by_what_it_says() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 17 GB)"))
    assert is_out_of_memory(
        RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate")
    )
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
