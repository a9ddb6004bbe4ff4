"""Audio files: read, write and check recordings; any rate and channels in, mono float32 out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import soundfile
import soxr  # type: ignore[import-untyped]

from myna.errors import AudioError
from myna.io import atomic_write, is_file

Samples = npt.NDArray[np.float32]
AudioDefect = Literal["missing file", "unreadable audio", "zero length", "NaN samples", "bad span"]

DEFECT_HINTS: dict[AudioDefect, str] = {
    "missing file": "check the path, or put the file there",
    "unreadable audio": "convert it, for example: ffmpeg -i INPUT -ar 24000 OUTPUT.wav",
    "zero length": "record it again, or drop the line that names it",
    "NaN samples": "export it again as 16-bit PCM",
    "bad span": "keep start and end in seconds inside the recording",
}
AUDIO_FORMATS = {
    ".wav": ("WAV", "PCM_16"),
    ".flac": ("FLAC", "PCM_16"),
    ".mp3": ("MP3", "MPEG_LAYER_III"),
    ".ogg": ("OGG", "VORBIS"),
    ".opus": ("OGG", "OPUS"),
}
BLOCK_FRAMES = 1 << 20
"""Frames decoded at a time."""
UNKNOWN_LENGTH_FRAMES = 1 << 62
"""libsndfile's frame count, or more, where the header gives no length."""
MAX_MISSING_SECONDS = 0.1
"""By which a compressed file may end before its header says so."""
PREROLL_SECONDS = 0.3
"""Decoded and dropped before a span: MP3 frames depend on those before them."""


class AudioFileError(AudioError):
    """A recording that cannot be used; `defect` is its kind."""

    def __init__(self, path: Path, flaw: AudioDefect, detail: str = "") -> None:
        super().__init__(f"{path}: {flaw}{detail and ': ' + detail}", hint=DEFECT_HINTS[flaw])
        self.defect = flaw
        self.detail = detail


@dataclass(frozen=True, slots=True)
class AudioInfo:
    seconds: float
    sample_rate: int
    channels: int


def probe(path: Path) -> AudioInfo:
    """Length, rate and channels from the header; nothing is decoded."""
    with _open(path) as file:
        return AudioInfo(file.frames / file.samplerate, file.samplerate, file.channels)


def check_audio(path: Path) -> AudioInfo:
    """Decode every sample: the true length, or an `AudioFileError`."""
    with _open(path) as file:
        frames = 0
        for block in _blocks(file):
            _check_finite(path, block)
            frames += len(block)
        _check_length(path, file, frames, file.frames)
        return AudioInfo(frames / file.samplerate, file.samplerate, file.channels)


def read_audio(path: Path, *, sample_rate: int = 24_000, span: tuple[float, float | None] | None = None) -> Samples:
    """Mono samples of the recording, or of `span` in seconds, at `sample_rate`. Only the span is decoded."""
    with _open(path) as file:
        first, last = _frames(path, file, span or (0.0, None))
        lead = min(first, round(PREROLL_SECONDS * file.samplerate))
        file.seek(first - lead)
        blocks = [block.mean(axis=1) for block in _blocks(file, lead + last - first)]
        samples = np.concatenate(blocks or [np.empty(0, np.float32)])[lead:]
        _check_finite(path, samples)
        _check_length(path, file, len(samples), last - first)
        resampled = soxr.resample(samples, file.samplerate, sample_rate, quality="VHQ")
        return np.ascontiguousarray(resampled, dtype=np.float32)


def check_audio_suffix(path: Path) -> None:
    """Refuse an output name without a supported suffix, before any work is done for it."""
    if path.suffix.lower() not in AUDIO_FORMATS:
        raise AudioError(f"{path}: cannot write `{path.suffix}`", hint=f"use one of {', '.join(AUDIO_FORMATS)}")


def write_audio(path: Path, samples: Samples, sample_rate: int) -> None:
    """Write mono (or frames x channels) samples in the format of the suffix; the write is atomic."""
    check_audio_suffix(path)
    _check_finite(path, samples)
    kind, subtype = AUDIO_FORMATS[path.suffix.lower()]
    with atomic_write(path) as temporary:
        soundfile.write(temporary, samples, sample_rate, format=kind, subtype=subtype)


@contextmanager
def _open(path: Path) -> Iterator[soundfile.SoundFile]:
    if not is_file(path):
        raise AudioFileError(path, "missing file")
    if path.stat().st_size == 0:
        raise AudioFileError(path, "zero length")
    try:
        with soundfile.SoundFile(path) as file:
            if file.frames == 0:
                raise AudioFileError(path, "zero length")
            if file.frames >= UNKNOWN_LENGTH_FRAMES:
                raise AudioFileError(path, "unreadable audio", "its header does not tell its length")
            yield file
    except soundfile.SoundFileError as error:
        raise AudioFileError(path, "unreadable audio", str(error).strip(" :")) from None


def _frames(path: Path, file: soundfile.SoundFile, span: tuple[float, float | None]) -> tuple[int, int]:
    """The first frame of a span and the one after its last."""
    seconds, (start, end) = file.frames / file.samplerate, span
    stop = seconds if end is None else end
    if 0 <= start < stop < seconds + 1:  # so written that NaN fails too
        first, last = round(start * file.samplerate), round(stop * file.samplerate)
        if first < last <= file.frames:
            return first, last
    raise AudioFileError(path, "bad span", f"{start} to {end} of {seconds:.3f} s")


def _blocks(file: soundfile.SoundFile, frames: int | None = None) -> Iterator[npt.NDArray[np.float32]]:
    """Up to `frames` frames from here on, as (frames, channels)."""
    left = file.frames if frames is None else frames
    while left > 0 and len(block := file.read(min(left, BLOCK_FRAMES), dtype="float32", always_2d=True)):
        left -= len(block)
        yield block


def _check_finite(path: Path, samples: npt.NDArray[np.float32]) -> None:
    if not np.isfinite(samples).all():
        raise AudioFileError(path, "NaN samples")


def _check_length(path: Path, file: soundfile.SoundFile, frames: int, expected: int) -> None:
    if frames == 0:
        raise AudioFileError(path, "zero length")
    if frames < expected - MAX_MISSING_SECONDS * file.samplerate:
        detail = f"ends after {frames / file.samplerate:.2f} of {expected / file.samplerate:.2f} s"
        raise AudioFileError(path, "unreadable audio", detail)
