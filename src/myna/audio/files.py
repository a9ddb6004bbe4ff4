"""Read, write and check recordings: any rate and channels in, mono float32 out."""

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
from myna.io import is_file, replacing

Samples = npt.NDArray[np.float32]
Flaw = Literal["missing file", "unreadable audio", "zero length", "NaN samples", "bad span"]

HINTS: dict[Flaw, str] = {
    "missing file": "check the path, or put the file there",
    "unreadable audio": "convert it, for example: ffmpeg -i INPUT -ar 24000 OUTPUT.wav",
    "zero length": "record it again, or drop the line that names it",
    "NaN samples": "export it again as 16-bit PCM",
    "bad span": "keep start and end in seconds inside the recording",
}
FORMATS = {
    ".wav": ("WAV", "PCM_16"),
    ".flac": ("FLAC", "PCM_16"),
    ".mp3": ("MP3", "MPEG_LAYER_III"),
    ".ogg": ("OGG", "VORBIS"),
    ".opus": ("OGG", "OPUS"),
}
BLOCK = 1 << 20
"""Frames decoded at a time."""
UNKNOWN = 1 << 62
"""libsndfile counts this many frames and more where the header gives no length."""
SLACK = 0.1
"""Seconds by which a compressed file may end before its header says so."""
LEAD = 0.3
"""Seconds decoded and dropped before a span: MP3 frames lean on those before them."""


class ClipError(AudioError):
    """A recording that cannot be used, with the flaw in two words for those who count them."""

    def __init__(self, path: Path, flaw: Flaw, detail: str = "") -> None:
        super().__init__(f"{path}: {flaw}{detail and ': ' + detail}", hint=HINTS[flaw])
        self.flaw = flaw
        self.detail = detail


@dataclass(frozen=True, slots=True)
class AudioInfo:
    seconds: float
    sample_rate: int
    channels: int


def probe(path: Path) -> AudioInfo:
    """What the header says; nothing is decoded."""
    with _opened(path) as file:
        return AudioInfo(file.frames / file.samplerate, file.samplerate, file.channels)


def check(path: Path) -> AudioInfo:
    """Decode every sample: the length as it really is, or a `ClipError`."""
    with _opened(path) as file:
        frames = 0
        for block in _blocks(file):
            _refuse_nan(path, block)
            frames += len(block)
        _refuse_short(path, file, frames, file.frames)
        return AudioInfo(frames / file.samplerate, file.samplerate, file.channels)


def read(path: Path, *, sample_rate: int = 24_000, span: tuple[float, float | None] | None = None) -> Samples:
    """Mono samples of the recording, or of `span` in seconds, at `sample_rate`. Only the span is decoded."""
    with _opened(path) as file:
        first, last = _frames(path, file, span or (0.0, None))
        lead = min(first, round(LEAD * file.samplerate))
        file.seek(first - lead)
        blocks = [block.mean(axis=1) for block in _blocks(file, lead + last - first)]
        samples = np.concatenate(blocks or [np.empty(0, np.float32)])[lead:]
        _refuse_nan(path, samples)
        _refuse_short(path, file, len(samples), last - first)
        resampled = soxr.resample(samples, file.samplerate, sample_rate, quality="VHQ")
        return np.ascontiguousarray(resampled, dtype=np.float32)


def check_suffix(path: Path) -> None:
    """Refuse a name that says no format we write, before any work is done for it."""
    if path.suffix.lower() not in FORMATS:
        raise AudioError(f"{path}: cannot write `{path.suffix}`", hint=f"use one of {', '.join(FORMATS)}")


def write(path: Path, samples: Samples, sample_rate: int) -> None:
    """Write mono (or frames x channels) samples in the format of the suffix; the file appears whole or not at all."""
    check_suffix(path)
    _refuse_nan(path, samples)
    kind, subtype = FORMATS[path.suffix.lower()]
    with replacing(path) as temporary:
        soundfile.write(temporary, samples, sample_rate, format=kind, subtype=subtype)


@contextmanager
def _opened(path: Path) -> Iterator[soundfile.SoundFile]:
    if not is_file(path):
        raise ClipError(path, "missing file")
    if path.stat().st_size == 0:
        raise ClipError(path, "zero length")
    try:
        with soundfile.SoundFile(path) as file:
            if file.frames == 0:
                raise ClipError(path, "zero length")
            if file.frames >= UNKNOWN:
                raise ClipError(path, "unreadable audio", "its header does not tell its length")
            yield file
    except soundfile.SoundFileError as error:
        raise ClipError(path, "unreadable audio", str(error).strip(" :")) from None


def _frames(path: Path, file: soundfile.SoundFile, span: tuple[float, float | None]) -> tuple[int, int]:
    """The first frame of a span and the one behind its last."""
    seconds, (start, end) = file.frames / file.samplerate, span
    stop = seconds if end is None else end
    if 0 <= start < stop < seconds + 1:  # so written that NaN fails too
        first, last = round(start * file.samplerate), round(stop * file.samplerate)
        if first < last <= file.frames:
            return first, last
    raise ClipError(path, "bad span", f"{start} to {end} of {seconds:.3f} s")


def _blocks(file: soundfile.SoundFile, frames: int | None = None) -> Iterator[npt.NDArray[np.float32]]:
    """Up to `frames` frames from here on, as (frames, channels)."""
    left = file.frames if frames is None else frames
    while left > 0 and len(block := file.read(min(left, BLOCK), dtype="float32", always_2d=True)):
        left -= len(block)
        yield block


def _refuse_nan(path: Path, samples: npt.NDArray[np.float32]) -> None:
    if not np.isfinite(samples).all():
        raise ClipError(path, "NaN samples")


def _refuse_short(path: Path, file: soundfile.SoundFile, frames: int, promised: int) -> None:
    if frames == 0:
        raise ClipError(path, "zero length")
    if frames < promised - SLACK * file.samplerate:
        detail = f"ends after {frames / file.samplerate:.2f} of {promised / file.samplerate:.2f} s"
        raise ClipError(path, "unreadable audio", detail)
