"""Checkpoints: everything needed to go on as if nothing had happened.

    checkpoints/step-000100/
      adapter/ or model/     what speaks: the averaged weights where there are such
      state.safetensors      trained weights, optimizer moments, running means, random states
      state.json             the step, scaler, and what the run was made of

A folder is written under a temporary name, read back, and only then renamed: one that has its name is whole.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from myna.errors import TrainingError
from myna.train.lora import save_adapter
from myna.train.run import Run
from myna.train.student import Student

MOMENTS = ("exp_avg", "exp_avg_sq", "step", "compensation")
"""What optimizers keep per parameter."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands, beside its weights."""

    step: int
    best_step: int | None = None
    best_loss: float | None = None
    evaluations_since_best: int = 0


def checkpoint_folder(run: Run, step: int) -> Path:
    return run.folder / "checkpoints" / f"step-{step:06d}"


def checkpoint_steps(run: Run) -> list[int]:
    """Steps of the checkpoints a run holds, oldest first."""
    return sorted(int(folder.name.removeprefix("step-")) for folder in run.folder.glob("checkpoints/step-*"))


def save(student: Student, run: Run, progress: Progress) -> None:
    """Write, verify and name a checkpoint, then drop those that need not be kept. Rank 0 writes, the others wait."""
    accelerator = student.accelerator
    if accelerator.is_main_process:
        try:
            _write(student, run, progress)
        except OSError as error:
            kept = checkpoint_steps(run)
            raise TrainingError(
                f"the checkpoint of step {progress.step} could not be written to {run.folder}: {error}",
                hint=f"make room, then go on from step {kept[-1]}: myna train --resume {run.folder}"
                if kept
                else "make room or choose another folder with --out, and start again",
            ) from None
        _drop_old(run, keep=student.recipe.train.keep_last, best=progress.best_step)
    accelerator.wait_for_everyone()


def save_weights(student: Student, run: Run, folder: Path) -> Path:
    """What speaks, under `folder/adapter` or `folder/model`."""
    with student.averaged():
        if student.recipe.adapt.mode == "full":
            student.family.save_model(student.model, folder / run.model.name)
            return folder / run.model.name
        save_adapter(student.model, folder / run.adapter.name)
        return folder / run.adapter.name


def restore(student: Student, run: Run) -> Progress:
    """Put the newest checkpoint's state into the student; where the run stands."""
    steps = checkpoint_steps(run)
    if not steps:
        raise TrainingError(f"{run.folder} has no checkpoint to go on from", hint="start it again with another --out")
    folder = checkpoint_folder(run, steps[-1])
    tensors, facts = _read(folder)
    if facts["made_of"] != made_of(student):
        changed = [key for key, value in made_of(student).items() if facts["made_of"].get(key) != value]
        raise TrainingError(
            f"{folder} was made with another {' and '.join(changed)}", hint="go on with what the run was started with"
        )
    with torch.no_grad():
        for name, parameter in student.trainables.items():
            parameter.copy_(tensors[f"weight/{name}"])
        if student.ema is not None:
            student.ema.steps = facts["ema_steps"]
            for name, mean in student.ema.means.items():
                mean.copy_(tensors[f"mean/{name}"])
    state = student.optimizer.state
    for name, parameter in student.trainables.items():
        state[parameter] = {
            moment: tensors[f"{moment}/{name}"].to(parameter.device if moment != "step" else "cpu")
            for moment in MOMENTS
            if f"{moment}/{name}" in tensors
        }
    if student.accelerator.scaler is not None:
        student.accelerator.scaler.load_state_dict(facts["scaler"])
    torch.set_rng_state(tensors["random/cpu"])
    if "random/cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random/cuda"])
    return Progress(**facts["progress"])


def made_of(student: Student) -> dict[str, Any]:
    """What must not change under a run that goes on."""
    return {
        "parameters": {name: list(parameter.shape) for name, parameter in student.trainables.items()},
        "prompt": student.family.prompt_revision,
        "precision": student.precision.name,
    }


def _write(student: Student, run: Run, progress: Progress) -> None:
    folder = checkpoint_folder(run, progress.step)
    partial = folder.with_name(f".{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        save_weights(student, run, partial)
        tensors, facts = _state(student, progress)
        save_file(tensors, partial / "state.safetensors")
        (partial / "state.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
        again, _ = _read(partial)
        if any(not torch.equal(tensor, again[name]) for name, tensor in tensors.items()):
            raise OSError("what was read back is not what was written")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _state(student: Student, progress: Progress) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors = {"random/cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["random/cuda"] = torch.cuda.get_rng_state()
    state = student.optimizer.state
    for name, parameter in student.trainables.items():
        tensors[f"weight/{name}"] = parameter.detach()
        for moment in MOMENTS:
            if moment in state.get(parameter, {}):
                tensors[f"{moment}/{name}"] = torch.as_tensor(state[parameter][moment])
        if student.ema is not None:
            tensors[f"mean/{name}"] = student.ema.means[name]
    facts = {
        "progress": {slot: getattr(progress, slot) for slot in Progress.__slots__},
        "ema_steps": student.ema.steps if student.ema is not None else 0,
        "scaler": student.accelerator.scaler.state_dict() if student.accelerator.scaler is not None else None,
        "made_of": made_of(student),
    }
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, facts


def _read(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    try:
        facts = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        with safe_open(folder / "state.safetensors", framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, facts  # noqa: SIM118  not a mapping
    except (FileNotFoundError, json.JSONDecodeError, SafetensorError) as error:
        raise TrainingError(
            f"the checkpoint {folder} is damaged: {error}", hint=f"rm -r {folder} and resume from the one before it"
        ) from None


def _drop_old(run: Run, *, keep: int, best: int | None) -> None:
    for step in checkpoint_steps(run)[:-keep]:
        if step != best:
            shutil.rmtree(checkpoint_folder(run, step))
