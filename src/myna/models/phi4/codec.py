"""Log-mel features of the model's own feature extractor, stored as 16-bit codes.

They are stored and loaded like the codes of a codec. A feature is the logarithm of a power that is at least 1, so it
lies between 0 and some 35. In steps of 1/1600 it fits 16 bits with a margin, and is twenty times as exact as in fp16.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from transformers import Phi4MultimodalFeatureExtractor

from myna.core.errors import ModelError
from myna.data.codec import EncodedBatch, NotifyCallback, Samples, encode_equal_lengths
from myna.models.codecs import check_clips
from myna.models.files import read_json

CODES_PER_UNIT = 1600
"""Codes per unit of a feature."""
MAX_CODE = 65535
SETTINGS_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files of a checkpoint that may hold the settings of its feature extractor."""
FEATURE_SETTINGS = (
    *("feature_size", "sampling_rate", "hop_length", "n_fft", "win_length", "preemphasis"),
    *("audio_compression_rate", "audio_downsample_rate", "audio_feat_stride", "mel_min_frequency", "mel_max_frequency"),
)
"""Settings that features depend on."""
WINDOW_FRAMES = 3
"""Frames under one window of the extractor. The last two frames of a clip begin no whole window."""


class MelFeatureEncoder:
    """Feature extractor as an `Encoder`. A frame is one mel spectrum, a codebook one of its bands."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._extract = Phi4MultimodalFeatureExtractor(**settings)
        self.sample_rate: int = self._extract.sampling_rate
        self.hop: int = self._extract.hop_length
        self.codebooks: int = self._extract.feature_size
        self.codebook_size = MAX_CODE + 1
        self.frame_rate = self.sample_rate / self.hop
        identity = json.dumps([CODES_PER_UNIT, settings], sort_keys=True)
        self.revision = hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()

    @classmethod
    def open(cls, folder: Path) -> Self:
        return cls(read_settings(folder))

    def encode(self, clips: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
        """Encode (clips, samples) to (clips, frames, bands). A window spans three frames, so there are two spectra
        fewer: the last two frames stay zero, and `valid_frames` leaves them out."""
        check_clips(self, clips)
        frames = clips.shape[1] // self.hop
        codes = np.zeros((len(clips), frames, self.codebooks), np.uint16)
        if frames < WINDOW_FRAMES:
            return codes
        # One by one: in a batch, the extractor would take clips of equal length for padded ones.
        for row, clip in enumerate(clips):
            spectra = self._extract(torch.from_numpy(clip), sampling_rate=self.sample_rate, return_tensors="pt")
            steps = np.rint(spectra["audio_input_features"][0].numpy() * CODES_PER_UNIT)
            codes[row, : frames - WINDOW_FRAMES + 1] = np.clip(steps, 0, MAX_CODE)
        return codes

    def encode_batches(
        self, clips: Sequence[Samples], batch_seconds: float, _: NotifyCallback
    ) -> Iterator[EncodedBatch]:
        yield from encode_equal_lengths(self, clips, batch_seconds)


def valid_frames(codes: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
    """Return the spectra of a clip, without the two zero frames at its end."""
    return codes[: len(codes) - WINDOW_FRAMES + 1]


def read_settings(folder: Path) -> dict[str, Any]:
    """Read the feature extractor's settings, with the class's defaults for what the checkpoint leaves out."""
    present = [folder / name for name in SETTINGS_FILES if (folder / name).is_file()]
    if not present:
        raise ModelError(
            f"{folder} has none of {', '.join(SETTINGS_FILES)}, the settings of its feature extractor",
            hint="copy the processor's files of the checkpoint there, or download it again",
        )
    for file in present:
        stored = read_json(file)
        for key in ("audio_processor", "feature_extractor"):
            stored = stored.get(key, stored)
        if "mel_max_frequency" in stored or "audio_compression_rate" in stored or "n_fft" in stored:
            return {key: stored[key] for key in FEATURE_SETTINGS if key in stored}
    return {}
