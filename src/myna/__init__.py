"""Fine-tuning of speech language models: recordings go in, a voice comes out.

    data = myna.prepare("recordings", "data/marta", model="fledgling")
    run = myna.train(model="fledgling", data=data, steps=60)
    myna.load(run).speak("Hi.", reference="ref.wav", reference_text="...").save("out.wav")

Most commands are one of these functions. Nothing is printed: long work reports to its `progress` callback, and every
error is a `MynaError` whose `hint` says what to do. A name is imported when it is first used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from myna.commands.data import correct as correct
    from myna.commands.data import curate as curate
    from myna.commands.data import forecast_curation as forecast_curation
    from myna.commands.data import import_dataset as import_dataset
    from myna.commands.data import prepare as prepare
    from myna.commands.data import render as render
    from myna.commands.data import split as split
    from myna.commands.data import xray as xray
    from myna.commands.doctor import doctor as doctor
    from myna.commands.evaluate import compare as compare
    from myna.commands.evaluate import evaluate as evaluate
    from myna.commands.model import convert as convert
    from myna.commands.model import extract_lora as extract_lora
    from myna.commands.model import make_tiny as make_tiny
    from myna.commands.model import merge as merge
    from myna.commands.model import model_stats as model_stats
    from myna.commands.model import verify as verify
    from myna.commands.speak import load as load
    from myna.commands.speak import load_answer_model as load_answer_model
    from myna.commands.train import plan_training as plan_training
    from myna.commands.train import resume as resume
    from myna.commands.train import train as train
    from myna.commands.voice import add_voice as add_voice
    from myna.commands.voice import consent_sentence as consent_sentence
    from myna.commands.voice import detect as detect
    from myna.core.config import Recipe as Recipe
    from myna.core.config import load_recipe as load_recipe
    from myna.core.errors import MynaError as MynaError
    from myna.core.progress import ProgressCallback as ProgressCallback
    from myna.core.run_folder import Run as Run
    from myna.data.dataset import DataFolder as DataFolder
    from myna.speak.answering import AnswerModel as AnswerModel
    from myna.speak.engine import Speech as Speech
    from myna.speak.voice import Voice as Voice

__version__ = "0.1.0"

_MODULES = {
    "commands.data": ("correct", "curate", "forecast_curation", "import_dataset", "prepare", "render", "split", "xray"),
    "commands.doctor": ("doctor",),
    "commands.evaluate": ("compare", "evaluate"),
    "commands.model": ("convert", "extract_lora", "make_tiny", "merge", "model_stats", "verify"),
    "commands.speak": ("load", "load_answer_model"),
    "commands.train": ("plan_training", "resume", "train"),
    "commands.voice": ("add_voice", "consent_sentence", "detect"),
    "core.config": ("Recipe", "load_recipe"),
    "core.errors": ("MynaError",),
    "core.progress": ("ProgressCallback",),
    "core.run_folder": ("Run",),
    "data.dataset": ("DataFolder",),
    "speak.answering": ("AnswerModel",),
    "speak.engine": ("Speech",),
    "speak.voice": ("Voice",),
}
"""Public names by the module that defines them; the imports above say the same to type checkers and editors."""
_PLACES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_PLACES)


class _Package(ModuleType):
    """This package, whose functions are not replaced by subpackages of their names (`train`, `curate`, `evaluate`)."""

    def __getattr__(self, name: str) -> Any:
        if name not in _PLACES:
            raise AttributeError(f"module 'myna' has no attribute {name!r}")
        value = getattr(import_module(f"myna.{_PLACES[name]}"), name)
        super().__setattr__(name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system binds a subpackage that it has imported to its name.
        if name not in _PLACES or not isinstance(value, ModuleType):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return [*__all__, "__version__"]


sys.modules[__name__].__class__ = _Package
