"""Clips to codes and back, through transformers' Higgs codec with its keys, lengths and codes checked."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch.nn import functional as F

from myna.data.codec import Codes, Encoded, Samples, Say, by_equal_lengths
from myna.errors import CheckpointError, ModelError
from myna.models.codec_checks import check_clips, check_codes, exactly
from myna.models.files import quiet, resolve
from myna.models.higgs_v2.batched_codec import BatchedCodec
from myna.models.higgs_v2.batched_encoder import why_not
from myna.models.triton_support import fused

MODEL_TYPE = "higgs_audio_v2_tokenizer"
CONVERTED = "eustlb/higgs-audio-v2-tokenizer"
"""The released codec in the transformers layout; Boson's own repository came with a pickle."""

# What the codes depend on beside the tensors, whose names and shapes already tell depths and widths. A list of what
# counts, not of what does not: a setting that a later transformers adds must not make every stored code obsolete.
CODEC_SETTINGS = (
    "sample_rate semantic_sample_rate hop_length semantic_downsample_factor num_quantizers codebook_size strides "
    "block_dilations kernel_size unit_kernel_size"
)
ACOUSTIC_SETTINGS = "downsampling_ratios upsampling_ratios"
SEMANTIC_SETTINGS = (
    "conv_stride conv_kernel feat_extract_norm feat_extract_activation feat_proj_layer_norm hidden_act layer_norm_eps "
    "do_stable_layer_norm num_attention_heads num_conv_pos_embedding_groups"
)


class HiggsCodec:
    """The `Codec` of Higgs Audio v2 (24 kHz, 25 frames a second, 8 codebooks) or of any checkpoint of its class."""

    def __init__(self, model: Any, revision: str, device: torch.device) -> None:
        self.revision = revision
        self.sample_rate: int = model.config.sample_rate
        self.hop: int = model.config.hop_length
        self.codebooks: int = model.config.num_quantizers
        self.codebook_size: int = model.config.codebook_size
        self.frame_rate = self.sample_rate / self.hop
        self._device = device
        self._model = model.to(device).eval().requires_grad_(False)
        self._many: BatchedCodec | None = None
        self._decided = False

    @classmethod
    def open(cls, source: str | Path, revision: str | None = None, device: torch.device | str = "cpu") -> HiggsCodec:
        """Open a folder or a hub name. Every tensor must find its place, and every place its tensor."""
        folder = resolve(str(source), revision)
        config = _read_config(folder)
        files = _weight_files(folder)
        return cls(_load(folder, config), _revision(config, files), torch.device(device))

    def encode(self, clips: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
        """(clips, samples) -> (clips, frames, codebooks); one frame is enough, nothing is padded."""
        check_clips(self, clips)
        waves = torch.from_numpy(np.ascontiguousarray(clips, dtype=np.float32)).to(self._device)
        with exactly(self._device):
            codes = self._model.encode(waves[:, None]).audio_codes
        wanted = (len(clips), self.codebooks, clips.shape[1] // self.hop)
        if tuple(codes.shape) != wanted:
            raise ModelError(
                f"the codec gave codes of shape {tuple(codes.shape)} where {wanted} was due",
                hint="its configuration contradicts itself; use the codec that belongs to the model",
            )
        stacked: npt.NDArray[np.uint16] = codes.transpose(1, 2).cpu().numpy().astype(np.uint16)
        return stacked

    def encode_all(self, clips: Sequence[Samples], batch_seconds: float, say: Say) -> Iterator[Encoded]:
        """The faster way on a card where it gives the same codes, else `encode` by equal lengths.

        Only this method tries the faster way, which costs seconds of compiling at first: speaking with one reference
        need not pay for a corpus. Which way it is depends on the codec and the card, and not on the clips.
        """
        many = self._faster_way(say)
        if many is None:
            yield from by_equal_lengths(self, clips, batch_seconds)
            return
        for clip in clips:
            check_clips(self, clip[None])
        long = [place for place, clip in enumerate(clips) if len(clip) > many.longest]
        yield from self._exact_ones(clips, long, batch_seconds)
        rest = [place for place, clip in enumerate(clips) if len(clip) <= many.longest]
        again: list[int] = []
        for numbers, codes in many.encode([clips[place] for place in rest], batch_seconds):
            places = [rest[number] for number in numbers]
            if codes is None:
                again += places
            else:
                yield places, codes
        if again:
            say(f"{len(again)} clips are encoded in plain fp32: in their batches, activations went beyond fp16")
            yield from self._exact_ones(clips, again, batch_seconds)

    def _exact_ones(self, clips: Sequence[Samples], places: Sequence[int], batch_seconds: float) -> Iterator[Encoded]:
        for numbers, codes in by_equal_lengths(self, [clips[place] for place in places], batch_seconds):
            yield [places[number] for number in numbers], codes

    def _faster_way(self, say: Say) -> BatchedCodec | None:
        """Chosen once, when first asked for."""
        if self._decided:
            return self._many
        weight = self._model.fc.weight
        if fused(weight):
            reason = why_not(self._model)
            if reason is None:
                many = BatchedCodec(self._model, self._device, resample)
                reason = many.why_not(self)
                self._many = many if reason is None else None
        else:
            reason = "it needs Triton and a card of compute capability 8.0" if weight.is_cuda else None
        if reason is not None:
            say(f"clips are encoded in plain fp32, which takes longer than the card's faster way: {reason}")
        self._decided = True
        return self._many

    def decode(self, codes: Codes) -> Samples:
        """(frames, codebooks) -> (frames * hop,), clipped to [-1, 1] since the decoder ends without a tanh."""
        check_codes(self, codes)
        if not len(codes):
            return np.zeros(0, np.float32)
        ids = torch.from_numpy(codes.astype(np.int64)).to(self._device)
        with exactly(self._device):
            wave = self._model.decode(ids.T[None]).audio_values[0, 0]
        if len(wave) != len(codes) * self.hop:
            raise ModelError(
                f"{len(codes)} frames became {len(wave)} samples instead of {len(codes) * self.hop}",
                hint="the codec's up- and downsampling ratios differ; use the codec that belongs to the model",
            )
        samples: Samples = wave.clamp(-1, 1).cpu().numpy()
        return samples


@cache
def codec_classes() -> tuple[Any, Any]:
    """The configuration and the model class of the codec, with or without a working torchaudio.

    transformers' module wants torchaudio for one function, and the registry's torchaudio does not load beside a CPU
    build of torch. Where it does not load, that one module is given our `resample`.
    """
    from transformers import HiggsAudioV2TokenizerConfig
    from transformers.utils import import_utils

    modeling = f"transformers.models.{MODEL_TYPE}.modeling_{MODEL_TYPE}"
    try:
        importlib.import_module("torchaudio")
    except (ImportError, OSError):
        # Asked now, while the answer is still honest: transformers remembers it.
        import_utils.is_torchaudio_available()
        stand_in = ModuleType("torchaudio")
        stand_in.__spec__ = ModuleSpec("torchaudio", None)
        vars(stand_in)["functional"] = SimpleNamespace(resample=resample)
        sys.modules["torchaudio"] = stand_in
        try:
            module = importlib.import_module(modeling)
        finally:
            # Only that one module keeps it; whoever else looks for torchaudio must not find ours.
            del sys.modules["torchaudio"]
    else:
        module = importlib.import_module(modeling)
    return HiggsAudioV2TokenizerConfig, module.HiggsAudioV2TokenizerModel


def resample(waveform: torch.Tensor, orig: int, new: int) -> torch.Tensor:
    """`torchaudio.functional.resample` with its default arguments: a sinc under a Hann window of 6 zero crossings.

    Output sample j sits at time j / new. With both rates divided by what they share, samples j and j + new read the
    input through the same weights, `orig` samples further on: one strided convolution with `new` filters. The order of
    the arithmetic is torchaudio's too, so that codes do not depend on which of the two is at work.
    """
    if orig == new:
        return waveform
    shared = math.gcd(orig, new)
    orig, new = orig // shared, new // shared
    crossings, cutoff = 6, 0.99 * min(orig, new)
    reach = math.ceil(crossings * orig / cutoff)

    def steps(*span: int) -> torch.Tensor:
        return torch.arange(*span, dtype=waveform.dtype, device=waveform.device)

    time = steps(0, -new, -1)[:, None] / new + steps(-reach, reach + orig) / orig
    phase = (time * cutoff).clamp(-crossings, crossings)
    window = torch.cos(phase * math.pi / crossings / 2) ** 2
    filters = torch.sinc(phase) * (window * (cutoff / orig))
    padded = F.pad(waveform.reshape(-1, 1, waveform.shape[-1]), (reach, reach + orig))
    out = F.conv1d(padded, filters[:, None], stride=orig).transpose(1, 2).flatten(1)
    length = math.ceil(waveform.shape[-1] * new / orig)
    return out[:, :length].reshape(*waveform.shape[:-1], length)


def _read_config(folder: Path) -> Any:
    path = folder / "config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        if settings["model_type"] == MODEL_TYPE:
            return codec_classes()[0].from_dict(settings)
    except FileNotFoundError:
        raise ModelError(f"{folder} has no config.json", hint=f"name the codec's folder, or {CONVERTED}") from None
    except (ValueError, KeyError, TypeError, StrictDataclassError) as error:
        # Boson's original configuration, for one, has no model type.
        raise ModelError(
            f"{path} is not a codec configuration in the transformers layout: {error!r}", hint=f"use {CONVERTED}"
        ) from None
    raise ModelError(
        f"{folder} holds a model of type {settings['model_type']!r}, not a codec", hint=f"for example {CONVERTED}"
    )


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files, one or many. A pickle can run code when it is opened, so none ever is."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if index.is_file():
        try:
            return sorted({folder / name for name in json.loads(index.read_text("utf-8"))["weight_map"].values()})
        except (ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{index} is damaged: {error!r}", hint="download the codec again") from None
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pth", ".pt", ".ckpt"))
    instead = f", only {', '.join(pickles)}, which Myna does not open" if pickles else ""
    raise CheckpointError(
        f"{folder} has no model.safetensors{instead}",
        hint=f"use the converted checkpoint: hf download {CONVERTED}",
    )


def _load(folder: Path, config: Any) -> Any:
    try:
        with quiet():
            model, info = codec_classes()[1].from_pretrained(
                folder,
                config=config,
                dtype=torch.float32,
                use_safetensors=True,
                local_files_only=True,
                ignore_mismatched_sizes=True,  # so that they are listed below with the rest
                output_loading_info=True,
            )
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"the codec in {folder} cannot be loaded: {error}", hint="download it again; the file may be cut short"
        ) from error
    mismatched = [f"{name}: {tuple(found)} instead of {tuple(due)}" for name, found, due in info["mismatched_keys"]]
    problems = {"missing": info["missing_keys"], "unexpected": info["unexpected_keys"], "mis-shaped": mismatched}
    if listed := [f"{len(names)} {kind} ({_some(names)})" for kind, names in problems.items() if names]:
        raise CheckpointError(
            f"the codec in {folder} does not fit its configuration: {'; '.join(listed)}",
            hint=f"use a checkpoint of the Higgs v2 codec such as {CONVERTED}",
        )
    return model


def _some(names: Any) -> str:
    first = sorted(names)[:3]
    return ", ".join(first) + (", ..." if len(names) > len(first) else "")


def _revision(config: Any, files: list[Path]) -> str:
    """Tensor by tensor rather than file by file: a checkpoint saved anew, or in other shards, is the same codec."""
    settings = [
        {name: getattr(part, name) for name in names.split()}
        for part, names in (
            (config, CODEC_SETTINGS),
            (config.acoustic_model_config, ACOUSTIC_SETTINGS),
            (config.semantic_model_config, SEMANTIC_SETTINGS),
        )
    ]
    parts = [json.dumps(settings, sort_keys=True)]
    for path in files:
        with safe_open(path, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                tensor = tensors.get_tensor(name)
                content = hashlib.blake2b(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()
                parts.append(f"{name} {tensor.dtype} {tuple(tensor.shape)} {content}")
    return hashlib.blake2b("\n".join(sorted(parts)).encode(), digest_size=16).hexdigest()
