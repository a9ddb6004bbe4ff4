"""Registry of model families: no module outside this package names one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from myna.core.errors import ModelError
from myna.core.io import atomic_folder

if TYPE_CHECKING:
    from myna.models.base import Family
    from myna.models.higgs_v2.family import HiggsV2
    from myna.models.phi4.family import Phi4

SHIPPED = {"fledgling": Path(__file__).parent / "fledgling"}
"""Checkpoint folders of the models that come with the package, by the names that users type."""


def is_model_name(source: str) -> bool:
    """Whether a source names a model that ships, or a built-in configuration; a folder of that name is never meant."""
    from myna.models.higgs_v2.builtin import BUILTIN_NAMES as HIGGS_V2_NAMES
    from myna.models.phi4.builtin import BUILTIN_NAMES as PHI4_NAMES

    return source in (*SHIPPED, *HIGGS_V2_NAMES, *PHI4_NAMES)


def find_checkpoint(source: str, revision: str | None = None) -> Path | None:
    """Folder of a checkpoint that is shipped, on disk, or on the hub, downloaded if need be; None for a built-in
    configuration. Imports neither torch nor transformers, so that a wrong name is reported at once."""
    from myna.models.files import resolve_checkpoint

    if source not in SHIPPED:
        return None if is_model_name(source) else resolve_checkpoint(source, revision)
    folder = SHIPPED[source]
    if revision is not None:
        raise ModelError(
            f"{source} comes with Myna and has no revision {revision}",
            hint="leave the revision out, or install another Myna",
        )
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"the weights of {source} are not in this copy of Myna: {folder} is missing or empty",
            hint=f"install a released Myna, or make them anew: training/{source}/README.md says how",
        )
    return folder


def open_family(source: str, *, revision: str | None = None, codec: str | None = None) -> Family:
    """Open a checkpoint without its weights: a hub name, a folder, a model that ships with Myna, or a built-in
    configuration."""
    folder = find_checkpoint(source, revision)
    if folder is None:
        from myna.models.higgs_v2.builtin import BUILTIN_NAMES

        higgs_v2, phi4 = _families()
        return (higgs_v2 if source in BUILTIN_NAMES else phi4).builtin(source)
    model_type = _model_type(folder)
    for family in _families():
        if model_type in family.model_types:
            return family.open(source, folder, codec)
    raise ModelError(
        f"{source} is a model of type {model_type!r}, which Myna does not know",
        hint=f"known types: {', '.join(name for family in _families() for name in family.model_types)}",
    )


def _families() -> Iterator[type[HiggsV2 | Phi4]]:
    """The family classes, each imported when its turn comes."""
    from myna.models.higgs_v2.family import HiggsV2

    yield HiggsV2
    from myna.models.phi4.family import Phi4

    yield Phi4


def convert_checkpoint(source: Path, out: Path, layout: Any) -> None:
    """Rewrite a checkpoint or an adapter in another layout of its family."""
    from myna.models.higgs_v2 import checkpoint

    checkpoint.convert_layout(source, out, layout)


def save_tiny_model(out: Path, *, seed: int = 0, answers: bool = False) -> Path:
    """A tiny random checkpoint of the real classes, of a speaking or of an answering family."""
    from myna.models.higgs_v2 import tiny as higgs_v2
    from myna.models.phi4 import tiny as phi4

    with atomic_folder(out) as folder:
        (phi4 if answers else higgs_v2).save_tiny(folder, seed=seed)
    return out


def _model_type(folder: Path) -> str:
    path = folder / "config.json"
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["model_type"])
    except FileNotFoundError:
        from myna.models.adapters import is_adapter

        if is_adapter(folder):
            hint = f"open it with --run {folder}, or make a model of it: myna merge {folder} --out DIR"
            raise ModelError(f"{folder} is a LoRA adapter, and not a model by itself", hint=hint) from None
        raise ModelError(f"{folder} has no config.json", hint="give the folder of a checkpoint") from None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError) as error:
        raise ModelError(
            f"{path} does not name a model type: {error!r}", hint="download the checkpoint again"
        ) from None
