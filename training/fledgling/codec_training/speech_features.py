"""Distance of two recordings in the hidden states of Whisper's encoder: what a recogniser hears of them.

A mel distance weighs every band alike, however little it says about the words. Whisper tiny was trained on a hundred
languages, so that its hidden states tell sounds apart in languages that the codec is not trained on. The codec is
judged by another recogniser (Whisper base), which is no part of its training.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from myna.core.errors import CheckpointError

SAMPLE_RATE = 24_000
"""Sample rate of the recordings. Frames of 25 ms have bins 40 Hz apart at any rate: at 24 kHz, Whisper's are the
lowest 201."""
WINDOW, HOP = 600, 240
WHISPER_WINDOW = 400
"""Samples of a frame at Whisper's own 16 kHz."""
DYNAMIC_RANGE = 8.0
"""Powers of ten below the loudest bin at which log-mel spectra are cut off."""
HEAD_WIDTH = 64
MIN_DEVIATION = 0.05
"""Floor of a channel's deviation: some channels never change."""


class WhisperEncoder(nn.Module):
    """Whisper's encoder without its padding to half a minute; (clips, samples) -> hidden states of all layers."""

    window: torch.Tensor

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("layers."))
        for name, tensor in weights.items():
            self.register_buffer(_plain(name), tensor.float(), persistent=False)
        self.register_buffer("window", torch.hann_window(WINDOW), persistent=False)

    @classmethod
    def open(cls, file: Path) -> WhisperEncoder:
        """The file that export_speech_encoder.py writes."""
        if not file.is_file():
            raise CheckpointError(
                f"there is no {file}", hint=f"python training/fledgling/export_speech_encoder.py --out {file}"
            )
        return cls(load_file(file))

    def log_mel(self, waves: torch.Tensor, loudest: torch.Tensor | None = None) -> torch.Tensor:
        """(clips, bins, frames), cut off below `loudest` (clips, 1, 1), by default the clip's own loudest bin."""
        padded = F.pad(waves[:, None], (WINDOW // 2, WINDOW // 2), mode="reflect")[:, 0]
        frames = padded.unfold(1, WINDOW, HOP)[:, : waves.shape[1] // HOP]
        spectra = torch.fft.rfft(frames * self.window)[..., : WHISPER_WINDOW // 2 + 1] * (WHISPER_WINDOW / WINDOW)
        powers = spectra.real.square() + spectra.imag.square()
        logs = (powers @ self._weight("mel_filters")).clamp(min=1e-10).log10().transpose(1, 2)
        loudest = logs.amax((1, 2), keepdim=True) if loudest is None else loudest
        return (torch.maximum(logs, loudest - DYNAMIC_RANGE) + 4) / 4

    def forward(self, waves: torch.Tensor, loudest: torch.Tensor | None = None) -> list[torch.Tensor]:
        with torch.autocast(waves.device.type, enabled=False):
            mel = self.log_mel(waves.float(), loudest)
        x = F.gelu(self._convolved("conv1", mel, stride=1))
        x = F.gelu(self._convolved("conv2", x, stride=2)).transpose(1, 2)
        x = x + self._weight("embed_positions.weight")[: x.shape[1]]
        states = []
        for layer in range(self.layers):
            x = x + self._attended(f"layers.{layer}.self_attn", self._normed(f"layers.{layer}.self_attn_layer_norm", x))
            inner = self._projected(f"layers.{layer}.fc1", self._normed(f"layers.{layer}.final_layer_norm", x))
            x = x + self._projected(f"layers.{layer}.fc2", F.gelu(inner))
            states.append(x)
        return [*states[:-1], self._normed("layer_norm", x)]

    def _weight(self, name: str) -> torch.Tensor:
        return self.get_buffer(_plain(name))

    def _convolved(self, name: str, x: torch.Tensor, stride: int) -> torch.Tensor:
        return F.conv1d(x, self._weight(f"{name}.weight"), self._weight(f"{name}.bias"), stride, padding=1)

    def _normed(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], self._weight(f"{name}.weight"), self._weight(f"{name}.bias"))

    def _projected(self, name: str, x: torch.Tensor) -> torch.Tensor:
        bias = None if name.endswith("k_proj") else self._weight(f"{name}.bias")
        return F.linear(x, self._weight(f"{name}.weight"), bias)

    def _attended(self, name: str, x: torch.Tensor) -> torch.Tensor:
        clips, positions, width = x.shape
        heads = (clips, positions, width // HEAD_WIDTH, HEAD_WIDTH)
        query, key, value = (
            self._projected(f"{name}.{kind}_proj", x).reshape(heads).transpose(1, 2) for kind in ("q", "k", "v")
        )
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self._projected(f"{name}.out_proj", mixed.transpose(1, 2).reshape(x.shape))


class SpeechFeatureDistance(nn.Module):
    """Mean L1 distance of hidden states, each channel in units of its deviation over the target."""

    def __init__(self, encoder: WhisperEncoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, target: torch.Tensor, decoded: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            # One cut-off for both: that of a louder copy would hide what is faint in it.
            loudest = 4 * self.encoder.log_mel(target.float()).amax((1, 2), keepdim=True) - 4
            expected = self.encoder(target, loudest)
        distance = decoded.new_zeros(())
        for state, wanted in zip(self.encoder(decoded, loudest), expected, strict=True):
            deviation = wanted.float().std((0, 1)).clamp(min=MIN_DEVIATION)
            distance = distance + ((state.float() - wanted.float()).abs() / deviation).mean()
        return distance / self.encoder.layers


def _plain(name: str) -> str:
    """A buffer's name, which may hold no dots."""
    return name.replace(".", "_")
