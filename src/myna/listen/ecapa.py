"""ECAPA-TDNN speaker encoder of SpeechBrain (spkrec-ecapa-voxceleb), which most papers use, in plain torch.

Module names are those of the published checkpoint, so that every tensor is checked for its place. Two clips of one
speaker have a similarity of about 0.63, two speakers about 0.24.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from myna.audio.files import Samples
from myna.audio.mono import as_mono_16khz, is_silent
from myna.core.errors import CheckpointError
from myna.core.io import file_hash
from myna.listen.pretrained import SAMPLE_RATE
from myna.listen.speaker_encoders import SpeakerEmbedding
from myna.models.files import format_names, load_network

MELS, WINDOW, HOP = 80, 400, 160
WIDTH, SCALE = 1024, 8
GPU_BATCH_CLIPS = 64
MIN_SECONDS = 0.1
"""Shorter clips have no embedding: the convolutions reach that far to both sides."""
PICKLE_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin")
CONVERT_HINT = (
    'where you trust the file, turn it into safetensors once: python -c "import torch, safetensors.torch as s; '
    "s.save_file(torch.load('embedding_model.ckpt', map_location='cpu', weights_only=True), 'ecapa.safetensors')\", "
    "and give ecapa:ecapa.safetensors"
)


class EcapaEncoder:
    def __init__(self, network: EcapaNetwork, name: str) -> None:
        self._network, self.name = network, name

    @classmethod
    def open(cls, path: Path, device: str = "cpu") -> EcapaEncoder:
        """A safetensors file with SpeechBrain's tensor names, or the folder of one."""
        file = _weights_file(path)
        hint = "give the weights of SpeechBrain's spkrec-ecapa-voxceleb under their own names"
        network = load_network(EcapaNetwork(), file, device, hint=hint)
        return cls(network, f"ecapa {file_hash(file)[:12]}")

    def embed(self, samples: Samples, sample_rate: int) -> SpeakerEmbedding:
        """Zeros for a clip without a voice: similar to no speaker."""
        [embedding] = self.embed_batch([samples], sample_rate)
        return embedding

    @property
    def batch_size(self) -> int:
        """Clips that are best given at once. On a CPU two take twice the time of one."""
        return 1 if self._network.get_buffer("filters").device.type == "cpu" else GPU_BATCH_CLIPS

    @torch.inference_mode()
    def embed_batch(self, clips: Sequence[Samples], sample_rate: int) -> list[SpeakerEmbedding]:
        """Clips of one length go through the network together: padding would change their embeddings."""
        embeddings = [np.zeros(self._network.size, np.float32) for _ in clips]
        waves: dict[int, dict[int, Samples]] = {}
        for index, samples in enumerate(clips):
            clip = as_mono_16khz(samples, sample_rate)
            if not is_silent(clip) and len(samples) >= MIN_SECONDS * sample_rate:
                waves.setdefault(len(clip), {})[index] = clip
        for group in waves.values():
            batch = torch.from_numpy(np.stack(list(group.values()))).to(self._network.get_buffer("filters").device)
            for index, embedding in zip(group, self._network(batch).cpu().numpy(), strict=True):
                embeddings[index] = np.asarray(embedding, np.float32)
        return embeddings


def _weights_file(path: Path) -> Path:
    if path.is_file():
        file = path
    else:
        weights = sorted(path.glob("*.safetensors"))
        pickles = sorted(file for file in path.glob("*") if file.suffix in PICKLE_SUFFIXES)
        if not weights and not pickles:
            raise CheckpointError(
                f"{path} holds no safetensors with the ECAPA speaker encoder",
                hint=f"fetch embedding_model.ckpt of SpeechBrain's spkrec-ecapa-voxceleb; {CONVERT_HINT}",
            )
        if len(weights) > 1:
            raise CheckpointError(
                f"{path} holds several safetensors: {format_names([file.name for file in weights])}",
                hint=f"name the one that is meant: ecapa:{weights[0]}",
            )
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
        self.asp_bn = _norm(6 * WIDTH)
        self.fc = _conv(6 * WIDTH, self.size, 1)
        self.register_buffer("filters", _mel_filters(), persistent=False)

    def forward(self, waves: torch.Tensor) -> torch.Tensor:
        """Clips at 16 kHz (batch, samples) -> their embeddings (batch, 192), of length one."""
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
    """SpeechBrain's triangular mel filters: as wide on the right as on the left."""
    mels = torch.linspace(0, 2595 * torch.log10(torch.tensor(1 + SAMPLE_RATE / 2 / 700)).item(), MELS + 2)
    corners = 700 * (10 ** (mels / 2595) - 1)
    slopes = (torch.linspace(0, SAMPLE_RATE / 2, WINDOW // 2 + 1)[:, None] - corners[1:-1]) / (
        corners[1:] - corners[:-1]
    )[:-1]
    return torch.minimum(1 + slopes, 1 - slopes).clamp(min=0)


def _conv(in_channels: int, out_channels: int, kernel: int, dilation: int = 1) -> nn.Sequential:
    padding = dilation * (kernel - 1) // 2
    layer = nn.Conv1d(in_channels, out_channels, kernel, dilation=dilation, padding=padding, padding_mode="reflect")
    return nn.Sequential(OrderedDict(conv=layer))


def _norm(channels: int) -> nn.Sequential:
    return nn.Sequential(OrderedDict(norm=nn.BatchNorm1d(channels)))


def _tdnn(in_channels: int, out_channels: int, kernel: int, dilation: int = 1) -> nn.Sequential:
    conv = _conv(in_channels, out_channels, kernel, dilation)
    return nn.Sequential(OrderedDict(conv=conv, relu=nn.ReLU(), norm=_norm(out_channels)))


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


class _SqueezeExcitation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = _conv(WIDTH, 128, 1), _conv(128, WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.conv2(F.relu(self.conv1(x.mean(2, keepdim=True)))))


class _Block(nn.Module):
    def __init__(self, dilation: int) -> None:
        super().__init__()
        self.tdnn1, self.tdnn2 = _tdnn(WIDTH, WIDTH, 1), _tdnn(WIDTH, WIDTH, 1)
        self.res2net_block = _Res2Net(dilation)
        self.se_block = _SqueezeExcitation()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.se_block(self.tdnn2(self.res2net_block(self.tdnn1(x))))
        return out + x


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
