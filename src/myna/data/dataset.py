"""Prepared dataset: a folder made by `myna prepare`, opened for training; its codes, and its manifest in columns.

    FOLDER/codes/<first 8 of the codec's revision>/utterances.arrow      a line for every utterance that has codes

This table is memory-mapped, for array operations over a million utterances. It is built from `manifest.jsonl`, the
index and the shards when the folder is first opened, as a rule by `myna prepare`, and stores their fingerprint: once
one of them has changed it is built anew.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from myna.core.errors import DataError
from myna.core.io import file_hash, save_text, string_hash
from myna.data import code_store
from myna.data.code_store import CodeStore, prepare_command
from myna.data.codec import Codes, Encoder
from myna.data.manifest import SPEAKER_TAG, Span, Utterance, iterate_manifest, missing_manifest_error

TABLE_FORMAT = "4"
MANIFEST_FILE, TABLE_FILE, DATASET_INFO_FILE = "manifest.jsonl", "utterances.arrow", "prepared.json"
LINES_PER_BATCH = 1 << 15
"""Lines of a manifest that are held as Python objects at a time."""

Indices = npt.NDArray[np.int64]
"""Utterances as their positions in the manifest table."""
IdHashes = npt.NDArray[np.uint64]
"""64-bit hashes of utterance ids."""
Int32Array = npt.NDArray[np.int32]


class DictionaryColumn(NamedTuple):
    """A dictionary-encoded column: an index into `dictionary` for each utterance."""

    indices: Int32Array
    dictionary: Any

    def value_at(self, index: int) -> str:
        return str(self.dictionary[int(self.indices[index])].as_py())

    def indices_of(self, values: Sequence[str]) -> Int32Array:
        """Return the index of each value, negative if it does not occur."""
        return _positions(pa.array(values, pa.string()), self.dictionary)


@dataclass(frozen=True, slots=True, eq=False)
class ManifestTable:
    """Columns of all utterances that have codes."""

    folder: Path
    path: Path | None
    """File of the table; None if it could not be written."""
    columns: Any
    fingerprint: str
    """Hash of everything that conversations are built from, except the places of files."""
    id: Any
    id_hash: IdHashes
    text: Any
    answer: Any
    """Text to be learned about a clip that is an input; empty for a clip that is to be spoken."""
    extras: Any
    audio: DictionaryColumn
    start: npt.NDArray[np.float64]
    end: npt.NDArray[np.float64]
    """Ends in seconds; infinite for the end of the file."""
    has_span: npt.NDArray[np.uint8]
    speaker: DictionaryColumn
    language: DictionaryColumn
    scene: DictionaryColumn
    question: DictionaryColumn
    """Question about the clip; empty without an answer."""
    speaker_tags: DictionaryColumn
    """Numbers of the speakers that a text has tags for, in order: "0 1"."""
    is_target: npt.NDArray[np.uint8]
    is_dialogue: npt.NDArray[np.uint8]
    """Whether several people speak in the clip."""
    has_references: npt.NDArray[np.uint8]
    """Whether the manifest names the references, even if it names none."""
    reference_bounds: Int32Array
    """Beginning and end of each utterance's own list in `reference_indices`, (utterances + 1,)."""
    reference_indices: Int32Array
    """References as utterances, negative for a reference without codes."""
    key: DictionaryColumn
    shard: Int32Array
    offset: npt.NDArray[np.int64]
    frames: Int32Array

    def __len__(self) -> int:
        return len(self.frames)

    def __reduce__(self) -> tuple[Any, ...]:
        # A worker process maps the file itself instead of receiving its content.
        if self.path is None:
            return _from_arrow, (self.folder, self.path, self.columns)
        metadata = self.columns.schema.metadata
        return _reopen, (self.folder, self.path, metadata[b"codec"].decode(), metadata[b"fingerprint"].decode())

    @property
    def has_answer(self) -> npt.NDArray[np.bool_]:
        """Clips that are an input to be answered in text; they are neither speech targets nor references."""
        return pc.not_equal(self.answer, "").to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]

    def learned_texts(self, part: slice) -> list[str]:
        """Texts whose length varies by utterance: the answer if there is one, else the transcript."""
        answers, texts = self.answer[part].to_pylist(), self.text[part].to_pylist()
        return [answer or text for answer, text in zip(answers, texts, strict=True)]

    def utterance(self, index: int) -> Utterance:
        end, extras = float(self.end[index]), self.extras[index].as_py()
        return Utterance(
            id=self.id[index].as_py(),
            audio=self.folder / self.audio.value_at(index),
            text=self.text[index].as_py(),
            speaker=self.speaker.value_at(index),
            language=self.language.value_at(index),
            span=Span(float(self.start[index]), None if math.isinf(end) else end) if self.has_span[index] else None,
            extras=json.loads(extras) if extras else {},
        )


def open_manifest_table(folder: Path, store: CodeStore) -> tuple[ManifestTable, tuple[str, ...]]:
    """Open the table; also return notes for the user on how it was opened."""
    manifest, path = folder / MANIFEST_FILE, store.codes_folder / TABLE_FILE
    try:
        fingerprint = f"{TABLE_FORMAT}-{file_hash(manifest)}-{store.fingerprint()}"
    except (FileNotFoundError, IsADirectoryError):
        raise missing_manifest_error(manifest) from None
    stored = code_store.read_cached_arrow(path, store.revision, {"fingerprint": fingerprint}, strings=False)
    if stored is not None:
        return _from_arrow(folder, path, stored), ()
    note = f"{manifest} or its codes have changed, and were read anew" if path.exists() else ""
    columns = _build(folder, store, fingerprint)
    try:
        code_store.write_arrow(folder, path, columns)
    except DataError as error:
        note = f"{manifest} has to be read line by line every time: {error.what}"
        return _from_arrow(folder, None, columns), (note,)
    return _from_arrow(folder, path, columns), (note,) if note else ()


def _reopen(folder: Path, path: Path, revision: str, fingerprint: str) -> ManifestTable:
    stored = code_store.read_cached_arrow(path, revision, {"fingerprint": fingerprint}, strings=False)
    if stored is None:
        raise DataError(
            f"{path} was changed or removed while it was in use", hint="start again, with no other process writing it"
        )
    return _from_arrow(folder, path, stored)


DICTIONARY_COLUMNS = ("audio", "speaker", "language", "scene", "question", "speaker_tags", "key")


def _from_arrow(folder: Path, path: Path | None, batch: Any) -> ManifestTable:
    columns: dict[str, Any] = dict(zip(batch.schema.names, batch.columns, strict=True))
    references = columns.pop("references")
    arrays = {"reference_bounds": references.offsets, "reference_indices": references.values}
    arrays |= {name: column for name, column in columns.items() if pa.types.is_primitive(column.type)}
    columns |= {name: array.to_numpy(zero_copy_only=True) for name, array in arrays.items()}
    for name in DICTIONARY_COLUMNS:
        columns[name] = DictionaryColumn(batch[name].indices.to_numpy(zero_copy_only=True), batch[name].dictionary)
    return ManifestTable(folder, path, batch, batch.schema.metadata[b"content"].decode(), **columns)


def _positions(values: Any, value_set: Any) -> Int32Array:
    """The position of each value in `value_set`, below zero if it is not there."""
    return pc.fill_null(pc.index_in(values, value_set=value_set), -1).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _build(folder: Path, store: CodeStore, fingerprint: str) -> Any:
    """Build all columns from the lines of the manifest and the index."""
    parts, utterances = [SCHEMA.empty_table()], iterate_manifest(folder / MANIFEST_FILE)
    while part := [_line(utterance, folder) for utterance in islice(utterances, LINES_PER_BATCH)]:
        parts.append(pa.Table.from_pylist(part, SCHEMA))
    lines = pa.concat_tables(parts)
    if pc.count_distinct(lines["id"]).as_py() < len(lines):
        duplicate = next(entry["values"] for entry in pc.value_counts(lines["id"]).to_pylist() if entry["counts"] > 1)
        problem = f"{folder / MANIFEST_FILE} has several utterances with the id {duplicate}"
        raise DataError(problem, hint="give each a name of its own, and run `myna prepare` again")
    index = _match_index(folder, store, lines)
    lines = lines.append_column("key", index["key"]).append_column("frames", index["frames"])
    if not pc.all(pc.greater(lines["frames"], 0)).as_py():
        lines = lines.filter(pc.greater(lines["frames"], 0))
    shards, offsets = store.locate(lines["key"].combine_chunks())
    if (shards < 0).any():
        missing = lines["id"][int(np.argmax(shards < 0))].as_py()
        raise DataError(f"{folder} holds no codes of {missing}", hint=prepare_command(folder))
    columns = {name: lines[name].combine_chunks() for name in lines.column_names}
    del lines, parts, index  # a million of them are hundreds of megabytes
    content = _content_hash(columns)
    references = columns["references"]
    columns["has_references"] = pc.is_valid(references).cast(pa.uint8())
    counts = pc.fill_null(pc.list_value_length(references), 0).to_numpy(zero_copy_only=False)
    columns["references"] = pa.ListArray.from_arrays(
        pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int32()),
        pa.array(_positions(references.flatten(), columns["id"]), pa.int32()),
    )
    columns |= {name: columns[name].dictionary_encode() for name in DICTIONARY_COLUMNS}
    columns |= {"shard": pa.array(shards), "offset": pa.array(offsets)}
    return code_store.arrow_batch(columns, store.revision, fingerprint=fingerprint, content=content)


SCHEMA = pa.schema(
    {name: pa.string() for name in ("id", "audio", "speaker", "language", "scene", "question", "speaker_tags")}
    | {name: pa.large_string() for name in ("text", "answer", "extras")}
    | {name: pa.float64() for name in ("start", "end")}
    | {name: pa.uint8() for name in ("has_span", "is_target", "is_dialogue")}
    | {"id_hash": pa.uint64(), "references": pa.list_(pa.string())}
)
"""Columns from a manifest line, before the index adds its own."""


def _line(utterance: Utterance, folder: Path) -> dict[str, Any]:
    start, end = code_store.span_bounds(utterance.span)
    extras, references, answer = utterance.extras, utterance.references, utterance.answer
    texts: dict[str, str] = {name: getattr(utterance, name) for name in ("id", "text", "answer", "speaker", "language")}
    texts["scene"] = "" if answer else str(extras.get("scene") or "")
    texts["question"] = str(extras.get("question") or "") if answer else ""
    try:
        "".join(texts.values()).encode()
    except UnicodeEncodeError as error:
        problem = f"{utterance.id!r} holds half a character: {error}"
        raise DataError(problem, hint="mend its line in the manifest") from None
    return texts | {
        "id_hash": string_hash(utterance.id),
        "audio": code_store.relative_audio_path(utterance.audio, folder),
        "start": start,
        "end": math.inf if end is None else end,
        "has_span": int(utterance.span is not None),
        "extras": json.dumps(extras, sort_keys=True) if extras else "",
        "speaker_tags": "" if answer else " ".join(sorted(set(SPEAKER_TAG.findall(utterance.text)))),
        "is_target": int(utterance.is_target),
        "is_dialogue": int(utterance.is_dialogue),
        "references": None if references is None else list(references),
    }


def _match_index(folder: Path, store: CodeStore, lines: Any) -> Any:
    """Find the index entry of each line, with the same path and span. Unlike `prepare`, this does not read audio."""
    index = store.index()
    positions = pc.index_in(lines["id"], value_set=index["id"])
    ids, is_indexed = lines["id"], pc.is_valid(positions).to_numpy()
    index = pa.Table.from_batches([index]).take(pc.fill_null(positions, 0)) if len(index["id"]) else index
    is_same = is_indexed.copy()
    if is_indexed.any():
        for name, default in (("audio", ""), ("start", 0.0), ("end", math.inf)):
            is_same &= pc.equal(pc.fill_null(index[name], default), lines[name]).to_numpy()
    if not is_same.all():
        first = int(np.argmin(is_same))
        change = "has other audio" if is_indexed[first] else "is new"
        problem = f"the utterance {ids[first].as_py()} {change} since {folder} was encoded"
        raise DataError(problem, hint=prepare_command(folder))
    return index


def _content_hash(columns: dict[str, Any]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in ("id", "text", "speaker", "extras", "key"):
        lengths = pc.binary_length(columns[name]).cast(pa.int64())
        digest.update(lengths.to_numpy(zero_copy_only=False).tobytes())
        for start in range(0, len(columns[name]), LINES_PER_BATCH):
            digest.update("".join(columns[name][start : start + LINES_PER_BATCH].to_pylist()).encode())
    return digest.hexdigest()


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
        save_text(folder / DATASET_INFO_FILE, json.dumps(asdict(self), indent=2) + "\n")

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

    def overlaps(self, clips: Sequence[Utterance | None]) -> list[bool]:
        """Tell for each clip whether it overlaps with one of these utterances in the same file."""
        table, found = self.table, []
        names = ["" if clip is None else code_store.relative_audio_path(clip.audio, table.folder) for clip in clips]
        files = table.audio.indices_of(names)
        rows = self.indices[np.isin(table.audio.indices[self.indices], files)]
        rows = rows[np.argsort(table.audio.indices[rows], kind="stable")]
        sorted_files = table.audio.indices[rows]
        for clip, file in zip(clips, files.tolist(), strict=True):
            start, end = code_store.span_bounds(clip.span if clip is not None else None)
            same = rows[np.searchsorted(sorted_files, file, "left") : np.searchsorted(sorted_files, file, "right")]
            is_shared = (table.end[same] > start) & (table.start[same] < (math.inf if end is None else end))
            found.append(bool(is_shared.any()))
        return found

    def keys_among(self, keys: Sequence[str]) -> set[str]:
        """Return the keys that at least one of these utterances has."""
        key = self.table.key
        is_present = np.isin(key.indices_of(keys), key.indices[self.indices])
        return {name for name, present in zip(keys, is_present.tolist(), strict=True) if present}
