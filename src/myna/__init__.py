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
    from myna.commands.data import correct, curate, forecast_curation, import_dataset, prepare, render, split, xray
    from myna.commands.doctor import doctor
    from myna.commands.evaluate import compare, evaluate
    from myna.commands.model import convert, extract_lora, make_tiny, merge, model_stats, verify
    from myna.commands.speak import load, load_answer_model
    from myna.commands.train import plan_training, resume, train
    from myna.commands.voice import add_voice, consent_sentence, detect
    from myna.core.config import Recipe, load_recipe
    from myna.core.errors import MynaError
    from myna.core.progress import ProgressCallback
    from myna.core.run_folder import Run
    from myna.data.dataset import DataFolder
    from myna.speak.answering import AnswerModel
    from myna.speak.engine import Speech
    from myna.speak.voice import Voice

__all__ = ["AnswerModel", "DataFolder", "MynaError", "ProgressCallback", "Recipe", "Run", "Speech", "Voice"]
__all__ += ["correct", "curate", "forecast_curation", "import_dataset", "prepare", "render", "split", "xray"]
__all__ += ["load_recipe", "plan_training", "resume", "train"]
__all__ += ["add_voice", "consent_sentence", "detect", "load", "load_answer_model"]
__all__ += ["compare", "doctor", "evaluate", "verify"]
__all__ += ["convert", "extract_lora", "make_tiny", "merge", "model_stats"]

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
