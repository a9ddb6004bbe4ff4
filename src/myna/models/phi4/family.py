"""Phi-4-multimodal behind the seam: this page only joins the files beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from myna.data.codec import Encoder
from myna.data.conversation import Conversation
from myna.data.pronunciation.grammar import Grammar
from myna.errors import ModelError
from myna.models.base import GeneratedAnswer, LoraTargets, RenderedSequence, core_of
from myna.models.constrained_decoding import Constraint, Vocabulary
from myna.models.files import resolve
from myna.models.hf_family import HFFamily
from myna.models.phi4 import checkpoint, lora_targets
from myna.models.phi4.batch import PhiBatch, collate
from myna.models.phi4.builtin import builtin_config
from myna.models.phi4.codec import LARGEST, MelFeatureEncoder
from myna.models.phi4.forward import PhiObjective
from myna.models.phi4.generate import generate
from myna.models.phi4.render import Renderer

FRAME_RATE = 100.0
"""Spectra a second."""


class Phi4(HFFamily):
    name = "phi4"
    model_types = ("phi4_multimodal",)
    listens = True

    def __init__(self, source: str, config: Any, folder: Path | None, codec: str | None = None) -> None:
        super().__init__(source, config, folder, codec)
        self._held: Constraint | None = None

    @classmethod
    def open(cls, source: str, folder: Path, codec: str | None = None) -> Phi4:
        family = cls(source, checkpoint.read_config(folder), folder, codec)
        checkpoint.check_tokenizer(family.config, family.tokenizer)
        return family

    @classmethod
    def builtin(cls, name: str) -> Phi4:
        """A true-size configuration without weights or tokenizer, for arithmetic."""
        return cls(name, builtin_config(name), None)

    @cached_property
    def renderer(self) -> Renderer:
        audio = self.config.audio_config
        return Renderer(
            self.tokenizer,
            audio.audio_token_id,
            audio.input_size,
            audio.time_reduction,
            FRAME_RATE,
            self.config.original_max_position_embeddings or self.config.max_position_embeddings,
        )

    @property
    def streams(self) -> tuple[str, ...]:
        return ("text",)

    @property
    def chance(self) -> tuple[float, ...]:
        return (math.log(self.config.vocab_size),)

    def check_weights(self) -> str:
        return checkpoint.check_weights(self._checkpoint(), self.config)

    def load_model(self, *, dtype: torch.dtype, device: torch.device | str, text_head: bool) -> nn.Module:  # noqa: ARG002
        """The text head is what answers: it is always there."""
        folder = Path() if torch.device(device).type == "meta" else self._checkpoint()
        model: nn.Module = checkpoint.load_weights(folder, self.config, dtype=dtype, device=device)
        return model

    def accepts(self, codebooks: int, codebook_size: int, frame_rate: float) -> bool:
        bands = self.config.audio_config.input_size
        return (codebooks, codebook_size, frame_rate) == (bands, LARGEST + 1, FRAME_RATE)

    @property
    def codec_source(self) -> str:
        """Where it is said how sound becomes features."""
        return self._codec or str(self._checkpoint())

    def load_encoder(self, *, device: torch.device | str = "cpu") -> Encoder:  # noqa: ARG002 - features need no card
        ear = MelFeatureEncoder.open(resolve(self.codec_source, None))
        if not self.accepts(ear.codebooks, ear.codebook_size, ear.frame_rate):
            raise ModelError(
                f"the features of {self.codec_source} have {ear.codebooks} bands at {ear.frame_rate:g} spectra/s; the "
                f"model wants {self.config.audio_config.input_size} at {FRAME_RATE:g}",
                hint="use the processor's files of one checkpoint",
            )
        return ear

    def render(
        self,
        conversation: Conversation,
        *,
        supervise_text: bool = False,  # noqa: ARG002 - the answer is all there is to learn
        supervise_references: bool = False,  # noqa: ARG002
    ) -> RenderedSequence:
        return self.renderer.render(conversation)

    def positions(self, frames: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        return self.renderer.positions(frames)

    def collate(self, sequences: Sequence[RenderedSequence], *, offset: int = 1) -> PhiBatch:
        return collate(sequences, self.config.audio_config.input_size, offset)

    def objective(
        self,
        model: nn.Module,
        *,
        label_smoothing: float = 0.0,
        recompute: int = 0,
        fast: bool = False,  # noqa: ARG002 - there is no faster way yet
        compiled: bool = False,
    ) -> nn.Module:
        return PhiObjective(model, checkpoint.end_ids(self.config), label_smoothing, recompute, compiled)

    def layers(self, objective: nn.Module) -> Sequence[nn.Module]:
        assert isinstance(objective, PhiObjective)
        return list(objective.layers)

    def adapt_targets(self, model: nn.Module, mode: str, custom: Sequence[str] = ()) -> LoraTargets:
        return lora_targets.adapt_targets(core_of(model), mode, custom)

    def module_names(self, model: nn.Module) -> dict[str, tuple[str, ...]]:
        return lora_targets.module_names(core_of(model))

    def answer(
        self, model: nn.Module, prompts: Sequence[RenderedSequence], max_tokens: int, grammar: Grammar | None = None
    ) -> list[GeneratedAnswer]:
        core, ends = core_of(model), checkpoint.end_ids(self.config)
        batch = self.collate(prompts).to(next(core.parameters()).device)
        if grammar is not None and (self._held is None or self._held.grammar is not grammar):
            # Kept, since it learns more of the grammar with every answer.
            self._held = Constraint(grammar, Vocabulary(self.tokenizer), ends)
        guide = self._held.guide(len(prompts), max_tokens) if grammar is not None and self._held is not None else None
        said = generate(core, batch, ends, max_tokens, guide)
        return [GeneratedAnswer(self.tokenizer.decode(ids), stopped) for ids, stopped in said]

    def save_model(self, model: nn.Module, folder: Path) -> None:
        checkpoint.save(core_of(model), folder, self.tokenizer, self._checkpoint())
