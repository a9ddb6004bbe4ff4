"""Audio files: read, write and check recordings; any rate and channels in, mono float32 out."""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import soundfile
import soxr  # type: ignore[import-untyped]

from myna.core.errors import AudioError
from myna.core.io import atomic_write, is_file

FloatArray = npt.NDArray[np.float32]
Samples = FloatArray
LISTENING_RATE = 16_000
"""Sample rate in hertz that all models in `listen/` were trained on."""
AudioDefect = Literal[
    "missing file", "unreadable audio", "cut short", "zero length", "silence", "NaN samples", "bad span"
]

DEFECT_HINTS: dict[AudioDefect, str] = {
    "missing file": "check the path, or put the file there",
    "unreadable audio": "convert it, for example: ffmpeg -i INPUT -ar 24000 OUTPUT.wav",
    "cut short": "copy or download it again, whole",
    "zero length": "record it again, or drop the line that names it",
    "silence": "record it again with the microphone on, or drop the line that names it",
    "NaN samples": "export it again as 16-bit PCM",
    "bad span": "keep start and end in seconds inside the recording",
}
AudioFileFormat = Literal["wav", "flac", "mp3", "ogg", "opus", "m4a"]
AUDIO_FORMATS = {  # of libsndfile
    ".wav": ("WAV", "PCM_16"),
    ".flac": ("FLAC", "PCM_16"),
    ".mp3": ("MP3", "MPEG_LAYER_III"),
    ".ogg": ("OGG", "VORBIS"),
    ".opus": ("OGG", "OPUS"),
}
M4A_SUFFIX = ".m4a"
BLOCK_SAMPLES = 1 << 20
"""Samples of all channels decoded at once."""
UNKNOWN_LENGTH_FRAMES = 1 << 62
"""Minimum frame count by which libsndfile says that the header has no length."""
SAMPLE_RATES = range(500, 1_000_000)
"""Rates of real recordings. With another rate the header is damaged: a few bytes of samples would become hours."""
MAX_MISSING_SECONDS = 0.1
"""Seconds by which a file may end before the end given by its header."""
SILENCE_PEAK = 1e-3
"""Peak, of a full scale of 1, below which a recording is silence (-60 dB)."""
SILENCE_WINDOW_SECONDS = 0.01
"""Seconds of the windows in which silence is judged."""
DATA_SIZE = re.compile(r"^\s*(?:data(?: size)?|SSND|BODY)\s*:\s*(\d+)(?: \(should be (\d+)\))?", re.I | re.M)
"""Size of the samples in libsndfile's log: the value in the header, and the actual one."""
STREAMED_SIZES = (range(0x7FFF_EF00, 0x8000_0000), range(0xFFFF_EF00, 0x1_0000_0000))
"""Sizes in WAV headers that were written to a pipe, before the length was known."""
PREROLL_SECONDS = 0.3
"""Seconds decoded and dropped before a span, because MP3 frames depend on those before them."""


class AudioFileError(AudioError):
    """Recording that cannot be used; `defect` is the kind of its defect."""

    def __init__(self, path: Path, flaw: AudioDefect, detail: str = "", missing_seconds: float = 0.0) -> None:
        super().__init__(f"{path}: {flaw}{detail and ': ' + detail}", hint=DEFECT_HINTS[flaw])
        self.defect = flaw
        self.detail = detail
        self.missing_seconds = missing_seconds
        """Seconds by which a file is shorter than its header promises."""


@dataclass(frozen=True, slots=True)
class AudioInfo:
    seconds: float
    sample_rate: int
    channels: int
    silences: tuple[tuple[float, float], ...] | None = field(default=None, compare=False, repr=False)
    """Start and end of silences in seconds; None if nothing was decoded."""

    def is_silent(self, start: float = 0.0, end: float | None = None) -> bool:
        """Tell whether a part of a recording decoded by `check_audio` is silent."""
        assert self.silences is not None
        stop = self.seconds if end is None else end
        edge = min(SILENCE_WINDOW_SECONDS, (stop - start) / 4)
        return any(first <= start + edge and stop - edge <= last for first, last in self.silences)


def probe(path: Path) -> AudioInfo:
    """Return length, rate and channels from the header, without decoding."""
    with _open(path) as file:
        return AudioInfo(file.frames / file.samplerate, file.samplerate, file.channels)


def check_audio(path: Path) -> AudioInfo:
    """Decode every sample and return the true length, or raise an `AudioFileError`. Silence is no error here: see
    `AudioInfo.is_silent`."""
    with _open(path) as file:
        frames, window = 0, _window_frames(file.samplerate)
        is_silent = [np.empty(0, np.bool_)]
        for block in _checked_blocks(path, file):
            frames += len(block)
            mono, starts = block.mean(axis=1), np.arange(0, len(block), window)
            is_silent.append(np.maximum.reduceat(mono, starts) - np.minimum.reduceat(mono, starts) < 2 * SILENCE_PEAK)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], *is_silent, [False]]))) * (window / file.samplerate)
        silences = tuple(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
        return AudioInfo(frames / file.samplerate, file.samplerate, file.channels, silences)


def read_audio(
    path: Path,
    *,
    sample_rate: int = 24_000,
    span: tuple[float, float | None] | None = None,
    max_seconds: float | None = None,
) -> Samples:
    """Return mono samples of a recording, or of `span` in seconds, at `sample_rate`. Only the span is decoded.

    A recording longer than `max_seconds` is refused before anything is decoded.
    """
    with _open(path) as file:
        first, last = _frames(path, file, span or (0.0, None))
        if max_seconds is not None and last - first > max_seconds * file.samplerate:
            seconds = (last - first) / file.samplerate
            problem = f"{path}: too long: {seconds:.1f} s, and at most {max_seconds:g} s are read"
            raise AudioError(problem, hint=f"cut out a part: ffmpeg -i INPUT -t {max_seconds:g} OUTPUT.wav")
        lead = min(first, round(PREROLL_SECONDS * file.samplerate))
        file.seek(first - lead)
        blocks = [block.mean(axis=1) for block in _blocks(file, lead + last - first)]
        samples = np.concatenate(blocks or [np.empty(0, np.float32)])[lead:]
        _check_finite(path, samples)
        _check_length(path, file, len(samples), last - first)
        resampled = soxr.resample(samples, file.samplerate, sample_rate, quality="VHQ")
        return np.ascontiguousarray(resampled, dtype=np.float32)


@contextmanager
def stream_audio(path: Path) -> Iterator[tuple[AudioInfo, Iterator[npt.NDArray[np.float32]]]]:
    """Yield the header of a recording of any length and its blocks of (frames, channels).

    A damaged file yields what can be decoded, and then raises the `AudioFileError` with the reason.
    """
    with _open(path, allow_short=True) as file:
        yield AudioInfo(file.frames / file.samplerate, file.samplerate, file.channels), _checked_blocks(path, file)


def check_not_silent(path: Path, samples: Samples) -> None:
    """Refuse silent samples; `path` is the recording they were read from."""
    if samples.max() - samples.min() < 2 * SILENCE_PEAK:  # the offset does not count: a constant is not audible
        raise AudioFileError(path, "silence", f"nothing in it is louder than {20 * np.log10(SILENCE_PEAK):.0f} dB")


def check_audio_suffix(path: Path) -> None:
    """Refuse an output name without a supported suffix, before any work is done for it."""
    known = (*AUDIO_FORMATS, M4A_SUFFIX)
    if path.suffix.lower() not in known:
        raise AudioError(f"{path}: cannot write `{path.suffix}`", hint=f"use one of {', '.join(known)}")


def write_audio(path: Path, samples: Samples, sample_rate: int) -> None:
    """Write mono (or frames x channels) samples atomically in the format of the suffix."""
    content = encode_audio_file(path, samples, sample_rate)
    with atomic_write(path) as temporary:
        temporary.write_bytes(content)


def encode_audio_file(path: Path, samples: Samples, sample_rate: int) -> bytes:
    """Return the bytes of a file of that name. They are made in memory because libsndfile does not report a full
    disk."""
    check_audio_suffix(path)
    _check_finite(path, samples)
    content = io.BytesIO()
    if path.suffix.lower() == M4A_SUFFIX:
        try:
            _write_m4a(content, samples, sample_rate)
        except ContainerError as error:
            raise AudioError(f"{path}: cannot be written: {error}", hint="write a .wav or .flac file instead") from None
    else:
        kind, subtype = AUDIO_FORMATS[path.suffix.lower()]
        soundfile.write(content, samples, sample_rate, format=kind, subtype=subtype)
    return content.getvalue()


def join_samples(parts: Sequence[Samples]) -> Samples:
    """Join parts; a single part is not copied."""
    return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.float32), *parts])


def pcm16(samples: Samples) -> bytes:
    """Return samples as raw audio: signed 16-bit integers, little-endian."""
    scaled = samples.clip(-1, 1)
    scaled *= 32767
    return bytes(scaled.astype("<i2").tobytes())


def as_mono_16khz(samples: Samples, sample_rate: int) -> Samples:
    """Resample a mono clip to 16 kHz. Refuse other shapes and values that are not finite."""
    if samples.ndim != 1:
        raise AudioError(f"a clip of shape {samples.shape} is not mono", hint="give one row of samples")
    if not np.isfinite(samples).all():
        raise AudioError("a clip holds samples that are no numbers", hint="look at what made it")
    if sample_rate != LISTENING_RATE:
        samples = soxr.resample(samples, sample_rate, LISTENING_RATE, quality="VHQ")
    return np.ascontiguousarray(samples, dtype=np.float32)


def is_silent(samples: Samples) -> bool:
    """Tell whether a clip has no sample above -100 dB, or no samples at all."""
    return not np.abs(samples).max(initial=0) > 1e-5


CONTAINER_FORMATS = "mov,matroska,aac,amr,asf,avi,caf,mpegts,mpeg,flv,wv,ape,ac3,eac3,tta,tak,dsf"
"""FFmpeg's names of the supported formats. Formats of libsndfile are left out, since such a file is damaged, and so are
playlists, which name other files."""
ESTIMATED_LENGTH_FORMATS = ("aac", "ac3", "eac3", "amr", "mpegts", "mpeg")
"""Formats without a length of their own, for which FFmpeg estimates it from the bit rate."""
SEEK_FRAMES = 1 << 19
"""Frame up to which a seek decodes everything from the beginning."""
M4A_BIT_RATE = 96_000
"""Bits per second of a channel in AAC."""


class ContainerError(Exception):
    """Error in reading or writing a container."""


class ContainerFile:
    """First audio stream of a container, with the attributes of a `soundfile.SoundFile`."""

    def __init__(self, path: Path) -> None:
        with _container_errors():
            self._container = _import_av().open(
                str(path),
                options={"format_whitelist": CONTAINER_FORMATS, "protocol_whitelist": "file"},
                metadata_errors="replace",
            )
        self.close = self._container.close
        try:
            with _container_errors():
                if not self._container.streams.audio:
                    raise ContainerError("it holds no audio")
                self._stream = self._container.streams.audio[0]
                if self._stream.codec_context is None:
                    raise ContainerError("there is no decoder for its audio")
                self.samplerate: int = self._stream.codec_context.sample_rate or 0
                self.channels: int = self._stream.codec_context.layout.nb_channels
                if not self.samplerate or not self.channels:
                    raise ContainerError("it does not tell its sample rate or channels")
                self.frames = round(self._seconds() * self.samplerate)
                self.seek(0)
        except ContainerError:
            self.close()
            raise

    def seek(self, frame: int) -> None:
        """Go to a frame exactly: by time stamps if they count samples, else by decoding everything before it."""
        exact = self._stream.time_base == Fraction(1, self.samplerate)
        start = self._stream.start_time or 0
        with _container_errors():
            self._container.seek(start + frame if exact and frame > SEEK_FRAMES else start, stream=self._stream)
        self._blocks = self._decode(frame, start if exact and frame > SEEK_FRAMES else None)

    def read_block(self, frames: int) -> npt.NDArray[np.float32]:
        """Read up to `frames` frames as (frames, channels); fewer, or none, at the end."""
        blocks, missing = [np.empty((0, self.channels), np.float32)], frames
        with _container_errors():
            for block in self._blocks:
                blocks.append(block[:missing])
                if len(block) > missing:
                    self._blocks = chain([block[missing:]], self._blocks)
                missing -= len(blocks[-1])
                if not missing:
                    break
        return np.concatenate(blocks)

    def _decode(self, first: int, start: int | None) -> Iterator[npt.NDArray[np.float32]]:
        """Yield decoded blocks from frame `first` on; `start` is the time stamp of frame 0 after a seek."""
        resampler = _import_av().AudioResampler("fltp", self._stream.codec_context.layout, self.samplerate)
        position: int | None = 0 if start is None else None
        for decoded in self._container.decode(self._stream):
            if position is None and start is not None:
                if decoded.pts is None:
                    raise ContainerError("its frames have no time stamps")
                position = decoded.pts - start
            for frame in resampler.resample(decoded):
                block = frame.to_ndarray().T
                if block.shape[1] != self.channels:
                    raise ContainerError(f"its channels change from {self.channels} to {block.shape[1]}")
                assert position is not None
                skipped = min(max(first - position, 0), len(block))
                position += len(block)
                if skipped < len(block):
                    yield block[skipped:]

    def _seconds(self) -> Fraction:
        stream, container = self._stream, self._container
        if container.format.name.split(",")[0] not in ESTIMATED_LENGTH_FORMATS:
            if stream.duration:
                return stream.duration * stream.time_base  # type: ignore[no-any-return]
            if container.duration:
                return Fraction(container.duration, 1_000_000)
        # Counted from the packets, without decoding.
        return sum(packet.duration or 0 for packet in container.demux(stream)) * stream.time_base  # type: ignore[no-any-return]


def _write_m4a(content: io.BytesIO, samples: npt.NDArray[np.float32], sample_rate: int) -> None:
    planes = np.ascontiguousarray(np.atleast_2d(samples.T), np.float32)
    av, layout = _import_av(), "mono" if len(planes) == 1 else f"{len(planes)} channels"
    with _container_errors(), av.open(content, "w", format="ipod") as container:
        stream = container.add_stream("aac", rate=sample_rate, layout=layout)
        stream.codec_context.bit_rate = M4A_BIT_RATE * len(planes)
        frame = av.AudioFrame.from_ndarray(planes, format="fltp", layout=layout)
        frame.sample_rate, frame.pts = sample_rate, 0
        for one in (frame, None):
            container.mux(stream.encode(one))


def _import_av() -> Any:
    try:
        import av
    except ImportError as error:
        raise ContainerError(f"PyAV, which reads it, cannot be imported ({error}); pip install av") from None
    return av


@contextmanager
def _container_errors() -> Iterator[None]:
    try:
        yield
    except (_import_av().FFmpegError, ValueError) as error:
        raise ContainerError(getattr(error, "strerror", None) or str(error)) from None


class _SoundFile(soundfile.SoundFile):  # type: ignore[misc]
    """File that libsndfile reads."""

    def seek(self, frames: int, whence: int = soundfile.SEEK_SET) -> int:
        """Seek only if the position changes: soundfile seeks after every read, and an MP3 then decodes its last frames
        again."""
        is_here = whence == soundfile.SEEK_SET and frames == self.tell()
        return frames if is_here else int(super().seek(frames, whence))

    def read_block(self, frames: int) -> npt.NDArray[np.float32]:
        """Read up to `frames` frames as (frames, channels)."""
        return self.read(frames, dtype="float32", always_2d=True)  # type: ignore[no-any-return]


AudioReader = _SoundFile | ContainerFile


@contextmanager
def _open(path: Path, *, allow_short: bool = False) -> Iterator[AudioReader]:
    if not is_file(path):
        raise AudioFileError(path, "missing file")
    if path.stat().st_size == 0:
        raise AudioFileError(path, "zero length")
    try:
        with closing(_open_reader(path)) as file:
            if file.frames <= 0:
                raise AudioFileError(path, "zero length")
            if file.frames >= UNKNOWN_LENGTH_FRAMES:
                raise AudioFileError(path, "unreadable audio", "its header does not tell its length")
            if file.samplerate not in SAMPLE_RATES:
                raise AudioFileError(path, "unreadable audio", f"its header tells {file.samplerate} samples a second")
            if isinstance(file, _SoundFile) and not allow_short:
                _check_data_size(path, file)
            yield file
    except (soundfile.SoundFileError, ContainerError) as error:
        raise AudioFileError(path, "unreadable audio", str(error).strip(" :")) from None


def _open_reader(path: Path) -> AudioReader:
    if path.suffix.lower() == ".raw":  # soundfile expects rate and channels as arguments
        raise ContainerError("raw samples have no header")
    try:
        file = _SoundFile(path)
    except soundfile.LibsndfileError as error:
        first = error.error_string.strip(" .:")
    else:
        if file.format == "OGG" and _is_chained_ogg(path, path.stat().st_mtime_ns):
            file.close()
            raise ContainerError("it is a chain of Ogg streams, of which only the first would be read")
        return file
    try:
        return ContainerFile(path)
    except ContainerError as error:
        raise ContainerError(f"{first}; {error}" if first else str(error)) from None


@lru_cache(maxsize=4096)
def _is_chained_ogg(path: Path, _modified: int) -> bool:
    """Tell whether another stream begins after the first, as in recordings of radio stations. Remembered, because it
    goes through the whole file, and a recording may be opened for each of hundreds of spans."""
    with path.open("rb") as file:
        has_data = False
        while len(header := file.read(27)) == 27 and header.startswith(b"OggS"):
            begins = bool(header[5] & 2)
            if begins and has_data:
                return True
            has_data = has_data or not begins
            file.seek(sum(file.read(header[26])), io.SEEK_CUR)  # the segment table holds the lengths of the segments
    return False


def _frames(path: Path, file: AudioReader, span: tuple[float, float | None]) -> tuple[int, int]:
    """Return the first frame of a span and the one after its last."""
    seconds, (start, end) = file.frames / file.samplerate, span
    stop = seconds if end is None else end
    if 0 <= start < stop < seconds + 1:  # written so that NaN fails too
        first, last = round(start * file.samplerate), round(stop * file.samplerate)
        if first < last <= file.frames:
            return first, last
    raise AudioFileError(path, "bad span", f"{start} to {end} of {seconds:.3f} s")


def _blocks(file: AudioReader, frames: int | None = None) -> Iterator[npt.NDArray[np.float32]]:
    """Yield up to `frames` frames as (frames, channels); all blocks but the last are whole windows."""
    left = file.frames if frames is None else frames
    window = _window_frames(file.samplerate)
    size = max(1, BLOCK_SAMPLES // file.channels // window) * window
    while left > 0 and len(block := file.read_block(min(left, size))):
        left -= len(block)
        yield block


def _checked_blocks(path: Path, file: AudioReader) -> Iterator[npt.NDArray[np.float32]]:
    """Yield all frames of a file; raise an error where they are damaged, or at the end if some are missing."""
    frames = 0
    for block in _blocks(file):
        _check_finite(path, block)
        frames += len(block)
        yield block
    if isinstance(file, _SoundFile):
        _check_data_size(path, file)
    _check_length(path, file, frames, file.frames)


def _window_frames(sample_rate: int) -> int:
    return min(BLOCK_SAMPLES, max(1, round(SILENCE_WINDOW_SECONDS * sample_rate)))


def _check_finite(path: Path, samples: npt.NDArray[np.float32]) -> None:
    if not np.isfinite(samples).all():
        raise AudioFileError(path, "NaN samples")


def _check_data_size(path: Path, file: _SoundFile) -> None:
    """Refuse a file whose header promises more samples than there are, which libsndfile reports only in its log."""
    for promised, held in DATA_SIZE.findall(file.extra_info):
        sizes = int(promised), int(held or path.stat().st_size)
        if sizes[0] > sizes[1] and not any(sizes[0] in streamed for streamed in STREAMED_SIZES):
            _check_length(path, file, file.frames, round(file.frames * sizes[0] / max(1, sizes[1])))


def _check_length(path: Path, file: AudioReader, frames: int, expected: int) -> None:
    if frames == 0:
        raise AudioFileError(path, "zero length")
    if frames < expected - MAX_MISSING_SECONDS * file.samplerate:
        detail = f"ends after {frames / file.samplerate:.2f} of {expected / file.samplerate:.2f} s"
        raise AudioFileError(path, "cut short", detail, (expected - frames) / file.samplerate)
