"""The ECAPA-TDNN speaker encoder of SpeechBrain (spkrec-ecapa-voxceleb), for its published weights, in plain torch.

The names of the modules are those of the checkpoint, so that every tensor is checked for its place.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional as F

from myna.evaluate.dependencies import RATE

MELS, WINDOW, HOP = 80, 400, 160
WIDTH, SCALE = 1024, 8


class Ecapa(nn.Module):
    size = 192
    """Numbers of a voice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Tdnn(MELS, WIDTH, 5), *(_Block(dilation) for dilation in (2, 3, 4))])
        self.mfa = _Tdnn(3 * WIDTH, 3 * WIDTH, 1)
        self.asp = _Pooling(3 * WIDTH, 128)
        self.asp_bn = _Norm(6 * WIDTH)
        self.fc = _Conv(6 * WIDTH, self.size, 1)
        self.register_buffer("filters", _filters(), persistent=False)

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        """Samples of one clip at 16 kHz -> its numbers, of length one."""
        x = self._heard(wave)
        passed = []
        for block in self.blocks:
            x = block(x)
            passed.append(x)
        x = self.fc(self.asp_bn(self.asp(self.mfa(torch.cat(passed[1:], 1)))))
        return F.normalize(x.flatten(), dim=0)

    def _heard(self, wave: torch.Tensor) -> torch.Tensor:
        window = torch.hamming_window(WINDOW)
        spectra = torch.stft(wave, WINDOW, HOP, window=window, pad_mode="constant", return_complex=True)
        powers = spectra.abs().square().T @ self.get_buffer("filters")
        decibels = 10 * powers.clamp(min=1e-10).log10()
        decibels = decibels.clamp(min=float(decibels.max()) - 80)
        return (decibels - decibels.mean(0)).T[None]


def _filters() -> torch.Tensor:
    """SpeechBrain's triangles: as wide on the right as on the left."""
    mels = torch.linspace(0, 2595 * torch.log10(torch.tensor(1 + RATE / 2 / 700)).item(), MELS + 2)
    corners = 700 * (10 ** (mels / 2595) - 1)
    slopes = (torch.linspace(0, RATE / 2, WINDOW // 2 + 1)[:, None] - corners[1:-1]) / (corners[1:] - corners[:-1])[:-1]
    return torch.minimum(1 + slopes, 1 - slopes).clamp(min=0)


class _Conv(nn.Module):
    def __init__(self, into: int, out: int, kernel: int, dilation: int = 1) -> None:
        super().__init__()
        reach = dilation * (kernel - 1) // 2
        self.conv = nn.Conv1d(into, out, kernel, dilation=dilation, padding=reach, padding_mode="reflect")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.conv(x)
        return out


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(x)
        return out


class _Tdnn(nn.Module):
    def __init__(self, into: int, out: int, kernel: int, dilation: int = 1) -> None:
        super().__init__()
        self.conv = _Conv(into, out, kernel, dilation)
        self.norm = _Norm(out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(F.relu(self.conv(x)))
        return out


class _Res2Net(nn.Module):
    def __init__(self, dilation: int) -> None:
        super().__init__()
        width = WIDTH // SCALE
        self.blocks = nn.ModuleList(_Tdnn(width, width, 3, dilation) for _ in range(SCALE - 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *rest = x.chunk(SCALE, 1)
        out = [first]
        for number, (block, part) in enumerate(zip(self.blocks, rest, strict=True)):
            out.append(block(part if number == 0 else part + out[-1]))
        return torch.cat(out, 1)


class _Squeeze(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = _Conv(WIDTH, 128, 1), _Conv(128, WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.conv2(F.relu(self.conv1(x.mean(2, keepdim=True)))))


class _Block(nn.Module):
    def __init__(self, dilation: int) -> None:
        super().__init__()
        self.tdnn1, self.tdnn2 = _Tdnn(WIDTH, WIDTH, 1), _Tdnn(WIDTH, WIDTH, 1)
        self.res2net_block = _Res2Net(dilation)
        self.se_block = _Squeeze()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.se_block(self.tdnn2(self.res2net_block(self.tdnn1(x))))
        return out + x


class _Pooling(nn.Module):
    """Mean and spread over time, weighted by attention that itself knows the plain mean and spread."""

    def __init__(self, width: int, narrow: int) -> None:
        super().__init__()
        self.tdnn = _Tdnn(3 * width, narrow, 1)
        self.conv = _Conv(narrow, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        context = [one.expand_as(x) for one in _spread(x, torch.full_like(x, 1 / x.shape[2]))]
        weight = self.conv(torch.tanh(self.tdnn(torch.cat([x, *context], 1)))).softmax(2)
        return torch.cat(list(_spread(x, weight)), 1)


def _spread(x: torch.Tensor, weight: torch.Tensor) -> Iterable[torch.Tensor]:
    mean = (weight * x).sum(2, keepdim=True)
    return mean, (weight * (x - mean).square()).sum(2, keepdim=True).clamp(min=1e-12).sqrt()
