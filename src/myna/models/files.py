"""Checkpoint and adapter folders of any family: resolving, tokenizers, safetensors, JSON, checks of names and shapes.

Weights are read from safetensors alone. `myna.json` beside weights stores facts about their
training, so that they can be moved and shared. Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from pydantic import ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open

from myna.core.config import Quantization, Recipe, Settings
from myna.core.errors import CheckpointError, ModelError
from myna.core.io import similar_path

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerFast

ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
METADATA_FILE = "myna.json"
USAGE_FINGERPRINTS = ("prompt", "codec")
"""Names of training inputs that must be unchanged when any weights of that training are used."""
FINGERPRINTS = ("base model", "precision", *USAGE_FINGERPRINTS)
"""Names of training inputs that must be unchanged for an adapter, which also needs its base model."""

NetworkT = TypeVar("NetworkT", bound="nn.Module")


def resolve_checkpoint(source: str, revision: str | None) -> Path:
    """Return the folder of a local checkpoint, or of a download from the hub: OWNER/NAME or OWNER/NAME@REVISION."""
    folder = Path(source).expanduser()
    if not folder.exists() and (pinned := re.fullmatch(r"([\w.-]+/[\w.-]+)@([\w./-]+)", source)):
        if revision is not None and revision != pinned[2]:
            raise ModelError(f"{source} at revision {revision}: two revisions", hint=f"leave out one: {pinned[1]}")
        source, revision = pinned.groups()
    if folder.is_dir():
        if revision is not None:
            raise ModelError(
                f"{source} is a local folder, which has no revision {revision}", hint="leave the revision out"
            )
        return folder
    if folder.exists():
        raise ModelError(f"{source} is a file, not the folder of a model", hint=f"give its folder: {folder.parent}")
    similar = similar_path(folder)
    if source.startswith(".") or not re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        otherwise = "give the path of a folder that holds config.json, or a hub name such as owner/name"
        raise ModelError(
            f"there is no model folder {source}", hint=f"did you mean {similar}?" if similar is not None else otherwise
        )
    from huggingface_hub import snapshot_download

    wanted, unwanted = ["*.safetensors", "*.json", "*.jinja", "tokenizer*"], ["*.bin", "*.pt", "*.pth"]
    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=wanted, ignore_patterns=unwanted))
    except Exception as error:
        at = f" at revision {revision}" if revision else ""
        raise ModelError(
            f"{source}{at} is no folder here, and the hub did not give it: {error_summary(error)}",
            hint=f"did you mean {similar}?"
            if similar is not None
            else f"check the name and the network, or fetch it elsewhere with `hf download {source}` and give the path "
            "of that folder",
        ) from error


def absolute_source(source: str) -> str:
    """Return a source that opens from any working directory: the full path of a folder, or a hub name as it is. The
    folder of a shipped model or of its codec becomes that model's name, which opens on other machines too."""
    from myna.models import SHIPPED, is_model_name

    folder = Path(source).expanduser().absolute()
    if is_model_name(source) or not folder.is_dir():
        return source
    return next((name for name, own in SHIPPED.items() if folder in (own, own / "codec")), str(folder))


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer of `tokenizer.json`; the class that other files name does not matter."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelError(
            f"{file} is missing", hint=f"copy the tokenizer files of the checkpoint into {folder}, or download it again"
        )
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(str(folder))
    except Exception as error:
        raise ModelError(
            f"{file} cannot be read: {error_summary(error)}", hint="it is damaged: download the tokenizer files again"
        ) from error


def check_token_ids(
    tokenizer: PreTrainedTokenizerFast, vocab_size: int, single: Iterable[str], other_ids: Iterable[str]
) -> None:
    """Check that `single` tokens are single and ids below the vocabulary size; `other_ids` names other differences."""
    vocabulary = tokenizer.get_vocab()
    wrong = [
        f"the tokenizer has no single token {token}"
        for token in single
        if tokenizer.encode(token, add_special_tokens=False) != [vocabulary.get(token)]
    ]
    wrong += other_ids
    if len(tokenizer) > vocab_size:
        wrong.append(f"the tokenizer has {len(tokenizer)} tokens, but vocab_size is {vocab_size}")
    if wrong:
        raise ModelError(
            f"configuration and tokenizer do not belong together: {'; '.join(wrong)}",
            hint="use the tokenizer files and the config.json of one checkpoint",
        )


CONVERT_HINT = "convert them to safetensors where you trust them, or use a checkpoint that has safetensors"


def weight_files(folder: Path, stem: str = "model", pickle_hint: str = CONVERT_HINT) -> list[Path]:
    """Return the safetensors files of a folder: the single one, or those of its index."""
    index, single = folder / f"{stem}.safetensors.index.json", folder / f"{stem}.safetensors"
    if single.is_file():
        return [single]
    if not index.is_file():
        if pickles := sorted(file.name for kind in ("bin", "pt", "pth", "ckpt") for file in folder.glob(f"*.{kind}")):
            raise CheckpointError(
                f"{folder} has its weights as pickles ({format_names(pickles)}), which can run code when opened",
                hint=pickle_hint,
            )
        raise CheckpointError(f"{folder} has no {single.name}", hint="give the folder that holds the weights")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index} is damaged: it has no weight_map", hint="download the checkpoint again")
    names = sorted({str(file) for file in weight_map.values()})
    # Paths are refused, because they could lead to any file of this machine.
    if outside := [name for name in names if not name or re.search(r"[/\\\0]", name) or name in (".", "..")]:
        raise CheckpointError(
            f"{index} names files outside of its folder: {format_names(outside)}",
            hint="use a checkpoint whose index names files beside it",
        )
    files = [folder / name for name in names]
    if absent := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(
            f"{folder} lacks files that its index names: {format_names(absent)}", hint="download the checkpoint again"
        )
    return files


def shapes_of(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def state_dict_problems(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Describe missing, unexpected and mis-shaped tensors; an empty list if all fit."""
    problems = {
        "missing": [name for name in expected if name not in found],
        "unexpected": [name for name in found if name not in expected],
        "of another shape": [
            f"{name} {shape} instead of {expected[name]}"
            for name, shape in found.items()
            if shape != expected.get(name, shape)
        ],
    }
    return [f"{len(names)} {kind}: {format_names(names)}" for kind, names in problems.items() if names]


def check_state_dict(expected: Mapping[str, Any], found: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    """Refuse weights whose names or shapes differ from the state dict that the folder's configuration needs."""
    if problems := state_dict_problems(shapes_of(expected), found):
        raise CheckpointError(
            "\n  ".join([f"the weights in {folder} do not fit its config.json", *problems]),
            hint="the configuration and the weights must come from one checkpoint; download it again if in doubt",
        )


def check_unwrapped(state: Mapping[str, Any], plain: Mapping[str, Any]) -> None:
    """Refuse to save a model whose tensors are not those of the plain model."""
    if state.keys() != plain.keys():
        raise ModelError(
            "the model is wrapped or carries an adapter, so it cannot be saved as a checkpoint",
            hint="merge the adapter and unwrap the model first",
        )


@contextmanager
def open_safetensors(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} cannot be read: {error_summary(error)}", hint="it is damaged or cut short: download it again"
        ) from error


def load_network(network: NetworkT, file: Path, device: str, *, hint: str) -> NetworkT:
    """Load a safetensors file into a small network for inference, every name and shape checked."""
    with open_safetensors(file) as tensors:
        weights = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 - no dictionary
    expected, found = shapes_of(network.state_dict()), shapes_of(weights)
    if wrong := [name for name in expected | found if expected.get(name) != found.get(name)]:
        raise CheckpointError(
            f"{file} does not fit {type(network).__name__}; these differ: {format_names(sorted(wrong))}",
            hint=hint,
        )
    network.load_state_dict(weights)
    return network.to(device).eval().requires_grad_(False)


class StoredTensor(NamedTuple):
    """File, name and shape of a tensor in a checkpoint."""

    file: Path
    name: str
    shape: tuple[int, ...]

    def read(self) -> Any:
        """Read the tensor; its memory is a view of the file."""
        with open_safetensors(self.file) as tensors:
            return tensors.get_tensor(self.name)


def stored_tensors(folder: Path, stem: str = "model", pickle_hint: str = CONVERT_HINT) -> Iterator[StoredTensor]:
    """Yield the tensors of a folder, read from the headers of its files."""
    for file in weight_files(folder, stem, pickle_hint):
        with open_safetensors(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - a safetensors file is no dictionary
                yield StoredTensor(file, name, tuple(tensors.get_slice(name).get_shape()))


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and warnings."""
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


def read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{file.parent} has no {file.name}", hint="give the folder of a checkpoint") from None
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{file} cannot be read: {error_summary(error)}", hint=f"give a folder with a sound {file.name}"
        ) from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} is not a JSON object", hint="download the checkpoint again")
    return value


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def error_summary(error: Exception) -> str:
    """Return the first line of an error message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def format_names(names: Collection[object], limit: int = 10) -> str:
    """Join names with commas, cut after `limit` names."""
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(str(name) for name in list(names)[:limit]) + rest


def is_adapter(folder: Path) -> bool:
    """Return whether PEFT has saved an adapter in a folder."""
    return (folder / ADAPTER_CONFIG_FILE).is_file()


def find_adapter(source: str | os.PathLike[str]) -> Path:
    """Return the PEFT folder of an adapter: that folder, `adapter/` in a run or checkpoint, or a hub download."""
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
    """Return the base model that an adapter names (a hub name or a folder) and its revision."""
    settings = read_json(folder / ADAPTER_CONFIG_FILE)
    source, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    if not isinstance(source, str) or not source:
        raise CheckpointError(
            f"{folder / ADAPTER_CONFIG_FILE} does not name its base model (base_model_name_or_path)",
            hint="name the model it was trained on: --model HUB_NAME_OR_FOLDER",
        )
    return source, revision if isinstance(revision, str) and revision else None


def byte_tokenizer(special_tokens: Sequence[str], *, begin: str, end: str, pad: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer of 256 bytes followed by the special tokens, for small models. Any text round-trips."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={symbol: number for number, symbol in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(special_tokens))
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=begin, eos_token=end, pad_token=pad, clean_up_tokenization_spaces=False
    )


class WeightsMetadata(Settings):
    """Base model, codec and prompt that trained weights belong to. Weights without this file get the defaults."""

    model_config = ConfigDict(extra="ignore")

    source: str = ""
    """Hub name or folder of the base model."""
    revision: str | None = None
    quantization: Quantization = "none"
    """Quantization of the base model in training."""
    text_head: bool | None = None
    """Whether the base model was loaded with its text head; None if unknown."""
    codec: str | None = None
    """Hub name or folder of the codec, or name of a shipped model that has it; None is the base model's own."""
    reference_placement: Literal["turn", "system"] = "turn"
    scene: str = ""
    """Scene of most of the training data."""
    inputs: dict[str, str] = Field(default_factory=dict)
    """Fingerprints of the training's inputs, by the names in `FINGERPRINTS`."""
    provenance: dict[str, Any] = Field(default_factory=dict)
    """Sources of a merged model, and the result of its check."""

    @classmethod
    def from_recipe(cls, recipe: Recipe, inputs: Mapping[str, Any]) -> WeightsMetadata:
        """Make the metadata of a training from its recipe and the fingerprints in its checkpoints."""
        return cls(
            **recipe.model.model_dump(include={"source", "revision", "quantization", "codec"}),
            text_head=recipe.needs_text_head,
            reference_placement=recipe.data.reference_placement,
            scene=inputs.get("scene", recipe.data.scene),
            inputs={name: inputs[name] for name in FINGERPRINTS if name in inputs},
        )


def read_metadata(folder: Path) -> WeightsMetadata | None:
    """Read the metadata of a folder of weights; None if it has none."""
    file = folder / METADATA_FILE
    if not file.is_file():
        return None
    try:
        return WeightsMetadata.model_validate(read_json(file))
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise ModelError(
            f"{file} is damaged: `{where}`: {problem['msg']}", hint="copy the folder again, or remove that file"
        ) from None


def save_metadata(folder: Path, metadata: WeightsMetadata) -> None:
    write_json(folder / METADATA_FILE, metadata.model_dump(mode="json", exclude_defaults=True))
