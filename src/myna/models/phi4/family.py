"""Phi-4-multimodal as a `Family`: joins the modules of this package; its configuration and its LoRA targets."""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from myna.core.errors import ModelError
from myna.data.codec import Encoder
from myna.data.conversation import AudioClip, Conversation, answer_conversation
from myna.models import base
from myna.models.family_parts import ModulePatterns
from myna.models.files import resolve_checkpoint
from myna.models.phi4 import checkpoint
from myna.models.phi4.batch import Phi4Batch, collate
from myna.models.phi4.codec import MAX_CODE, MelFeatureEncoder
from myna.models.phi4.forward import Phi4Objective
from myna.models.phi4.generate import ConstrainedDecoder, TokenGrammar, generate
from myna.models.phi4.render import Phi4Renderer


def builtin_config() -> Any:
    """Return the configuration of the released model without rotary scaling, which no count depends on."""
    from transformers import Phi4MultimodalConfig

    return Phi4MultimodalConfig(
        num_attention_heads=24,
        tie_word_embeddings=True,
        audio_config={"bias_max_distance": 500},
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75},
    )


_LAYERS = r"model\.layers\.\d+\."
_AUDIO = r"model\.embed_tokens_extend\.audio_embed\."

MODULES = ModulePatterns(
    modes={
        "comprehensive": (_LAYERS + r"(self_attn\.(qkv|o)_proj|mlp\.(gate_up|down)_proj)", ("lm_head",)),
        "audio_focused": (_AUDIO + r"(encoder\.encoders\.\d+\..*|(up|down)_proj_for_speech)", ()),
        "attention_only": (_LAYERS + r"self_attn\.(qkv|o)_proj", ()),
    },
    parts={
        "text_embedding": r"model\.embed_tokens",
        "audio_encoder": _AUDIO + "encoder",
        "audio_projection": _AUDIO + r"(up|down)_proj_for_speech",
        "attention": _LAYERS + r"self_attn",
        "text_ffn": _LAYERS + r"mlp",
        "norms": _LAYERS + r"\w*layernorm|model\.norm",
        "text_head": "lm_head",
    },
)


FRAME_RATE = 100.0
"""Spectra per second."""


class Phi4(base.AnsweringFamily):
    name = "phi4"
    checkpoint: ClassVar[Any] = checkpoint
    modules: ClassVar = MODULES
    builtin_config = staticmethod(builtin_config)
    objective_type: ClassVar = Phi4Objective
    reference_module = "myna.models.phi4.transformers_reference"
    _grammar: TokenGrammar | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_grammar"}  # it cannot be pickled

    @cached_property
    def renderer(self) -> Phi4Renderer:
        audio = self.config.audio_config
        longest = self.config.original_max_position_embeddings or self.config.max_position_embeddings
        shape = (audio.audio_token_id, audio.input_size, audio.time_reduction)
        return Phi4Renderer(self.tokenizer, *shape, FRAME_RATE, longest)

    @property
    def loss_terms(self) -> tuple[str, ...]:
        return ("text",)

    @property
    def chance(self) -> tuple[float, ...]:
        return (math.log(self.config.vocab_size),)

    def accepts_codes(self, codebooks: int, codebook_size: int, frame_rate: float) -> bool:
        bands = self.config.audio_config.input_size
        return (codebooks, codebook_size, frame_rate) == (bands, MAX_CODE + 1, FRAME_RATE)

    @property
    def codec_source(self) -> str:
        """Folder of the feature extractor's settings."""
        return self._codec or str(self._require_folder())

    def load_encoder(self, *, device: torch.device | str = "cpu") -> Encoder:  # noqa: ARG002 - always on the CPU
        encoder = MelFeatureEncoder.open(resolve_checkpoint(self.codec_source, None))
        if not self.accepts_codes(encoder.codebooks, encoder.codebook_size, encoder.frame_rate):
            raise ModelError(
                f"the features of {self.codec_source} have {encoder.codebooks} bands at {encoder.frame_rate:g} "
                f"spectra/s; the model wants {self.config.audio_config.input_size} at {FRAME_RATE:g}",
                hint="use the processor's files of one checkpoint",
            )
        return encoder

    def positions(self, frames: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        return self.renderer.positions(frames)

    def collate(self, sequences: Sequence[base.RenderedSequence], *, offset: int = 1) -> Phi4Batch:
        return collate(sequences, self.config.audio_config.input_size, offset)

    def answer(
        self, model: nn.Module, prompts: Sequence[base.RenderedSequence], max_tokens: int, grammar: str | None = None
    ) -> list[base.GeneratedAnswer]:
        core, eos_ids = base.get_base_model(model), checkpoint.eos_ids(self.config)
        batch = self.collate(prompts).to(next(core.parameters()).device)
        decoder = None
        if grammar is not None:
            if self._grammar is None or self._grammar.lark != grammar:
                self._grammar = TokenGrammar(grammar, self.tokenizer, eos_ids, self.config.vocab_size)
            decoder = ConstrainedDecoder(self._grammar, len(prompts), max_tokens)
        generated = generate(core, batch, eos_ids, max_tokens, decoder)
        return [base.GeneratedAnswer(self.tokenizer.decode(ids), ids, stopped) for ids, stopped in generated]

    @property
    def has_text_head(self) -> bool:
        return True

    def probe(self) -> Conversation:
        features = np.random.default_rng(0).integers(0, MAX_CODE, (64, self.config.audio_config.input_size), "u2")
        return answer_conversation("What is said?", AudioClip("clip", features), id="probe", answer="One, two, three.")

    def save_model(
        self,
        model: nn.Module,
        folder: Path,
        *,
        layout: str = "transformers",
        codec: Path | None = None,  # noqa: ARG002 - the settings of the feature extractor are always written
    ) -> Mapping[str, torch.Tensor]:
        if layout != "transformers":
            raise ModelError(f"{self.source} has no {layout} layout", hint="leave out --layout")
        return checkpoint.save(base.get_base_model(model), folder, self.tokenizer, self._require_folder())
