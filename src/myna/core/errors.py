"""Exceptions of Myna.

Every message names the file, line or setting at fault, and every error has a hint: what to type or change next. The
command line prints both without a traceback. Any other exception is a bug.
"""

import importlib
from functools import partial
from typing import Any


class MynaError(Exception):
    """An error that the user can act on. `hint` says how and is never empty."""

    def __init__(self, what: str, *, hint: str) -> None:
        super().__init__(f"{what}\n  → {hint}")
        self.what = what
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickling between processes would lose the hint: exceptions are made again from `args` alone.
        return partial(type(self), hint=self.hint), (self.what,)


class ConfigError(MynaError):
    """A recipe or a setting is wrong."""


class DataError(MynaError):
    """A manifest, an import or the code store is wrong."""


class AudioError(DataError):
    """A recording cannot be used: missing, unreadable, empty or not finite."""


class ModelError(MynaError):
    """A model, codec or tokenizer cannot be used as asked."""


class CheckpointError(ModelError):
    """Weights do not fit the model: missing, unexpected or mis-shaped tensors, or a pickle where safetensors belong."""


class TrainingError(MynaError):
    """Training cannot start, or must not go on."""


class SpeakError(MynaError):
    """A line cannot be spoken as asked."""


class OutputError(MynaError):
    """A result cannot be written where it was asked for, or must not be."""


class ReferenceWarning(UserWarning):
    """A reference recording gives a poor voice: noisy, clipped, narrow, or too short."""


def import_optional(module: str, *commands: str) -> Any:
    """Import an optional package; without it, raise a `ConfigError` with the commands that install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{module} cannot be imported: {error}", hint=" && ".join(commands)) from error
