"""What a run leaves behind, so that the next command, or another machine, goes on with it.

codec/                 the codec as it ships, in half precision: the running mean where that is better
state.safetensors      all weights in full and the optimizers' moments: goes on at the same rate with other dice
carried.safetensors    critics, reader and codebook statistics in half precision: with codec/ enough to go on elsewhere,
                       where a file of moments would be too large to take along
progress.json          steps and seconds so far, the alphabet, and the losses on the way
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from codec_training.learner import Teacher
from myna.errors import CheckpointError
from myna.io import replacing
from myna.models.mel_codec.codec import save_mel_codec
from myna.models.mel_codec.network import MelCodecNetwork

STATE, CARRIED, PROGRESS = "state.safetensors", "carried.safetensors", "progress.json"
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


def keep(out: Path, teacher: Teacher, progress: Progress) -> None:
    """Every file appears whole; the count of steps comes last, so that a stop in between costs a little time only."""
    learner = teacher.learner
    with teacher.mean.instead() if teacher.mean.ships else nullcontext():
        save_mel_codec(learner.network, out / "codec")
    weights = {name: tensor.detach().contiguous() for name, tensor in learner.state_dict().items()}
    rest = {name: tensor.half() for name, tensor in weights.items() if not name.startswith("network.")}
    # The sums are the entries times the counts, and would be the largest of all.
    del rest["quantiser.sums"]
    means = {f"mean.{name}": tensor for name, tensor in teacher.mean.means.items()}
    for name, tensors in ((STATE, weights | means | _moments(teacher)), (CARRIED, rest)):
        with replacing(out / name) as temporary:
            save_file({key: tensor.cpu() for key, tensor in tensors.items()}, temporary)
    with replacing(out / PROGRESS) as temporary:
        temporary.write_text(json.dumps(asdict(progress), ensure_ascii=False, indent=1), encoding="utf-8")


class WentOn(NamedTuple):
    what: str
    with_moments: bool


def go_on(out: Path, teacher: Teacher) -> WentOn:
    """Take up what was kept, in the way in which it was begun."""
    _refuse_the_other_way(out, teacher)
    if (out / STATE).is_file():
        tensors = load_file(out / STATE)
        _take(teacher, {name: tensor for name, tensor in tensors.items() if not name.startswith(("moment.", "mean."))})
        for name, mean in teacher.mean.means.items():
            mean.copy_(tensors.get(f"mean.{name}", teacher.mean.followed[name]))
        for name, optimizer in teacher.optimizers.items():
            for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
                kept = {part: tensors.get(f"moment.{name}.{number}.{part}") for part in MOMENTS}
                if all(tensor is not None for tensor in kept.values()):
                    optimizer.state[parameter] = {
                        part: tensor.to(parameter.device) for part, tensor in kept.items() if tensor is not None
                    }
        return WentOn(f"everything, from {out / STATE}", with_moments=True)
    weights = {f"network.{name}": tensor for name, tensor in load_file(out / "codec" / "model.safetensors").items()}
    tensors = {name: tensor.float() for name, tensor in (weights | load_file(out / CARRIED)).items()}
    tensors["quantiser.sums"] = tensors["network.quantiser.books"] * tensors["quantiser.counts"][..., None]
    _take(teacher, tensors)
    teacher.mean.begin()
    return WentOn(f"weights alone, from {out / 'codec'} and {out / CARRIED}", with_moments=False)


def begin_with(codec: Path, network: MelCodecNetwork) -> None:
    """Take the weights of a codec trained before. Codebooks are laid out anew, and critics begin from nothing."""
    weights = load_file(codec / "model.safetensors")
    try:
        network.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    except RuntimeError as error:
        raise CheckpointError(
            f"{codec} is a codec of other sizes: {error}", hint="name one that was trained with the same sizes"
        ) from None


def refuse_other_codes(codec: Path, network: MelCodecNetwork) -> None:
    """A training of the decoder goes on with the encoder and the codebooks that it began with."""
    kept = {name: tensor for name, tensor in network.state_dict().items() if not name.startswith("decoder.")}
    given = load_file(codec / "model.safetensors")
    if changed := [name for name, tensor in kept.items() if not torch.equal(tensor.cpu(), given[name].float())]:
        raise CheckpointError(
            f"what was kept is not of {codec}: {changed[0]} differs",
            hint="go on with the codec that it was begun with, or name another --out",
        )


def _refuse_the_other_way(out: Path, teacher: Teacher) -> None:
    progress, now = read_progress(out), teacher.lesson.decoder_only
    if progress is not None and progress.decoder_only != now:
        began = "without --decoder-only: its codes are its own" if now else "with --decoder-only: its codes must stay"
        raise CheckpointError(
            f"{out} was begun {began}",
            hint=f"name another --out, or go on {'without' if now else 'with'} --decoder-only",
        )


def _take(teacher: Teacher, tensors: dict[str, torch.Tensor]) -> None:
    try:
        teacher.learner.load_state_dict(tensors)
    except RuntimeError as error:
        raise CheckpointError(
            f"what was kept does not fit this training: {error}",
            hint="go on with the sizes and sources it began with, or name another --out",
        ) from None


def _moments(teacher: Teacher) -> dict[str, torch.Tensor]:
    return {
        f"moment.{name}.{number}.{part}": optimizer.state[parameter][part].contiguous()
        for name, optimizer in teacher.optimizers.items()
        for number, parameter in enumerate(optimizer.param_groups[0]["params"])
        if parameter in optimizer.state
        for part in MOMENTS
    }
