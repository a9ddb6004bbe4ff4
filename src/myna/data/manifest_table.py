"""The manifest in columns, mapped from disk: what training asks of a million utterances at once.

    FOLDER/codes/<first 8 of the codec's revision>/utterances.arrow      a row for every utterance that has codes

It is made of `manifest.jsonl`, the index and the shards by whoever opens the folder first, as a rule `myna prepare`,
and bears their fingerprint: once one of them has changed it is made anew, so nothing is trained that they do not say.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from myna.data.code_store import FORMAT as CODES_FORMAT
from myna.data.code_store import CodeStore, edges, place_of, prepare_again, publish, read_arrow
from myna.data.hash_rng import Names, hash_of
from myna.data.manifest import iterate_manifest, no_manifest
from myna.data.utterance import Span, Utterance
from myna.errors import DataError
from myna.io import file_hash

FORMAT = "2"
MANIFEST, TABLE = "manifest.jsonl", "utterances.arrow"
LINES_AT_ONCE = 1 << 15
"""Lines of a manifest that are held as Python objects at a time."""
TAG = re.compile(r"\[SPEAKER(\d+)\]")

Rows = npt.NDArray[np.int64]
"""Numbers of utterances."""
Integers = npt.NDArray[np.int32]


class Numbered(NamedTuple):
    """A column of few or equal values: equal numbers are equal values."""

    numbers: Integers
    values: Any

    def at(self, row: int) -> str:
        return str(self.values[int(self.numbers[row])].as_py())

    def numbers_of(self, values: Sequence[str]) -> Integers:
        """Below zero for a value that does not occur."""
        found = pc.index_in(pa.array(values, pa.string()), value_set=self.values)
        numbers: Integers = pc.fill_null(found, -1).to_numpy(zero_copy_only=False)
        return numbers


@dataclass(frozen=True, slots=True, eq=False)
class ManifestTable:
    folder: Path
    path: Path | None
    """The file that holds it; None where none could be written."""
    columns: Any
    """All of it as Arrow has it."""
    identity: str
    """Changes with anything that conversations are made of, and not with where files lie."""
    id: Any
    name: Names
    """The id as a number, for dice."""
    text: Any
    answer: Any
    """What a listener is to say of the clip; empty where the text is to be spoken."""
    extras: Any
    audio: Numbered
    start: npt.NDArray[np.float64]
    end: npt.NDArray[np.float64]
    """Infinite where the file's end is meant."""
    has_span: npt.NDArray[np.uint8]
    speaker: Numbered
    language: Numbered
    scene: Numbered
    """The room or the manner; of a clip that is heard, the question."""
    tags: Numbered
    """The speakers that a text has tags for, as their numbers in order: "0 1"."""
    is_target: npt.NDArray[np.uint8]
    names_references: npt.NDArray[np.uint8]
    reference_bounds: Integers
    """(utterances + 1,): where an utterance's own list of references begins and ends in `reference_rows`."""
    reference_rows: Integers
    """Below zero for a reference that has no codes."""
    key: Numbered
    shard: Integers
    offset: npt.NDArray[np.int64]
    frames: Integers

    def __len__(self) -> int:
        return len(self.frames)

    def __reduce__(self) -> tuple[Any, ...]:
        # A loader's worker maps the file itself, rather than being sent what it holds.
        if self.path is None:
            return _table, (self.folder, self.path, self.columns)
        label = self.columns.schema.metadata
        return _mapped, (self.folder, self.path, label[b"codec"].decode(), label[b"fingerprint"].decode())

    @property
    def is_heard(self) -> npt.NDArray[np.bool_]:
        """Which clips are to be answered, and neither spoken nor anybody's voice."""
        heard: npt.NDArray[np.bool_] = pc.not_equal(self.answer, "").to_numpy(zero_copy_only=False)
        return heard

    def written(self, rows: slice) -> list[str]:
        """The text that each sequence holds: what is spoken, or the answer to what is heard."""
        return [
            answer or text
            for answer, text in zip(*(c[rows].to_pylist() for c in (self.answer, self.text)), strict=True)
        ]

    def utterance(self, row: int) -> Utterance:
        """One row as everyone else knows it."""
        end, extras = float(self.end[row]), self.extras[row].as_py()
        return Utterance(
            id=self.id[row].as_py(),
            audio=self.folder / self.audio.at(row),
            text=self.text[row].as_py(),
            speaker=self.speaker.at(row),
            language=self.language.at(row),
            span=Span(float(self.start[row]), None if math.isinf(end) else end) if self.has_span[row] else None,
            extras=json.loads(extras) if extras else {},
        )


def open_table(folder: Path, store: CodeStore) -> tuple[ManifestTable, tuple[str, ...]]:
    """The table, and what there is to say about how it was come by."""
    manifest, path = folder / MANIFEST, store.home / TABLE
    try:
        fingerprint = f"{FORMAT}-{file_hash(manifest)}-{store.fingerprint()}"
    except (FileNotFoundError, IsADirectoryError):
        raise no_manifest(manifest) from None
    kept = _kept(path, store.revision, fingerprint)
    if kept is not None:
        return _table(folder, path, kept), ()
    said = f"{manifest} or its codes have changed, and were read anew" if path.exists() else ""
    made = _make(folder, store, fingerprint)
    try:
        publish(folder, path, made)
    except DataError as error:
        said = f"{manifest} has to be read line by line every time: {error.what}"
        return _table(folder, None, made), (said,)
    return _table(folder, path, made), (said,) if said else ()


def _mapped(folder: Path, path: Path, revision: str, fingerprint: str) -> ManifestTable:
    """The very table that somebody else has opened."""
    kept = _kept(path, revision, fingerprint)
    if kept is None:
        raise DataError(f"{path} was changed or removed while it was in use", hint="start again, once nobody writes it")
    return _table(folder, path, kept)


def _kept(path: Path, revision: str, fingerprint: str) -> Any:
    """The table on disk if it is whole and up to date."""
    if not path.is_file():
        return None
    try:
        batch = read_arrow(path, revision, strings=False)
    except DataError:
        return None
    return batch if batch.schema.metadata.get(b"fingerprint") == fingerprint.encode() else None


def _table(folder: Path, path: Path | None, batch: Any) -> ManifestTable:
    def numbers(name: str) -> Any:
        return batch[name].to_numpy(zero_copy_only=True)

    def numbered(name: str) -> Any:
        return Numbered(batch[name].indices.to_numpy(zero_copy_only=True), batch[name].dictionary)

    references = batch["references"]
    return ManifestTable(
        folder=folder,
        path=path,
        columns=batch,
        identity=batch.schema.metadata[b"identity"].decode(),
        reference_bounds=references.offsets.to_numpy(zero_copy_only=True),
        reference_rows=references.values.to_numpy(zero_copy_only=True),
        **{name: batch[name] for name in ("id", "text", "answer", "extras")},
        **{name: numbered(name) for name in ("audio", "speaker", "language", "scene", "tags", "key")},
        **{name: numbers(name) for name in ("name", "start", "end", "has_span", "is_target", "names_references")},
        **{name: numbers(name) for name in ("shard", "offset", "frames")},
    )


def _make(folder: Path, store: CodeStore, fingerprint: str) -> Any:
    """All columns, from the lines of the manifest and what the index says of them."""
    lines = pa.concat_tables(_lines(folder))
    _refuse_twins(folder, lines["id"])
    index = _of_index(folder, store, lines)
    lines = lines.append_column("key", index["key"]).append_column("frames", index["frames"])
    if not pc.all(pc.greater(lines["frames"], 0)).as_py():
        lines = lines.filter(pc.greater(lines["frames"], 0))
    places = store.places(lines["key"].combine_chunks())
    if (places.shard < 0).any():
        lost = lines["id"][int(np.argmax(places.shard < 0))].as_py()
        raise DataError(f"{folder} holds no codes of {lost}", hint=prepare_again(folder))
    columns = {name: lines[name].combine_chunks() for name in lines.column_names}
    del lines, index  # a million of them are hundreds of megabytes
    identity = _identity(columns)
    named = columns["references"]
    rows = pc.fill_null(pc.index_in(named.flatten(), value_set=columns["id"]), -1)
    columns["names_references"] = pc.is_valid(named).cast(pa.uint8())
    lengths = pc.fill_null(pc.list_value_length(named), 0).to_numpy(zero_copy_only=False)
    columns["references"] = pa.ListArray.from_arrays(
        pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32()), rows.cast(pa.int32())
    )
    for name in ("audio", "speaker", "language", "scene", "tags", "key"):
        columns[name] = columns[name].dictionary_encode()
    columns |= {"shard": pa.array(places.shard), "offset": pa.array(places.offset)}
    label = {"format": CODES_FORMAT, "codec": store.revision, "fingerprint": fingerprint, "identity": identity}
    return pa.record_batch(columns).replace_schema_metadata(label)


SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("name", pa.uint64()),
        ("audio", pa.string()),
        ("start", pa.float64()),
        ("end", pa.float64()),
        ("has_span", pa.uint8()),
        ("text", pa.large_string()),
        ("answer", pa.large_string()),
        ("speaker", pa.string()),
        ("language", pa.string()),
        ("extras", pa.large_string()),
        ("scene", pa.string()),
        ("tags", pa.string()),
        ("is_target", pa.uint8()),
        ("references", pa.list_(pa.string())),
    ]
)
"""What a line of the manifest says. What the index knows comes beside it."""


def _lines(folder: Path) -> Iterator[Any]:
    """The manifest, as tables of many lines each."""
    yield SCHEMA.empty_table()
    utterances = iterate_manifest(folder / MANIFEST)
    while part := [_line(utterance, folder) for utterance in islice(utterances, LINES_AT_ONCE)]:
        yield pa.Table.from_pylist(part, SCHEMA)


def _line(utterance: Utterance, folder: Path) -> dict[str, Any]:
    start, end = edges(utterance.span)
    extras, references = utterance.extras, utterance.references
    answer = utterance.answer
    scene = str(extras.get("question" if answer else "scene") or "")
    try:
        "".join((utterance.id, utterance.text, utterance.speaker, utterance.language, scene, answer)).encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{utterance.id!r} holds half a character: {error}", hint="mend its line in the manifest"
        ) from None
    return {
        "id": utterance.id,
        "name": hash_of(utterance.id),
        "audio": place_of(utterance.audio, folder),
        "start": start,
        "end": math.inf if end is None else end,
        "has_span": int(utterance.span is not None),
        "text": utterance.text,
        "answer": answer,
        "speaker": utterance.speaker,
        "language": utterance.language,
        "extras": json.dumps(extras, sort_keys=True) if extras else "",
        "scene": scene,
        "tags": "" if answer else " ".join(sorted(set(TAG.findall(utterance.text)))),
        "is_target": int(utterance.is_target),
        "references": None if references is None else list(references),
    }


def _refuse_twins(folder: Path, ids: Any) -> None:
    if pc.count_distinct(ids).as_py() == len(ids):
        return
    twin = next(entry["values"] for entry in pc.value_counts(ids).to_pylist() if entry["counts"] > 1)
    raise DataError(
        f"{folder / MANIFEST} has several utterances with the id {twin}",
        hint="give each a name of its own, and run `myna prepare` again",
    )


def _of_index(folder: Path, store: CodeStore, lines: Any) -> Any:
    """The index's row for each line, which must be of the same sound. No audio is read: that a file was changed in
    place is for `prepare` to find."""
    index = store.index()
    at = pc.index_in(lines["id"], value_set=index["id"])
    ids, known = lines["id"], pc.is_valid(at).to_numpy()
    index = pa.Table.from_batches([index]).take(pc.fill_null(at, 0)) if len(index["id"]) else index
    same = known.copy()
    if known.any():
        same &= pc.equal(index["audio"], lines["audio"]).to_numpy()
        same &= pc.equal(index["start"], lines["start"]).to_numpy()
        same &= pc.equal(pc.fill_null(index["end"], math.inf), lines["end"]).to_numpy()
    if not same.all():
        first = int(np.argmin(same))
        change = "has other audio" if known[first] else "is new"
        raise DataError(
            f"the utterance {ids[first].as_py()} {change} since {folder} was encoded", hint=prepare_again(folder)
        )
    return index


def _identity(columns: dict[str, Any]) -> str:
    whole = hashlib.blake2b(digest_size=16)
    for name in ("id", "text", "speaker", "extras", "key"):
        lengths = pc.binary_length(columns[name]).cast(pa.int64())
        whole.update(lengths.to_numpy(zero_copy_only=False).tobytes())
        for start in range(0, len(columns[name]), LINES_AT_ONCE):
            whole.update("".join(columns[name][start : start + LINES_AT_ONCE].to_pylist()).encode())
    return whole.hexdigest()
