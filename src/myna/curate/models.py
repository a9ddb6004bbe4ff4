"""Models of a curation: which are available, what is lost without the others, and the measures of a clip."""

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TypeVar

import numpy as np

from myna.audio.files import Samples
from myna.audio.signal_measures import bandwidth_hz, clipped_share, integrated_loudness
from myna.core.device import pick_device
from myna.core.io import curation_models_folder
from myna.curate.recordings import CURATION_RATE, FindSpeech
from myna.curate.settings import ListenSettings
from myna.listen.asr import ASR, TimedTranscript
from myna.listen.diarization import SegmentationNetwork
from myna.listen.models import FETCH_COMMAND, INSTALL, batches, files_hash, map_batches
from myna.listen.mos import DNSMOSNetwork
from myna.listen.sounds import DeepFilterNet, SpeechMusicNoiseNetwork, voice_activity
from myna.listen.speaker_encoders import ECAPA, SpeakerEmbedding, SpeakerEncoder, embed_speakers, open_speaker_encoder

NO_ASR = "none"
FIRST_PASS_FORMAT = 6
"""Version of the first pass. Raise it if equal models give other rows: parts are then listened to again."""
EMBEDDED_STEP_SECONDS = 0.5
"""Step in seconds to which clip lengths are rounded, because cuDNN and oneDNN plan a convolution anew for each
length."""
MAX_EMBEDDED_SECONDS = 8.0
"""Maximum seconds of a clip that are embedded, from its middle."""
FILES = {
    "segmentation": ("segmentation.safetensors",),
    "speaker encoder": ("ecapa.safetensors",),
    "music": ("speech_music_noise.safetensors",),
    "noise": tuple(f"deepfilternet3_{part}.onnx" for part in ("enc", "erb_dec", "df_dec")),
    "quality": ("dnsmos.safetensors",),
}
LOST = {
    "voice activity": "nothing can be cut: no recording can be curated",
    "segmentation": "speaker turns and overlapped speech are not found: every recording counts as one speaker's",
    "speaker encoder": "speakers are not told apart, within a recording or across",
    "music": "music under speech is not found",
    "noise": "noise is not measured",
    "quality": "predicted quality is not measured",
    "Vietnamese text": "Vietnamese numbers, dates and abbreviations stay as they are written",
    "Arabic diacritics": "vowel signs cannot be added to Arabic text",
}
PACKAGES = {
    "voice activity": ("faster_whisper", INSTALL),
    "Vietnamese text": ("sea_g2p", "pip install sea-g2p"),
    "Arabic diacritics": ("text2tashkeel", "pip install text2tashkeel"),
}
RUNTIMES = {"noise": "onnxruntime", "voice activity": "onnxruntime", "segmentation": "scipy"}
"""Packages that a model needs besides its file."""

NAN = float("nan")
QUALITY_MEASURES = ("dnsmos_ovrl", "dnsmos_bak", "dnsmos_sig")
NARROW_WINDOW_SECONDS, NARROW_DROP_DB = 2.0, 60.0
"""Window in seconds whose bandwidth counts for the whole clip, and the drop in dB that ends its band. At 50 dB, 28 % of
wide clips of LibriSpeech would be narrow, since 2 s of vowels may have nothing above 4 kHz; at 60 dB 0.8 % are. The
last 2 s of a telephone call are found in nine of ten clips, and in none by the mean of the clip."""

T = TypeVar("T")


@dataclass(frozen=True)
class CurationModels:
    """Models that listen to a part. A missing one gives NaN, an empty text or one speaker."""

    find_speech: FindSpeech = voice_activity
    asr: ASR | None = None
    check_asr: ASR | None = None
    segmentation: SegmentationNetwork | None = None
    speaker_encoder: SpeakerEncoder | None = None
    music: SpeechMusicNoiseNetwork | None = None
    noise: DeepFilterNet | None = None
    quality: DNSMOSNetwork | None = None
    versions: dict[str, str] = field(default_factory=dict)
    """Hash of the weights of each available network. Results are comparable if these are equal."""
    device: str = "cpu"

    @classmethod
    def open(cls, settings: ListenSettings, threads: int = 0) -> Self:
        """Open all models that are there. A damaged file is an error, a missing one is not.

        The ONNX models use `threads` threads (0 lets onnxruntime choose), networks of torch those of the process.
        """
        folder, device, versions = models_folder(settings), str(pick_device(settings.device)), dict[str, str]()

        def open_asr(name: str) -> ASR:
            return ASR.open(name, settings.device, threads=threads, float16=True)

        def load(name: str, opener: Callable[[Path], T]) -> T | None:
            if not _is_available(name, folder):
                return None
            versions[name] = files_hash(folder / file for file in FILES[name])
            return opener(folder / FILES[name][0])

        asr = None if settings.asr == NO_ASR else open_asr(settings.asr)
        encoder = load("speaker encoder", lambda file: open_speaker_encoder(f"{ECAPA}:{file}", device))
        if encoder is not None:
            versions["speaker encoder"] = encoder.name
        return cls(
            asr=asr,
            check_asr=open_asr(check) if (check := settings.check_asr) and check != settings.asr else asr,
            segmentation=load("segmentation", lambda file: SegmentationNetwork.open(file, device)),
            speaker_encoder=encoder,
            music=load("music", lambda file: SpeechMusicNoiseNetwork.open(file, device)),
            noise=load("noise", lambda file: DeepFilterNet.open(file.parent, threads)),
            quality=load("quality", lambda file: DNSMOSNetwork.open(file, device)),
            versions=versions,
            device=device.partition(":")[0],
        )

    @property
    def names(self) -> list[str]:
        """Names of all models with versions, and of the procedure: rows of parts are comparable if these are equal."""
        recognisers = [one.name if one is not None else NO_ASR for one in (self.asr, self.check_asr)]
        networks = (f"{name} {version}" for name, version in sorted(self.versions.items()))
        return [f"first pass {FIRST_PASS_FORMAT} on {self.device}", *recognisers, *networks]

    def transcribe(self, clips: Iterable[Samples], language: str | None) -> Iterator[TimedTranscript]:
        """Yield the first transcription of each clip, with the times of words."""
        if self.asr is None:
            yield from (TimedTranscript() for _ in clips)
            return
        for batch in batches(clips, self.asr.batch_size):
            yield from self.asr.transcribe_words_batch(batch, CURATION_RATE, [language] * len(batch))

    def check(self, clips: Iterable[tuple[Samples, str | None]]) -> Iterator[str]:
        """Yield the text of the second transcription of each clip, given with its language."""
        if self.check_asr is None:
            yield from ("" for _ in clips)
            return
        asr = self.check_asr

        def transcribe(batch: list[tuple[Samples, str | None]]) -> list[str]:
            samples, languages = zip(*batch, strict=True)
            return [one.text for one in asr.transcribe_batch(samples, CURATION_RATE, languages)]

        yield from map_batches(transcribe, clips, asr.batch_size, lambda clip: len(clip[0]))

    def embed(self, clips: Iterable[Samples]) -> Iterator[SpeakerEmbedding]:
        """Yield the speaker embeddings of the middles of clips; empty ones without an encoder."""
        if self.speaker_encoder is None:
            return (np.empty(0, np.float32) for _ in clips)
        return embed_speakers(map(_middle, clips), CURATION_RATE, self.speaker_encoder)


OpenModels = Callable[[ListenSettings, int], CurationModels]
"""Function that opens the models in a worker with a number of threads each; must be picklable."""


def _middle(samples: Samples) -> Samples:
    step = round(EMBEDDED_STEP_SECONDS * CURATION_RATE)
    size = min(len(samples) // step * step, round(MAX_EMBEDDED_SECONDS * CURATION_RATE))
    first = (len(samples) - size) // 2
    return samples[first : first + size] if size else np.resize(samples, step)


def models_folder(settings: ListenSettings) -> Path:
    return Path(settings.models).expanduser() if settings.models else curation_models_folder()


def missing_models(settings: ListenSettings) -> list[str]:
    """Say what cannot be done on this machine, why that matters, and what to type. Loads nothing."""
    folder, notes = models_folder(settings), []
    for name, lost in LOST.items():
        if not _is_available(name, folder):
            command = PACKAGES[name][1] if name in PACKAGES else f"not in {folder}: {FETCH_COMMAND}"
            if name in FILES and not _has_runtime(name):
                command = f"{INSTALL} && {FETCH_COMMAND}"
            notes.append(f"{name}: {lost} ({command})")
    if settings.asr == NO_ASR:
        notes.append("recogniser: without text no clip is kept (--asr base, or the folder of a Whisper)")
    return notes


def _is_available(name: str, folder: Path) -> bool:
    if name in PACKAGES and importlib.util.find_spec(PACKAGES[name][0]) is None:
        return False
    return _has_runtime(name) and all((folder / file).is_file() for file in FILES.get(name, ()))


def _has_runtime(name: str) -> bool:
    return name not in RUNTIMES or importlib.util.find_spec(RUNTIMES[name]) is not None


def measure(samples: Samples, sample_rate: int, models: CurationModels) -> dict[str, float]:
    """Return all measures of a mono clip by name, in the order of the table; NaN if a model is missing."""
    peak = float(np.abs(samples).max(initial=0.0))
    scores = models.quality.score(samples, sample_rate) if models.quality else dict.fromkeys(QUALITY_MEASURES, NAN)
    return {
        "music_share": models.music.music_share(samples, sample_rate) if models.music else NAN,
        "snr_db": models.noise.snr_db(samples, sample_rate) if models.noise else NAN,
        "bandwidth_hz": narrowest_bandwidth_hz(samples, sample_rate),
        "clipped_share": clipped_share(samples),
        **{name: scores[name] for name in QUALITY_MEASURES},
        "loudness_lufs": integrated_loudness(samples, sample_rate),
        "peak_dbfs": float(20 * np.log10(peak)) if peak else NAN,
    }


def narrowest_bandwidth_hz(samples: Samples, sample_rate: int) -> float:
    """Return the bandwidth of a clip or of its narrowest two seconds: the mean hides the telephone at its end."""
    size = round(NARROW_WINDOW_SECONDS * sample_rate)
    count = max(1, -(-2 * len(samples) // size) - 1)  # half a window apart, or less
    starts = np.linspace(0, max(0, len(samples) - size), count).astype(int)
    windows = (bandwidth_hz(samples[start : start + size], sample_rate, NARROW_DROP_DB) for start in starts)
    return min(bandwidth_hz(samples, sample_rate), *windows)
