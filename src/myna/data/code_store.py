"""Code store: every clip is encoded once (data/encoding.py), and training reads the codes from memory-mapped shards.

    FOLDER/codes/<first 8 of the codec's revision>/00000.arrow ...   codes by key
                                                  /index.arrow       from utterance to key, written last

A key hashes the audio file, the span and the codec's revision, so that only new clips are encoded and another codec
never finds codes that are not its own. Shards are written atomically.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from myna.core.errors import DataError
from myna.core.io import LOCK_FILE, acquire_lock, atomic_write, bytes_hash, file_hash, fsync
from myna.data.codec import Codes
from myna.data.manifest import Span, Utterance

FORMAT = "1"
INDEX_FILE = "index.arrow"
MAX_MAPPED_SHARDS = 1024
"""Maximum number of shards mapped at a time: memory maps are limited, and their pages count as memory of the
process."""


def codes_key(audio_hash: str, span: Span | None, revision: str) -> str:
    """The key of a clip's codes, by the hash of its audio file, its span and the codec's revision."""
    described = json.dumps([audio_hash, *span_bounds(span), revision])
    return hashlib.blake2b(described.encode(), digest_size=16).hexdigest()


def write_index(
    utterances: Sequence[Utterance], keys: Sequence[str], folder: Path, *, revision: str, sample_rate: int
) -> None:
    """Write the index of `utterances` whose codes are stored already, under the given keys: no recording is opened."""
    check_unique_ids(utterances)
    with lock_codes(folder, revision) as codes:
        write_index_file(folder, utterances, keys, stored_frames(codes, revision), revision, sample_rate)


class CodeStore:
    """All codes of one codec in a prepared folder. Opening only lists the shards; each is mapped on first access."""

    def __init__(self, folder: Path, revision: str, shards: dict[int, Path]) -> None:
        self.folder, self.revision, self._shards = folder, revision, shards
        self.codes_folder = codes_folder(folder, revision)
        # The least recently used maps are dropped.
        self._map = lru_cache(MAX_MAPPED_SHARDS)(lambda number: _map(shards[number]))

    @classmethod
    def open(cls, folder: Path, revision: str) -> Self:
        codes = codes_folder(folder, revision)
        if not (codes / INDEX_FILE).is_file():
            problem = "was not encoded to the end with" if codes.is_dir() else "holds no codes of"
            raise DataError(f"{folder} {problem} the codec {revision[:8]}", hint=prepare_command(folder))
        return cls(folder, revision, shard_paths(codes))

    def __reduce__(self) -> tuple[Any, ...]:
        # A worker process maps the files itself instead of receiving their content.
        return CodeStore.open, (self.folder, self.revision)

    def codes(self, shard: int, offset: int, shape: tuple[int, int]) -> Codes:
        """Return the codes of a clip, (frames, codebooks), as a read-only view of the file."""
        with _read_errors(self._shards[shard]):
            return np.frombuffer(self._map(shard), np.uint16, shape[0] * shape[1], offset).reshape(shape)

    def index(self) -> Any:
        """The index as a record batch: `id`, `audio`, `start`, `end`, `key` and `frames` of each utterance."""
        return read_arrow(self.codes_folder / INDEX_FILE, self.revision)

    def locate(self, keys: Any) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Return the shard of each key's codes, negative for a key without codes, and their offset in bytes from the
        beginning of its file. Reads the keys of every shard, and checks every shard."""
        stored, shards, offsets = [pa.array([], pa.string())], [np.empty(0, np.int32)], [np.empty(0, np.int64)]
        for number, path in self._shards.items():
            shard, starts = _read_shard(path, self.revision)
            with _read_errors(path):
                stored.append(pa.array(shard["key"].to_pylist(), pa.string()))  # a view would keep every shard mapped
            shards.append(np.full(len(starts), number, np.int32))
            offsets.append(starts)
        positions = pc.fill_null(pc.index_in(keys, value_set=pa.concat_arrays(stored)), -1)
        # Position -1, for a key that is not stored, is the entry appended last.
        shard_of, offset_of = np.append(np.concatenate(shards), np.int32(-1)), np.append(np.concatenate(offsets), 0)
        selected = positions.to_numpy(zero_copy_only=False)
        return shard_of[selected], offset_of[selected]

    def fingerprint(self) -> str:
        """Fingerprint that changes whenever a location may hold the codes of another utterance."""
        sizes = [(path.name, path.stat().st_size) for path in self._shards.values()]
        return f"{file_hash(self.codes_folder / INDEX_FILE)}-{bytes_hash(json.dumps(sizes).encode())}"


def write_index_file(
    folder: Path,
    utterances: Sequence[Utterance],
    keys: Sequence[str],
    frames: Mapping[str, int],
    revision: str,
    sample_rate: int,
) -> None:
    """Write the index; the caller holds the lock. `frames` are those of all keys that have codes."""
    spans = [span_bounds(one.span) for one in utterances]
    columns = {
        "id": pa.array([one.id for one in utterances], pa.string()),
        "audio": pa.array([relative_audio_path(one.audio, folder) for one in utterances], pa.string()),
        "start": pa.array([start for start, _ in spans], pa.float64()),
        "end": pa.array([end for _, end in spans], pa.float64()),
        "key": pa.array(keys, pa.string()),
        "frames": pa.array([frames.get(key, 0) for key in keys], pa.int32()),
    }
    index = arrow_batch(columns, revision, sample_rate=str(sample_rate))
    write_arrow(folder, codes_folder(folder, revision) / INDEX_FILE, index)


def arrow_batch(columns: dict[str, Any], revision: str, **metadata: str) -> Any:
    """A record batch with the metadata that `read_arrow` checks, and more."""
    return pa.record_batch(columns).replace_schema_metadata({"format": FORMAT, "codec": revision} | metadata)


def write_arrow(folder: Path, path: Path, table: Any) -> None:
    """Write a record batch atomically: after a kill or a power cut the file is complete or absent."""
    with _write_errors(folder):
        with atomic_write(path) as temporary:
            with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_batch(table)
            with temporary.open("r+b") as file:
                os.fsync(file.fileno())
        fsync(path.parent)


def shard_paths(codes: Path) -> dict[int, Path]:
    """Return the shards in a folder of codes by number."""
    return {int(path.stem): path for path in sorted(codes.glob("[0-9]*.arrow"))}


def stored_frames(codes: Path, revision: str) -> dict[str, int]:
    """Return the frames of all codes in a folder of codes by key."""
    frames: dict[str, int] = {}
    for path in shard_paths(codes).values():
        shard, _ = _read_shard(path, revision)
        frames |= zip(shard["key"].to_pylist(), shard["frames"].to_pylist(), strict=True)
    return frames


def _read_shard(path: Path, revision: str) -> tuple[Any, npt.NDArray[np.int64]]:
    """Return the columns of a shard, and the byte of the file at which the codes of each clip begin."""
    with _read_errors(path):
        buffer = _map(path)
        table = _parse_checked(buffer, revision)
        codes, frames = table["codes"], table["frames"].to_numpy(zero_copy_only=True)
        offsets = codes.offsets.to_numpy(zero_copy_only=True)
        if (np.diff(offsets) != frames * table["codebooks"].to_numpy(zero_copy_only=True)).any():
            raise ValueError("frames and codes do not agree")
        values = codes.values.buffers()[1].address - buffer.address if len(frames) else 0
        return table, values + offsets[:-1] * np.dtype(np.uint16).itemsize


def read_arrow(path: Path, revision: str, *, strings: bool = True) -> Any:
    """Read the one record batch of a file, memory-mapped. All of its offsets are checked, so that a damaged file cannot
    crash the process. `strings` also checks that all strings are UTF-8, which reads all of them."""
    with _read_errors(path):
        return _parse_checked(_map(path), revision, strings=strings)


def read_cached_arrow(path: Path, revision: str, metadata: Mapping[str, str], *, strings: bool = True) -> Any:
    """Read a cache file with `read_arrow`; None unless it exists, is intact and has this metadata."""
    if not path.is_file():
        return None
    try:
        batch = read_arrow(path, revision, strings=strings)
    except DataError:
        return None
    wanted = {name.encode(): value.encode() for name, value in metadata.items()}
    return batch if wanted.items() <= batch.schema.metadata.items() else None


def _map(path: Path) -> Any:
    """Map a whole file into memory. The map outlives the closed file, so that it costs no descriptor."""
    with pa.memory_map(str(path)) as file:
        return file.read_buffer()


def _parse_checked(buffer: Any, revision: str, *, strings: bool = True) -> Any:
    table = pa.ipc.open_file(pa.BufferReader(buffer)).get_batch(0)
    metadata = {name.decode(): value.decode() for name, value in table.schema.metadata.items()}
    if (metadata["format"], metadata["codec"]) != (FORMAT, revision):
        raise ValueError(f"it is of format {metadata['format']} and codec {metadata['codec']}")
    for column in table.columns:
        (column if strings else _as_binary(column)).validate(full=True)
    return table


def _as_binary(column: Any) -> Any:
    """Convert a string column to bytes, which need not be UTF-8."""
    if pa.types.is_dictionary(column.type):
        return pa.DictionaryArray.from_arrays(column.indices, _as_binary(column.dictionary), safe=True)
    binary_type = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
    return column.view(binary_type[column.type]) if column.type in binary_type else column


@contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, KeyError, AttributeError) as error:
        hint = f"rm {path}; then run `myna prepare` again, which makes it anew"
        raise DataError(f"{path} cannot be used: {error}", hint=hint) from error


@contextmanager
def _write_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot write codes into {folder}: {error.strerror or error}",
            hint="make room or choose a folder you may write to; finished shards stay, so run the same command again",
        ) from error


@contextmanager
def lock_codes(folder: Path, revision: str) -> Iterator[Path]:
    """Lock the folder of codes for one writer until the process ends, and remove half-written files of a killed run."""
    codes = codes_folder(folder, revision)
    with _write_errors(folder):
        codes.parent.mkdir(parents=True, exist_ok=True)
        held = DataError(f"another `myna prepare` is writing into {folder}", hint="wait until it is done, or stop it")
        lock = acquire_lock(codes.parent / LOCK_FILE, lambda: held)
    with lock:
        with _write_errors(folder):
            codes.mkdir(exist_ok=True)
            for leftover in codes.glob(".*.tmp"):
                leftover.unlink()
            fsync(codes.parent)
        yield codes


def check_unique_ids(utterances: Sequence[Utterance]) -> None:
    [(id, uses)] = Counter(utterance.id for utterance in utterances).most_common(1) or [("", 0)]
    if uses > 1:
        raise DataError(f"two utterances have the id {id}", hint="give each a name of its own")


def codes_folder(folder: Path, revision: str) -> Path:
    return folder / "codes" / revision[:8]


def relative_audio_path(audio: Path, folder: Path) -> str:
    """Path of audio: relative inside the folder, so that the folder can be moved as a whole; absolute elsewhere."""
    # Without resolving links, which would make two names of one folder differ.
    return os.path.normpath(audio.absolute()).removeprefix(f"{os.path.normpath(folder.absolute())}/")


def span_bounds(span: Span | None) -> tuple[float, float | None]:
    if span is None:
        return 0.0, None
    return float(span.start), None if span.end is None else float(span.end)


def prepare_command(folder: Path) -> str:
    """Return the command that prepares a folder, or recordings that lie in it, which must stay as they are."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if names and not names & {"manifest.jsonl", "codes"}:
        return f"if it holds recordings: myna prepare {folder} --out data/{folder.name} --model MODEL"
    return f"myna prepare SOURCE --out {folder} --model MODEL"
