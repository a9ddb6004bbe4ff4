"""Recordings of a curation: found, decoded in blocks to mono at 24 kHz, and cut at pauses into parts kept as FLAC."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import soundfile
import soxr  # type: ignore[import-untyped]

from myna.audio.files import AudioFileError, Samples, stream_audio
from myna.audio.signal_measures import clipped_share
from myna.core.errors import DataError
from myna.core.io import atomic_write, file_hash, fsync
from myna.curate.settings import ListenSettings
from myna.data.importers.records import AUDIO_SUFFIXES, OTHER_AUDIO_SUFFIXES

CURATION_RATE = 24_000
SAMPLES_PER_MS = CURATION_RATE // 1000
RECORDING_SUFFIXES = frozenset(
    (*AUDIO_SUFFIXES, *OTHER_AUDIO_SUFFIXES, ".mpg", ".mpeg", ".ts", ".flv", ".mp2", ".ac3", ".w64", ".rf64")
)
"""Suffixes of files that are opened in a folder; a file that is named itself may have any suffix."""
SCRIPT_SUFFIXES = (".txt", ".srt", ".vtt")
RECORDINGS_FOLDER, PARTS_FOLDER = "recordings", "parts"
SILENT_CHANNEL_POWER = 1e-3
"""Power of a channel, relative to the loudest, below which it holds no speaker."""
CANCELLED_POWER = 0.1
"""Power of the mix of the channels, relative to the loudest, below which they cancel each other out."""
CLIPPING_PEAK = 0.05
"""Peak of a second below which repeated extremes are rounding, not clipping."""
PART_SEARCH_SHARE = 1 / 3
"""Last share of a full part in which the pause for the cut is sought."""

Pcm = npt.NDArray[np.int16]
FindSpeech = Callable[[Samples, int], Sequence[tuple[float, float]]]
"""Function that returns voice activity of mono samples at a rate: starts and ends in seconds."""


def as_samples(pcm: Pcm) -> Samples:
    """Convert 16-bit PCM to samples of a full scale of 1."""
    return np.asarray(pcm, np.float32) / np.float32(32767)


def resample_pcm(pcm: Pcm, sample_rate: int) -> Samples:
    """Resample 16-bit PCM at 24 kHz; a minute at a time, so that only one copy is in memory."""
    stream = soxr.ResampleStream(CURATION_RATE, sample_rate, 1, dtype="float32", quality="VHQ")
    samples, filled, block = np.empty(len(pcm) * sample_rate // CURATION_RATE + 1, np.float32), 0, 60 * CURATION_RATE
    for start in range(0, len(pcm) + 1, block):
        piece = stream.resample_chunk(as_samples(pcm[start : start + block]), last=start + block > len(pcm))
        piece = piece[: len(samples) - filled]
        samples[filled : filled + len(piece)] = piece
        filled += len(piece)
    return samples[:filled]


@dataclass(frozen=True, slots=True)
class RecordingFile:
    """Audio file in the sources."""

    path: Path
    name: str
    """Path relative to the source folder, with / between names: the column `recording`."""

    @property
    def script(self) -> Path | None:
        """Text or subtitles of equal name beside the file."""
        files = (self.path.with_suffix(suffix) for suffix in SCRIPT_SUFFIXES)
        return next((file for file in files if file != self.path and file.is_file()), None)


@dataclass(frozen=True, slots=True)
class Part:
    """Decoded stretch of a recording, which one call of the first pass works on."""

    start_ms: int
    end_ms: int
    pcm_hash: str
    audio: str
    """Path of the FLAC within the folder of the curation."""
    clipped: dict[str, float] = field(default_factory=dict)
    """Share of clipped samples of each second that has any, by its number within the recording."""
    id: str = ""
    """Hash of the audio, its place, and the settings and models of the first pass; empty before they are known."""
    recording_hash: str = ""

    @property
    def seconds(self) -> float:
        return (self.end_ms - self.start_ms) / 1000


@dataclass(frozen=True, slots=True)
class DecodedRecording:
    """Decoded recording."""

    file_hash: str
    recording_hash: str
    """SHA-256 of the 16-bit PCM; empty if there is none."""
    duration_ms: int
    """Milliseconds that were decoded, and those that the header promises beyond them."""
    parts: tuple[Part, ...]
    problem: str = ""
    """Reason why decoding failed or ended early."""

    def save(self, folder: Path) -> None:
        path = folder / RECORDINGS_FOLDER / f"{self.file_hash}.json"
        with atomic_write(path) as temporary:
            temporary.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False), encoding="utf-8")
            fsync(temporary)

    @classmethod
    def load(cls, folder: Path, file_hash: str) -> Self | None:
        """Load an earlier result; None if there is none, or if a part of it is gone."""
        try:
            path = folder / RECORDINGS_FOLDER / f"{file_hash}.json"
            tree: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        parts = tuple(Part(**part) for part in tree.pop("parts"))
        complete = all((folder / part.audio).is_file() for part in parts)
        return cls(**tree, parts=parts) if complete else None


def find_recordings(sources: Sequence[Path], *, out: Path) -> list[RecordingFile]:
    """Return the files of the sources by name, those of folders by their suffix; `out` is left out."""
    found: dict[str, Path] = {}
    for source in sources:
        if not source.exists():
            raise DataError(f"there is no {source}", hint="check the path")
        prefix = f"{source.name}/" if len(sources) > 1 and source.is_dir() else ""
        for path in _files_below(source, out.resolve()) if source.is_dir() else [source]:
            name = prefix + (path.relative_to(source).as_posix() if source.is_dir() else path.name)
            if found.get(name, path).resolve() != path.resolve():
                name = path.resolve().as_posix()
            found[name] = path
    if not found:
        raise DataError(
            f"no recording in {', '.join(map(str, sources))}",
            hint=f"looked for {', '.join(sorted(RECORDING_SUFFIXES))}; name other files themselves",
        )
    return [RecordingFile(path, name) for name, path in sorted(found.items())]


def _files_below(folder: Path, out: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        here = Path(root)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and (here / name).resolve() != out)
        yield from (
            here / name
            for name in sorted(files)
            if not name.startswith(".") and Path(name).suffix.lower() in RECORDING_SUFFIXES
        )


def decode_recording(path: Path, folder: Path, settings: ListenSettings, find_speech: FindSpeech) -> DecodedRecording:
    """Decode a file into the parts folder of a curation, unless that was done before. Holds one part in memory."""
    content = file_hash(path)
    if earlier := DecodedRecording.load(folder, content):
        return earlier
    writer = _PartWriter(folder, content, settings, find_speech)
    missing_seconds, problem = 0.0, ""
    resampler: Any = None
    try:
        weights = _channel_weights(path)
        with stream_audio(path) as (info, blocks):
            missing_seconds = info.seconds
            resampler = soxr.ResampleStream(info.sample_rate, CURATION_RATE, 1, dtype="float32", quality="VHQ")
            for second in _whole_seconds(blocks, info.sample_rate):
                missing_seconds -= len(second) / info.sample_rate
                # Of the worst channel, at the rate of the file: resampling rounds plateaus off.
                loud = (channel for channel in second.T if np.abs(channel).max() >= CLIPPING_PEAK)
                clipped = max(map(clipped_share, loud), default=0.0)
                writer.add(resampler.resample_chunk(second @ weights), clipped)
    except AudioFileError as error:
        problem = f"{error.defect}{error.detail and ': ' + error.detail}"
        missing_seconds = max(missing_seconds, error.missing_seconds)
    if resampler is not None:
        writer.add(resampler.resample_chunk(np.empty(0, np.float32), last=True), 0.0)
    parts, recording_hash = writer.finish()
    duration_ms = parts[-1].end_ms if parts else 0
    duration_ms += round(1000 * missing_seconds) if problem and missing_seconds > 0 else 0
    decoded = DecodedRecording(content, recording_hash, duration_ms, parts, problem)
    decoded.save(folder)
    return decoded


def _whole_seconds(blocks: Iterator[npt.NDArray[np.float32]], sample_rate: int) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the samples a second at a time."""
    rest: npt.NDArray[np.float32] | None = None
    damage: AudioFileError | None = None
    try:
        for block in blocks:
            joined = block if rest is None else np.concatenate([rest, block])
            whole = len(joined) // sample_rate * sample_rate
            yield from (joined[start : start + sample_rate] for start in range(0, whole, sample_rate))
            rest = joined[whole:]
    except AudioFileError as error:  # raised once the blocks before it are used
        damage = error
    if rest is not None and len(rest):
        yield rest
    if damage is not None:
        raise damage


def _channel_weights(path: Path) -> npt.NDArray[np.float32]:
    """Return the weights of the mix: equal for channels with speech; the loudest channel alone if they cancel out."""
    covariance = np.ones((1, 1))
    with suppress(AudioFileError), stream_audio(path) as (info, blocks):  # reported when it is decoded
        if info.channels == 1:
            return np.ones(1, np.float32)
        covariance = np.zeros((info.channels, info.channels))
        for block in blocks:
            covariance += block.T.astype(np.float64) @ block
    channels = len(covariance)
    power = np.diag(covariance)
    active = power >= SILENT_CHANNEL_POWER * power.max()
    weights = active / active.sum()
    if weights @ covariance @ weights < CANCELLED_POWER * power.max():
        weights = np.eye(channels)[power.argmax()]
    return np.asarray(weights, np.float32)


class _PartWriter:
    """Writer that collects samples, and writes a part whenever there are enough."""

    def __init__(self, folder: Path, file_hash: str, settings: ListenSettings, find_speech: FindSpeech) -> None:
        self._folder, self._file_hash, self._find_speech = folder, file_hash, find_speech
        self._longest = round(settings.part_minutes * 60 * CURATION_RATE)
        self._pause = settings.part_pause
        self._pending: Pcm = np.empty(0, "<i2")
        """Buffer whose first `_filled` samples belong to the current part."""
        self._filled, self._start_ms, self._seconds = 0, 0, 0
        self._clipped: dict[int, float] = {}
        self._hash = hashlib.sha256()
        self._parts: list[Part] = []

    def add(self, samples: Samples, clipped: float) -> None:
        pcm = np.rint(samples.clip(-1, 1) * 32767).astype("<i2")
        self._hash.update(pcm)
        if self._filled + len(pcm) > len(self._pending):
            grown = min(2 * self._filled, self._longest) + len(pcm)
            self._pending = np.concatenate([self._pending[: self._filled], np.empty(grown - self._filled, "<i2")])
        self._pending[self._filled : self._filled + len(pcm)] = pcm
        self._filled += len(pcm)
        if clipped:
            self._clipped[self._seconds] = clipped
        self._seconds += 1
        if self._filled >= self._longest:
            collected = self._pending[: self._filled]
            cut = self._cut_ms(collected) * SAMPLES_PER_MS
            self._write(collected[:cut])
            self._filled -= cut
            self._pending[: self._filled] = collected[cut:].copy()

    def finish(self) -> tuple[tuple[Part, ...], str]:
        """Return the parts, and the hash of all of them together."""
        if self._filled:
            self._write(np.pad(self._pending[: self._filled], (0, -self._filled % SAMPLES_PER_MS)))  # full milliseconds
        return tuple(self._parts), self._hash.hexdigest() if self._parts else ""

    def _cut_ms(self, pcm: Pcm) -> int:
        """Return the middle of the longest pause near the end; the end if no pause is long enough."""
        from_sample = round(len(pcm) * (1 - PART_SEARCH_SHARE))
        speech = self._find_speech(as_samples(pcm[from_sample:]), CURATION_RATE)
        length = (len(pcm) - from_sample) / CURATION_RATE
        edges = [0.0, *(time for span in speech for time in span), length]
        start, end = max(zip(edges[::2], edges[1::2], strict=True), key=lambda gap: gap[1] - gap[0])
        if end - start < self._pause:
            return len(pcm) // SAMPLES_PER_MS
        return from_sample // SAMPLES_PER_MS + round(1000 * (start + end) / 2)

    def _write(self, pcm: Pcm) -> None:
        start, end = self._start_ms, self._start_ms + len(pcm) // SAMPLES_PER_MS
        name = f"{PARTS_FOLDER}/{self._file_hash}-{start}.flac"
        with atomic_write(self._folder / name) as temporary:
            soundfile.write(temporary, pcm, CURATION_RATE, format="FLAC", subtype="PCM_16")
            fsync(temporary)
        clipped = {str(second): share for second, share in self._clipped.items() if start <= 1000 * second < end}
        self._parts.append(Part(start, end, hashlib.sha256(pcm.data).hexdigest(), name, clipped))
        self._start_ms = end
