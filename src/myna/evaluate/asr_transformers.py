"""Whisper by transformers: checkpoints as they were trained, tuned ones too, and machines without CTranslate2."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from myna.audio.files import Samples
from myna.errors import CheckpointError, ModelError
from myna.evaluate.dependencies import RATE
from myna.io import bytes_hash, file_hash
from myna.models.files import first_line, listed, quiet, read_json, weight_files

CONFIG, GENERATION, TOKENIZERS = "config.json", "generation_config.json", ("tokenizer.json", "vocab.json")


class TransformersWhisper:
    """One clip at a time, in full precision: what is heard does not depend on company."""

    def __init__(self, model: Any, features: Any, tokenizer: Any, name: str) -> None:
        self._model, self._features, self._tokenizer, self.name = model, features, tokenizer, name

    @classmethod
    def open(cls, folder: Path, name: str, device: str) -> TransformersWhisper:
        from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration, WhisperTokenizer

        kind = read_json(folder / CONFIG).get("model_type")
        if kind != "whisper":
            raise ModelError(f"{folder} holds a model of the kind {kind}", hint="give the folder of a Whisper")
        weights = weight_files(folder)
        # transformers would make an empty tokenizer instead, and write nothing.
        if not any((folder / file).is_file() for file in TOKENIZERS):
            raise ModelError(f"{folder} has no {' or '.join(TOKENIZERS)}", hint="copy the Whisper's tokenizer into it")
        if not (folder / GENERATION).is_file():
            raise ModelError(
                f"{folder} has no {GENERATION}, which says how languages are asked for",
                hint="copy the one of the Whisper that it was tuned from into the folder",
            )
        try:
            with quiet():
                model, found = WhisperForConditionalGeneration.from_pretrained(
                    str(folder),
                    local_files_only=True,
                    use_safetensors=True,
                    dtype=torch.float32,
                    output_loading_info=True,
                )
            features = WhisperFeatureExtractor.from_pretrained(str(folder), local_files_only=True)
            tokenizer = WhisperTokenizer.from_pretrained(str(folder), local_files_only=True)
            model = model.to(device).eval().requires_grad_(False)
        except Exception as error:
            raise ModelError(
                f"{name} cannot be opened on {device}: {first_line(error)}",
                hint="the folder needs config.json, generation_config.json, preprocessor_config.json, tokenizer files "
                "and model.safetensors, as `save_pretrained` of model and processor leave them",
            ) from error
        if wrong := sorted(map(str, [*found["missing_keys"], *found["unexpected_keys"], *found["mismatched_keys"]])):
            raise CheckpointError(
                f"the weights of {folder} are not those of its {CONFIG}: {listed(wrong)}",
                hint="they would be random in these places; download the checkpoint again",
            )
        model._reorder_cache = _reordered
        known = bytes_hash("".join(map(file_hash, weights)).encode())[:12]
        return cls(model, features, tokenizer, f"transformers {version('transformers')} {Path(name).name} {known}")

    @torch.inference_mode()
    def write(self, clip: Samples, language: str | None) -> str:
        settings = self._model.generation_config
        asked: dict[str, Any] = {}
        if getattr(settings, "is_multilingual", True):
            languages = getattr(settings, "lang_to_id", None) or {}
            if language is not None and f"<|{language}|>" not in languages:
                spoken = listed(sorted(one.strip("<|>") for one in languages)) or "none"
                raise ModelError(
                    f"this Whisper does not know the language {language}, but {spoken}",
                    hint="name the language of the lines as Whisper does (--language en), or use another recogniser",
                )
            asked = {"language": language, "task": "transcribe"}
        if len(clip) > self._features.n_samples:
            # More than one window: it goes on where the last full sentence of the one before has ended.
            asked |= {"return_timestamps": True, "condition_on_prev_tokens": False}
        heard = self._features(
            clip,
            sampling_rate=RATE,
            return_tensors="pt",
            return_attention_mask=True,
            truncation=False,
        ).to(self._model.device)
        written = self._model.generate(**heard, num_beams=5, do_sample=False, **asked)
        return str(self._tokenizer.decode(written[0], skip_special_tokens=True)).strip()


def _reordered(cache: Any, beams: torch.Tensor) -> Any:
    """What beams wrote, in their new order. What they heard is one clip's and the same for all, and is not copied at
    every word: that would take longer than everything else."""
    cache.self_attention_cache.reorder_cache(beams)
    return cache
