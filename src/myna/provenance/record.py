"""Audio files of speech, signed and logged as they are written."""

from __future__ import annotations

from pathlib import Path

from myna.audio.files import Samples, encode_audio_file
from myna.core.io import atomic_write
from myna.provenance.credentials import sign_audio
from myna.provenance.origin import SpeechOrigin
from myna.provenance.speech_log import log_speech


def write_speech(path: Path, samples: Samples, sample_rate: int, origin: SpeechOrigin) -> bool:
    """Write an audio file with its credentials, whole or not at all, and log it; whether it could be signed."""
    plain = encode_audio_file(path, samples, sample_rate)
    signed = sign_audio(plain, path.suffix, origin)
    content = plain if signed is None else signed
    with atomic_write(path) as temporary:
        temporary.write_bytes(content)
    seconds = round(len(samples) / sample_rate, 3)
    log_speech("saved", origin, content, file=path, seconds=seconds, signed=signed is not None)
    return signed is not None
