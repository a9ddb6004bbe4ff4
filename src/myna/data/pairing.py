"""Which clip sets the voice of which target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from myna.config import DataSettings
from myna.data.dataset import PreparedDataset, Utterances
from myna.data.hash_rng import randint, random_bits
from myna.data.manifest_table import ManifestTable, Rows
from myna.data.utterance import Utterance
from myna.errors import DataError

TRIES = 8
"""Clips that are drawn for a target before those that would do are listed one by one."""
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Unpaired:
    """What the pairing left out or left alone, for the person who watches."""

    without_reference: Utterances
    outside_seconds: Utterances


class References(NamedTuple):
    """Those of many targets: how many each has, and all of their rows end to end."""

    counts: Rows
    rows: Rows

    @property
    def starts(self) -> Rows:
        return np.cumsum(self.counts) - self.counts

    def each(self) -> Iterator[tuple[int, ...]]:
        rows = self.rows.tolist()
        for start, count in zip(self.starts.tolist(), self.counts.tolist(), strict=True):
            yield tuple(rows[start : start + count])


class Pairing:
    """Targets with their references; a reference is never the target's own sound, nor part of it.

    A choice of ours depends on seed, epoch and target alone, so that it is the same on every rank and after a resume.
    """

    def __init__(self, corpus: PreparedDataset, settings: DataSettings, seed: int) -> None:
        self.corpus, self.settings, self.seed = corpus, settings, seed
        table = corpus.table
        seconds = table.frames / corpus.prepared.frame_rate
        shortest, longest = settings.reference_seconds
        # Clips without a speaker's name may be anyone's.
        named = (table.speaker.numbers != table.speaker.numbers_of([""])) & ~table.is_heard
        self._voices = _Voices.of(table, np.flatnonzero(named & (shortest <= seconds) & (seconds <= longest)))
        shortest, longest = settings.seconds
        meant, fits = table.is_target.astype(bool), (shortest <= seconds) & (seconds <= longest)
        self.targets = Utterances(table, np.flatnonzero(meant & fits))
        if not self.targets:
            raise DataError(
                f"{corpus.folder} has no target between {shortest} and {longest} seconds",
                hint="check `data.seconds` and the folder's manifest.jsonl",
            )
        self._check_given()
        alone = self.draw(self.targets.rows, epoch=0).counts == 0
        self.unpaired = Unpaired(
            without_reference=Utterances(table, self.targets.rows[alone]),
            outside_seconds=Utterances(table, np.flatnonzero(meant & ~fits)),
        )
        if settings.require_reference and alone.any():
            names = self.unpaired.without_reference
            remedy = "give those speakers a name and a second clip" if self._we_choose else "name their `references`"
            raise DataError(
                f"{len(names)} targets find no reference, {names[0].id} first",
                hint=f"{remedy}, or set data.require_reference=false",
            )

    @property
    def hours(self) -> float:
        return float(self.corpus.table.frames[self.targets.rows].sum() / self.corpus.prepared.frame_rate / 3600)

    @property
    def speakers(self) -> int:
        return len(np.unique(self.corpus.table.speaker.numbers[self.targets.rows]))

    def references(self, target: Utterance, epoch: int) -> tuple[Utterance, ...]:
        """Those the data names, or one that we draw."""
        drawn = self.draw(np.array([self.corpus.row_of(target)]), epoch)
        return tuple(self.corpus.table.utterance(int(row)) for row in drawn.rows)

    def draw(self, targets: Rows, epoch: int) -> References:
        """The same for the rows of many targets."""
        table, voices = self.corpus.table, self._voices
        choosing, drawn = self._left_to_us(targets), np.full(len(targets), -1)
        own = voices.place[targets]
        others = voices.number[table.speaker.numbers[targets]] - (own >= 0)
        waiting = np.flatnonzero(choosing & (others > 0))
        for number in range(TRIES):
            if not len(waiting):
                break
            thrown = random_bits(table.name[targets[waiting]], f"{self.seed}/{epoch}/reference {number}")
            place = randint(thrown, others[waiting])
            place += (own[waiting] >= 0) & (place >= own[waiting])  # anyone but the target itself
            clips = voices.rows[voices.first[table.speaker.numbers[targets[waiting]]] + place]
            fine = ~_share_sound(table, targets[waiting], clips)
            drawn[waiting[fine]] = clips[fine]
            waiting = waiting[~fine]
        for number in waiting.tolist():
            # Nearly all clips of the speaker are the target's own sound, or all of them.
            clips = voices.of_speaker(int(table.speaker.numbers[targets[number]]))
            clips = clips[~_share_sound(table, targets[[number]], clips)]
            if len(clips):
                thrown = random_bits(table.name[targets[[number]]], f"{self.seed}/{epoch}/reference")
                drawn[number] = clips[randint(thrown, np.array([len(clips)]))[0]]
        return self._with_given(targets, choosing, drawn)

    def longest(self, sizes: Rows) -> References:
        """For every target the references that make its longest sequence, `sizes` being what each clip adds to one.

        Clips with a size below zero are not considered.
        """
        table, targets = self.corpus.table, self.targets.rows
        choosing, found = self._left_to_us(targets), np.full(len(targets), -1)
        voices = self._voices.by_size(table, sizes)
        speakers = table.speaker.numbers[targets]
        waiting, place = np.flatnonzero(choosing), 0
        while len(waiting := waiting[place < voices.number[speakers[waiting]]]):
            clips = voices.rows[voices.first[speakers[waiting]] + place]
            waiting, clips = waiting[sizes[clips] >= 0], clips[sizes[clips] >= 0]
            fine = ~_share_sound(table, targets[waiting], clips)
            found[waiting[fine]] = clips[fine]
            waiting, place = waiting[~fine], place + 1
        return self._with_given(targets, choosing, found)

    @property
    def _we_choose(self) -> bool:
        return self.settings.reference == "same_speaker"

    def _left_to_us(self, targets: Rows) -> Mask:
        if not self._we_choose:
            return np.zeros(len(targets), bool)
        return ~self.corpus.table.names_references[targets].astype(bool)

    def _with_given(self, targets: Rows, choosing: Mask, chosen: Rows) -> References:
        """Our choices, below zero where there is none, and what the data names for all other targets."""
        given = self._given(targets)
        counts = np.where(choosing, chosen >= 0, given.counts)
        references = References(counts, np.empty(counts.sum(), np.int64))
        mine = choosing & (chosen >= 0)
        references.rows[references.starts[mine]] = chosen[mine]
        theirs = np.repeat(~choosing, counts)
        references.rows[theirs] = given.rows[np.repeat(~choosing, given.counts)]
        return references

    def _given(self, targets: Rows) -> References:
        table = self.corpus.table
        starts, ends = table.reference_bounds[targets].astype(np.int64), table.reference_bounds[targets + 1]
        counts = ends - starts if self.settings.reference != "none" else np.zeros(len(targets), np.int64)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return References(counts, table.reference_rows[np.repeat(starts, counts) + within].astype(np.int64))

    def _check_given(self) -> None:
        """What the data names must be there, and be another sound."""
        table, targets = self.corpus.table, self.targets.rows
        given = self._given(targets)
        owners = np.repeat(targets, given.counts)
        if (given.rows < 0).any():
            target = table.utterance(int(owners[np.argmax(given.rows < 0)]))
            for id in target.references or ():
                self.corpus.by_id(id, wanted_by=target.id)
        shared = _share_sound(table, owners, given.rows)
        if shared.any():
            target = table.utterance(int(owners[np.argmax(shared)]))
            raise DataError(
                f"{target.id} has itself for a reference: it would learn to copy",
                hint="name another clip of the speaker in the manifest's `references`",
            )


class _Voices(NamedTuple):
    """Clips that may set the voice, those of one speaker side by side."""

    rows: Rows
    first: Rows
    """(speakers,): where a speaker's clips begin."""
    number: Rows
    """(speakers,): how many there are."""
    place: Rows
    """(utterances,): where a clip stands among its speaker's, below zero if it is not among them."""

    @classmethod
    def of(cls, table: ManifestTable, rows: Rows) -> _Voices:
        """The clips of a speaker keep the order they are given in."""
        speakers = table.speaker.numbers[rows]
        rows = rows[np.argsort(speakers, kind="stable")]
        number = np.bincount(speakers, minlength=len(table.speaker.values))
        first = np.cumsum(number) - number
        place = np.full(len(table), -1)
        place[rows] = np.arange(len(rows)) - np.repeat(first, number)
        return cls(rows, first, number, place)

    def of_speaker(self, speaker: int) -> Rows:
        return self.rows[self.first[speaker] : self.first[speaker] + self.number[speaker]]

    def by_size(self, table: ManifestTable, sizes: Rows) -> _Voices:
        return _Voices.of(table, self.rows[np.argsort(-sizes[self.rows], kind="stable")])


def _share_sound(table: ManifestTable, ones: Rows, others: Rows) -> Mask:
    """Whether they are equal sound, or overlapping parts of one recording."""
    overlap = np.maximum(table.start[ones], table.start[others]) < np.minimum(table.end[ones], table.end[others])
    one_recording = table.audio.numbers[ones] == table.audio.numbers[others]
    return (one_recording & overlap) | (table.key.numbers[ones] == table.key.numbers[others])  # type: ignore[no-any-return]
