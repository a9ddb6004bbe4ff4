"""A folder made by `myna prepare`, opened for training: the manifest and its codes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np

from myna.data.code_store import CodeStore
from myna.data.codec import Codes, Encoder
from myna.data.hash_rng import hash_of
from myna.data.manifest_table import ManifestTable, Rows, open_table
from myna.data.utterance import Utterance
from myna.errors import DataError

PREPARED = "prepared.json"


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """What `myna prepare` leaves beside the manifest, so that training need not open the codec to read its codes."""

    codec_revision: str
    sample_rate: int
    frame_rate: float
    codebooks: int
    codebook_size: int

    @classmethod
    def of(cls, codec: Encoder) -> DatasetInfo:
        return cls(codec.revision, codec.sample_rate, codec.frame_rate, codec.codebooks, codec.codebook_size)

    def write(self, folder: Path) -> None:
        temporary = folder / f".{PREPARED}"
        temporary.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        temporary.replace(folder / PREPARED)

    @classmethod
    def read(cls, folder: Path) -> DatasetInfo:
        try:
            return cls(**json.loads((folder / PREPARED).read_text(encoding="utf-8")))
        except (FileNotFoundError, NotADirectoryError):
            raise DataError(
                f"{folder} is not a prepared folder: it has no {PREPARED}",
                hint=f"myna prepare SOURCE --out {folder} --model MODEL",
            ) from None
        except (ValueError, TypeError) as error:
            raise DataError(f"{folder / PREPARED} is damaged: {error}", hint="run `myna prepare` again") from None


class PreparedDataset:
    """Utterances with their codes, each known by its row in the table.

    Cheap to open and to keep, however many there are: columns and codes stay on disk until they are asked for, and an
    `Utterance` exists only while someone looks at it.
    """

    def __init__(
        self, folder: Path, prepared: DatasetInfo, table: ManifestTable, store: CodeStore, notes: tuple[str, ...] = ()
    ) -> None:
        self.folder, self.prepared, self.table, self.store = folder, prepared, table, store
        self.notes = notes
        """What whoever opens the folder should be told."""

    @classmethod
    def open(cls, folder: Path) -> PreparedDataset:
        prepared = DatasetInfo.read(folder)
        store = CodeStore.open(folder, prepared.codec_revision)
        table, notes = open_table(folder, store)
        return cls(folder, prepared, table, store, notes)

    def __reduce__(self) -> tuple[Any, ...]:
        # Without what was only worked out here.
        return PreparedDataset, (self.folder, self.prepared, self.table, self.store, self.notes)

    @property
    def utterances(self) -> Utterances:
        return Utterances(self.table, np.arange(len(self.table)))

    def by_id(self, id: str, *, wanted_by: str) -> Utterance:
        row = self.row(id)
        if row is None:
            raise DataError(
                f"{wanted_by} names the reference {id}, of which {self.folder} holds no codes",
                hint="put it into the source, at least a frame long, and run `myna prepare` again",
            )
        return self.table.utterance(row)

    def row(self, id: str) -> int | None:
        names, rows = self._by_name
        name = np.uint64(hash_of(id))
        place = int(np.searchsorted(names, name))
        while place < len(names) and names[place] == name:
            if self.table.id[int(rows[place])].as_py() == id:
                return int(rows[place])
            place += 1
        return None

    def row_of(self, utterance: Utterance) -> int:
        row = self.row(utterance.id)
        if row is None:
            raise KeyError(utterance.id)
        return row

    def key(self, utterance: Utterance) -> str:
        """Equal keys are equal sound."""
        return self.table.key.at(self.row_of(utterance))

    def codes(self, utterance: Utterance) -> Codes:
        return self.codes_at(self.row_of(utterance))

    def codes_at(self, row: int) -> Codes:
        table = self.table
        shape = (int(table.frames[row]), self.prepared.codebooks)
        return self.store.codes(int(table.shard[row]), int(table.offset[row]), shape)

    def seconds(self, utterance: Utterance) -> float:
        return float(self.table.frames[self.row_of(utterance)] / self.prepared.frame_rate)

    @cached_property
    def _by_name(self) -> tuple[Rows, Rows]:
        order = np.argsort(self.table.name, kind="stable")
        return self.table.name[order], order  # type: ignore[return-value]


class Utterances(Sequence[Utterance]):
    """Some of a table's rows, each made an `Utterance` when it is asked for."""

    def __init__(self, table: ManifestTable, rows: Rows) -> None:
        self.table, self.rows = table, rows

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, place: int) -> Utterance: ...

    @overload
    def __getitem__(self, place: slice) -> Utterances: ...

    def __getitem__(self, place: int | slice) -> Utterance | Utterances:
        if isinstance(place, slice):
            return Utterances(self.table, self.rows[place])
        return self.table.utterance(int(self.rows[place]))

    def named(self, id: str) -> Utterances:
        rows = self.rows[self.table.name[self.rows] == np.uint64(hash_of(id))]
        return Utterances(self.table, rows[[self.table.id[int(row)].as_py() == id for row in rows]])

    def spoken_by(self, speakers: Iterable[str]) -> Utterances:
        speaker = self.table.speaker
        wanted = speaker.numbers_of(list(speakers))
        return Utterances(self.table, self.rows[np.isin(speaker.numbers[self.rows], wanted)])

    def keys_among(self, keys: Sequence[str]) -> set[str]:
        """Those of the keys that one of these utterances has."""
        numbers = self.table.key.numbers_of(keys)
        there = np.isin(numbers, self.table.key.numbers[self.rows])
        return {key for key, is_there in zip(keys, there.tolist(), strict=True) if is_there}
