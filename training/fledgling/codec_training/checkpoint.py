"""Checkpoints of codec training, for resuming here or on another machine.

codec/                 the exported codec in half precision: the EMA of the weights where that is better
state.safetensors      all weights in fp32 and the optimizers' moments
portable.safetensors   discriminators, CTC head and codebook statistics in half precision: with codec/ enough to resume
                       on a machine to which the moments are too large to copy
progress.json          steps and seconds so far, the alphabet, and the history of losses
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from codec_training.trainer import CodecTrainer
from myna.core.errors import CheckpointError
from myna.core.io import atomic_write
from myna.models.mel_codec import read_mel_codec_tensors, save_mel_codec

STATE, PORTABLE, PROGRESS = "state.safetensors", "portable.safetensors", "progress.json"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(slots=True)
class Progress:
    alphabet: str
    steps: int = 0
    seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)


def read_progress(out: Path) -> Progress | None:
    path = out / PROGRESS
    return Progress(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def save_checkpoint(out: Path, trainer: CodecTrainer, progress: Progress) -> None:
    """Write every file atomically, the number of steps last: an interruption in between costs a little time only."""
    model = trainer.model
    with trainer.ema.swapped_in() if trainer.ema.is_exported else nullcontext():
        save_mel_codec(model.network, out / "codec")
    weights = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    rest = {name: tensor.half() for name, tensor in weights.items() if not name.startswith("network.")}
    # The sums are entries times counts, and would be the largest tensor.
    del rest["quantiser.sums"]
    averages = {f"ema.{name}": tensor for name, tensor in trainer.ema.averages.items()}
    for name, tensors in ((STATE, weights | averages | _moments(trainer)), (PORTABLE, rest)):
        with atomic_write(out / name) as temporary:
            save_file({key: tensor.cpu() for key, tensor in tensors.items()}, temporary)
    with atomic_write(out / PROGRESS) as temporary:
        temporary.write_text(json.dumps(asdict(progress), ensure_ascii=False, indent=1), encoding="utf-8")


class Resumed(NamedTuple):
    """Description of what was loaded, for the log."""

    description: str
    with_moments: bool


def resume(out: Path, trainer: CodecTrainer) -> Resumed:
    """Load the checkpoint of `out`, with moments where they are there."""
    if (out / STATE).is_file():
        tensors = load_file(out / STATE)
        _load_weights(
            trainer, {name: tensor for name, tensor in tensors.items() if not name.startswith(("moment.", "ema."))}
        )
        for name, average in trainer.ema.averages.items():
            average.copy_(tensors.get(f"ema.{name}", trainer.ema.weights[name]))
        for name, optimizer in trainer.optimizers.items():
            for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
                kept = {part: tensors.get(f"moment.{name}.{number}.{part}") for part in MOMENTS}
                if all(tensor is not None for tensor in kept.values()):
                    optimizer.state[parameter] = {
                        part: tensor.to(parameter.device) for part, tensor in kept.items() if tensor is not None
                    }
        return Resumed(f"everything, from {out / STATE}", with_moments=True)
    weights = {f"network.{name}": tensor for name, tensor in read_mel_codec_tensors(out / "codec").items()}
    tensors = {name: tensor.float() for name, tensor in (weights | load_file(out / PORTABLE)).items()}
    tensors["quantiser.sums"] = tensors["network.quantiser.books"] * tensors["quantiser.counts"][..., None]
    _load_weights(trainer, tensors)
    trainer.ema.reset()
    return Resumed(f"weights alone, from {out / 'codec'} and {out / PORTABLE}", with_moments=False)


def _load_weights(trainer: CodecTrainer, tensors: dict[str, torch.Tensor]) -> None:
    try:
        trainer.model.load_state_dict(tensors)
    except RuntimeError as error:
        raise CheckpointError(
            f"the checkpoint does not fit this training: {error}",
            hint="resume with the sizes and sources it began with, or name another --out",
        ) from None


def _moments(trainer: CodecTrainer) -> dict[str, torch.Tensor]:
    return {
        f"moment.{name}.{number}.{part}": optimizer.state[parameter][part].contiguous()
        for name, optimizer in trainer.optimizers.items()
        for number, parameter in enumerate(optimizer.param_groups[0]["params"])
        if parameter in optimizer.state
        for part in MOMENTS
    }
