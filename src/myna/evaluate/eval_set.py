"""Which lines are judged, in whose voices. It follows from the seed and from names, so that every model is asked the
same."""

from __future__ import annotations

import gzip
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from myna.config import DataSettings
from myna.data.dataset import PreparedDataset
from myna.data.hash_rng import hash_of
from myna.data.pairing import Pairing
from myna.data.utterance import Utterance, normalise_text
from myna.errors import DataError
from myna.evaluate.items import EvalItem, EvalSet, seconds_of
from myna.io import is_file

CLIPS, CLIPS_IN_ALL, FEWEST_CLIPS = 10, 400, 3
"""Recordings of each speaker that voices are compared with, in all about so many: each has to be listened to."""
OTHERS = 20
"""Speakers to choose from, at least, where the data has so many."""
LIST_HINT = "each line is ID|WORDS OF THE REFERENCE|REFERENCE.wav|TEXT, and |RECORDING.wav where there is one"
T = TypeVar("T")


def eval_set_from_data(
    folder: Path, settings: DataSettings, seed: int, limit: int | None = None, language: str = ""
) -> EvalSet:
    """Every target of a prepared folder as a line, with the reference that training would give it.

    `settings` say what may be a reference. With a `limit`, speakers take turns.
    """
    corpus = PreparedDataset.open(folder)
    pairing = Pairing(corpus, settings.model_copy(update={"train": folder, "require_reference": False}), seed)
    tasks, alone, unnamed = [], 0, 0
    for target in _in_turns(list(pairing.targets), seed, limit):
        references = pairing.references(target, epoch=0)
        alone += not references
        unnamed += not (target.language or language)
        tasks.append(
            EvalItem(
                target.id,
                target.text,
                target.speaker,
                target.language or language,
                references,
                real=target,
                scene=str(target.extras.get("scene") or settings.scene),
            )
        )
    return EvalSet(tuple(tasks), _clips(corpus, tasks, seed), _notes(alone, unnamed))


def eval_set_from_file(
    file: Path,
    data: Path | None,
    settings: DataSettings | None,
    seed: int,
    limit: int | None = None,
    language: str = "",
) -> EvalSet:
    """Lines of a text file, dealt to the speakers of `data` in turn, or without a reference where there is none.

    A list as of seed-tts-eval names a reference for each line.
    """
    texts = _read(file)
    if not texts:
        raise DataError(f"{file} has no lines", hint="write one sentence a line")
    if file.suffix == ".lst" or all(text.count("|") >= 3 for text in texts):
        tasks = list(_listed(file, texts, language))[:limit]
        return EvalSet(tuple(tasks), {}, _notes(0, 0 if language else len(tasks)))
    chosen = [normalise_text(text) for text in texts[:limit]]
    unnamed = 0 if language else len(chosen)
    if data is None or settings is None:
        tasks = [EvalItem(f"line-{number:04d}", text, language=language) for number, text in enumerate(chosen, start=1)]
        return EvalSet(tuple(tasks), {}, _notes(len(tasks), unnamed))
    corpus = PreparedDataset.open(data)
    voices = _references(corpus, settings, seed)
    tasks = []
    for number, text in enumerate(chosen, start=1):
        speaker = sorted(voices)[(number - 1) % len(voices)]
        clip = voices[speaker][(number - 1) // len(voices) % len(voices[speaker])]
        known = clip.language or language
        tasks.append(EvalItem(f"line-{number:04d}", text, speaker, known, (clip,)))
    return EvalSet(tuple(tasks), _clips(corpus, tasks, seed), _notes(0, sum(not task.language for task in tasks)))


def _notes(alone: int, unnamed: int) -> tuple[str, ...]:
    found = []
    if alone:
        found.append(f"{alone} lines are spoken without a reference, since there is no other clip of their speaker")
    if unnamed:
        found.append(
            f"{unnamed} lines name no language, so that only case and punctuation are forgiven: --language en, or "
            "speech_eval.language in a recipe"
        )
    return tuple(found)


def _listed(file: Path, texts: Sequence[str], language: str) -> Iterator[EvalItem]:
    for number, text in enumerate(texts, start=1):
        parts = [part.strip() for part in text.split("|")]
        if len(parts) not in (4, 5) or not parts[0] or not parts[3]:
            raise DataError(f"{file}:{number} is no line of a list", hint=LIST_HINT)
        id, said, sound, due = parts[:4]
        prompt = Utterance(f"{id}-reference", _found(file, number, sound), normalise_text(said), "", language)
        real = Utterance(id, _found(file, number, parts[4]), due, "", language) if len(parts) == 5 else None
        yield EvalItem(id, normalise_text(due), "", language, (prompt,), real)


def _found(file: Path, number: int, sound: str) -> Path:
    path = file.parent / sound
    if not is_file(path):
        raise DataError(f"{file}:{number} names {path}, which is not there", hint=LIST_HINT)
    return path


def _read(file: Path) -> list[str]:
    try:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        return [line.strip() for line in content.decode("utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read: {error}", hint="give a text file in UTF-8, one line each") from None


def _clips(corpus: PreparedDataset, tasks: Sequence[EvalItem], seed: int) -> dict[str, tuple[Utterance, ...]]:
    """Some recordings of every named speaker of the lines, and of others to tell them from."""
    of: defaultdict[str, list[Utterance]] = defaultdict(list)
    for utterance in corpus.utterances:
        if utterance.speaker:
            of[utterance.speaker].append(utterance)
    own = {task.speaker for task in tasks}
    chosen = sorted(of, key=lambda speaker: (speaker not in own, hash_of(f"{seed}/others/{speaker}")))
    chosen = chosen[: max(OTHERS, len(own))]
    each = min(CLIPS, max(FEWEST_CLIPS, CLIPS_IN_ALL // max(1, len(chosen))))
    return {speaker: tuple(_shuffled(of[speaker], f"{seed}/clips")[:each]) for speaker in sorted(chosen)}


def _references(corpus: PreparedDataset, settings: DataSettings, seed: int) -> dict[str, list[Utterance]]:
    shortest, longest = settings.reference_seconds
    found: defaultdict[str, list[Utterance]] = defaultdict(list)
    for utterance in corpus.utterances:
        if shortest <= seconds_of(utterance) <= longest:
            found[utterance.speaker].append(utterance)
    if not found:
        raise DataError(
            f"{corpus.folder} has no clip of {shortest:g} to {longest:g} s to set a voice",
            hint="give other --data, or leave it out to speak without a reference",
        )
    return {speaker: _shuffled(clips, f"{seed}/references") for speaker, clips in found.items()}


def _in_turns(targets: list[Utterance], seed: int, limit: int | None) -> list[Utterance]:
    """All of them as they come, or some of each speaker in turn."""
    if limit is None or limit >= len(targets):
        return targets
    of: defaultdict[str, list[Utterance]] = defaultdict(list)
    for target in _shuffled(targets, f"{seed}/lines"):
        of[target.speaker].append(target)
    ranked = sorted((place, speaker, target.id) for speaker, some in of.items() for place, target in enumerate(some))
    kept = {id for _, _, id in ranked[:limit]}
    return [target for target in targets if target.id in kept]


def _shuffled(utterances: Sequence[Utterance], occasion: str) -> list[Utterance]:
    return sorted(utterances, key=lambda utterance: hash_of(f"{occasion}/{utterance.id}"))
