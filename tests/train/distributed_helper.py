"""What two processes do for test_processes.py: `python -m tests.train.distributed_helper FOLDER PORT...`, as srun would
start it, without torchrun. Whatever is here is done by one process as well, and compared."""

from __future__ import annotations

import json
import os
import signal
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from myna.config import Recipe, load_recipe
from myna.data.conversation import Conversation, Turn
from myna.data.loader import Shard
from myna.errors import TrainingError
from myna.models import open_family
from myna.models.base import Batch
from myna.train.distributed import ProcessInfo, check_same_weights, gather, shutdown, start
from myna.train.loop import make_loader
from myna.train.loss import stream_weights
from myna.train.precision import decide
from myna.train.trainer import Trainer
from myna.workflow import resume, train


@contextmanager
def asked_to_stop(step: int | None) -> Iterator[None]:
    """In the middle of a step, and this process alone."""
    learn, steps = Trainer.learn, count(1)

    def learn_and_be_asked(*arguments: Any) -> Any:
        if next(steps) == step:
            signal.raise_signal(signal.SIGTERM)
        return learn(*arguments)

    with patch.object(Trainer, "learn", learn_and_be_asked):
        yield


def make_student(recipe: Recipe, precision: Any = "fp32") -> Trainer:
    device = ProcessInfo.find().device("cpu")
    decided = decide(precision, device)
    accelerator = start(recipe, decided, device, Path())
    return Trainer.make(recipe, open_family(recipe.model.source), decided, accelerator, lambda _: None)


def first_rows(student: Trainer, rows: int) -> list[Batch]:
    loader = make_loader(student.recipe, student.family, student.recipe.data.train)
    return next(loader.steps(rows, 1, Shard()))


def learn_from_text(folder: Path) -> Trainer:
    """A step with one row of speech and one without, each on a rank of its own if there are two."""
    student = make_student(load_recipe(folder / "lora.yaml", ["loss.text_weight=0.3"]))
    turns = (Turn("user", ("hi",)), Turn("assistant", ("hello",)))
    text = student.family.collate([student.family.render(Conversation("text", turns), supervise_text=True)])
    assert text.counts[0] > 0 and text.counts[1:].sum() == 0
    place = ProcessInfo.find()
    passes = [*first_rows(student, 1), text][place.rank :: place.world]
    student.learn(passes, stream_weights(student.family.streams, student.recipe.loss), rate=1e-3)
    check_same_weights(student)
    if place.leads:
        weights = {name: weight.detach() for name, weight in student.trainables.items()}
        save_file(weights, folder / f"text-{place.world}.safetensors")
    return student


def bf16_loss(folder: Path) -> float:
    """Of full training in bf16, where the frozen part is bf16 and what learns is fp32."""
    student = make_student(load_recipe(folder / "full.yaml"), "bf16")
    place = ProcessInfo.find()
    weights = stream_weights(student.family.streams, student.recipe.loss)
    tally, _ = student.learn(first_rows(student, 2)[place.rank :: place.world], weights, rate=1e-3)
    assert all(weight.dtype == torch.float32 for weight in student.trainables.values())
    return float(tally.row(student.family.streams, weights)["loss"])


def complaint(student: Trainer) -> str:
    try:
        check_same_weights(student)
    except TrainingError as error:
        return error.what
    return ""


def look_at_ddp(folder: Path) -> dict[str, Any]:
    student, place = learn_from_text(folder), ProcessInfo.find()
    seen: dict[str, Any] = {
        "communicated": student.objective._get_ddp_logging_data()["num_parameter_tensors"] == len(student.trainables),
        "together": complaint(student),
    }
    # What others did: call the model inside the wrapper, and no gradient is shared.
    ddp, student.objective = student.objective, student.accelerator.unwrap_model(student.objective)
    passes = first_rows(student, 2)[place.rank :: place.world]
    student.learn(passes, stream_weights(student.family.streams, student.recipe.loss), rate=1e-3)
    seen["bypassed"] = complaint(student)
    student.objective = ddp
    reference = weakref.ref(ddp)
    del ddp
    shutdown(student)
    return seen | {"let go": reference() is None}


def look_at_fsdp(folder: Path) -> dict[str, Any]:
    student = make_student(load_recipe(folder / "full.yaml"))
    weights = [weight for weight in student.trainables.values() if isinstance(weight, DTensor)]
    whole = gather(student.trainables, keep=True)
    # Only one rank has something to judge by, and afterwards nobody keeps a weight that was put together for it.
    batches = first_rows(student, 1) if ProcessInfo.find().leads else []
    heard = student.judge(batches, stream_weights(student.family.streams, student.recipe.loss))
    seen = {
        "judged": heard["loss"],
        "taken apart again": all(isinstance(weight, DTensor) for weight in student.model.parameters()),
        "all are shared out": len(weights) == len(student.trainables),
        "share": sum(weight.to_local().numel() for weight in weights) / sum(weight.numel() for weight in weights),
        "whole": all(whole[name].shape == weight.shape for name, weight in student.trainables.items()),
    }
    shutdown(student)
    return seen


def main(folder: Path, ports: list[str]) -> None:
    place, free = ProcessInfo.find(), iter(ports)

    def anew() -> None:
        """A place to meet that the last meeting has not used."""
        os.environ["MASTER_PORT"] = next(free)

    for kind, stop in (("lora", 3), ("full", 2)):
        anew()
        train(folder / f"{kind}.yaml", folder / f"{kind}-2")
        anew()
        with asked_to_stop(stop if place.rank == 1 else None):
            train(folder / f"{kind}.yaml", folder / f"{kind}-2-1")
        anew()
        resume(folder / f"{kind}-1-2")
    anew()
    seen = {"ddp": look_at_ddp(folder)}
    anew()
    seen["fsdp"] = look_at_fsdp(folder)
    anew()
    seen["bf16"] = {"loss": bf16_loss(folder)}
    (folder / f"rank-{place.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
