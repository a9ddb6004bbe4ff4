"""Containers that libsndfile does not know (MP4, M4A, WebM, ...), through PyAV: decoded by FFmpeg, and M4A encoded."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

CONTAINER_FORMATS = "mov,matroska,aac,amr,asf,avi,caf,mpegts,mpeg,flv,wv,ape,ac3,eac3,tta,tak,dsf"
"""FFmpeg's names of the formats that are read: neither those of libsndfile, which are then damaged, nor playlists and
the like, which name other files."""
ESTIMATED_LENGTH_FORMATS = ("aac", "ac3", "eac3", "amr", "mpegts", "mpeg")
"""Formats without a length of their own: FFmpeg estimates it from the bit rate."""
SEEK_FRAMES = 1 << 19
"""Up to this frame everything is decoded from the beginning."""
M4A_BIT_RATE = 96_000
"""Of a channel, in AAC."""


class ContainerError(Exception):
    """A container cannot be read or written."""


class ContainerFile:
    """The first audio stream of a container, with the attributes of a `soundfile.SoundFile`."""

    def __init__(self, path: Path) -> None:
        with _container_errors():
            self._container = _import_av().open(
                str(path),
                options={"format_whitelist": CONTAINER_FORMATS, "protocol_whitelist": "file"},
                metadata_errors="replace",
            )
        try:
            with _container_errors():
                self._open_stream()
        except ContainerError:
            self.close()
            raise

    def _open_stream(self) -> None:
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

    def close(self) -> None:
        self._container.close()

    def seek(self, frame: int) -> None:
        """Go to a frame, exactly: by time stamps where they count samples, else by decoding what is before it."""
        exact = self._stream.time_base == Fraction(1, self.samplerate)
        start = self._stream.start_time or 0
        with _container_errors():
            self._container.seek(start + frame if exact and frame > SEEK_FRAMES else start, stream=self._stream)
        self._blocks = self._decode(frame, start if exact and frame > SEEK_FRAMES else None)

    def read_block(self, frames: int) -> npt.NDArray[np.float32]:
        """Up to `frames` frames from here on, as (frames, channels); fewer, or none, at the end."""
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
        """Decoded blocks from frame `first` on; `start` is the time stamp of frame 0 where the stream was searched."""
        resampler = _import_av().AudioResampler("fltp", self._stream.codec_context.layout, self.samplerate)
        position: int | None = 0 if start is None else None
        for decoded in self._container.decode(self._stream):
            if position is None and start is not None:
                if decoded.pts is None:
                    raise ContainerError("its frames have no time stamps")
                position = decoded.pts - start
            for frame in resampler.resample(decoded):
                block = frame.to_ndarray().T
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
        # Counted: nothing is decoded for it.
        return sum(packet.duration or 0 for packet in container.demux(stream)) * stream.time_base  # type: ignore[no-any-return]


def encode_m4a(samples: npt.NDArray[np.float32], sample_rate: int) -> bytes:
    """An M4A file (AAC) of samples, mono or (frames, channels)."""
    planes = np.ascontiguousarray(np.atleast_2d(samples.T), np.float32)
    av, content, layout = _import_av(), io.BytesIO(), "mono" if len(planes) == 1 else f"{len(planes)} channels"
    with _container_errors(), av.open(content, "w", format="ipod") as container:
        stream = container.add_stream("aac", rate=sample_rate, layout=layout)
        stream.codec_context.bit_rate = M4A_BIT_RATE * len(planes)
        frame = av.AudioFrame.from_ndarray(planes, format="fltp", layout=layout)
        frame.sample_rate, frame.pts = sample_rate, 0
        for one in (frame, None):
            container.mux(stream.encode(one))
    return content.getvalue()


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
