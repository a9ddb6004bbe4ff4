"""A folder made by `myna prepare`, opened for training: the manifest and its codes."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from myna.data.codec import Codec, Codes
from myna.data.codes import CodeStore
from myna.data.manifest import read_manifest
from myna.data.utterance import Utterance
from myna.errors import DataError

PREPARED = "prepared.json"


@dataclass(frozen=True, slots=True)
class Prepared:
    """What `myna prepare` leaves beside the manifest, so that training need not open the codec to read its codes."""

    codec_revision: str
    sample_rate: int
    frame_rate: float
    codebooks: int
    codebook_size: int

    @classmethod
    def of(cls, codec: Codec) -> Prepared:
        return cls(codec.revision, codec.sample_rate, codec.frame_rate, codec.codebooks, codec.codebook_size)

    def write(self, folder: Path) -> None:
        temporary = folder / f".{PREPARED}"
        temporary.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        temporary.replace(folder / PREPARED)

    @classmethod
    def read(cls, folder: Path) -> Prepared:
        try:
            return cls(**json.loads((folder / PREPARED).read_text(encoding="utf-8")))
        except (FileNotFoundError, NotADirectoryError):
            raise DataError(
                f"{folder} is not a prepared folder: it has no {PREPARED}",
                hint=f"myna prepare SOURCE --out {folder} --model MODEL",
            ) from None
        except (ValueError, TypeError) as error:
            raise DataError(f"{folder / PREPARED} is damaged: {error}", hint="run `myna prepare` again") from None


class Corpus:
    """Utterances with their codes. Cheap to open: codes stay on disk until they are asked for."""

    def __init__(self, folder: Path, prepared: Prepared, utterances: list[Utterance], store: CodeStore) -> None:
        self.folder, self.prepared, self.utterances, self._store = folder, prepared, utterances, store
        self._by_id = {utterance.id: utterance for utterance in utterances}

    @classmethod
    def open(cls, folder: Path) -> Corpus:
        prepared = Prepared.read(folder)
        utterances = read_manifest(folder / "manifest.jsonl")
        twins = [id for id, lines in Counter(utterance.id for utterance in utterances).items() if lines > 1]
        if twins:
            raise DataError(
                f"{folder / 'manifest.jsonl'} has several utterances with the id {twins[0]}",
                hint="give each a name of its own, and run `myna prepare` again",
            )
        store = CodeStore.open(folder, prepared.codec_revision)
        return cls(folder, prepared, [u for u in utterances if store.has(u)], store)

    def by_id(self, id: str, *, wanted_by: str) -> Utterance:
        try:
            return self._by_id[id]
        except KeyError:
            raise DataError(
                f"{wanted_by} names the reference {id}, of which {self.folder} holds no codes",
                hint="put it into the source, at least a frame long, and run `myna prepare` again",
            ) from None

    def key(self, utterance: Utterance) -> str:
        """Equal keys are equal sound."""
        return self._store.key(utterance)

    def codes(self, utterance: Utterance) -> Codes:
        return self._store[self.key(utterance)]

    def seconds(self, utterance: Utterance) -> float:
        return self._store.frames(self.key(utterance)) / self.prepared.frame_rate
