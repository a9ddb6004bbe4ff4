"""Higgs Audio v2 as a `Family`: joins the modules of this package; its configuration and its LoRA targets."""

import math
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from myna.core.device import supports_triton, why_no_triton
from myna.core.errors import ModelError
from myna.data.codec import Codec
from myna.data.conversation import AudioClip, Conversation, Reference, speech_conversation
from myna.models import SHIPPED, base, open_codec
from myna.models.family_parts import ModulePatterns
from myna.models.files import METADATA_FILE, read_metadata
from myna.models.higgs_v2 import checkpoint
from myna.models.higgs_v2.batch import HiggsBatch, collate
from myna.models.higgs_v2.codec import RELEASED_CODEC
from myna.models.higgs_v2.decode import HiggsDecoder, prompt_tensors, run_prompt
from myna.models.higgs_v2.decode.weights import HiggsAdapterSlots
from myna.models.higgs_v2.forward import HiggsObjective
from myna.models.higgs_v2.render import FRAME_RATE, DelayPattern, HiggsRenderer


def builtin_config() -> Any:
    """Return the configuration of the released model: transformers' defaults except for two numbers."""
    from transformers import HiggsAudioV2Config

    return HiggsAudioV2Config(
        codebook_size=1026,  # 1024 codes and the two ends of a stream; the default leaves out the ends
        bos_token_id=128000,  # the tokenizer's; the default is 1
    )


_LAYERS = r"model\.layers\.\d+\."
_AUDIO_FFN = r"audio_mlp\.(gate|up|down)_proj"

MODULES = ModulePatterns(
    modes={
        "comprehensive": (
            rf"{_LAYERS}(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj|{_AUDIO_FFN})",
            ("text_lm_head", "audio_lm_head"),
        ),
        "audio_focused": (rf"{_LAYERS}(self_attn\.[qv]_proj|{_AUDIO_FFN})", ("audio_lm_head",)),
        "attention_only": (rf"{_LAYERS}self_attn\.[qkvo]_proj", ()),
    },
    parts={
        "text_embedding": r"model\.embed_tokens",
        "audio_embedding": r"model\.embed_audio_tokens\.embed_audio_tokens",
        "attention": _LAYERS + r"self_attn",
        "text_ffn": _LAYERS + r"mlp",
        "audio_ffn": _LAYERS + r"audio_mlp",
        "norms": _LAYERS + r"\w*layernorm|model\.norm",
        "text_head": "text_lm_head",
        "audio_head": "audio_lm_head",
    },
)


class HiggsV2(base.SpeakingFamily):
    name = "higgs_v2"
    checkpoint: ClassVar[Any] = checkpoint
    modules: ClassVar = MODULES
    builtin_config = staticmethod(builtin_config)
    frame_rate = FRAME_RATE
    objective_type: ClassVar = HiggsObjective
    reference_module = "myna.models.higgs_v2.transformers_reference"

    @cached_property
    def renderer(self) -> HiggsRenderer:
        return HiggsRenderer(self.tokenizer, self.delay, _codebook_size(self.config), *self._audio_ids)

    @property
    def delay(self) -> DelayPattern:
        config = self.config
        return DelayPattern(config.num_codebooks, config.audio_stream_bos_id, config.audio_stream_eos_id)

    @property
    def loss_terms(self) -> tuple[str, ...]:
        return ("text", *(f"code{k}" for k in range(self.config.num_codebooks)))

    @property
    def chance(self) -> tuple[float, ...]:
        config = self.config
        return (math.log(config.vocab_size), *[math.log(config.codebook_size)] * config.num_codebooks)

    @cached_property
    def sampling(self) -> base.Sampling:
        return base.Sampling() if self.folder is None else checkpoint.read_sampling(self.folder)

    def accepts_codes(self, codebooks: int, codebook_size: int, frame_rate: float) -> bool:
        config = self.config
        return (codebooks, codebook_size, frame_rate) == (config.num_codebooks, _codebook_size(config), FRAME_RATE)

    @property
    def codec_source(self) -> str:
        if self._codec is None and self.folder is not None and (self.folder / "codec").is_dir():
            return str(self.folder / "codec")
        named = self._codec or self._recorded_codec() or RELEASED_CODEC
        return str(SHIPPED[named] / "codec") if named in SHIPPED else named

    def _recorded_codec(self) -> str | None:
        """Return the codec that the metadata of the weights name; raise an error if it is a folder that is not here."""
        metadata = None if self.folder is None else read_metadata(self.folder)
        if metadata is None or metadata.codec is None:
            return None
        if Path(metadata.codec).is_absolute() and not Path(metadata.codec).is_dir():
            raise ModelError(
                f"{self.folder}/{METADATA_FILE}: `codec` is {metadata.codec}, which is not on this machine",
                hint=f"copy that folder to {self.folder}/codec, or correct `codec`: the name of a shipped model, such "
                "as fledgling, if it was trained from that; a hub name; or a folder",
            )
        return metadata.codec

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

    def collate(self, sequences: Sequence[base.RenderedSequence], *, offset: int = 1) -> HiggsBatch:
        return collate(sequences, self._audio_ids, offset=offset)

    @property
    def _audio_ids(self) -> tuple[int, int]:
        return self.config.audio_token_id, self.config.audio_delay_token_id

    def speech_decoder(
        self,
        model: nn.Module,
        rows: int,
        max_positions: int,
        adapters: base.AdapterSlots | None = None,
        *,
        exact: bool = False,
    ) -> base.SpeechDecoder:
        core = base.get_base_model(model)
        assert adapters is None or isinstance(adapters, HiggsAdapterSlots)
        weight = core.audio_lm_head.weight
        if supports_triton(weight):
            from myna.models.higgs_v2.decode.cuda import CudaDecoder

            return CudaDecoder(core, self.delay, rows, max_positions, adapters, exact)
        if weight.is_cuda:
            reason = why_no_triton(weight.device.index)
            warnings.warn(f"{reason}: speech is generated without CUDA graphs, which is slower", stacklevel=2)
        return HiggsDecoder(core, self.delay, rows, max_positions, adapters, exact)

    def adapter_slots(self, model: nn.Module, capacity: int, rank: int) -> base.AdapterSlots:
        return HiggsAdapterSlots(base.get_base_model(model), capacity, rank)

    @torch.inference_mode()
    def adapter_effect(self, model: nn.Module, adapters: base.AdapterSlots, name: str) -> float:
        assert isinstance(adapters, HiggsAdapterSlots)
        core, slot = base.get_base_model(model), adapters.acquire(name)
        device = core.audio_lm_head.weight.device
        prompt = prompt_tensors(self.render(self.probe()), core.config, device)
        delta = adapters.delta(torch.tensor([slot], device=device), torch.ones(1, device=device))
        adapters.release(slot)
        streams = (run_prompt(core, *prompt, lambda *_: None, used) for used in (None, delta))
        logits = [core.audio_lm_head(core.model.norm(stream)).float() for stream in streams]
        return float((logits[0] - logits[1]).abs().max())

    @property
    def has_text_head(self) -> bool:
        return checkpoint.has_text_head(self._require_folder())

    def probe(self) -> Conversation:
        random = np.random.default_rng(0)
        reference, target = random.integers(0, _codebook_size(self.config), (2, 8, self.config.num_codebooks), "u2")
        voice = Reference("One, two, three.", AudioClip("reference", reference))
        spoken = AudioClip("target", target, target=True)
        return speech_conversation("Four, five.", id="probe", references=(voice,), target=spoken)

    def save_model(
        self, model: nn.Module, folder: Path, *, layout: str = "transformers", codec: Path | None = None
    ) -> Mapping[str, torch.Tensor]:
        layout = checkpoint.parse_layout(layout)
        return checkpoint.save_checkpoint(
            base.get_base_model(model), folder, self.tokenizer, self.sampling, layout, codec
        )


def _codebook_size(config: Any) -> int:
    """Return the number of codes per codebook, without the two stream ids that follow them."""
    return min(int(config.audio_stream_bos_id), int(config.audio_stream_eos_id))
