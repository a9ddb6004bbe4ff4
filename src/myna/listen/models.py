"""Weights of models that listen: downloading, loading, identity; and batches of clips of similar length."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import snapshot_download

from myna.core.errors import CheckpointError, ModelError, import_optional
from myna.core.io import bytes_hash, file_hash
from myna.models.files import error_summary, format_names, quiet_transformers, weight_files

INSTALL = 'pip install "myna[curate]"'
FETCH_COMMAND = "myna setup curation"
T = TypeVar("T")
R = TypeVar("R")


def batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield the items in lists of `size`, the last one shorter; items are taken one list at a time."""
    source = iter(items)
    while batch := list(itertools.islice(source, size)):
        yield batch


def map_batches(
    call: Callable[[list[T]], Iterable[R]], items: Iterable[T], size: int, length: Callable[[T], int]
) -> Iterator[R]:
    """Yield the results of a batched call in the order of the items. Batches hold items of similar length, since each
    takes as long as its longest; four batches are sorted together."""
    for group in batches(items, 4 * size if size > 1 else 1):
        order = sorted(range(len(group)), key=lambda number: length(group[number]))
        results: dict[int, R] = {}
        for numbers in batches(order, size):
            results |= zip(numbers, call([group[number] for number in numbers]), strict=True)
        yield from (results[number] for number in range(len(group)))


def remake_hint(file: Path) -> str:
    """Return the command that mends a damaged file of weights."""
    return f"make the folder anew: rm -r {file.parent} && {FETCH_COMMAND}"


HUB_FILES = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json", "*.json", "*.txt")
"""Files downloaded of a checkpoint of transformers: no pickles, and no second copy in another precision."""


def download_snapshot(repository: str, *files: str) -> Path:
    """Return the local folder of a hub repository; download it once."""
    try:
        return Path(snapshot_download(repository, allow_patterns=list(files)))
    except Exception as error:
        raise ModelError(
            f"{repository} is no folder here, and the hub did not give it: {error_summary(error)}",
            hint=f"check the name and the network, or fetch it elsewhere with `hf download {repository}` and give the "
            "path of that folder",
        ) from error


def load_pretrained(
    folder: Path, name: str, classes: Sequence[Any], *, hint: str, device: str = "cpu", unused: tuple[str, ...] = ()
) -> tuple[Any, ...]:
    """Load a transformers model in fp32 and its processors; return them with the hash of the weights.

    Missing or unexpected weights are refused, unless their names begin with one of `unused`.
    """
    weights = weight_files(folder)
    model_class, *processor_classes = classes
    try:
        with quiet_transformers():
            model, report = model_class.from_pretrained(
                str(folder), local_files_only=True, use_safetensors=True, dtype=torch.float32, output_loading_info=True
            )
        processors = [one.from_pretrained(str(folder), local_files_only=True) for one in processor_classes]
        model = model.to(device).eval().requires_grad_(False)
    except Exception as error:
        raise ModelError(f"{name} cannot be opened on {device}: {error_summary(error)}", hint=hint) from error
    keys = [str(key) for kind in ("missing", "unexpected", "mismatched") for key in report[f"{kind}_keys"]]
    if wrong := sorted(key for key in keys if not key.startswith(unused)):
        raise CheckpointError(
            f"the weights of {folder} are not those of its config.json: {format_names(wrong)}",
            hint="they would be random in these places; download the checkpoint again",
        )
    return model, *processors, files_hash(weights)


def files_hash(files: Iterable[Path]) -> str:
    """Return the identity of weights in files."""
    return bytes_hash("".join(map(file_hash, files)).encode())[:12]


def open_onnx(file: Path, threads: int = 0) -> Any:
    """Open an ONNX model on the CPU with this many threads; 0 lets onnxruntime choose."""
    runtime = import_optional("onnxruntime", INSTALL)
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    # An arena grows to the need of the longest clip, and is never given back.
    options.enable_cpu_mem_arena = False
    try:
        return runtime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        problem = f"{file} cannot be opened: {str(error).splitlines()[0]}"
        raise CheckpointError(problem, hint=remake_hint(file)) from error
