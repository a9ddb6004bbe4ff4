"""Quick codec metrics on held-out speakers during training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from codec_training.recordings import DecodedClip, pcm_to_float
from codec_training.trainer import CodecTrainingModel


class CodecScores(NamedTuple):
    mel: float
    """Mean distance of log10 mel spectrograms of original and round trip."""
    perplexity: list[float]
    """Of each codebook: the number of codes it would have if all were equally common."""


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


def perplexity(counts: torch.Tensor) -> list[float]:
    """(codebooks, codes) -> one number per codebook."""
    shares = counts.double() / counts.sum(1, keepdim=True).clamp(min=1)
    return [round(float(entropy), 1) for entropy in torch.special.entr(shares).sum(1).exp()]
