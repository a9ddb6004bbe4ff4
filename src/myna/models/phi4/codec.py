"""Clips to what the model hears: log-mel features through its own feature extractor, kept as 16-bit numbers.

They take the place that codes have for a model that speaks: made once by `myna prepare`, stored under the hash of the
sound, mapped by training. A feature is the logarithm of a power that is at least 1, so it lies between 0 and some 35;
in steps of 1/1600 it fits 16 bits with a larger margin, and is twenty times as exact as in fp16.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import Phi4MultimodalFeatureExtractor

from myna.data.codec import Encoded, Samples, Say, by_equal_lengths
from myna.errors import AudioError, ModelError
from myna.models.files import read_json

STEPS = 1600
"""Stored numbers to a unit of a feature."""
LARGEST = 65535
FILES = ("preprocessor_config.json", "processor_config.json")
"""Where a checkpoint may keep the settings of its feature extractor."""
SETTINGS = (
    *("feature_size", "sampling_rate", "hop_length", "n_fft", "win_length", "preemphasis"),
    *("audio_compression_rate", "audio_downsample_rate", "audio_feat_stride", "mel_min_frequency", "mel_max_frequency"),
)
"""What features depend on."""
HEARD_WITHIN = 3
"""Frames that a window of the extractor reaches over: the last two frames of a clip are only parts of windows."""


class MelFeatureEncoder:
    """The feature extractor as an `Encoder`: a frame is one mel spectrum, a codebook one of its bands."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._extract = Phi4MultimodalFeatureExtractor(**settings)
        self.sample_rate: int = self._extract.sampling_rate
        self.hop: int = self._extract.hop_length
        self.codebooks: int = self._extract.feature_size
        self.codebook_size = LARGEST + 1
        self.frame_rate = self.sample_rate / self.hop
        said = json.dumps([STEPS, settings], sort_keys=True)
        self.revision = hashlib.blake2b(said.encode(), digest_size=16).hexdigest()

    @classmethod
    def open(cls, folder: Path) -> MelFeatureEncoder:
        return cls(read_settings(folder))

    def encode(self, clips: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
        """(clips, samples) -> (clips, frames, bands). The extractor makes two spectra less than there are frames, since
        a window reaches over three; the two are silence, and `heard` leaves them out."""
        if clips.ndim != 2 or clips.shape[1] % self.hop or not np.isfinite(clips).all():
            raise AudioError(
                f"features are made of finite clips in whole frames of {self.hop} samples, not of {clips.shape}",
                hint="export the recording again",
            )
        frames = clips.shape[1] // self.hop
        codes = np.zeros((len(clips), frames, self.codebooks), np.uint16)
        if frames < HEARD_WITHIN:
            return codes
        # One by one: in a batch, the extractor would take clips of one length for padded ones.
        for place, clip in enumerate(clips):
            spectra = self._extract(torch.from_numpy(clip), sampling_rate=self.sample_rate, return_tensors="pt")
            steps = np.rint(spectra["audio_input_features"][0].numpy() * STEPS)
            codes[place, : frames - HEARD_WITHIN + 1] = np.clip(steps, 0, LARGEST)
        return codes

    def encode_all(self, clips: Sequence[Samples], batch_seconds: float, say: Say) -> Iterator[Encoded]:  # noqa: ARG002
        yield from by_equal_lengths(self, clips, batch_seconds)


def heard(codes: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
    """The spectra of a clip, without the two that are none."""
    return codes[: len(codes) - HEARD_WITHIN + 1]


def read_settings(folder: Path) -> dict[str, Any]:
    """The feature extractor's settings; the class's own where the checkpoint says nothing of one."""
    for name in FILES:
        if not (folder / name).is_file():
            continue
        stored = read_json(folder / name)
        for part in ("audio_processor", "feature_extractor"):
            stored = stored.get(part, stored)
        if "mel_max_frequency" in stored or "audio_compression_rate" in stored or "n_fft" in stored:
            return {key: stored[key] for key in SETTINGS if key in stored}
    if not any((folder / name).is_file() for name in FILES):
        raise ModelError(
            f"{folder} has none of {', '.join(FILES)}, which say how sound becomes features",
            hint="copy the processor's files of the checkpoint there, or download it again",
        )
    return {}
