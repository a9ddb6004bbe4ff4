"""Before the first step: is this what we mean to train?

Every check is a small function that either passes or raises an error with its cause and what to type. They run on every
rank, on its own share of the data, and leave nothing behind: a run with them is a run without them, bit for bit.
"""

from __future__ import annotations

import math
import time
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from accelerate.utils import gather_object
from torch.distributed.tensor import DTensor

from myna.config import Recipe
from myna.data.codec import Codes
from myna.data.dataset import Utterances
from myna.data.loader import Loader, Shard
from myna.data.utterance import normalise_text
from myna.errors import MynaError, TrainingError
from myna.models.base import IGNORED, Batch, RenderedSequence
from myna.models.token_view import token_view
from myna.train.loss import LossAccumulator, stream_means, stream_weights, weighted_loss
from myna.train.memory_plan import MemoryPlan, is_out_of_memory, out_of_memory, peak, size, spread
from myna.train.optimizer import make_optimizer
from myna.train.trainer import Trainer

SHOWN, MEASURED, COMPARED = 3, 32, 512
"""Samples of a rank that are drawn, whose loss is measured, and whose references are compared."""
OFFSETS = (-1, 0, 1, 2)
CHANCE = 0.97
"""A loss above this share of a uniform guess's is one of a model that knows nothing."""
TOO_GOOD = 0.98
"""Share of targets that no model gets right before it was trained on them."""
LEARNED = (0.01, 0.99)
"""Share of the positions that is learned: less or more means that the mask is wrong."""
SAME_SOUND = 0.9
"""Share of codes in common from which two clips are one recording."""
LOOSE = 1e-6
"""Relative change of a sum that is rounding. What must not change is as a rule the same to the bit."""
FIRST_SCALE = 2.0**16
"""Of the loss in fp16, as torch's scaler has it."""

T = TypeVar("T")


@dataclass
class Look:
    """What the checks look at."""

    student: Trainer
    loader: Loader[RenderedSequence, Batch]
    evaluation: Loader[RenderedSequence, Batch] | None
    recipe: Recipe
    memory: MemoryPlan
    folder: Path
    say: Callable[[str], None]
    share: Shard

    @property
    def targets(self) -> Utterances:
        """This rank's share, or everybody's where there are fewer targets than ranks."""
        every = self.loader.pairing.targets
        return every[self.share.rank :: self.share.world] or every

    @cached_property
    def samples(self) -> list[RenderedSequence]:
        return [self.loader.sequence(target, 0) for target in spread(self.targets, MEASURED)]


def preflight(
    student: Trainer,
    loader: Loader[RenderedSequence, Batch],
    evaluation: Loader[RenderedSequence, Batch] | None,
    recipe: Recipe,
    say: Callable[[str], None],
    *,
    memory: MemoryPlan,
    folder: Path,
    resumed: bool = False,
) -> None:
    """All checks, from the cheapest to the dearest. `memory` was planned for the longest pass of this rank."""
    began, accelerator = time.perf_counter(), student.accelerator
    # Ranks that hold parts of one model must go through it together: they all look at the same samples.
    share = Shard() if student.sharded else Shard(accelerator.process_index, accelerator.num_processes)
    look = Look(student, loader, evaluation, recipe, memory, folder, say, share)
    with _no_trace(student):
        for check in (
            samples_are_drawn,
            evaluation_is_unseen,
            references_are_others,
            something_learns,
            labels_are_there,
        ):
            _together(student, partial(check, look))
        losses = Losses.over(_together(student, partial(measure, look)))
        say(losses.told)
        judgements = [loss_is_finite, speech_can_end]
        judgements += [] if resumed else [task_is_not_solved]
        judgements += [base_knows_something, labels_align] if recipe.model.check_pretrained else []
        for judge in judgements:
            judge(losses, look)
        if not recipe.model.check_pretrained:
            say("model.check_pretrained is false: chance and the alignment of the labels are not checked")
        _together(student, partial(nothing_leaks, look))
        # Where ranks go through the model together, none can wait for another that has run out of memory.
        fits = partial(longest_pass_fits, look)
        measured = fits() if student.sharded else max(_together(student, fits))
    whole = "" if accelerator.device.type == "cuda" else ", by the whole process"
    say(f"memory: {size(memory.total)} planned, {size(measured)} measured in two steps of the longest pass{whole}")
    say(f"preflight passed in {time.perf_counter() - began:.1f} s")


# What is learned from


def samples_are_drawn(look: Look) -> None:
    """Token by token into the run folder, for whoever wants to see what is learned."""
    drawn = [token_view(look.loader.sequence(target, 0), look.student.family) for target in spread(look.targets, SHOWN)]
    for art in drawn:
        look.say(f"sample {art.plain.splitlines()[0]}")
    if look.student.accelerator.is_main_process:
        look.folder.mkdir(parents=True, exist_ok=True)
        (look.folder / "preflight.txt").write_text("\n".join(art.plain for art in drawn), encoding="utf-8")


def evaluation_is_unseen(look: Look) -> None:
    """No evaluation clip may be trained on, nor the same words of the same speaker."""
    if look.evaluation is None:
        return
    train, held_out = look.loader, look.evaluation
    learned = train.corpus.utterances if look.recipe.loss.supervise_references else train.pairing.targets
    targets = list(held_out.pairing.targets)
    sounds = learned.keys_among([held_out.corpus.key(target) for target in targets])
    # There may be a million of the learned ones, so that only those of the same speakers are looked at.
    known = learned.spoken_by({target.speaker for target in targets} - {""})
    words = {(utterance.speaker, _words(utterance.text)) for utterance in known}
    heard = [target.id for target in targets if held_out.corpus.key(target) in sounds]
    read = [target.id for target in targets if (target.speaker, _words(target.text)) in words]
    leaked = list(dict.fromkeys([*heard, *read]))
    if leaked:
        raise TrainingError(
            f"{len(leaked)} of {len(targets)} evaluation utterances are trained on too ({len(heard)} with the same "
            f"audio, {len(read)} with the same words of the same speaker): {_some(leaked)}",
            hint=f"take them out of one source and run `myna prepare` again for {held_out.corpus.folder} or "
            f"{train.corpus.folder}",
        )


def references_are_others(look: Look) -> None:
    """A reference that sounds like its target, whatever the files are called, teaches to copy."""
    corpus, pairing = look.loader.corpus, look.loader.pairing
    copies = [
        f"{target.id} and its reference {reference.id}"
        for target in spread(look.targets, COMPARED)
        for reference in pairing.references(target, 0)
        if _same_sound(corpus.codes(target), corpus.codes(reference))
    ]
    if copies:
        raise TrainingError(
            f"{len(copies)} targets have their own sound for a reference, and would learn to copy it: {_some(copies)}",
            hint=f"take one of each out of the source and run `myna prepare` again for {corpus.folder}",
        )


def labels_are_there(look: Look) -> None:
    """Every sample has something to learn, the collator keeps all of it, and it is neither nothing nor everything."""
    samples = look.samples
    empty = [sample.id for sample in samples if not _targets(sample)]
    if empty:
        raise TrainingError(
            f"{len(empty)} of {len(samples)} samples have no label: all is masked in {_some(empty)}",
            hint=_render(look, empty[0]),
        )
    learned = sum(len(_supervised(sample)) for sample in samples) / sum(map(len, samples))
    if not LEARNED[0] <= learned <= LEARNED[1]:
        what = "hardly anything" if learned < LEARNED[0] else "the prompt too"
        raise TrainingError(
            f"{learned:.1%} of all positions are learned: {what}. The mask of the labels is wrong",
            hint=_render(look, samples[0].id),
        )
    lost = [sample for sample in samples if int(look.student.family.collate([sample]).counts.sum()) != _targets(sample)]
    if lost:
        kept = int(look.student.family.collate([lost[0]]).counts.sum())
        raise TrainingError(
            f"{lost[0].id} has {_targets(lost[0])} labels, of which {kept} reach the batch",
            hint="the family's `collate` loses them: python -m pytest tests/models",
        )


# Who learns


def something_learns(look: Look) -> None:
    """There are trainable weights, a LoRA among them if one was asked for, and the optimizer has every one."""
    student, mode = look.student, look.recipe.adapt.mode
    learning = [name for name, parameter in student.trainables.items() if parameter.requires_grad]
    if not learning:
        raise TrainingError("no weight would learn: everything is frozen", hint="--set adapt.mode=comprehensive")
    if mode != "full" and not any("lora_" in name for name in learning):
        raise TrainingError(
            f"adapt.mode {mode} has put a LoRA on nothing; what would learn: {_some(learning)}",
            hint=f"myna model stats {look.recipe.model.source} --lora {mode} lists what a mode meets",
        )
    held = {id(parameter) for group in student.optimizer.param_groups for parameter in group["params"]}
    forgotten = [name for name in learning if id(student.trainables[name]) not in held]
    if forgotten:
        raise TrainingError(
            f"the optimizer does not hold {len(forgotten)} of {len(learning)} trainable weights: {_some(forgotten)}",
            hint="it was made before the model was adapted: make the student anew",
        )


# What the model knows before the first step


@dataclass(frozen=True, slots=True)
class Losses:
    """Of the untrained model, per offset of the labels; the same on every rank."""

    streams: tuple[str, ...]
    chance: tuple[float, ...]
    tallies: dict[int, LossAccumulator]
    sequences: int

    @classmethod
    def over(cls, ranks: list[Losses]) -> Losses:
        def summed(offset: int, part: str) -> torch.Tensor:
            return torch.stack([getattr(losses.tallies[offset], part) for losses in ranks]).sum(0)

        parts = ("sums", "correct", "stops", "counts")
        tallies = {offset: LossAccumulator(*(summed(offset, part) for part in parts)) for offset in ranks[0].tallies}
        return replace(ranks[0], tallies=tallies, sequences=sum(losses.sequences for losses in ranks))

    @property
    def decisive(self) -> list[int]:
        """The streams to judge by: the codebooks, or the text where there is no audio, which has few targets else."""
        there = [k for k, count in enumerate(self.tallies[1].counts.tolist()) if count]
        return [k for k in there if self.streams[k].startswith("code")] or there

    def per_stream(self, offset: int) -> dict[str, float]:
        means = stream_means(self.tallies[offset].sums, self.tallies[offset].counts)
        return {name: mean for name, mean in zip(self.streams, means, strict=True) if mean is not None}

    def mean(self, offset: int) -> float:
        """Over the decisive streams, each as heavy as the next."""
        per_stream = self.per_stream(offset)
        found = [per_stream[self.streams[k]] for k in self.decisive if self.streams[k] in per_stream]
        return sum(found) / len(found) if found else math.inf

    @property
    def guess(self) -> float:
        return sum(self.chance[k] for k in self.decisive) / len(self.decisive)

    @property
    def accuracy(self) -> float:
        tally = self.tallies[1]
        return float(tally.correct[self.decisive].sum() / tally.counts[self.decisive].sum())

    @property
    def told(self) -> str:
        each = ", ".join(f"{name} {loss:.2f}" for name, loss in self.per_stream(1).items())
        return f"before training: loss {self.mean(1):.2f}, where chance is {self.guess:.2f} ({each})"

    @property
    def table(self) -> str:
        names = (*(self.streams[k] for k in self.decisive), "mean")
        rows = [self.per_stream(offset) | {"mean": self.mean(offset)} for offset in self.tallies]
        lines = [f"{name:>10}" + "".join(f"{row.get(name, math.nan):9.3f}" for row in rows) for name in names]
        return "\n".join([f"{'offset':>10}" + "".join(f"{offset:+9d}" for offset in self.tallies), *lines])


def measure(look: Look) -> Losses:
    """The loss with the labels where they belong, and for a pretrained model also where they do not."""
    family = look.student.family
    samples = look.samples
    tallies = {}
    for offset in OFFSETS if look.recipe.model.check_pretrained else (1,):
        tally = tallies[offset] = LossAccumulator.of(len(family.streams))
        for sequences in _passes(samples, look.recipe):
            batch = family.collate(sequences, offset=offset)
            tally.counts += batch.counts
            _forward(look.student, batch, tally)
    return Losses(family.streams, family.chance, tallies, len(samples))


def loss_is_finite(losses: Losses, look: Look) -> None:
    if not torch.isfinite(losses.tallies[1].sums).all():
        broken = [name for name, loss in losses.per_stream(1).items() if not math.isfinite(loss)]
        half = look.student.precision.frozen == torch.float16
        raise TrainingError(
            f"before training the loss of {_some(broken)} is not finite, in {look.student.precision.name}",
            hint="--set train.precision="
            + ("bf16, or fp32 where there is none" if half else "fp32, to find the cause"),
        )


def speech_can_end(losses: Losses, look: Look) -> None:
    """Speech learns to stop from its ends of stream alone."""
    ends = int(losses.tallies[1].stops[1])
    if ends < losses.sequences and any(losses.streams[k].startswith("code") for k in losses.decisive):
        raise TrainingError(
            f"{losses.sequences} samples have {ends} ends of stream among their labels: speech would not learn to stop",
            hint=_render(look, look.targets[0].id) + " --frames",
        )


def task_is_not_solved(losses: Losses, look: Look) -> None:
    if losses.accuracy > TOO_GOOD:
        raise TrainingError(
            f"before the first step {losses.accuracy:.1%} of the targets are right, at a loss of {losses.mean(1):.4f} "
            f"where chance is {losses.guess:.2f}: the labels are what the model is given to read, a copy task, or it "
            "has learned these very clips before",
            hint=_render(look, look.targets[0].id) + " --frames",
        )


def base_knows_something(losses: Losses, look: Look) -> None:
    """One codebook is enough. A small model that meets a voice unlike all it knows may be wrong about the last ones
    with confidence, which weighs more in a mean than what it knows of the first."""
    found = losses.per_stream(1)
    if all(found.get(losses.streams[k], math.inf) >= CHANCE * losses.chance[k] for k in losses.decisive):
        raise TrainingError(
            f"{look.recipe.model.source} is no better than chance on this data: {losses.mean(1):.2f}, where a uniform "
            f"guess has {losses.guess:.2f}. Its weights are random, or the codes are another codec's",
            hint=f"myna prepare SOURCE --out {look.recipe.data.train} --model {look.recipe.model.source} makes the "
            "codes anew; to train from random weights, --set model.check_pretrained=false",
        )


def labels_align(losses: Losses, look: Look) -> None:
    """A pretrained model is best at what it was trained for: with the labels at offset +1.

    The mean must be lowest there, and most codebooks must agree: one alone may waver, and one confident error weighs
    much in a mean.
    """
    means = {offset: losses.mean(offset) for offset in losses.tallies}
    rows = {offset: losses.per_stream(offset) for offset in losses.tallies}
    names = [losses.streams[k] for k in losses.decisive]
    best = [min(losses.tallies, key=lambda offset: rows[offset].get(name, math.inf)) for name in names]
    others = [offset for offset in means if offset != 1]
    if all(means[1] < means[other] and best.count(1) > best.count(other) for other in others):
        return
    lowest = min(others, key=lambda offset: means[offset])
    raise TrainingError(
        f"the labels are misplaced: {look.recipe.model.source} predicts them best at offset {lowest:+d} instead of +1\n"
        f"{losses.table}",
        hint="the family's `collate` or `render` is wrong: python -m pytest tests/models; if the model was never "
        "trained to speak, --set model.check_pretrained=false",
    )


# What it must not see


def nothing_leaks(look: Look) -> None:
    """Spoil the second half of what one sequence is to say: only what comes after may notice."""
    sequences = sorted(look.samples, key=len)[:3]
    one = (len(sequences) - 1) // 2
    positions = _supervised(sequences[one])
    cut = int(positions[len(positions) // 2])
    spoiled = [*sequences]
    spoiled[one] = _spoil(sequences[one], cut)

    def changed(keep: Callable[[int, npt.NDArray[np.int64]], npt.NDArray[np.bool_]]) -> bool:
        """Whether the loss of the labels that are kept, by sequence and positions, is another with the spoiled one."""
        tallies = []
        for version in (sequences, spoiled):
            masked = [_mask(sequence, partial(keep, number)) for number, sequence in enumerate(version)]
            tallies.append(LossAccumulator.of(len(look.student.family.streams)))
            _forward(look.student, look.student.family.collate(masked), tallies[-1])
        before, after = (tally.sums for tally in tallies)
        return not torch.allclose(before, after, rtol=LOOSE, atol=0.0)

    id = sequences[one].id
    if changed(lambda number, at: (at < cut) & (number == one)):
        raise TrainingError(
            f"what {id} says from position {cut} on changes the loss before it: the model sees its own future",
            hint="attention is not causal: python -m pytest tests/models",
        )
    if changed(lambda number, at: (at == cut) & (number == one)):
        raise TrainingError(
            f"the frame at position {cut} of {id} changes its own loss: it is given to read what it is to predict, and "
            "would learn to copy",
            hint="the labels are not shifted by one: python -m pytest tests/models",
        )
    if changed(lambda number, at: np.full(at.shape, number != one)):
        others = [sequence.id for number, sequence in enumerate(sequences) if number != one]
        raise TrainingError(
            f"what {id} says changes the loss of {_some(others)} in the same row: packed sequences see one another",
            hint="--set data.pack=false until the family's attention is mended",
        )
    if not changed(lambda number, at: (at > cut) & (number == one)) and cut < positions[-1]:
        raise TrainingError(
            f"what {id} says up to position {cut} makes no difference to what follows: codes do not reach the model",
            hint="the family's `collate` loses them: python -m pytest tests/models",
        )


# What it takes


def longest_pass_fits(look: Look) -> int:
    """The longest pass through two optimizer steps, as a training would take them; the most memory there was."""
    student = look.student
    device = student.accelerator.device
    batch = student.family.collate(look.memory.sequences)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with _restored(student):
        try:
            two_steps(student, batch)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise out_of_memory(look.memory, student.family, look.recipe, device) from error
    return peak(device)


def two_steps(student: Trainer, batch: Batch) -> None:
    """On the bare objective, so that a rank that fails fails alone, and with an optimizer of its own."""
    settings, accelerator = student.recipe.train, student.accelerator
    objective = accelerator.unwrap_model(student.objective).train()
    parameters = list(student.trainables.values())
    optimizer = make_optimizer(parameters, settings, student.precision)
    weights = stream_weights(student.family.streams, student.recipe.loss)
    accumulates = settings.batch_size > settings.micro_batch_size * accelerator.num_processes
    scale = FIRST_SCALE if student.precision.may_overflow else 1.0

    def overflows() -> bool:
        return not all(parameter.grad is None or _finite(parameter.grad) for parameter in parameters)

    for _ in range(2):
        while True:
            with accelerator.autocast():
                sums = objective(batch.to(accelerator.device)).sums
                loss = weighted_loss(sums, batch.counts, weights)
            torch.autograd.backward(loss * scale)
            if scale == 1.0 or not any(_in_step(student, overflows)):
                break
            # As the scaler would: what overflows is tried again at half the scale.
            scale /= 2
            optimizer.zero_grad(set_to_none=True)
        _in_step(student, partial(gradients_are_sound, student))
        optimizer.step()
        if not accumulates:
            # Else gradients stay, as they do when a step has several passes.
            optimizer.zero_grad(set_to_none=True)


def gradients_are_sound(student: Trainer) -> None:
    """Every trainable weight has a finite gradient, and not all are zero. Those of a new LoRA's A are."""
    gradients = {name: parameter.grad for name, parameter in student.trainables.items()}
    missing = [name for name, gradient in gradients.items() if gradient is None]
    if missing:
        raise TrainingError(
            f"{len(missing)} of {len(gradients)} trainable weights get no gradient: {_some(missing)}",
            hint="the loss does not reach them: take them out of adapt.train_modules, or add them to adapt.freeze",
        )
    broken = [name for name, gradient in gradients.items() if gradient is not None and not _finite(gradient)]
    if broken:
        raise TrainingError(
            f"{len(broken)} of {len(gradients)} gradients are not finite: {_some(broken)}",
            hint="--set train.precision=" + ("bf16" if student.precision.may_overflow else "fp32, to find the cause"),
        )
    if not any(bool(_own(gradient).any()) for gradient in gradients.values() if gradient is not None):
        raise TrainingError(
            f"all {len(gradients)} gradients are zero: nothing would be learned",
            hint="look at the weights of the loss: loss.codebook_weights, loss.text_weight, loss.audio_weight",
        )


# Leaving no trace, and ranks that act as one


@contextmanager
def _no_trace(student: Trainer) -> Iterator[None]:
    """Random states, modes and gradients are afterwards what they were."""
    device = student.accelerator.device
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    mps = torch.mps.get_rng_state() if device.type == "mps" else None
    cpu = torch.get_rng_state()
    modes = [(module, module.training) for module in student.objective.modules()]
    gradients = {name: parameter.grad for name, parameter in student.trainables.items()}
    try:
        for parameter in student.trainables.values():
            parameter.grad = None
        yield
    finally:
        for name, parameter in student.trainables.items():
            parameter.grad = gradients[name]
        for module, training in modes:
            module.training = training
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
            torch.cuda.reset_peak_memory_stats(device)
        if mps is not None:
            torch.mps.set_rng_state(mps)


@contextmanager
def _restored(student: Trainer) -> Iterator[None]:
    """Trained weights are put back from host memory, where the moments of a resumed run wait too: the steps inside
    have moments of their own, and a training never has both."""
    own = [_own(parameter.detach()) for parameter in student.trainables.values()]
    saved = [weight.to("cpu", copy=True) for weight in own]
    away = [
        (kept, name, moment.device)
        for kept in student.optimizer.state.values()
        for name, moment in kept.items()
        if torch.is_tensor(moment) and not isinstance(moment, DTensor)
    ]
    for kept, name, _ in away:
        kept[name] = kept[name].cpu()
    try:
        yield
    finally:
        for parameter in student.trainables.values():
            parameter.grad = None
        for weight, before in zip(own, saved, strict=True):
            weight.copy_(before)
        for kept, name, device in away:
            kept[name] = kept[name].to(device)


def _together(student: Trainer, check: Callable[[], T]) -> list[T]:
    """Run a check on every rank and hear of all: what one finds stops every one of them with the same words.

    This is the only place where ranks wait for one another, apart from the layers of a model that is shared out.
    """
    found: T | None = None
    failed: MynaError | None = None
    try:
        found = check()
    except MynaError as error:
        failed = error
    if student.accelerator.num_processes == 1:
        if failed is not None:
            raise failed
        return [found]  # type: ignore[list-item]
    everybody = gather_object([(found, failed and (failed.what, failed.hint))])
    for rank, (_, failure) in enumerate(everybody):
        if failure:
            raise TrainingError(f"rank {rank}: {failure[0]}", hint=failure[1]) from failed
    return [result for result, _ in everybody]


def _in_step(student: Trainer, check: Callable[[], T]) -> list[T]:
    """Inside a check, where ranks that hold parts of one model must not part ways, and others must not wait."""
    return _together(student, check) if student.sharded else [check()]


@torch.no_grad()
def _forward(student: Trainer, batch: Batch, tally: LossAccumulator) -> None:
    """Loss sums as a training would get them, without dropout."""
    objective = student.accelerator.unwrap_model(student.objective).eval()
    with student.accelerator.autocast():
        tally.add(objective(batch.to(student.accelerator.device)))
    if student.sharded:
        objective.reshard()


def _passes(samples: list[RenderedSequence], recipe: Recipe) -> Iterator[list[RenderedSequence]]:
    """Samples that fit into one pass together."""
    budget = recipe.data.row_tokens * recipe.train.micro_batch_size
    waiting: list[RenderedSequence] = []
    for sample in samples:
        if waiting and sum(map(len, waiting)) + len(sample) > budget:
            yield waiting
            waiting = []
        waiting.append(sample)
    yield waiting


# Rendered sequences, taken apart


def _audio_positions(rendered: RenderedSequence) -> npt.NDArray[np.int64]:
    """Where the rows of `codes` stand."""
    audio = [np.arange(piece.start, piece.stop) for piece in rendered.pieces if piece.kind == "audio"]
    return np.concatenate(audio) if audio else np.empty(0, np.int64)


def _targets(rendered: RenderedSequence) -> int:
    return int((rendered.labels != IGNORED).sum() + (rendered.code_labels != IGNORED).sum())


def _supervised(rendered: RenderedSequence) -> npt.NDArray[np.int64]:
    """Positions with something to learn, in order."""
    text = np.flatnonzero(rendered.labels != IGNORED)
    audio = _audio_positions(rendered)[(rendered.code_labels != IGNORED).any(axis=1)]
    return np.union1d(text, audio)


def _mask(
    rendered: RenderedSequence, keep: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.bool_]]
) -> RenderedSequence:
    """Labels only at the positions to keep."""
    text, audio = keep(np.arange(len(rendered))), keep(_audio_positions(rendered))
    return replace(
        rendered,
        labels=np.where(text, rendered.labels, IGNORED),
        code_labels=np.where(audio[:, None], rendered.code_labels, IGNORED),
    )


def _spoil(rendered: RenderedSequence, cut: int) -> RenderedSequence:
    """Other codes and other text from a position on, of the same kinds; the labels stay."""
    audio = _audio_positions(rendered)
    codes = np.where(
        (audio >= cut)[:, None], (rendered.codes + 1) % (rendered.codes.max(initial=0) + 1), rendered.codes
    )
    is_text = np.ones(len(rendered), bool)
    is_text[audio] = False
    words = np.unique(rendered.ids[is_text])
    other = words[(np.searchsorted(words, rendered.ids) + 1) % len(words)]
    ids = np.where(is_text & (np.arange(len(rendered)) >= cut), other, rendered.ids)
    return replace(rendered, ids=ids, codes=codes)


def _same_sound(one: Codes, other: Codes) -> bool:
    shared = min(len(one), len(other))
    return abs(len(one) - len(other)) <= 2 and float((one[:shared] == other[:shared]).mean()) >= SAME_SOUND


def _words(text: str) -> str:
    """A text without its case and punctuation."""
    letters = (c for c in normalise_text(text).casefold() if not unicodedata.category(c).startswith("P"))
    return " ".join("".join(letters).split())


# Small things


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(_own(tensor)).all())


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _render(look: Look, id: str) -> str:
    return f"look at what is learned: myna render {look.recipe.data.train} --model {look.recipe.model.source} --id {id}"
