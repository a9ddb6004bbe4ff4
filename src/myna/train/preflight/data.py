"""Preflight checks of the data: samples, overlap with the evaluation set, references."""

from __future__ import annotations

import unicodedata

from myna.data.codec import Codes
from myna.data.utterance import normalise_text
from myna.errors import TrainingError
from myna.models.files import format_names
from myna.models.token_view import token_view
from myna.train.memory_plan import evenly_spaced
from myna.train.preflight.context import CheckContext

SHOWN_SAMPLES = 3
"""Samples per rank that are shown token by token."""
COMPARED_TARGETS = 512
"""Targets per rank that are compared with their references."""
SAME_AUDIO_SHARE = 0.9
"""Share of codes in common from which two clips are one recording."""


def write_samples(context: CheckContext) -> None:
    """Write samples token by token to preflight.txt in the run folder."""
    family = context.trainer.family
    views = [
        token_view(context.loader.sequence(target, 0), family).plain
        for target in evenly_spaced(context.targets, SHOWN_SAMPLES)
    ]
    for view in views:
        context.log(f"sample {view.splitlines()[0]}")
    if context.trainer.accelerator.is_main_process:
        context.folder.mkdir(parents=True, exist_ok=True)
        (context.folder / "preflight.txt").write_text("\n".join(views), encoding="utf-8")


def check_evaluation_unseen(context: CheckContext) -> None:
    """No evaluation clip may be trained on, nor the same words of the same speaker."""
    if context.evaluation is None:
        return
    train, held_out = context.loader, context.evaluation
    trained = train.dataset.utterances if context.recipe.loss.supervise_references else train.reference_sampler.targets
    targets = list(held_out.reference_sampler.targets)
    keys = trained.keys_among([held_out.dataset.key(target) for target in targets])
    # There may be a million trained ones, so that only those of the same speakers are compared.
    same_speakers = trained.by_speakers({target.speaker for target in targets} - {""})
    words = {(utterance.speaker, _words(utterance.text)) for utterance in same_speakers}
    same_audio = [target.id for target in targets if held_out.dataset.key(target) in keys]
    same_words = [target.id for target in targets if (target.speaker, _words(target.text)) in words]
    leaked = list(dict.fromkeys([*same_audio, *same_words]))
    if leaked:
        raise TrainingError(
            f"{len(leaked)} of {len(targets)} evaluation utterances are trained on too ({len(same_audio)} with the "
            f"same audio, {len(same_words)} with the same words of the same speaker): {format_names(leaked)}",
            hint=f"take them out of one source and run `myna prepare` again for {held_out.dataset.folder} or "
            f"{train.dataset.folder}",
        )


def check_references_differ(context: CheckContext) -> None:
    """A reference with the audio of its target, whatever the files are called, would teach to copy."""
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


def _same_audio(first: Codes, second: Codes) -> bool:
    shared = min(len(first), len(second))
    return abs(len(first) - len(second)) <= 2 and float((first[:shared] == second[:shared]).mean()) >= SAME_AUDIO_SHARE


def _words(text: str) -> str:
    """A text without its case and punctuation."""
    letters = (c for c in normalise_text(text).casefold() if not unicodedata.category(c).startswith("P"))
    return " ".join("".join(letters).split())
