"""Mel codec: clips to codes and back, with keys, lengths and codes checked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from huggingface_hub import save_torch_state_dict

from myna.core.errors import CheckpointError, ModelError
from myna.core.io import atomic_folder
from myna.data.codec import Codes, EncodedBatch, NotifyCallback, PendingSamples, Samples, encode_equal_lengths
from myna.models.codec_checks import check_clips, check_codes, codec_revision, full_precision
from myna.models.codec_windows import decode_in_windows, probe_window_independence
from myna.models.files import format_names, open_safetensors, shapes_of, state_dict_problems, weight_files
from myna.models.mel_codec.network import MelCodecConfig, MelCodecNetwork

MODEL_TYPE = "myna_mel_codec"
MAX_SHARD_BYTES = 15_900_000
"""Bytes of tensors in one file, which with its header stays under 16 MB."""
COPY_AGAIN_HINT = "copy the codec's folder again; it came with the model"


class MelCodec:
    """The codec of fledgling: 24 kHz, 25 frames a second, 8 codebooks."""

    def __init__(self, network: MelCodecNetwork, revision: str, device: torch.device) -> None:
        self.revision = revision
        self.sample_rate = network.config.sample_rate
        self.hop = network.config.hop
        self.codebooks = network.config.codebooks
        self.codebook_size = network.config.codebook_size
        self.frame_rate = self.sample_rate / self.hop
        self.decode_reach = network.config.decode_reach
        self._device = device
        self._network = network.to(device).float().eval().requires_grad_(False)

    @classmethod
    def open(cls, folder: str | Path, device: torch.device | str = "cpu") -> MelCodec:
        config, tensors = read_mel_codec_config(Path(folder)), read_mel_codec_tensors(Path(folder))
        network = MelCodecNetwork(config)
        problems = state_dict_problems(shapes_of(network.state_dict()), shapes_of(tensors))
        bad = [name for name, x in tensors.items() if not x.is_floating_point() or not x.isfinite().all()]
        problems += [f"{len(bad)} not finite: {format_names(bad)}"] if bad else []
        if problems:
            raise CheckpointError(
                f"the codec in {folder} does not fit its configuration: {'; '.join(problems)}", hint=COPY_AGAIN_HINT
            )
        network.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
        return cls(network, codec_revision(asdict(config), tensors.items()), torch.device(device))

    def encode(self, clips: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
        """(clips, samples) -> (clips, frames, codebooks); one frame is enough, nothing is padded.

        Clip by clip: sums are ordered differently in another batch, and a code must not depend on its batch.
        """
        check_clips(self, clips)
        with full_precision(self._device):
            waves = torch.from_numpy(np.ascontiguousarray(clips, dtype=np.float32)).to(self._device)
            codes = torch.cat([self._network.encode(wave[None]) for wave in waves])
        stacked: npt.NDArray[np.uint16] = codes.cpu().numpy().astype(np.uint16)
        return stacked

    def encode_batches(
        self, clips: Sequence[Samples], batch_seconds: float, _: NotifyCallback
    ) -> Iterator[EncodedBatch]:
        yield from encode_equal_lengths(self, clips, batch_seconds)

    @cached_property
    def window_independent(self) -> bool:
        """Tried once: it depends on the libraries that multiply matrices on this machine."""
        return probe_window_independence(self)

    def decode(self, codes: Codes) -> Samples:
        return decode_in_windows(self, codes)

    def decode_windows(self, windows: Sequence[Codes]) -> PendingSamples:
        """One by one, as `encode`: sums may be ordered differently in another batch."""
        decoded = [self._decode_window(window) for window in windows]
        return lambda: decoded

    def _decode_window(self, codes: Codes) -> Samples:
        check_codes(self, codes)
        with full_precision(self._device):
            ids = torch.from_numpy(codes.astype(np.int64)).to(self._device)
            wave = self._network.decode(ids[None])[0]
        samples: Samples = wave.clamp(-1, 1).cpu().numpy()
        return samples


def save_mel_codec(network: MelCodecNetwork, folder: Path) -> None:
    """Write config.json and half-precision safetensors, replacing a codec in that folder."""
    half = {name: tensor.detach().half().cpu().contiguous() for name, tensor in network.state_dict().items()}
    with atomic_folder(folder, replace=True) as written:
        save_torch_state_dict(half, written, max_shard_size=MAX_SHARD_BYTES)
        settings = {"model_type": MODEL_TYPE} | asdict(network.config)
        (written / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def read_mel_codec_config(folder: Path) -> MelCodecConfig:
    """Rates and sizes out of a codec's folder."""
    path = folder / "config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        kind = settings.pop("model_type")
    except (FileNotFoundError, NotADirectoryError):
        raise ModelError(f"{folder} has no config.json", hint="name the codec's folder") from None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{path} is not the configuration of a codec: {error!r}", hint=COPY_AGAIN_HINT) from None
    if kind != MODEL_TYPE:
        raise ModelError(f"{folder} holds a model of type {kind!r}, not {MODEL_TYPE}", hint="name the codec's folder")
    names = {field.name for field in fields(MelCodecConfig)}
    if wrong := sorted(settings.keys() ^ names):
        raise ModelError(f"{path}: settings missing or unknown: {', '.join(wrong)}", hint=COPY_AGAIN_HINT)
    try:
        return MelCodecConfig(**settings)
    except ValueError as error:
        raise ModelError(f"{path}: {error}", hint=COPY_AGAIN_HINT) from None


def read_mel_codec_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Weights of a codec, out of one file or several, in the precision of the files."""
    tensors: dict[str, torch.Tensor] = {}
    for file in weight_files(folder, pickle_hint=COPY_AGAIN_HINT):
        with open_safetensors(file) as stored:
            tensors |= {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - not a mapping
    return tensors
