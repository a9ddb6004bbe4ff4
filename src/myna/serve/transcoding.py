"""Audio in and out of a server: uploads are decoded in a process of their own, responses encoded as samples come."""

import asyncio
import base64
import hashlib
import multiprocessing
import os
import struct
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil  # type: ignore[import-untyped]
import soxr  # type: ignore[import-untyped]

from myna.audio.files import Samples, check_not_silent, pcm16, probe, read_audio
from myna.audio.reference import CheckedReference
from myna.core.errors import AudioError
from myna.core.io import sniff_suffix
from myna.core.pools import end_with_parent
from myna.serve.schemas import ApiError, AudioFormat
from myna.speak.request import MAX_REFERENCE_SECONDS, open_reference

MAX_UPLOAD_BYTES = 10 * 2**20
"""Largest upload in bytes, as in OpenAI's API."""
MAX_START_SECONDS, MAX_DECODE_SECONDS = 120.0, 20.0
"""Seconds the process may take to start, on a busy machine, and to decode a recording."""
MAX_DECODE_BYTES = 2 * 2**30
"""Bytes of memory of all kinds that decoding may take beyond those at the start. CUDA alone maps more than this."""
RECORDING_NAME = "recording"
MAX_CACHED = 32
"""Number of decoded recordings that are kept: programs send the same reference with every request."""
MAX_SAMPLES_A_SECOND = 400_000
"""Highest product of sample rate and channels, that of 192 kHz in stereo: a second of more takes too long to decode."""


class UploadDecoder:
    """Decoder of uploads, one after another, in a process that may fail without harm."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._turn = asyncio.Lock()
        self._decoded: OrderedDict[tuple[bytes, int, float | None], CheckedReference] = OrderedDict()

    async def decode(
        self, data: bytes, sample_rate: int, *, param: str, max_seconds: float = MAX_REFERENCE_SECONDS
    ) -> Samples:
        """Decode a recording to mono samples; `param` names its field."""
        return (await self._decode(data, sample_rate, max_seconds, param)).samples

    async def decode_reference(self, data: bytes, sample_rate: int, *, param: str) -> CheckedReference:
        """Decode a reference, cleaned as everywhere else, and list its problems."""
        return await self._decode(data, sample_rate, None, param)

    async def _decode(self, data: bytes, sample_rate: int, max_seconds: float | None, param: str) -> CheckedReference:
        if len(data) > MAX_UPLOAD_BYTES:
            raise ApiError(413, f"a recording has at most {MAX_UPLOAD_BYTES // 2**20} MiB", param=param)
        key = (hashlib.blake2b(data, digest_size=16).digest(), sample_rate, max_seconds)
        if key not in self._decoded:  # a recording that is known does not wait for the decoder
            async with self._turn:
                if key not in self._decoded:
                    self._decoded[key] = await self._run(data, sample_rate, max_seconds, param)
        self._decoded.move_to_end(key)
        decoded = self._decoded[key]
        if len(self._decoded) > MAX_CACHED:
            self._decoded.popitem(last=False)
        return decoded

    async def _run(self, data: bytes, sample_rate: int, max_seconds: float | None, param: str) -> CheckedReference:
        loop = asyncio.get_running_loop()
        try:
            if self._pool is None:
                context = multiprocessing.get_context("spawn")
                self._pool = ProcessPoolExecutor(1, context, initializer=_start_process)
                async with asyncio.timeout(MAX_START_SECONDS):
                    await loop.run_in_executor(self._pool, os.getpid)  # which returns when the process has started
            pending = loop.run_in_executor(self._pool, _decode, data, sample_rate, max_seconds)
            async with asyncio.timeout(MAX_DECODE_SECONDS):
                return await pending
        except AudioError as error:
            raise ApiError.of(error, param=param) from None
        except (BrokenExecutor, MemoryError, TimeoutError):
            self.close()
            raise ApiError(400, "the recording cannot be decoded within the limits", param=param) from None

    def close(self) -> None:
        if self._pool is not None:
            for process in list((self._pool._processes or {}).values()):
                process.kill()
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


def _start_process() -> None:
    end_with_parent()
    _limit_memory()


def _limit_memory() -> None:
    if sys.platform in ("win32", "darwin"):  # which have no limit, or one that is refused: cpython#78783
        return
    import resource

    memory = psutil.Process().memory_info().vms + MAX_DECODE_BYTES
    for kind, limit in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 2 * MAX_UPLOAD_BYTES)):
        with suppress(ValueError):  # a lower limit of the machine stays
            resource.setrlimit(kind, (limit, limit))


def _decode(data: bytes, sample_rate: int, max_seconds: float | None) -> CheckedReference:
    """Decode a recording as it is; without `max_seconds` clean it as a reference."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, RECORDING_NAME + sniff_suffix(data))
        path.write_bytes(data)
        try:
            info = probe(path)
            if info.sample_rate * info.channels > MAX_SAMPLES_A_SECOND:
                problem = f"{path} has {info.channels} channels at {info.sample_rate} Hz, which is too much to decode"
                raise AudioError(problem, hint="send one channel at 48 kHz or less")
            if max_seconds is None:
                checked = open_reference(path, sample_rate)
            else:
                checked = CheckedReference(read_audio(path, sample_rate=sample_rate, max_seconds=max_seconds))
                check_not_silent(path, checked.samples)
        except AudioError as error:  # without the path, which means nothing to clients
            raise AudioError(error.what.replace(str(path), RECORDING_NAME), hint=error.hint) from None
        problems = tuple(problem.replace(str(path), RECORDING_NAME) for problem in checked.problems)
        return CheckedReference(np.ascontiguousarray(checked.samples), problems)


def recording_bytes(text: str, *, param: str) -> bytes:
    """Return the recording in a JSON field: base64, or a data URL. Addresses and paths are refused: a request never
    makes the server fetch or open anything."""
    if text.startswith("data:"):
        header, _, text = text.partition(",")
        if not header.endswith(";base64"):
            raise ApiError(400, f"{param}: a data URL must be in base64", param=param)
    elif "://" in text[:64] or (text.startswith(("/", ".", "~")) and len(text) < 4096):
        raise ApiError(
            400,
            f"{param}: addresses and paths are not opened; send the recording itself, in base64 or as a data URL",
            param=param,
            code="url_not_allowed",
        )
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise ApiError(400, f"{param}: this is neither base64 nor a data URL", param=param) from None


UNKNOWN_BYTES = 0xFFFFFFFF
"""Length in the header of a WAV file of unknown length."""
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
    "mulaw": _Container("audio/PCMU", "mulaw", "pcm_mulaw", {}),
    "alaw": _Container("audio/PCMA", "alaw", "pcm_alaw", {}),
}
"""Formats that FFmpeg writes. Opus pages hold 60 ms; by default they would hold back a second."""
MEDIA_TYPES: dict[str, str] = {name: one.media_type for name, one in CONTAINERS.items()} | {
    "wav": "audio/wav",
    "pcm": "audio/pcm",
}


class AudioEncoder:
    """Encoder of one stream: signed 16-bit mono samples in, bytes of a file out, as early as the format allows. The
    file may have another sample rate, and a bit rate, where its format has one."""

    def __init__(
        self, format: AudioFormat, sample_rate: int, to_rate: int | None = None, bit_rate: int | None = None
    ) -> None:
        self.sample_rate, self._pts = to_rate or sample_rate, 0
        is_same = self.sample_rate == sample_rate
        self._resampler = None if is_same else soxr.ResampleStream(sample_rate, self.sample_rate, 1)
        self._container: Any = None
        self._header = wav_header(self.sample_rate, None) if format == "wav" else b""
        if (kind := CONTAINERS.get(format)) is None:
            return
        import av

        self._written = _Sink()
        options = {"flush_packets": "1", **kind.options}
        self._container = av.open(self._written, "w", format=kind.muxer, options=options, buffer_size=4096)
        self._stream = self._container.add_stream(kind.codec, rate=self.sample_rate, layout="mono")
        if kind.bit_rate is not None:
            self._stream.codec_context.bit_rate = bit_rate or kind.bit_rate
        self._frame = av.AudioFrame

    def push(self, pcm: bytes, *, last: bool = False) -> bytes:
        """Encode the next samples. Return the bytes that are ready."""
        if self._resampler is not None:
            samples = np.frombuffer(pcm, "<i2") / np.float32(32767)
            pcm = pcm16(self._resampler.resample_chunk(samples, last=last))
        if self._container is None:
            header, self._header = self._header, b""
            return header + pcm
        if pcm:
            samples = np.frombuffer(pcm, "<i2")[None]
            frame = self._frame.from_ndarray(np.ascontiguousarray(samples), format="s16", layout="mono")
            frame.sample_rate, frame.pts = self.sample_rate, self._pts
            self._pts += samples.shape[1]
            self._mux(frame)
        return self._written.take()

    def finish(self) -> bytes:
        """Return the last bytes."""
        rest = self.push(b"", last=True)
        if self._container is None:
            return rest
        self._mux(None)
        self.close()
        return rest + self._written.take()

    def close(self) -> None:
        """Free the resources of FFmpeg."""
        if self._container is not None:
            self._container.close()

    def _mux(self, frame: Any) -> None:
        for packet in self._stream.encode(frame):
            self._container.mux(packet)


class _Sink(bytearray):
    """File that is read while it is written, and never changed afterwards."""

    def write(self, data: bytes) -> int:
        self.extend(data)
        return len(data)

    def take(self) -> bytes:
        content = bytes(self)
        self.clear()
        return content


def wav_header(sample_rate: int, data_bytes: int | None) -> bytes:
    """Return the header of a mono WAV file of 16 bits; `data_bytes` None is an unknown length."""
    whole = UNKNOWN_BYTES if data_bytes is None else data_bytes + WAV_HEADER_BYTES - 8
    size = UNKNOWN_BYTES - (WAV_HEADER_BYTES - 8) if data_bytes is None else data_bytes
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, sample_rate, 2 * sample_rate, 2, 16)
    return struct.pack("<4sI4s", b"RIFF", whole, b"WAVE") + form + struct.pack("<4sI", b"data", size)


def encode_whole(
    pcm: bytes, format: AudioFormat, sample_rate: int, to_rate: int | None = None, bit_rate: int | None = None
) -> bytes:
    """Encode a whole file."""
    encoder = AudioEncoder(format, sample_rate, to_rate, bit_rate)
    content = encoder.push(pcm) + encoder.finish()
    if format == "wav":  # whose length is known now
        return wav_header(encoder.sample_rate, len(content) - WAV_HEADER_BYTES) + content[WAV_HEADER_BYTES:]
    return content
