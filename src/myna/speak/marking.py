"""Marks on speech that leaves the engine: watermark, credentials in files, and an entry in the speech log."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from myna.audio.files import Samples, pcm16
from myna.provenance import check_installed
from myna.provenance.speech_log import SpeechOrigin, check_log, log_speech, new_id
from myna.provenance.watermark import MARK_NAME, StreamWatermark, watermark

if TYPE_CHECKING:
    from myna.speak.engine import Speech, SpeechStream
    from myna.speak.request import FinishReason, SpeechRequest


@dataclass(frozen=True, slots=True)
class SpeechMarker:
    """Marker for speech of one model. `origin` has a `watermark` unless that was switched off."""

    origin: SpeechOrigin
    device: str = "cpu"

    @classmethod
    def open(cls, origin: SpeechOrigin, *, with_watermark: bool, device: str) -> SpeechMarker:
        """Make a marker. Missing packages are an error here, before anything is spoken."""
        if with_watermark:
            check_installed()
        check_log()
        return cls(replace(origin, watermark=MARK_NAME if with_watermark else ""), device)

    def mark(self, speech: Speech, request: SpeechRequest) -> Speech:
        """Return speech with the watermark, and with its origin, which signs and logs the files it is saved to."""
        samples = speech.samples
        if self.origin.watermark:
            samples = watermark(samples, speech.sample_rate, device=self.device)
        return replace(speech, samples=samples, origin=self._origin(request))

    def mark_stream(self, stream: SpeechStream, request: SpeechRequest) -> MarkedStream:
        """Return a stream with the watermark, which is logged when it ends."""
        return MarkedStream(stream, self._origin(request), self.device)

    def _origin(self, request: SpeechRequest) -> SpeechOrigin:
        voice, consent = request.voice, request.consent
        return replace(self.origin, text=request.text, seed=request.seed, voice=voice, consent=consent, id=new_id())


def log_spoken(speech: Speech) -> Speech:
    """Log speech that is handed to a program."""
    if speech.origin is not None:
        log_speech("spoken", speech.origin, pcm16(speech.samples), seconds=round(speech.seconds, 3))
    return speech


class MarkedStream(Iterator[Samples]):
    """Samples of one request as they are generated, with the watermark. Together they are those of `Voice.speak`, bit
    for bit. `close` ends the request; the samples until then are logged."""

    def __init__(self, stream: SpeechStream, origin: SpeechOrigin, device: str) -> None:
        self.origin, self._stream = origin, stream
        self._samples = self._generate(stream, origin, device)

    @property
    def sample_rate(self) -> int:
        return self._stream.sample_rate

    @property
    def finish_reason(self) -> FinishReason | None:
        """Reason of the end, as in `Speech`, once all is generated."""
        return self._stream.finish_reason

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings, as in `Speech`, for what is generated so far."""
        return self._stream.warnings

    def __next__(self) -> Samples:
        return next(self._samples)

    def close(self) -> None:
        self._samples.close()
        self._stream.close()

    @staticmethod
    def _generate(stream: SpeechStream, origin: SpeechOrigin, device: str) -> Generator[Samples, None, None]:
        marker = StreamWatermark(stream.sample_rate, device=device) if origin.watermark else None
        digest, count = hashlib.sha256(), 0
        try:
            for samples in stream:
                ready = samples if marker is None else marker.push(samples)
                if len(ready):
                    digest.update(pcm16(ready))
                    count += len(ready)
                    yield ready
            if marker is not None and len(rest := marker.finish()):
                digest.update(pcm16(rest))
                count += len(rest)
                yield rest
        finally:
            if count:
                seconds = round(count / stream.sample_rate, 3)
                log_speech("streamed", origin, digest, seconds=seconds, finish_reason=stream.finish_reason)
