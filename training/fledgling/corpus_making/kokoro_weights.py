"""The weights of Kokoro-82M out of its ONNX file, as files small enough to travel.

`write` wants the package `onnx`, once, where there is network; `read` wants nothing but safetensors. The exporter kept
the names of most parameters. Weights of matrices and recurrent layers it turned round and gave numbers for names:
theirs are derived from the names of the nodes that use them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from myna.core.errors import DataError
from myna.core.io import atomic_write

Array = npt.NDArray[Any]

PARAMETERS = ("encoder.", "decoder.decoder.")
"""Prefixes of the exporter's names of parameters."""
PREDICTED = re.compile(r"^(F0|N|F0_proj|N_proj|shared|lstm)\b")
"""Modules of the predictor that are called from outside of it, and so lack its name in those of their nodes."""
STYLES = "voices.safetensors"
SCALE = " scale"
"""Ends the names of the scales of tensors in 8 bits."""
HOW = "python training/fledgling/export_kokoro.py --out FOLDER, where there is network; then name FOLDER"
LARGEST = 26 * 2**20
"""Bytes of a file."""
MIN_MATRIX = 8192
"""Weights of a tensor that is worth 8 bits."""


def write(onnx_file: Path, styles: Mapping[str, Array], folder: Path) -> list[Path]:
    """Weights and styles of voices in 8 bits with a scale for each row, vectors in half precision; the files."""
    try:
        import onnx
    except ImportError:
        raise DataError("onnx is not installed", hint="pip install onnx") from None
    graph = onnx.load(str(onnx_file)).graph
    stored = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
    nodes = ((node.op_type, node.name, list(node.input)) for node in graph.node)
    weights = {
        name: tensor for whole, matrix in parameters(nodes, stored).items() for name, tensor in _stored(whole, matrix)
    }
    contents = {f"kokoro-{number}.safetensors": part for number, part in enumerate(_parts(weights))}
    contents[STYLES] = {
        name: tensor for voice, table in styles.items() for name, tensor in _stored(voice, torch.tensor(table))
    }
    for name, part in contents.items():
        with atomic_write(folder / name) as temporary:
            save_file(part, temporary)
    return [folder / name for name in contents]


def read(folders: Iterable[Path]) -> dict[str, Tensor]:
    """Read the weights of all files in single precision."""
    files = sorted(file for folder in folders for file in folder.glob("kokoro-*.safetensors"))
    if not files:
        raise DataError("there are no weights of Kokoro", hint=HOW)
    return _opened({name: tensor for file in files for name, tensor in load_file(file).items()})


def _opened(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors in single precision, as they were before `_stored`."""
    return {
        name: tensor.float() * stored[name + SCALE] if tensor.dtype == torch.int8 else tensor.float()
        for name, tensor in stored.items()
        if not name.endswith(SCALE)
    }


def _stored(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor as it is written: in 8 bits, with scales, if it is a matrix; scales and vectors must not become 0."""
    if tensor.ndim < 2 or tensor.numel() < MIN_MATRIX:
        yield name, tensor.half().contiguous()
        return
    scale = tensor.abs().amax(tuple(range(1, tensor.ndim)), keepdim=True).float().clamp(min=1e-12) / 127
    yield name, (tensor / scale).round().to(torch.int8).contiguous()
    yield name + SCALE, scale


def read_styles(folders: Iterable[Path]) -> dict[str, npt.NDArray[np.float32]]:
    for folder in folders:
        if (folder / STYLES).is_file():
            return {name: table.numpy() for name, table in _opened(load_file(folder / STYLES)).items()}
    raise DataError("there are no voices of Kokoro", hint=HOW)


def parameters(nodes: Iterable[tuple[str, str, list[str]]], stored: Mapping[str, Array]) -> dict[str, Tensor]:
    """Nodes are (operation, name, inputs); by the names of `KokoroNetwork`."""
    found = {
        _plain(name): torch.from_numpy(array.copy())
        for name, array in stored.items()
        if name.startswith(PARAMETERS) and ".stft." not in name
    }
    for operation, name, inputs in nodes:
        if len(inputs) < 2 or inputs[1] not in stored or inputs[1].startswith(PARAMETERS):
            continue
        if operation == "LSTM":
            module = module_of(name)
            found |= {f"{module}.{part}": tensor for part, tensor in recurrent(*(stored[i] for i in inputs[1:4]))}
        elif operation == "MatMul":
            found[f"{module_of(name)}.weight"] = torch.from_numpy(stored[inputs[1]].T.copy())
        elif operation in ("Conv", "ConvTranspose"):
            # Where a bias kept its name, that is the surer one: nodes of a sequence repeat a part of theirs.
            module = _plain(inputs[2]).removesuffix(".bias") if len(inputs) > 2 else module_of(name)
            found[f"{module}.weight"] = torch.from_numpy(stored[inputs[1]].copy())
    return found


def module_of(node: str) -> str:
    """`/encoder/F0.1/conv1/Conv` is `predictor.F0.1.conv1`; a module's second use ends with a number."""
    path = ".".join(re.sub(r"_\d+$", "", part) for part in node.strip("/").split("/")[:-1])
    path = _plain(path)
    return f"predictor.{path}" if PREDICTED.match(path) else path


def recurrent(inputs: Array, hidden: Array, biases: Array) -> Iterator[tuple[str, Tensor]]:
    """ONNX has the gates input, output, forget, cell, and both biases in a row; PyTorch input, forget, cell, output."""
    for direction, ending in enumerate(("", "_reverse")):
        first, second = np.split(biases[direction], 2)
        parts = {"weight_ih": inputs[direction], "weight_hh": hidden[direction], "bias_ih": first, "bias_hh": second}
        for name, array in parts.items():
            entry, output, forget, cell = np.split(array, 4)
            yield f"{name}_l0{ending}", torch.from_numpy(np.concatenate([entry, forget, cell, output]))


def _plain(name: str) -> str:
    return re.sub(r"^(encoder|decoder)\.", "", name)


def _parts(weights: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in sorted(weights.items()):
        if part and size + tensor.nbytes > LARGEST:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += tensor.nbytes
    yield part
