"""Manifest table: the manifest in columns, memory-mapped, for array operations over a million utterances.

    FOLDER/codes/<first 8 of the codec's revision>/utterances.arrow      a line for every utterance that has codes

It is built from `manifest.jsonl`, the index and the shards when the folder is first opened, as a rule by
`myna prepare`, and stores their fingerprint: once one of them has changed it is built anew.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from myna.core.errors import DataError
from myna.core.io import file_hash, string_hash
from myna.data import code_store
from myna.data.code_store import CodeStore, prepare_command, read_cached_arrow, write_arrow
from myna.data.manifest import SPEAKER_TAG, Span, Utterance, iterate_manifest, missing_manifest_error

FORMAT = "4"
MANIFEST_FILE, TABLE_FILE = "manifest.jsonl", "utterances.arrow"
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
        has_answer: npt.NDArray[np.bool_] = pc.not_equal(self.answer, "").to_numpy(zero_copy_only=False)
        return has_answer

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
        fingerprint = f"{FORMAT}-{file_hash(manifest)}-{store.fingerprint()}"
    except (FileNotFoundError, IsADirectoryError):
        raise missing_manifest_error(manifest) from None
    stored = read_cached_arrow(path, store.revision, {"fingerprint": fingerprint}, strings=False)
    if stored is not None:
        return _from_arrow(folder, path, stored), ()
    note = f"{manifest} or its codes have changed, and were read anew" if path.exists() else ""
    columns = _build(folder, store, fingerprint)
    try:
        write_arrow(folder, path, columns)
    except DataError as error:
        note = f"{manifest} has to be read line by line every time: {error.what}"
        return _from_arrow(folder, None, columns), (note,)
    return _from_arrow(folder, path, columns), (note,) if note else ()


def _reopen(folder: Path, path: Path, revision: str, fingerprint: str) -> ManifestTable:
    stored = read_cached_arrow(path, revision, {"fingerprint": fingerprint}, strings=False)
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
    positions: Int32Array = pc.fill_null(pc.index_in(values, value_set=value_set), -1).to_numpy(zero_copy_only=False)
    return positions


def _build(folder: Path, store: CodeStore, fingerprint: str) -> Any:
    """Build all columns from the lines of the manifest and the index."""
    lines = pa.concat_tables(_read_lines(folder))
    _check_unique_ids(folder, lines["id"])
    index = _match_index(folder, store, lines)
    lines = lines.append_column("key", index["key"]).append_column("frames", index["frames"])
    if not pc.all(pc.greater(lines["frames"], 0)).as_py():
        lines = lines.filter(pc.greater(lines["frames"], 0))
    location = store.locate(lines["key"].combine_chunks())
    if (location.shard < 0).any():
        missing = lines["id"][int(np.argmax(location.shard < 0))].as_py()
        raise DataError(f"{folder} holds no codes of {missing}", hint=prepare_command(folder))
    columns = {name: lines[name].combine_chunks() for name in lines.column_names}
    del lines, index  # a million of them are hundreds of megabytes
    content = _content_hash(columns)
    references = columns["references"]
    columns["has_references"] = pc.is_valid(references).cast(pa.uint8())
    counts = pc.fill_null(pc.list_value_length(references), 0).to_numpy(zero_copy_only=False)
    columns["references"] = pa.ListArray.from_arrays(
        pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int32()),
        pa.array(_positions(references.flatten(), columns["id"]), pa.int32()),
    )
    columns |= {name: columns[name].dictionary_encode() for name in DICTIONARY_COLUMNS}
    columns |= {"shard": pa.array(location.shard), "offset": pa.array(location.offset)}
    return code_store.arrow_batch(columns, store.revision, fingerprint=fingerprint, content=content)


SCHEMA = pa.schema(
    {name: pa.string() for name in ("id", "audio", "speaker", "language", "scene", "question", "speaker_tags")}
    | {name: pa.large_string() for name in ("text", "answer", "extras")}
    | {name: pa.float64() for name in ("start", "end")}
    | {name: pa.uint8() for name in ("has_span", "is_target", "is_dialogue")}
    | {"id_hash": pa.uint64(), "references": pa.list_(pa.string())}
)
"""Columns from a manifest line, before the index adds its own."""


def _read_lines(folder: Path) -> Iterator[Any]:
    yield SCHEMA.empty_table()
    utterances = iterate_manifest(folder / MANIFEST_FILE)
    while part := [_line(utterance, folder) for utterance in islice(utterances, LINES_PER_BATCH)]:
        yield pa.Table.from_pylist(part, SCHEMA)


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


def _check_unique_ids(folder: Path, ids: Any) -> None:
    if pc.count_distinct(ids).as_py() == len(ids):
        return
    duplicate = next(entry["values"] for entry in pc.value_counts(ids).to_pylist() if entry["counts"] > 1)
    problem = f"{folder / MANIFEST_FILE} has several utterances with the id {duplicate}"
    raise DataError(problem, hint="give each a name of its own, and run `myna prepare` again")


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
