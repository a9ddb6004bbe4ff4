"""Clips to codes and back through the small codec, with its keys, lengths and codes checked."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file

from myna.data.codec import Codes, Encoded, Samples, Say, by_equal_lengths
from myna.errors import CheckpointError, ModelError
from myna.models.codec_checks import check_clips, check_codes, exactly
from myna.models.mel_codec.network import MelCodecConfig, MelCodecNetwork

MODEL_TYPE = "myna_mel_codec"
SHARD = 15_900_000
"""Bytes of tensors in one file, which with its header stays under 16 MB."""
AGAIN = "copy the codec's folder again; it came with the model"

Tensors = dict[str, torch.Tensor]


class MelCodec:
    """The `Codec` that fledgling speaks through: 24 kHz, 25 frames a second, 8 codebooks."""

    def __init__(self, network: MelCodecNetwork, revision: str, device: torch.device) -> None:
        self.revision = revision
        self.sample_rate = network.config.sample_rate
        self.hop = network.config.hop
        self.codebooks = network.config.codebooks
        self.codebook_size = network.config.codebook_size
        self.frame_rate = self.sample_rate / self.hop
        self._device = device
        self._network = network.to(device).float().eval().requires_grad_(False)

    @classmethod
    def open(cls, folder: str | Path, device: torch.device | str = "cpu") -> MelCodec:
        """Open config.json and safetensors in a folder. Every tensor must find its place, every place its tensor."""
        config = _read_config(Path(folder))
        tensors = _read_tensors(Path(folder))
        network = MelCodecNetwork(config)
        _fill(network, tensors, Path(folder))
        return cls(network, _revision(config, tensors), torch.device(device))

    def encode(self, clips: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
        """(clips, samples) -> (clips, frames, codebooks); one frame is enough, nothing is padded.

        Clip by clip: libraries add in another order in another batch, and a code must not depend on its neighbours.
        """
        check_clips(self, clips)
        with exactly(self._device):
            waves = torch.from_numpy(np.ascontiguousarray(clips, dtype=np.float32)).to(self._device)
            codes = torch.cat([self._network.encode(wave[None]) for wave in waves])
        stacked: npt.NDArray[np.uint16] = codes.cpu().numpy().astype(np.uint16)
        return stacked

    def encode_all(self, clips: Sequence[Samples], batch_seconds: float, say: Say) -> Iterator[Encoded]:  # noqa: ARG002
        """By equal lengths: there is no faster way to tell of."""
        yield from by_equal_lengths(self, clips, batch_seconds)

    def decode(self, codes: Codes) -> Samples:
        """(frames, codebooks) -> (frames * hop,), clipped to [-1, 1]."""
        check_codes(self, codes)
        if not len(codes):
            return np.zeros(0, np.float32)
        with exactly(self._device):
            ids = torch.from_numpy(codes.astype(np.int64)).to(self._device)
            wave = self._network.decode(ids[None])[0]
        samples: Samples = wave.clamp(-1, 1).cpu().numpy()
        return samples


def save_mel_codec(network: MelCodecNetwork, folder: Path) -> None:
    """Write config.json and half-precision safetensors; an older codec in that folder gives way to the new one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        made = Path(scratch, "new")
        made.mkdir()
        half = {name: tensor.detach().half().cpu().contiguous() for name, tensor in network.state_dict().items()}
        save_torch_state_dict(half, made, max_shard_size=SHARD)
        settings = {"model_type": MODEL_TYPE} | asdict(network.config)
        (made / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        if folder.exists():
            folder.rename(Path(scratch, "old"))
        made.rename(folder)


def _read_config(folder: Path) -> MelCodecConfig:
    path = folder / "config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        kind = settings.pop("model_type")
    except (FileNotFoundError, NotADirectoryError):
        raise ModelError(f"{folder} has no config.json", hint="name the codec's folder") from None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{path} is not the configuration of a codec: {error!r}", hint=AGAIN) from None
    if kind != MODEL_TYPE:
        raise ModelError(f"{folder} holds a model of type {kind!r}, not {MODEL_TYPE}", hint="name the codec's folder")
    names = {field.name for field in fields(MelCodecConfig)}
    if wrong := sorted(settings.keys() ^ names):
        raise ModelError(f"{path}: settings missing or unknown: {', '.join(wrong)}", hint=AGAIN)
    try:
        return MelCodecConfig(**settings)
    except ValueError as error:
        raise ModelError(f"{path}: {error}", hint=AGAIN) from None


def _read_tensors(folder: Path) -> Tensors:
    """All tensors, from one safetensors file or from shards. A pickle can run code when opened, so none ever is."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        files = [whole]
    elif index.is_file():
        try:
            named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            files = sorted({folder / Path(name).name for name in named})
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index} is damaged: {error!r}", hint=AGAIN) from None
    else:
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pth", ".pt", ".ckpt"))
        instead = f", only {', '.join(pickles)}, which Myna does not open" if pickles else ""
        raise CheckpointError(f"{folder} has no model.safetensors{instead}", hint=AGAIN)
    tensors: Tensors = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}", hint=f"it may be cut short: {AGAIN}") from error
    return tensors


def _fill(network: MelCodecNetwork, tensors: Tensors, folder: Path) -> None:
    due = network.state_dict()
    mis_shaped = [
        f"{name}: {tuple(tensors[name].shape)} instead of {tuple(due[name].shape)}"
        for name in due.keys() & tensors.keys()
        if tensors[name].shape != due[name].shape
    ]
    bad = [name for name, tensor in tensors.items() if not tensor.is_floating_point() or not tensor.isfinite().all()]
    problems = {
        "missing": due.keys() - tensors.keys(),
        "unexpected": tensors.keys() - due.keys(),
        "mis-shaped": mis_shaped,
        "not finite": bad,
    }
    if listed := [f"{len(names)} {kind} ({_some(names)})" for kind, names in problems.items() if names]:
        raise CheckpointError(f"the codec in {folder} does not fit its configuration: {'; '.join(listed)}", hint=AGAIN)
    network.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})


def _some(names: Collection[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(first) + (", ..." if len(names) > len(first) else "")


def _revision(config: MelCodecConfig, tensors: Tensors) -> str:
    """Tensor by tensor rather than file by file: a codec saved in other shards is the same codec."""
    parts = [json.dumps(asdict(config), sort_keys=True)]
    for name, tensor in sorted(tensors.items()):
        content = hashlib.blake2b(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        parts.append(f"{name} {tensor.dtype} {tuple(tensor.shape)} {content}")
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()
