"""Voices by SpeechBrain's ECAPA-TDNN: the encoder that most papers name.

Two clips of one speaker are about 0.63 alike, two speakers about 0.24.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from myna.audio.files import Samples
from myna.errors import CheckpointError
from myna.evaluate.dependencies import heard_at, is_silent
from myna.evaluate.ecapa_network import Ecapa
from myna.evaluate.resemblyzer import Voice
from myna.io import file_hash
from myna.models.files import listed, opened

SHORTEST = 0.1
"""Seconds below which there is no voice: the network looks that far to both sides."""
PICKLES = (".ckpt", ".pt", ".pth", ".bin")
CONVERT = (
    'where you trust the file, turn it into safetensors once: python -c "import torch, safetensors.torch as s; '
    "s.save_file(torch.load('embedding_model.ckpt', map_location='cpu', weights_only=True), 'ecapa.safetensors')\", "
    "and give ecapa:ecapa.safetensors"
)


class EcapaEncoder:
    def __init__(self, network: Ecapa, name: str) -> None:
        self._network, self.name = network, name

    @classmethod
    def open(cls, place: Path) -> EcapaEncoder:
        """A safetensors file with the names that SpeechBrain gives its tensors, or the folder of one."""
        file = _file(place)
        network = Ecapa()
        due = network.state_dict()
        with opened(file) as tensors:
            found = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
        wrong = [name for name in {**due, **found} if name not in due or name not in found]
        wrong += [name for name in due if name in found and due[name].shape != found[name].shape]
        if wrong:
            raise CheckpointError(
                f"{file} does not hold the ECAPA speaker encoder; these differ: {listed(sorted(wrong))}",
                hint="give the weights of SpeechBrain's spkrec-ecapa-voxceleb under their own names",
            )
        network.load_state_dict(found)
        return cls(network.eval().requires_grad_(False), f"ecapa {file_hash(file)[:12]}")

    @torch.inference_mode()
    def embed(self, samples: Samples, sample_rate: int) -> Voice:
        """A clip with no voice in it gives zeros, so that it is like nobody."""
        clip = heard_at(samples, sample_rate)
        if is_silent(clip) or len(samples) < SHORTEST * sample_rate:
            return np.zeros(self._network.size, np.float32)
        return np.asarray(self._network(torch.from_numpy(clip)).numpy(), np.float32)


def _file(place: Path) -> Path:
    if place.is_file():
        file = place
    else:
        found = sorted(place.glob("*.safetensors"))
        pickles = sorted(one for one in place.glob("*") if one.suffix in PICKLES)
        if not found and not pickles:
            raise CheckpointError(
                f"{place} holds no safetensors with the ECAPA speaker encoder",
                hint=f"fetch embedding_model.ckpt of SpeechBrain's spkrec-ecapa-voxceleb; {CONVERT}",
            )
        if len(found) > 1:
            raise CheckpointError(
                f"{place} holds several safetensors: {listed([one.name for one in found])}",
                hint=f"name the one that is meant: ecapa:{found[0]}",
            )
        file = (found or pickles)[0]
    if file.suffix in PICKLES:
        raise CheckpointError(f"{file} is a pickle, which can run code when it is opened", hint=CONVERT)
    return file
