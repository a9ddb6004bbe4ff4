"""Preflight: every failure on a tiny real model, and no effect on a run that passes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

from myna import prepare
from myna.audio.files import write_audio
from myna.core.config import Recipe, parse_recipe
from myna.core.errors import DataError, TrainingError
from myna.core.run_folder import Run
from myna.data.conversation import Conversation
from myna.data.loader import Shard
from myna.models import attention, save_tiny_model
from myna.models.base import IGNORE_INDEX, RenderedSequence, get_base_model
from myna.models.higgs_v2 import forward
from myna.models.higgs_v2.batch import HiggsBatch
from myna.models.higgs_v2.family import HiggsV2
from myna.train import loop, preflight
from myna.train.distributed import init_accelerator
from myna.train.loop import make_loader, run_training
from myna.train.loss import term_weights
from myna.train.memory_plan import largest_batch, plan_memory
from myna.train.precision import choose_precision
from myna.train.preflight import CheckContext, run_preflight
from myna.train.trainer import Trainer
from tests.tone_corpus import SAMPLE_RATE, SPEAKER_PITCHES, tone_speech, write_recordings

CPU = torch.device("cpu")


class Late(HiggsV2):
    """Family that learns frame t + 2."""

    def collate(self, sequences: Sequence[RenderedSequence], *, offset: int = 1) -> HiggsBatch:
        return super().collate(sequences, offset=offset + 1)


class Copying(HiggsV2):
    """Family that learns the frame it reads."""

    def collate(self, sequences: Sequence[RenderedSequence], *, offset: int = 1) -> HiggsBatch:
        return super().collate(sequences, offset=offset - 1)


class Stubborn(HiggsV2):
    """Family that ignores the offset of the labels."""

    def collate(self, sequences: Sequence[RenderedSequence], *, offset: int = 1) -> HiggsBatch:
        del offset
        return super().collate(sequences)


class Losing(HiggsV2):
    """Family that loses the labels of a codebook."""

    def collate(self, sequences: Sequence[RenderedSequence], *, offset: int = 1) -> HiggsBatch:
        lame = [replace(s, code_labels=np.where(np.arange(8) == 3, IGNORE_INDEX, s.code_labels)) for s in sequences]
        return super().collate(lame, offset=offset)


class Mute(HiggsV2):
    """Family that masks every label."""

    def render(self, conversation: Conversation, **how: Any) -> RenderedSequence:
        rendered = super().render(conversation, **how)
        return replace(rendered, code_labels=np.full_like(rendered.code_labels, IGNORE_INDEX))


class Greedy(HiggsV2):
    """Family that learns the prompt too."""

    def render(self, conversation: Conversation, **how: Any) -> RenderedSequence:
        rendered = super().render(conversation, **how)
        return replace(rendered, labels=rendered.ids, code_labels=rendered.codes)


class Endless(HiggsV2):
    """Family that masks the ends of stream, as transformers' processor does."""

    def render(self, conversation: Conversation, **how: Any) -> RenderedSequence:
        rendered = super().render(conversation, **how)
        ends = rendered.code_labels == self.config.audio_stream_eos_id
        return replace(rendered, code_labels=np.where(ends, IGNORE_INDEX, rendered.code_labels))


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a random model, the same after a little full training, clips to learn and others to evaluate on."""
    folder = tmp_path_factory.mktemp("workspace")
    save_tiny_model(folder / "model")
    write_recordings(folder / "recordings")
    for speaker, pitch in SPEAKER_PITCHES.items():
        for text in ("hello", "you"):
            clip = folder / "others" / speaker / f"{text}.wav"
            write_audio(clip, tone_speech(text, pitch), SAMPLE_RATE)
            clip.with_suffix(".txt").write_text(text)
    for source, out in (("recordings", "prepared"), ("others", "evaluation")):
        prepare(str(folder / source), folder / out, model=str(folder / "model"), device="cpu")
    teach(folder, HiggsV2, folder / "taught", steps=15)
    return folder


def recipe(workspace: Path, base: str = "taught", **changes: dict[str, Any]) -> Recipe:
    tree: dict[str, dict[str, Any]] = {
        "model": {"source": str(workspace / base), "check_pretrained": base != "model"},
        "data": {"train": str(workspace / "prepared"), "row_tokens": 600, "reference_seconds": [0.2, 10], "workers": 0},
        "adapt": {"rank": 4, "alpha": 8},
        "train": {"steps": 3, "batch_size": 2, "learning_rate": 2e-3, "warmup": 0, "device": "cpu"},
    }
    for branch, values in changes.items():
        tree[branch] = tree.get(branch, {}) | values
    return parse_recipe(tree, where="test")


def trainer_for(recipe: Recipe, family: HiggsV2) -> Trainer:
    precision = choose_precision(recipe.train.precision, CPU)
    return Trainer.from_recipe(
        recipe, family, precision, init_accelerator(recipe, precision, CPU, Path()), lambda _: None
    )


def teach(workspace: Path, kind: type[HiggsV2], out: Path, steps: int) -> None:
    """Train a model in full, as a stand-in for a published one."""
    chosen = recipe(workspace, "model", adapt={"mode": "full"}, train={"learning_rate": 5e-3})
    family = opened(kind, workspace / "model")
    trainer, loader = trainer_for(chosen, family), make_loader(chosen, family, workspace / "prepared")
    weights, stream = term_weights(family.loss_terms, chosen.loss), loader.steps(2, 1, Shard())
    for _ in range(steps):
        trainer.train_step(next(stream), weights, 5e-3)
    family.save_model(trainer.model, out)


def opened(kind: type[HiggsV2], folder: Path) -> HiggsV2:
    return kind.open(str(folder), folder)


def own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def same(before: dict[str, Any], after: dict[str, Any]) -> bool:
    return all(
        tensors.keys() == after[part].keys() and all(torch.equal(tensors[name], after[part][name]) for name in tensors)
        for part, tensors in before.items()
    )


class PreflightArguments:
    """Arguments of the preflight, made as the loop makes them."""

    def __init__(self, chosen: Recipe, folder: Path, kind: type[HiggsV2] = HiggsV2) -> None:
        self.recipe, self.folder, self.said = chosen, folder, list[str]()
        family = opened(kind, Path(chosen.model.source))
        self.loader = make_loader(chosen, family, chosen.data.train)
        self.evaluation = make_loader(chosen, family, chosen.data.evaluation) if chosen.data.evaluation else None
        self.trainer = trainer_for(chosen, family)
        precision = self.trainer.precision
        self.memory = plan_memory(family, chosen, precision, CPU, largest_batch(self.loader, chosen, Shard()))

    def take(self, **how: Any) -> str:
        run_preflight(
            self.trainer,
            self.loader,
            self.evaluation,
            self.said.append,
            memory=self.memory,
            folder=self.folder,
            **how,
        )
        return "\n".join(self.said)

    def refused(self) -> str:
        with pytest.raises(TrainingError) as caught:
            self.take()
        assert caught.value.hint
        return f"{caught.value.what}\n{caught.value.hint}"

    def state(self) -> dict[str, Any]:
        """Return everything that a training depends on."""
        trainer = self.trainer
        return {
            "weights": {name: own(tensor).clone() for name, tensor in trainer.objective.state_dict().items()},
            "moments": {
                (number, name): own(torch.as_tensor(value)).clone()
                for number, kept in enumerate(trainer.optimizer.state.values())
                for name, value in kept.items()
            },
            "random": {"cpu": torch.get_rng_state()},
            "gradients": {name: p.grad for name, p in trainer.trainable_parameters.items() if p.grad is not None},
            "modes": {name: torch.tensor(module.training) for name, module in trainer.objective.named_modules()},
            "rates": {"lr": torch.tensor(trainer.optimizer.param_groups[0]["lr"])},
            "counted": {str(self.loader.row_counts): torch.zeros(())},
        }


@pytest.fixture
def flight(workspace: Path, tmp_path: Path) -> Callable[..., PreflightArguments]:
    def make(base: str = "taught", kind: type[HiggsV2] = HiggsV2, **changes: dict[str, Any]) -> PreflightArguments:
        return PreflightArguments(recipe(workspace, base, **changes), tmp_path, kind)

    return make


Make = Callable[..., PreflightArguments]


# What passes


def test_a_sound_training_passes_and_is_shown(flight: Make, tmp_path: Path) -> None:
    said = flight().take()
    assert "where chance is 4.19 (code0" in said and "preflight passed" in said
    assert said.count("sample ") == 3 and "planned" in said and "measured" in said
    drawn = (tmp_path / "preflight.txt").read_text()
    assert drawn.count("code targets") == 3 and "<|audio_out_bos|>" in drawn and "g│o│o│d" in drawn


def test_it_leaves_no_trace(flight: Make) -> None:
    it = flight(adapt={"dropout": 0.2}, train={"ema_decay": 0.9})
    weights = term_weights(it.trainer.family.loss_terms, it.recipe.loss)
    it.trainer.train_step(next(it.loader.steps(2, 1, Shard())), weights, 1e-3)  # moments, and a random state in use
    before = it.state()
    it.take()
    assert same(before, it.state())
    assert before["moments"] and not before["gradients"]
    next(iter(it.trainer.trainable_parameters.values())).data.add_(1e-6)
    assert not same(before, it.state())


class Notes:
    def __init__(self) -> None:
        self.said: list[str] = []
        self.rows: list[dict[str, Any]] = []

    def on_message(self, text: str) -> None:
        self.said.append(text)

    def on_start(self, *_: int) -> None: ...

    def on_metrics(self, row: dict[str, Any]) -> None:
        self.rows.append({key: value for key, value in row.items() if key != "speed"})


def test_a_run_is_the_same_to_the_bit_without_it(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Train with dropout, which draws from the random state."""
    chosen = recipe(
        workspace, adapt={"dropout": 0.2}, train={"batch_size": 4, "gradient_checkpointing": "full", "ema_decay": 0.5}
    )
    results = []
    for name in ("with", "without"):
        run, notes = Run.create(tmp_path / name, chosen), Notes()
        if name == "without":
            monkeypatch.setattr(loop, "run_preflight", lambda *_, **__: None)
        run_training(chosen, run, notes)
        results.append((notes.rows, load_file(run.adapter / "adapter_model.safetensors")))
        assert (run.folder / "preflight.txt").exists() == (name == "with")
    (rows, tensors), (plain_rows, plain) = results
    assert rows == plain_rows and len(rows) == 3
    assert all(torch.equal(tensor, plain[name]) for name, tensor in tensors.items())


def test_a_dry_run_checks_and_trains_nothing(workspace: Path, tmp_path: Path) -> None:
    chosen, notes = recipe(workspace), Notes()
    run = Run(tmp_path / "run", chosen)
    run_training(chosen, run, notes, dry_run=True)
    assert any("preflight passed" in line for line in notes.said)
    assert "dry run: everything is ready for 3 steps" in notes.said[-1]
    assert notes.said.index(next(line for line in notes.said if line.startswith("memory plan"))) < notes.said.index(
        next(line for line in notes.said if "parameters learn" in line)
    ), "the plan stands before the weights are loaded"
    assert not run.folder.exists(), "and nothing is written"


# What the model knows


@pytest.mark.parametrize(("kind", "best"), [(Late, "+0"), (Copying, "+2"), (Stubborn, "")])
def test_misplaced_labels_are_seen_by_a_pretrained_model(flight: Make, kind: type[HiggsV2], best: str) -> None:
    told = flight(kind=kind).refused()
    assert "labels are misplaced" in told and f"best at offset {best}" in told
    assert "offset       -1       +0       +1       +2" in told and "code7" in told and "mean" in told


def test_one_codebook_may_waver(flight: Make) -> None:
    it = flight()
    look = CheckContext(it.trainer, it.loader, None, it.memory, it.folder, print, Shard())
    losses = preflight.measure_initial_loss(look)
    preflight.check_label_alignment(losses, look)
    losses.by_offset[1].totals.sums[5] = losses.by_offset[2].totals.sums[5] * 1.01
    preflight.check_label_alignment(losses, look)
    for k in range(1, 5):
        losses.by_offset[1].totals.sums[k] = losses.by_offset[2].totals.sums[k] * 1.01
    with pytest.raises(TrainingError, match="misplaced"):
        preflight.check_label_alignment(losses, look)


def test_a_base_that_knows_one_codebook_may_learn_the_others(flight: Make) -> None:
    it = flight()
    look = CheckContext(it.trainer, it.loader, None, it.memory, it.folder, print, Shard())
    losses = preflight.measure_initial_loss(look)
    guesses = torch.tensor(losses.chance) * losses.by_offset[1].counts
    for k in losses.decisive[1:]:
        losses.by_offset[1].totals.sums[k] = 1.5 * guesses[k]
    assert losses.mean(1) > losses.mean_chance
    preflight.check_better_than_chance(losses, look)
    losses.by_offset[1].totals.sums[losses.decisive[0]] = guesses[losses.decisive[0]]
    with pytest.raises(TrainingError, match="no better than chance"):
        preflight.check_better_than_chance(losses, look)


def test_random_weights_that_should_speak_are_refused(workspace: Path, flight: Make) -> None:
    told = flight("model", model={"source": str(workspace / "model"), "check_pretrained": True}).refused()
    assert "no better than chance" in told and "4.19" in told and "--set model.check_pretrained=false" in told


def test_random_weights_that_are_meant_pass_and_it_is_said(flight: Make) -> None:
    said = flight("model").take()
    assert "before training: loss 4." in said and "are not checked" in said


def test_a_copy_task_is_too_easy(workspace: Path, flight: Make, tmp_path: Path) -> None:
    """A model that was trained to copy finds its labels in place, but has nothing left to learn."""
    teach(workspace, Copying, tmp_path / "copier", steps=30)
    copier = {"source": str(tmp_path / "copier"), "check_pretrained": True}
    it = flight(kind=Copying, model=copier)
    told = it.refused()
    assert "the labels are visible in the input" in told and "of the targets are right" in told
    resumed = flight(kind=Copying, model=copier)
    with pytest.raises(TrainingError, match="given to read what it is to predict"):
        resumed.take(trained=True)


def test_a_loss_that_is_not_finite_is_named(flight: Make) -> None:
    it = flight()
    with torch.no_grad():
        get_base_model(it.trainer.model).audio_lm_head.weight[66 * 3] = torch.nan
    assert "the loss of code3 is not finite" in it.refused()


# What it must not see


def everything(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...], **_: Any) -> torch.Tensor:
    """Attention inside each sequence, in both directions."""
    attended = []
    for parts in zip(*(torch.split(x, list(lengths)) for x in (q, k, v)), strict=True):
        one_q, one_k, one_v = (part.transpose(0, 1).unsqueeze(0) for part in parts)
        out = nn.functional.scaled_dot_product_attention(one_q, one_k, one_v, enable_gqa=True)
        attended.append(out[0].transpose(0, 1))
    return torch.cat(attended)


def test_a_model_that_sees_its_own_future_is_refused(flight: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "packed_causal_attention", everything)
    assert "sees its own future" in flight("model").refused()


def test_packed_sequences_that_see_one_another_are_refused(flight: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention as with an all-ones mask: causal, but over the whole row."""
    apart = attention.packed_causal_attention
    monkeypatch.setattr(forward, "packed_causal_attention", lambda q, k, v, lengths: apart(q, k, v, (sum(lengths),)))
    told = flight("model").refused()
    assert "packed sequences see one another" in told and "--set data.pack=false" in told


def test_labels_that_are_read_are_refused_whatever_the_weights(flight: Make) -> None:
    assert "given to read what it is to predict" in flight("model", Copying).refused()


def test_codes_that_do_not_arrive_are_noticed(flight: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    embed = forward.embed_inputs
    monkeypatch.setattr(forward, "embed_inputs", lambda core, ids, codes: embed(core, ids, torch.zeros_like(codes)))
    it = flight("model")
    it.trainer.family.collate = deaf_to_text(it.trainer.family)  # type: ignore[method-assign]
    assert "codes do not reach the model" in it.refused()


def deaf_to_text(family: Any) -> Any:
    """Replaces all text by one token, so that only codes can tell."""
    plain = family.collate

    def collate(sequences: Sequence[RenderedSequence], *, offset: int = 1) -> HiggsBatch:
        batch: HiggsBatch = plain(sequences, offset=offset)
        return replace(batch, text_ids=torch.zeros_like(batch.text_ids))

    return collate


# What is learned from


def test_evaluation_that_is_trained_on_is_refused_by_sound_and_by_words(
    workspace: Path, flight: Make, tmp_path: Path
) -> None:
    flight(data={"evaluation": str(workspace / "evaluation")}).take()
    seen = tmp_path / "seen"
    for speaker, pitch in SPEAKER_PITCHES.items():
        sounds = {"good morning": "good morning", "What a fine day!": "what a fine dax", "fine": "fine"}
        for number, (text, sound) in enumerate(sounds.items()):
            clip = seen / speaker / f"{number}.wav"
            write_audio(clip, tone_speech(sound, pitch), SAMPLE_RATE)
            clip.with_suffix(".txt").write_text(text)
    prepare(str(seen), tmp_path / "leaky", model=str(workspace / "model"), device="cpu")
    told = flight(data={"evaluation": str(tmp_path / "leaky")}).refused()
    assert "4 of 6 evaluation utterances are trained on too" in told
    assert "2 with the same audio, 2 with the same words" in told
    assert "heron/0" in told and "heron/2" not in told


def test_a_reference_with_the_sound_of_its_target_is_refused(workspace: Path, flight: Make, tmp_path: Path) -> None:
    """Two different files hold the same recording, as after a new export."""
    source = tmp_path / "twins" / "robin"
    for name, subtype in (("one", "PCM_16"), ("two", "PCM_24")):
        source.mkdir(parents=True, exist_ok=True)
        soundfile.write(source / f"{name}.wav", tone_speech("good morning", 320.0), SAMPLE_RATE, subtype=subtype)
        (source / f"{name}.txt").write_text("good morning")
    prepare(str(tmp_path / "twins"), tmp_path / "prepared", model=str(workspace / "model"), device="cpu")
    told = flight("model", data={"train": str(tmp_path / "prepared")}).refused()
    assert "2 targets have their own sound for a reference" in told and "robin/one" in told


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (Mute, "6 of 6 samples have no label"),
        (Losing, "of which 112 reach the batch"),
        (Greedy, "100.0% of all positions are learned: the prompt too"),
        (Endless, "would not learn to stop"),
    ],
)
def test_wrong_labels_are_refused_with_their_cause(flight: Make, kind: type[HiggsV2], cause: str) -> None:
    told = flight("model", kind).refused()
    assert cause in told


def test_a_row_that_would_cut_an_end_is_refused(workspace: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"would lose its end-of-stream\n.*--set data\.row_tokens="):
        PreflightArguments(recipe(workspace, data={"row_tokens": 100}), tmp_path)


# Trainable parameters


def test_a_frozen_model_is_refused(flight: Make) -> None:
    it = flight()
    for parameter in it.trainer.trainable_parameters.values():
        parameter.requires_grad_(False)
    assert "no weight would learn" in it.refused()


def test_a_lora_on_nothing_is_refused(flight: Make) -> None:
    it = flight(adapt={"train_modules": ["audio_head"]})
    for name in [name for name in it.trainer.trainable_parameters if "lora_" in name]:
        it.trainer.trainable_parameters.pop(name).requires_grad_(False)
    told = it.refused()
    assert "has put a LoRA on nothing" in told and "audio_lm_head" in told and "myna model stats" in told


def test_an_optimizer_of_other_weights_is_refused(flight: Make) -> None:
    it = flight()
    it.trainer.optimizer.param_groups[0]["params"] = it.trainer.optimizer.param_groups[0]["params"][:-1]
    told = it.refused()
    assert "does not hold 1 of" in told and "lora_B" in told


def test_a_trainable_without_a_gradient_is_named(flight: Make) -> None:
    it = flight()
    it.trainer.trainable_parameters["extra.lora_A"] = extra = nn.Parameter(torch.zeros(3))
    it.trainer.optimizer.param_groups[0]["params"].append(extra)
    told = it.refused()
    assert "get no gradient: extra.lora_A" in told


def test_a_gradient_that_is_not_finite_is_named(flight: Make) -> None:
    it = flight()
    name, parameter = next(item for item in it.trainer.trainable_parameters.items() if "lora_B" in item[0])
    parameter.register_hook(lambda gradient: gradient * torch.nan)  # type: ignore[no-untyped-call]
    told = it.refused()
    assert "gradients are not finite" in told and name in told


def test_gradients_that_are_all_zero_are_refused(flight: Make) -> None:
    it = flight()
    for parameter in it.trainer.trainable_parameters.values():
        parameter.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
    assert "gradients are zero" in it.refused()


# What it takes


def test_out_of_memory_says_what_to_type_and_puts_everything_back(
    flight: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = flight(train={"micro_batch_size": 2, "batch_size": 2})
    before = it.state()
    two_steps = preflight.run_two_steps

    def too_much(*arguments: Any) -> None:
        two_steps(*arguments)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(preflight, "run_two_steps", too_much)
    told = it.refused()
    assert "out of memory in the longest pass" in told and "--set train.micro_batch_size=1" in told
    assert same(before, it.state())


def test_any_other_error_is_not_taken_for_it(flight: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("shapes cannot be multiplied")

    monkeypatch.setattr(preflight, "run_two_steps", broken)
    with pytest.raises(RuntimeError, match="shapes"):
        flight().take()


# Several processes


@pytest.mark.slow
def test_two_ranks_agree_and_one_that_fails_stops_both(workspace: Path, tmp_path: Path) -> None:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", __name__]
    done = subprocess.run(
        [sys.executable, *words, str(workspace), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    one, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    for mode in ("comprehensive", "full"):
        assert one[mode]["untouched"] and other[mode]["untouched"]
        assert one[mode]["loss"] == other[mode]["loss"], "and the first step comes after it"
        assert one[mode]["before"] == other[mode]["before"], "all ranks judge by the same numbers"
    assert one["failure"] == other["failure"]
    assert one["failure"].startswith("rank 1: 3 of 3 samples have no label")


class MuteOnOne(Mute):
    """Family that masks every label of rank 1."""

    def render(self, conversation: Conversation, **how: Any) -> RenderedSequence:
        if torch.distributed.get_rank() == 1:
            return super().render(conversation, **how)
        return HiggsV2.render(self, conversation, **how)


def as_rank(workspace: Path, out: Path) -> None:
    """Run one of two processes: DDP with a LoRA, FSDP with full training, and a failure of one process."""
    told: dict[str, Any] = {}
    for mode in ("comprehensive", "full"):
        it = PreflightArguments(recipe(workspace, adapt={"mode": mode}), out)
        before = it.state()
        it.take()
        untouched = same(before, it.state())
        passes = next(it.loader.steps(2, 1, Shard(torch.distributed.get_rank(), 2)))
        tally, _ = it.trainer.train_step(passes, term_weights(it.trainer.family.loss_terms, it.recipe.loss), 1e-3)
        told[mode] = {"untouched": untouched, "loss": tally.totals.sums.tolist(), "before": it.said[3]}
    try:
        PreflightArguments(recipe(workspace), out, MuteOnOne).take()
    except TrainingError as error:
        told["failure"] = str(error)
    (out / f"{torch.distributed.get_rank()}.json").write_text(json.dumps(told))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    as_rank(*map(Path, sys.argv[1:]))
