"""Running mean of the weights: its values, its use in evaluations and its saving."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from myna.core.run_folder import Run, checkpoint_folder
from myna.data.loader import Shard
from myna.models import open_family
from myna.models.lora import load_adapter
from myna.train import loop
from myna.train.loop import make_loader, run_training
from myna.train.loss import term_weights, weighted_loss
from myna.train.optimizer import WeightEMA
from tests.train.resume_helper import Notes, make_workspace, metrics, recipe_for


def weights(*values: float, dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    return {"one": nn.Parameter(torch.tensor(values, dtype=dtype)), "two": nn.Parameter(torch.ones(2, 3, dtype=dtype))}


def test_a_mean_starts_at_the_weights_and_follows_them() -> None:
    parameters = weights(0.0, 4.0)
    ema = WeightEMA(parameters, decay=0.5)
    assert torch.equal(ema.averages["one"], torch.tensor([0.0, 4.0]))
    with torch.no_grad():
        parameters["one"].fill_(8.0)
    expected = torch.tensor([0.0, 4.0])
    for step in range(1, 8):
        ema.update(parameters)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * 8.0
        torch.testing.assert_close(ema.averages["one"], expected)
    assert ema.steps == 7 and torch.equal(ema.averages["two"], torch.ones(2, 3))


def test_a_long_memory_forgets_the_beginning_soon() -> None:
    """The decay rises from a small value: at 0.9999 from the first step, 99 % of the mean would be random weights."""
    parameters = weights(0.0)
    ema = WeightEMA(parameters, decay=0.9999)
    with torch.no_grad():
        parameters["one"].fill_(1.0)
    for _ in range(100):
        ema.update(parameters)
    assert ema.averages["one"].item() > 0.99


def test_a_decay_of_zero_is_the_last_weights() -> None:
    parameters = weights(0.0)
    ema = WeightEMA(parameters, decay=0.0)
    for value in (3.0, 7.0):
        with torch.no_grad():
            parameters["one"].fill_(value)
        ema.update(parameters)
        assert ema.averages["one"].item() == value


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_it_stands_in_and_gives_way_exactly(dtype: torch.dtype) -> None:
    parameters = weights(0.1, 1 / 3, dtype=dtype)
    ema = WeightEMA(parameters, decay=0.9)
    with torch.no_grad():
        parameters["one"].mul_(1.7)
    ema.update(parameters)
    before, storage = parameters["one"].detach().clone(), parameters["one"].data_ptr()
    means = {name: mean.clone() for name, mean in ema.averages.items()}
    assert means["one"].dtype == torch.float32, "small steps of half-precision weights would be lost"
    with pytest.raises(ZeroDivisionError), ema.swapped_in(parameters):
        assert torch.equal(parameters["one"].detach(), ema.averages["one"].to(dtype))
        assert not torch.equal(parameters["one"].detach(), before)
        raise ZeroDivisionError
    assert torch.equal(parameters["one"].detach(), before)
    assert parameters["one"].data_ptr() == storage, "the optimizer and DDP hold on to it"
    assert all(torch.equal(ema.averages[name], mean) for name, mean in means.items())


def test_what_is_evaluated_and_saved_is_the_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "run_preflight", lambda *_, **__: None)
    workspace = make_workspace(tmp_path / "workspace")
    how = {"steps": 6, "learning_rate": 2e-2, "schedule": "constant", "evaluate_every": 6}
    runs = {}
    for name, ema in {"plain": None, "mean": 0.9}.items():
        recipe = recipe_for(
            workspace, data={"evaluation": str(workspace / "evaluation")}, train=how | {"ema_decay": ema}
        )
        runs[name] = Run.create(tmp_path / name, recipe)
        run_training(recipe, runs[name], Notes())
    rows = {name: [json.loads(line) for line in metrics(run.folder)] for name, run in runs.items()}
    assert rows["plain"][:-1] == rows["mean"][:-1], "it changes nothing that is learned"
    assert rows["plain"][-1]["evaluation"]["loss"] != rows["mean"][-1]["evaluation"]["loss"]

    state = load_file(checkpoint_folder(runs["mean"], 6) / "state.safetensors")
    for folder in (runs["mean"].adapter, checkpoint_folder(runs["mean"], 6) / "adapter"):
        saved = load_file(folder / "adapter_model.safetensors")
        for name, tensor in saved.items():
            full = name.replace("lora_A.weight", "lora_A.default.weight").replace(
                "lora_B.weight", "lora_B.default.weight"
            )
            assert torch.equal(tensor, state[f"ema/{full}"]), name
            if "audio_mlp" in name and "lora_B" in name:
                assert not torch.equal(tensor, state[f"weight/{full}"]), name

    # Opened again it has the loss that was measured.
    family, recipe = open_family(str(workspace / "model")), runs["mean"].recipe
    base = family.load_model(dtype=torch.float32, device="cpu", text_head=False)
    objective = family.objective(load_adapter(base, runs["mean"].adapter)).eval()
    sums = counts = torch.zeros(len(family.loss_terms), dtype=torch.float64)
    with torch.no_grad():
        for batch in make_loader(recipe, family, workspace / "evaluation").evaluation_batches(1, Shard()):
            sums, counts = sums + objective(batch).sums, counts + batch.counts
    loss = float(weighted_loss(sums, counts, term_weights(family.loss_terms, recipe.loss)))
    assert loss == pytest.approx(rows["mean"][-1]["evaluation"]["loss"], abs=1e-6)
