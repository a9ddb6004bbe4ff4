"""The exception tree: what can go wrong, as documentation.

Every message names the file, line or setting at fault, and every error carries a hint: what to type or change next.
The command line prints both without a traceback; anything that is not a `MynaError` is a bug of ours.
"""

from functools import partial
from typing import Any


class MynaError(Exception):
    """Something the user can act on. `hint` says how and is never empty."""

    def __init__(self, what: str, *, hint: str) -> None:
        super().__init__(f"{what}\n  → {hint}")
        self.what = what
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        # Between processes. As an exception does it by itself, the hint would be lost.
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
    """A reference recording that a voice can be taken from, but not well: noisy, clipped, narrow, too short."""
