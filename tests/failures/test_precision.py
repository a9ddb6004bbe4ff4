"""Types, devices and memory. Tests that need a GPU are marked `gpu`."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import myna
from myna.core.config import AdaptSettings, Recipe, dump_recipe, load_recipe
from myna.core.errors import ConfigError, TrainingError
from myna.data.loader import Shard
from myna.models import open_family
from myna.models.base import Batch, Family, RenderedSequence, get_base_model
from myna.models.codecs import full_precision
from myna.models.higgs_v2 import forward
from myna.models.higgs_v2.codec import HiggsCodec
from myna.models.higgs_v2.forward import HiggsObjective
from myna.models.higgs_v2.tiny import save_tiny
from myna.models.lora import make_trainable
from myna.train import memory_plan
from myna.train.distributed import init_accelerator
from myna.train.loop import make_loader
from myna.train.loss import term_weights
from myna.train.memory_plan import LargestBatch, plan_memory
from myna.train.precision import Precision, PrecisionName, choose_precision
from myna.train.trainer import Trainer
from tests.torch_settings import restored_settings, torch_settings

from .conftest import TrainWith
from .tiny_setup import cloning, load, make_recipe, stock_inputs, train_run

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
Patch = pytest.MonkeyPatch
HEADS = ("audio_head", "audio_embedding")
WITH_HEADS = AdaptSettings(rank=4, train_modules=HEADS)
gpu = pytest.mark.gpu


@pytest.fixture
def card() -> Iterator[torch.device]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    free_garbage()
    yield torch.device("cuda", 0)
    free_garbage()


def free_garbage() -> None:
    """Free what earlier tests left on the card, which would otherwise be freed while memory is measured."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


@contextmanager
def part_of(card: torch.device, share: float) -> Iterator[None]:
    """A card with room for so much of what the last training took at its peak, beside what it holds anyway. What was
    garbage at its beginning would count as taken; `card` has freed it."""
    gc.collect()
    torch.cuda.empty_cache()
    held, total = torch.cuda.memory_allocated(card), torch.cuda.get_device_properties(card).total_memory
    taken = torch.cuda.max_memory_allocated(card) - held
    try:
        torch.cuda.set_per_process_memory_fraction((held + share * taken) / total, card)
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, card)


def student_for(recipe: Recipe, name: PrecisionName, device: torch.device, folder: Path) -> Trainer:
    precision = Precision(name, "a test")
    family = open_family(recipe.model.source)
    return Trainer.from_recipe(
        recipe, family, precision, init_accelerator(recipe, precision, device, folder), lambda _: None
    )


def first_steps(student: Trainer, count: int = 3) -> list[float]:
    """Losses of the first optimizer steps."""
    recipe = student.recipe
    loader = make_loader(recipe, student.family, recipe.data.train)
    weights = term_weights(student.family.loss_terms, recipe.loss)
    stream = loader.steps(recipe.train.batch_size, recipe.train.micro_batch_size, Shard())
    tallies = [student.train_step(next(stream), weights, recipe.train.learning_rate)[0] for _ in range(count)]
    return [tally.metrics(student.family.loss_terms, weights)["loss"] for tally in tallies]


# fp16 gradients


def test_trained_weights_are_fp32_and_can_be_unscaled(family: Family) -> None:
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["audio_lm_head"])
    by_peft = get_peft_model(load(family, torch.float16), config)
    left = {name: p for name, p in by_peft.named_parameters() if p.requires_grad and p.dtype == torch.float16}
    assert [name.split(".")[2] for name in left] == ["audio_lm_head"], "the cause: PEFT leaves these in fp16"
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        _scaled_step(list(left.values()), lambda: sum(p.float().sum() for p in left.values()))

    model = make_trainable(load(family, torch.float16), family, WITH_HEADS)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert {parameter.dtype for parameter in trained} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.float16}
    batch, before = family.collate([family.render(cloning())]), [parameter.detach().clone() for parameter in trained]
    with torch.autocast("cpu", torch.float16):
        _scaled_step(trained, lambda: family.objective(model)(batch).sums.sum())
    assert any(not torch.equal(a, b) for a, b in zip(before, trained, strict=True))


def _scaled_step(parameters: list[nn.Parameter], loss: Callable[[], Any]) -> None:
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=256.0), torch.optim.AdamW(parameters)
    scaler.scale(loss()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


@gpu
@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_fp16_trains_heads_and_embeddings_on_a_card(workspace: Path, tmp_path: Path, checkpointing: str) -> None:
    recipe = make_recipe(
        workspace,
        adapt={"train_modules": list(HEADS)},
        train={"device": "cuda", "precision": "fp16", "steps": 4, "gradient_checkpointing": checkpointing},
    )
    _, callback = train_run(recipe, tmp_path / "fp16")
    _, exact = train_run(
        make_recipe(workspace, adapt={"train_modules": list(HEADS)}, train={"steps": 4}), tmp_path / "fp32"
    )
    losses = [[row["loss"] for row in result.steps] for result in (callback, exact)]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
    assert all(math.isfinite(row["gradient_norm"]) for row in callback.steps)
    assert any("with gradient scaler" in line for line in callback.messages)


# Precision decided in several places


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0)])
def test_one_decision_says_the_type_and_whether_there_is_a_scaler(capability: tuple[int, int]) -> None:
    for asked in ("auto", "fp32", "fp16", "pure-fp16"):
        precision = choose_precision(asked, CUDA, capability)
        has_scaler = precision.mixed_precision == "fp16"
        assert not (has_scaler and precision.trainable_dtype != torch.float32)
        assert precision.compute_dtype != torch.bfloat16 or not has_scaler
    assert choose_precision("auto", CUDA, capability).name == ("bf16" if capability >= (8, 0) else "fp16")


def test_bf16_on_a_gpu_without_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"bf16 begins at 8\.0"):
        choose_precision("bf16", CUDA, (7, 5))
    with pytest.raises(ConfigError, match="needs a CUDA card"):
        choose_precision("fp16", CPU)


def test_loader_and_loop_read_the_same_decision(workspace: Path, tmp_path: Path) -> None:
    student = student_for(make_recipe(workspace, adapt={"train_modules": list(HEADS)}), "bf16", CPU, tmp_path)
    assert student.accelerator.scaler is None
    assert student.accelerator.mixed_precision == "bf16"
    types = {True: set[torch.dtype](), False: set[torch.dtype]()}
    for parameter in student.model.parameters():
        types[parameter.requires_grad].add(parameter.dtype)
    assert types == {True: {torch.float32}, False: {torch.bfloat16}}
    assert all(math.isfinite(loss) for loss in first_steps(student, 1))


@gpu
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_a_scaler_is_there_for_fp16_alone_and_never_over_half_precision(
    card: torch.device, workspace: Path, tmp_path: Path, name: PrecisionName
) -> None:
    student = student_for(make_recipe(workspace, adapt={"train_modules": list(HEADS)}), name, card, tmp_path)
    assert (student.accelerator.scaler is not None) == (name == "fp16")
    losses = first_steps(student)
    assert all(math.isfinite(loss) for loss in losses) and losses[-1] < losses[0]
    state = student.optimizer.state
    assert {state[parameter]["exp_avg"].dtype for parameter in student.trainable_parameters.values()} == {torch.float32}


# fp32 written into bf16


def check_fp32_norms_on_a_bf16_base(family: Family, trained: tuple[str, ...], device: torch.device) -> None:
    model = make_trainable(
        load(family, torch.bfloat16).to(device), family, AdaptSettings(rank=4, train_modules=trained)
    )
    rendered = family.render(cloning())
    inputs = {name: tensor.to(device) for name, tensor in stock_inputs(rendered).items()}
    with torch.autocast(device.type, torch.bfloat16):
        with pytest.raises(RuntimeError, match=r"masked_scatter|Index put|same dtype"):
            get_base_model(model)(**inputs)  # the cause, in transformers' own forward
        batch = family.collate([rendered]).to(device)
        assert HiggsObjective(model).hidden(batch).dtype == torch.bfloat16, "and fp32 does not spread"  # type: ignore[arg-type]
        sums = family.objective(model)(batch).sums
    sums.sum().backward()
    exact = family.objective(load(family))(family.collate([rendered])).sums
    assert torch.allclose(sums.cpu(), exact, rtol=0.02)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("trained", [("audio_embedding",), ("norms",), ("norms", *HEADS)])
def test_fp32_norms_and_embeddings_are_cast_where_they_meet_bf16(family: Family, trained: tuple[str, ...]) -> None:
    check_fp32_norms_on_a_bf16_base(family, trained, CPU)


@gpu
@pytest.mark.parametrize("trained", [("audio_embedding",), ("norms", *HEADS)])
def test_fp32_norms_and_embeddings_are_cast_on_a_gpu(
    card: torch.device, family: Family, trained: tuple[str, ...]
) -> None:
    check_fp32_norms_on_a_bf16_base(family, trained, card)


def test_a_run_with_trained_norms_and_embeddings_trains_in_bf16(train_with: TrainWith) -> None:
    changes = {"adapt": {"train_modules": ["norms", *HEADS]}}
    (_, half), (_, exact) = (train_with(**changes, train={"precision": name}) for name in ("bf16", "fp32"))
    for one, other in zip(half.steps, exact.steps, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=0.02)


# Settings of the process


@pytest.mark.parametrize("asked", ["medium", "highest"])
def test_no_command_changes_the_precision_of_the_process(train_with: TrainWith, asked: str) -> None:
    with restored_settings():
        torch.set_float32_matmul_precision(asked)
        torch.backends.cudnn.benchmark = asked == "medium"
        before = torch_settings()
        run, _ = train_with(train={"steps": 1, "learning_rate": 1e-2})
        assert torch_settings() == before, "training"
        voice = myna.load(run.folder, device="cpu")
        assert torch_settings() == before, "loading"
        voice.speak("One.", max_seconds=0.5)
        codec = voice.engine.codec
        codec.decode(codec.encode(np.zeros((1, 4 * codec.hop), np.float32))[0])
        assert torch_settings() == before, "speaking, encoding, decoding"
        with full_precision(torch.device("cuda")):
            inside = torch_settings()
        assert inside["float32_matmul_precision"] == "highest" and not inside["cudnn.allow_tf32"]
        assert torch_settings() == before, "a codec on a card"
        myna.verify(run, device="cpu", quick=True)
        assert torch_settings() == before, "verifying"
        myna.doctor()
        assert torch_settings() == before, "the doctor"


# Tensors on two devices


def test_training_never_opens_the_codec_and_batches_are_made_on_the_cpu(
    train_with: TrainWith, monkeypatch: Patch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a codec inside the training")

    monkeypatch.setattr(HiggsCodec, "open", refuse)
    monkeypatch.setattr(HiggsCodec, "encode", refuse)
    learned: list[Batch] = []
    whole = Trainer.train_step

    def watched(self: Trainer, passes: Sequence[Batch], *given: Any) -> Any:
        learned.extend(passes)
        return whole(self, passes, *given)

    monkeypatch.setattr(Trainer, "train_step", watched)
    train_with(train={"steps": 2}, data={"workers": 2})
    assert learned and all(tensor.device == CPU for batch in learned for tensor in tensors_of(batch).values())


def test_one_move_takes_all_of_a_batch_along(family: Family) -> None:
    batch = family.collate([family.render(cloning(), supervise_text=True)])
    moved = tensors_of(batch.to(torch.device("meta")))
    assert len(moved) >= 10
    stayed = [name for name, tensor in moved.items() if tensor.device.type != "meta"]
    assert stayed == ["counts"], "which are counted on the CPU"


def tensors_of(batch: Any) -> dict[str, torch.Tensor]:
    return {f.name: value for f in fields(batch) if isinstance(value := getattr(batch, f.name), torch.Tensor)}


@gpu
def test_the_loop_moves_batches_to_the_gpu(card: torch.device, workspace: Path, family: Family, tmp_path: Path) -> None:
    model = load(family).to(card)
    with pytest.raises(RuntimeError, match="same device"):
        family.objective(model)(family.collate([family.render(cloning())]))  # the cause
    recipe = make_recipe(
        workspace, data={"workers": 2, "evaluation": str(workspace / "evaluation")}, train={"device": "cuda"}
    )
    _, callback = train_run(recipe, tmp_path / "run")
    assert len(callback.steps) == 3 and callback.evaluations


# Recomputed layers


def gradients(family: Family, recompute: int, device: torch.device = CPU) -> tuple[int, list[torch.Tensor]]:
    """Return how often a layer was run, and every gradient."""
    torch.manual_seed(0)
    model = make_trainable(load(family).to(device), family, WITH_HEADS.model_copy(update={"dropout": 0.3})).train()
    objective, calls = family.objective(model, recompute=recompute).train(), 0
    whole = forward.run_layer

    def counted(*given: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return whole(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "run_layer", counted)
        torch.manual_seed(1)
        objective(family.collate([family.render(cloning())]).to(device)).sums.sum().backward()
    return calls, [p.grad.cpu() for p in model.parameters() if p.grad is not None]


def check_recomputed_layers(family: Family, device: torch.device) -> None:
    calls, exact = gradients(family, 0, device)
    assert calls == 2, "two layers, each once"
    for recompute, expected in ((2, 4), (1, 3)):
        calls, recomputed = gradients(family, recompute, device)
        assert calls == expected
        assert len(recomputed) == len(exact) >= 2 * 20
        for one, other in zip(recomputed, exact, strict=True):
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-5), "dropout too"


def test_decoder_layers_are_recomputed_with_the_same_gradients(family: Family) -> None:
    check_recomputed_layers(family, CPU)


def test_recomputing_keeps_less_for_the_backward_pass(family: Family) -> None:
    batch = family.collate([family.render(cloning(target=60))])

    def kept(recompute: int) -> int:
        size = 0

        def note(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal size
            size += tensor.numel() * tensor.element_size()
            return tensor

        objective = family.objective(make_trainable(load(family), family, WITH_HEADS), recompute=recompute).train()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            objective(batch)
        return size

    assert kept(2) < 0.5 * kept(0)


def test_the_recipe_switches_recomputing_on(train_with: TrainWith, monkeypatch: Patch) -> None:
    seen = []
    learn_ = Trainer.train_step

    def note(self: Trainer, *given: Any) -> Any:
        seen.append(self.accelerator.unwrap_model(self.objective).recompute)
        return learn_(self, *given)

    monkeypatch.setattr(Trainer, "train_step", note)
    (_, plain), (_, full) = (train_with(train={"gradient_checkpointing": how}) for how in ("none", "full"))
    assert seen == [0] * len(plain.steps) + [2] * len(full.steps), "of two layers"
    assert [row["loss"] for row in plain.steps] == pytest.approx([row["loss"] for row in full.steps], abs=1e-6)


@gpu
def test_recomputing_saves_memory_on_a_gpu(card: torch.device, family: Family, tmp_path: Path) -> None:
    check_recomputed_layers(family, card)
    wide = open_family(str(save_tiny(tmp_path / "wide", hidden=256, layers=8)))
    batch = wide.collate([wide.render(cloning(target=1500))]).to(card)

    def most(recompute: int) -> int:
        model = make_trainable(load(wide, torch.bfloat16).to(card), wide, WITH_HEADS)
        objective = wide.objective(model, recompute=recompute).train()
        free_garbage()
        before = torch.cuda.memory_allocated(card)
        with torch.autocast("cuda", torch.bfloat16):
            objective(batch).sums.sum().backward()
        return torch.cuda.max_memory_allocated(card) - before

    assert most(8) < 0.6 * most(0)


# Out of memory


def true_size(tiny: Family, rendered: RenderedSequence) -> RenderedSequence:
    """Return the sequence with the ids of the released model."""
    ours, theirs = (getattr(family, "config") for family in (tiny, open_family("higgs-v2")))  # noqa: B009
    ids = np.where(rendered.ids == ours.audio_token_id, theirs.audio_token_id, rendered.ids)
    return replace(rendered, ids=np.where(ids == ours.audio_delay_token_id, theirs.audio_delay_token_id, ids))


def test_the_plan_of_the_released_model_is_made_without_loading_it(workspace: Path, family: Family) -> None:
    """The base alone took 23 GB where it was in fp32."""
    sequences = (true_size(family, family.render(cloning(target=500))),)
    recipe = make_recipe(workspace, model={"source": "higgs-v2"}, adapt={"rank": 16, "alpha": 32})
    precision = choose_precision("auto", CUDA, (9, 0))
    planned = plan_memory(open_family("higgs-v2"), recipe, precision, CPU, LargestBatch(sequences, len(sequences[0])))
    # Beside the weights in bf16 lie such copies of A and B, and a little room to align their rows.
    assert planned.frozen == pytest.approx(2 * (5_377_281_024 + 39_452_672), rel=0.02)
    assert planned.trained == 4 * 39_452_672
    assert planned.total < 14 * 2**30
    assert all(part in planned.table() for part in ("frozen weights", "optimizer", "activations", "in all"))


def test_the_memory_plan_is_logged_before_loading_and_measured_after(train_with: TrainWith, monkeypatch: Patch) -> None:
    _, callback = train_with(train={"steps": 1})
    order = [
        next(n for n, line in enumerate(callback.messages) if sign in line)
        for sign in ("memory plan: fp32", "parameters learn", "measured in two")
    ]
    assert order == sorted(order)

    monkeypatch.setattr(memory_plan, "available_memory", lambda _: 100_000)
    monkeypatch.setattr(Trainer, "from_recipe", lambda *_: pytest.fail("it was loaded all the same"))
    with pytest.raises(TrainingError, match=r"the weights alone take \d"):
        train_with()


def follow(error: TrainingError, settings: dict[str, str]) -> dict[str, str]:
    """The settings after doing what an error says."""
    words = error.hint.split("   ")[0].split()
    said = [word for word in words if "=" in word]
    assert said, error.hint
    return settings | dict(word.split("=", 1) for word in said)


@contextmanager
def memory_for(tokens: int) -> Iterator[None]:
    """A device on which a longer pass than this runs out."""
    whole = HiggsObjective.forward

    def tight(self: HiggsObjective, batch: Any) -> Any:
        if torch.is_grad_enabled() and batch.tokens > tokens and not batch.codes.is_meta:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return whole(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HiggsObjective, "forward", tight)
        yield


def typed(recipe: Recipe, settings: dict[str, str], folder: Path) -> Recipe:
    """A recipe with what was typed after --set."""
    path = folder / "recipe.yaml"
    path.write_text(dump_recipe(recipe))
    return load_recipe(path, [f"{key}={value}" for key, value in settings.items()])


def test_running_out_of_memory_names_settings_that_help(workspace: Path, tmp_path: Path) -> None:
    recipe = make_recipe(
        workspace, data={"row_tokens": 300}, train={"micro_batch_size": 4, "batch_size": 4, "steps": 1}
    )
    with memory_for(tokens=700):
        with pytest.raises(
            TrainingError, match=r"out of memory in the longest pass, [\d,]+ tokens\nmemory plan"
        ) as caught:
            train_run(recipe, tmp_path / "first")
        settings = follow(caught.value, {})
        assert settings == {"train.micro_batch_size": "2"}
        _, callback = train_run(typed(recipe, settings, tmp_path), tmp_path / "second")
    assert len(callback.steps) == 1


@gpu
def test_running_out_of_gpu_memory_names_settings_that_help(
    card: torch.device, workspace: Path, tmp_path: Path
) -> None:
    """The allocator is held to a part of the card; advice is followed until it fits."""
    wide = save_tiny(tmp_path / "wide", hidden=256, layers=8)
    recipe = make_recipe(
        workspace,
        model={"source": str(wide), "check_pretrained": False},
        train={"micro_batch_size": 8, "batch_size": 8, "steps": 2, "device": "cuda", "gradient_checkpointing": "none"},
    )
    _, callback = train_run(recipe, tmp_path / "free")
    assert any("measured in two" in line for line in callback.messages)
    settings: dict[str, str] = {}
    with part_of(card, 0.6):
        for attempt in range(6):
            gc.collect()
            torch.cuda.empty_cache()
            try:
                _, callback = train_run(typed(recipe, settings, tmp_path), tmp_path / f"tight{attempt}")
                break
            except TrainingError as error:
                assert "out of memory in the longest pass" in error.what
                settings = follow(error, settings)
        else:
            pytest.fail(f"never fitted with {settings}")
    assert settings and len(callback.steps) == 2


@gpu
def test_the_plan_recomputes_layers_on_a_gpu_that_is_too_small(
    card: torch.device, workspace: Path, tmp_path: Path
) -> None:
    """Training fits on the same card as soon as layers are recomputed automatically."""
    wide = save_tiny(tmp_path / "wide", hidden=512, layers=8)
    recipe = make_recipe(
        workspace,
        model={"source": str(wide), "check_pretrained": False},
        train={"micro_batch_size": 8, "batch_size": 8, "steps": 2, "device": "cuda"},
    )
    _, callback = train_run(recipe, tmp_path / "free")
    assert any("no layer recomputed, since everything fits" in line for line in callback.messages)
    with part_of(card, 0.8):
        _, callback = train_run(recipe, tmp_path / "tight")
    assert any("of 8 layers recomputed, the fewest that fit" in line for line in callback.messages)
    assert len(callback.steps) == 2
