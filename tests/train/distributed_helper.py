"""Work of two processes for test_distributed.py: `python -m tests.train.distributed_helper FOLDER PORT...`.

They are started as by srun, without torchrun. One process does the same work, and both results are compared."""

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

from myna import resume, train
from myna.core.config import Recipe, load_recipe
from myna.core.errors import TrainingError
from myna.data.conversation import Conversation, Turn
from myna.data.loader import Shard
from myna.models import open_family
from myna.models.base import Batch
from myna.train.distributed import ProcessInfo, gather_full_tensors, init_accelerator
from myna.train.loop import make_loader
from myna.train.loss import term_weights
from myna.train.precision import choose_precision
from myna.train.trainer import Trainer


@contextmanager
def asked_to_stop(step: int | None) -> Iterator[None]:
    """Send this process a stop signal in the middle of a step."""
    learn, steps = Trainer.train_step, count(1)

    def learn_and_be_asked(*arguments: Any) -> Any:
        if next(steps) == step:
            signal.raise_signal(signal.SIGTERM)
        return learn(*arguments)

    with patch.object(Trainer, "train_step", learn_and_be_asked):
        yield


def make_trainer(recipe: Recipe, precision: Any = "fp32") -> Trainer:
    device = ProcessInfo.from_environment().device("cpu")
    decided = choose_precision(precision, device)
    accelerator = init_accelerator(recipe, decided, device, Path())
    return Trainer.from_recipe(recipe, open_family(recipe.model.source), decided, accelerator, lambda _: None)


def first_rows(trainer: Trainer, rows: int) -> list[Batch]:
    loader = make_loader(trainer.recipe, trainer.family, trainer.recipe.data.train)
    return next(loader.steps(rows, 1, Shard()))


def learn_from_text(folder: Path) -> Trainer:
    """Run a step with one row of speech and one without, each on a rank of its own if there are two."""
    trainer = make_trainer(load_recipe(folder / "lora.yaml", ["loss.text_weight=0.3"]))
    turns = (Turn("user", ("hi",)), Turn("assistant", ("hello",)))
    text = trainer.family.collate([trainer.family.render(Conversation("text", turns), supervise_text=True)])
    assert text.counts[0] > 0 and text.counts[1:].sum() == 0
    place = ProcessInfo.from_environment()
    passes = [*first_rows(trainer, 1), text][place.rank :: place.world_size]
    trainer.train_step(passes, term_weights(trainer.family.loss_terms, trainer.recipe.loss), learning_rate=1e-3)
    trainer.check_same_weights()
    if place.is_main:
        weights = {name: weight.detach() for name, weight in trainer.trainable_parameters.items()}
        save_file(weights, folder / f"text-{place.world_size}.safetensors")
    return trainer


def bf16_loss(folder: Path) -> float:
    """Loss of full training in bf16, where frozen parts are bf16 and trained ones fp32."""
    trainer = make_trainer(load_recipe(folder / "full.yaml"), "bf16")
    place = ProcessInfo.from_environment()
    weights = term_weights(trainer.family.loss_terms, trainer.recipe.loss)
    tally, _ = trainer.train_step(first_rows(trainer, 2)[place.rank :: place.world_size], weights, learning_rate=1e-3)
    assert all(weight.dtype == torch.float32 for weight in trainer.trainable_parameters.values())
    trainer.shutdown()  # or a thread of gloo may be alive when the process ends, which then aborts
    return float(tally.metrics(trainer.family.loss_terms, weights)["loss"])


def complaint(trainer: Trainer) -> str:
    try:
        trainer.check_same_weights()
    except TrainingError as error:
        return error.what
    return ""


def look_at_ddp(folder: Path) -> dict[str, Any]:
    trainer, place = learn_from_text(folder), ProcessInfo.from_environment()
    seen: dict[str, Any] = {
        "random": torch.rand(8).tolist(),
        "communicated": trainer.objective._get_ddp_logging_data()["num_parameter_tensors"]
        == len(trainer.trainable_parameters),
        "together": complaint(trainer),
    }
    # What others did: call the model inside the wrapper, and no gradient is shared.
    ddp, trainer.objective = trainer.objective, trainer.accelerator.unwrap_model(trainer.objective)
    passes = first_rows(trainer, 2)[place.rank :: place.world_size]
    trainer.train_step(passes, term_weights(trainer.family.loss_terms, trainer.recipe.loss), learning_rate=1e-3)
    seen["bypassed"] = complaint(trainer)
    trainer.objective = ddp
    reference = weakref.ref(ddp)
    del ddp
    trainer.shutdown()
    return seen | {"let go": reference() is None}


def look_at_fsdp(folder: Path) -> dict[str, Any]:
    trainer = make_trainer(load_recipe(folder / "full.yaml"))
    weights = [weight for weight in trainer.trainable_parameters.values() if isinstance(weight, DTensor)]
    whole = gather_full_tensors(trainer.trainable_parameters, keep=True)
    # Only one rank has something to judge by, and afterwards nobody keeps a weight that was put together for it.
    batches = first_rows(trainer, 1) if ProcessInfo.from_environment().is_main else []
    heard = trainer.evaluate(batches, term_weights(trainer.family.loss_terms, trainer.recipe.loss))
    seen = {
        "judged": heard["loss"],
        "taken apart again": all(isinstance(weight, DTensor) for weight in trainer.model.parameters()),
        "all are shared out": len(weights) == len(trainer.trainable_parameters),
        "share": sum(weight.to_local().numel() for weight in weights) / sum(weight.numel() for weight in weights),
        "whole": all(whole[name].shape == weight.shape for name, weight in trainer.trainable_parameters.items()),
    }
    trainer.shutdown()
    return seen


def main(folder: Path, ports: list[str]) -> None:
    place, free = ProcessInfo.from_environment(), iter(ports)

    def anew() -> None:
        """Return a rendezvous file that was not used before."""
        os.environ["MASTER_PORT"] = next(free)

    for kind, stop in (("lora", 3), ("full", 2)):
        anew()
        train(folder / f"{kind}.yaml", out=folder / f"{kind}-2")
        anew()
        with asked_to_stop(stop if place.rank == 1 else None):
            train(folder / f"{kind}.yaml", out=folder / f"{kind}-2-1")
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
