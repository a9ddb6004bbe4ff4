"""The loop, read from top to bottom.

Everything is planned in optimizer steps. A step is the same rows however they are shared out: losses are summed, and
divided once by the targets counted over all passes and processes.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from accelerate import Accelerator

from myna.config import Recipe
from myna.data.corpus import Corpus
from myna.data.loader import Loader, Share
from myna.errors import DataError, TrainingError
from myna.models import open_family
from myna.models.base import Batch, Family, Rendered
from myna.train.lora import adapt, save_adapter
from myna.train.precision import Precision, decide, pick_device
from myna.train.run import Run
from myna.train.schedule import learning_rate
from myna.train.streams import stream_means, stream_weights, weighed_loss


class Watcher(Protocol):
    """Whoever looks on: the command line draws, a test collects."""

    def say(self, text: str) -> None: ...

    def planned(self, steps: int) -> None: ...

    def stepped(self, row: dict[str, Any]) -> None: ...


@dataclass(slots=True)
class _Tally:
    """Sums over the passes of a step or of an evaluation."""

    sums: torch.Tensor
    correct: torch.Tensor
    stops: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def of(cls, streams: int) -> _Tally:
        zeros = [torch.zeros(n, dtype=torch.float64) for n in (streams, streams, 2, streams)]
        return cls(*zeros)

    def row(self, names: tuple[str, ...], weights: torch.Tensor) -> dict[str, Any]:
        losses = stream_means(self.sums, self.counts)
        hits, targets = float(self.correct.sum()), float(self.counts.sum())
        stops, ends = self.stops.tolist()
        return {
            "loss": float(weighed_loss(self.sums, self.counts, weights)),
            **{name: loss for name, loss in zip(names, losses, strict=True) if loss is not None},
            "accuracy": hits / targets if targets else None,
            "stop_accuracy": stops / ends if ends else None,
        }


def train(recipe: Recipe, run: Run, watcher: Watcher) -> None:
    """Everything `myna train` does after the recipe is read."""
    settings = recipe.train
    device = pick_device(settings.device)
    precision = decide(settings.precision, device)
    accelerator = Accelerator(mixed_precision=precision.mixed_precision, cpu=device.type == "cpu")
    torch.manual_seed(settings.seed)

    def say(text: str) -> None:
        run.log(text)
        watcher.say(text)

    say(f"device {accelerator.device}, precision {precision}")

    # What is learned, and from what.
    family = open_family(recipe.model.source, revision=recipe.model.revision, codec=recipe.model.codec)
    loader = make_loader(recipe, family, recipe.data.train)
    evaluation = make_loader(recipe, family, recipe.data.evaluation) if recipe.data.evaluation else None
    _say_data(loader, say)
    if recipe.data.evaluation:
        say(f"evaluation: {len(evaluation.pairing.targets) if evaluation else 0} targets from {recipe.data.evaluation}")

    # Who learns.
    objective, trainables = make_objective(recipe, family, precision, accelerator.device, say)
    weights = stream_weights(family.streams, recipe.loss)
    optimizer = torch.optim.AdamW(
        trainables, lr=settings.learning_rate, betas=settings.betas, weight_decay=settings.weight_decay
    )
    objective, optimizer = accelerator.prepare(objective, optimizer)

    # The plan.
    rows_in_epoch = loader.rows_in_first_epoch()
    steps = settings.steps or math.ceil((settings.epochs or 1) * rows_in_epoch / settings.rows_per_step)
    evaluate_every = settings.evaluate_every or max(1, steps // 10)
    say(
        f"{steps} optimizer steps of {settings.rows_per_step} rows; an epoch is {rows_in_epoch} rows, "
        f"{rows_in_epoch / settings.rows_per_step:.1f} steps"
    )
    watcher.planned(steps)
    share = Share(accelerator.process_index, accelerator.num_processes)
    stream = loader.steps(settings.rows_per_step, settings.rows_per_pass, share)

    for step in range(1, steps + 1):
        began = time.perf_counter()
        rate = learning_rate(settings, step, steps)
        for group in optimizer.param_groups:
            group["lr"] = rate

        # Count first, over all passes and ranks, so that every target weighs the same.
        passes = next(stream)
        tally = _Tally.of(len(family.streams))
        tally.counts += accelerator.reduce(sum(batch.counts for batch in passes).to(accelerator.device)).cpu()  # type: ignore[union-attr]

        objective.train()
        for batch in passes:
            result = objective(batch.to(accelerator.device))
            # DDP averages gradients over ranks; the loss is a sum over them.
            loss = weighed_loss(result.sums, tally.counts, weights) * accelerator.num_processes
            accelerator.backward(loss)
            _add(tally, result)
        norm = float(accelerator.clip_grad_norm_(trainables, settings.clip))
        if not math.isfinite(norm) and not precision.scaler:
            raise TrainingError(
                f"the gradient at step {step} is not finite", hint="lower train.learning_rate, or train in fp32"
            )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        seconds = time.perf_counter() - began
        row: dict[str, Any] = {"step": step, "epoch": step * settings.rows_per_step / rows_in_epoch}
        row |= tally.row(family.streams, weights) | {"gradient_norm": norm, "learning_rate": rate}
        row["speed"] = {
            "seconds": seconds,
            "tokens_per_second": sum(batch.tokens for batch in passes) / seconds,
            "audio_per_second": sum(batch.target_seconds for batch in passes) / seconds,
            "memory_gib": _memory_gib(accelerator.device),
        }
        run.record(row)
        watcher.stepped(row)

        if evaluation is not None and (step % evaluate_every == 0 or step == steps):
            row = {
                "step": step,
                "evaluation": evaluate(objective, evaluation, family, weights, accelerator, settings.rows_per_pass),
            }
            run.record(row)
            watcher.stepped(row)

    model = accelerator.unwrap_model(objective).model
    if recipe.adapt.mode == "full":
        family.save_model(model, run.model)
    else:
        save_adapter(model, run.adapter)
    say(f"saved {run.model if recipe.adapt.mode == 'full' else run.adapter}")


@torch.no_grad()
def evaluate(
    objective: Any,
    loader: Loader[Rendered, Batch],
    family: Family,
    weights: torch.Tensor,
    accelerator: Accelerator,
    rows_per_pass: int,
) -> dict[str, Any]:
    """Losses on data that is never trained on."""
    objective.eval()
    tally = _Tally.of(len(family.streams))
    for batch in loader.once(rows_per_pass):
        _add(tally, objective(batch.to(accelerator.device)))
        tally.counts += batch.counts
    return tally.row(family.streams, weights)


def make_loader(recipe: Recipe, family: Family, folder: Any) -> Loader[Rendered, Batch]:
    corpus = Corpus.open(folder)
    if not family.accepts(corpus.prepared.codebooks, corpus.prepared.codebook_size, corpus.prepared.frame_rate):
        raise DataError(
            f"{folder} was prepared with another kind of codec than {family.source} speaks",
            hint=f"myna prepare SOURCE --out {folder} --model {family.source}",
        )
    loader = Loader(
        corpus,
        recipe.data,
        render=lambda conversation: family.render(
            conversation, supervise_text=recipe.loss.text_weight > 0, supervise_all_audio=recipe.loss.all_audio
        ),
        collate=family.collate,
        seed=recipe.train.seed,
    )
    loader.check_lengths()
    return loader


def make_objective(
    recipe: Recipe, family: Family, precision: Precision, device: torch.device, say: Callable[[str], None]
) -> tuple[torch.nn.Module, list[torch.nn.Parameter]]:
    """The model in its precision, adapted, and its trainable parameters."""
    model = family.load_model(dtype=precision.compute, device=device, text_head=recipe.needs_text_head)
    model = adapt(model, family, recipe.adapt)
    trainables = [parameter for parameter in model.parameters() if parameter.requires_grad]
    total = sum(parameter.numel() for parameter in model.parameters())
    trainable = sum(parameter.numel() for parameter in trainables)
    say(f"{trainable:,} of {total:,} parameters learn ({100 * trainable / total:.2f} %)")
    return family.objective(model, label_smoothing=recipe.loss.label_smoothing), trainables


def _say_data(loader: Loader[Rendered, Batch], say: Callable[[str], None]) -> None:
    pairing, corpus = loader.pairing, loader.corpus
    hours = sum(corpus.seconds(target) for target in pairing.targets) / 3600
    speakers = len({target.speaker for target in pairing.targets})
    say(f"{len(pairing.targets)} targets, {hours:.2f} h, {speakers} speakers from {corpus.folder}")
    if loader.settings.reference != "none" and pairing.unpaired.without_reference:
        names = pairing.unpaired.without_reference
        say(f"{len(names)} of them have no reference and are learned without ({names[0]} first)")
    if pairing.unpaired.outside_seconds:
        names = pairing.unpaired.outside_seconds
        say(f"{len(names)} targets lie outside data.seconds and are left out ({names[0]} first)")


def _add(tally: _Tally, result: Any) -> None:
    tally.sums += result.sums.detach().double().cpu()
    tally.correct += result.correct.double().cpu()
    tally.stops += result.stops.double().cpu()


def _memory_gib(device: torch.device) -> float:
    """Peak memory: the device's where it has its own, else the process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
