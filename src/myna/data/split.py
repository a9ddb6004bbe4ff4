"""What is learned from and what is kept to judge by: made once, kept in the prepared folder, and checked for leaks.

    FOLDER/split.json                  which utterance belongs where
    FOLDER/parts/train                 prepared folders of their own, whose codes are the same files
    FOLDER/parts/held_out_texts        known voices, words that nobody says in training
    FOLDER/parts/held_out_speakers     voices that are not in training at all

Choices follow from names and the seed, so that the order of the source does not matter. Utterances that came later go
to the part that their speaker or words belong to, and nothing that was held out is ever trained on afterwards.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, cast, get_args

from myna.data.code_store import CodeStore, index_corpus
from myna.data.codec import Encoder
from myna.data.dataset import DatasetInfo, PreparedDataset
from myna.data.hash_rng import hash_of
from myna.data.manifest import write_manifest
from myna.data.utterance import Utterance
from myna.errors import DataError
from myna.io import replacing

Part = Literal["train", "held_out_texts", "held_out_speakers"]
TRAIN, TEXTS, SPEAKERS = PARTS = cast(tuple[Part, Part, Part], get_args(Part))
FILE = "split.json"
FEWEST = 2
"""Clips that a held-out speaker must have, so that each can be the other's reference."""


@dataclass(frozen=True, slots=True)
class Split:
    seed: int
    speakers: int
    """How many speakers were to be held out."""
    texts: int
    """How many texts."""
    part_of: Mapping[str, Part]
    """By id."""

    def ids(self, part: Part) -> list[str]:
        return [id for id, where in self.part_of.items() if where == part]

    def write(self, folder: Path) -> None:
        with replacing(folder / FILE) as temporary:
            temporary.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Split | None:
        """None where no split was made."""
        try:
            return cls(**json.loads((folder / FILE).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise DataError(f"{folder / FILE} is damaged: {error}", hint="delete it, and split again") from None


def split(folder: Path, *, speakers: int, texts: int, seed: int = 0) -> Split:
    """Choose, or bring an earlier choice up to date; check it; lay out the parts."""
    corpus = PreparedDataset.open(folder)
    known = Split.read(folder)
    if known is not None and (known.seed, known.speakers, known.texts) != (seed, speakers, texts):
        raise DataError(
            f"{folder} was split before, with {known.speakers} speakers and {known.texts} texts held out and seed "
            f"{known.seed}",
            hint=f"give the same numbers; or delete {folder / FILE}, and train anew what was trained on it",
        )
    utterances = list(corpus.utterances)
    chosen = choose(utterances, corpus.key, speakers=speakers, texts=texts, seed=seed, known=known)
    check_leaks(chosen, utterances, corpus.key)
    chosen.write(folder)
    for part in PARTS:
        _lay_out(corpus, part, [utterance for utterance in utterances if chosen.part_of[utterance.id] == part])
    return chosen


def choose(
    utterances: Sequence[Utterance],
    key: Callable[[Utterance], str],
    *,
    speakers: int,
    texts: int,
    seed: int,
    known: Split | None = None,
) -> Split:
    """Whole speakers first, then whole texts of those who are left. `key` is equal for equal sound."""
    circles = _circles(utterances, key)
    part_of: dict[str, Part] = {}
    gone = _speakers_kept(utterances, circles, speakers, seed, known)
    for utterance in utterances:
        if circles[utterance.id] in gone:
            part_of[utterance.id] = SPEAKERS
    left = [utterance for utterance in utterances if utterance.id not in part_of]
    kept = _texts_kept(left, key, texts, seed, known)
    for utterance in left:
        part_of[utterance.id] = TEXTS if utterance.id in kept else TRAIN
    for id in known.ids(TRAIN) if known is not None else ():
        if part_of.get(id, TRAIN) != TRAIN:
            raise DataError(
                f"{id} was learned from and would now be held out: what came later is the same voice or the same words",
                hint=f"take the new clips out, or delete {FILE} and train anew",
            )
    if TRAIN not in part_of.values():
        raise DataError("nothing would be left to learn from", hint="hold out fewer speakers or texts")
    return Split(seed, speakers, texts, {utterance.id: part_of[utterance.id] for utterance in utterances})


def check_leaks(split: Split, utterances: Iterable[Utterance], key: Callable[[Utterance], str]) -> None:
    """No sound in two parts, no held-out speaker and no held-out text in training: said of the first that is."""
    sounds: dict[str, Utterance] = {}
    of: dict[Part, list[Utterance]] = {part: [] for part in PARTS}
    for utterance in utterances:
        if utterance.id not in split.part_of:
            raise DataError(f"{utterance.id} is in no part", hint=f"split again, so that {FILE} knows it")
        part = split.part_of[utterance.id]
        of[part].append(utterance)
        other = sounds.setdefault(key(utterance), utterance)
        if split.part_of[other.id] != part:
            raise _leak(f"{utterance.id} and {other.id} are one sound, in {part} and in {split.part_of[other.id]}")
    learned_speakers = {utterance.speaker for part in (TRAIN, TEXTS) for utterance in of[part]}
    learned_words = {plain(utterance.text): utterance.id for utterance in of[TRAIN]}
    for utterance in of[SPEAKERS]:
        if utterance.speaker in learned_speakers:
            raise _leak(f"{utterance.speaker} is held out with {utterance.id}, and is learned from as well")
    for utterance in of[TEXTS]:
        if plain(utterance.text) in learned_words:
            raise _leak(f"the words of {utterance.id} are learned with {learned_words[plain(utterance.text)]}")


def plain(text: str) -> str:
    """What is said, however it is written."""
    return "".join(letter for letter in text.casefold() if letter.isalnum())


def _leak(what: str) -> DataError:
    return DataError(f"the split leaks: {what}", hint=f"delete {FILE} and split again")


def _circles(utterances: Sequence[Utterance], key: Callable[[Utterance], str]) -> dict[str, str]:
    """For each id a speaker who stands for all that share a sound: one voice may have several names."""
    joined = _Joined()
    for utterance in utterances:
        # Clips without a speaker's name may be anyone's, each for itself.
        joined.join(("speaker", utterance.speaker or utterance.id), ("sound", key(utterance)))
    for one, other in _overlapping(utterances):
        joined.join(("speaker", one.speaker or one.id), ("speaker", other.speaker or other.id))
    return {utterance.id: str(joined.root(("speaker", utterance.speaker or utterance.id))) for utterance in utterances}


def _speakers_kept(
    utterances: Sequence[Utterance], circles: Mapping[str, str], count: int, seed: int, known: Split | None
) -> set[str]:
    of: defaultdict[str, list[Utterance]] = defaultdict(list)
    for utterance in utterances:
        of[circles[utterance.id]].append(utterance)
    before = {circles[id] for id in known.ids(SPEAKERS) if id in circles} if known is not None else set()
    if known is not None:
        return before
    fit = [circle for circle, theirs in of.items() if len(theirs) >= FEWEST and all(one.speaker for one in theirs)]
    if count > len(fit) or (count and count == len(of)):
        raise DataError(
            f"{count} speakers cannot be held out of {len(of)}, {len(fit)} of whom have a name and {FEWEST} clips",
            hint=f"hold out at most {min(len(fit), len(of) - 1)} with --speakers",
        )
    # By who they are and not by how they were joined.
    names = {circle: min(one.speaker for one in of[circle]) for circle in fit}
    return set(sorted(fit, key=lambda circle: hash_of(f"{seed}/speaker/{names[circle]}"))[:count])


def _texts_kept(
    utterances: Sequence[Utterance], key: Callable[[Utterance], str], count: int, seed: int, known: Split | None
) -> set[str]:
    """The ids of the texts that are held out: the same words and the same sounds go together."""
    joined = _Joined()
    for utterance in utterances:
        joined.join(("id", utterance.id), ("words", plain(utterance.text)))
        joined.join(("id", utterance.id), ("sound", key(utterance)))
    for one, other in _overlapping(utterances):
        joined.join(("id", one.id), ("id", other.id))
    root = {utterance.id: joined.root(("id", utterance.id)) for utterance in utterances}
    if known is not None:
        kept = {root[id] for id in known.ids(TEXTS) if id in root}
    else:
        names: dict[Hashable, str] = {}
        for utterance in utterances:
            if plain(utterance.text) and utterance.is_target:
                group = root[utterance.id]
                names[group] = min(names.get(group, plain(utterance.text)), plain(utterance.text))
        if count >= len(names) and count:
            raise DataError(
                f"{count} texts cannot be held out of {len(names)}",
                hint=f"hold out at most {len(names) - 1} with --texts",
            )
        kept = set(sorted(names, key=lambda group: hash_of(f"{seed}/text/{names[group]}"))[:count])
    return {id for id, group in root.items() if group in kept}


def _overlapping(utterances: Sequence[Utterance]) -> Iterable[tuple[Utterance, Utterance]]:
    """Neighbours that are parts of one recording and share some of it."""
    of: defaultdict[Path, list[tuple[float, float, Utterance]]] = defaultdict(list)
    for utterance in utterances:
        span = utterance.span
        end = float("inf") if span is None or span.end is None else span.end
        of[utterance.audio].append((span.start if span else 0.0, end, utterance))
    for parts in of.values():
        parts.sort(key=lambda part: part[:2])
        reach, owner = parts[0][1], parts[0][2]
        for start, end, utterance in parts[1:]:
            if start < reach:
                yield owner, utterance
            if end > reach:
                reach, owner = end, utterance


class _Joined:
    """Things that belong together, by twos (union-find)."""

    def __init__(self) -> None:
        self._parent: dict[Hashable, Hashable] = {}

    def root(self, one: Hashable) -> Hashable:
        above = self._parent.setdefault(one, one)
        while above != self._parent[above]:
            self._parent[above] = above = self._parent[self._parent[above]]
        self._parent[one] = above
        return above

    def join(self, one: Hashable, other: Hashable) -> None:
        self._parent[self.root(other)] = self.root(one)


@dataclass(frozen=True, slots=True)
class _Label:
    """As much of a codec as an index names."""

    revision: str
    sample_rate: int


def _lay_out(corpus: PreparedDataset, part: Part, utterances: list[Utterance]) -> None:
    """A prepared folder of its own. Codes are linked and not copied, where the disk can."""
    folder, prepared = corpus.folder / "parts" / part, corpus.prepared
    home = CodeStore(folder, prepared.codec_revision, {}).home
    if not utterances:
        shutil.rmtree(folder, ignore_errors=True)
        return
    home.mkdir(parents=True, exist_ok=True)
    for shard in sorted(corpus.store.home.glob("[0-9]*.arrow")):
        _link(shard, home / shard.name)
    there = {utterance.id for utterance in utterances}
    own = [_alone(utterance, there) for utterance in utterances]
    write_manifest(folder / "manifest.jsonl", own)
    keys = {(utterance.audio, utterance.span): corpus.key(utterance) for utterance in utterances}
    index_corpus(own, keys, cast(Encoder, _Label(prepared.codec_revision, prepared.sample_rate)), folder)
    DatasetInfo(**asdict(prepared)).write(folder)


def _link(source: Path, target: Path) -> None:
    with replacing(target) as temporary:
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)


def _alone(utterance: Utterance, there: set[str]) -> Utterance:
    """Without references that stand in another part: the pairing finds it one in its own."""
    if set(utterance.references or ()) <= there:
        return utterance
    return replace(utterance, extras={key: value for key, value in utterance.extras.items() if key != "references"})
