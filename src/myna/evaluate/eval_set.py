"""Evaluation sets from prepared data or text files. The choice follows from the seed and from names alone, so that
every model gets the same items."""

from __future__ import annotations

import gzip
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from myna.core.config import DataSettings
from myna.core.errors import DataError
from myna.core.io import is_file
from myna.data.dataset import PreparedDataset
from myna.data.hash_rng import string_hash
from myna.data.manifest import Utterance
from myna.data.references import ReferenceSampler
from myna.evaluate.items import EvalItem, EvalSet, clip_seconds
from myna.evaluate.scoring import ItemScores
from myna.text.normalization import normalise_text

MAX_CLIPS_PER_SPEAKER, MIN_CLIPS_PER_SPEAKER, MAX_CLIPS = 10, 3, 400
"""Recordings that voices are compared with, for each speaker and about so many in all: each has to be embedded."""
MIN_SPEAKERS = 20
"""Speakers to compare voices with, at least, where the data has so many."""
AnyItem = TypeVar("AnyItem", EvalItem, ItemScores)
LIST_HINT = "each line is ID|WORDS OF THE REFERENCE|REFERENCE.wav|TEXT, and |RECORDING.wav where there is one"


def load_eval_set(
    data: Path | None,
    sentences: Path | None,
    settings: DataSettings | None,
    seed: int,
    limit: int | None = None,
    language: str = "",
    scene: str = "",
) -> EvalSet:
    """Sentences of a text file, given to the speakers of `data` in turn, or without a reference where there is none. A
    list as of seed-tts-eval names a reference for each sentence. Without a file, the targets of `data`.

    `settings` say what may be a reference, and `scene` is that of sentences whose reference names none. With a `limit`,
    speakers of targets take turns.
    """
    clips: dict[str, tuple[Utterance, ...]] = {}
    lines = _read_lines(sentences) if sentences is not None else []
    texts = {f"line-{number:04d}": normalise_text(line) for number, line in enumerate(lines[:limit], start=1)}
    if sentences is not None and (sentences.suffix == ".lst" or all(line.count("|") >= 3 for line in lines)):
        items = list(_parse_list(sentences, lines, language, scene))[:limit]
    elif data is None or settings is None:
        assert sentences is not None, "there is nothing to say"
        items = [EvalItem(id, text, language=language, scene=scene) for id, text in texts.items()]
    else:
        dataset = PreparedDataset.open(data)
        if sentences is not None:
            items = _sentence_items(texts, _references(dataset, settings, seed), language, scene or settings.scene)
        else:
            items = _target_items(dataset, settings, seed, limit, language)
        clips = _speaker_clips(dataset, items, seed)
    return EvalSet(tuple(items), clips, _notes(items))


def split_items(items: Sequence[AnyItem], seed: int) -> tuple[list[AnyItem], list[AnyItem]]:
    """Two halves in the order of the items, one to choose checkpoints by and one to confirm a gain with. Each speaker
    has as many in both, and the first is larger by at most one."""
    order = sorted(items, key=lambda item: (item.speaker, string_hash(f"{seed}/confirmation/{item.id}")))
    confirming = {item.id for item in order[1::2]}
    return [item for item in items if item.id not in confirming], [item for item in items if item.id in confirming]


def _target_items(
    dataset: PreparedDataset, settings: DataSettings, seed: int, limit: int | None, language: str
) -> list[EvalItem]:
    """Every target of a prepared folder as an item, with the reference that training would give it."""
    update = {"train": dataset.folder, "require_reference": False}
    sampler = ReferenceSampler(dataset, settings.model_copy(update=update), seed)
    return [
        EvalItem(
            target.id,
            target.text,
            target.speaker,
            target.language or language,
            sampler.references(target, epoch=0),
            recording=target,
            scene=str(target.extras.get("scene") or settings.scene),
        )
        for target in _select(list(sampler.targets), seed, limit)
    ]


def _sentence_items(
    texts: Mapping[str, str], references: Mapping[str, Sequence[Utterance]], language: str, scene: str
) -> list[EvalItem]:
    """Sentences by id; every speaker speaks in turn, and with each of its references in turn."""
    items, speakers = [], sorted(references)
    for index, (id, text) in enumerate(texts.items()):
        speaker = speakers[index % len(speakers)]
        clip = references[speaker][index // len(speakers) % len(references[speaker])]
        described = str(clip.extras.get("scene") or scene)
        items.append(EvalItem(id, text, speaker, clip.language or language, (clip,), scene=described))
    return items


def _notes(items: Sequence[EvalItem]) -> tuple[str, ...]:
    alone, unnamed = sum(not item.references for item in items), sum(not item.language for item in items)
    notes = []
    if alone:
        notes.append(f"{alone} items are spoken without a reference, since there is no other clip of their speaker")
    if unnamed:
        notes.append(
            f"{unnamed} items name no language, so that only case and punctuation are normalized: --language en, or "
            "speech_eval.language in a recipe"
        )
    return tuple(notes)


def _parse_list(file: Path, lines: Sequence[str], language: str, scene: str) -> Iterator[EvalItem]:
    for number, line in enumerate(lines, start=1):
        parts = [part.strip() for part in line.split("|")]
        if len(parts) not in (4, 5) or not parts[0] or not parts[3]:
            raise DataError(f"{file}:{number} is no line of a list", hint=LIST_HINT)
        paths = [file.parent / part for part in (parts[2], *parts[4:])]
        for path in paths:
            if not is_file(path):
                raise DataError(f"{file}:{number} names {path}, which is not there", hint=LIST_HINT)
        id, reference_text, _, text = parts[:4]
        reference = Utterance(f"{id}-reference", paths[0], normalise_text(reference_text), "", language)
        recording = Utterance(id, paths[1], text, "", language) if len(paths) == 2 else None
        yield EvalItem(id, normalise_text(text), "", language, (reference,), recording, scene)


def _read_lines(file: Path) -> list[str]:
    try:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        lines = [line.strip() for line in content.decode("utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read: {error}", hint="give a UTF-8 text file, one sentence a line") from None
    if not lines:
        raise DataError(f"{file} has no lines", hint="write one sentence a line")
    return lines


def _speaker_clips(dataset: PreparedDataset, items: Sequence[EvalItem], seed: int) -> dict[str, tuple[Utterance, ...]]:
    """Some recordings of every named speaker of the items, and of others to tell them from."""
    clips = _by_speaker(utterance for utterance in dataset.utterances if utterance.speaker)
    own = {item.speaker for item in items}
    speakers = sorted(clips, key=lambda speaker: (speaker not in own, string_hash(f"{seed}/others/{speaker}")))
    speakers = speakers[: max(MIN_SPEAKERS, len(own))]
    count = min(MAX_CLIPS_PER_SPEAKER, max(MIN_CLIPS_PER_SPEAKER, MAX_CLIPS // max(1, len(speakers))))
    return {speaker: tuple(_shuffled(clips[speaker], f"{seed}/clips")[:count]) for speaker in sorted(speakers)}


def _references(dataset: PreparedDataset, settings: DataSettings, seed: int) -> dict[str, list[Utterance]]:
    shortest, longest = settings.reference_seconds
    clips = _by_speaker(clip for clip in dataset.utterances if shortest <= clip_seconds(clip) <= longest)
    if not clips:
        raise DataError(
            f"{dataset.folder} has no clip of {shortest:g} to {longest:g} s to set a voice",
            hint="give other --data, or leave it out to speak without a reference",
        )
    return {speaker: _shuffled(of, f"{seed}/references") for speaker, of in clips.items()}


def _select(targets: list[Utterance], seed: int, limit: int | None) -> list[Utterance]:
    """All targets, or `limit` of them, of each speaker in turn."""
    if limit is None or limit >= len(targets):
        return targets
    of_speaker = _by_speaker(_shuffled(targets, f"{seed}/lines"))
    ranked = sorted((rank, name, target.id) for name, of in of_speaker.items() for rank, target in enumerate(of))
    selected = {id for _, _, id in ranked[:limit]}
    return [target for target in targets if target.id in selected]


def _by_speaker(utterances: Iterable[Utterance]) -> dict[str, list[Utterance]]:
    groups: defaultdict[str, list[Utterance]] = defaultdict(list)
    for utterance in utterances:
        groups[utterance.speaker].append(utterance)
    return groups


def _shuffled(utterances: Sequence[Utterance], stream: str) -> list[Utterance]:
    return sorted(utterances, key=lambda utterance: string_hash(f"{stream}/{utterance.id}"))
