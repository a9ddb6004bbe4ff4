"""Optional packages."""

from __future__ import annotations

import importlib
from typing import Any

from myna.core.errors import ConfigError


def import_optional(module: str, *commands: str) -> Any:
    """A package that only evaluation needs, or a `ConfigError` with the commands that install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{module} cannot be imported: {error}", hint=" && ".join(commands)) from error
