"""Folders of models as files: where they come from, what is read out of them, and how they appear whole.

Nothing here knows a family. Weights are read from safetensors alone.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedTokenizerFast

from myna.errors import CheckpointError, ModelError


def resolve(source: str, revision: str | None) -> Path:
    """The folder of a checkpoint: as typed, or downloaded from the hub once."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise ModelError(
                f"{source} is a local folder, which has no revision {revision}", hint="leave the revision out"
            )
        return folder
    if folder.exists():
        raise ModelError(f"{source} is a file, not the folder of a model", hint=f"give its folder: {folder.parent}")
    if source.startswith(".") or not re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        raise ModelError(
            f"there is no model folder {source}",
            hint="give the path of a folder that holds config.json, or a hub name such as owner/name",
        )
    try:
        return Path(
            snapshot_download(
                source,
                revision=revision,
                allow_patterns=["*.safetensors", "*.json", "*.jinja", "tokenizer*"],
                ignore_patterns=["*.bin", "*.pt", "*.pth"],
            )
        )
    except Exception as error:
        at = f" at revision {revision}" if revision else ""
        raise ModelError(
            f"{source}{at} is no folder here, and the hub did not give it: {first_line(error)}",
            hint=f"check the name and the network, or fetch it elsewhere with `hf download {source}` "
            "and give the path of that folder",
        ) from error


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer exactly as `tokenizer.json` describes it, whatever class the other files name."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelError(
            f"{file} is missing", hint=f"copy the tokenizer files of the checkpoint into {folder}, or download it again"
        )
    try:
        return PreTrainedTokenizerFast.from_pretrained(str(folder))
    except Exception as error:
        raise ModelError(
            f"{file} cannot be read: {first_line(error)}", hint="it is damaged: download the tokenizer files again"
        ) from error


def check_belongs(
    tokenizer: PreTrainedTokenizerFast, vocab_size: int, single: Iterable[str], other_ids: Iterable[str]
) -> None:
    """Tokenizer and configuration must speak of the same ids: what a prompt is made of are `single` tokens, and there
    is room for all. `other_ids` says which ids the configuration has otherwise."""
    vocabulary = tokenizer.get_vocab()
    wrong = [
        *(
            f"the tokenizer has no single token {token}"
            for token in single
            if tokenizer.encode(token, add_special_tokens=False) != [vocabulary.get(token)]
        ),
        *other_ids,
    ]
    if len(tokenizer) > vocab_size:
        wrong.append(f"the tokenizer has {len(tokenizer)} tokens, but vocab_size is {vocab_size}")
    if wrong:
        raise ModelError(
            f"configuration and tokenizer do not belong together: {'; '.join(wrong)}",
            hint="use the tokenizer files and the config.json of one checkpoint",
        )


def weight_files(folder: Path, stem: str = "model") -> list[Path]:
    """The safetensors files of a folder: those of its index, or the single one."""
    index, single = folder / f"{stem}.safetensors.index.json", folder / f"{stem}.safetensors"
    if index.is_file():
        files = [folder / name for name in sorted(set(read_json(index).get("weight_map", {}).values()))]
    elif single.is_file():
        files = [single]
    elif pickles := sorted(file.name for kind in ("*.bin", "*.pt", "*.pth") for file in folder.glob(kind)):
        raise CheckpointError(
            f"{folder} has its weights as pickles ({listed(pickles)}), which can run code when they are opened",
            hint="convert them to safetensors where you trust them, or use a checkpoint that has safetensors",
        )
    else:
        raise CheckpointError(f"{folder} has no {single.name}", hint="give the folder that holds the weights")
    if absent := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(
            f"{folder} lacks files that its index names: {listed(absent)}", hint="download the checkpoint again"
        )
    return files


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} cannot be read: {first_line(error)}", hint="it is damaged or cut short: download it again"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """transformers without progress bars and advice; what matters of it we say ourselves."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder under a temporary name, which gets its own when all has been written."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder} exists and is not empty", hint="name a new folder, or remove that one first")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        made = Path(scratch, folder.name)
        made.mkdir()
        yield made
        if folder.exists():
            folder.rmdir()
        made.rename(folder)


def read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{file} cannot be read: {first_line(error)}", hint=f"give a folder with a sound {file.name}"
        ) from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} is not a JSON object", hint="download the checkpoint again")
    return value


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def listed(names: Collection[object]) -> str:
    rest = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(str(name) for name in list(names)[:10]) + rest
