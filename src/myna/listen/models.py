"""Models that listen: where their weights come from, which are available, and the measures of a clip."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from huggingface_hub import snapshot_download

from myna.audio.files import Samples
from myna.audio.signal_measures import bandwidth_hz, clipped_share, integrated_loudness
from myna.core.errors import CheckpointError, ModelError, import_optional
from myna.core.io import bytes_hash, curation_models_folder, file_hash
from myna.models.files import error_summary, format_names, quiet_transformers, weight_files

if TYPE_CHECKING:
    from myna.listen.diarization import SegmentationNetwork
    from myna.listen.mos import DNSMOSNetwork
    from myna.listen.sounds import DeepFilterNet, SpeechMusicNoiseNetwork
    from myna.listen.speaker_encoders import SpeakerEncoder

INSTALL = 'pip install "myna[curate]"'
FETCH_COMMAND = "myna setup curation"
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
class AnalysisModels:
    """Models that were found. A missing model is None, and its measures are NaN."""

    segmentation: SegmentationNetwork | None = None
    speaker_encoder: SpeakerEncoder | None = None
    music: SpeechMusicNoiseNetwork | None = None
    noise: DeepFilterNet | None = None
    quality: DNSMOSNetwork | None = None
    versions: dict[str, str] = field(default_factory=dict)
    """Hash of the weights of each available model. Results are comparable if these are equal."""


def load_models(folder: Path | None = None, device: str = "cpu", threads: int = 0) -> AnalysisModels:
    """Load all models that are in the folder. A damaged file is an error, a missing one is not.

    The ONNX models use `threads` threads (0 lets onnxruntime choose), torch those of the process.
    """
    from myna.listen.diarization import SegmentationNetwork
    from myna.listen.mos import DNSMOSNetwork
    from myna.listen.sounds import DeepFilterNet, SpeechMusicNoiseNetwork
    from myna.listen.speaker_encoders import ECAPA, open_speaker_encoder

    folder = folder or curation_models_folder()
    versions: dict[str, str] = {}

    def load(name: str, opener: Callable[[Path], T]) -> T | None:
        if not _is_available(name, folder):
            return None
        versions[name] = files_hash(folder / file for file in FILES[name])
        return opener(folder / FILES[name][0])

    encoder = load("speaker encoder", lambda file: open_speaker_encoder(f"{ECAPA}:{file}", device))
    if encoder is not None:
        versions["speaker encoder"] = encoder.name
    return AnalysisModels(
        load("segmentation", lambda file: SegmentationNetwork.open(file, device)),
        encoder,
        load("music", lambda file: SpeechMusicNoiseNetwork.open(file, device)),
        load("noise", lambda file: DeepFilterNet.open(file.parent, threads)),
        load("quality", lambda file: DNSMOSNetwork.open(file, device)),
        versions,
    )


def capabilities(folder: Path | None = None) -> list[Capability]:
    """List what can be measured on this machine; for everything else what to type and what is lost. Loads nothing."""
    report = []
    for name, lost in LOST.items():
        command = PACKAGES[name][1] if name in PACKAGES else FETCH_COMMAND
        if name in FILES and not _has_runtime(name):
            command = f"{INSTALL} && {FETCH_COMMAND}"
        report.append(Capability(name, _is_available(name, folder or curation_models_folder()), command, lost))
    return report


def require(model: T | None, purpose: str) -> T:
    """Return the model, or raise a `ModelError` that says what to type."""
    if model is None:
        raise ModelError(f"{purpose}: the model for it is not here", hint=f"type: {FETCH_COMMAND}")
    return model


def _is_available(name: str, folder: Path) -> bool:
    if name in PACKAGES and importlib.util.find_spec(PACKAGES[name][0]) is None:
        return False
    return _has_runtime(name) and all((folder / file).is_file() for file in FILES.get(name, ()))


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
    """Return the bandwidth of a clip or of its narrowest two seconds: the mean hides the telephone at its end."""
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


def remake_hint(file: Path) -> str:
    """Return the command that mends a damaged file of weights."""
    return f"make the folder anew: rm -r {file.parent} && {FETCH_COMMAND}"


HUB_FILES = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json", "*.json", "*.txt")
"""Files downloaded of a checkpoint of transformers: no pickles, and no second copy in another precision."""


def download_snapshot(repository: str, *files: str) -> Path:
    """Return the local folder of a hub repository; download it once."""
    try:
        return Path(snapshot_download(repository, allow_patterns=list(files)))
    except Exception as error:
        raise ModelError(
            f"{repository} is no folder here, and the hub did not give it: {error_summary(error)}",
            hint=f"check the name and the network, or fetch it elsewhere with `hf download {repository}` and give the "
            "path of that folder",
        ) from error


def load_pretrained(
    folder: Path, name: str, classes: Sequence[Any], *, hint: str, device: str = "cpu", unused: tuple[str, ...] = ()
) -> tuple[Any, ...]:
    """Load a transformers model in fp32 and its processors; return them with the hash of the weights.

    Missing or unexpected weights are refused, unless their names begin with one of `unused`.
    """
    weights = weight_files(folder)
    model_class, *processor_classes = classes
    try:
        with quiet_transformers():
            model, report = model_class.from_pretrained(
                str(folder), local_files_only=True, use_safetensors=True, dtype=torch.float32, output_loading_info=True
            )
        processors = [one.from_pretrained(str(folder), local_files_only=True) for one in processor_classes]
        model = model.to(device).eval().requires_grad_(False)
    except Exception as error:
        raise ModelError(f"{name} cannot be opened on {device}: {error_summary(error)}", hint=hint) from error
    keys = [str(key) for kind in ("missing", "unexpected", "mismatched") for key in report[f"{kind}_keys"]]
    if wrong := sorted(key for key in keys if not key.startswith(unused)):
        raise CheckpointError(
            f"the weights of {folder} are not those of its config.json: {format_names(wrong)}",
            hint="they would be random in these places; download the checkpoint again",
        )
    return model, *processors, files_hash(weights)


def files_hash(files: Iterable[Path]) -> str:
    """Return the identity of weights in files."""
    return bytes_hash("".join(map(file_hash, files)).encode())[:12]


def open_onnx(file: Path, threads: int = 0) -> Any:
    """Open an ONNX model on the CPU with this many threads; 0 lets onnxruntime choose."""
    runtime = import_optional("onnxruntime", INSTALL)
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    # An arena grows to the need of the longest clip, and is never given back.
    options.enable_cpu_mem_arena = False
    try:
        return runtime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        problem = f"{file} cannot be opened: {str(error).splitlines()[0]}"
        raise CheckpointError(problem, hint=remake_hint(file)) from error
