"""The Higgs Audio v2 family: joins the modules of this package to the `Family` interface."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from myna.data.codec import Codec
from myna.errors import ModelError
from myna.models.base import FrameCallback, GeneratedCodes, RenderedSequence, Sampling, SpeakingFamily, get_base_model
from myna.models.codecs import open_codec
from myna.models.hf_family import HFFamily
from myna.models.higgs_v2 import checkpoint
from myna.models.higgs_v2.batch import HiggsBatch, collate
from myna.models.higgs_v2.builtin import builtin_config
from myna.models.higgs_v2.forward import HiggsObjective
from myna.models.higgs_v2.generate import generate
from myna.models.higgs_v2.lora_targets import MODULES
from myna.models.higgs_v2.render import FRAME_RATE, DelayPattern, Renderer

DEFAULT_CODEC = "eustlb/higgs-audio-v2-tokenizer"
"""The released codec as safetensors."""


class HiggsV2(HFFamily, SpeakingFamily):
    name = "higgs_v2"
    model_types = ("higgs_audio_v2", "higgs_audio")
    checkpoint: ClassVar[Any] = checkpoint
    modules: ClassVar = MODULES
    builtin_config = staticmethod(builtin_config)
    objective_type: ClassVar = HiggsObjective

    @cached_property
    def renderer(self) -> Renderer:
        config = self.config
        return Renderer(
            tokenizer=self.tokenizer,
            delay=self.delay,
            codes_per_book=_codebook_size(config),
            audio_id=config.audio_token_id,
            delay_id=config.audio_delay_token_id,
        )

    @property
    def delay(self) -> DelayPattern:
        config = self.config
        return DelayPattern(config.num_codebooks, config.audio_stream_bos_id, config.audio_stream_eos_id)

    @property
    def streams(self) -> tuple[str, ...]:
        return ("text", *(f"code{k}" for k in range(self.config.num_codebooks)))

    @property
    def chance(self) -> tuple[float, ...]:
        config = self.config
        return (math.log(config.vocab_size), *[math.log(config.codebook_size)] * config.num_codebooks)

    @cached_property
    def sampling(self) -> Sampling:
        return Sampling() if self.folder is None else checkpoint.read_sampling(self.folder)

    def accepts_codes(self, codebooks: int, codebook_size: int, frame_rate: float) -> bool:
        config = self.config
        return (codebooks, codebook_size, frame_rate) == (config.num_codebooks, _codebook_size(config), FRAME_RATE)

    @property
    def codec_source(self) -> str:
        included = self.folder / "codec" if self.folder is not None else None
        return self._codec or (str(included) if included is not None and included.is_dir() else DEFAULT_CODEC)

    def load_codec(self, *, device: torch.device | str = "cpu") -> Codec:
        codec = open_codec(self.codec_source, device=device)
        if not self.accepts_codes(codec.codebooks, codec.codebook_size, codec.frame_rate):
            wanted = f"{self.config.num_codebooks} x {_codebook_size(self.config)} at {FRAME_RATE:g}"
            raise ModelError(
                f"the codec {self.codec_source} makes {codec.codebooks} x {codec.codebook_size} codes at "
                f"{codec.frame_rate:g} frames/s; {self.source} wants {wanted}",
                hint="name the model's own codec with --codec",
            )
        return codec

    def collate(self, sequences: Sequence[RenderedSequence], *, offset: int = 1) -> HiggsBatch:
        config = self.config
        return collate(sequences, (config.audio_token_id, config.audio_delay_token_id), offset=offset)

    def generate(
        self, model: nn.Module, prompts: Sequence[RenderedSequence], sampling: Sampling, on_frame: FrameCallback = None
    ) -> list[GeneratedCodes]:
        core = get_base_model(model)
        batch = self.collate(prompts).to(next(core.parameters()).device)
        seeds = [_prompt_seed(sampling.seed, prompt.id) for prompt in prompts]
        return generate(core, batch, self.delay, sampling, seeds, on_frame)

    def save_model(self, model: nn.Module, folder: Path) -> None:
        checkpoint.save_checkpoint(get_base_model(model), folder, self.tokenizer, self.sampling)


def _codebook_size(config: Any) -> int:
    """Codes per codebook: the two stream ids follow them."""
    return min(int(config.audio_stream_bos_id), int(config.audio_stream_eos_id))


def _prompt_seed(seed: int, id: str) -> int:
    """Seed of one prompt's random stream, whatever its batch."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{id}".encode(), digest_size=7).digest(), "big")
