"""The device that a command computes on."""

from __future__ import annotations

import torch

from myna.core.errors import ConfigError


def pick_device(setting: str) -> torch.device:
    """The torch device of a setting: `auto` is the best available; anything else must be available."""
    if setting == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if not available.get(setting.partition(":")[0], False):
        raise ConfigError(
            f"the device `{setting}` is not to be had here",
            hint="use `auto`, or one of: " + ", ".join(name for name, is_there in available.items() if is_there),
        )
    return torch.device(setting)
