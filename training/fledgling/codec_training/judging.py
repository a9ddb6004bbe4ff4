"""How the codec does on voices it never learned from, by numbers that a card can give in a second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from codec_training.learner import Learner
from codec_training.sounds import Clip, as_waves


class Standing(NamedTuple):
    mel: float
    """Mean distance of log10 mel spectrograms of original and round trip."""
    used: list[float]
    """Perplexity of each codebook: the number of codes it would have if all were equally common."""


@torch.no_grad()
def standing(learner: Learner, clips: Sequence[Clip], device: torch.device) -> Standing:
    network, config = learner.network, learner.network.config
    apart, counts = 0.0, torch.zeros(config.codebooks, config.codebook_size, device=device)
    for clip in clips:
        samples = torch.from_numpy(clip.samples[: len(clip.samples) // config.hop * config.hop])
        waves = as_waves(samples.to(device))[None]
        codes = network.encode(waves)
        apart += float(learner.mel_distance(waves, network.decode(codes)))
        for book, chosen in enumerate(codes[0].T):
            counts[book] += torch.bincount(chosen, minlength=config.codebook_size)
    return Standing(apart / max(1, len(clips)), perplexity(counts))


def perplexity(counts: torch.Tensor) -> list[float]:
    """(codebooks, codes) -> one number per codebook."""
    shares = counts.double() / counts.sum(1, keepdim=True).clamp(min=1)
    return [round(float(entropy), 1) for entropy in torch.special.entr(shares).sum(1).exp()]
