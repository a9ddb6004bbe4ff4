"""Preflight checks before the first training step.

Every check is a small function that either passes or raises an error with its cause and what to type. They run on every
rank, on its own targets, and change nothing: a run with them is bit for bit the run without them.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor

from myna.core.config import Recipe
from myna.core.device import is_out_of_memory
from myna.core.errors import TrainingError
from myna.data.codec import Codes
from myna.data.dataset import Utterances
from myna.data.loader import Loader, Shard
from myna.data.split import ComparedClip, find_overlap
from myna.models.base import IGNORE_INDEX, Batch, LossSums, RenderedSequence
from myna.models.files import format_names
from myna.models.token_view import token_view
from myna.train.callbacks import preserve_rng_state
from myna.train.distributed import is_finite, local_shard
from myna.train.loss import LossAccumulator, term_means, term_weights, weighted_loss
from myna.train.memory_plan import MemoryPlan, evenly_spaced, format_bytes, out_of_memory_error, peak_memory
from myna.train.optimizer import INITIAL_LOSS_SCALE, make_optimizer
from myna.train.trainer import Trainer

MEASURED_SAMPLES = 32
"""Samples per rank whose labels and loss are checked."""
SHOWN_SAMPLES = 3
"""Number of samples per rank that are shown token by token."""
COMPARED_TARGETS = 512
"""Number of targets per rank that are compared with their references."""
SAME_AUDIO_SHARE = 0.9
"""Share of equal codes from which two clips count as one recording."""
MIN_SUPERVISED_SHARE, MAX_SUPERVISED_SHARE = 0.01, 0.99
"""Limits of the share of positions with labels; a share outside means that the mask is wrong."""
ROUNDING_TOLERANCE = 1e-6
"""Relative change of a loss sum that is only rounding. Unchanged sums are usually bit-exact."""
LABEL_OFFSETS = (-1, 0, 1, 2)
CHANCE_SHARE = 0.97
"""Share of a uniform guess's loss from which a model counts as untrained."""
MAX_INITIAL_ACCURACY = 0.98
"""Share of targets that a model cannot get right before it was trained on them."""

T = TypeVar("T")


def run_preflight(
    trainer: Trainer,
    loader: Loader[RenderedSequence, Batch],
    evaluation: Loader[RenderedSequence, Batch] | None,
    log: Callable[[str], None],
    *,
    memory: MemoryPlan,
    folder: Path | None,
    trained: bool = False,
) -> None:
    """Run all checks, cheapest first. `memory` was planned for the largest micro-batch of this rank. Samples are
    written to the `folder`, if there is one. A model that is `trained` may have learned the data already."""
    start, accelerator = time.perf_counter(), trainer.accelerator
    # Sharded ranks must run the model together: they all look at the same samples.
    shard = Shard() if trainer.sharded else Shard(accelerator.process_index, accelerator.num_processes)
    context = CheckContext(trainer, loader, evaluation, memory, folder, log, shard)
    with _preserve_training_state(trainer):
        for check in (
            write_samples,
            check_evaluation_unseen,
            check_references_differ,
            check_labels_present,
            check_trainable_parameters,
        ):
            trainer.on_all_ranks(partial(check, context))
        initial = InitialLoss.over_ranks(trainer.on_all_ranks(partial(measure_initial_loss, context)))
        per_term = ", ".join(f"{name} {loss:.2f}" for name, loss in initial.per_term(1).items())
        log(f"before training: loss {initial.mean(1):.2f}, where chance is {initial.mean_chance:.2f} ({per_term})")
        check_loss_finite(initial, context)
        check_stop_labels(initial, context)
        if not trained:
            check_not_solved(initial, context)
        if trainer.recipe.model.check_pretrained:
            check_better_than_chance(initial, context)
            check_label_alignment(initial, context)
        else:
            log("model.check_pretrained is false: chance and the alignment of the labels are not checked")
        trainer.on_all_ranks(partial(check_no_leakage, context))
        # Sharded ranks run the model together: none can wait for another that has run out of memory.
        fits = partial(check_largest_batch_fits, context)
        peak = fits() if trainer.sharded else max(trainer.on_all_ranks(fits))
    where = "" if accelerator.device.type == "cuda" else ", by the whole process"
    planned, measured = format_bytes(memory.total), format_bytes(peak)
    log(f"memory: {planned} planned, {measured} measured in two steps of the longest pass{where}")
    log(f"preflight passed in {time.perf_counter() - start:.1f} s")


@dataclass
class CheckContext:
    trainer: Trainer
    loader: Loader[RenderedSequence, Batch]
    evaluation: Loader[RenderedSequence, Batch] | None
    memory: MemoryPlan
    folder: Path | None
    log: Callable[[str], None]
    shard: Shard

    @property
    def recipe(self) -> Recipe:
        return self.trainer.recipe

    @property
    def targets(self) -> Utterances:
        """Targets of this rank, or all of them if there are fewer targets than ranks."""
        targets = self.loader.reference_sampler.targets
        return targets[self.shard.rank :: self.shard.world_size] or targets

    @cached_property
    def samples(self) -> list[RenderedSequence]:
        return [self.loader.sequence(target, 0) for target in evenly_spaced(self.targets, MEASURED_SAMPLES)]

    def render_hint(self, id: str) -> str:
        data, model = self.recipe.data.train, self.recipe.model.source
        return f"look at what is learned: myna render {data} --model {model} --id {id}"

    @torch.no_grad()
    def forward(self, batch: Batch, losses: LossAccumulator) -> None:
        """Add the loss of a batch as in training, without dropout."""
        accelerator = self.trainer.accelerator
        objective = accelerator.unwrap_model(self.trainer.objective).eval()
        with accelerator.autocast():
            losses.add(objective(batch.to(accelerator.device)))
        if self.trainer.sharded:
            objective.reshard()


# Data


def write_samples(context: CheckContext) -> None:
    """Write samples token by token to preflight.txt in the run folder."""
    family = context.trainer.family
    shown = evenly_spaced(context.targets, SHOWN_SAMPLES)
    views = [token_view(context.loader.sequence(target, 0), family).plain for target in shown]
    for view in views:
        context.log(f"sample {view.splitlines()[0]}")
    if context.trainer.accelerator.is_main_process and context.folder is not None:
        context.folder.mkdir(parents=True, exist_ok=True)
        (context.folder / "preflight.txt").write_text("\n".join(views), encoding="utf-8")


def check_evaluation_unseen(context: CheckContext) -> None:
    """Check that no evaluation clip is trained on, nor the same words of the same speaker."""
    if context.evaluation is None:
        return
    train, held_out = context.loader, context.evaluation
    trained = train.dataset.utterances if context.recipe.loss.supervise_references else train.reference_sampler.targets
    targets = list(held_out.reference_sampler.targets)
    key = held_out.dataset.key
    clips = [ComparedClip(clip.id, clip.speaker, clip.text, key(clip), clip) for clip in targets]
    leaked = find_overlap(trained, clips)
    if leaked:
        same = Counter(leaked.values())
        raise TrainingError(
            f"{len(leaked)} of {len(targets)} evaluation utterances are trained on too ({same['audio']} with the same "
            f"audio, {same['words']} with the same words of the same speaker): {format_names(list(leaked))}",
            hint=f"take them out of one source and run `myna prepare` again for {held_out.dataset.folder} or "
            f"{train.dataset.folder}",
        )


def check_references_differ(context: CheckContext) -> None:
    """Check that no reference has the audio of its target, whatever the files are called."""
    dataset, sampler = context.loader.dataset, context.loader.reference_sampler
    copies = [
        f"{target.id} and its reference {reference.id}"
        for target in evenly_spaced(context.targets, COMPARED_TARGETS)
        for reference in sampler.references(target, 0)
        if _same_audio(dataset.codes(target), dataset.codes(reference))
    ]
    if copies:
        raise TrainingError(
            f"{len(copies)} targets have their own sound for a reference, and would learn to copy it: "
            f"{format_names(copies)}",
            hint=f"take one of each out of the source and run `myna prepare` again for {dataset.folder}",
        )


def check_labels_present(context: CheckContext) -> None:
    """Check that every sample has labels, that the collator keeps them, and that they cover a plausible share."""
    samples, family = context.samples, context.trainer.family
    empty = [sample.id for sample in samples if not _label_count(sample)]
    if empty:
        raise TrainingError(
            f"{len(empty)} of {len(samples)} samples have no label: all is masked in {format_names(empty)}",
            hint=context.render_hint(empty[0]),
        )
    supervised = sum(len(_supervised_positions(sample)) for sample in samples) / sum(map(len, samples))
    if not MIN_SUPERVISED_SHARE <= supervised <= MAX_SUPERVISED_SHARE:
        extent = "hardly anything" if supervised < MIN_SUPERVISED_SHARE else "the prompt too"
        raise TrainingError(
            f"{supervised:.1%} of all positions are learned: {extent}. The mask of the labels is wrong",
            hint=context.render_hint(samples[0].id),
        )
    for sample in samples:
        collated = int(family.collate([sample]).counts.sum())
        if collated != _label_count(sample):
            raise TrainingError(
                f"{sample.id} has {_label_count(sample)} labels, of which {collated} reach the batch",
                hint="the family's `collate` loses them: report this with the output of myna verify MODEL",
            )


def check_no_leakage(context: CheckContext) -> None:
    """Corrupt the second half of one sequence's targets, and check that only losses after it change."""
    sequences, family = sorted(context.samples, key=len)[:3], context.trainer.family
    index = (len(sequences) - 1) // 2
    id, positions = sequences[index].id, _supervised_positions(sequences[index])
    cut = int(positions[len(positions) // 2])
    corrupted = [*sequences]
    corrupted[index] = _corrupt(sequences[index], cut)

    def changes(keep: Callable[[int, npt.NDArray[np.int64]], npt.NDArray[np.bool_]]) -> bool:
        """Whether the corruption changes the loss of the labels kept, by sequence number and positions."""
        sums = []
        for version in (sequences, corrupted):
            masked = [_mask_labels(sequence, partial(keep, number)) for number, sequence in enumerate(version)]
            losses = LossAccumulator.zeros(len(family.loss_terms))
            context.forward(family.collate(masked), losses)
            sums.append(losses.totals.sums)
        return not torch.allclose(sums[0], sums[1], rtol=ROUNDING_TOLERANCE, atol=0.0)

    if changes(lambda number, at: (at < cut) & (number == index)):
        raise TrainingError(
            f"what {id} says from position {cut} on changes the loss before it: the model sees its own future",
            hint="attention is not causal: report this with the output of myna verify MODEL",
        )
    if changes(lambda number, at: (at == cut) & (number == index)):
        raise TrainingError(
            f"the frame at position {cut} of {id} changes its own loss: it is given to read what it is to predict, and "
            "would learn to copy",
            hint="the labels are not shifted by one: report this with the output of myna verify MODEL",
        )
    if changes(lambda number, at: np.full(at.shape, number != index)):
        others = [sequence.id for number, sequence in enumerate(sequences) if number != index]
        raise TrainingError(
            f"what {id} says changes the loss of {format_names(others)} in the same row: packed sequences see one "
            "another",
            hint="--set data.pack=false until the family's attention is mended",
        )
    if not changes(lambda number, at: (at > cut) & (number == index)) and cut < positions[-1]:
        raise TrainingError(
            f"what {id} says up to position {cut} makes no difference to what follows: codes do not reach the model",
            hint="the family's `collate` loses them: report this with the output of myna verify MODEL",
        )


def _same_audio(first: Codes, second: Codes) -> bool:
    shared = min(len(first), len(second))
    return abs(len(first) - len(second)) <= 2 and float((first[:shared] == second[:shared]).mean()) >= SAME_AUDIO_SHARE


def _audio_positions(sequence: RenderedSequence) -> npt.NDArray[np.int64]:
    """Return the positions of the rows of `codes`."""
    audio = (np.arange(span.start, span.stop) for span in sequence.spans if span.kind == "audio")
    return np.concatenate([np.empty(0, np.int64), *audio])


def _label_count(sequence: RenderedSequence) -> int:
    return int((sequence.labels != IGNORE_INDEX).sum() + (sequence.code_labels != IGNORE_INDEX).sum())


def _supervised_positions(sequence: RenderedSequence) -> npt.NDArray[np.int64]:
    text = np.flatnonzero(sequence.labels != IGNORE_INDEX)
    audio = _audio_positions(sequence)[(sequence.code_labels != IGNORE_INDEX).any(axis=1)]
    return np.union1d(text, audio)


def _mask_labels(
    sequence: RenderedSequence, keep: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.bool_]]
) -> RenderedSequence:
    """Keep labels only at the positions that `keep` selects."""
    text, audio = keep(np.arange(len(sequence))), keep(_audio_positions(sequence))
    return replace(
        sequence,
        labels=np.where(text, sequence.labels, IGNORE_INDEX),
        code_labels=np.where(audio[:, None], sequence.code_labels, IGNORE_INDEX),
    )


def _corrupt(sequence: RenderedSequence, cut: int) -> RenderedSequence:
    """Replace codes and text from a position on by others of the same kinds; the labels stay."""
    positions, audio, codes = np.arange(len(sequence)), _audio_positions(sequence), sequence.codes
    is_text = np.ones(len(sequence), bool)
    is_text[audio] = False
    text_ids = np.unique(sequence.ids[is_text])
    other_ids = text_ids[(np.searchsorted(text_ids, sequence.ids) + 1) % len(text_ids)]
    return replace(
        sequence,
        ids=np.where(is_text & (positions >= cut), other_ids, sequence.ids),
        codes=np.where((audio >= cut)[:, None], (codes + 1) % (codes.max(initial=0) + 1), codes),
    )


# Loss before training


@dataclass(frozen=True, slots=True)
class InitialLoss:
    """Loss before training, per offset of the labels; the same on every rank."""

    loss_terms: tuple[str, ...]
    chance: tuple[float, ...]
    by_offset: dict[int, LossAccumulator]
    sequences: int

    @classmethod
    def over_ranks(cls, ranks: "list[InitialLoss]") -> "InitialLoss":
        def total(offset: int) -> LossAccumulator:
            losses = [loss.by_offset[offset] for loss in ranks]
            parts = zip(*((*loss.totals, loss.counts) for loss in losses), strict=True)
            *totals, counts = (torch.stack(part).sum(0) for part in parts)
            return LossAccumulator(LossSums(*totals), counts)

        by_offset = {offset: total(offset) for offset in ranks[0].by_offset}
        return replace(ranks[0], by_offset=by_offset, sequences=sum(loss.sequences for loss in ranks))

    @property
    def decisive(self) -> list[int]:
        """Indices of the terms to compare: the codebooks, or without audio the text, which else has few targets."""
        present = [k for k, count in enumerate(self.by_offset[1].counts.tolist()) if count]
        return [k for k in present if self.loss_terms[k].startswith("code")] or present

    def per_term(self, offset: int) -> dict[str, float]:
        means = term_means(self.by_offset[offset].totals.sums, self.by_offset[offset].counts)
        return {name: mean for name, mean in zip(self.loss_terms, means, strict=True) if mean is not None}

    def mean(self, offset: int) -> float:
        per_term = self.per_term(offset)
        losses = [per_term[self.loss_terms[k]] for k in self.decisive if self.loss_terms[k] in per_term]
        return sum(losses) / len(losses) if losses else math.inf

    @property
    def mean_chance(self) -> float:
        return sum(self.chance[k] for k in self.decisive) / len(self.decisive)

    @property
    def accuracy(self) -> float:
        losses = self.by_offset[1]
        return float(losses.totals.correct[self.decisive].sum() / losses.counts[self.decisive].sum())


def measure_initial_loss(context: CheckContext) -> InitialLoss:
    """Measure the loss with the labels at offset +1, and for a pretrained model also at the others."""
    family = context.trainer.family
    by_offset = {}
    for offset in LABEL_OFFSETS if context.recipe.model.check_pretrained else (1,):
        losses = by_offset[offset] = LossAccumulator.zeros(len(family.loss_terms))
        for sequences in _micro_batches(context.samples, context.recipe):
            batch = family.collate(sequences, offset=offset)
            losses.counts += batch.counts
            context.forward(batch, losses)
    return InitialLoss(family.loss_terms, family.chance, by_offset, len(context.samples))


def check_loss_finite(loss: InitialLoss, context: CheckContext) -> None:
    if torch.isfinite(loss.by_offset[1].totals.sums).all():
        return
    infinite = [name for name, mean in loss.per_term(1).items() if not math.isfinite(mean)]
    precision = context.trainer.precision
    other = "bf16, or fp32 where there is none" if precision.may_overflow else "fp32, to find the cause"
    raise TrainingError(
        f"before training the loss of {format_names(infinite)} is not finite, in {precision.name}",
        hint=f"--set train.precision={other}",
    )


def check_stop_labels(loss: InitialLoss, context: CheckContext) -> None:
    """Check the ends of stream among the labels: a model learns to stop from them alone."""
    ends = int(loss.by_offset[1].totals.stops[1])
    if ends < loss.sequences and any(loss.loss_terms[k].startswith("code") for k in loss.decisive):
        raise TrainingError(
            f"{loss.sequences} samples have {ends} ends of stream among their labels: speech would not learn to stop",
            hint=context.render_hint(context.targets[0].id) + " --frames",
        )


def check_not_solved(loss: InitialLoss, context: CheckContext) -> None:
    if loss.accuracy > MAX_INITIAL_ACCURACY:
        raise TrainingError(
            f"before the first step {loss.accuracy:.1%} of the targets are right, at a loss of {loss.mean(1):.4f} "
            f"where chance is {loss.mean_chance:.2f}: either the labels are visible in the input, or the model was "
            "already trained on these clips",
            hint=context.render_hint(context.targets[0].id) + " --frames",
        )


def check_better_than_chance(loss: InitialLoss, context: CheckContext) -> None:
    """Check that at least one codebook is better than chance. On an unfamiliar voice, a small model may be confidently
    wrong about the last ones, which dominates a mean."""
    means = loss.per_term(1)
    if all(means.get(loss.loss_terms[k], math.inf) >= CHANCE_SHARE * loss.chance[k] for k in loss.decisive):
        model = context.recipe.model.source
        raise TrainingError(
            f"{model} is no better than chance on this data: {loss.mean(1):.2f}, where a uniform "
            f"guess has {loss.mean_chance:.2f}. Its weights are random, or the codes are another codec's",
            hint=f"myna prepare SOURCE --out {context.recipe.data.train} --model {model} makes the "
            "codes anew; to train from random weights, --set model.check_pretrained=false",
        )


def check_label_alignment(loss: InitialLoss, context: CheckContext) -> None:
    """Check that a pretrained model predicts best at offset +1, for which it was trained.

    The mean must be lowest there, and most codebooks must agree: a single one may vary, and one confident error
    dominates a mean.
    """
    means = {offset: loss.mean(offset) for offset in loss.by_offset}
    rows = {offset: loss.per_term(offset) for offset in loss.by_offset}
    names = [loss.loss_terms[k] for k in loss.decisive]
    best = [min(rows, key=lambda offset: rows[offset].get(name, math.inf)) for name in names]
    others = [offset for offset in means if offset != 1]
    if all(means[1] < means[other] and best.count(1) > best.count(other) for other in others):
        return
    lowest = min(others, key=lambda offset: means[offset])
    shown = [row | {"mean": means[offset]} for offset, row in rows.items()]
    lines = [f"{'offset':>10}" + "".join(f"{offset:+9d}" for offset in means)]
    lines += [f"{name:>10}" + "".join(f"{row.get(name, math.nan):9.3f}" for row in shown) for name in (*names, "mean")]
    table = "\n".join(lines)
    raise TrainingError(
        f"the labels are misplaced: {context.recipe.model.source} predicts them best at offset {lowest:+d} instead of "
        f"+1\n{table}",
        hint="if the model was never trained to speak, --set model.check_pretrained=false; otherwise the family's "
        "`collate` or `render` is wrong: report this with the output of myna verify MODEL",
    )


def _micro_batches(samples: list[RenderedSequence], recipe: Recipe) -> Iterator[list[RenderedSequence]]:
    """Split samples into batches no larger than a micro-batch."""
    max_tokens = recipe.data.row_tokens * recipe.train.micro_batch_size
    batch: list[RenderedSequence] = []
    for sample in samples:
        if batch and sum(map(len, batch)) + len(sample) > max_tokens:
            yield batch
            batch = []
        batch.append(sample)
    yield batch


# Weights, gradients and memory


def check_trainable_parameters(context: CheckContext) -> None:
    """Check that there are trainable parameters, LoRA among them if configured, all of them in the optimizer."""
    trainer, mode = context.trainer, context.recipe.adapt.mode
    trainable = [name for name, parameter in trainer.trainable_parameters.items() if parameter.requires_grad]
    if not trainable:
        raise TrainingError("no weight would learn: everything is frozen", hint="--set adapt.mode=comprehensive")
    if mode != "full" and not any("lora_" in name for name in trainable):
        raise TrainingError(
            f"adapt.mode {mode} has put a LoRA on nothing; what would learn: {format_names(trainable)}",
            hint=f"myna model stats {context.recipe.model.source} --lora {mode} lists what a mode meets",
        )
    held = {id(parameter) for group in trainer.optimizer.param_groups for parameter in group["params"]}
    missing = [name for name in trainable if id(trainer.trainable_parameters[name]) not in held]
    if missing:
        raise TrainingError(
            f"the optimizer does not hold {len(missing)} of {len(trainable)} trainable weights: "
            f"{format_names(missing)}",
            hint="it was made before the model was adapted: make the trainer anew",
        )


def check_largest_batch_fits(context: CheckContext) -> int:
    """Run the largest micro-batch through two optimizer steps, as in training; return the peak memory."""
    trainer, device = context.trainer, context.trainer.accelerator.device
    batch = trainer.family.collate(context.memory.batch.sequences)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with _preserve_weights(trainer):
        try:
            run_two_steps(trainer, batch)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise out_of_memory_error(context.memory, trainer.family, context.recipe, device) from error
    return peak_memory(device)


def run_two_steps(trainer: Trainer, batch: Batch) -> None:
    """Run two steps of a separate optimizer on the unwrapped objective, so that a rank that fails fails alone."""
    settings, accelerator = trainer.recipe.train, trainer.accelerator
    objective = accelerator.unwrap_model(trainer.objective).train()
    parameters = list(trainer.trainable_parameters.values())
    optimizer = make_optimizer(parameters, settings, trainer.precision)
    weights = term_weights(trainer.family.loss_terms, trainer.recipe.loss)
    accumulates = settings.batch_size > settings.micro_batch_size * accelerator.num_processes
    scale = INITIAL_LOSS_SCALE if trainer.precision.may_overflow else 1.0

    def overflows() -> bool:
        return not all(is_finite(parameter.grad) for parameter in parameters if parameter.grad is not None)

    for _ in range(2):
        while True:
            with accelerator.autocast():
                sums = objective(batch.to(accelerator.device)).sums
                loss = weighted_loss(sums, batch.counts, weights)
            torch.autograd.backward(loss * scale)
            if scale == 1.0 or not any(_on_sharded_ranks(trainer, overflows)):
                break
            # Like the gradient scaler: a step that overflows is tried again at half the scale.
            scale /= 2
            optimizer.zero_grad(set_to_none=True)
        _on_sharded_ranks(trainer, partial(check_gradients, trainer))
        optimizer.step()
        if not accumulates:
            # With several micro-batches in a step, gradients stay allocated.
            optimizer.zero_grad(set_to_none=True)


def check_gradients(trainer: Trainer) -> None:
    """Check that every trainable parameter has a finite gradient, and that not all are zero, as those of a new A
    are."""
    gradients = {name: parameter.grad for name, parameter in trainer.trainable_parameters.items()}
    missing = [name for name, gradient in gradients.items() if gradient is None]
    if missing:
        raise TrainingError(
            f"{len(missing)} of {len(gradients)} trainable weights get no gradient: {format_names(missing)}",
            hint="the loss does not reach them: take them out of adapt.train_modules, or add them to adapt.freeze",
        )
    infinite = [name for name, gradient in gradients.items() if gradient is not None and not is_finite(gradient)]
    if infinite:
        raise TrainingError(
            f"{len(infinite)} of {len(gradients)} gradients are not finite: {format_names(infinite)}",
            hint="--set train.precision=bf16"
            if trainer.precision.may_overflow
            else "lower train.learning_rate, or find the cause with --set train.precision=fp32",
        )
    if not any(bool(local_shard(gradient).any()) for gradient in gradients.values() if gradient is not None):
        raise TrainingError(
            f"all {len(gradients)} gradients are zero: nothing would be learned",
            hint="look at the weights of the loss: loss.codebook_weights, loss.text_weight, loss.audio_weight",
        )


@contextmanager
def _preserve_training_state(trainer: Trainer) -> Iterator[None]:
    """Restore random states, module modes and gradients after the block."""
    device = trainer.accelerator.device
    modes = [(module, module.training) for module in trainer.objective.modules()]
    gradients = {name: parameter.grad for name, parameter in trainer.trainable_parameters.items()}
    with preserve_rng_state(device):
        trainer.optimizer.zero_grad(set_to_none=True)
        try:
            yield
        finally:
            for name, parameter in trainer.trainable_parameters.items():
                parameter.grad = gradients[name]
            for module, training in modes:
                module.training = training
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)


@contextmanager
def _preserve_weights(trainer: Trainer) -> Iterator[None]:
    """Restore the trained weights from host memory. The optimizer state of a resumed run waits there too, so that it
    never exists on the device together with the state of the steps inside."""
    weights = [local_shard(parameter.detach()) for parameter in trainer.trainable_parameters.values()]
    saved = [weight.to("cpu", copy=True) for weight in weights]
    offloaded = [
        (state, key, value.device)
        for state in trainer.optimizer.state.values()
        for key, value in state.items()
        if torch.is_tensor(value) and not isinstance(value, DTensor)
    ]
    for state, key, _ in offloaded:
        state[key] = state[key].cpu()
    try:
        yield
    finally:
        trainer.optimizer.zero_grad(set_to_none=True)
        for weight, before in zip(weights, saved, strict=True):
            weight.copy_(before)
        for state, key, device in offloaded:
            state[key] = state[key].to(device)


def _on_sharded_ranks(trainer: Trainer, check: Callable[[], T]) -> list[T]:
    """Run a part of a check: sharded ranks must stay together, others must not wait for one another."""
    return trainer.on_all_ranks(check) if trainer.sharded else [check()]
