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
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, KeysView, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from myna.audio.clip import probe, read
from myna.audio.files import file_hash, replacing
from myna.data.codec import Codec, Codes, Samples
from myna.data.utterance import Span, Utterance
from myna.errors import AudioError, DataError

FORMAT = "1"
INDEX = "index.arrow"
READERS = min(8, os.cpu_count() or 1)
A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True, slots=True)
class Progress:
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
class Report:
    utterances: int
    """Utterances that now have codes."""
    encoded: int
    """Clips encoded in this run; the other codes were there."""
    seconds: float
    """Seconds of audio encoded in this run."""
    elapsed: float
    too_short: tuple[str, ...]
    """Ids of utterances shorter than one frame, which have no codes."""


class Clip(NamedTuple):
    """A clip on its way to the codec, its samples cut to whole frames."""

    key: str
    text: str
    frames: int
    samples: Samples


def utterance_key(utterance: Utterance, revision: str) -> str:
    """Under what an utterance's codes are stored. Reads the whole audio file, which `CodeStore.key` does not."""
    return clip_key(file_hash(utterance.audio), utterance.span, revision)


def clip_key(audio_hash: str, span: Span | None, revision: str) -> str:
    described = json.dumps([audio_hash, *_edges(span), revision])
    return hashlib.blake2b(described.encode(), digest_size=16).hexdigest()


def encode_corpus(
    utterances: Iterable[Utterance],
    codec: Codec,
    folder: Path,
    *,
    shard_seconds: float = 600.0,
    batch_seconds: float = 60.0,
    on_progress: Callable[[Progress], None] | None = None,
) -> Report:
    """Bring the store up to date: encode what is new, then write the index of `utterances`.

    Longer shards find more clips of one length to encode together; shorter ones lose less to a kill.
    """
    utterances = list(utterances)
    _refuse_twins(utterances)
    home = _home(folder, codec.revision)
    with _locked(folder), ThreadPoolExecutor(READERS) as pool:
        _tidy(home)
        shards = _read_shards(home, codec.revision)
        frames = {key: n for shard in shards.values() for key, n in zip(shard.keys, shard.frames.tolist(), strict=True)}
        owners = {utterance.audio: utterance for utterance in utterances}
        recordings = dict(zip(owners, _ahead(pool, _recording, owners.values()), strict=True))
        keys = [clip_key(recordings[u.audio].hash, u.span, codec.revision) for u in utterances]
        fresh = {key: u for key, u in zip(keys, utterances, strict=True) if key not in frames}
        total_seconds = sum(_seconds(u.span, recordings[u.audio].seconds) for u in fresh.values())

        began, done, encoded, encoded_frames = time.monotonic(), 0, 0, 0
        free = (number for number in count() if number not in shards)
        for clips in cut(_ahead(pool, partial(_load, codec), fresh.items()), shard_seconds * codec.frame_rate):
            shard = [clip for clip in clips if clip.frames]
            done += len(clips) - len(shard)
            codes: dict[int, Codes] = {}
            for places, batch in _encoded(shard, codec, batch_seconds):
                codes |= zip(places, batch, strict=True)
                done, encoded_frames = done + len(batch), encoded_frames + batch.shape[0] * batch.shape[1]
                if on_progress is not None:
                    seconds, elapsed = encoded_frames / codec.frame_rate, time.monotonic() - began
                    on_progress(Progress(done, len(fresh), seconds, total_seconds, elapsed))
            if shard:
                table = _shard_table(shard, [codes[place] for place in range(len(shard))], codec)
                _publish(folder, home / f"{next(free):05d}.arrow", table)
                frames |= {clip.key: clip.frames for clip in shard}
                encoded += len(shard)
        _publish(folder, home / INDEX, _index_table(utterances, keys, frames, codec, folder))

    covered = [key in frames for key in keys]
    return Report(
        utterances=sum(covered),
        encoded=encoded,
        seconds=encoded_frames / codec.frame_rate,
        elapsed=time.monotonic() - began,
        too_short=tuple(u.id for u, has_codes in zip(utterances, covered, strict=True) if not has_codes),
    )


def cut(clips: Iterable[Clip], limit: float) -> Iterator[list[Clip]]:
    """Shards of `limit` frames or a little more, the last one with what is left.

    Each depends only on the clips since the cut before it, so that a run continued after any shard cuts as before.
    """
    shard: list[Clip] = []
    filled = 0
    for clip in clips:
        shard.append(clip)
        filled += clip.frames
        if filled >= limit:
            yield shard
            shard, filled = [], 0
    if shard:
        yield shard


class CodeStore:
    """All codes of one codec in a prepared folder. Opening reads keys; codes stay on disk until they are looked at."""

    def __init__(self, folder: Path, revision: str, shards: Sequence[_Shard], lines: dict[str, _Line]) -> None:
        self._folder, self._revision, self._shards, self._lines = folder, revision, shards, lines
        self._starts = [0, *accumulate(len(shard.keys) for shard in shards)]
        self._frames = np.concatenate([np.empty(0, np.int32), *(shard.frames for shard in shards)])
        self._rows = dict(zip((key for shard in shards for key in shard.keys), count(), strict=False))

    @classmethod
    def open(cls, folder: Path, revision: str) -> CodeStore:
        home = _home(folder, revision)
        if not (home / INDEX).is_file():
            finished = "holds no codes of" if not home.is_dir() else "was not encoded to the end with"
            raise DataError(f"{folder} {finished} the codec {revision[:8]}", hint=_prepare(folder))
        return cls(folder, revision, list(_read_shards(home, revision).values()), _read_index(home / INDEX, revision))

    def __reduce__(self) -> tuple[Any, ...]:
        # A loader's worker maps the files itself, rather than being sent what they hold.
        return CodeStore.open, (self._folder, self._revision)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    def __getitem__(self, key: str) -> Codes:
        """(frames, codebooks), a read-only view of the file."""
        row = self._rows[key]
        number = bisect_right(self._starts, row) - 1
        return self._shards[number].codes(row - self._starts[number])

    @property
    def keys(self) -> KeysView[str]:
        return self._rows.keys()

    def frames(self, key: str) -> int:
        return int(self._frames[self._rows[key]])

    def has(self, utterance: Utterance) -> bool:
        """False for an utterance too short for a single frame; one that was never prepared is a `DataError`."""
        return self._line(utterance).frames > 0

    def key(self, utterance: Utterance) -> str:
        """The key of its codes. No audio is read: that a file was changed in place is for `prepare` to find."""
        key = self._line(utterance).key
        if key not in self._rows:
            raise DataError(f"{self._folder} holds no codes of {utterance.id}", hint=_prepare(self._folder))
        return key

    def _line(self, utterance: Utterance) -> _Line:
        line = self._lines.get(utterance.id)
        now = (_place(utterance.audio, self._folder), *_edges(utterance.span))
        if line is None or now != (line.audio, line.start, line.end):
            change = "is new" if line is None else "has other audio"
            raise DataError(
                f"the utterance {utterance.id} {change} since {self._folder} was encoded", hint=_prepare(self._folder)
            )
        return line


class _Line(NamedTuple):
    """What the index says of an utterance."""

    audio: str
    start: float
    end: float | None
    key: str
    frames: int


class _Shard(NamedTuple):
    keys: list[str]
    frames: npt.NDArray[np.int32]
    codebooks: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    values: npt.NDArray[np.uint16]

    def codes(self, row: int) -> Codes:
        flat = self.values[self.offsets[row] : self.offsets[row + 1]]
        return flat.reshape(self.frames[row], self.codebooks[row])


class _Recording(NamedTuple):
    hash: str
    seconds: float


def _recording(utterance: Utterance) -> _Recording:
    with _named(utterance):
        return _Recording(hash=file_hash(utterance.audio), seconds=probe(utterance.audio).seconds)


def _load(codec: Codec, item: tuple[str, Utterance]) -> Clip:
    key, utterance = item
    with _named(utterance):
        samples = read(utterance.audio, sample_rate=codec.sample_rate, span=_edges(utterance.span))
    frames = len(samples) // codec.hop
    return Clip(key, utterance.text, frames, samples[: frames * codec.hop])


def _encoded(
    shard: Sequence[Clip], codec: Codec, batch_seconds: float
) -> Iterator[tuple[list[int], npt.NDArray[np.uint16]]]:
    """Codes of a shard's clips with their places in it: equal lengths together, longest first."""
    of_length: defaultdict[int, list[int]] = defaultdict(list)
    for place, clip in enumerate(shard):
        of_length[clip.frames].append(place)
    for frames, places in sorted(of_length.items(), reverse=True):
        size = max(1, int(batch_seconds * codec.frame_rate / frames))
        for start in range(0, len(places), size):
            batch = places[start : start + size]
            codes = codec.encode(np.stack([shard[place].samples for place in batch]))
            assert codes.shape == (len(batch), frames, codec.codebooks) and codes.dtype == np.uint16
            yield batch, codes


def _shard_table(shard: Sequence[Clip], codes: Sequence[Codes], codec: Codec) -> Any:
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
    utterances: Sequence[Utterance], keys: Sequence[str], frames: dict[str, int], codec: Codec, folder: Path
) -> Any:
    edges = [_edges(utterance.span) for utterance in utterances]
    columns = {
        "id": pa.array([utterance.id for utterance in utterances], pa.string()),
        "audio": pa.array([_place(utterance.audio, folder) for utterance in utterances], pa.string()),
        "start": pa.array([start for start, _ in edges], pa.float64()),
        "end": pa.array([end for _, end in edges], pa.float64()),
        "key": pa.array(keys, pa.string()),
        "frames": pa.array([frames.get(key, 0) for key in keys], pa.int32()),
    }
    return pa.record_batch(columns).replace_schema_metadata(_label(codec))


def _label(codec: Codec) -> dict[str, str]:
    return {"format": FORMAT, "codec": codec.revision, "sample_rate": str(codec.sample_rate)}


def _publish(folder: Path, path: Path, table: Any) -> None:
    """Write a file that survives a kill or a power cut whole, or does not appear."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_batch(table)
    with _writing(folder):
        with replacing(path) as temporary, temporary.open("wb") as file:
            file.write(sink.getvalue())
            file.flush()
            os.fsync(file.fileno())
        _sync(path.parent)


def _read_shards(home: Path, revision: str) -> dict[int, _Shard]:
    return {int(path.stem): _read_shard(path, revision) for path in sorted(home.glob("[0-9]*.arrow"))}


def _read_shard(path: Path, revision: str) -> _Shard:
    table = _read(path, revision)
    with _intact(path):
        codes = table["codes"]
        shard = _Shard(
            keys=table["key"].to_pylist(),
            frames=table["frames"].to_numpy(zero_copy_only=True),
            codebooks=table["codebooks"].to_numpy(zero_copy_only=True),
            offsets=codes.offsets.to_numpy(zero_copy_only=True),
            values=codes.values.to_numpy(zero_copy_only=True),
        )
        if (np.diff(shard.offsets) != shard.frames * shard.codebooks).any():
            raise ValueError("frames and codes do not agree")
    return shard


def _read_index(path: Path, revision: str) -> dict[str, _Line]:
    table = _read(path, revision)
    with _intact(path):
        columns = (table[name].to_pylist() for name in _Line._fields)
        return dict(zip(table["id"].to_pylist(), map(_Line._make, zip(*columns, strict=True)), strict=True))


def _read(path: Path, revision: str) -> Any:
    """A file's one record batch, still on disk. The mapping outlives the closed file, so shards cost no descriptors."""
    with _intact(path):
        with pa.memory_map(str(path)) as file:
            table = pa.ipc.open_file(file).get_batch(0)
        label = {name.decode(): value.decode() for name, value in table.schema.metadata.items()}
        if (label["format"], label["codec"]) != (FORMAT, revision):
            raise ValueError(f"it is of format {label['format']} and codec {label['codec']}")
        for column in table.columns:
            column.validate(full=True)
    return table


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


def _ahead(pool: ThreadPoolExecutor, work: Callable[[A], B], items: Iterable[A]) -> Iterator[B]:
    """Results in order, a few worked out in advance: readers need not wait for the codec, and memory stays bounded."""
    waiting: deque[Future[B]] = deque()
    for item in items:
        waiting.append(pool.submit(work, item))
        if len(waiting) > 2 * READERS:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


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


def _place(audio: Path, folder: Path) -> str:
    """Relative inside the folder, so that it can be moved or copied as a whole; absolute outside."""
    # By spelling alone: following links would tell two names of one folder apart.
    return os.path.normpath(audio.absolute()).removeprefix(f"{os.path.normpath(folder.absolute())}/")


def _edges(span: Span | None) -> tuple[float, float | None]:
    if span is None:
        return 0.0, None
    return float(span.start), None if span.end is None else float(span.end)


def _seconds(span: Span | None, of_file: float) -> float:
    start, end = _edges(span)
    return (of_file if end is None else end) - start


def _prepare(folder: Path) -> str:
    return f"myna prepare SOURCE --out {folder} --model MODEL"
