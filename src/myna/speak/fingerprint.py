"""Hashes of a speech engine's weights and of how they are used: equal hashes speak alike."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from myna.speak.engine import Engine


def weights_fingerprint(engine: Engine, adapter: str = "", strength: float = 1.0) -> str:
    """Hash of all weights and of how they are used, wherever they were loaded from; also of an adapter beside them."""
    source = f"{engine.adapter_fingerprint(adapter)} {strength}" if adapter else ""
    return _hash_weights(engine, source, engine.model.state_dict())


def trainable_fingerprint(engine: Engine) -> str:
    """Hash of a model in training by its trainable parameters: the rest is frozen, and may be large."""
    parameters = {name: tensor for name, tensor in engine.model.named_parameters() if tensor.requires_grad}
    return _hash_weights(engine, engine.family.source, parameters)


def _hash_weights(engine: Engine, source: str, tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in (source, engine.codec.revision, engine.family.prompt_revision, engine.reference_placement):
        digest.update(part.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
