"""The code store: every clip goes through the codec once, and training reads the codes from memory-mapped shards.

    FOLDER/codes/<first 8 of the codec's revision>/00000.arrow ...   codes by key
                                                  /index.arrow       from utterance to key, written last

A key hashes the audio file, the span and the codec's revision: what is known is skipped, and another codec misses
cleanly. Shards are cut in manifest order and appear whole or not at all. Killed at any moment, `encode_corpus` loses at
most the shard in flight, and run again it leaves the same bytes as if it had never been disturbed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from myna.audio.files import probe, read
from myna.data.codec import Codes, Encoder, Samples, Say
from myna.data.utterance import Span, Utterance
from myna.errors import AudioError, DataError
from myna.io import bytes_hash, file_hash, replacing

FORMAT = "1"
INDEX = "index.arrow"
READERS = min(8, os.cpu_count() or 1)
SHARDS_MAPPED = 1024
"""Shards that are mapped at a time: a process may have only so many maps, and what it reads in them counts as its
own memory."""
A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True, slots=True)
class EncodeProgress:
    """How far the encoding is, of what the store did not hold already."""

    clips: int
    total_clips: int
    seconds: float
    """Seconds of audio."""
    total_seconds: float
    elapsed: float

    @property
    def pace(self) -> float:
        """Seconds of audio per second, which is hours per hour."""
        return self.seconds / self.elapsed if self.elapsed else 0.0

    @property
    def remaining(self) -> float | None:
        """Seconds to wait at this pace, once there is one."""
        return max(0.0, self.total_seconds - self.seconds) / self.pace if self.pace else None


@dataclass(frozen=True, slots=True)
class EncodeReport:
    utterances: int
    """Utterances that now have codes."""
    encoded: int
    """Clips encoded in this run; the other codes were there."""
    seconds: float
    """Seconds of audio encoded in this run."""
    elapsed: float
    too_short: tuple[str, ...]
    """Ids of utterances shorter than one frame, which have no codes."""


class PendingClip(NamedTuple):
    """A clip on its way to the codec, its samples cut to whole frames."""

    key: str
    text: str
    frames: int
    samples: Samples


def utterance_key(utterance: Utterance, revision: str) -> str:
    """Under what an utterance's codes are stored. Reads the whole audio file, which `CodeStore.key` does not."""
    return clip_key(file_hash(utterance.audio), utterance.span, revision)


def clip_key(audio_hash: str, span: Span | None, revision: str) -> str:
    described = json.dumps([audio_hash, *edges(span), revision])
    return hashlib.blake2b(described.encode(), digest_size=16).hexdigest()


def encode_corpus(
    utterances: Iterable[Utterance],
    codec: Encoder,
    folder: Path,
    *,
    shard_seconds: float = 600.0,
    batch_seconds: float = 60.0,
    on_progress: Callable[[EncodeProgress], None] | None = None,
    on_notice: Say = print,
) -> EncodeReport:
    """Bring the store up to date: encode what is new, then write the index of `utterances`.

    Longer shards find more clips of similar length to encode together; shorter ones lose less to a kill. A shard is
    always encoded as a whole, so that it does not matter to any clip where a run was stopped.
    """
    utterances = list(utterances)
    _refuse_twins(utterances)
    home = _home(folder, codec.revision)
    with _locked(folder), ThreadPoolExecutor(READERS) as pool:
        _tidy(home)
        shards = {number: _read_shard(path, codec.revision) for number, path in _shard_paths(home).items()}
        frames = {
            key: count
            for shard in shards.values()
            for key, count in zip(shard.keys.to_pylist(), shard.frames.tolist(), strict=True)
        }
        owners = {utterance.audio: utterance for utterance in utterances}
        recordings = dict(zip(owners, _ahead(pool, _recording, owners.values()), strict=True))
        keys = [clip_key(recordings[u.audio].hash, u.span, codec.revision) for u in utterances]
        fresh = {key: u for key, u in zip(keys, utterances, strict=True) if key not in frames}
        seconds_of = {key: _seconds(u.span, recordings[u.audio].seconds) for key, u in fresh.items()}
        total_seconds = sum(seconds_of.values())

        began, done, encoded, encoded_frames = time.monotonic(), 0, 0, 0
        free = (number for number in count() if number not in shards)
        # The next shard is read while one is encoded.
        ahead = _ahead(pool, partial(_load, codec), fresh.items(), lambda item: seconds_of[item[0]], shard_seconds)
        for clips in cut(ahead, shard_seconds * codec.frame_rate):
            shard = [clip for clip in clips if clip.frames]
            done += len(clips) - len(shard)
            codes: dict[int, Codes] = {}
            for places, batch in codec.encode_all([clip.samples for clip in shard], batch_seconds, on_notice):
                codes |= zip(places, batch, strict=True)
                done, encoded_frames = done + len(batch), encoded_frames + sum(map(len, batch))
                if on_progress is not None:
                    seconds, elapsed = encoded_frames / codec.frame_rate, time.monotonic() - began
                    on_progress(EncodeProgress(done, len(fresh), seconds, total_seconds, elapsed))
            if shard:
                table = _shard_table(shard, [codes[place] for place in range(len(shard))], codec)
                publish(folder, home / f"{next(free):05d}.arrow", table)
                frames |= {clip.key: clip.frames for clip in shard}
                encoded += len(shard)
        publish(folder, home / INDEX, _index_table(utterances, keys, frames, codec, folder))

    covered = [key in frames for key in keys]
    return EncodeReport(
        utterances=sum(covered),
        encoded=encoded,
        seconds=encoded_frames / codec.frame_rate,
        elapsed=time.monotonic() - began,
        too_short=tuple(u.id for u, has_codes in zip(utterances, covered, strict=True) if not has_codes),
    )


def index_corpus(
    utterances: Iterable[Utterance], keys: Mapping[tuple[Path, Span | None], str], codec: Encoder, folder: Path
) -> None:
    """Write the index of `utterances` whose codes are there already, under known keys: no recording is opened."""
    utterances = list(utterances)
    _refuse_twins(utterances)
    home = _home(folder, codec.revision)
    with _locked(folder):
        _tidy(home)
        frames: dict[str, int] = {}
        for path in _shard_paths(home).values():
            shard = _read_shard(path, codec.revision)
            frames |= zip(shard.keys.to_pylist(), shard.frames.tolist(), strict=True)
        chosen = [keys[utterance.audio, utterance.span] for utterance in utterances]
        publish(folder, home / INDEX, _index_table(utterances, chosen, frames, codec, folder))


def cut(clips: Iterable[PendingClip], limit: float) -> Iterator[list[PendingClip]]:
    """Shards of `limit` frames or a little more, the last one with what is left.

    Each depends only on the clips since the cut before it, so that a run continued after any shard cuts as before.
    """
    shard: list[PendingClip] = []
    filled = 0
    for clip in clips:
        shard.append(clip)
        filled += clip.frames
        if filled >= limit:
            yield shard
            shard, filled = [], 0
    if shard:
        yield shard


class CodeLocation(NamedTuple):
    """Where codes lie, for many clips."""

    shard: npt.NDArray[np.int32]
    """Below zero for a clip that is nowhere."""
    offset: npt.NDArray[np.int64]
    """In bytes, from the beginning of the file."""


class CodeStore:
    """All codes of one codec in a prepared folder. Opening lists the shards; one is mapped when it is looked at."""

    def __init__(self, folder: Path, revision: str, shards: dict[int, Path]) -> None:
        self.folder, self.revision, self._shards = folder, revision, shards
        # Those that were not looked at for long are let go.
        self._map = lru_cache(SHARDS_MAPPED)(lambda number: _map(shards[number]))

    @classmethod
    def open(cls, folder: Path, revision: str) -> CodeStore:
        home = _home(folder, revision)
        if not (home / INDEX).is_file():
            finished = "holds no codes of" if not home.is_dir() else "was not encoded to the end with"
            raise DataError(f"{folder} {finished} the codec {revision[:8]}", hint=prepare_again(folder))
        return cls(folder, revision, _shard_paths(home))

    def __reduce__(self) -> tuple[Any, ...]:
        # A loader's worker maps the files itself, rather than being sent what they hold.
        return CodeStore.open, (self.folder, self.revision)

    @property
    def home(self) -> Path:
        return _home(self.folder, self.revision)

    def codes(self, shard: int, offset: int, shape: tuple[int, int]) -> Codes:
        """(frames, codebooks), a read-only view of the file."""
        with _intact(self._shards[shard]):
            return np.frombuffer(self._map(shard), np.uint16, shape[0] * shape[1], offset).reshape(shape)

    def index(self) -> Any:
        """What was encoded, one row for each utterance: `id`, `audio`, `start`, `end`, `key` and `frames`."""
        return read_arrow(self.home / INDEX, self.revision)

    def places(self, keys: Any) -> CodeLocation:
        """Where the codes of each key lie. Reads every shard's keys, and checks every shard."""
        held, shards, offsets = [pa.array([], pa.string())], [np.empty(0, np.int32)], [np.empty(0, np.int64)]
        for number, path in self._shards.items():
            shard = _read_shard(path, self.revision)
            with _intact(path):
                held.append(pa.array(shard.keys.to_pylist(), pa.string()))  # copied, or every shard would stay mapped
            shards.append(np.full(len(shard.keys), number, np.int32))
            offsets.append(shard.starts)
        found = pc.fill_null(pc.index_in(keys, value_set=pa.concat_arrays(held)), -1).to_numpy(zero_copy_only=False)
        # What was not found is the last of all, which is nowhere.
        return CodeLocation(
            np.append(np.concatenate(shards), np.int32(-1))[found], np.append(np.concatenate(offsets), 0)[found]
        )

    def fingerprint(self) -> str:
        """Changes whenever another utterance, sound or shard may lie behind a place."""
        sizes = [(path.name, path.stat().st_size) for path in self._shards.values()]
        return f"{file_hash(self.home / INDEX)}-{bytes_hash(json.dumps(sizes).encode())}"


class _Shard(NamedTuple):
    keys: Any
    frames: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int64]
    """Where codes begin, in bytes from the beginning of the file."""


class _Recording(NamedTuple):
    hash: str
    seconds: float


def _recording(utterance: Utterance) -> _Recording:
    with _named(utterance):
        return _Recording(hash=file_hash(utterance.audio), seconds=probe(utterance.audio).seconds)


def _load(codec: Encoder, item: tuple[str, Utterance]) -> PendingClip:
    key, utterance = item
    with _named(utterance):
        samples = read(utterance.audio, sample_rate=codec.sample_rate, span=edges(utterance.span))
    frames = len(samples) // codec.hop
    return PendingClip(key, utterance.text, frames, samples[: frames * codec.hop])


def _shard_table(shard: Sequence[PendingClip], codes: Sequence[Codes], codec: Encoder) -> Any:
    assert all(one.shape == (clip.frames, codec.codebooks) for clip, one in zip(shard, codes, strict=True))
    offsets = np.cumsum([0, *(one.size for one in codes)], dtype=np.int64)
    values = np.concatenate([one.reshape(-1) for one in codes])
    columns = {
        "key": pa.array([clip.key for clip in shard], pa.string()),
        "codes": pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values)),
        "frames": pa.array([clip.frames for clip in shard], pa.int32()),
        "codebooks": pa.array([codec.codebooks] * len(shard), pa.int32()),
        "frame_rate": pa.array([codec.frame_rate] * len(shard), pa.float64()),
        "seconds": pa.array([clip.frames / codec.frame_rate for clip in shard], pa.float64()),
        "text": pa.array([clip.text for clip in shard], pa.string()),
    }
    return pa.record_batch(columns).replace_schema_metadata(_label(codec))


def _index_table(
    utterances: Sequence[Utterance], keys: Sequence[str], frames: dict[str, int], codec: Encoder, folder: Path
) -> Any:
    spans = [edges(utterance.span) for utterance in utterances]
    columns = {
        "id": pa.array([utterance.id for utterance in utterances], pa.string()),
        "audio": pa.array([place_of(utterance.audio, folder) for utterance in utterances], pa.string()),
        "start": pa.array([start for start, _ in spans], pa.float64()),
        "end": pa.array([end for _, end in spans], pa.float64()),
        "key": pa.array(keys, pa.string()),
        "frames": pa.array([frames.get(key, 0) for key in keys], pa.int32()),
    }
    return pa.record_batch(columns).replace_schema_metadata(_label(codec))


def _label(codec: Encoder) -> dict[str, str]:
    return {"format": FORMAT, "codec": codec.revision, "sample_rate": str(codec.sample_rate)}


def publish(folder: Path, path: Path, table: Any) -> None:
    """Write a file that survives a kill or a power cut whole, or does not appear."""
    with _writing(folder):
        with replacing(path) as temporary:
            with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_batch(table)
            with temporary.open("r+b") as file:
                os.fsync(file.fileno())
        _sync(path.parent)


def _shard_paths(home: Path) -> dict[int, Path]:
    return {int(path.stem): path for path in sorted(home.glob("[0-9]*.arrow"))}


def _read_shard(path: Path, revision: str) -> _Shard:
    with _intact(path):
        whole = _map(path)
        table = _checked(whole, revision)
        codes, frames = table["codes"], table["frames"].to_numpy(zero_copy_only=True)
        offsets = codes.offsets.to_numpy(zero_copy_only=True)
        if (np.diff(offsets) != frames * table["codebooks"].to_numpy(zero_copy_only=True)).any():
            raise ValueError("frames and codes do not agree")
        values = codes.values.buffers()[1].address - whole.address if len(frames) else 0
        return _Shard(table["key"], frames, values + offsets[:-1] * np.dtype(np.uint16).itemsize)


def read_arrow(path: Path, revision: str, *, strings: bool = True) -> Any:
    """A file's one record batch, still on disk.

    Everything in it is checked to lie within its bounds, so that no damage can crash us. To check that `strings` are
    UTF-8 as well, all of them are read.
    """
    with _intact(path):
        return _checked(_map(path), revision, strings=strings)


def _map(path: Path) -> Any:
    """A whole file's bytes, read when they are looked at. The mapping outlives the closed file, so that it costs no
    descriptor."""
    with pa.memory_map(str(path)) as file:
        return file.read_buffer()


def _checked(whole: Any, revision: str, *, strings: bool = True) -> Any:
    table = pa.ipc.open_file(pa.BufferReader(whole)).get_batch(0)
    label = {name.decode(): value.decode() for name, value in table.schema.metadata.items()}
    if (label["format"], label["codec"]) != (FORMAT, revision):
        raise ValueError(f"it is of format {label['format']} and codec {label['codec']}")
    for column in table.columns:
        (column if strings else _without_strings(column)).validate(full=True)
    return table


def _without_strings(column: Any) -> Any:
    """The same column, with bytes that need not be UTF-8."""
    if pa.types.is_dictionary(column.type):
        return pa.DictionaryArray.from_arrays(column.indices, _without_strings(column.dictionary), safe=True)
    as_bytes = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
    return column.view(as_bytes[column.type]) if column.type in as_bytes else column


@contextmanager
def _intact(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, KeyError, AttributeError) as error:
        raise DataError(
            f"{path} cannot be used: {error}",
            hint=f"rm {path}; then run `myna prepare` again, which makes it anew",
        ) from error


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot write codes into {folder}: {error.strerror or error}",
            hint="make room or choose a folder you may write to; finished shards stay, so run the same command again",
        ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One `prepare` at a time. The kernel drops the lock with its process, however that ends; the file stays."""
    with _writing(folder):
        (folder / "codes").mkdir(parents=True, exist_ok=True)
        file = (folder / "codes" / ".lock").open("a")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                f"another `myna prepare` is writing into {folder}", hint="wait until it is done, or stop it"
            ) from None
        yield


def _tidy(home: Path) -> None:
    """Make the folder, and remove what a killed run left half-written."""
    with _writing(home.parent.parent):
        home.mkdir(exist_ok=True)
        for leftover in home.glob(".*.tmp"):
            leftover.unlink()
        _sync(home.parent)


def _sync(folder: Path) -> None:
    """A rename is on disk once its directory is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _ahead(
    pool: ThreadPoolExecutor,
    work: Callable[[A], B],
    items: Iterable[A],
    size: Callable[[A], float] = lambda _item: 0.0,
    room: float = 0.0,
) -> Iterator[B]:
    """Results in order, worked out in advance: readers need not wait for the codec, and memory stays bounded.

    In advance are a few items, and more of them up to `room` by their `size`.
    """
    waiting: deque[tuple[float, Future[B]]] = deque()
    filled = 0.0
    for item in items:
        waiting.append((size(item), pool.submit(work, item)))
        filled += waiting[-1][0]
        while len(waiting) > 2 * READERS and filled > room:
            one, result = waiting.popleft()
            filled -= one
            yield result.result()
    while waiting:
        yield waiting.popleft()[1].result()


@contextmanager
def _named(utterance: Utterance) -> Iterator[None]:
    try:
        yield
    except AudioError as error:
        raise AudioError(f"{utterance.id}: {error.what}", hint=error.hint) from error
    except OSError as error:
        raise AudioError(
            f"{utterance.id}: {utterance.audio} cannot be read: {error.strerror or error}",
            hint="put the file back, or import the source again",
        ) from error


def _refuse_twins(utterances: Sequence[Utterance]) -> None:
    seen: set[str] = set()
    for utterance in utterances:
        if utterance.id in seen:
            raise DataError(f"two utterances have the id {utterance.id}", hint="give each a name of its own")
        seen.add(utterance.id)


def _home(folder: Path, revision: str) -> Path:
    return folder / "codes" / revision[:8]


def place_of(audio: Path, folder: Path) -> str:
    """Relative inside the folder, so that it can be moved or copied as a whole; absolute outside."""
    # By spelling alone: following links would tell two names of one folder apart.
    return os.path.normpath(audio.absolute()).removeprefix(f"{os.path.normpath(folder.absolute())}/")


def edges(span: Span | None) -> tuple[float, float | None]:
    if span is None:
        return 0.0, None
    return float(span.start), None if span.end is None else float(span.end)


def _seconds(span: Span | None, of_file: float) -> float:
    start, end = edges(span)
    return (of_file if end is None else end) - start


def prepare_again(folder: Path) -> str:
    return f"myna prepare SOURCE --out {folder} --model MODEL"
