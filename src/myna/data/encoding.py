"""Encoding of a dataset: clips without codes are planned into shards, each of which is encoded and committed whole.

Shards follow manifest order and are planned from the headers of recordings, so that processes and machines can share
them. Killed at any moment, `encode_dataset` loses at most the shards in flight, and run again, with one worker or
many, it leaves the same bytes as an undisturbed run.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from myna.audio.files import MAX_MISSING_SECONDS, probe, read_audio
from myna.core.errors import AudioError, ConfigError
from myna.core.io import file_hash
from myna.core.pools import Pool
from myna.core.progress import ProgressCallback, silent
from myna.data import code_store
from myna.data.code_store import codes_key, span_bounds
from myna.data.codec import Codes, Encoder, NotifyCallback, Samples
from myna.data.manifest import Span, Utterance

READER_THREADS = min(16, os.cpu_count() or 1)
GPU_SHARDS = 8
"""Shards per call to a worker with a GPU, which reads the next while it encodes one. Other workers get one: without a
GPU encoding takes much longer than reading."""
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class EncodeReport:
    utterances: int
    encoded: int
    seconds: float
    elapsed: float
    too_short: tuple[str, ...]
    """Ids of utterances shorter than one frame, which have no codes."""

    @property
    def pace(self) -> float:
        return self.seconds / self.elapsed if self.elapsed else 0.0


class PlannedClip(NamedTuple):
    key: str
    id: str
    audio: Path
    span: Span | None
    text: str
    frames: int
    """Frames according to the header of the file, 0 if there may turn out to be none; once it is read, its frames."""


class PlannedShard(NamedTuple):
    path: Path
    revision: str
    batch_seconds: float
    clips: Sequence[PlannedClip]


class EncodedClips(NamedTuple):
    """Clips that a worker is done with."""

    frames: dict[str, int]
    """Frames by key; 0 for a clip shorter than one frame."""
    notes: tuple[str, ...] = ()


def encode_dataset(
    utterances: Iterable[Utterance],
    codec: Encoder,
    folder: Path,
    *,
    shard_seconds: float = 600.0,
    batch_seconds: float = 60.0,
    pool: "Pool[ShardEncoder] | None" = None,
    progress: ProgressCallback = silent,
    notify: NotifyCallback = lambda _message: None,
) -> EncodeReport:
    """Encode what is new, then write the index of `utterances`.

    Longer shards find more clips of similar length to encode together; shorter ones lose less to a kill. A shard is
    always encoded as a whole, so that no clip depends on where a run was stopped. Workers of `pool` encode with codecs
    of the same revision; without a pool this process encodes.
    """
    utterances = list(utterances)
    code_store.check_unique_ids(utterances)
    with code_store.lock_codes(folder, codec.revision) as codes_folder:
        frames = code_store.stored_frames(codes_folder, codec.revision)
        keys, clips = _plan_clips(utterances, codec, frames)
        existing = code_store.shard_paths(codes_folder)
        free_numbers = (number for number in count() if number not in existing)
        paths = (codes_folder.absolute() / f"{number:05d}.arrow" for number in free_numbers)
        groups = group_into_shards(clips, shard_seconds * codec.frame_rate)
        shards = [PlannedShard(next(paths), codec.revision, batch_seconds, group) for group in groups]
        began, encoded, notes = time.monotonic(), dict[str, int](), set[str]()
        for result in _encode_shards(shards, codec, pool):
            encoded |= result.frames
            progress("encoding", len(encoded), len(clips))
            for note in result.notes:
                if note not in notes:  # another worker gave the same note
                    notes.add(note)
                    notify(note)
        frames |= {key: number for key, number in encoded.items() if number}
        code_store.write_index_file(folder, utterances, keys, frames, codec.revision, codec.sample_rate)

    has_codes = [key in frames for key in keys]
    return EncodeReport(
        utterances=sum(has_codes),
        encoded=sum(number > 0 for number in encoded.values()),
        seconds=sum(encoded.values()) / codec.frame_rate,
        elapsed=time.monotonic() - began,
        too_short=tuple(u.id for u, encoded in zip(utterances, has_codes, strict=True) if not encoded),
    )


def _plan_clips(
    utterances: Sequence[Utterance], codec: Encoder, frames: dict[str, int]
) -> tuple[list[str], list[PlannedClip]]:
    """Return the key of each utterance, and the clips that no shard has."""
    by_audio = {utterance.audio: utterance for utterance in utterances}
    with ThreadPoolExecutor(READER_THREADS) as threads:
        recordings = dict(zip(by_audio, _prefetch(threads, _probe_recording, by_audio.values()), strict=True))
    keys = [codes_key(recordings[one.audio][0], one.span, codec.revision) for one in utterances]
    new = {key: one for key, one in zip(keys, utterances, strict=True) if key not in frames}
    clips = []
    for key, one in new.items():
        start, end = span_bounds(one.span)
        seconds = (recordings[one.audio][1] if end is None else end) - start
        # A clip without codes is planned again by every run. It counts as empty, so that a resumed run cuts alike.
        may_be_empty = seconds < MAX_MISSING_SECONDS + 1 / codec.frame_rate
        planned = 0 if may_be_empty else int(seconds * codec.frame_rate + 1e-6)
        clips.append(PlannedClip(key, one.id, one.audio.absolute(), one.span, one.text, planned))
    return keys, clips


def group_into_shards(clips: Iterable[PlannedClip], limit: float) -> Iterator[list[PlannedClip]]:
    """Yield groups of `limit` frames or a little more; the last one has the rest.

    Each depends only on the clips since the group before it, so that a resumed run groups as before, whichever shards
    exist.
    """
    shard: list[PlannedClip] = []
    filled = 0
    for clip in clips:
        shard.append(clip)
        filled += clip.frames
        if filled >= limit:
            yield shard
            shard, filled = [], 0
    if shard:
        yield shard


def _encode_shards(
    shards: Sequence[PlannedShard], codec: Encoder, pool: "Pool[ShardEncoder] | None"
) -> Iterator[EncodedClips]:
    if pool is None:
        yield from ShardEncoder(lambda: codec).encode_batches(shards)
        return
    size = GPU_SHARDS if pool.uses_gpus else 1
    calls = [shards[start : start + size] for start in range(0, len(shards), size)]
    for _, results in pool.map(ShardEncoder.encode, calls, describe=lambda call: str(call[0].path)):
        yield from results


class ShardEncoder:
    """Worker that encodes shards and commits each to its file. It calls `open_codec` when the codec is first needed."""

    def __init__(self, open_codec: Callable[[], Encoder]) -> None:
        self._open_codec = open_codec

    @cached_property
    def codec(self) -> Encoder:
        return self._open_codec()

    def encode(self, shards: Sequence[PlannedShard]) -> list[EncodedClips]:
        return list(self.encode_batches(shards))

    def encode_batches(self, shards: Sequence[PlannedShard]) -> Iterator[EncodedClips]:
        """Yield what was encoded, batch by batch. The next shard is read while one is encoded."""
        largest = max((sum(clip.frames for clip in shard.clips) for shard in shards), default=0)
        with ThreadPoolExecutor(READER_THREADS) as threads:
            planned = (clip for shard in shards for clip in shard.clips)
            read = _prefetch(threads, partial(_load_clip, self.codec), planned, lambda clip: clip.frames, largest)
            for shard in shards:
                yield from self._encode_shard(shard, list(islice(read, len(shard.clips))))

    def _encode_shard(self, shard: PlannedShard, read: Sequence[tuple[PlannedClip, Samples]]) -> Iterator[EncodedClips]:
        codec = self.codec
        if codec.revision != shard.revision:
            raise ConfigError(
                f"this worker has the codec {codec.revision[:8]}, and {shard.path} is for {shard.revision[:8]}",
                hint="copy one model to all nodes; myna doctor --ray ADDRESS --model MODEL compares them",
            )
        yield EncodedClips({clip.key: 0 for clip, _ in read if not clip.frames})
        clips = [clip for clip, _ in read if clip.frames]
        samples = [samples for clip, samples in read if clip.frames]
        codes: dict[int, Codes] = {}
        notes: list[str] = []
        for positions, batch in codec.encode_batches(samples, shard.batch_seconds, notes.append):
            codes |= zip(positions, batch, strict=True)
            yield EncodedClips({clips[position].key: clips[position].frames for position in positions}, tuple(notes))
            notes.clear()
        if clips:
            table = _shard_table(clips, [codes[position] for position in range(len(clips))], codec)
            code_store.write_arrow(shard.path.parents[2], shard.path, table)
        yield EncodedClips({}, tuple(notes))


def _probe_recording(utterance: Utterance) -> tuple[str, float]:
    """Return the hash of a recording and its seconds."""
    with _audio_errors(utterance):
        return file_hash(utterance.audio), probe(utterance.audio).seconds


def _load_clip(codec: Encoder, clip: PlannedClip) -> tuple[PlannedClip, Samples]:
    """Read a clip and trim it to whole frames."""
    with _audio_errors(clip):
        samples = read_audio(clip.audio, sample_rate=codec.sample_rate, span=span_bounds(clip.span))
    frames = len(samples) // codec.hop
    return clip._replace(frames=frames), samples[: frames * codec.hop]


def _shard_table(shard: Sequence[PlannedClip], codes: Sequence[Codes], codec: Encoder) -> Any:
    assert all(array.shape == (clip.frames, codec.codebooks) for clip, array in zip(shard, codes, strict=True))
    offsets = np.cumsum([0, *(array.size for array in codes)], dtype=np.int64)
    values = np.concatenate([array.reshape(-1) for array in codes])
    columns = {
        "key": pa.array([clip.key for clip in shard], pa.string()),
        "codes": pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values)),
        "frames": pa.array([clip.frames for clip in shard], pa.int32()),
        "codebooks": pa.array([codec.codebooks] * len(shard), pa.int32()),
        "frame_rate": pa.array([codec.frame_rate] * len(shard), pa.float64()),
        "seconds": pa.array([clip.frames / codec.frame_rate for clip in shard], pa.float64()),
        "text": pa.array([clip.text for clip in shard], pa.string()),
    }
    return code_store.arrow_batch(columns, codec.revision, sample_rate=str(codec.sample_rate))


def _prefetch(
    pool: ThreadPoolExecutor,
    function: Callable[[T], R],
    items: Iterable[T],
    size: Callable[[T], float] = lambda _item: 0.0,
    max_size: float = 0.0,
) -> Iterator[R]:
    """`map` with bounded read-ahead: a few items, and more of them up to `max_size` in total."""
    pending: deque[tuple[float, Future[R]]] = deque()
    pending_size = 0.0
    for item in items:
        pending.append((size(item), pool.submit(function, item)))
        pending_size += pending[-1][0]
        while len(pending) > 2 * READER_THREADS and pending_size > max_size:
            item_size, result = pending.popleft()
            pending_size -= item_size
            yield result.result()
    while pending:
        yield pending.popleft()[1].result()


@contextmanager
def _audio_errors(clip: Utterance | PlannedClip) -> Iterator[None]:
    try:
        yield
    except AudioError as error:
        raise AudioError(f"{clip.id}: {error.what}", hint=error.hint) from error
    except OSError as error:
        problem = f"{clip.id}: {clip.audio} cannot be read: {error.strerror or error}"
        raise AudioError(problem, hint="put the file back, or import the source again") from error
