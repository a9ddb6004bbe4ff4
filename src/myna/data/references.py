"""Reference sampling: the clip that sets the voice of each target."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from myna.core.config import DataSettings
from myna.core.errors import DataError
from myna.core.io import string_hash
from myna.data.dataset import IdHashes, Indices, ManifestTable, PreparedDataset, Utterances
from myna.data.manifest import Utterance

MAX_DRAWS = 8
"""Random draws for a target before the valid references of its speaker are listed one by one."""
Mask = npt.NDArray[np.bool_]


class ReferenceLists(NamedTuple):
    """References of many targets as a ragged array: how many each has, and all their indices end to end."""

    counts: Indices
    indices: Indices

    @property
    def offsets(self) -> Indices:
        return np.cumsum(self.counts) - self.counts

    def as_tuples(self) -> Iterator[tuple[int, ...]]:
        indices = self.indices.tolist()
        for start, count in zip(self.offsets.tolist(), self.counts.tolist(), strict=True):
            yield tuple(indices[start : start + count])


class ReferenceSampler:
    """Targets and their references; a reference is never the target's own audio, nor part of it.

    A random choice depends on seed, epoch and target alone: the same on every rank and after a resume.
    """

    def __init__(self, dataset: PreparedDataset, settings: DataSettings, seed: int) -> None:
        self.dataset, self.settings, self.seed = dataset, settings, seed
        self._is_random = settings.reference == "same_speaker"
        table = dataset.table
        seconds = table.frames / dataset.info.frame_rate
        shortest, longest = settings.reference_seconds
        # A clip without a speaker's name may be of any person, and a dialogue has several.
        is_named = (table.speaker.indices != table.speaker.indices_of([""])) & ~table.has_answer
        is_one_voice = is_named & ~table.is_dialogue.astype(bool)
        fits = (shortest <= seconds) & (seconds <= longest)
        self._pool = _ReferencePool.of(table, np.flatnonzero(is_one_voice & fits))
        shortest, longest = settings.seconds
        is_target, fits = table.is_target.astype(bool), (shortest <= seconds) & (seconds <= longest)
        self.targets = Utterances(table, np.flatnonzero(is_target & fits))
        if not self.targets:
            problem = f"{dataset.folder} has no target between {shortest} and {longest} seconds"
            raise DataError(problem, hint="check `data.seconds` and the folder's manifest.jsonl")
        self._check_given()
        unpaired = self.sample(self.targets.indices, epoch=0).counts == 0
        self.without_reference = Utterances(table, self.targets.indices[unpaired])
        """Targets without any possible reference."""
        self.outside_seconds = Utterances(table, np.flatnonzero(is_target & ~fits))
        """Utterances left out as too short or too long."""
        if settings.require_reference and unpaired.any():
            remedy = "give those speakers a name and a second clip" if self._is_random else "name their `references`"
            problem = f"{len(self.without_reference)} targets find no reference, {self.without_reference[0].id} first"
            raise DataError(problem, hint=f"{remedy}, or set data.require_reference=false")

    @property
    def hours(self) -> float:
        return float(self.dataset.table.frames[self.targets.indices].sum() / self.dataset.info.frame_rate / 3600)

    @property
    def speakers(self) -> int:
        return len(np.unique(self.dataset.table.speaker.indices[self.targets.indices]))

    @property
    def usual_scene(self) -> str:
        """Scene that most targets are trained with, from the data, or from the recipe if the data names none."""
        scene = self.dataset.table.scene
        scenes = Counter[str]()
        for index, count in enumerate(np.bincount(scene.indices[self.targets.indices])):
            scenes[str(scene.dictionary[index].as_py()) or self.settings.scene] += int(count)
        return scenes.most_common(1)[0][0]

    def references(self, target: Utterance, epoch: int) -> tuple[Utterance, ...]:
        """Return the references of one target: those of its manifest line, or a drawn one."""
        sampled = self.sample(np.array([self.dataset.index_of(target)]), epoch)
        return tuple(self.dataset.table.utterance(int(index)) for index in sampled.indices)

    def sample(self, targets: Indices, epoch: int) -> ReferenceLists:
        table, pool = self.dataset.table, self._pool
        is_random, drawn = self._random_mask(targets), np.full(len(targets), -1)
        own = pool.position[targets]
        others = pool.clip_count[table.speaker.indices[targets]] - (own >= 0)
        pending = np.flatnonzero(is_random & (others > 0))
        for draw in range(MAX_DRAWS):
            if not len(pending):
                break
            bits = random_bits(table.id_hash[targets[pending]], f"{self.seed}/{epoch}/reference {draw}")
            position = randint(bits, others[pending])
            position += (own[pending] >= 0) & (position >= own[pending])  # any clip but the target itself
            clips = pool.indices[pool.start[table.speaker.indices[targets[pending]]] + position]
            is_valid = ~_share_audio(table, targets[pending], clips)
            drawn[pending[is_valid]] = clips[is_valid]
            pending = pending[~is_valid]
        for number in pending.tolist():
            # Random draws failed: list the speaker's clips with other audio than the target, and draw from these.
            speaker = int(table.speaker.indices[targets[number]])
            clips = pool.indices[pool.start[speaker] : pool.start[speaker] + pool.clip_count[speaker]]
            clips = clips[~_share_audio(table, targets[[number]], clips)]
            if len(clips):
                bits = random_bits(table.id_hash[targets[[number]]], f"{self.seed}/{epoch}/reference")
                drawn[number] = clips[randint(bits, np.array([len(clips)]))[0]]
        return self._with_given(targets, is_random, drawn)

    def longest_references(self, sizes: Indices) -> ReferenceLists:
        """Find for every target the references that make its longest sequence. `sizes` is what each clip adds to a
        sequence; clips with a negative size are not considered."""
        table, targets = self.dataset.table, self.targets.indices
        is_random, longest = self._random_mask(targets), np.full(len(targets), -1)
        by_size = self._pool.indices[np.argsort(-sizes[self._pool.indices], kind="stable")]
        pool = _ReferencePool.of(table, by_size)
        speakers = table.speaker.indices[targets]
        pending, position = np.flatnonzero(is_random), 0
        while len(pending := pending[position < pool.clip_count[speakers[pending]]]):
            clips = pool.indices[pool.start[speakers[pending]] + position]
            pending, clips = pending[sizes[clips] >= 0], clips[sizes[clips] >= 0]
            is_valid = ~_share_audio(table, targets[pending], clips)
            longest[pending[is_valid]] = clips[is_valid]
            pending, position = pending[~is_valid], position + 1
        return self._with_given(targets, is_random, longest)

    def _random_mask(self, targets: Indices) -> Mask:
        """Return a mask of the targets whose reference is drawn: one speaker, and no reference in the manifest."""
        table = self.dataset.table
        return ~(table.has_references[targets] | table.is_dialogue[targets]).astype(bool) & self._is_random

    def _with_given(self, targets: Indices, is_random: Mask, chosen: Indices) -> ReferenceLists:
        """Combine `chosen` references of random targets (negative: none) with those the manifest names for others."""
        given = self._given(targets)
        counts = np.where(is_random, chosen >= 0, given.counts)
        references = ReferenceLists(counts, np.empty(counts.sum(), np.int64))
        has_choice = is_random & (chosen >= 0)
        references.indices[references.offsets[has_choice]] = chosen[has_choice]
        references.indices[np.repeat(~is_random, counts)] = given.indices[np.repeat(~is_random, given.counts)]
        return references

    def _given(self, targets: Indices) -> ReferenceLists:
        table = self.dataset.table
        starts, ends = table.reference_bounds[targets].astype(np.int64), table.reference_bounds[targets + 1]
        counts = ends - starts if self.settings.reference != "none" else np.zeros(len(targets), np.int64)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return ReferenceLists(counts, table.reference_indices[np.repeat(starts, counts) + within].astype(np.int64))

    def _check_given(self) -> None:
        """Check that named references have codes and other audio than the target."""
        table, targets = self.dataset.table, self.targets.indices
        given = self._given(targets)
        owners = np.repeat(targets, given.counts)
        if (given.indices < 0).any():
            target = table.utterance(int(owners[np.argmax(given.indices < 0)]))
            for id in target.references or ():
                self.dataset.by_id(id, wanted_by=target.id)
        is_shared = _share_audio(table, owners, given.indices)
        if is_shared.any():
            target = table.utterance(int(owners[np.argmax(is_shared)]))
            problem = f"{target.id} has itself for a reference: it would learn to copy"
            raise DataError(problem, hint="name another clip of the speaker in the manifest's `references`")


class _ReferencePool(NamedTuple):
    """Candidate reference clips, grouped by speaker."""

    indices: Indices
    start: Indices
    """Index of each speaker's first clip in `indices`, (speakers,)."""
    clip_count: Indices
    """Number of clips of each speaker, (speakers,)."""
    position: Indices
    """Position of each clip among its speaker's, negative if it is not in the pool, (utterances,)."""

    @classmethod
    def of(cls, table: ManifestTable, indices: Indices) -> Self:
        """Group clips by speaker; the clips of a speaker keep their order."""
        speakers = table.speaker.indices[indices]
        indices = indices[np.argsort(speakers, kind="stable")]
        count = np.bincount(speakers, minlength=len(table.speaker.dictionary))
        start = np.cumsum(count) - count
        position = np.full(len(table), -1)
        position[indices] = np.arange(len(indices)) - np.repeat(start, count)
        return cls(indices, start, count, position)


def _share_audio(table: ManifestTable, first: Indices, second: Indices) -> Mask:
    """Tell whether clips are equal audio or overlapping spans of one recording."""
    overlap = np.maximum(table.start[first], table.start[second]) < np.minimum(table.end[first], table.end[second])
    same_recording = table.audio.indices[first] == table.audio.indices[second]
    return (same_recording & overlap) | (table.key.indices[first] == table.key.indices[second])  # type: ignore[no-any-return]


# Random numbers from hashed names: they depend on no generator's state and no library's version, and so are the same on
# every rank, after a resume and years later.


def random_bits(ids: IdHashes, stream: str) -> npt.NDArray[np.uint64]:
    """64 random bits for each id, independent between purposes (the finalizer of splitmix64)."""
    bits = ids + np.uint64(string_hash(stream))
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def randint(bits: npt.NDArray[np.uint64], limits: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Random bits as integers in [0, limit). Limits are below 2^32."""
    return (((bits >> np.uint64(32)) * limits.astype(np.uint64)) >> np.uint64(32)).astype(np.int64)


def permutation(ids: IdHashes, stream: str) -> npt.NDArray[np.int64]:
    """A random order of all ids, as their positions."""
    return np.argsort(random_bits(ids, stream), kind="stable")
