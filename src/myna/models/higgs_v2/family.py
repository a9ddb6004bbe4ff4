"""Higgs Audio v2 behind the seam: this page only joins the files beside it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from myna.data.codec import Codec
from myna.data.conversation import Conversation
from myna.errors import ModelError
from myna.models.base import GeneratedCodes, LoraTargets, RenderedSequence, Sampling
from myna.models.codecs import open_codec
from myna.models.hf_family import HFFamily
from myna.models.higgs_v2 import checkpoint, lora_targets
from myna.models.higgs_v2.batch import HiggsBatch, collate
from myna.models.higgs_v2.builtin import builtin_config
from myna.models.higgs_v2.forward import HiggsObjective, core_of
from myna.models.higgs_v2.generate import generate
from myna.models.higgs_v2.render import FRAME_RATE, DelayPattern, Renderer

DEFAULT_CODEC = "eustlb/higgs-audio-v2-tokenizer"
"""The released codec as safetensors."""


class HiggsV2(HFFamily):
    name = "higgs_v2"
    model_types = ("higgs_audio_v2", "higgs_audio")

    @classmethod
    def open(cls, source: str, folder: Path, codec: str | None = None) -> HiggsV2:
        family = cls(source, checkpoint.read_config(folder), folder, codec)
        checkpoint.check_tokenizer(family.config, family.tokenizer)
        return family

    @classmethod
    def builtin(cls, name: str) -> HiggsV2:
        """A true-size configuration without weights or tokenizer, for arithmetic."""
        return cls(name, builtin_config(name), None)

    @cached_property
    def renderer(self) -> Renderer:
        config = self.config
        return Renderer(
            tokenizer=self.tokenizer,
            delay=self.delay,
            codes_per_book=_codes(config),
            audio_id=config.audio_token_id,
            delay_id=config.audio_delay_token_id,
            control_tokens=tuple(self.tokenizer.get_added_vocab()),
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

    def check_weights(self) -> str:
        return checkpoint.check_weights(self._checkpoint(), self.config)

    def load_model(self, *, dtype: torch.dtype, device: torch.device | str, text_head: bool) -> nn.Module:
        folder = Path() if torch.device(device).type == "meta" else self._checkpoint()
        model: nn.Module = checkpoint.load_weights(folder, self.config, dtype=dtype, device=device, text_head=text_head)
        return model

    def accepts(self, codebooks: int, codebook_size: int, frame_rate: float) -> bool:
        config = self.config
        return (codebooks, codebook_size, frame_rate) == (config.num_codebooks, _codes(config), FRAME_RATE)

    @property
    def codec_source(self) -> str:
        beside = self.folder / "codec" if self.folder is not None else None
        return self._codec or (str(beside) if beside is not None and beside.is_dir() else DEFAULT_CODEC)

    def load_codec(self, *, device: torch.device | str = "cpu") -> Codec:
        codec = open_codec(self.codec_source, device=device)
        if not self.accepts(codec.codebooks, codec.codebook_size, codec.frame_rate):
            wanted = f"{self.config.num_codebooks} x {_codes(self.config)} at {FRAME_RATE:g}"
            raise ModelError(
                f"the codec {self.codec_source} makes {codec.codebooks} x {codec.codebook_size} codes at "
                f"{codec.frame_rate:g} frames/s; {self.source} wants {wanted}",
                hint="name the model's own codec with --codec",
            )
        return codec

    def render(
        self, conversation: Conversation, *, supervise_text: bool = False, supervise_references: bool = False
    ) -> RenderedSequence:
        return self.renderer.render(
            conversation, supervise_text=supervise_text, supervise_references=supervise_references
        )

    def collate(self, sequences: Sequence[RenderedSequence], *, offset: int = 1) -> HiggsBatch:
        config = self.config
        return collate(sequences, (config.audio_token_id, config.audio_delay_token_id), offset=offset)

    def objective(
        self,
        model: nn.Module,
        *,
        label_smoothing: float = 0.0,
        recompute: int = 0,
        fast: bool = False,
        compiled: bool = False,
    ) -> nn.Module:
        return HiggsObjective(model, label_smoothing, recompute, fast, compiled)

    def layers(self, objective: nn.Module) -> Sequence[nn.Module]:
        assert isinstance(objective, HiggsObjective)
        return list(objective.layers)

    def adapt_targets(self, model: nn.Module, mode: str, custom: Sequence[str] = ()) -> LoraTargets:
        return lora_targets.adapt_targets(core_of(model), mode, custom)

    def module_names(self, model: nn.Module) -> dict[str, tuple[str, ...]]:
        return lora_targets.module_names(core_of(model))

    def generate(
        self,
        model: nn.Module,
        prompts: Sequence[RenderedSequence],
        sampling: Sampling,
        on_frame: Callable[[int], None] | None = None,
    ) -> list[GeneratedCodes]:
        core = core_of(model)
        batch = self.collate(prompts).to(next(core.parameters()).device)
        seeds = [_seed(sampling.seed, prompt.id) for prompt in prompts]
        return generate(core, batch, self.delay, sampling, seeds, on_frame)

    def save_model(self, model: nn.Module, folder: Path) -> None:
        checkpoint.save_transformers(core_of(model), folder, self.tokenizer, self.sampling)


def _codes(config: Any) -> int:
    """Codes per codebook: the two stream ids stand right behind them."""
    return min(int(config.audio_stream_bos_id), int(config.audio_stream_eos_id))


def _seed(seed: int, id: str) -> int:
    """A random stream of its own for every line, whatever it is batched with."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{id}".encode(), digest_size=7).digest(), "big")
