"""Checkpoints: everything needed to resume bit-exactly.

    checkpoints/step-000100/
      adapter/ or model/     weights for inference: the EMA's where there is one
      state.safetensors      trained weights, optimizer state, EMA and random states
      state.json             step, gradient scaler, row counts, recipe, and fingerprints of the inputs

A folder is written under a temporary name, verified, and only then renamed: one that has its name is complete. Learning
rate and loader position are not saved, since they follow from the step. State is gathered to rank 0, so that a run can
resume on another number of processes; docs/decisions/0019 says why without `torch.distributed.checkpoint`.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from myna.core import run_folder
from myna.core.config import parse_recipe
from myna.core.errors import MynaError, TrainingError
from myna.core.io import atomic_folder, file_hash, fsync
from myna.data.loader import Loader
from myna.models.base import Batch, RenderedSequence
from myna.models.files import WeightsMetadata, absolute_source, format_names, save_metadata
from myna.models.lora import adapter_state_dict, save_adapter, weights_hash
from myna.models.quantized import quantized_linears
from myna.train.distributed import full_tensor, gather_full_tensors, is_finite, shard_like
from myna.train.loss import DivergenceMonitor
from myna.train.trainer import Trainer

STATE_FILE = "state.safetensors"
OPTIMIZER_STATE_KEYS = ("exp_avg", "exp_avg_sq", "step", "compensation")
"""Tensors that optimizers keep per parameter."""


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """Progress of a run: its step and its best evaluation."""

    step: int
    base_loss: float | None = None
    base_speech_evaluated: bool = False
    """Whether the base model's speech was evaluated; only recipes with `speech_eval` need it."""
    best_step: int | None = None
    """Step of the best checkpoint, by speech evaluation if the recipe has one, else by the loss."""
    best_loss: float | None = None
    evaluations_since_best: int = 0


class CheckpointManager:
    """Saving and restoring of a run's checkpoints. Every process calls every method; rank 0 writes."""

    def __init__(
        self,
        trainer: Trainer,
        run: run_folder.Run,
        loader: Loader[RenderedSequence, Batch],
        evaluation: Loader[RenderedSequence, Batch] | None = None,
    ) -> None:
        self.trainer, self.run, self.loader = trainer, run, loader
        self.inputs = describe_inputs(trainer, loader, evaluation)
        self.described = self.inputs | {"scene": loader.reference_sampler.usual_scene}
        """Inputs, and the facts derived from them that speaking needs."""

    def save(self, progress: TrainingProgress) -> None:
        """Write, verify and rename a checkpoint, then delete those that need not be kept."""
        self._check_finite(progress.step)
        tensors = self._gather_tensors()

        def write(model: nn.Module) -> None:
            with _durable_folder(run_folder.checkpoint_folder(self.run, progress.step)) as folder:
                self._save_weights(model, folder / self.run.result.name)
                self._save_state(tensors, progress, folder)
                if self.run.metrics.exists():
                    fsync(self.run.metrics)
            self._update_best(progress)
            self._drop_old(progress.best_step)

        self._write_on_main(f"the checkpoint of step {progress.step}", write)

    def publish(self, progress: TrainingProgress, describe: Callable[[Path], None] | None = None) -> Path:
        """Write the run's result: the best checkpoint's weights with early stopping or speech evaluation, else the last
        ones. `describe` adds files to its folder."""
        best = progress.best_step if self.trainer.recipe.publishes_best else None
        if best is None:
            self._check_finite(progress.step)

        def write(model: nn.Module) -> None:
            with _durable_folder(self.run.result) as folder:
                if best is None:
                    self._save_weights(model, folder)
                else:
                    weights = run_folder.checkpoint_folder(self.run, best) / self.run.result.name
                    shutil.copytree(weights, folder, dirs_exist_ok=True)
                if describe is not None:
                    describe(folder)
            (self.run.folder / run_folder.CONTINUED_FILE).unlink(missing_ok=True)

        self._write_on_main("the result", write)
        return self.run.result

    def restore(self) -> TrainingProgress:
        """Load the newest checkpoint into the trainer; without one, the run starts from its beginning."""
        if self.trainer.accelerator.is_main_process:
            _remove_leftovers(self.run.folder)
            _remove_leftovers(self.run.folder / "checkpoints")
        step = max(run_folder.checkpoint_steps(self.run), default=0)
        folder = run_folder.checkpoint_folder(self.run, step)
        self._check_same_checkpoint(step, folder / run_folder.CHECKPOINT_METADATA_FILE)
        if not step:
            return TrainingProgress(step=0)
        try:
            metadata = run_folder.read_checkpoint_metadata(folder)
            self._check_unchanged(folder, metadata)
            with safe_open(folder / STATE_FILE, framework="pt") as file:
                if differing := set(metadata["tensors"]) ^ set(file.keys()):
                    raise ValueError(
                        f"{STATE_FILE} and {run_folder.CHECKPOINT_METADATA_FILE} disagree about {min(differing)}"
                    )
                self._load_state(file, metadata)
            progress = TrainingProgress(**metadata["progress"])
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise TrainingError(
                f"the checkpoint {folder} is damaged: {error!r}",
                hint=f"rm -r {folder} and resume from the one before it",
            ) from error
        if self.trainer.accelerator.is_main_process:
            # The process may have been killed between saving the best checkpoint and copying it.
            self._update_best(progress)
        return progress

    def _check_same_checkpoint(self, step: int, metadata: Path) -> None:
        """Check that all ranks have found the same checkpoint. On disks of their own, one machine may have none."""
        found = gather_object([(step, file_hash(metadata) if metadata.is_file() else "")])
        differing = [rank for rank, checkpoint in enumerate(found) if checkpoint != found[0]]
        if differing:
            other = found[differing[0]][0]
            raise TrainingError(
                f"rank 0 would resume {self.run.folder} from its checkpoint of step {found[0][0]}, rank {differing[0]} "
                f"from {'another one of step' if other == found[0][0] else 'that of step'} {other}",
                hint="put the run on a disk that all machines share, or copy the folder with the newest one to each",
            )

    def _check_finite(self, step: int) -> None:
        """Raise an error for weights that are not finite. In fp16 an update may overflow before a gradient does."""
        broken = [name for name, weight in self.trainer.trainable_parameters.items() if not is_finite(weight)]
        if self.trainer.reduce(torch.tensor([float(len(broken))])).item():
            hint = "start a run of its own with a lower train.learning_rate"
            if steps := run_folder.checkpoint_steps(self.run):
                hint += f"; the last checkpoint before is {run_folder.checkpoint_folder(self.run, steps[-1])}"
            raise TrainingError(f"after step {step} weights are not finite: {format_names(broken)}", hint=hint)

    def _save_weights(self, model: nn.Module, folder: Path) -> None:
        if self.trainer.recipe.adapt.mode == "full":
            expected = self.trainer.family.save_model(self._in_saved_precision(model), folder)
        else:
            save_adapter(model, folder)
            expected = adapter_state_dict(model)
        _verify(sorted(folder.glob("*.safetensors")), expected)
        metadata = WeightsMetadata.from_recipe(self.trainer.recipe, self.described)
        if self.trainer.recipe.adapt.mode == "full":
            # The codec is not saved with the model, which would otherwise ask for the released one.
            metadata = metadata.model_copy(update={"codec": absolute_source(self.trainer.family.codec_source)})
        save_metadata(folder, metadata)

    def _in_saved_precision(self, model: nn.Module) -> nn.Module:
        """Return a copy of the model in host memory, in the precision it is saved in."""
        trainer, family = self.trainer, self.trainer.family
        dtype = family.stored_dtype if trainer.recipe.adapt.save_precision == "stored" else torch.float32
        state: dict[str, torch.Tensor] = {name: x.to("cpu", dtype) for name, x in model.state_dict().items()}
        if broken := [name for name, tensor in state.items() if not tensor.isfinite().all()]:
            raise TrainingError(
                f"weights overflow in {dtype}, the precision of {family.source}: {format_names(broken)}",
                hint="--set adapt.save_precision=fp32",
            )
        saved = family.load_model(dtype=dtype, device="meta", text_head=trainer.recipe.needs_text_head)
        saved.load_state_dict(state, assign=True)
        return saved

    def _gather_tensors(self) -> dict[str, torch.Tensor]:
        """Gather trained weights, optimizer state and EMA in host memory of rank 0, and the random states of all
        processes, whose dropout differs."""
        trainer, accelerator = self.trainer, self.trainer.accelerator
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in trainer.trainable_parameters.items():
            tensors[f"weight/{name}"] = parameter
            state = trainer.optimizer.state.get(parameter, {})
            assert state.keys() <= set(OPTIMIZER_STATE_KEYS), f"the optimizer keeps {sorted(state)}"
            tensors |= {f"optimizer/{key}/{name}": value for key, value in state.items()}
            if trainer.ema is not None:
                tensors[f"ema/{name}"] = trainer.ema.averages[name]
        gathered = gather_full_tensors(tensors, keep=accelerator.is_main_process)
        for kind, state in get_rng_states(accelerator.device).items():
            by_rank = state[None]
            if accelerator.num_processes > 1:
                by_rank = accelerator.gather(by_rank.to(accelerator.device)).cpu()
            gathered |= {f"rng/{kind}/{rank}": state.clone() for rank, state in enumerate(by_rank)}
        return gathered

    def _save_state(self, tensors: dict[str, torch.Tensor], progress: TrainingProgress, folder: Path) -> None:
        trainer, scaler = self.trainer, self.trainer.accelerator.scaler
        metadata = {
            "progress": run_folder.finite_or_none(asdict(progress)),
            "recipe": trainer.recipe.model_dump(mode="json"),
            "inputs": self.described,
            "tensors": sorted(tensors),
            # Rates and scales. The switches of an optimizer depend on the device and are left out.
            "optimizer": [
                {k: v for k, v in group.items() if isinstance(v, int | float) and not isinstance(v, bool)}
                for group in trainer.optimizer.param_groups
            ],
            "scaler": scaler.state_dict() if scaler is not None else None,
            "overflows": trainer.overflows,
            "divergence": run_folder.finite_or_none(asdict(trainer.divergence)),
            "ema_steps": trainer.ema.steps if trainer.ema is not None else None,
            "row_counts": [[*window, rows] for window, rows in sorted(self.loader.row_counts.items())],
        }
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / STATE_FILE)
        _verify([folder / STATE_FILE], tensors)
        (folder / run_folder.CHECKPOINT_METADATA_FILE).write_text(json.dumps(metadata), encoding="utf-8")
        run_folder.read_checkpoint_metadata(folder)

    @torch.no_grad()
    def _load_state(self, file: Any, metadata: dict[str, Any]) -> None:
        trainer, optimizer, accelerator = self.trainer, self.trainer.optimizer, self.trainer.accelerator
        for name, parameter in trainer.trainable_parameters.items():
            _copy_into(parameter, file, f"weight/{name}")
            if trainer.ema is not None:
                _copy_into(trainer.ema.averages[name], file, f"ema/{name}")
        if trainer.ema is not None:
            trainer.ema.steps = int(metadata["ema_steps"])
        trainer.overflows = int(metadata["overflows"])
        trainer.divergence = DivergenceMonitor(**metadata.get("divergence", {}))

        group_of: dict[torch.Tensor, dict[str, Any]] = {}
        for group, scalars in zip(optimizer.param_groups, metadata["optimizer"], strict=True):
            group.update(scalars)
            group_of |= dict.fromkeys(group["params"], group)
        optimizer.state.clear()
        for entry in metadata["tensors"]:
            if entry.startswith("optimizer/"):
                _, key, name = entry.split("/", 2)
                parameter = trainer.trainable_parameters[name]
                value = file.get_tensor(entry).clone()  # a tensor of its own instead of a view of the file
                if key == "step":
                    # As torch has it: on the CPU, unless the update is a single kernel.
                    one_kernel = group_of[parameter].get("fused") or group_of[parameter].get("capturable")
                    optimizer.state[parameter][key] = value.to(parameter.device if one_kernel else "cpu")
                else:
                    optimizer.state[parameter][key] = shard_like(value, parameter)
        if accelerator.scaler is not None:
            accelerator.scaler.load_state_dict(metadata["scaler"])

        self.loader.restore_row_counts({(epoch, window): rows for epoch, window, rows in metadata["row_counts"]})
        # Without a saved state (other processes or another device) the state from the seed is kept.
        entries = {kind: f"rng/{kind}/{accelerator.process_index}" for kind in get_rng_states(accelerator.device)}
        saved = {kind: entry for kind, entry in entries.items() if entry in metadata["tensors"]}
        set_rng_states({kind: file.get_tensor(entry).clone() for kind, entry in saved.items()})

    def _check_unchanged(self, folder: Path, metadata: dict[str, Any]) -> None:
        """Raise an error for changed inputs, or for changed settings that must stay the same on resume."""
        before = metadata["inputs"]
        changed = [
            f"{key} ({before.get(key)}, now {now})" if isinstance(now, str | None) else key
            for key, now in self.inputs.items()
            if before.get(key) != now
        ]
        recipe = parse_recipe(metadata["recipe"], where=str(folder / run_folder.CHECKPOINT_METADATA_FILE))
        changed += run_folder.changed_settings(recipe, self.trainer.recipe)
        if changed:
            raise TrainingError(
                f"{folder} was made with another {' and another '.join(changed)}",
                hint="go on with what the run was started with, or start a run of its own",
            )

    def _update_best(self, progress: TrainingProgress) -> None:
        """Copy the checkpoint with the best speech to `best/`, which can speak while the training continues."""
        if not self.trainer.recipe.evaluates_speech or progress.best_step is None:
            return
        best, result = self.run.best, self.run.result.name
        if best.is_dir() and run_folder.read_checkpoint_metadata(best)["progress"]["step"] == progress.best_step:
            return
        checkpoint = run_folder.checkpoint_folder(self.run, progress.best_step)
        with _durable_folder(best) as folder:
            shutil.copytree(checkpoint / result, folder / result, copy_function=_link)
            _link(checkpoint / run_folder.CHECKPOINT_METADATA_FILE, folder / run_folder.CHECKPOINT_METADATA_FILE)
            shutil.copy(self.run.folder / "config.yaml", folder / "config.yaml")

    def _drop_old(self, best: int | None) -> None:
        # Checkpoints from before a divergence may be the last useful ones.
        since = self.trainer.divergence.since or 0
        for step in run_folder.checkpoint_steps(self.run)[: -self.trainer.recipe.train.keep_checkpoints]:
            if step != best and step >= since:
                # Rename first, so that a killed process leaves no folder that looks complete.
                folder = run_folder.checkpoint_folder(self.run, step)
                shutil.rmtree(folder.rename(folder.with_name(f".{folder.name}.old")))

    def _write_on_main(self, name: str, write: Callable[[nn.Module], None]) -> None:
        """Write the weights for inference on rank 0 while the other ranks wait. An error stops all of them."""
        with self.trainer.ema_weights():
            model = self.trainer.full_model()

            def write_or_explain() -> None:
                assert model is not None, "rank 0 has it"
                try:
                    write(model)
                except (OSError, SafetensorError, MynaError) as error:
                    steps = run_folder.checkpoint_steps(self.run)
                    last = f"step {steps[-1]}" if steps else "the first step"
                    cause = error.what if isinstance(error, MynaError) else error
                    remedy = error.hint if isinstance(error, MynaError) else "make room there"
                    raise TrainingError(
                        f"{name} could not be written to {self.run.folder}: {cause}",
                        hint=f"{remedy}, then go on from {last}: myna train --resume {self.run.folder}",
                    ) from error

            self.trainer.run_on_main(write_or_explain)


def describe_inputs(
    trainer: Trainer, loader: Loader[RenderedSequence, Batch], evaluation: Loader[RenderedSequence, Batch] | None
) -> dict[str, Any]:
    """Return fingerprints of what must not change on resume, besides the recipe."""
    # The hash of the frozen weights equals what `base_model_hash` finds without a training.
    frozen = [full_tensor(weight.detach()) for weight in trainer.model.parameters() if not weight.requires_grad]
    return {
        "parameters": {name: list(parameter.shape) for name, parameter in trainer.trainable_parameters.items()},
        "base model": weights_hash([*frozen, *(layer.weight_sample() for layer in quantized_linears(trainer.model))]),
        "precision": trainer.precision.name,
        "prompt": trainer.family.prompt_revision,
        "codec": loader.dataset.info.codec_revision,
        "training data": loader.fingerprint,
        "evaluation data": evaluation.fingerprint if evaluation is not None else None,
    }


@contextmanager
def _durable_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to fill under a temporary name. It gets its own name once all its files are on the disk."""
    with atomic_folder(folder, replace=True) as temporary:
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            fsync(path)
    fsync(folder.parent)


def _link(source: Path | str, target: Path | str) -> None:
    """Hard-link a file that is never changed in place; copy it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy(source, target)


def _remove_leftovers(folder: Path) -> None:
    """Remove half-written and half-removed files of a killed run."""
    for pattern in (".step-*", ".adapter.*", ".model.*", ".best.*", ".*.tmp"):
        for leftover in folder.glob(pattern):
            leftover.unlink() if pattern == ".*.tmp" else shutil.rmtree(leftover)


def _verify(files: Sequence[Path], written: Mapping[str, torch.Tensor]) -> None:
    """Read files back and compare them with what was `written`, tensor by tensor."""
    missing = set(written)
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  not a mapping
                if name not in missing:
                    raise OSError(f"{path.name} holds {name}, which was not written to it")
                missing.remove(name)
                # Raw bytes, to compare NaNs too.
                found, expected = (
                    tensor.contiguous().flatten().view(torch.uint8)
                    for tensor in (file.get_tensor(name), written[name].detach().cpu())
                )
                if not torch.equal(found, expected):
                    raise OSError(f"{name} in {path.name} was read back otherwise than it was written")
    if missing:
        names = " and ".join(path.name for path in files) or "the weights file"
        raise OSError(f"{names} lacks what was written: {format_names(sorted(missing))}")


def _copy_into(target: torch.Tensor, file: Any, name: str) -> None:
    tensor = file.get_tensor(name)
    if (tensor.shape, tensor.dtype) != (target.shape, target.dtype):
        raise ValueError(f"{name} is {list(tensor.shape)} {tensor.dtype} for {list(target.shape)} {target.dtype}")
    target.copy_(shard_like(tensor, target))


_RNG_MODULES: dict[str, Any] = {"cpu": torch, "cuda": torch.cuda, "mps": torch.mps}


def get_rng_states(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the random states of the CPU and of the current device of this kind."""
    return {kind: _RNG_MODULES[kind].get_rng_state() for kind in dict.fromkeys(("cpu", device.type))}


def set_rng_states(states: Mapping[str, torch.Tensor]) -> None:
    for kind, state in states.items():
        _RNG_MODULES[kind].set_rng_state(state)
