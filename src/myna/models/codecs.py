"""Parts common to all codecs: checks of inputs, full precision, the revision hash, and windows of a stream of codes.

A decoder is not causal: a frame's samples depend on `Codec.decode_reach` frames on either side of it. A window is
decoded with that many frames around those whose samples are kept, fewer at the ends of the stream. Windows lie at fixed
frames of the stream, short ones first. Finished clips are decoded in long windows if that gives the same samples, bit
for bit, else in the windows of a stream, so that a stream always has the samples of its file.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from threading import RLock
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from myna.core.errors import AudioError, ModelError
from myna.data.codec import Codec, Codes, Encoder, Samples

FIRST_WINDOW = 2
"""Frames of the first window. Speech begins when these and the following frames of the reach are known."""
MAX_WINDOW = 128
"""Frames of the windows of a long stream. With a reach of 10 frames, one frame in seven is decoded twice."""
PROBE_FRAMES = 45
"""Frames of the probe: quick to decode, and few, because libraries have other kernels for few rows."""


def check_clips(codec: Encoder, clips: npt.NDArray[np.float32]) -> None:
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


def record_event(device: torch.device) -> Callable[[], None]:
    """Return a function that waits for what has been launched on the current CUDA stream; on a CPU it is done."""
    if device.type != "cuda":
        return lambda: None
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    return done.synchronize


_PRECISION_LOCK = RLock()
"""Held while torch's precision settings, which belong to the process, are changed; a codec in another thread waits."""


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Compute in full fp32, without autocast or TF32, because codes are computed once and stored. Measured with the
    Higgs codec on an H200 at true size with random weights: fp32 gives the codes of a CPU, TF32 changes 4 % of the
    first codebook to 14 % of the last."""
    with ExitStack() as stack:
        stack.enter_context(_PRECISION_LOCK)
        matmul = torch.get_float32_matmul_precision()
        if device.type == "cpu" and matmul == "highest":
            stack.close()  # nothing has to change: codecs on a CPU compute at the same time
        else:
            stack.callback(torch.set_float32_matmul_precision, matmul)
            torch.set_float32_matmul_precision("highest")
            stack.enter_context(torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False))
        with torch.inference_mode(), torch.autocast(device.type, enabled=False):
            yield


def codec_revision(settings: object, tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Hash settings and weights, tensor by tensor: other shards of the same tensors are the same codec."""
    lines = []
    for name, tensor in tensors:
        content = hashlib.blake2b(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()
        lines.append(f"{name} {tensor.dtype} {tuple(tensor.shape)} {content}")
    whole = "\n".join([json.dumps(settings, sort_keys=True), *sorted(lines)])
    return hashlib.blake2b(whole.encode(), digest_size=16).hexdigest()


class Window(NamedTuple):
    """Frames `first` to `last` of a stream, decoded from frames `start` to `stop`."""

    start: int
    first: int
    last: int
    stop: int


def plan_windows(reach: int, done: int, frames: int, ended: bool, first_window: int = FIRST_WINDOW) -> Iterator[Window]:
    """Yield the windows after frame `done` of a stream of which `frames` frames are known, all of them if it has
    `ended`. A window is as long as all windows before it and the first. If a stream is generated at twice the pace of
    its playback or faster, its next window is decoded before the last one has been played."""
    while True:
        last = done + min(done + first_window, MAX_WINDOW)
        if ended:
            last = min(last, frames)
        if last == done or (last + reach > frames and not ended):
            return
        yield Window(max(0, done - reach), done, last, min(last + reach, frames))
        done = last


def crop_window(window: Window, samples: Samples, hop: int) -> Samples:
    return samples[(window.first - window.start) * hop : (window.last - window.start) * hop]


def decode_in_windows(codec: Codec, codes: Codes) -> Samples:
    """Decode a whole clip: (frames, codebooks) -> (frames * hop,)."""
    check_codes(codec, codes)
    first_window = clip_first_window(codec)
    windows = list(plan_windows(codec.decode_reach, 0, len(codes), ended=True, first_window=first_window))
    decoded = codec.decode_windows([codes[window.start : window.stop] for window in windows])()
    kept = [crop_window(window, samples, codec.hop) for window, samples in zip(windows, decoded, strict=True)]
    return np.concatenate([np.zeros(0, np.float32), *kept])


def clip_first_window(codec: Codec) -> int:
    """Return the frames of the first window of a clip that is not streamed."""
    return MAX_WINDOW if codec.window_independent else FIRST_WINDOW


def probe_window_independence(codec: Codec) -> bool:
    """Decode random codes in one piece, then the first and last window of a stream of them, and compare all bits."""
    shape, hop = (PROBE_FRAMES, codec.codebooks), codec.hop
    codes = np.random.default_rng(0).integers(0, codec.codebook_size, shape).astype(np.uint16)
    first, *_, last = plan_windows(codec.decode_reach, 0, len(codes), ended=True)
    whole, *parts = codec.decode_windows([codes, *(codes[window.start : window.stop] for window in (first, last))])()
    return all(
        np.array_equal(crop_window(window, part, hop), whole[window.first * hop : window.last * hop])
        for window, part in zip((first, last), parts, strict=True)
    )
