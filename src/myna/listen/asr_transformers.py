"""transformers backend of the ASR: Whisper checkpoints as they were trained, fine-tuned ones too."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from myna.audio.files import Samples
from myna.core.compat import set_beam_reordering
from myna.core.errors import ModelError
from myna.listen.asr_torch_whisper import open_torch_whisper
from myna.listen.asr_windows import DecodedClip, decode_clips
from myna.listen.pretrained import SAMPLE_RATE, load_pretrained
from myna.models.files import format_names, read_json

GENERATION_CONFIG, TOKENIZERS = "generation_config.json", ("tokenizer.json", "vocab.json")
GPU_BATCH_CLIPS = 32


class TransformersWhisper:
    """One clip at a time, in fp32 unless float16 is asked for; many clips by faster-whisper's procedure."""

    note = ""

    def __init__(self, model: Any, features: Any, tokenizer: Any, name: str) -> None:
        self._model, self._features, self._tokenizer, self.name = model, features, tokenizer, name

    @classmethod
    def open(cls, folder: Path, name: str, device: str, *, float16: bool = False) -> TransformersWhisper:
        from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration, WhisperTokenizer

        kind = read_json(folder / "config.json").get("model_type")
        if kind != "whisper":
            raise ModelError(f"{folder} holds a model of the kind {kind}", hint="give the folder of a Whisper")
        # transformers would make an empty tokenizer instead, and transcribe nothing.
        if not any((folder / file).is_file() for file in TOKENIZERS):
            raise ModelError(f"{folder} has no {' or '.join(TOKENIZERS)}", hint="copy the Whisper's tokenizer into it")
        if not (folder / GENERATION_CONFIG).is_file():
            raise ModelError(
                f"{folder} has no {GENERATION_CONFIG}, which says how languages are asked for",
                hint="copy the one of the Whisper that it was tuned from into the folder",
            )
        model, features, tokenizer, weights = load_pretrained(
            folder,
            name,
            (WhisperForConditionalGeneration, WhisperFeatureExtractor, WhisperTokenizer),
            device=device,
            hint="the folder needs config.json, generation_config.json, preprocessor_config.json, tokenizer files "
            "and model.safetensors, as `save_pretrained` of model and processor leave them",
        )
        set_beam_reordering(model, _reorder_self_attention)
        label = f"transformers {version('transformers')} {Path(name).name} {weights}"
        if float16 and device.startswith("cuda"):
            model, label = model.half(), f"{label} float16"
        return cls(model, features, tokenizer, label)

    @property
    def batch_size(self) -> int:
        """Clips that are best given at once."""
        return GPU_BATCH_CLIPS if self._model.device.type == "cuda" else 1

    @cached_property
    def _whisper(self) -> Any:
        return open_torch_whisper(self._model, self._tokenizer.backend_tokenizer, self._features.feature_size)

    def decode(self, clips: Sequence[Samples], languages: Sequence[str | None], *, words: bool) -> list[DecodedClip]:
        return decode_clips(self._whisper, clips, languages, word_times=words)

    @torch.inference_mode()
    def transcribe(self, clip: Samples, language: str | None) -> str:
        config = self._model.generation_config
        options: dict[str, Any] = {}
        if getattr(config, "is_multilingual", True):
            languages = getattr(config, "lang_to_id", None) or {}
            if language is not None and f"<|{language}|>" not in languages:
                supported = format_names(sorted(token.strip("<|>") for token in languages)) or "none"
                raise ModelError(
                    f"this Whisper does not know the language {language}, but {supported}",
                    hint="name the language of the sentences as Whisper does (--language en), or use another --asr",
                )
            options = {"language": language, "task": "transcribe"}
        if len(clip) > self._features.n_samples:
            # Longer than one window: the next window begins where the last full sentence of the one before ended.
            options |= {"return_timestamps": True, "condition_on_prev_tokens": False}
        inputs = self._features(
            clip, sampling_rate=SAMPLE_RATE, return_tensors="pt", return_attention_mask=True, truncation=False
        ).to(self._model.device)
        inputs["input_features"] = inputs["input_features"].to(self._model.dtype)
        tokens = self._model.generate(**inputs, num_beams=5, do_sample=False, **options)
        return str(self._tokenizer.decode(tokens[0], skip_special_tokens=True)).strip()


def _reorder_self_attention(cache: Any, beams: torch.Tensor) -> Any:
    """The cache with its beams in their new order. Cross-attention is of one clip and the same for all beams: copying
    it at every token would take longer than everything else."""
    cache.self_attention_cache.reorder_cache(beams)
    return cache
