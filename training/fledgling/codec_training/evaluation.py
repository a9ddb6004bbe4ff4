"""Quick codec metrics on held-out speakers during training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from codec_training.recordings import DecodedClip, pcm_to_float
from codec_training.trainer import CodecTrainingModel
from myna.core.io import atomic_write
from myna.models.mel_codec import MelCodec, MelCodecConfig

WINDOW_SECONDS = 3
"""Seconds from the middle of each held-out clip that are scored with every line of progress."""
ROUND_TRIPS, ROUND_TRIP_SECONDS = 8, 6
"""Held-out clips of each source that are kept as a pair of original and copy, and their longest."""


class CodecScores(NamedTuple):
    mel: float
    """Mean distance of log10 mel spectrograms of original and round trip."""
    perplexity: list[float]
    """Effective size of each codebook: the number of codes it would have if all were equally common."""


@torch.no_grad()
def score_codec(model: CodecTrainingModel, clips: Sequence[DecodedClip], device: torch.device) -> CodecScores:
    network, config = model.network, model.network.config
    distance, counts = 0.0, torch.zeros(config.codebooks, config.codebook_size, device=device)
    for clip in clips:
        samples = torch.from_numpy(clip.samples[: len(clip.samples) // config.hop * config.hop])
        waves = pcm_to_float(samples.to(device))[None]
        codes = network.encode(waves)
        distance += float(model.mel_distance(waves, network.decode(codes)))
        for book, chosen in enumerate(codes[0].T):
            counts[book] += torch.bincount(chosen, minlength=config.codebook_size)
    return CodecScores(distance / max(1, len(clips)), perplexity(counts))


class HeldOutWindows:
    """The middles of held-out clips on the device, all of a source in one batch: scored in milliseconds."""

    def __init__(
        self, held_out: Mapping[str, Sequence[DecodedClip]], config: MelCodecConfig, device: torch.device
    ) -> None:
        size = WINDOW_SECONDS * config.sample_rate // config.hop * config.hop
        self.waves = {
            name: torch.stack([_middle(clip, size) for clip in clips]).to(device)
            for name, clips in held_out.items()
            if clips
        }

    @torch.no_grad()
    def score(self, model: CodecTrainingModel) -> dict[str, float]:
        """Mean mel distance of each source's round trips."""
        network = model.network
        return {
            name: round(float(model.mel_distance(waves, network.decode(network.encode(waves)))), 4)
            for name, waves in self.waves.items()
        }


def _middle(clip: DecodedClip, size: int) -> torch.Tensor:
    """`size` samples of a clip, with silence around a shorter one."""
    spare = len(clip.samples) - size
    samples = clip.samples[max(0, spare // 2) :][:size]
    before = (size - len(samples)) // 2
    return pcm_to_float(torch.from_numpy(np.pad(samples, (before, size - len(samples) - before))))


def write_round_trips(out: Path, held_out: Mapping[str, Sequence[DecodedClip]], device: torch.device) -> None:
    """Write round_trips.npz: held-out clips as 16-bit samples, before and after the exported codec."""
    codec, pairs = MelCodec.open(out / "codec", device), {}
    longest = ROUND_TRIP_SECONDS * codec.sample_rate
    for name, clips in held_out.items():
        for number, clip in enumerate(clips[:ROUND_TRIPS]):
            original = clip.samples[: min(longest, len(clip.samples)) // codec.hop * codec.hop]
            if len(original):
                copy = codec.decode(codec.encode((original / 32767).astype(np.float32)[None])[0])
                pairs[f"{name}-{number}-original"] = original
                pairs[f"{name}-{number}-copy"] = np.round(copy * 32767).astype(np.int16)
    with atomic_write(out / "round_trips.npz") as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **pairs)  # type: ignore[arg-type]


def perplexity(counts: torch.Tensor) -> list[float]:
    """(codebooks, codes) -> one number per codebook."""
    shares = counts.double() / counts.sum(1, keepdim=True).clamp(min=1)
    return [round(float(entropy), 1) for entropy in torch.special.entr(shares).sum(1).exp()]
