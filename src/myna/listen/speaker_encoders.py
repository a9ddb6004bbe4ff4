"""Speaker encoders, opened by name or by what a folder holds, and similarity of their embeddings."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional as F

from myna.audio.files import LISTENING_RATE, Samples, as_mono_16khz, is_silent
from myna.core.compat import conv_output_length
from myna.core.device import release_free_memory
from myna.core.errors import CheckpointError, ModelError, import_optional
from myna.core.io import DEFAULT_SPEAKER_ENCODER, ecapa_file, file_hash
from myna.listen.models import HUB_FILES, download_snapshot, load_pretrained, map_batches
from myna.models.files import format_names, load_network, read_json, weight_files

RESEMBLYZER, ECAPA, WAVLM = "resemblyzer", "ecapa", "wavlm"
WAVLM_CHECKPOINT = "microsoft/wavlm-base-plus-sv"
ENCODER_CHOICES = (
    f"{ECAPA}; {ECAPA}:FILE.safetensors; {RESEMBLYZER}; {WAVLM} with network; or the folder or hub name of "
    "a checkpoint of WavLMForXVector"
)
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
"""Embedding of length one, or zeros if the clip holds no voice."""


class SpeakerEncoder(Protocol):
    @property
    def name(self) -> str:
        """Identity of the weights, independent of their location. A clip scored by another encoder is scored again."""

    def embed(self, samples: Samples, sample_rate: int) -> SpeakerEmbedding: ...


def open_speaker_encoder(name: str = DEFAULT_SPEAKER_ENCODER, device: str = "cpu") -> SpeakerEncoder:
    """Open a speaker encoder by name, folder or hub name. Similarities by different encoders cannot be compared."""
    if name == RESEMBLYZER:
        return ResemblyzerEncoder.open(device)
    kind, separator, checkpoint = name.partition(":")
    if kind not in (ECAPA, WAVLM):
        kind, checkpoint = "", name
    elif not separator and kind == WAVLM:
        checkpoint = WAVLM_CHECKPOINT
    elif not separator:
        checkpoint = str(ecapa_file())
        if not ecapa_file().is_file():
            raise ModelError(f"the speaker encoder is not here: there is no {checkpoint}", hint="myna setup metrics")
    path = Path(checkpoint).expanduser()
    if not path.exists():
        if path.is_absolute() or checkpoint.startswith((".", "~")) or checkpoint.count("/") != 1:
            hint = f"name one of these: {ENCODER_CHOICES}"
            raise ModelError(f"there is no speaker encoder at {checkpoint}", hint=hint)
        path = download_snapshot(checkpoint, *(("*.safetensors",) if kind == ECAPA else HUB_FILES))
    is_ecapa = kind == ECAPA or (not kind and not (path / "config.json").is_file())
    return EcapaEncoder.open(path, device) if is_ecapa else WavLMEncoder.open(path, checkpoint, device)


def embed_speakers(clips: Iterable[Samples], sample_rate: int, encoder: SpeakerEncoder) -> Iterator[SpeakerEmbedding]:
    """Yield the speaker embeddings of many clips, computed in batches where the encoder supports them."""
    if not isinstance(encoder, EcapaEncoder):
        yield from (encoder.embed(clip, sample_rate) for clip in clips)
        return

    def embed(batch: list[Samples]) -> list[SpeakerEmbedding]:
        embeddings = encoder.embed_batch(batch, sample_rate)
        release_free_memory()  # otherwise up to 500 MB of freed memory add up over the windows of a part
        return embeddings

    yield from map_batches(embed, clips, encoder.batch_size, len)


def cosine_similarity(first: SpeakerEmbedding, second: SpeakerEmbedding) -> float:
    """Return the speaker similarity, at most 1; 0 if one of the clips holds no voice."""
    norms = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(first @ second) / norms if norms else 0.0


def unit_vectors(vectors: npt.NDArray[Any]) -> SpeakerEmbedding:
    """Scale embeddings (..., size) to length one; zeros stay zeros."""
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(vectors / np.where(norms > 0, norms, 1), np.float32)


def speaker_rank(embedding: SpeakerEmbedding, own: int, speakers: Sequence[SpeakerEmbedding]) -> int:
    """Return the rank of the own speaker by similarity: 1 is the nearest. Ties count against it."""
    similarities = [cosine_similarity(embedding, speaker) for speaker in speakers]
    return 1 + sum(other >= similarities[own] for index, other in enumerate(similarities) if index != own)


class ResemblyzerEncoder:
    """Resemblyzer's encoder, whose weights come in its wheel.

    Two clips of one real speaker have a similarity of about 0.87, two speakers about 0.6.
    """

    def __init__(self, encoder: Any, preprocess: Any) -> None:
        self._encoder, self._preprocess = encoder, preprocess

    @classmethod
    def open(cls, device: str = "cpu") -> Self:
        resemblyzer = import_optional("resemblyzer", *RESEMBLYZER_INSTALL)
        return cls(resemblyzer.VoiceEncoder(device, verbose=False), resemblyzer.preprocess_wav)

    @property
    def name(self) -> str:
        return f"resemblyzer {version('resemblyzer')}"

    def embed(self, samples: Samples, sample_rate: int) -> SpeakerEmbedding:
        """Embed a clip without its long silences. A clip without a voice gives zeros: similar to no speaker."""
        clip = as_mono_16khz(samples, sample_rate)
        # Normalising silence to the usual loudness would divide by zero.
        speech = clip[:0] if is_silent(clip) else self._preprocess(clip, LISTENING_RATE)
        return np.asarray(self._encoder.embed_utterance(speech) if len(speech) else np.zeros(256), np.float32)


class WavLMEncoder:
    """Encoder of WavLM x-vectors (transformers' WavLMForXVector).

    Clips are embedded one by one: attention covers the whole clip, and padding would change the embedding.
    """

    def __init__(self, model: Any, features: Any, name: str) -> None:
        self._model, self._features, self.name = model, features, name

    @classmethod
    def open(cls, folder: Path, name: str, device: str = "cpu") -> Self:
        from transformers import AutoFeatureExtractor, WavLMForXVector

        architectures = read_json(folder / "config.json").get("architectures") or ["nothing"]
        if "WavLMForXVector" not in architectures:
            problem = f"{folder} holds {format_names(architectures)}, which was not trained to tell speakers apart"
            hint = "give a checkpoint of WavLMForXVector, such as microsoft/wavlm-base-plus-sv"
            raise ModelError(problem, hint=hint)
        try:
            weight_files(folder)
        except CheckpointError as error:
            raise CheckpointError(error.what, hint=WAVLM_CONVERT_HINT) from error
        model, features, weights = load_pretrained(
            folder,
            name,
            (WavLMForXVector, AutoFeatureExtractor),
            device=device,
            # The classifier over the training speakers is not used, and often not stored.
            unused=("objective.", "classifier."),
            hint="the folder needs config.json, preprocessor_config.json and model.safetensors, as "
            "`save_pretrained` leaves them",
        )
        return cls(model, features, f"wavlm {Path(name).name} {weights}")

    @torch.inference_mode()
    def embed(self, samples: Samples, sample_rate: int) -> SpeakerEmbedding:
        """Embed a clip. One that is silent or too short for the layers gives zeros: similar to no speaker."""
        clip = as_mono_16khz(samples, sample_rate)
        config = self._model.config
        # The TDNN layers consume frames, and the standard deviation needs two.
        consumed = sum((size - 1) * step for size, step in zip(config.tdnn_kernel, config.tdnn_dilation, strict=True))
        if is_silent(clip) or conv_output_length(self._model.wavlm, len(clip)) < consumed + 2:
            return np.zeros(config.xvector_output_dim, np.float32)
        inputs = self._features(clip, sampling_rate=LISTENING_RATE, return_tensors="pt")
        embedding = self._model(inputs.input_values.to(self._model.device)).embeddings[0]
        return np.asarray(torch.nn.functional.normalize(embedding, dim=0).cpu().numpy(), np.float32)


MELS, WINDOW, HOP = 80, 400, 160
WIDTH, SCALE = 1024, 8
GPU_BATCH_CLIPS = 64
MIN_SECONDS = 0.1
"""Shortest clip in seconds that has an embedding: the convolutions reach that far to both sides."""
PICKLE_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin")
CONVERT_HINT = (
    'where you trust the file, turn it into safetensors once: python -c "import torch, safetensors.torch as s; '
    "s.save_file(torch.load('embedding_model.ckpt', map_location='cpu', weights_only=True), 'ecapa.safetensors')\", "
    "and give ecapa:ecapa.safetensors"
)


class EcapaEncoder:
    def __init__(self, network: "EcapaNetwork", name: str) -> None:
        self._network, self.name = network, name
        self._device = network.get_buffer("filters").device
        # On a CPU two clips take twice the time of one.
        self.batch_size = 1 if self._device.type == "cpu" else GPU_BATCH_CLIPS

    @classmethod
    def open(cls, path: Path, device: str = "cpu") -> Self:
        """Open a safetensors file with SpeechBrain's tensor names, or the folder of one."""
        file = _weights_file(path)
        hint = "give the weights of SpeechBrain's spkrec-ecapa-voxceleb under their own names"
        network = load_network(EcapaNetwork(), file, device, hint=hint)
        return cls(network, f"ecapa {file_hash(file)[:12]}")

    def embed(self, samples: Samples, sample_rate: int) -> SpeakerEmbedding:
        """Embed a clip. One without a voice gives zeros: similar to no speaker."""
        [embedding] = self.embed_batch([samples], sample_rate)
        return embedding

    @torch.inference_mode()
    def embed_batch(self, clips: Sequence[Samples], sample_rate: int) -> list[SpeakerEmbedding]:
        """Embed many clips. Only clips of equal length share a batch: padding would change their embeddings."""
        embeddings = [np.zeros(self._network.size, np.float32) for _ in clips]
        waves: dict[int, dict[int, Samples]] = {}
        for index, samples in enumerate(clips):
            clip = as_mono_16khz(samples, sample_rate)
            if not is_silent(clip) and len(samples) >= MIN_SECONDS * sample_rate:
                waves.setdefault(len(clip), {})[index] = clip
        for group in waves.values():
            batch = torch.from_numpy(np.stack(list(group.values()))).to(self._device)
            for index, embedding in zip(group, self._network(batch).cpu().numpy(), strict=True):
                embeddings[index] = np.asarray(embedding, np.float32)
        return embeddings


def _weights_file(path: Path) -> Path:
    weights = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    pickles = sorted(file for file in path.glob("*") if file.suffix in PICKLE_SUFFIXES)
    if not weights and not pickles:
        problem = f"{path} holds no safetensors with the ECAPA speaker encoder"
        hint = f"fetch embedding_model.ckpt of SpeechBrain's spkrec-ecapa-voxceleb; {CONVERT_HINT}"
        raise CheckpointError(problem, hint=hint)
    if len(weights) > 1:
        problem = f"{path} holds several safetensors: {format_names([file.name for file in weights])}"
        raise CheckpointError(problem, hint=f"name the one that is meant: ecapa:{weights[0]}")
    file = (weights or pickles)[0]
    if file.suffix in PICKLE_SUFFIXES:
        raise CheckpointError(f"{file} is a pickle, which can run code when it is opened", hint=CONVERT_HINT)
    return file


class EcapaNetwork(nn.Module):
    size = 192
    """Dimensions of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_tdnn(MELS, WIDTH, 5), *(_Block(dilation) for dilation in (2, 3, 4))])
        self.mfa = _tdnn(3 * WIDTH, 3 * WIDTH, 1)
        self.asp = _StatisticsPooling(3 * WIDTH, 128)
        self.asp_bn = nn.Sequential(OrderedDict(norm=nn.BatchNorm1d(6 * WIDTH)))
        self.fc = _conv(6 * WIDTH, self.size, 1)
        self.register_buffer("filters", _mel_filters(), persistent=False)

    def forward(self, waves: torch.Tensor) -> torch.Tensor:
        """Return normalised embeddings (batch, 192) of clips at 16 kHz (batch, samples)."""
        x = self._log_mels(waves)
        outputs = []
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        x = self.fc(self.asp_bn(self.asp(self.mfa(torch.cat(outputs[1:], 1)))))
        return F.normalize(x[..., 0], dim=1)

    def _log_mels(self, waves: torch.Tensor) -> torch.Tensor:
        window = torch.hamming_window(WINDOW, device=waves.device)
        spectra = torch.stft(waves, WINDOW, HOP, window=window, pad_mode="constant", return_complex=True)
        powers = spectra.abs().square().transpose(1, 2) @ self.get_buffer("filters")
        decibels = 10 * powers.clamp(min=1e-10).log10()
        decibels = decibels.clamp(min=decibels.amax((1, 2), keepdim=True) - 80)
        return (decibels - decibels.mean(1, keepdim=True)).transpose(1, 2)


def _mel_filters() -> torch.Tensor:
    """Return SpeechBrain's triangular mel filters, which are as wide on the right as on the left."""
    mels = torch.linspace(0, 2595 * torch.log10(torch.tensor(1 + LISTENING_RATE / 2 / 700)).item(), MELS + 2)
    corners = 700 * (10 ** (mels / 2595) - 1)
    slopes = (torch.linspace(0, LISTENING_RATE / 2, WINDOW // 2 + 1)[:, None] - corners[1:-1]) / (
        corners[1:] - corners[:-1]
    )[:-1]
    return torch.minimum(1 + slopes, 1 - slopes).clamp(min=0)


def _conv(in_channels: int, out_channels: int, kernel: int, dilation: int = 1) -> nn.Sequential:
    padding = dilation * (kernel - 1) // 2
    layer = nn.Conv1d(in_channels, out_channels, kernel, dilation=dilation, padding=padding, padding_mode="reflect")
    return nn.Sequential(OrderedDict(conv=layer))


def _tdnn(in_channels: int, out_channels: int, kernel: int, dilation: int = 1) -> nn.Sequential:
    conv = _conv(in_channels, out_channels, kernel, dilation)
    norm = nn.Sequential(OrderedDict(norm=nn.BatchNorm1d(out_channels)))
    return nn.Sequential(OrderedDict(conv=conv, relu=nn.ReLU(), norm=norm))


class _Res2Net(nn.Module):
    def __init__(self, dilation: int) -> None:
        super().__init__()
        width = WIDTH // SCALE
        self.blocks = nn.ModuleList(_tdnn(width, width, 3, dilation) for _ in range(SCALE - 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *rest = x.chunk(SCALE, 1)
        out = [first]
        for index, (block, part) in enumerate(zip(self.blocks, rest, strict=True)):
            out.append(block(part if index == 0 else part + out[-1]))
        return torch.cat(out, 1)


class _Block(nn.Module):
    def __init__(self, dilation: int) -> None:
        super().__init__()
        self.tdnn1, self.tdnn2 = _tdnn(WIDTH, WIDTH, 1), _tdnn(WIDTH, WIDTH, 1)
        self.res2net_block = _Res2Net(dilation)
        self.se_block = nn.ModuleDict({"conv1": _conv(WIDTH, 128, 1), "conv2": _conv(128, WIDTH, 1)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.tdnn2(self.res2net_block(self.tdnn1(x)))
        gate = self.se_block["conv2"](F.relu(self.se_block["conv1"](out.mean(2, keepdim=True)))).sigmoid()
        gated: torch.Tensor = out * gate + x
        return gated


class _StatisticsPooling(nn.Module):
    """Mean and standard deviation over time, weighted by attention that sees the unweighted ones."""

    def __init__(self, width: int, bottleneck: int) -> None:
        super().__init__()
        self.tdnn = _tdnn(3 * width, bottleneck, 1)
        self.conv = _conv(bottleneck, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        context = [statistic.expand_as(x) for statistic in _statistics(x, torch.full_like(x, 1 / x.shape[2]))]
        weight = self.conv(torch.tanh(self.tdnn(torch.cat([x, *context], 1)))).softmax(2)
        return torch.cat(list(_statistics(x, weight)), 1)


def _statistics(x: torch.Tensor, weight: torch.Tensor) -> Iterable[torch.Tensor]:
    mean = (weight * x).sum(2, keepdim=True)
    return mean, (weight * (x - mean).square()).sum(2, keepdim=True).clamp(min=1e-12).sqrt()
