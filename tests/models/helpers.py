"""Helpers of several tests: adapters with random weights, sampling by hand, a small mel codec."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from myna.core.config import AdaptSettings
from myna.models.base import Family, Sampling
from myna.models.code_sampling import RowState, advance, sample_frame
from myna.models.lora import make_trainable, save_adapter
from myna.models.mel_codec import MelCodecConfig, MelCodecNetwork

BEGIN, END = 64, 65
SMALL_MEL_CODEC = MelCodecConfig(
    codebook_size=64,
    latent=8,
    mel_bins=40,
    expansion=2,
    encoder_width=16,
    encoder_fine=1,
    encoder_frame_width=16,
    encoder_coarse=1,
    decoder_frame_width=16,
    decoder_coarse=1,
    decoder_width=16,
    decoder_fine=1,
)


def load_model(family: Family, dtype: torch.dtype | None = torch.float32, *, text_head: bool = False) -> Any:
    return family.load_model(dtype=dtype, device="cpu", text_head=text_head)


def random_adapter(
    family: Family, folder: Path, scale: float = 0.05, *, text_head: bool = True, **settings: Any
) -> Path:
    """Save an adapter with random weights, which changes what the model computes."""
    model = make_trainable(load_model(family, text_head=text_head), family, AdaptSettings(rank=4, **settings))
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data += scale * torch.randn_like(parameter) * parameter.requires_grad
    save_adapter(model, folder)
    return folder


def new_state(samplings: Sequence[Sampling], max_frames: int = 1000) -> RowState:
    state = RowState.create(len(samplings), 8, torch.device("cpu"))
    for row, sampling in enumerate(samplings):
        state.set_row(row, position=10, sampling=sampling, max_frames=max_frames, begin=BEGIN)
    return state


def sampled_frames(logits: Sequence[torch.Tensor], sampling: Sampling, max_frames: int = 1000) -> torch.Tensor:
    """Return the frames of one row, (steps, codebooks), for these logits one after another, until it ends."""
    state, frames = new_state([sampling], max_frames), []
    for one in logits:
        frame = sample_frame(one, state, 1, BEGIN, END)
        advance(state, 1, frame, END)
        frames.append(frame[0])
        if not state.active[0]:
            break
    return torch.stack(frames)


def calibrated_network(config: MelCodecConfig) -> MelCodecNetwork:
    """Return an untrained network that distinguishes sounds: its codebooks are sampled from a few clips."""
    torch.manual_seed(0)
    network = MelCodecNetwork(config)
    second = torch.arange(24_000) / 24_000
    pitches, levels = 80 * 40 ** torch.rand(48, 1), 10 ** -torch.rand(48, 1)
    sounds = levels * (torch.sin(2 * torch.pi * pitches * second * (1 + second)) + 0.1 * torch.randn(48, 24_000))
    with torch.no_grad():
        # After initialisation, all sounds look much alike.
        rest = network.encoder(network.log_mel(sounds)).flatten(0, 1)
        network.encoder.leave.weight.mul_(1 / rest.std(0)[:, None])
        network.encoder.leave.bias.mul_(1 / rest.std(0))
        rest = network.encoder(network.log_mel(sounds)).flatten(0, 1)
        for number, book in enumerate(network.quantiser.books):
            book.copy_(rest[torch.randperm(len(rest))[: len(book)]])
            rest = rest - book[network.quantiser.nearest(rest, number)]
    return network
