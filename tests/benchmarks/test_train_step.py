"""The training benchmark at toy size on the CPU: data, parity of variants, and output."""

from __future__ import annotations

import dataclasses
import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.harness import Benchmark
from benchmarks.synthetic import (
    FULL_SIZE,
    RandomHiggs,
    TokenCost,
    markov_codes,
    packed_rows,
    parity_utterances,
    random_codes,
    randomize_adapter,
    utterances,
)
from benchmarks.train_step import Results, RowOptions
from benchmarks.variants import BY_NAME

from benchmarks import harness, train_step
from myna.core.config import AdaptSettings
from myna.models.base import IGNORE_INDEX
from myna.models.lora import make_trainable

CPU = torch.device("cpu")
OPTIONS = RowOptions("cpu", tiny=True)


@pytest.fixture(scope="module")
def full_size() -> RandomHiggs:
    return RandomHiggs.of(False, CPU)


@pytest.fixture(scope="module")
def benchmark() -> Benchmark:
    return Benchmark.of("cpu", True)


def test_utterances_are_a_reference_and_a_supervised_target(full_size: RandomHiggs) -> None:
    config = full_size.config
    for one in islice(utterances(full_size, random_codes(8, 1024)), 20):
        placeholders = np.isin(one.ids, (config.audio_token_id, config.audio_delay_token_id))
        assert placeholders.sum() == len(one.codes) == len(one.code_labels)
        learned = (one.code_labels != IGNORE_INDEX).any(1)
        target = round(one.target_seconds * 25)
        # Only the last clip is learned: its codes, and one end of stream per codebook.
        assert learned[: len(learned) - target - 9].sum() == 0
        assert (one.code_labels != IGNORE_INDEX).sum() == 8 * (target + 1)
        assert (one.labels == IGNORE_INDEX).all()


def test_utterances_are_the_same_every_time(full_size: RandomHiggs) -> None:
    once, again = (list(islice(utterances(full_size, random_codes(8, 1024)), 5)) for _ in range(2))
    for one, other in zip(once, again, strict=True):
        assert np.array_equal(one.ids, other.ids)
        assert np.array_equal(one.codes, other.codes)


def test_clips_are_as_long_as_people_speak(full_size: RandomHiggs) -> None:
    seconds = [one.target_seconds for one in islice(utterances(full_size, random_codes(8, 1024)), 1000)]
    assert 9.2 < np.mean(seconds) < 10.2
    assert min(seconds) >= 1
    assert max(seconds) <= 30


@pytest.mark.parametrize("budget", [FULL_SIZE.row_tokens, FULL_SIZE.small_row_tokens])
def test_rows_are_full_and_whole(full_size: RandomHiggs, budget: int) -> None:
    packed = list(islice(packed_rows(utterances(full_size, random_codes(8, 1024)), budget), 150))
    lengths = [sum(map(len, row)) for row in packed]
    assert max(lengths) <= budget
    assert min(lengths) >= 0.9 * budget
    assert sum(lengths) >= 0.98 * budget * len(packed)
    ids = [one.id for row in packed for one in row]
    assert len(set(ids)) == len(ids)


def test_markov_codes_repeat_four_times_out_of_five() -> None:
    codes = markov_codes(2, 64, length=1 << 14)(1000, np.random.default_rng(0))
    follows: dict[int, list[int]] = {}
    for before, after in zip(codes[:-1, 0], codes[1:, 0], strict=True):
        follows.setdefault(int(before), []).append(int(after))
    usual = sum(max(map(after.count, set(after))) for after in follows.values())
    assert 0.75 < usual / 999 < 0.9


def test_the_first_utterances_fit_the_shortest_row(full_size: RandomHiggs) -> None:
    few = parity_utterances(full_size, random_codes(8, 1024), shortest_row=4096)
    assert len(few) == 8
    assert sum(map(len, few)) <= 4096


def test_work_is_counted_from_shapes(full_size: RandomHiggs) -> None:
    model = full_size.load_model(dtype=torch.bfloat16, device="meta", text_head=False)
    cost = TokenCost.of(make_trainable(model, full_size, AdaptSettings(rank=16)))
    assert cost.frozen == 28 * (2 * 3072 * 3072 + 2 * 3072 * 1024 + 3 * 3072 * 8192)
    # Attention and one FFN, as `adapt.mode: audio_focused` with k and o would have it.
    assert cost.adapters == 24_313_856
    assert cost.per_token == 4 * cost.frozen + 6 * cost.adapters


def test_weights_are_drawn_by_name_and_adapters_have_something_to_compare() -> None:
    models = [
        RandomHiggs.of(True, CPU).load_model(dtype=torch.float32, device="cpu", text_head=False) for _ in range(2)
    ]
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other), name
    weight = dict(models[0].named_parameters())["model.layers.0.mlp.up_proj.weight"]
    assert 0.015 < float(weight.detach().std()) < 0.025
    adapters = {name: torch.zeros(16, 64) for name in ("x.lora_A.weight", "x.lora_B.weight")}
    randomize_adapter(adapters)
    assert all(bool(tensor.any()) for tensor in adapters.values())
    assert not torch.equal(*adapters.values())
    randomize_adapter(adapters, b_std=0.0)
    assert not adapters["x.lora_B.weight"].any()


@pytest.mark.parametrize("name", ["stock-batch-2", "stock-packed-sdpa", "ours-plain-bf16", "ours-bf16"])
def test_all_variants_have_the_same_first_step(benchmark: Benchmark, reference: dict[str, Any], name: str) -> None:
    row = benchmark.measure(BY_NAME[name])
    assert row["first_loss"] == pytest.approx(reference["first_loss"], rel=1e-3 if name == "stock-batch-2" else 1e-5)
    if name != "stock-batch-2":
        assert row["gradient_norm"] == pytest.approx(reference["gradient_norm"], rel=1e-4)
        assert row["active_weights"] == reference["active_weights"]
        assert row["active_adapters"] == reference["active_adapters"]
    assert row["tokens_per_second"] > 0
    assert 0.5 < row["fill"] <= 1


@pytest.fixture(scope="module")
def reference(benchmark: Benchmark) -> dict[str, Any]:
    return benchmark.measure(BY_NAME["stock-all"])


def test_rounded_bases_train(benchmark: Benchmark) -> None:
    plain, rounded = (benchmark.measure(BY_NAME[name]) for name in ("parity-bf16", "parity-nf4"))
    assert rounded["final_loss"] == pytest.approx(plain["final_loss"], rel=0.01)
    assert rounded["losses"] != plain["losses"]


def test_a_recipe_is_measured_as_it_stands(
    benchmark: Benchmark, reference: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "higgs_v2_lora_16gb.yaml").write_text(
        "model: {source: somewhere}\ndata: {train: nowhere, row_tokens: 4096}\nadapt: {rank: 4}\n"
        "train: {steps: 9, batch_size: 8, fused_lora: true, gradient_checkpointing: auto}\n"
    )
    monkeypatch.setattr(harness, "RECIPES", tmp_path)
    measured = benchmark.measure(BY_NAME["ours-16gb"])
    assert (measured["rank"], measured["row_tokens"], measured["recomputed_layers"]) == (
        4,
        benchmark.size.row_tokens,
        0,
    )
    assert measured["active_adapters"] == reference["active_adapters"] / 4


@dataclasses.dataclass(frozen=True)
class Plan:
    available: int = 80
    recomputed: int = 0

    def with_least_recomputation(self) -> Plan:
        return dataclasses.replace(self, recomputed=80 - self.available)


def test_the_plan_is_for_the_smaller_gpu(benchmark: Benchmark, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "plan_memory", lambda *_: Plan())
    row = next(
        packed_rows(
            utterances(benchmark.family, random_codes(8, 64), duration_scale=benchmark.size.duration_scale),
            benchmark.size.row_tokens,
        )
    )
    variant = dataclasses.replace(BY_NAME["ours-bf16"], settings=("train.gradient_checkpointing=auto",))
    assert benchmark.recomputed(benchmark.recipe(variant), row, None) == 0
    assert benchmark.recomputed(benchmark.recipe(variant), row, 16) == 64
    assert benchmark.recomputed(benchmark.recipe(BY_NAME["ours-bf16"]), row, 16) is None


def test_the_first_utterances_are_shared_out_where_rows_are_short(benchmark: Benchmark) -> None:
    variant = dataclasses.replace(BY_NAME["ours-bf16"], settings=("data.row_tokens=512",))
    first, second, *_ = benchmark._own_micro_batches(benchmark.recipe(variant))
    assert len(first) > 1
    assert sum(map(len, first)) == 8
    assert len(second) == 1
    assert all(sum(map(len, sequences)) <= 512 for sequences in (*first, *second))


def row(name: str, **changes: Any) -> dict[str, Any]:
    columns = {
        "seconds_per_step": 0.5,
        "target_audio_seconds_per_second": 600.0,
        "tokens_per_second": 32_000.0,
        "model_tflops": 400.0,
        "peak_gib": 57.0,
        "fill": 0.99,
        "seconds_to_first_step": 20.0,
        "host_syncs_per_step": 2,
        "first_loss": 7.5,
        "gradient_norm": 0.25,
    }
    return {"name": name, **columns, **changes}


def add(results: Results, *new: dict[str, Any]) -> dict[str, dict[str, Any]]:
    for one in new:
        results.add(one, BY_NAME[one["name"]])
    written = json.loads(results.file.read_text())
    return {one["name"]: one for one in written["rows"]}


def test_agreement_is_by_loss_and_gradient(tmp_path: Path) -> None:
    results = Results(tmp_path, keep=False)
    alone = add(results, row("ours-bf16"))
    assert alone["ours-bf16"]["agrees"] is None
    written = add(
        results,
        row("stock-all"),
        row("ours-plain-bf16", gradient_norm=0.26),
        row("ours-fp8", gradient_norm=0.26),
        row("stock-batch-2", gradient_norm=0.1),
        {"name": "ours-8gb", "error": "OutOfMemoryError: no"},
    )
    assert {name: one.get("agrees") for name, one in written.items()} == {
        "stock-batch-2": True,  # other adapters: only the loss counts
        "stock-all": True,
        "ours-plain-bf16": False,
        "ours-bf16": True,
        "ours-fp8": True,  # within the wider tolerance of rounded weights
        "ours-8gb": None,
    }
    assert list(written) == [name for name in BY_NAME if name in written]


def test_shares_are_of_the_higher_ceiling_of_the_same_run(tmp_path: Path) -> None:
    results = Results(tmp_path, keep=False)
    results.ceiling({"name": "ceiling-before", "tflops": 780.0, "sustained_tflops": 600.0})
    assert add(results, row("ours-bf16"))["ours-bf16"]["share_of_ceiling"] == pytest.approx(400 / 780)
    results.ceiling({"name": "ceiling-after", "tflops": 800.0, "sustained_tflops": 600.0})
    assert add(results)["ours-bf16"]["share_of_ceiling"] == pytest.approx(0.5)

    later = Results(tmp_path, keep=True)
    later.ceiling({"name": "ceiling-before", "tflops": 500.0, "sustained_tflops": 600.0})
    written = add(later, row("ours-fp8"))
    assert written["ours-fp8"]["share_of_ceiling"] == pytest.approx(0.8)
    assert written["ours-bf16"]["share_of_ceiling"] == pytest.approx(0.5)
    assert json.loads(later.file.read_text())["ceilings_tflops"] == {"ceiling-before": 500.0}


def test_final_losses_are_compared_with_bf16(tmp_path: Path) -> None:
    results = Results(tmp_path, keep=False)
    for name, final in (("parity-bf16", 4.0), ("parity-fp8", 4.03), ("parity-nf4", 4.05)):
        results.add({"name": name, "first_loss": 7.0, "final_loss": final}, BY_NAME[name])
    ended = {one["name"]: one["passed"] for one in json.loads(results.file.read_text())["parity"]}
    assert ended == {"parity-bf16": True, "parity-fp8": True, "parity-nf4": False}


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("raise ValueError('as it is')", "ValueError: as it is"),
        ("import time; time.sleep(60)", "not done after 1 s"),
        ("import sys; print('odd'); sys.exit(3)", "ended with 3: odd"),
    ],
)
def test_a_row_that_fails_reports_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, error: str
) -> None:
    file = tmp_path / "script.py"
    file.write_text(script)
    monkeypatch.setattr(train_step, "SCRIPT", file)
    assert train_step.measure_in_subprocess(BY_NAME["ours-bf16"], OPTIONS, 1 if "sleep" in script else 60) == {
        "name": "ours-bf16",
        "error": error,
    }


def test_no_time_and_no_recipe_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "time" in train_step.measure_in_subprocess(BY_NAME["ours-bf16"], OPTIONS, 0)["error"]
    monkeypatch.setattr(train_step, "ROOT", tmp_path)
    assert "no recipes/higgs_v2_lora_8gb" in train_step.measure_in_subprocess(BY_NAME["ours-8gb"], OPTIONS, 60)["error"]


def test_a_run_writes_numbers_plot_and_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(variant: Any, _: RowOptions, __: float) -> dict[str, Any]:
        if variant.kind == "ceiling":
            return {
                "name": variant.name,
                "tflops": 800.0,
                "sustained_tflops": 600.0,
                "about": {"machine": "a card", "versions": {"torch": "2"}},
            }
        if variant.name == "stock-packed-flex":
            return {"name": variant.name, "error": "RuntimeError: no | such kernel\nmore"}
        return row(variant.name)

    monkeypatch.setattr(train_step, "measure_in_subprocess", measured)
    (tmp_path / "train_step.md").write_text(
        f"before\n{train_step.MEASURED_BEGIN}\nold\n{train_step.MEASURED_END}\nafter\n"
    )
    assert train_step.main(["--tiny", "--device", "cpu", "--out", str(tmp_path)]) == 0
    facts = json.loads((tmp_path / "train_step.json").read_text())
    assert facts["ceiling_tflops"] == 800
    assert (facts["machine"], facts["versions"]) == ("a card", {"torch": "2"})
    assert [one["name"] for one in facts["rows"]] == [name for name in BY_NAME if not name.startswith(("par", "ceil"))]

    page = (tmp_path / "train_step.md").read_text()
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "old" not in page
    assert "| ours-bf16 | 0.500 | 600 | 32,000 | 400 | 50.0% |" in page
    assert "no \\| such kernel" in page
    heads, *lines = [line for line in page.splitlines() if line.startswith("| ")]
    assert {line.replace("\\|", "").count("|") for line in lines} == {heads.count("|")}
    assert (tmp_path / "train_step.svg").read_text().count("<rect") == 1 + 2 * (len(facts["rows"]) - 1)
    assert "ours-bf16" in capsys.readouterr().out


def test_some_rows_are_added_to_those_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        train_step,
        "measure_in_subprocess",
        lambda variant, *_: row(variant.name, tflops=800.0, sustained_tflops=600.0, model_tflops=500.0, first_loss=8.0),
    )
    add(Results(tmp_path, keep=False), row("stock-all"), row("ours-bf16"))
    # It began elsewhere than the reference: the run fails.
    assert train_step.main(["--tiny", "--device", "cpu", "--out", str(tmp_path), "--rows", "ours-bf16"]) == 1
    facts = json.loads((tmp_path / "train_step.json").read_text())
    assert [(one["name"], one["model_tflops"], one["agrees"]) for one in facts["rows"]] == [
        ("stock-all", 400.0, True),
        ("ours-bf16", 500.0, False),
    ]
