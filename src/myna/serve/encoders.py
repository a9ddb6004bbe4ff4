"""Audio formats of responses, encoded as the samples come."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

AudioFormat = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]
UNKNOWN_BYTES = 0xFFFFFFFF
"""Length in a WAV header that was written before the length was known."""
WAV_HEADER_BYTES = 44


class _Container(NamedTuple):
    media_type: str
    muxer: str
    codec: str
    options: Mapping[str, str]
    bit_rate: int | None = None


CONTAINERS: dict[str, _Container] = {
    "mp3": _Container("audio/mpeg", "mp3", "libmp3lame", {"write_xing": "0", "id3v2_version": "0"}, 64_000),
    "opus": _Container("audio/opus", "ogg", "libopus", {"page_duration": "60000"}, 48_000),
    "aac": _Container("audio/aac", "adts", "aac", {}, 64_000),
    "flac": _Container("audio/flac", "flac", "flac", {}),
}
"""Formats that FFmpeg writes. Opus pages hold 60 ms: by default they would hold back a second."""
MEDIA_TYPES: dict[str, str] = {name: one.media_type for name, one in CONTAINERS.items()} | {
    "wav": "audio/wav",
    "pcm": "audio/pcm",
}


class AudioEncoder:
    """Encoder of one stream: signed 16-bit mono samples in, bytes of a file out, as soon as the format allows."""

    def __init__(self, format: AudioFormat, sample_rate: int) -> None:
        self._sample_rate, self._pts = sample_rate, 0
        self._container: Any = None
        self._header = wav_header(sample_rate, None) if format == "wav" else b""
        if format in CONTAINERS:
            self._open(CONTAINERS[format])

    def _open(self, kind: _Container) -> None:
        import av

        self._written = _Sink()
        options = {"flush_packets": "1", **kind.options}
        self._container = av.open(self._written, "w", format=kind.muxer, options=options, buffer_size=4096)
        self._stream = self._container.add_stream(kind.codec, rate=self._sample_rate, layout="mono")
        if kind.bit_rate is not None:
            self._stream.codec_context.bit_rate = kind.bit_rate
        self._frame = av.AudioFrame

    def push(self, pcm: bytes) -> bytes:
        """Encode the next samples; the bytes that are ready, perhaps none."""
        if self._container is None:
            header, self._header = self._header, b""
            return header + pcm
        if pcm:
            samples = np.frombuffer(pcm, "<i2")[None]
            frame = self._frame.from_ndarray(np.ascontiguousarray(samples), format="s16", layout="mono")
            frame.sample_rate, frame.pts = self._sample_rate, self._pts
            self._pts += samples.shape[1]
            self._mux(frame)
        return self._written.take()

    def finish(self) -> bytes:
        """The last bytes."""
        if self._container is None:
            return self.push(b"")
        self._mux(None)
        self.close()
        return self._written.take()

    def close(self) -> None:
        """Give back what FFmpeg holds."""
        if self._container is not None:
            self._container.close()

    def _mux(self, frame: Any) -> None:
        for packet in self._stream.encode(frame):
            self._container.mux(packet)


class _Sink:
    """A file that is read while it is written; nothing can be changed behind its end."""

    def __init__(self) -> None:
        self._content = bytearray()

    def write(self, data: bytes) -> int:
        self._content += data
        return len(data)

    def take(self) -> bytes:
        content = bytes(self._content)
        self._content.clear()
        return content


def wav_header(sample_rate: int, data_bytes: int | None) -> bytes:
    """Header of a mono WAV file of 16 bits, of unknown length where `data_bytes` is None."""
    whole = UNKNOWN_BYTES if data_bytes is None else data_bytes + WAV_HEADER_BYTES - 8
    size = UNKNOWN_BYTES - (WAV_HEADER_BYTES - 8) if data_bytes is None else data_bytes
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, sample_rate, 2 * sample_rate, 2, 16)
    return struct.pack("<4sI4s", b"RIFF", whole, b"WAVE") + form + struct.pack("<4sI", b"data", size)


def encode_whole(pcm: bytes, format: AudioFormat, sample_rate: int) -> bytes:
    """A whole file."""
    if format == "wav":
        return wav_header(sample_rate, len(pcm)) + pcm
    encoder = AudioEncoder(format, sample_rate)
    return encoder.push(pcm) + encoder.finish()
