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
from myna.models.mel_codec.codec import read_mel_codec_tensors, save_mel_codec
from myna.models.mel_codec.network import MelCodecNetwork

STATE, PORTABLE, PROGRESS = "state.safetensors", "portable.safetensors", "progress.json"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(slots=True)
class Progress:
    alphabet: str
    steps: int = 0
    seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)
    decoder_only: bool = False


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
    """What was loaded, for the log."""

    description: str
    with_moments: bool


def resume(out: Path, trainer: CodecTrainer) -> Resumed:
    """Load the checkpoint of `out`, with moments where they are there."""
    _check_same_mode(out, trainer)
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


def codec_folder(folder: Path) -> Path:
    """The codec of a training's folder, or the folder itself."""
    return folder / "codec" if (folder / "codec").is_dir() else folder


def load_initial_weights(codec: Path, network: MelCodecNetwork) -> None:
    """Load the weights of an earlier codec."""
    weights = read_mel_codec_tensors(codec)
    try:
        network.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    except RuntimeError as error:
        raise CheckpointError(
            f"{codec} is a codec of other sizes: {error}", hint="name one that was trained with the same sizes"
        ) from None


def load_training_modules(folder: Path, trainer: CodecTrainer) -> bool:
    """Load discriminators, and where encoder and codebooks are trained also the CTC head and the codebooks' statistics,
    of an earlier training whose codec is loaded already; whether the codebooks go on."""
    if not (folder / PORTABLE).is_file():
        raise CheckpointError(
            f"{folder} has no {PORTABLE}", hint="copy it too, or name the codec's folder alone to start without it"
        )
    model, tensors = trainer.model, {name: tensor.float() for name, tensor in load_file(folder / PORTABLE).items()}
    parts = ["discriminators"] if trainer.step_config.decoder_only else ["discriminators", "ctc_head"]
    try:
        for part in parts:
            own = {name.removeprefix(f"{part}."): t for name, t in tensors.items() if name.startswith(f"{part}.")}
            model.get_submodule(part).load_state_dict(own)
    except RuntimeError as error:
        raise CheckpointError(
            f"{folder} does not fit this training: {error}",
            hint="use its --discriminator-width and sources, or name the codec's folder alone",
        ) from None
    model.quantiser.counts.copy_(tensors["quantiser.counts"])
    model.quantiser.sums.copy_(model.network.quantiser.books * model.quantiser.counts[..., None])
    trainer.ema.reset()
    return True


def check_same_codes(codec: Path, network: MelCodecNetwork) -> None:
    """Refuse to resume decoder training with another encoder or other codebooks than it was begun with."""
    kept = {name: tensor for name, tensor in network.state_dict().items() if not name.startswith("decoder.")}
    given = read_mel_codec_tensors(codec)
    if changed := [name for name, tensor in kept.items() if not torch.equal(tensor.cpu(), given[name].float())]:
        raise CheckpointError(
            f"the checkpoint is not of {codec}: {changed[0]} differs",
            hint="resume with the codec that it was begun with, or name another --out",
        )


def _check_same_mode(out: Path, trainer: CodecTrainer) -> None:
    progress, now = read_progress(out), trainer.step_config.decoder_only
    if progress is not None and progress.decoder_only != now:
        began = "without --decoder-only: its codes are its own" if now else "with --decoder-only: its codes must stay"
        raise CheckpointError(
            f"{out} was begun {began}",
            hint=f"name another --out, or resume {'without' if now else 'with'} --decoder-only",
        )


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
