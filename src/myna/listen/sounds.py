"""Speech, music and noise in a recording.

Speech is found by Silero v6, whose ONNX file comes in faster-whisper's wheel. Music is told from speech and noise by
inaSpeechSegmenter's network (Doukhan et al. 2018, here in plain torch): its input is 0.68 s of 21 log mel bands,
normalized as a whole. DeepFilterNet3 (Schröter et al. 2023, three ONNX networks over whole windows) gives a
speech-to-noise ratio: the power of its output over the power of what it removed. Music counts as noise then; the output
is only measured, and never trained on.
"""

import functools
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import soxr  # type: ignore[import-untyped]
import torch
from torch import nn
from torch.nn import functional as F

from myna.audio.files import LISTENING_RATE, FloatArray, Samples, as_mono_16khz
from myna.audio.signal_measures import SpeechSpan
from myna.core.errors import import_optional
from myna.listen.models import INSTALL, open_onnx, remake_hint
from myna.models.files import load_network

SPEECH_PROBABILITY, SILENCE_PROBABILITY = 0.5, 0.35
"""Probability at which speech begins, and below which it may end."""
MIN_GAP_SECONDS = 0.1
"""Silences shorter than this, in seconds, belong to the speech around them."""
PAD_SECONDS = 0.03
"""Seconds added at both ends of a span."""
VAD_WINDOW_SAMPLES, VAD_CONTEXT_SAMPLES = 512, 64
"""Samples of a window that has a probability, and of the context before it that the network sees."""
VAD_STATE_SIZE = 128
VAD_BATCH_WINDOWS = 1024
"""Windows per batch (32.8 s). The network's state goes on to the next batch, so that memory stays bounded."""


def voice_activity(samples: Samples, sample_rate: int) -> list[SpeechSpan]:
    """Return the stretches of speech in seconds, in order and without overlap."""
    wave = as_mono_16khz(samples, sample_rate)
    return speech_spans_of(speech_probabilities(wave), len(wave)) if len(wave) else []


def speech_probabilities(wave: Samples) -> npt.NDArray[np.float32]:
    """Return the probability of speech of each 32 ms of mono audio at 16 kHz."""
    import_optional("onnxruntime", INSTALL)
    session = import_optional("faster_whisper.vad", INSTALL).get_vad_model().session
    count = len(wave) // VAD_WINDOW_SAMPLES + 1
    state = {name: np.zeros((1, 1, VAD_STATE_SIZE), np.float32) for name in ("h", "c")}
    context = np.zeros(VAD_CONTEXT_SAMPLES, np.float32)
    probabilities = []
    for first in range(0, count, VAD_BATCH_WINDOWS):
        after = min(count, first + VAD_BATCH_WINDOWS)
        audio = wave[first * VAD_WINDOW_SAMPLES : after * VAD_WINDOW_SAMPLES]
        audio = np.pad(audio, (0, (after - first) * VAD_WINDOW_SAMPLES - len(audio)))
        joined = np.concatenate([context, audio])
        windows = np.lib.stride_tricks.sliding_window_view(joined, VAD_CONTEXT_SAMPLES + VAD_WINDOW_SAMPLES)[
            ::VAD_WINDOW_SAMPLES
        ]
        output, state["h"], state["c"] = session.run(None, {"input": np.ascontiguousarray(windows), **state})
        probabilities.append(output.reshape(-1))
        context = joined[-VAD_CONTEXT_SAMPLES:]
    return np.concatenate(probabilities)


def speech_spans_of(probabilities: npt.NDArray[np.float32], samples: int) -> list[SpeechSpan]:
    """Return the spans of speech by Silero's rule: a span ends at a silence that is long enough."""
    spans: list[tuple[int, int]] = []
    start = silent_from = None
    for window, probability in enumerate(probabilities.tolist()):
        position = window * VAD_WINDOW_SAMPLES
        if probability >= SPEECH_PROBABILITY:
            silent_from = None
            start = position if start is None else start
        elif start is not None and probability < SILENCE_PROBABILITY:
            silent_from = position if silent_from is None else silent_from
            if position - silent_from >= MIN_GAP_SECONDS * LISTENING_RATE:
                spans.append((start, silent_from))
                start = silent_from = None
    if start is not None and start < samples:
        spans.append((start, samples))
    pad = round(PAD_SECONDS * LISTENING_RATE)
    return [(max(0, start - pad) / LISTENING_RATE, min(samples, end + pad) / LISTENING_RATE) for start, end in spans]


MUSIC_WINDOW, MUSIC_HOP, MUSIC_FFT = 400, 160, 512
PREEMPHASIS = 0.97
MEL_BANDS, USED_BANDS = 24, 21
MEL_RANGE_HZ = (100.0, 8000.0)
PATCH_FRAMES = 68
PATCH_STEP_FRAMES = 10
"""Frames from one patch to the next. The network was made for 2; 10 take a fifth of the time, and suffice for a
share."""
CLASSES = ("speech", "music", "noise")
ACTIVE_ENERGY_RATIO = 0.03
"""Share of the mean energy below which a patch is quiet and left out."""
BATCH_PATCHES = 64
MUSIC_WINDOW_SECONDS = 60.0
"""Seconds of audio at once, which bounds the memory."""


class SpeechMusicNoiseNetwork(nn.Module):
    """Network from patches (batch, 68, 21) to probabilities of speech, music and noise (batch, 3)."""

    def __init__(self) -> None:
        super().__init__()
        convolutions = [((7, 4), 1, 64), ((3, 3), 64, 128), ((3, 3), 128, 128), ((3, 3), 128, 256)]
        self.layers = nn.ModuleList(nn.Conv2d(inputs, outputs, size) for size, inputs, outputs in convolutions)
        self.layers.extend(nn.Linear(256, 256) for _ in range(4))
        self.layers.append(nn.Linear(256, len(CLASSES)))

    @classmethod
    def open(cls, file: Path, device: str = "cpu") -> Self:
        return load_network(cls(), file, device, hint=remake_hint(file))

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        first, second, third, fourth, *dense, last = self.layers
        x = F.max_pool2d(F.pad(F.relu(first(patches[:, None])), (0, 0, 1, 1)), (4, 2))
        x = F.max_pool2d(F.pad(F.relu(third(F.relu(second(x)))), (0, 1, 0, 0)), 2)
        x = F.max_pool2d(F.relu(fourth(x)), (4, 1)).flatten(1)
        for layer in dense:
            x = F.relu(layer(x))
        return F.softmax(last(x), -1)

    @torch.inference_mode()
    def classify(self, samples: Samples, sample_rate: int) -> FloatArray:
        """Return the probabilities of each patch that is loud enough (patches x 3), one every 0.1 s."""
        wave, size = as_mono_16khz(samples, sample_rate), round(MUSIC_WINDOW_SECONDS * LISTENING_RATE)
        device = next(self.parameters()).device
        parts = [np.empty((0, len(CLASSES)), np.float32)]
        for first in range(0, max(1, len(wave)), size):
            patches = log_mel_patches(wave[first : first + size])
            batches = (patches[start : start + BATCH_PATCHES] for start in range(0, len(patches), BATCH_PATCHES))
            parts += [self(torch.from_numpy(batch).to(device)).cpu().numpy() for batch in batches]
        return np.concatenate(parts)

    def music_share(self, samples: Samples, sample_rate: int) -> float:
        """Return the mean probability of music over the parts with sound; 0 in silence."""
        probabilities = self.classify(samples, sample_rate)
        return float(probabilities[:, CLASSES.index("music")].mean()) if len(probabilities) else 0.0


def log_mel_patches(wave: Samples, step: int = PATCH_STEP_FRAMES) -> FloatArray:
    """Return normalised patches of log mel energies (patches, 68, 21) of mono audio at 16 kHz, without silent ones."""
    if len(wave) < MUSIC_WINDOW + (PATCH_FRAMES - 1) * MUSIC_HOP:
        wave = np.pad(wave, (0, MUSIC_WINDOW + (PATCH_FRAMES - 1) * MUSIC_HOP - len(wave)))
    frames = np.lib.stride_tricks.sliding_window_view(wave, MUSIC_WINDOW)[::MUSIC_HOP].astype(np.float32)
    frames = np.asarray(frames - PREEMPHASIS * np.concatenate([frames[:, :1], frames[:, :-1]], 1), np.float32)
    with np.errstate(divide="ignore"):
        energy = np.log((frames**2).sum(1))
        power = np.abs(np.fft.rfft(frames * np.hanning(MUSIC_WINDOW), MUSIC_FFT)).astype(np.float32) ** 2
        mels = np.log(power @ _mel_filters().T)[:, :USED_BANDS]
    patches = np.lib.stride_tricks.sliding_window_view(mels, PATCH_FRAMES, axis=0)[::step].transpose(0, 2, 1)
    finite = np.isfinite(energy)
    if not finite.any():
        return np.empty((0, PATCH_FRAMES, USED_BANDS), np.float32)
    loud = energy > energy[finite].mean() + np.log(ACTIVE_ENERGY_RATIO)
    active = np.lib.stride_tricks.sliding_window_view(loud, PATCH_FRAMES)[::step].mean(1) >= 0.5
    patches = patches[active & np.isfinite(patches).all((1, 2))]
    deviation = patches.std((1, 2), keepdims=True)
    normalized = (patches - patches.mean((1, 2), keepdims=True)) / np.maximum(deviation, 1e-6)
    return np.ascontiguousarray(normalized, np.float32)


@functools.cache
def _mel_filters() -> FloatArray:
    """Return triangular filters of unit area over 100-8000 Hz (24 x 257); each falling side lacks its last bin."""
    low, high = (2595 * np.log10(1 + hz / 700) for hz in MEL_RANGE_HZ)
    corners = 700 * (10 ** ((low + np.arange(MEL_BANDS + 2) * (high - low) / (MEL_BANDS + 1)) / 2595) - 1)
    bins = np.arange(MUSIC_FFT // 2 + 1) * LISTENING_RATE / MUSIC_FFT
    filters = np.zeros((MEL_BANDS, len(bins)), np.float32)
    for band, (left, centre, right) in enumerate(zip(corners, corners[1:], corners[2:], strict=False)):
        height = 2 / (right - left)
        first, middle, last = (int(np.floor(hz * MUSIC_FFT / LISTENING_RATE)) + 1 for hz in (left, centre, right))
        rising, falling = slice(first, middle), slice(middle, last - 1)
        filters[band, rising] = height / (centre - left) * (bins[rising] - left)
        filters[band, falling] = height / (right - centre) * (right - bins[falling])
    return filters


DENOISER_RATE = 48_000
FFT, HOP = 960, 480
ERB_BANDS, MIN_BAND_BINS = 32, 2
FILTERED_BINS, FILTER_FRAMES, LOOKAHEAD = 96, 5, 2
"""Bins and frames that the deep filter covers, and frames of lookahead of the filter and the convolutions."""
NORMALIZATION_DECAY = 0.99
"""Decay per frame of the running means of the features: one second."""
PARTS = ("enc", "erb_dec", "df_dec")
MAX_SNR_DB = 60.0
"""Ratio given if nothing was removed; its negative if everything was."""
SILENCE_ENERGY = 1e-6
"""Sum of squared samples below which a clip counts as silence."""
DENOISED_SECONDS = 30.0
"""Seconds of audio at once, which bounds the memory."""

ComplexArray = npt.NDArray[np.complex64]


class DeepFilterNet:
    def __init__(self, encoder: Any, erb_decoder: Any, filter_decoder: Any) -> None:
        self._encoder, self._erb_decoder, self._filter_decoder = encoder, erb_decoder, filter_decoder

    @classmethod
    def open(cls, folder: Path, threads: int = 0) -> Self:
        return cls(*(open_onnx(folder / f"deepfilternet3_{part}.onnx", threads) for part in PARTS))

    def snr_db(self, samples: Samples, sample_rate: int) -> float:
        """Return the decibels of speech over everything else, at most 60; NaN in silence."""
        wave = soxr.resample(samples, sample_rate, DENOISER_RATE)
        speech = noise = 0.0
        for start in range(0, max(1, len(wave)), round(DENOISED_SECONDS * DENOISER_RATE)):
            noisy = wave[start : start + round(DENOISED_SECONDS * DENOISER_RATE)]
            clean = _inverse_stft(self.enhance(_stft(noisy)))[: len(noisy)]
            speech += float((clean**2).sum())
            noise += float(((noisy - clean) ** 2).sum())
        if speech + noise < SILENCE_ENERGY:
            return float("nan")
        return float(np.clip(10 * np.log10(max(speech, 1e-12) / max(noise, 1e-12)), -MAX_SNR_DB, MAX_SNR_DB))

    def enhance(self, noisy: ComplexArray) -> ComplexArray:
        """Return the spectra of speech from the spectra of a noisy clip (frames, 481)."""
        decibels = 10 * np.log10((np.abs(noisy) ** 2) @ _erb_filters() + 1e-10)
        erb = (decibels - _running_mean(decibels, np.linspace(-60, -90, ERB_BANDS))) / 40
        low = noisy[:, :FILTERED_BINS]
        unit = low / np.sqrt(_running_mean(np.abs(low), np.linspace(0.001, 0.0001, FILTERED_BINS)))
        parts = np.stack([_shifted(unit.real), _shifted(unit.imag)])
        features = {"feat_erb": _shifted(erb)[None, None], "feat_spec": parts[None]}
        e0, e1, e2, e3, embedding, c0, _ = self._encoder.run(None, features)
        gains = self._erb_decoder.run(None, {"emb": embedding, "e3": e3, "e2": e2, "e1": e1, "e0": e0})[0][0, 0]
        raw = self._filter_decoder.run(["coefs"], {"emb": embedding, "c0": c0})[0][0]
        taps = raw.reshape(len(noisy), FILTERED_BINS, FILTER_FRAMES, 2)
        padded = np.pad(noisy[:, :FILTERED_BINS], ((FILTER_FRAMES - 1 - LOOKAHEAD, LOOKAHEAD), (0, 0)))
        clean = noisy * (gains @ (_erb_filters() > 0).T)
        filters = taps[..., 0] + 1j * taps[..., 1]
        clean[:, :FILTERED_BINS] = sum(padded[n : n + len(noisy)] * filters[..., n] for n in range(FILTER_FRAMES))
        return np.asarray(clean, np.complex64)


@functools.cache
def _erb_filters() -> FloatArray:
    """Return the averages over bands of equal rectangular bandwidth (481 x 32), each at least two bins wide."""
    step = 9.265 * np.log1p(DENOISER_RATE / 2 / (24.7 * 9.265)) / ERB_BANDS
    widths, previous, owed = [], 0, 0
    for band in range(1, ERB_BANDS + 1):
        hz = 24.7 * 9.265 * np.expm1(band * step / 9.265)
        edge = round(hz / (DENOISER_RATE / FFT))
        width = edge - previous - owed
        owed = max(0, MIN_BAND_BINS - width)
        widths.append(max(width, MIN_BAND_BINS))
        previous = edge
    widths[-1] += 1
    widths[-1] -= sum(widths) - (FFT // 2 + 1)
    filters = np.zeros((FFT // 2 + 1, ERB_BANDS), np.float32)
    start = 0
    for band, width in enumerate(widths):
        filters[start : start + width, band] = 1 / width
        start += width
    return filters


@functools.cache
def _window() -> npt.NDArray[np.float64]:
    return np.asarray(np.sin(np.pi / 2 * np.sin(np.pi * (np.arange(FFT) + 0.5) / FFT) ** 2))


def _stft(wave: Samples) -> ComplexArray:
    frames = -(-len(wave) // HOP) + 1
    padded = np.pad(wave, (HOP, frames * HOP - len(wave)))
    blocks = np.lib.stride_tricks.sliding_window_view(padded, FFT)[::HOP]
    return np.asarray(np.fft.rfft(blocks * _window()) / FFT, np.complex64)


def _inverse_stft(spectra: ComplexArray) -> FloatArray:
    halves = (np.fft.irfft(spectra) * FFT * _window()).reshape(len(spectra), 2, HOP)
    return np.asarray((halves[1:, 0] + halves[:-1, 1]).reshape(-1), np.float32)


def _running_mean(values: npt.NDArray[np.floating[Any]], initial: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    signal = import_optional("scipy.signal", INSTALL)
    decay = NORMALIZATION_DECAY
    means, _ = signal.lfilter([1 - decay], [1, -decay], values.astype(np.float64), axis=0, zi=decay * initial[None])
    return np.asarray(means)


def _shifted(features: npt.NDArray[np.floating[Any]]) -> FloatArray:
    return np.ascontiguousarray(np.pad(features[LOOKAHEAD:], ((0, LOOKAHEAD), (0, 0))), np.float32)
