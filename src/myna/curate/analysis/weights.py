"""Weights of small networks: read from safetensors, every name and shape checked."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from torch import nn

from myna.errors import CheckpointError
from myna.models.files import format_names, open_safetensors

NetworkT = TypeVar("NetworkT", bound=nn.Module)
FETCH_COMMAND = "make curation-models"
"""It runs tools/fetch_curation_models.py."""


def load_network(network: NetworkT, file: Path, device: str) -> NetworkT:
    """The network with the weights of the file, for inference."""
    expected = network.state_dict()
    with open_safetensors(file) as tensors:
        weights = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    wrong = expected.keys() ^ weights.keys()
    wrong |= {name for name in expected.keys() & weights.keys() if expected[name].shape != weights[name].shape}
    if wrong:
        raise CheckpointError(
            f"{file} does not fit {type(network).__name__}; these tensors differ: {format_names(sorted(wrong))}",
            hint=f"make the folder anew: rm -r {file.parent} && {FETCH_COMMAND}",
        )
    network.load_state_dict(weights)
    return network.to(device).eval().requires_grad_(False)
