"""Checkpoints: everything needed to go on as if nothing had happened.

    checkpoints/step-000100/
      adapter/ or model/     what speaks: the averaged weights where there are such
      state.safetensors      trained weights, optimizer moments, running means, random states
      state.json             the step, scaler, row counts, recipe, and what the run is made of

A folder is written under a temporary name, read back, and only then renamed: one that has its name is whole. Learning
rate and loader position are not here, since they follow from the step.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from myna.config import parse_recipe
from myna.data.loader import Loader
from myna.errors import MynaError, TrainingError
from myna.models.base import Batch, RenderedSequence
from myna.models.lora import adapter_tensors, save_adapter
from myna.models.quantized import frozen_linears
from myna.train.distributed import gather, part_of, whole
from myna.train.run import Run, changed_settings, sync
from myna.train.trainer import Trainer

STATE, FACTS = "state.safetensors", "state.json"
MOMENTS = ("exp_avg", "exp_avg_sq", "step", "compensation")
"""What optimizers keep per parameter, as tensors."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands, beside its weights."""

    step: int
    base_loss: float | None = None
    """Of the untuned model, on the evaluation set."""
    heard_base: bool = False
    """Whether the untuned model was heard, where somebody listens."""
    best_step: int | None = None
    """By ear where somebody listens, elsewhere by the loss."""
    best_loss: float | None = None
    evaluations_since_best: int = 0


def checkpoint_folder(run: Run, step: int) -> Path:
    return run.folder / "checkpoints" / f"step-{step:06d}"


def checkpoint_steps(run: Run) -> list[int]:
    """Steps of the checkpoints a run holds, oldest first."""
    return sorted(int(folder.name.removeprefix("step-")) for folder in run.folder.glob("checkpoints/step-*"))


class Checkpoints:
    """Those of a run while it is trained. Every process calls every method; the first one writes."""

    def __init__(
        self,
        student: Trainer,
        run: Run,
        loader: Loader[RenderedSequence, Batch],
        evaluation: Loader[RenderedSequence, Batch] | None = None,
    ) -> None:
        self.student, self.run, self.loader = student, run, loader
        self.made_of = made_of(student, loader, evaluation)

    def save(self, progress: Progress) -> None:
        """Write, verify and name a checkpoint, then drop those that need not be kept."""
        tensors = self._random_states() | self._tensors()

        def write(model: nn.Module) -> None:
            with _new(checkpoint_folder(self.run, progress.step)) as folder:
                self._save_weights(model, folder / self.run.result.name)
                self._save_state(tensors, progress, folder)
                if self.run.metrics.exists():
                    sync(self.run.metrics)
            self._keep_best(progress)
            self._drop_old(progress.best_step)

        with self._speaking_model() as model:
            self._on_main(f"the checkpoint of step {progress.step}", partial(write, model))

    def publish(self, progress: Progress) -> Path:
        """The result of the run: the best checkpoint's weights with early stopping or by ear, else the last ones."""
        recipe = self.student.recipe
        best = progress.best_step if recipe.train.early_stopping_patience or recipe.evaluates_speech else None

        def write(model: nn.Module) -> None:
            with _new(self.run.result) as folder:
                if best is None:
                    self._save_weights(model, folder)
                else:
                    kept = checkpoint_folder(self.run, best) / self.run.result.name
                    shutil.copytree(kept, folder, dirs_exist_ok=True)

        with self._speaking_model() as model:
            self._on_main("the result", partial(write, model))
        return self.run.result

    def restore(self) -> Progress:
        """Put the newest checkpoint's state into the student; where the run stands, which may be at its beginning."""
        if self.student.accelerator.is_main_process:
            _remove_partial(self.run.folder)
            _remove_partial(self.run.folder / "checkpoints")
        steps = checkpoint_steps(self.run)
        if not steps:
            return Progress(step=0)
        folder = checkpoint_folder(self.run, steps[-1])
        try:
            facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
            self._refuse_changes(folder, facts)
            with safe_open(folder / STATE, framework="pt") as file:
                if astray := set(facts["tensors"]) ^ set(file.keys()):
                    raise ValueError(f"{STATE} and {FACTS} disagree about {min(astray)}")
                self._load_state(file, facts)
            progress = Progress(**facts["progress"])
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise TrainingError(
                f"the checkpoint {folder} is damaged: {error!r}",
                hint=f"rm -r {folder} and resume from the one before it",
            ) from error
        if self.student.accelerator.is_main_process:
            # A kill may have come between the best checkpoint and this copy of it.
            self._keep_best(progress)
        return progress

    @contextmanager
    def _speaking_model(self) -> Iterator[Any]:
        """The model to be saved, with the averaged weights where there are such; whole on rank 0, None elsewhere."""
        with self.student.averaged():
            yield self.student.whole_model()

    def _save_weights(self, model: nn.Module, folder: Path) -> None:
        """What speaks, read back."""
        if self.student.recipe.adapt.mode == "full":
            self.student.family.save_model(model, folder)
        else:
            save_adapter(model, folder)
        expected = model.state_dict() if self.student.recipe.adapt.mode == "full" else adapter_tensors(model)
        for path in folder.glob("*.safetensors"):
            _verify(path, expected)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """All that was learned, whole and in host memory, on rank 0."""
        student = self.student
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in student.trainables.items():
            tensors[f"weight/{name}"] = parameter
            kept = student.optimizer.state.get(parameter, {})
            assert kept.keys() <= set(MOMENTS), f"the optimizer keeps {sorted(kept)}"
            tensors |= {f"optimizer/{moment}/{name}": value for moment, value in kept.items()}
            if student.ema is not None:
                tensors[f"mean/{name}"] = student.ema.means[name]
        gathered = gather(tensors, keep=student.accelerator.is_main_process)
        if student.ema is not None and student.accelerator.device.type == "cpu":
            # These are still the weights themselves, and the averaged ones are about to stand in for them.
            gathered = {name: tensor.clone() for name, tensor in gathered.items()}
        return gathered

    def _save_state(self, tensors: dict[str, torch.Tensor], progress: Progress, folder: Path) -> None:
        student, scaler = self.student, self.student.accelerator.scaler
        facts = {
            "progress": asdict(progress),
            "recipe": student.recipe.model_dump(mode="json"),
            "made_of": self.made_of,
            "tensors": sorted(tensors),
            "optimizer": [_numbers(group) for group in student.optimizer.param_groups],
            "scaler": scaler.state_dict() if scaler is not None else None,
            "overflows": student.overflows,
            "ema_steps": student.ema.steps if student.ema is not None else None,
            "rows": [[*place, rows] for place, rows in sorted(self.loader.counted.items())],
        }
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / STATE)
        _verify(folder / STATE, tensors)
        (folder / FACTS).write_text(json.dumps(facts), encoding="utf-8")
        json.loads((folder / FACTS).read_text(encoding="utf-8"))

    @torch.no_grad()
    def _load_state(self, file: Any, facts: dict[str, Any]) -> None:
        student, optimizer, scaler = self.student, self.student.optimizer, self.student.accelerator.scaler
        for name, parameter in student.trainables.items():
            _copy(file, f"weight/{name}", parameter)
            if student.ema is not None:
                _copy(file, f"mean/{name}", student.ema.means[name])
        if student.ema is not None:
            student.ema.steps = int(facts["ema_steps"])
        student.overflows = int(facts["overflows"])

        group_of: dict[torch.Tensor, dict[str, Any]] = {}
        for group, numbers in zip(optimizer.param_groups, facts["optimizer"], strict=True):
            group.update(numbers)
            group_of |= dict.fromkeys(group["params"], group)
        optimizer.state.clear()
        for entry in facts["tensors"]:
            if entry.startswith("optimizer/"):
                _, key, name = entry.split("/", 2)
                parameter = student.trainables[name]
                kept = file.get_tensor(entry).clone()  # a tensor of its own instead of a view of the file
                if key == "step":
                    # As torch has it: on the CPU, unless the update is a single kernel.
                    one_kernel = group_of[parameter].get("fused") or group_of[parameter].get("capturable")
                    optimizer.state[parameter][key] = kept.to(parameter.device if one_kernel else "cpu")
                else:
                    optimizer.state[parameter][key] = part_of(kept, parameter)
        if scaler is not None:
            scaler.load_state_dict(facts["scaler"])

        self.loader.recall({(epoch, window): rows for epoch, window, rows in facts["rows"]})
        rank = student.accelerator.process_index
        for kind in random_state(student.accelerator.device):
            # Another number of processes, or another device, has no state of its own here, and keeps the seed's.
            if f"random/{kind}/{rank}" in facts["tensors"]:
                set_random_state(kind, student.accelerator.device, file.get_tensor(f"random/{kind}/{rank}").clone())

    def _random_states(self) -> dict[str, torch.Tensor]:
        """Those of all processes: each drops other parts of its rows."""
        accelerator = self.student.accelerator
        states: dict[str, torch.Tensor] = {}
        for kind, state in random_state(accelerator.device).items():
            everybody = state[None]
            if accelerator.num_processes > 1:
                everybody = accelerator.gather(everybody.to(accelerator.device)).cpu()
            states |= {f"random/{kind}/{rank}": state.clone() for rank, state in enumerate(everybody)}
        return states

    def _refuse_changes(self, folder: Path, facts: dict[str, Any]) -> None:
        before = facts["made_of"]
        changed = [
            f"{key} ({before.get(key)}, now {now})" if isinstance(now, str | None) else key
            for key, now in self.made_of.items()
            if before.get(key) != now
        ]
        recipe = parse_recipe(facts["recipe"], where=str(folder / FACTS))
        changed += changed_settings(recipe, self.student.recipe)
        if changed:
            raise TrainingError(
                f"{folder} was made with another {' and another '.join(changed)}",
                hint="go on with what the run was started with, or start a run of its own",
            )

    def _keep_best(self, progress: Progress) -> None:
        """`best/`, a run to speak with even while this one goes on: the checkpoint that was heard best."""
        if not self.student.recipe.evaluates_speech or progress.best_step is None:
            return
        if (self.run.best / FACTS).is_file() and facts_of(self.run.best)["progress"]["step"] == progress.best_step:
            return
        kept, result = checkpoint_folder(self.run, progress.best_step), self.run.result.name
        with _new(self.run.best) as folder:
            shutil.copytree(kept / result, folder / result, copy_function=_link)
            _link(kept / FACTS, folder / FACTS)
            shutil.copy(self.run.folder / "config.yaml", folder / "config.yaml")

    def _drop_old(self, best: int | None) -> None:
        keep = self.student.recipe.train.keep_checkpoints
        for step in checkpoint_steps(self.run)[:-keep]:
            if step != best:
                _remove(checkpoint_folder(self.run, step))

    def _on_main(self, what: str, write: Callable[[], None]) -> None:
        """Rank 0 writes while the others wait; if it cannot, all of them stop."""
        failure: Exception | None = None
        if self.student.accelerator.is_main_process:
            try:
                write()
            except (OSError, SafetensorError, MynaError) as error:
                failure = error
        if self.student.reduce(torch.tensor([float(failure is not None)])).item() == 0:
            return
        steps = checkpoint_steps(self.run)
        there = f"step {steps[-1]}" if steps else "the first step"
        why = failure.what if isinstance(failure, MynaError) else failure or "see what rank 0 says"
        raise TrainingError(
            f"{what} could not be written to {self.run.folder}: {why}",
            hint=f"make room there, then go on from {there}: myna train --resume {self.run.folder}",
        ) from failure


def learned_with(run: Run) -> dict[str, Any]:
    """What a run was made of, as its newest checkpoint has it; nothing where none was kept. A checkpoint, and `best/`,
    have it themselves."""
    steps = checkpoint_steps(run)
    folder = checkpoint_folder(run, steps[-1]) if steps else run.folder
    known: dict[str, Any] = facts_of(folder)["made_of"] if (folder / FACTS).is_file() else {}
    return known


def facts_of(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of itself."""
    facts: dict[str, Any] = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    return facts


def made_of(
    student: Trainer, loader: Loader[RenderedSequence, Batch], evaluation: Loader[RenderedSequence, Batch] | None
) -> dict[str, Any]:
    """What must not change under a run that goes on, beside its recipe."""
    return {
        "parameters": {name: list(parameter.shape) for name, parameter in student.trainables.items()},
        "base model": _fingerprint(student),
        "precision": student.precision.name,
        "prompt": student.family.prompt_revision,
        "codec": loader.corpus.prepared.codec_revision,
        "training data": loader.identity,
        "evaluation data": evaluation.identity if evaluation is not None else None,
    }


def _fingerprint(student: Trainer) -> str:
    """A hash over the beginning of every frozen tensor: little to read, and enough to tell one base from another."""
    frozen = [whole(parameter.detach()) for parameter in student.model.parameters() if not parameter.requires_grad]
    frozen += [layer.known_by() for layer in frozen_linears(student.model)]
    sample = torch.cat([torch.zeros(1), *(tensor.flatten()[:16].float().cpu() for tensor in frozen)])
    return hashlib.blake2b(sample.numpy().tobytes(), digest_size=8).hexdigest()


@contextmanager
def _new(folder: Path) -> Iterator[Path]:
    """A folder to fill under a temporary name. It gets its own once all it holds is on the disk."""
    partial = folder.with_name(f".{folder.name}.partial")
    _remove(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
        for path in (*partial.rglob("*"), partial):
            sync(path)
        if folder.exists():
            _remove(folder)
        partial.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Its name goes first, so that a kill leaves nothing that looks whole."""
    if not folder.exists():
        return
    doomed = folder if folder.name.startswith(".") else folder.with_name(f".{folder.name}.old.partial")
    if doomed != folder:
        _remove(doomed)
        folder.rename(doomed)
    shutil.rmtree(doomed)


def _link(source: Path | str, target: Path | str) -> None:
    """A second name for a file that nobody changes in place; where a disk has no such thing, a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy(source, target)


def _remove_partial(folder: Path) -> None:
    """What a killed run left half-written or half-removed."""
    for leftover in folder.glob(".*.partial"):
        _remove(leftover)
    for leftover in folder.glob(".*.tmp"):
        leftover.unlink()


def _verify(path: Path, written: Mapping[str, torch.Tensor]) -> None:
    """Read a file back, tensor by tensor."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  not a mapping
            if name in written and not torch.equal(_bytes(file.get_tensor(name)), _bytes(written[name].detach().cpu())):
                raise OSError(f"{name} in {path.name} was read back otherwise than it was written")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """To compare what is not a number, too."""
    return tensor.contiguous().flatten().view(torch.uint8)


def _copy(file: Any, name: str, place: torch.Tensor) -> None:
    tensor = file.get_tensor(name)
    if (tensor.shape, tensor.dtype) != (place.shape, place.dtype):
        raise ValueError(f"{name} is {list(tensor.shape)} {tensor.dtype} for {list(place.shape)} {place.dtype}")
    place.copy_(part_of(tensor, place))


def _numbers(group: Mapping[str, Any]) -> dict[str, float]:
    """Of an optimizer's group: rates and scales, but not the switches, which follow from the device."""
    return {k: value for k, value in group.items() if isinstance(value, int | float) and not isinstance(value, bool)}


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        states["mps"] = torch.mps.get_rng_state()
    return states


def set_random_state(kind: str, device: torch.device, state: torch.Tensor) -> None:
    if kind == "cpu":
        torch.set_rng_state(state)
    elif kind == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.mps.set_rng_state(state)
