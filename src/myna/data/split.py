"""Train / held-out split of a prepared dataset, made once and checked for leaks; overlap of clips with training data.

    FOLDER/split.json                    which utterance belongs to which subset
    FOLDER/subsets/train                 prepared folders of their own, whose codes are the same files
    FOLDER/subsets/held_out_texts        training speakers, texts that do not occur in training
    FOLDER/subsets/held_out_speakers     speakers that do not occur in training

Choices follow from ids and the seed, so that the order of the source does not matter. Utterances added later go to the
subset of their speaker or text, and nothing that was held out is ever trained on afterwards.
"""

import json
import math
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple, Self, cast, get_args

from myna.core.config import Recipe
from myna.core.errors import DataError
from myna.core.io import atomic_write, file_hash, save_text, string_hash
from myna.data.code_store import codes_folder, codes_key, span_bounds, write_index
from myna.data.dataset import DataFolder, PreparedDataset, Utterances
from myna.data.manifest import Span, Utterance, write_manifest
from myna.data.references import ReferenceSampler
from myna.text.normalization import alphanumeric

Subset = Literal["train", "held_out_texts", "held_out_speakers"]
TRAIN, TEXTS, SPEAKERS = SUBSETS = cast(tuple[Subset, Subset, Subset], get_args(Subset))
Groups = dict[str, Hashable]
"""Group of each id; all members of a group are in one subset."""
SPLIT_FILE = "split.json"
MIN_HELD_OUT_CLIPS = 2
"""Minimum number of clips of a held-out speaker, so that each can be the other's reference."""
MAX_NAMED_IDS = 5
"""Maximum number of utterances that a note or an error names."""


@dataclass(frozen=True, slots=True)
class DatasetSplit:
    """Assignment of utterances to subsets, with the settings it was made with."""

    seed: int
    speakers: int
    texts: int
    subset_of: Mapping[str, Subset]
    """Subset by id."""

    def ids(self, subset: Subset) -> list[str]:
        return [id for id, assigned in self.subset_of.items() if assigned == subset]

    def held_out(self, subset: Subset, groups: Groups) -> set[Hashable]:
        return {groups[id] for id in self.ids(subset) if id in groups}

    def write(self, folder: Path) -> None:
        save_text(folder / SPLIT_FILE, json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Read the split of a folder; None if there is none."""
        try:
            return cls(**json.loads((folder / SPLIT_FILE).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise DataError(f"{folder / SPLIT_FILE} is damaged: {error}", hint="delete it, and split again") from None


def subset_folder(folder: Path, subset: Subset) -> Path:
    return folder / "subsets" / subset


def split_folder(folder: Path, *, speakers: int = 0, texts: int = 10, seed: int = 0) -> dict[str, DataFolder]:
    """Split a prepared folder, or update its earlier split; return the prepared folder of each subset by its name."""
    dataset, previous = PreparedDataset.open(folder), DatasetSplit.read(folder)
    if previous is not None and (previous.seed, previous.speakers, previous.texts) != (seed, speakers, texts):
        raise DataError(
            f"{folder} was split before, with {previous.speakers} speakers and {previous.texts} texts held out and "
            f"seed {previous.seed}",
            hint=f"give the same numbers; or delete {folder / SPLIT_FILE}, and train anew what was trained on it",
        )
    utterances = list(dataset.utterances)
    split = assign_subsets(utterances, dataset.key, speakers=speakers, texts=texts, seed=seed, previous=previous)
    check_leaks(split, utterances, dataset.key)
    split.write(folder)
    for subset in SUBSETS:
        _write_subset(dataset, subset_folder(folder, subset), subset_members(split, subset, utterances))
    counts = {subset: len(split.ids(subset)) for subset in SUBSETS}
    folders: dict[str, DataFolder] = {
        name: DataFolder(subset_folder(folder, name), count) for name, count in counts.items() if count
    }
    if lost := lost_references(split, utterances):
        note = f"{len(lost)} training targets name a held-out clip as a reference, and do without it: "
        note += _name_some(lost)
        folders["train"] = replace(folders["train"], notes=(note,))
    return folders


def subset_members(split: DatasetSplit, subset: Subset, utterances: Sequence[Utterance]) -> list[Utterance]:
    """Return the utterances of a subset, and the clips that they name as references, in the order of the dataset.

    A held-out target keeps its references wherever they are: those of another subset are only references here. Training
    gets no held-out clip, not even as a reference; `lost_references` lists the targets that lose one.
    """
    ids = set(split.ids(subset))
    lost = set(lost_references(split, utterances)) if subset == TRAIN else set()
    # These targets lose their named references. The sampler draws another one, except for dialogues.
    members = [_without_references(one) if one.id in lost else one for one in utterances if one.id in ids]
    by_id = {one.id: one for one in members}
    borrowed = {id for one in members for id in one.references or ()} - ids
    by_id |= {one.id: _without_references(one, reference_only=True) for one in utterances if one.id in borrowed}
    return [by_id[one.id] for one in utterances if one.id in by_id]


def lost_references(split: DatasetSplit, utterances: Iterable[Utterance]) -> list[str]:
    """Return the ids of training targets that name a held-out clip as a reference, and are trained without it."""
    return [
        utterance.id
        for utterance in utterances
        if split.subset_of[utterance.id] == TRAIN
        and any(split.subset_of.get(id, TRAIN) != TRAIN for id in utterance.references or ())
    ]


def _name_some(ids: Sequence[str]) -> str:
    return f"{', '.join(ids[:MAX_NAMED_IDS])}{', ...' if len(ids) > MAX_NAMED_IDS else ''}"


def _without_references(utterance: Utterance, **extras: bool) -> Utterance:
    kept = {key: value for key, value in utterance.extras.items() if key != "references"}
    return replace(utterance, extras=kept | extras)


def assign_subsets(
    utterances: Sequence[Utterance],
    key: Callable[[Utterance], str],
    *,
    speakers: int,
    texts: int,
    seed: int,
    previous: DatasetSplit | None = None,
) -> DatasetSplit:
    """Hold out whole speakers first, then whole texts of the others. `key` is equal for equal audio."""
    groups = _group_speakers(utterances, key)
    held_out = previous.held_out(SPEAKERS, groups) if previous else _draw_speakers(utterances, groups, speakers, seed)
    others = [utterance for utterance in utterances if groups[utterance.id] not in held_out]
    groups = _group_texts(others, key)
    held_out = previous.held_out(TEXTS, groups) if previous else _draw_texts(others, groups, texts, seed)
    subset_of: dict[str, Subset] = {utterance.id: SPEAKERS for utterance in utterances}
    subset_of |= {utterance.id: TEXTS if groups[utterance.id] in held_out else TRAIN for utterance in others}
    for id in previous.ids(TRAIN) if previous is not None else ():
        if subset_of.get(id, TRAIN) != TRAIN:
            problem = "was learned from and would now be held out: what came later is the same voice or the same words"
            raise DataError(f"{id} {problem}", hint=f"take the new clips out, or delete {SPLIT_FILE} and train anew")
    if TRAIN not in subset_of.values():
        raise DataError("nothing would be left to learn from", hint="hold out fewer speakers or texts")
    return DatasetSplit(seed, speakers, texts, subset_of)


def check_leaks(split: DatasetSplit, utterances: Iterable[Utterance], key: Callable[[Utterance], str]) -> None:
    """Check that no audio is in two subsets, and no held-out speaker or text in training."""
    by_key: dict[str, Utterance] = {}
    members: dict[Subset, list[Utterance]] = {subset: [] for subset in SUBSETS}
    for utterance in utterances:
        if utterance.id not in split.subset_of:
            raise DataError(f"{utterance.id} is in no subset", hint=f"split again, so that {SPLIT_FILE} knows it")
        subset = split.subset_of[utterance.id]
        members[subset].append(utterance)
        other = by_key.setdefault(key(utterance), utterance)
        if split.subset_of[other.id] != subset:
            raise _leak(f"{utterance.id} and {other.id} are one sound, in {subset} and in {split.subset_of[other.id]}")
    training_speakers = {utterance.speaker for subset in (TRAIN, TEXTS) for utterance in members[subset]}
    training_texts = {alphanumeric(utterance.text): utterance.id for utterance in members[TRAIN]}
    for utterance in members[SPEAKERS]:
        if utterance.speaker in training_speakers:
            raise _leak(f"{utterance.speaker} is held out with {utterance.id}, and is learned from as well")
    for utterance in members[TEXTS]:
        if other_id := training_texts.get(alphanumeric(utterance.text)):
            raise _leak(f"the words of {utterance.id} are learned with {other_id}")


def _leak(problem: str) -> DataError:
    return DataError(f"the split leaks: {problem}", hint=f"delete {SPLIT_FILE} and split again")


class _UnionFind:
    """Disjoint sets of items; `sets[item]` is the same for all items of a set."""

    def __init__(self) -> None:
        self._parents: dict[Hashable, Hashable] = {}

    def __getitem__(self, item: Hashable) -> Hashable:
        path = []
        while (parent := self._parents.setdefault(item, item)) != item:
            path.append(item)
            item = parent
        self._parents |= dict.fromkeys(path, item)
        return item

    def union(self, first: Hashable, *others: Hashable) -> None:
        for other in others:
            self._parents[self[other]] = self[first]


def _group_speakers(utterances: Sequence[Utterance], key: Callable[[Utterance], str]) -> Groups:
    """Assign each id to a group. Speakers that share audio are one group, since one person may have several names; so
    are the speakers of a target and of the references that it names."""

    # A clip without a speaker's name may be of any person: each is a speaker of its own.
    speaker = {one.id: ("speaker", one.speaker or one.id) for one in utterances}
    joined = _UnionFind()
    for one in utterances:
        joined.union(speaker[one.id], ("key", key(one)), *(speaker[id] for id in one.references or () if id in speaker))
    for first, second in _overlapping(utterances):
        joined.union(speaker[first.id], speaker[second.id])
    return {one.id: joined[speaker[one.id]] for one in utterances}


def _draw_speakers(utterances: Sequence[Utterance], groups: Groups, count: int, seed: int) -> set[Hashable]:
    members: defaultdict[Hashable, list[Utterance]] = defaultdict(list)
    for utterance in utterances:
        members[groups[utterance.id]].append(utterance)
    # Keyed by speaker names, which do not depend on how the groups were joined.
    names = {
        group: min(utterance.speaker for utterance in clips)
        for group, clips in members.items()
        if len(clips) >= MIN_HELD_OUT_CLIPS and all(utterance.speaker for utterance in clips)
    }
    if count > len(names) or (count and count == len(members)):
        raise DataError(
            f"{count} speakers cannot be held out of {len(members)}, {len(names)} of whom have a name and "
            f"{MIN_HELD_OUT_CLIPS} clips",
            hint=f"hold out at most {min(len(names), len(members) - 1)} with --speakers",
        )
    return set(sorted(names, key=lambda group: string_hash(f"{seed}/speaker/{names[group]}"))[:count])


def _group_texts(utterances: Sequence[Utterance], key: Callable[[Utterance], str]) -> Groups:
    """Assign each id to a group: equal texts and equal audio stay together."""
    joined = _UnionFind()
    for utterance in utterances:
        joined.union(("id", utterance.id), ("text", alphanumeric(utterance.text)), ("key", key(utterance)))
    for first, second in _overlapping(utterances):
        joined.union(("id", first.id), ("id", second.id))
    return {utterance.id: joined["id", utterance.id] for utterance in utterances}


def _draw_texts(utterances: Sequence[Utterance], groups: Groups, count: int, seed: int) -> set[Hashable]:
    names: dict[Hashable, str] = {}
    for utterance in utterances:
        if (text := alphanumeric(utterance.text)) and utterance.is_target:
            group = groups[utterance.id]
            names[group] = min(names.get(group, text), text)
    if count >= len(names) and count:
        problem = f"{count} texts cannot be held out of {len(names)}"
        raise DataError(problem, hint=f"hold out at most {len(names) - 1} with --texts")
    return set(sorted(names, key=lambda group: string_hash(f"{seed}/text/{names[group]}"))[:count])


def _overlapping(utterances: Iterable[Utterance]) -> Iterable[tuple[Utterance, Utterance]]:
    """Yield pairs of utterances whose spans of one recording overlap, enough of them to join all that do."""
    spans: defaultdict[Path, list[tuple[float, float, Utterance]]] = defaultdict(list)
    for utterance in utterances:
        start, end = span_bounds(utterance.span)
        spans[utterance.audio].append((start, math.inf if end is None else end, utterance))
    for recording in spans.values():
        recording.sort(key=lambda span: span[:2])
        last_end, owner = recording[0][1], recording[0][2]
        for start, end, utterance in recording[1:]:
            if start < last_end:
                yield owner, utterance
            if end > last_end:
                last_end, owner = end, utterance


def _write_subset(dataset: PreparedDataset, folder: Path, members: list[Utterance]) -> None:
    """Write a subset as a prepared folder. Codes are hard-linked, and copied only where the disk cannot link."""
    info = dataset.info
    if not members:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for shard in sorted(dataset.store.codes_folder.glob("[0-9]*.arrow")):
        with atomic_write(codes_folder(folder, info.codec_revision) / shard.name) as temporary:
            try:
                os.link(shard, temporary)
            except OSError:
                shutil.copyfile(shard, temporary)
    write_manifest(folder / "manifest.jsonl", members)
    keys = list(map(dataset.key, members))
    write_index(members, keys, folder, revision=info.codec_revision, sample_rate=info.sample_rate)
    info.write(folder)


# Overlap with training data: the same audio, or the same words of the same speaker

OverlapKind = Literal["audio", "words"]


class ComparedClip(NamedTuple):
    """Clip, or a text alone, to be searched for in training data."""

    id: str
    speaker: str
    text: str
    key: str = ""
    """Key from `PreparedDataset.key`; empty without audio."""
    recording: Utterance | None = None
    """Clip whose span is compared with trained spans of the same file."""


_cached_file_hash = lru_cache(maxsize=65_536)(file_hash)  # many clips may be spans of one file


@dataclass(frozen=True, slots=True)
class TrainedClips:
    utterances: Utterances
    codec_revision: str

    @classmethod
    def open(cls, recipe: Recipe) -> Self:
        dataset = PreparedDataset.open(recipe.data.train)
        targets = ReferenceSampler(dataset, recipe.data, recipe.train.seed).targets
        return cls(dataset.utterances if recipe.loss.supervise_references else targets, dataset.info.codec_revision)

    def key(self, audio: Path, span: Span | None = None) -> str:
        """Key of a clip of this audio in the training data, wherever the file is."""
        return codes_key(_cached_file_hash(audio), span, self.codec_revision)

    def clip(self, id: str, speaker: str, text: str, recording: Utterance | None) -> ComparedClip:
        try:
            key = self.key(recording.audio, recording.span) if recording is not None else ""
        except FileNotFoundError as error:
            raise DataError(
                f"the recording of {id} is not there: {error.filename}",
                hint="it was moved or deleted: put it back, or prepare the folder again: myna prepare SOURCE --out DIR",
            ) from None
        return ComparedClip(id, speaker, text, key, recording)

    def find(self, clips: Sequence[ComparedClip], *, unnamed_speakers: bool = False) -> dict[str, OverlapKind]:
        return find_overlap(self.utterances, clips, unnamed_speakers=unnamed_speakers)

    def check_unseen(self, setting: str, clips: Sequence[ComparedClip], *, hint: str = "") -> None:
        """Raise an error if a clip of a setting's data is trained on, or the same words of the same speaker."""
        if found := self.find(clips):
            audio, names = list(found.values()).count("audio"), _name_some(list(found))
            raise DataError(
                f"{len(found)} of {len(clips)} items of `{setting}` are trained on too ({audio} with the same audio, "
                f"{len(found) - audio} with the same words of the same speaker): {names}",
                hint=hint or f"hold items out with myna split, and give its subsets/held_out_texts as `{setting}`",
            )


def find_overlap(
    trained: Utterances, clips: Sequence[ComparedClip], *, unnamed_speakers: bool = False
) -> dict[str, OverlapKind]:
    """Find the clips that are among the trained ones, and why, by id. With `unnamed_speakers`, equal words count too if
    one of the two clips names no speaker."""
    keys = trained.keys_among([clip.key for clip in clips if clip.key])
    overlaps = trained.overlaps([clip.recording for clip in clips])
    speakers = {clip.speaker for clip in clips}
    # There may be a million trained clips, so only those that can be equal are compared.
    if unnamed_speakers:
        compared = trained if "" in speakers else trained.by_speakers({*speakers, ""})
    else:
        compared = trained.by_speakers(speakers - {""})
    said_by: defaultdict[str, set[str]] = defaultdict(set)
    for utterance in compared:
        said_by[alphanumeric(utterance.text)].add(utterance.speaker)
    said_by.pop("", None)

    def is_said(clip: ComparedClip) -> bool:
        by = said_by.get(alphanumeric(clip.text), set())
        return clip.speaker in by or (unnamed_speakers and bool(by) and (not clip.speaker or "" in by))

    found: dict[str, OverlapKind] = {clip.id: "words" for clip in clips if is_said(clip)}
    same = (clip for clip, overlap in zip(clips, overlaps, strict=True) if overlap or clip.key in keys)
    return found | {clip.id: "audio" for clip in same}
