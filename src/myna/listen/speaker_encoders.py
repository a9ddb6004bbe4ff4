"""Speaker encoders, opened by name or by what a folder holds, and similarity of their embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from myna.audio.files import Samples
from myna.audio.mono import as_mono_16khz, is_silent
from myna.core.compat import conv_output_length
from myna.core.errors import CheckpointError, ModelError
from myna.core.optional import import_optional
from myna.listen.pretrained import HUB_FILES, SAMPLE_RATE, download_snapshot, load_pretrained
from myna.models.files import format_names, read_json, weight_files

RESEMBLYZER, ECAPA, WAVLM = "resemblyzer", "ecapa", "wavlm"
WAVLM_CHECKPOINT = "microsoft/wavlm-base-plus-sv"
ENCODER_CHOICES = (
    f"{RESEMBLYZER}; {ECAPA}:FILE.safetensors; {WAVLM} with network; or the folder or hub name of a checkpoint of "
    "WavLMForXVector"
)
WAVLM_CLASS = "WavLMForXVector"
WAVLM_CONVERT_HINT = (
    "where you trust it, turn it into safetensors once: "
    'python -c "from transformers import AutoFeatureExtractor as F, WavLMForXVector as M; '
    "name = 'microsoft/wavlm-base-plus-sv'; M.from_pretrained(name).save_pretrained('wavlm'); "
    "F.from_pretrained(name).save_pretrained('wavlm')\", and give the folder: wavlm:wavlm"
)
# Its declared dependencies do not install everywhere (webrtcvad must be compiled, typing shadows the standard
# library's), so it comes alone and the extra brings what it really imports.
RESEMBLYZER_INSTALL = ("pip install --no-deps resemblyzer==0.1.4", 'pip install "myna[evaluate]"')
SpeakerEmbedding = npt.NDArray[np.float32]
"""A vector of length one, or of zeros where the clip holds no voice."""


class SpeakerEncoder(Protocol):
    @property
    def name(self) -> str:
        """Identifies the weights and not their location: a clip scored by another encoder is scored again."""

    def embed(self, samples: Samples, sample_rate: int) -> SpeakerEmbedding: ...


def open_speaker_encoder(name: str = RESEMBLYZER, device: str = "cpu") -> SpeakerEncoder:
    """A speaker encoder by name, folder or hub name, on a device of torch. Similarities by different encoders cannot be
    compared."""
    from myna.listen.ecapa import CONVERT_HINT, EcapaEncoder

    if name == RESEMBLYZER:
        return ResemblyzerEncoder.open(device)
    kind, separator, checkpoint = name.partition(":")
    if kind not in (ECAPA, WAVLM):
        kind, checkpoint = "", name
    elif not separator and kind == WAVLM:
        checkpoint = WAVLM_CHECKPOINT
    elif not separator:
        raise ModelError("ecapa is published as a pickle, which Myna does not open", hint=CONVERT_HINT)
    path = _local_path(checkpoint, ("*.safetensors",) if kind == ECAPA else HUB_FILES)
    is_ecapa = kind == ECAPA or (not kind and not (path / "config.json").is_file())
    return EcapaEncoder.open(path, device) if is_ecapa else WavLMEncoder.open(path, checkpoint, device)


def _local_path(checkpoint: str, files: tuple[str, ...]) -> Path:
    path = Path(checkpoint).expanduser()
    if path.exists():
        return path
    if path.is_absolute() or checkpoint.startswith((".", "~")) or checkpoint.count("/") != 1:
        raise ModelError(f"there is no speaker encoder at {checkpoint}", hint=f"name one of these: {ENCODER_CHOICES}")
    return download_snapshot(checkpoint, *files)


def cosine_similarity(first: SpeakerEmbedding, second: SpeakerEmbedding) -> float:
    """Speaker similarity, at most 1; 0 where one of the clips holds no voice."""
    norms = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(first @ second) / norms if norms else 0.0


def speaker_rank(embedding: SpeakerEmbedding, own: int, speakers: Sequence[SpeakerEmbedding]) -> int:
    """Rank of the own speaker among all by similarity: 1 is the nearest. Ties count against it."""
    similarities = [cosine_similarity(embedding, speaker) for speaker in speakers]
    return 1 + sum(other >= similarities[own] for index, other in enumerate(similarities) if index != own)


class ResemblyzerEncoder:
    """Resemblyzer's encoder, whose weights come in its wheel.

    Two clips of one real speaker have a similarity of about 0.87, two speakers about 0.6.
    """

    def __init__(self, encoder: Any, preprocess: Any) -> None:
        self._encoder, self._preprocess = encoder, preprocess

    @classmethod
    def open(cls, device: str = "cpu") -> ResemblyzerEncoder:
        resemblyzer = import_optional("resemblyzer", *RESEMBLYZER_INSTALL)
        return cls(resemblyzer.VoiceEncoder(device, verbose=False), resemblyzer.preprocess_wav)

    @property
    def name(self) -> str:
        return f"resemblyzer {version('resemblyzer')}"

    def embed(self, samples: Samples, sample_rate: int) -> SpeakerEmbedding:
        """Long silences are cut out first. Zeros for a clip without a voice: similar to no speaker."""
        clip = as_mono_16khz(samples, sample_rate)
        # Silence would be normalised to the usual loudness, which divides by zero.
        speech = clip[:0] if is_silent(clip) else self._preprocess(clip, SAMPLE_RATE)
        return np.asarray(self._encoder.embed_utterance(speech) if len(speech) else np.zeros(256), np.float32)


class WavLMEncoder:
    """WavLM x-vectors (transformers' WavLMForXVector).

    One clip at a time: attention covers the whole clip, and padding would change the embedding.
    """

    def __init__(self, model: Any, features: Any, name: str) -> None:
        self._model, self._features, self.name = model, features, name

    @classmethod
    def open(cls, folder: Path, name: str, device: str = "cpu") -> WavLMEncoder:
        from transformers import AutoFeatureExtractor, WavLMForXVector

        architectures = read_json(folder / "config.json").get("architectures") or ["nothing"]
        if WAVLM_CLASS not in architectures:
            raise ModelError(
                f"{folder} holds {format_names(architectures)}, which was not trained to tell speakers apart",
                hint=f"give a checkpoint of {WAVLM_CLASS}, such as microsoft/wavlm-base-plus-sv",
            )
        try:
            weight_files(folder)
        except CheckpointError as error:
            raise CheckpointError(error.what, hint=WAVLM_CONVERT_HINT) from error
        model, features, weights = load_pretrained(
            folder,
            name,
            (WavLMForXVector, AutoFeatureExtractor),
            device=device,
            # The classifier over the speakers of its training is not used, and often not kept.
            unused=("objective.", "classifier."),
            hint="the folder needs config.json, preprocessor_config.json and model.safetensors, as "
            "`save_pretrained` leaves them",
        )
        return cls(model, features, f"wavlm {Path(name).name} {weights}")

    @torch.inference_mode()
    def embed(self, samples: Samples, sample_rate: int) -> SpeakerEmbedding:
        """Zeros for a clip that is silent or too short for the layers: similar to no speaker."""
        clip = as_mono_16khz(samples, sample_rate)
        config = self._model.config
        if is_silent(clip) or conv_output_length(self._model.wavlm, len(clip)) < min_frames(config):
            return np.zeros(config.xvector_output_dim, np.float32)
        inputs = self._features(clip, sampling_rate=SAMPLE_RATE, return_tensors="pt")
        embedding = self._model(inputs.input_values.to(self._model.device)).embeddings[0]
        return np.asarray(torch.nn.functional.normalize(embedding, dim=0).cpu().numpy(), np.float32)


def min_frames(config: Any) -> int:
    """Frames that the TDNN layers consume, and two more, since the pooling takes a standard deviation."""
    consumed = sum((size - 1) * step for size, step in zip(config.tdnn_kernel, config.tdnn_dilation, strict=True))
    return int(consumed) + 2
