"""Fine-tuning of speech language models: recordings go in, a voice comes out.

    data = myna.prepare("recordings", "data/marta", model="fledgling")
    run = myna.train(model="fledgling", data=data, steps=60)
    myna.load(run).speak("Hi.", reference="ref.wav", reference_text="...").save("out.wav")

Every command is one of these functions. Heavy packages are imported when a function needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# These packages have the names of API functions. They are imported first, or importing one of their modules later would
# put the package in place of the function.
import myna.curate
import myna.evaluate
import myna.train  # noqa: F401
from myna.api import (
    add_voice,
    compare,
    consent_sentence,
    convert,
    correct,
    curate,
    detect,
    doctor,
    evaluate,
    extract_lora,
    forecast_curation,
    import_dataset,
    load,
    load_answer_model,
    make_tiny,
    merge,
    model_stats,
    prepare,
    render,
    resume,
    split,
    train,
    verify,
    xray,
)
from myna.core.errors import MynaError
from myna.core.progress import ProgressCallback
from myna.speak.voice import Voice

if TYPE_CHECKING:
    from myna.core.config import Recipe as Recipe
    from myna.core.config import load_recipe as load_recipe
    from myna.data.dataset import DataFolder as DataFolder
    from myna.speak.answering import AnswerModel as AnswerModel
    from myna.speak.engine import Speech as Speech
    from myna.train.run import Run as Run

__version__ = "0.1.0"

_LAZY = {
    "DataFolder": "myna.data.dataset",
    "AnswerModel": "myna.speak.answering",
    "Recipe": "myna.core.config",
    "Run": "myna.train.run",
    "Speech": "myna.speak.engine",
    "load_recipe": "myna.core.config",
}
"""Types that would bring heavy packages, by the module they are imported from when asked for."""

__all__ = [
    "AnswerModel",
    "DataFolder",
    "MynaError",
    "ProgressCallback",
    "Recipe",
    "Run",
    "Speech",
    "Voice",
    "add_voice",
    "compare",
    "consent_sentence",
    "convert",
    "correct",
    "curate",
    "detect",
    "doctor",
    "evaluate",
    "extract_lora",
    "forecast_curation",
    "import_dataset",
    "load",
    "load_answer_model",
    "load_recipe",
    "make_tiny",
    "merge",
    "model_stats",
    "prepare",
    "render",
    "resume",
    "split",
    "train",
    "verify",
    "xray",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'myna' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
