"""Memory plan: bytes counted by hand, activations against a real pass, and hints that can be typed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from myna import plan_training, prepare
from myna.core.config import Recipe, override, parse_recipe
from myna.core.device import is_out_of_memory
from myna.core.errors import ConfigError, TrainingError
from myna.data.loader import Shard
from myna.models import open_family, save_tiny_model
from myna.models.base import Family
from myna.models.higgs_v2.tiny import save_tiny as save_deep
from myna.models.lora import count_model, make_trainable
from myna.train import memory_plan
from myna.train.loop import make_loader
from myna.train.memory_plan import (
    USABLE_MEMORY_SHARE,
    LargestBatch,
    MemoryPlan,
    _LiveBytes,
    available_memory,
    cheapest_saving,
    check_weights_fit,
    evenly_spaced,
    format_bytes,
    largest_batch,
    lighter_plans,
    out_of_memory_error,
    plan_memory,
)
from myna.train.precision import Precision, PrecisionName
from myna.train.trainer import configured_recomputation
from tests.tone_corpus import write_recordings
from tests.train.rendered import speech

CPU = torch.device("cpu")
LORA, BASE = 39_452_672, 5_377_281_024
"""Weights of the true model and of its LoRA of rank 16, counted in facts/higgs-v2.md."""


def recipe(**changes: dict[str, Any]) -> Recipe:
    """Make a recipe without fused layers, which would add joined weights to the count."""
    tree: dict[str, Any] = {
        "model": {"source": "x"},
        "data": {"train": "y"},
        "train": {"steps": 1, "fused_lora": False},
    }
    for branch, values in changes.items():
        tree[branch] = tree.get(branch, {}) | values
    return parse_recipe(tree, where="test")


@pytest.fixture(scope="module")
def true_size() -> Family:
    return open_family("higgs-v2")


@pytest.fixture(scope="module")
def batch(true_size: Family) -> LargestBatch:
    return LargestBatch(tuple(speech(true_size, 150, 500) for _ in range(3)), 650)


@pytest.fixture(scope="module")
def lora(true_size: Family, batch: LargestBatch) -> MemoryPlan:
    """Plan of the real model with a LoRA in bf16, independent of the memory of this machine."""
    return planned(true_size, batch, train={"gradient_checkpointing": "none"})


def planned(
    family: Family, batch: LargestBatch, precision: PrecisionName = "bf16", world: int = 1, **changes: dict[str, Any]
) -> MemoryPlan:
    return plan_memory(family, recipe(**changes), Precision(precision, "asked for"), CPU, batch, world)


# Bytes that can be counted by hand


def test_the_true_model_with_a_lora_in_bf16(lora: MemoryPlan) -> None:
    assert lora.frozen == pytest.approx(2 * BASE, rel=1e-4)
    assert lora.trained == lora.gradients == 4 * LORA
    assert lora.optimizer_state == 8 * LORA
    assert lora.ema == 0
    assert lora.tokens == 1950
    # Of the work itself: no less than the floor of facts/performance.md, 2.5 MB a token, no more than twice as much.
    assert 2.5e6 < lora.activations / lora.tokens < 5e6
    lines = lora.table().splitlines()
    assert (
        "bf16" in lines[0]
        and "10.0 GiB" in lines[1]
        and lines[-1].endswith(f"of {format_bytes(available_memory(CPU))}")
    )


@pytest.mark.parametrize(
    ("precision", "frozen", "trained", "moments"),
    [("fp32", 4, 4, 8), ("bf16", 2, 4, 8), ("fp16", 2, 4, 8), ("pure-fp16", 2, 2, 10)],
)
def test_every_precision_has_its_bytes(
    tiny: Path, precision: PrecisionName, frozen: int, trained: int, moments: int
) -> None:
    family = open_family(str(tiny / "model"))
    batch = LargestBatch((speech(family, 20, 60),), 80)
    base = family.load_model(dtype=torch.bfloat16, device="meta", text_head=False)
    weights, learning = sum(p.numel() for p in base.parameters()), count_model(family, recipe().adapt)["trainable"]
    counted = planned(family, batch, precision, train={"ema_decay": 0.9})
    assert counted.frozen == pytest.approx(weights * frozen, rel=1e-3)
    assert counted.trained == counted.gradients == learning * trained
    assert counted.optimizer_state == learning * moments
    assert counted.ema == learning * 4


def test_folding_takes_room_for_the_adapters_in_the_compute_type(tiny: Path) -> None:
    """Matrices A below the weights and B beside them, and what fills the corners and edges."""
    family = open_family(str(tiny / "model"))
    batch = LargestBatch((speech(family, 20, 60),), 80)
    plain, fast = (planned(family, batch, train={"fused_lora": fast}) for fast in (False, True))
    assert fast.trained == plain.trained
    assert fast.frozen > plain.frozen + plain.trained / 2


def test_full_training_holds_everything_four_times_and_parts_of_it_when_shared_out(tiny: Path) -> None:
    family = open_family(str(tiny / "model"))
    batch = LargestBatch((speech(family, 20, 60),), 80)
    alone, shared = (planned(family, batch, world=world, adapt={"mode": "full"}) for world in (1, 4))
    assert alone.gradients == alone.trained and alone.optimizer_state == 2 * alone.trained
    assert shared.trained == alone.trained // 4 and shared.optimizer_state == alone.optimizer_state // 4
    assert shared.gradients == alone.gradients // 4, "FSDP has no buckets"
    lora, ranks = (planned(family, batch, world=world) for world in (1, 4))
    assert ranks.trained == lora.trained and ranks.gradients == 2 * lora.gradients, "DDP has"


# Activations


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder / "model")
    write_recordings(folder / "recordings")
    prepare(str(folder / "recordings"), folder / "prepared", model=str(folder / "model"), device="cpu")
    return folder


def test_a_ledger_counts_each_storage_while_it_is_alive_and_knows_the_most() -> None:
    own = torch.zeros(1024)
    with _LiveBytes([own], fused_kernels=False) as memory:
        twice = own * 2
        view = twice[:10]
        assert memory.live == 4096, "a view is no memory of its own, and what was there before is not counted"
        product = torch.outer(view, view)
        del twice
        assert memory.live == 4096 + 400, "the view still holds it"
        del view
        assert memory.live == 400
        product += 1
    assert memory.peak == 4096 + 400


def test_a_ledger_that_looks_at_products_alone_does_not_see_what_passes_between_them() -> None:
    own = torch.zeros(16, 16)
    with _LiveBytes([own], fused_kernels=True) as memory:
        summed = (own + 1).exp().cos().sum(1)
        assert memory.peak == 0
        torch.mm(own, own)
    assert memory.peak == 64 + 1024 and len(summed) == 16


def real_objective(family: Family, chosen: Recipe, dtype: torch.dtype) -> Any:
    """Make an objective with weights, on the CPU."""
    model = make_trainable(family.load_model(dtype=dtype, device="cpu", text_head=False), family, chosen.adapt)
    return family.objective(model, fused_lora=chosen.train.fused_lora).train()


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Model of six layers, wide enough that heads and vocabulary do not dominate."""
    folder = tmp_path_factory.mktemp("deep") / "model"
    save_deep(folder, hidden=128, layers=6)
    return open_family(str(folder))


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
@pytest.mark.parametrize(
    ("adapt", "fast", "near"),
    [({}, False, 0.05), ({}, True, 0.05), ({"mode": "full"}, False, 0.1)],
    ids=["lora", "fast-lora", "full"],
)
def test_both_peaks_are_those_of_a_real_pass_however_much_is_recomputed(
    deep: Family, precision: PrecisionName, adapt: dict[str, Any], fast: bool, near: float
) -> None:
    """Compared with the peak of live tensor bytes in a real pass, forward and backward, with real autocast."""
    sequences = tuple(speech(deep, 40 + n, 150 - n) for n in range(4))
    chosen = recipe(adapt=adapt, train={"fused_lora": fast, "gradient_checkpointing": "none"})
    dtype = Precision(precision, "").compute_dtype
    counted = plan_memory(deep, chosen, Precision(precision, ""), CPU, LargestBatch(sequences, 190))
    objective, batch = real_objective(deep, chosen, dtype), deep.collate(sequences)
    learning = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    for recomputed in range(7):
        objective.recompute = recomputed
        for parameter in learning:
            parameter.grad = torch.zeros_like(parameter)
        own = [*objective.parameters(), *objective.buffers(), *(parameter.grad for parameter in learning)]
        autocast = torch.autocast("cpu", dtype, enabled=dtype != torch.float32)
        with _LiveBytes(own, fused_kernels=False) as memory, autocast:
            objective(batch).sums.sum().backward()
        told = replace(counted, recomputed=recomputed).activations
        assert told == pytest.approx(memory.peak, rel=near), f"{recomputed} of 6"


@pytest.mark.slow
def test_on_a_card_what_fast_layers_do_in_passing_leaves_nothing(
    true_size: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused kernels have no fp32 copies of a whole gate, which plain torch makes on the CPU."""
    monkeypatch.setattr(memory_plan, "available_memory", lambda _: 2**40)
    chosen, batch = recipe(train={"fused_lora": True}), LargestBatch((speech(true_size, 150, 500),), 650)
    on_cpu, on_card = (
        plan_memory(true_size, chosen, Precision("bf16", ""), torch.device(name), batch).activation_memory
        for name in ("cpu", "cuda")
    )
    assert on_card.layer == on_cpu.layer, "what is kept is the same"
    assert on_card.recomputing.per_token < 0.5 * on_cpu.recomputing.per_token
    # No less than a layer and the gradient of its widest part, 2 x 8192 numbers of bf16 for each token.
    assert on_card.recomputing.per_token > on_card.layer.per_token + 2 * 2 * 8192


def test_what_cannot_be_folded_has_no_kernels_to_leave_nothing(deep: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "available_memory", lambda _: 2**40)
    batch = LargestBatch((speech(deep, 150, 500),), 650)
    plans = [
        plan_memory(deep, recipe(adapt={"dropout": 0.1}, train=how), Precision("bf16", ""), torch.device("cuda"), batch)
        for how in ({"fused_lora": True}, {"fused_lora": False}, {"compile": True})
    ]
    asked, plain, compiled = (one.activation_memory for one in plans)
    assert asked == plain
    assert compiled.outside.per_token < 0.9 * plain.outside.per_token, "where the last layer goes backward"


@pytest.mark.slow
def test_attention_keeps_more_on_older_cards_and_in_fp32(true_size: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "available_memory", lambda _: 2**40)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    # With a CUDA build of torch, the optimizer would then ask the driver, which need not be there.
    monkeypatch.setattr(torch.optim.Optimizer, "_accelerator_graph_capture_health_check", lambda _: None, raising=False)
    batch = LargestBatch((speech(true_size, 150, 500),), 650)

    def kept(capability: tuple[int, int], precision: PrecisionName) -> float:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        chosen = recipe(train={"fused_lora": True})
        return plan_memory(
            true_size, chosen, Precision(precision, ""), torch.device("cuda"), batch
        ).activation_memory.layer.per_token

    ampere, turing = kept((8, 0), "fp16"), kept((7, 5), "fp16")
    # Keys and values for each of 24 heads, of 128 numbers, beside those that lie in one piece with the queries.
    assert turing - ampere == pytest.approx(2 * 24 * 128 * 2, rel=0.01)
    # In fp32 everything is twice as large, and each of 24 heads has a number for every pair of 650 positions.
    assert kept((9, 0), "fp32") - 2 * ampere == pytest.approx(24 * 650 * 4, rel=0.1)


@pytest.mark.slow
def test_recomputing_saves_and_fewer_tokens_save_in_proportion(
    true_size: Family, batch: LargestBatch, lora: MemoryPlan
) -> None:
    every = [replace(lora, recomputed=n).activations for n in (0, 7, 14, 28)]
    assert every == sorted(every, reverse=True)
    # 0.17 MB a token and one whole layer: facts/performance.md.
    assert 0.17e6 * lora.tokens < every[-1] < 0.6e6 * lora.tokens
    third = planned(true_size, LargestBatch(batch.sequences[:1], 650), train={"gradient_checkpointing": "full"})
    assert every[-1] / 3 < third.activations < every[-1] / 2, "weights are cast for few tokens as for many"
    assert third.activations == pytest.approx(replace(lora, recomputed=28, tokens=650).activations, rel=1e-3)


# What is recomputed


@pytest.mark.parametrize(("asked", "layers"), [("auto", None), ("none", 0), ("full", 28), (1, 28), (3, 10), (40, 1)])
def test_what_a_recipe_asks_for_as_a_number_of_layers(asked: Any, layers: int | None) -> None:
    assert configured_recomputation(recipe(train={"gradient_checkpointing": asked}), 28) == layers


def test_as_few_layers_as_fit_are_recomputed(lora: MemoryPlan) -> None:
    totals = [replace(lora, recomputed=n).total for n in range(29)]
    seen = set()
    for share in (1.0, 0.95, 0.9, 0.8, 0.7, 0.66):
        tight = replace(lora, available=int(share * totals[0] / USABLE_MEMORY_SHARE) + 1).with_least_recomputation()
        number = tight.recomputed
        assert tight.total <= share * totals[0] + 1
        assert number == 0 or totals[number - 1] > share * totals[0] + 1, "one fewer would not do"
        seen.add(number)
        why = "since everything fits" if number == 0 else "the fewest that fit"
        assert tight.recomputation.endswith(why) and tight.recomputation in tight.table()
    assert len(seen) == 6, "finer than every n-th"


def test_where_nothing_fits_it_says_so_and_saves_most(lora: MemoryPlan) -> None:
    hopeless = replace(lora, available=2**30).with_least_recomputation()
    assert hopeless.total == min(replace(lora, recomputed=n).total for n in range(29))
    assert hopeless.recomputation.endswith("layers recomputed, which saves most and may not be enough")


@pytest.mark.parametrize(
    ("asked", "number", "told"),
    [("none", 0, "no layer recomputed"), (3, 2, "2 of 6 layers recomputed"), ("full", 6, "all 6 layers recomputed")],
)
def test_the_choice_is_left_to_the_plan_or_taken_from_it(
    deep: Family, monkeypatch: pytest.MonkeyPatch, asked: Any, number: int, told: str
) -> None:
    batch = LargestBatch((speech(deep, 150, 500),), 650)
    taken = planned(deep, batch, train={"gradient_checkpointing": asked})
    assert (taken.recomputed, taken.recomputation) == (number, f"{told}, as the recipe says")
    monkeypatch.setattr(memory_plan, "available_memory", lambda _: int(taken.total / USABLE_MEMORY_SHARE) + 1)
    left = planned(deep, batch)
    assert left.automatic and left.fits and left.recomputed <= number
    assert left.recomputed == 0 or not replace(left, recomputed=left.recomputed - 1).fits
    assert left.recomputation.endswith("the fewest that fit" if number else "since everything fits")


def test_a_process_that_may_have_a_part_of_its_card_plans_with_that(monkeypatch: pytest.MonkeyPatch) -> None:
    card, gib = torch.device("cuda"), 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (70 * gib, 100 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 5 * gib)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 3 * gib)
    for share, expected in ((1.0, 72), (0.5, 47)):
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _, share=share: share)
        assert available_memory(card) == expected * gib - memory_plan.CUDA_SEGMENT_BYTES


# The longest pass


@pytest.mark.parametrize("rows", [1, 3])
def test_the_longest_pass_is_made_of_the_fullest_rows(tiny: Path, rows: int) -> None:
    family = open_family(str(tiny / "model"))
    pace = {"micro_batch_size": rows, "batch_size": rows}
    chosen, alone = (recipe(data={"row_tokens": 400, "pack": pack}, train=pace) for pack in (True, False))
    loader = make_loader(chosen, family, tiny / "prepared")
    longest = largest_batch(loader, chosen, Shard())
    lengths = [len(loader.sequence(target, 0)) for target in loader.reference_sampler.targets]
    assert longest.longest_sequence == max(lengths)
    assert rows * max(lengths) <= sum(map(len, longest.sequences)) <= rows * 400
    single = largest_batch(loader, alone, Shard())
    assert sorted(map(len, single.sequences)) == sorted(lengths, reverse=True)[:rows][::-1]


def test_spread_is_even() -> None:
    assert evenly_spaced(range(100), 4) == [0, 25, 50, 75]
    assert evenly_spaced("ab", 5) == ["a", "b"]


# Ways out


def test_what_costs_least_comes_first_and_can_be_typed(lora: MemoryPlan) -> None:
    chosen = recipe(data={"row_tokens": 2048}, train={"micro_batch_size": 4, "batch_size": 8})
    start = replace(lora, precision="fp32", frozen=2 * lora.frozen)
    ways = list(lighter_plans(start, chosen, lambda: lora))
    assert [typed for typed, _ in ways][:7] == [
        {"train.micro_batch_size": 2},
        {"train.micro_batch_size": 1},
        {"data.row_tokens": 1024, "train.batch_size": 16},
        {"train.gradient_checkpointing": 4},
        {"train.gradient_checkpointing": 2},
        {"train.gradient_checkpointing": "full"},
        {"train.precision": "bf16"},
    ]
    assert ways[-1][0].keys() == {
        "train.precision",
        "train.micro_batch_size",
        "data.row_tokens",
        "train.batch_size",
        "train.gradient_checkpointing",
    }
    for typed, lighter in ways:
        assert lighter.total < start.total
        tree = chosen.model_dump(mode="json")
        for key, value in typed.items():
            override(tree, f"{key}={value}")
        parse_recipe(tree, where="what was typed")


def test_a_plan_that_was_too_hopeful_is_not_asked_again(lora: MemoryPlan) -> None:
    """A plan for fewer tokens would recompute less and fill the GPU as before, so the hint contains `full`."""
    chosen = recipe(data={"row_tokens": 2048}, train={"micro_batch_size": 2, "batch_size": 8})
    start = replace(lora, recomputed=10, automatic=True, precision="fp32", frozen=2 * lora.frozen)
    ways = list(lighter_plans(start, chosen, lambda: lora))
    assert [typed for typed, _ in ways][:5] == [
        {"train.gradient_checkpointing": 2},
        {"train.gradient_checkpointing": "full"},
        {"train.gradient_checkpointing": "full", "train.micro_batch_size": 1},
        {"train.gradient_checkpointing": "full", "data.row_tokens": 1024, "train.batch_size": 16},
        {"train.gradient_checkpointing": "full", "train.precision": "bf16"},
    ]
    assert [lighter.recomputed for _, lighter in ways] == [14, *[28] * (len(ways) - 1)]
    everything = replace(lora, recomputed=0, automatic=True)
    first, _ = next(lighter_plans(everything, chosen, lambda: None))
    assert first == {"train.micro_batch_size": 1}, "where all fitted, it still will"


@pytest.mark.parametrize(
    ("share", "typed"),
    [
        (0.9, "train.micro_batch_size=2"),
        (0.75, "train.micro_batch_size=1"),
        (0.67, "train.gradient_checkpointing=full"),
    ],
)
def test_out_of_memory_names_the_cheapest_change_that_fits(
    true_size: Family, lora: MemoryPlan, share: float, typed: str
) -> None:
    chosen = recipe(data={"pack": False}, train={"micro_batch_size": 4, "batch_size": 4})
    error = out_of_memory_error(replace(lora, available=int(share * lora.total)), true_size, chosen, CPU)
    assert f"--set {typed} " in error.hint
    assert "1,950 tokens" in error.what and "activations" in error.what


def test_where_nothing_helps_a_lora_or_another_card_does(
    true_size: Family, batch: LargestBatch, lora: MemoryPlan
) -> None:
    full = planned(true_size, batch, adapt={"mode": "full"})
    small = replace(full, available=10 * 2**30)
    assert "adapt.mode=comprehensive" in out_of_memory_error(small, true_size, recipe(adapt={"mode": "full"}), CPU).hint
    with pytest.raises(TrainingError, match=r"weights alone take 20\.0 GiB.*10\.0 GiB"):
        check_weights_fit(small)
    check_weights_fit(replace(full, available=2**40))
    assert (
        "device with more memory" in out_of_memory_error(replace(lora, available=2**30), true_size, recipe(), CPU).hint
    )


def test_whether_it_fits_a_card_is_known_without_weights_data_and_card() -> None:
    settings = ["train.gradient_checkpointing=none"]
    planned = plan_training("higgs_v2_lora_24gb", memory="24GB", model="higgs-v2", settings=settings)
    assert planned.fits and planned.recomputed == 0 and planned.tokens == planned.recipe.data.row_tokens
    smaller = replace(planned, available=12 * 2**30)
    assert not smaller.fits and "--set " in cheapest_saving(smaller, planned.recipe)
    for words in ("much", "24 apples", ""):
        with pytest.raises(ConfigError, match="no amount of memory"):
            plan_training("higgs_v2_lora_24gb", memory=words)


@pytest.mark.parametrize("model", ["fledgling", "phi-4-multimodal"])
def test_any_model_can_be_planned_by_its_configuration(model: str) -> None:
    assert plan_training(model=model, memory="48GB").fits


def test_out_of_memory_is_known_by_its_class_and_by_what_it_says() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 17 GB)"))
    assert is_out_of_memory(
        RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate")
    )
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
