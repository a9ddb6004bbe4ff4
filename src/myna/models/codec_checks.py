"""Input checks, numerical precision and revision hash of every codec."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock

import numpy as np
import numpy.typing as npt
import torch

from myna.core.errors import AudioError, ModelError
from myna.data.codec import Codec, Codes


def check_clips(codec: Codec, clips: npt.NDArray[np.float32]) -> None:
    """Refuse clips that are not finite or not in whole frames."""
    if clips.ndim != 2 or not clips.size or clips.shape[1] % codec.hop:
        raise AudioError(
            f"the codec takes clips of equal length in whole frames of {codec.hop} samples, not shape {clips.shape}",
            hint=f"trim each clip to a multiple of {codec.hop} samples and leave out what is shorter",
        )
    if not np.isfinite(clips).all():
        raise AudioError("a clip holds samples that are not finite", hint="export the recording again")


def check_codes(codec: Codec, codes: Codes) -> None:
    """Refuse codes of another shape or outside the codebooks."""
    if codes.ndim != 2 or codes.shape[1] != codec.codebooks:
        raise ModelError(
            f"codes must have the shape (frames, {codec.codebooks}), not {codes.shape}",
            hint="use codes that this codec made",
        )
    if codes.size and (int(codes.max()) >= codec.codebook_size or int(codes.min()) < 0):
        raise ModelError(
            f"codes run from {codes.min()} to {codes.max()}, the codec has 0 to {codec.codebook_size - 1}",
            hint="undo the delay pattern and drop the begin and end of stream before decoding",
        )


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Full fp32, without autocast or TF32: codes are computed once and stored.

    Measured with the Higgs codec on an H200 at true size with random weights: fp32 gives the codes of a CPU, TF32
    changes 4 % of the first codebook to 14 % of the last.
    """
    with _process_precision(), torch.inference_mode(), torch.autocast(device.type, enabled=False):
        yield


_precision_lock, _precision_users, _restore_precision = Lock(), 0, ExitStack()


@contextmanager
def _process_precision() -> Iterator[None]:
    """Settings of the whole process, which an encoder and a decoder may need at the same time in two threads: the first
    makes them, the last takes them back."""
    global _precision_users
    with _precision_lock:
        if not _precision_users:
            _restore_precision.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("highest")
            flags = torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)
            _restore_precision.enter_context(flags)
        _precision_users += 1
    try:
        yield
    finally:
        with _precision_lock:
            _precision_users -= 1
            if not _precision_users:
                _restore_precision.close()


def codec_revision(settings: object, tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Hash of a codec's settings and weights, tensor by tensor: saved in other shards it is the same codec."""
    lines = []
    for name, tensor in tensors:
        content = hashlib.blake2b(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()
        lines.append(f"{name} {tensor.dtype} {tuple(tensor.shape)} {content}")
    whole = "\n".join([json.dumps(settings, sort_keys=True), *sorted(lines)])
    return hashlib.blake2b(whole.encode(), digest_size=16).hexdigest()
