"""Preflight checks of the data: overlap with the evaluation set, references, labels, causality and packing."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from accelerate.utils import gather_object

from myna.core.config import Recipe
from myna.core.errors import MynaError, TrainingError
from myna.data.codec import Codes
from myna.data.dataset import Utterances
from myna.data.loader import Loader, Shard
from myna.data.split import ComparedClip, find_overlap
from myna.models.base import IGNORE_INDEX, Batch, RenderedSequence
from myna.models.files import format_names
from myna.models.token_view import token_view
from myna.train.loss import LossAccumulator
from myna.train.memory_plan import MemoryPlan, evenly_spaced
from myna.train.trainer import Trainer

MEASURED_SAMPLES = 32
"""Samples per rank whose labels and loss are checked."""

T = TypeVar("T")


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


def on_all_ranks(trainer: Trainer, check: Callable[[], T]) -> list[T]:
    """Run a check on every rank and return all results. An error of one rank stops all of them with the same message.

    Ranks wait for one another only here, apart from the layers of a sharded model.
    """
    outcome: tuple[T | None, MynaError | None]
    try:
        outcome = check(), None
    except MynaError as error:
        if trainer.accelerator.num_processes == 1:
            raise
        outcome = None, error
    outcomes = gather_object([outcome])
    for rank, (_, failure) in enumerate(outcomes):
        if failure is not None:
            raise TrainingError(f"rank {rank}: {failure.what}", hint=failure.hint) from outcome[1]
    return [result for result, _ in outcomes]


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
    leaked = find_overlap(trained, [ComparedClip(clip.id, clip.speaker, clip.text, key(clip)) for clip in targets])
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
                hint="the family's `collate` loses them: python -m pytest tests/models",
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
            sums.append(losses.sums)
        return not torch.allclose(sums[0], sums[1], rtol=ROUNDING_TOLERANCE, atol=0.0)

    if changes(lambda number, at: (at < cut) & (number == index)):
        raise TrainingError(
            f"what {id} says from position {cut} on changes the loss before it: the model sees its own future",
            hint="attention is not causal: python -m pytest tests/models",
        )
    if changes(lambda number, at: (at == cut) & (number == index)):
        raise TrainingError(
            f"the frame at position {cut} of {id} changes its own loss: it is given to read what it is to predict, and "
            "would learn to copy",
            hint="the labels are not shifted by one: python -m pytest tests/models",
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
            hint="the family's `collate` loses them: python -m pytest tests/models",
        )


DATA_CHECKS = (write_samples, check_evaluation_unseen, check_references_differ, check_labels_present)
"""Checks of the data that come before the first pass of the model."""


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
