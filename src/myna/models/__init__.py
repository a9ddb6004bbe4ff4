"""The families, by name. Nothing outside this file mentions one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from myna.errors import ModelError
from myna.models.base import Family

SHIPPED = {"fledgling": Path(__file__).parent / "fledgling"}
"""Models that come with the package, by the names that people type, and the folders of their checkpoints."""


def open_family(source: str, *, revision: str | None = None, codec: str | None = None) -> Family:
    """Open a checkpoint without its weights: a hub name, a folder, a model that ships with Myna, or a built-in
    configuration."""
    # Imported late: a family pulls in transformers, which `myna --help` should not wait for.
    from myna.models.files import resolve
    from myna.models.higgs_v2 import builtin as higgs_v2
    from myna.models.higgs_v2.family import HiggsV2
    from myna.models.phi4 import builtin as phi4
    from myna.models.phi4.family import Phi4

    if source in higgs_v2.BUILTIN_NAMES:
        return HiggsV2.builtin(source)
    if source in phi4.BUILTIN_NAMES:
        return Phi4.builtin(source)
    folder = _shipped(source, revision) if source in SHIPPED else resolve(source, revision)
    model_type = _model_type(folder)
    families: tuple[type[HiggsV2 | Phi4], ...] = (HiggsV2, Phi4)
    for family in families:
        if model_type in family.model_types:
            return family.open(source, folder, codec)
    raise ModelError(
        f"{source} is a model of type {model_type!r}, which Myna does not know",
        hint=f"known types: {', '.join(name for family in families for name in family.model_types)}",
    )


def convert(source: Path, out: Path, layout: Any) -> None:
    """Rewrite a checkpoint or an adapter in another layout of its family."""
    from myna.models.higgs_v2 import checkpoint

    checkpoint.convert(source, out, layout)


def save_tiny(out: Path, *, seed: int = 0, listens: bool = False) -> Path:
    """A tiny random checkpoint of the real classes, of a model that speaks or of one that listens."""
    from myna.models.higgs_v2 import tiny as speaker
    from myna.models.phi4 import tiny as listener

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{out} exists and is not empty", hint="choose another folder with --out")
    return listener.save_tiny(out, seed=seed) if listens else speaker.save_tiny(out, seed=seed)


def _shipped(name: str, revision: str | None) -> Path:
    folder = SHIPPED[name]
    if revision is not None:
        raise ModelError(
            f"{name} comes with Myna and has no revision {revision}",
            hint="leave the revision out, or install another Myna",
        )
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"the weights of {name} are not in this copy of Myna: {folder} is missing or empty",
            hint=f"install a released Myna, or make them anew: recipes/{name}/README.md says how",
        )
    return folder


def _model_type(folder: Path) -> str:
    path = folder / "config.json"
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["model_type"])
    except FileNotFoundError:
        raise ModelError(f"{folder} has no config.json", hint="give the folder of a checkpoint") from None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError) as error:
        raise ModelError(
            f"{path} does not name a model type: {error!r}", hint="download the checkpoint again"
        ) from None
