"""Codec lookup by the configuration in a folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from myna.data.codec import Codec
from myna.models.files import resolve_checkpoint
from myna.models.higgs_v2.codec import HiggsCodec
from myna.models.mel_codec.codec import MODEL_TYPE, MelCodec


def open_codec(source: str | Path, *, revision: str | None = None, device: torch.device | str = "cpu") -> Codec:
    """Open a folder or a hub name: the mel codec if its config.json says so, else the Higgs codec."""
    folder = resolve_checkpoint(str(source), revision)
    if _model_type(folder) == MODEL_TYPE:
        return MelCodec.open(folder, device=device)
    return HiggsCodec.open(folder, device=device)


def _model_type(folder: Path) -> object:
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return settings.get("model_type") if isinstance(settings, dict) else None
