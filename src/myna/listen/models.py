"""Models that measure recordings: which are available, what is lost without each, and the measures of a clip."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from myna.audio.files import Samples
from myna.audio.signal_measures import bandwidth_hz, clipped_share, integrated_loudness
from myna.core.errors import ModelError
from myna.core.io import bytes_hash, curation_models_folder, file_hash
from myna.listen.weights import FETCH_COMMAND, INSTALL

if TYPE_CHECKING:
    from myna.listen.diarization import SegmentationNetwork
    from myna.listen.mos import DNSMOSNetwork
    from myna.listen.music import SpeechMusicNoiseNetwork
    from myna.listen.noise import DeepFilterNet
    from myna.listen.speaker_encoders import SpeakerEncoder

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
R = TypeVar("R")


class Capability(NamedTuple):
    name: str
    available: bool
    what_to_install: str
    what_is_lost: str


@dataclass(frozen=True)
class AnalysisSettings:
    folder: Path = field(default_factory=curation_models_folder)
    speaker_encoder: str | None = None
    """Encoder as in `myna evaluate --speaker-encoder`; None for ECAPA from the folder."""
    device: str = "cpu"
    threads: int = 0
    """Threads of the ONNX models; 0 lets onnxruntime choose. Torch uses the threads of the process."""


@dataclass(frozen=True)
class AnalysisModels:
    """Models that were found. A missing model is None, and its measures are NaN."""

    segmentation: SegmentationNetwork | None = None
    speaker_encoder: SpeakerEncoder | None = None
    music: SpeechMusicNoiseNetwork | None = None
    noise: DeepFilterNet | None = None
    quality: DNSMOSNetwork | None = None
    versions: dict[str, str] = field(default_factory=dict)
    """Hash of the weights of each available model. Results are comparable if these are equal."""


def load_models(settings: AnalysisSettings | None = None) -> AnalysisModels:
    """Load all available models. A damaged file is an error, a missing one is not."""
    from myna.listen.diarization import SegmentationNetwork
    from myna.listen.mos import DNSMOSNetwork
    from myna.listen.music import SpeechMusicNoiseNetwork
    from myna.listen.noise import DeepFilterNet
    from myna.listen.speaker_encoders import ECAPA, open_speaker_encoder

    settings = settings or AnalysisSettings()
    folder, device, threads = settings.folder, settings.device, settings.threads
    versions: dict[str, str] = {}

    def load(name: str, opener: Callable[[], T]) -> T | None:
        if not _is_available(name, settings):
            return None
        files = [folder / file for file in FILES[name]]
        versions[name] = bytes_hash("".join(map(file_hash, files)).encode())[:12]
        return opener()

    encoder: Any = None
    if settings.speaker_encoder is not None:
        encoder = open_speaker_encoder(settings.speaker_encoder, device)
    elif _is_available("speaker encoder", settings):
        encoder = open_speaker_encoder(f"{ECAPA}:{folder / FILES['speaker encoder'][0]}", device)
    if encoder is not None:
        versions["speaker encoder"] = encoder.name
    return AnalysisModels(
        segmentation=load("segmentation", lambda: SegmentationNetwork.open(folder / FILES["segmentation"][0], device)),
        speaker_encoder=encoder,
        music=load("music", lambda: SpeechMusicNoiseNetwork.open(folder / FILES["music"][0], device)),
        noise=load("noise", lambda: DeepFilterNet.open(folder, threads)),
        quality=load("quality", lambda: DNSMOSNetwork.open(folder / FILES["quality"][0], device)),
        versions=versions,
    )


def capabilities(settings: AnalysisSettings | None = None) -> list[Capability]:
    """List what can be measured on this machine; for everything else what to type and what is lost. Loads nothing."""
    settings = settings or AnalysisSettings()
    report = []
    for name, lost in LOST.items():
        command = PACKAGES[name][1] if name in PACKAGES else FETCH_COMMAND
        if name in FILES and not _has_runtime(name):
            command = f"{INSTALL} && {FETCH_COMMAND}"
        report.append(Capability(name, _is_available(name, settings), command, lost))
    return report


def require(model: T | None, purpose: str) -> T:
    """Return the model, or raise a `ModelError` that says what to type."""
    if model is None:
        raise ModelError(f"{purpose}: the model for it is not here", hint=f"type: {FETCH_COMMAND}")
    return model


def _is_available(name: str, settings: AnalysisSettings) -> bool:
    if name == "speaker encoder" and settings.speaker_encoder is not None:
        return True
    if name in PACKAGES and importlib.util.find_spec(PACKAGES[name][0]) is None:
        return False
    return _has_runtime(name) and all((settings.folder / file).is_file() for file in FILES.get(name, ()))


def _has_runtime(name: str) -> bool:
    return name not in RUNTIMES or importlib.util.find_spec(RUNTIMES[name]) is not None


def measure(samples: Samples, sample_rate: int, models: AnalysisModels) -> dict[str, float]:
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
    """Return the bandwidth of a clip or of its narrowest two seconds: the mean hides a telephone call that begins
    late."""
    size = round(NARROW_WINDOW_SECONDS * sample_rate)
    count = max(1, -(-2 * len(samples) // size) - 1)  # half a window apart, or less
    starts = np.linspace(0, max(0, len(samples) - size), count).astype(int)
    windows = (bandwidth_hz(samples[start : start + size], sample_rate, NARROW_DROP_DB) for start in starts)
    return min(bandwidth_hz(samples, sample_rate), *windows)


def batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield the items in lists of `size`, the last one shorter; items are taken one list at a time."""
    source = iter(items)
    while batch := list(itertools.islice(source, size)):
        yield batch


def map_batches(
    call: Callable[[list[T]], Iterable[R]], items: Iterable[T], size: int, length: Callable[[T], int]
) -> Iterator[R]:
    """Yield the results of a batched call in the order of the items. Batches hold items of similar length, since each
    takes as long as its longest; four batches are sorted together."""
    for group in batches(items, 4 * size if size > 1 else 1):
        order = sorted(range(len(group)), key=lambda number: length(group[number]))
        results: dict[int, R] = {}
        for numbers in batches(order, size):
            results |= zip(numbers, call([group[number] for number in numbers]), strict=True)
        yield from (results[number] for number in range(len(group)))
