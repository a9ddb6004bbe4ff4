"""Voices by a WavLM that was taught to tell speakers apart, in transformers' layout (WavLMForXVector)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from myna.audio.files import Samples
from myna.errors import CheckpointError, ModelError
from myna.evaluate.dependencies import RATE, heard_at, is_silent
from myna.evaluate.resemblyzer import Voice
from myna.io import bytes_hash, file_hash
from myna.models.files import first_line, listed, quiet, read_json, weight_files

CLASS = "WavLMForXVector"
CONVERT = (
    "where you trust it, turn it into safetensors once: "
    'python -c "from transformers import AutoFeatureExtractor as F, WavLMForXVector as M; '
    "name = 'microsoft/wavlm-base-plus-sv'; M.from_pretrained(name).save_pretrained('wavlm'); "
    "F.from_pretrained(name).save_pretrained('wavlm')\", and give the folder: wavlm:wavlm"
)


class WavLMEncoder:
    """One clip at a time: its layers look at a whole clip at once, and padding would be heard."""

    def __init__(self, model: Any, features: Any, name: str) -> None:
        self._model, self._features, self.name = model, features, name

    @classmethod
    def open(cls, folder: Path, name: str) -> WavLMEncoder:
        from transformers import AutoFeatureExtractor, WavLMForXVector

        made = read_json(folder / "config.json").get("architectures") or ["nothing"]
        if CLASS not in made:
            raise ModelError(
                f"{folder} holds {listed(made)}, which was not taught to tell voices apart",
                hint=f"give a checkpoint of {CLASS}, such as microsoft/wavlm-base-plus-sv",
            )
        try:
            weights = weight_files(folder)
        except CheckpointError as error:
            raise CheckpointError(error.what, hint=CONVERT) from error
        try:
            with quiet():
                model, found = WavLMForXVector.from_pretrained(
                    str(folder),
                    local_files_only=True,
                    use_safetensors=True,
                    dtype=torch.float32,
                    output_loading_info=True,
                )
            features = AutoFeatureExtractor.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:
            raise ModelError(
                f"{name} cannot be opened: {first_line(error)}",
                hint="the folder needs config.json, preprocessor_config.json and model.safetensors, as "
                "`save_pretrained` leaves them",
            ) from error
        # The classifier over the speakers of its training is not used, and often not kept.
        unused = ("objective.", "classifier.")
        odd = [*found["missing_keys"], *found["unexpected_keys"], *found["mismatched_keys"]]
        if wrong := sorted(one for one in map(str, odd) if not one.startswith(unused)):
            raise CheckpointError(
                f"the weights of {folder} are not those of its config.json: {listed(wrong)}",
                hint="they would be random in these places; download the checkpoint again",
            )
        known = bytes_hash("".join(map(file_hash, weights)).encode())[:12]
        return cls(model.eval().requires_grad_(False), features, f"wavlm {Path(name).name} {known}")

    @torch.inference_mode()
    def embed(self, samples: Samples, sample_rate: int) -> Voice:
        """A clip with no voice in it, or too short for the layers, gives zeros, so that it is like nobody."""
        clip = heard_at(samples, sample_rate)
        config = self._model.config
        frames = int(self._model.wavlm._get_feat_extract_output_lengths(len(clip)))
        if is_silent(clip) or frames < shortest_frames(config):
            return np.zeros(config.xvector_output_dim, np.float32)
        heard = self._features(clip, sampling_rate=RATE, return_tensors="pt")
        voice = self._model(heard.input_values).embeddings[0]
        return np.asarray(torch.nn.functional.normalize(voice, dim=0).numpy(), np.float32)


def shortest_frames(config: Any) -> int:
    """What the layers over time take away, and two more, since a spread is measured over what is left."""
    lost = sum((size - 1) * apart for size, apart in zip(config.tdnn_kernel, config.tdnn_dilation, strict=True))
    return int(lost) + 2
