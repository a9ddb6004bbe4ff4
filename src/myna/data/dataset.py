"""Prepared dataset: a folder made by `myna prepare`, opened for training; its manifest table and its codes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np

from myna.core.errors import DataError
from myna.core.io import atomic_write, string_hash
from myna.data.code_store import CodeStore, prepare_command
from myna.data.codec import Codes, Encoder
from myna.data.manifest import Utterance
from myna.data.manifest_table import IdHashes, Indices, ManifestTable, open_manifest_table

DATASET_INFO_FILE = "prepared.json"


@dataclass(frozen=True, slots=True)
class DataFolder:
    """A folder made by `prepare`, `import_dataset` or `split`. It can be given wherever a path is expected."""

    folder: Path
    utterances: int
    rejected: int = 0
    """Items of the source that cannot be used; `rejected.jsonl` lists them with the reason."""
    encoded: int = 0
    """Clips that were encoded by this call."""
    notes: tuple[str, ...] = ()

    def __fspath__(self) -> str:
        return os.fspath(self.folder)


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """Codec facts of a prepared dataset, so that training can read its codes without loading the codec."""

    codec_revision: str
    sample_rate: int
    frame_rate: float
    codebooks: int
    codebook_size: int

    @classmethod
    def from_codec(cls, codec: Encoder) -> DatasetInfo:
        return cls(codec.revision, codec.sample_rate, codec.frame_rate, codec.codebooks, codec.codebook_size)

    def write(self, folder: Path) -> None:
        with atomic_write(folder / DATASET_INFO_FILE) as temporary:
            temporary.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> DatasetInfo:
        path = folder / DATASET_INFO_FILE
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (FileNotFoundError, NotADirectoryError):
            problem = f"{folder} is not a prepared folder: it has no {DATASET_INFO_FILE}"
            raise DataError(problem, hint=prepare_command(folder)) from None
        except (ValueError, TypeError) as error:
            raise DataError(f"{path} is damaged: {error}", hint="run `myna prepare` again") from None


class PreparedDataset:
    """Utterances with their codes, addressed by id or by index into the manifest table.

    Cheap to open whatever its size: columns and codes stay on disk until they are read, and an `Utterance` is built on
    access.
    """

    def __init__(
        self, folder: Path, info: DatasetInfo, table: ManifestTable, store: CodeStore, notes: tuple[str, ...] = ()
    ) -> None:
        self.folder, self.info, self.table, self.store = folder, info, table, store
        self.notes = notes
        """Sentences for the user about how the folder was opened."""

    @classmethod
    def open(cls, folder: Path) -> PreparedDataset:
        info = DatasetInfo.read(folder)
        store = CodeStore.open(folder, info.codec_revision)
        table, notes = open_manifest_table(folder, store)
        return cls(folder, info, table, store, notes)

    def __reduce__(self) -> tuple[Any, ...]:
        # Without cached properties.
        return PreparedDataset, (self.folder, self.info, self.table, self.store, self.notes)

    @property
    def utterances(self) -> Utterances:
        return Utterances(self.table, np.arange(len(self.table)))

    def by_id(self, id: str, *, wanted_by: str) -> Utterance:
        index = self.find(id)
        if index is None:
            raise DataError(
                f"{wanted_by} names the reference {id}, of which {self.folder} holds no codes",
                hint="put it into the source, at least a frame long, and run `myna prepare` again",
            )
        return self.table.utterance(index)

    def find(self, id: str) -> int | None:
        hashes, indices = self._by_hash
        wanted = np.uint64(string_hash(id))
        same_hash = indices[np.searchsorted(hashes, wanted, "left") : np.searchsorted(hashes, wanted, "right")]
        return next((index for index in same_hash.tolist() if self.table.id[index].as_py() == id), None)

    def index_of(self, utterance: Utterance) -> int:
        index = self.find(utterance.id)
        if index is None:
            raise KeyError(utterance.id)
        return index

    def key(self, utterance: Utterance) -> str:
        """Key of an utterance's codes; equal keys are equal audio."""
        return self.table.key.value_at(self.index_of(utterance))

    def codes(self, utterance: Utterance) -> Codes:
        return self.codes_at(self.index_of(utterance))

    def codes_at(self, index: int) -> Codes:
        table = self.table
        shape = (int(table.frames[index]), self.info.codebooks)
        return self.store.codes(int(table.shard[index]), int(table.offset[index]), shape)

    def seconds(self, utterance: Utterance) -> float:
        return float(self.table.frames[self.index_of(utterance)] / self.info.frame_rate)

    @cached_property
    def _by_hash(self) -> tuple[IdHashes, Indices]:
        order = np.argsort(self.table.id_hash, kind="stable")
        return self.table.id_hash[order], order


class Utterances(Sequence[Utterance]):
    """Selection of a manifest table's utterances, each built on access."""

    def __init__(self, table: ManifestTable, indices: Indices) -> None:
        self.table, self.indices = table, indices

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, position: int) -> Utterance: ...

    @overload
    def __getitem__(self, position: slice) -> Utterances: ...

    def __getitem__(self, position: int | slice) -> Utterance | Utterances:
        if isinstance(position, slice):
            return Utterances(self.table, self.indices[position])
        return self.table.utterance(int(self.indices[position]))

    def with_id(self, id: str) -> Utterances:
        same_hash = self.indices[self.table.id_hash[self.indices] == np.uint64(string_hash(id))]
        return Utterances(self.table, same_hash[[self.table.id[int(index)].as_py() == id for index in same_hash]])

    def by_speakers(self, speakers: Iterable[str]) -> Utterances:
        speaker = self.table.speaker
        selected = np.isin(speaker.indices[self.indices], speaker.indices_of(list(speakers)))
        return Utterances(self.table, self.indices[selected])

    def keys_among(self, keys: Sequence[str]) -> set[str]:
        """Return the keys that at least one of these utterances has."""
        key = self.table.key
        is_present = np.isin(key.indices_of(keys), key.indices[self.indices])
        return {name for name, present in zip(keys, is_present.tolist(), strict=True) if present}
