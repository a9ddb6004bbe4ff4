"""Watermark of speech: applied to a clip or, with the same bits, to streamed audio; and its detection.

The mark is that of PerTh, a neural watermark: the network of resemble-perth in plain torch, its weights read from that
package. `inspect_file` looks for the mark, for content credentials, and for the file in the speech log of this machine.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from myna.audio.files import Samples, join_samples, read_audio
from myna.core.errors import AudioError, OutputError
from myna.core.io import file_sha256
from myna.provenance.credentials import INSTALL_HINT, UNMARKED_HINT, Credentials, perth_checkpoint, read_credentials
from myna.provenance.speech_log import read_log

MARK_NAME = "perth-implicit-1"
"""Name of the watermark in logs, manifests and HTTP headers."""
CHECKPOINT_SHA256 = "a15bce457ebc53ce5e6c9c3f11df78cf7ee2bf9cdab0a798902135b4c4027670"

FFT_SAMPLES = 2048
"""Samples of a spectrum at the network's own 32 kHz; spectra of other rates are scaled to it."""
WINDOW_SECONDS, HOP_SECONDS = 0.064, 0.01
MARKED_BINS = 128
"""Number of spectral bins that carry the mark: those below 2 kHz."""
MIN_MAGNITUDE, RANGE_DB = 1e-9, 195.0
"""Smallest magnitude, and the decibels from -180 to 15 that become levels from 0 to 1."""
FRAME_REACH = 15
"""Frames on either side that a frame's mark depends on: five convolutions of seven taps."""
MARK_LEVEL = 0.04
"""Mean level from which a frame is marked: quieter ones are digital silence."""
DETECT_LEVEL = 0.05
"""Share of the loudest frame's mean level from which a frame counts in detection."""
MIN_BAND_LEVEL = 0.5
"""Mean level of the marked bins below which a clip cannot be judged: its low frequencies were cut. Speech has 0.8."""
FIRST_BLOCKS = (5, 21, 53, 117)
"""Frames of 10 ms at which the first blocks end. They do not look ahead and end where the first windows of a codec end
(2, 4, 8 and 16 frames of 40 ms), so that little audio is held back."""
WHOLE_BLOCK, MAX_BLOCK = 230, 128
"""Frame at which the first block with look-ahead ends, and frames of each block after it."""
EARLY_HOPS = 2
"""Number of hops beyond its last frame that an early block still returns."""
STACKED_BLOCKS = {"cuda": 64}
"""Maximum number of blocks computed in one call by type of device; one on the others."""
MARK_THRESHOLD = 0.5
"""Score above which a clip counts as marked."""
DETECTION_RATE = 24_000
"""Hertz to which recordings are resampled; the mark lies below 2 kHz."""
MIN_SAMPLE_RATE = 8_000
SPAN_SECONDS = 10.0
"""Approximate length of the spans by which long recordings are judged."""


class ScoredSpan(NamedTuple):
    """Score of a part of a recording; `start` and `end` are seconds."""

    start: float
    end: float
    score: float


def watermark(samples: Samples, sample_rate: int, *, device: str = "cpu") -> Samples:
    """Return a clip of the same length with the mark."""
    stream = StreamWatermark(sample_rate, device=device)
    return np.concatenate([stream.push(samples), stream.finish()])


def watermark_score(samples: Samples, sample_rate: int, *, device: str = "cpu") -> float:
    """Score whether a clip is marked, 0 to 1; above `MARK_THRESHOLD` it is. A long clip has the mean of its spans."""
    return mean_score(detect_spans(samples, sample_rate, device=device))


def mean_score(spans: Sequence[ScoredSpan]) -> float:
    """Return the mean score of spans, weighted by their lengths; 0 without any."""
    lengths = [span.end - span.start for span in spans]
    return float(np.average([span.score for span in spans], weights=lengths)) if spans else 0.0


def detect_spans(samples: Samples, sample_rate: int, *, device: str = "cpu") -> list[ScoredSpan]:
    """Score a recording in equal spans; one span if it is not longer than 15 s."""
    _check_rate(sample_rate)
    window, hop = _frame_samples(sample_rate)
    network, seconds = load_perth(torch.device(device)), len(samples) / sample_rate
    edges = np.linspace(0, len(samples), max(1, round(seconds / SPAN_SECONDS)) + 1).astype(int)
    spans = []
    for first, last in pairwise(edges):
        if last - first <= window // 2:
            continue  # not even one spectrum
        clip = torch.from_numpy(np.ascontiguousarray(samples[first:last], np.float32)).to(device)
        with torch.inference_mode():
            spectra = torch.stft(clip, window, hop, window=_hann(window, clip.device), return_complex=True)
            score = float(network.score(levels_of(spectra, window)[None])[0])
        spans.append(ScoredSpan(first / sample_rate, last / sample_rate, score))
    return spans


@dataclass(frozen=True, slots=True)
class Detection:
    """Marks found in a file."""

    file: Path
    seconds: float
    score: float
    """Score of the watermark in the whole file, 0 to 1."""
    spans: tuple[ScoredSpan, ...]
    """Scores of the parts of a long file."""
    credentials: Credentials | None
    logged: dict[str, Any] | None
    """Line of this machine's speech log about exactly this file."""

    @property
    def marked(self) -> bool:
        """Whether the watermark is in the file or in a part of it."""
        return any(span.score > MARK_THRESHOLD for span in self.spans)

    @property
    def is_synthetic(self) -> bool:
        """Whether the file is marked, or signed as speech of a model."""
        return self.marked or (self.credentials is not None and self.credentials.is_synthetic)

    def to_json(self) -> dict[str, Any]:
        return {
            "file": str(self.file),
            "seconds": round(self.seconds, 3),
            "marked": self.marked,
            "watermark": MARK_NAME if self.marked else None,
            "score": round(self.score, 4),
            "spans": [[round(value, 4) for value in span] for span in self.spans],
            "credentials": asdict(self.credentials) if self.credentials is not None else None,
            "logged": self.logged,
        }


def inspect_file(file: Path, *, device: str = "cpu") -> Detection:
    """Look for the watermark and the credentials in an audio file."""
    perth_checkpoint(INSTALL_HINT)
    samples = read_audio(file, sample_rate=DETECTION_RATE)
    spans = detect_spans(samples, DETECTION_RATE, device=device)
    found = file_sha256(file)
    logged = next((row for row in read_log() if row.get("audio_sha256") == found), None)
    seconds = len(samples) / DETECTION_RATE
    return Detection(file, seconds, mean_score(spans), tuple(spans), read_credentials(file), logged)


class StreamWatermark:
    """Watermark of streamed audio: takes samples in pieces of any size, and returns marked samples a little later.

    Only the position of frames decides which are computed together, so the marked samples do not depend on the
    pieces. Frame n is centred on sample n * hop; the audio is mirrored before its first and after its last sample.
    `mark_streams` advances many of them together.
    """

    def __init__(self, sample_rate: int, *, device: str = "cpu") -> None:
        _check_rate(sample_rate)
        self.sample_rate, self.device = sample_rate, torch.device(device)
        self._window, self._hop = _frame_samples(sample_rate)
        self._length = self._done = self._start = 0
        """Number of samples received, number of frames marked, and the frame at which `_samples` begins."""
        self._samples = _NOTHING
        self._mirrored = False
        self._given = 0
        """Number of samples of the padded audio that were given out."""
        self._mark, self._weight = _NOTHING, _NOTHING
        """Sums of the mark's overlapping frames and of their squared windows, from sample `_given` on."""
        self._edge: float | None = None
        """Mark at the last sample, if it was given out before all frames that reach it were known."""
        self._finished = False

    def push(self, samples: Samples) -> Samples:
        """Add samples and return the marked samples that are ready, perhaps none."""
        self.add(samples)
        return mark_streams([self])[0]

    def finish(self) -> Samples:
        """End the audio and return its last marked samples."""
        self.add(_NOTHING, last=True)
        return mark_streams([self])[0]

    def add(self, samples: Samples, *, last: bool = False) -> None:
        """Add samples, which `mark_streams` marks; `last` ends the audio."""
        assert not self._finished, "the stream has ended"
        self._length += len(samples)
        self._samples = np.concatenate([self._samples, np.asarray(samples, np.float32)])
        self._finished = last
        half = self._window // 2
        if not self._mirrored and (self._length > half or (last and self._length)):
            self._samples, self._mirrored = np.pad(self._samples, (half, 0), mode="reflect"), True
        if last and self._length:
            end = np.pad(self._samples[-half - 1 :], (0, -self._length % self._hop))
            self._samples = np.concatenate([self._samples, np.pad(end, (0, half), mode="reflect")[half + 1 :]])

    def _blocks(self) -> "list[_Block]":
        """Return the blocks that can be marked now."""
        frames = self._start + (len(self._samples) - self._window) // self._hop + 1 if self._mirrored else 0
        return list(_plan_blocks(self._done, frames, self._finished))

    def _block_samples(self, block: "_Block") -> Samples:
        """Return all samples that a block is computed from."""
        first, last = block.start - self._start, block.stop - 1 - self._start
        return self._samples[first * self._hop : last * self._hop + self._window]

    def _give_out(self, block: "_Block", mark: Samples) -> Samples:
        """Add the mark of the next block and return the samples that are complete with it."""
        frames, hop, known = block.last - block.first, self._hop, self._start * self._hop + len(self._samples)
        offset = block.first * hop - self._given  # negative if samples were given out early
        weight = _window_weight(self._window, hop, frames)
        self._mark, self._weight = _add(self._mark, mark, offset), _add(self._weight, weight, offset)
        # Up to the samples that the next block adds to, or a little into them.
        early = self._window // 2 + (EARLY_HOPS - 1) * hop if block.is_early else 0
        end = known if block.is_end else block.last * hop + early
        count = end - self._given
        change = self._mark[:count] / self._weight[:count].clip(1e-6)
        if self._edge is not None:  # no step after samples that were given out early
            fade = np.linspace(1, 0, hop, endpoint=False, dtype=np.float32)
            change[:hop] += (self._edge - change[0]) * fade[: len(change)]
        self._edge = float(change[-1]) if block.is_early and not block.is_end else None
        place = self._given - self._start * hop
        marked: Samples = self._samples[place : place + count] + change
        margin = self._window // 2 - self._given
        self._mark, self._weight, self._given, self._done = self._mark[count:], self._weight[count:], end, block.last
        start = max(0, min(block.last - FRAME_REACH, self._given // hop))
        self._samples, self._start = self._samples[(start - self._start) * hop :], start
        return marked[max(0, margin) : max(0, margin + self._length)]


def mark_streams(streams: Sequence[StreamWatermark]) -> list[Samples]:
    """Return the marked samples that are ready, for each stream; a GPU computes the blocks of all streams together.

    On a CPU the samples of a stream have the same bits alone and beside others; on a GPU they differ by rounding."""
    blocks = [(stream, block) for stream in streams for block in stream._blocks()]
    parts: dict[int, list[Samples]] = {id(stream): [] for stream in streams}
    size = STACKED_BLOCKS.get(blocks[0][0].device.type, 1) if blocks else 1
    for first in range(0, len(blocks), size):
        batch = blocks[first : first + size]
        for (stream, block), mark in zip(batch, _compute_marks(batch), strict=True):
            parts[id(stream)].append(stream._give_out(block, mark))
    return [join_samples(parts[id(stream)]) for stream in streams]


def _compute_marks(blocks: "Sequence[tuple[StreamWatermark, _Block]]") -> list[Samples]:
    """Return the mark of each block: its frames, windowed and added up."""
    device, sample_rate = blocks[0][0].device, blocks[0][0].sample_rate
    window, hop = _frame_samples(sample_rate)
    inputs = [stream._block_samples(block) for stream, block in blocks]
    assert all((stream.device, stream.sample_rate) == (device, sample_rate) for stream, _ in blocks)
    own = [(block.first - block.start, block.last - block.start) for _, block in blocks]
    lengths = [block.stop - block.start for _, block in blocks]
    on_gpu = device.type == "cuda"
    samples = torch.empty(len(blocks), max(map(len, inputs)), pin_memory=on_gpu)
    for row, one in zip(samples.numpy(), inputs, strict=True):
        row[: len(one)], row[len(one) :] = one, 0
    # For every block: its number of frames, and the range of those it does not share.
    spans = torch.tensor([[length, *span] for length, span in zip(lengths, own, strict=True)], pin_memory=on_gpu)
    with torch.cuda.stream(_cuda_stream(device)) if on_gpu else nullcontext(), torch.inference_mode():
        samples, spans = samples.to(device, non_blocking=True), spans.to(device, non_blocking=True)
        marks = _mark_frames(samples, spans, window, hop)
        marks = marks.to("cpu", non_blocking=True)
        if on_gpu:
            torch.cuda.current_stream(device).synchronize()
    spans_samples = [slice(first * hop, (last - 1) * hop + window) for first, last in own]
    return [mark[span] for mark, span in zip(marks.numpy(), spans_samples, strict=True)]


def _mark_frames(samples: Tensor, spans: Tensor, window: int, hop: int) -> Tensor:
    """Return the marks of stacked blocks: (blocks, samples) -> (blocks, samples). `spans` holds the number of frames of
    each, and its first and last own frame; values after a block's frames mean nothing."""
    hann, device = _hann(window, samples.device), samples.device
    spectra = torch.fft.rfft(samples.unfold(1, window, hop) * hann).transpose(1, 2)
    frame = torch.arange(spectra.shape[2], device=device)
    lengths, first, last = spans[:, :, None].unbind(1)
    is_padded = len(samples) > 1
    gain = load_perth(device).gain(levels_of(spectra, window), (frame < lengths)[:, None] if is_padded else None)
    is_own = ((frame >= first) & (frame < last))[:, None]
    change = torch.zeros_like(spectra)
    change[:, :MARKED_BINS] = spectra[:, :MARKED_BINS] * ((gain - 1) * is_own)
    frames = torch.fft.irfft(change, n=window, dim=1) * hann[:, None]
    return F.fold(frames, (1, samples.shape[1]), (1, window), stride=(1, hop)).flatten(1)


class _Block(NamedTuple):
    """Frames `first` to `last`, marked with the context `start` to `stop`."""

    start: int
    first: int
    last: int
    stop: int
    is_end: bool
    """Whether the audio ends with this block."""

    @property
    def is_early(self) -> bool:
        return self.last in FIRST_BLOCKS


def _plan_blocks(done: int, frames: int, ended: bool) -> Iterator[_Block]:
    """Yield the blocks after frame `done` that can be marked with `frames` known frames, all of them if the audio has
    `ended`."""
    while done < frames:
        last = next((end for end in (*FIRST_BLOCKS, WHOLE_BLOCK) if end > done), done + MAX_BLOCK)
        ahead = 0 if last in FIRST_BLOCKS else FRAME_REACH
        if last + ahead > frames and not ended:
            return
        last = min(last, frames)
        is_end = ended and last == frames
        yield _Block(max(0, done - FRAME_REACH), done, last, min(last + ahead, frames), is_end)
        done = last


_NOTHING: Samples = np.zeros(0, np.float32)


def _frame_samples(sample_rate: int) -> tuple[int, int]:
    """Return the samples of a spectrum (an even number), and the samples from one to the next."""
    return 2 * round(WINDOW_SECONDS * sample_rate / 2), round(HOP_SECONDS * sample_rate)


def _check_rate(sample_rate: int) -> None:
    if sample_rate < MIN_SAMPLE_RATE:
        raise AudioError(
            f"audio of {sample_rate} Hz cannot carry the watermark", hint=f"resample it to {MIN_SAMPLE_RATE} Hz or more"
        )


@lru_cache(maxsize=8)
def _hann(window: int, device: torch.device) -> torch.Tensor:
    return torch.hann_window(window, device=device)


@lru_cache(maxsize=16)
def _window_weight(window: int, hop: int, frames: int) -> Samples:
    """Sum the squared windows of a number of frames. Only the last block has an unusual number."""
    squared, total = torch.hann_window(window).square().numpy(), np.zeros((frames - 1) * hop + window, np.float32)
    for frame in range(frames):
        total[frame * hop : frame * hop + window] += squared
    return total


def _add(carried: Samples, samples: Samples, offset: int) -> Samples:
    """Add two arrays; the second begins `-offset` samples before the first and ends after it."""
    total = samples[-offset:].copy()
    total[: len(carried)] += carried
    return total


@lru_cache(maxsize=8)
def _cuda_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the CUDA stream of the watermark, which does not wait for the model."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


class PerthNet(nn.Module):
    """Encoder and detector of the watermark, on levels of shape (batch, bins, frames)."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.encoder = _layers(weights, "encoder.layers")
        self.slow = _layers(weights, "decoder.slow_layers")
        self.normal = _layers(weights, "decoder.normal_layers")
        self.fast = _layers(weights, "decoder.fast_layers")

    def gain(self, levels: Tensor, is_frame: Tensor | None = None) -> Tensor:
        """Return the factors of the magnitudes that make the mark, shape (batch, marked bins, frames). `is_frame` of
        shape (batch, 1, frames) tells the frames of shorter clips from the padding after them."""
        is_marked = levels.mean(1, keepdim=True) > MARK_LEVEL
        x = levels[:, :MARKED_BINS].transpose(1, 2)
        # Convolutions as products, which take a third less time for so few frames.
        for weight, bias, taps in self._encoder_matrices:
            if is_frame is not None:  # a convolution reads zeros behind a clip, whatever its batch
                x = x * is_frame.transpose(1, 2)
            if taps > 1:
                x = F.pad(x, (0, 0, taps // 2, taps // 2)).unfold(1, taps, 1).transpose(2, 3)
            batch, frames = x.shape[:2]
            x = torch.addmm(bias, x.reshape(batch * frames, -1), weight).view(batch, frames, -1)
            if weight is not self._encoder_matrices[-1][0]:
                x = F.leaky_relu(x)
        change = x.transpose(1, 2) * is_marked
        return torch.pow(10.0, change * (RANGE_DB / 20))

    @cached_property
    def _encoder_matrices(self) -> list[tuple[Tensor, Any, int]]:
        """Weights (taps x inputs, outputs), biases and number of taps of the encoder's layers."""
        layers = [layer for layer in self.encoder if isinstance(layer, nn.Conv1d)]
        return [
            (layer.weight.permute(2, 1, 0).flatten(0, 1).contiguous(), layer.bias, layer.weight.shape[2])
            for layer in layers
        ]

    def score(self, levels: Tensor) -> Tensor:
        """Score whether clips are marked, about 0 to 1, by three networks at different tempos; shape (batch,)."""
        means = levels.mean(1, keepdim=True)
        is_heard = (means > DETECT_LEVEL * means.amax(2, keepdim=True)).float()
        frames, marks, weights = levels.shape[2], [], []
        for layers, tempo in ((self.slow, 1.25), (self.normal, 1.0), (self.fast, 0.75)):
            size = max(1, int(frames * tempo))
            stretched = F.interpolate(levels[:, :MARKED_BINS], size=size, mode="linear", align_corners=True)
            heard = F.interpolate(is_heard, size=size, mode="nearest")
            output = (layers(stretched) * heard).sum(2) / heard.sum(2).clamp(min=1)
            weights.append(output[:, 0])
            marks.append(output[:, 1])
        score = (torch.stack(marks, 1) * torch.stack(weights, 1).softmax(1)).sum(1).clamp(0, 1)
        heard_levels = (levels[:, :MARKED_BINS].mean(1, keepdim=True) * is_heard).sum(2) / is_heard.sum(2).clamp(min=1)
        return torch.where(heard_levels[:, 0] < MIN_BAND_LEVEL, 0.0, score)


def levels_of(spectra: Tensor, window: int) -> Tensor:
    """Return normalized levels of spectra of `window` samples."""
    magnitudes = spectra.abs().mul(FFT_SAMPLES / window).clamp(min=MIN_MAGNITUDE)
    return (20 * torch.log10(magnitudes) + 180) / RANGE_DB


@lru_cache(maxsize=4)
def load_perth(device: torch.device) -> PerthNet:
    """Load the network onto a device; it is kept for the next call."""
    file = perth_checkpoint()
    found = file_sha256(file)  # checked since the file is a pickle
    if found != CHECKPOINT_SHA256:
        raise OutputError(f"{file} is not the file that is known: its sha256 is {found}", hint=UNMARKED_HINT)
    weights = torch.load(file, map_location="cpu", weights_only=True, mmap=True)["model"]
    return PerthNet(weights).to(device).eval().requires_grad_(False)


def _layers(weights: Mapping[str, Tensor], prefix: str) -> nn.Sequential:
    modules: list[nn.Module] = []
    for number in range(7):
        weight, bias = weights[f"{prefix}.{number}.conv.weight"], weights[f"{prefix}.{number}.conv.bias"]
        outputs, inputs, taps = weight.shape
        layer = nn.Conv1d(inputs, outputs, taps, padding=taps // 2)
        layer.load_state_dict({"weight": weight, "bias": bias})
        modules += [layer, nn.LeakyReLU()] if number < 6 else [layer]
    return nn.Sequential(*modules)
