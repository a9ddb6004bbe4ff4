"""Folders of LoRA adapters: where they are, and the base model they name. Imports neither torch nor PEFT."""

from __future__ import annotations

import os
from pathlib import Path

from myna.core.errors import CheckpointError, ModelError
from myna.models.files import read_json, resolve_checkpoint

ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"


def is_adapter(folder: Path) -> bool:
    """Whether a folder is one that PEFT has saved."""
    return (folder / ADAPTER_CONFIG_FILE).is_file()


def find_adapter(source: str | os.PathLike[str]) -> Path:
    """The PEFT folder of an adapter: that folder itself, the `adapter/` of a run or of one of its checkpoints, or a
    download from the hub."""
    folder = Path(source).expanduser()
    if not folder.is_dir():
        folder = resolve_checkpoint(Path(source).as_posix(), None)
    if is_adapter(folder):
        return folder
    if is_adapter(folder / "adapter"):
        return folder / "adapter"
    if (folder / "model").is_dir():
        raise ModelError(
            f"{source} was trained in full, and has no LoRA",
            hint=f"it is a whole model: give {folder / 'model'} as the model",
        )
    if (folder / "config.yaml").is_file():
        raise ModelError(
            f"{source} is a run that is not finished: it has no adapter/ yet",
            hint=f"finish it: myna train --resume {folder}, or give one of its checkpoints: {folder}/checkpoints/...",
        )
    raise ModelError(
        f"{source} is no adapter: it has no {ADAPTER_CONFIG_FILE}",
        hint="give a run, or a folder with adapter_config.json and adapter_model.safetensors",
    )


def require_adapter_files(folder: Path) -> None:
    """Refuse a folder that lacks a file of an adapter, or has its weights as a pickle."""
    for file in (ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE):
        if not (folder / file).is_file():
            pickled = file == ADAPTER_WEIGHTS_FILE and (folder / "adapter_model.bin").is_file()
            raise CheckpointError(
                f"{folder} holds no {file}" + (", only a pickle, which could run anything" if pickled else ""),
                hint="save it again as safetensors" if pickled else "pass the folder of a saved adapter",
            )


def adapter_base(folder: Path) -> tuple[str, str | None]:
    """The base model that an adapter names: a hub name or a folder, and its revision."""
    settings = read_json(folder / ADAPTER_CONFIG_FILE)
    source, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    if not isinstance(source, str) or not source:
        raise CheckpointError(
            f"{folder / ADAPTER_CONFIG_FILE} does not name its base model (base_model_name_or_path)",
            hint="name the model it was trained on: --model HUB_NAME_OR_FOLDER",
        )
    return source, revision if isinstance(revision, str) and revision else None
