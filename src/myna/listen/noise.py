"""Speech-to-noise ratio by DeepFilterNet3: the power of its output over the power of what it removed.

Music counts as noise. The three ONNX networks of DeepFilterNet3 (Schröter et al. 2023) run over whole windows; the
features and the deep filter are computed here. The output is only measured, and never trained on.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import soxr  # type: ignore[import-untyped]

from myna.audio.files import Samples
from myna.core.errors import import_optional
from myna.listen.weights import INSTALL, open_onnx

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
WINDOW_SECONDS = 30.0
"""Seconds of audio at once, which bounds the memory."""

ComplexArray = npt.NDArray[np.complex64]
FloatArray = npt.NDArray[np.float32]


class DeepFilterNet:
    def __init__(self, encoder: Any, erb_decoder: Any, filter_decoder: Any) -> None:
        self._encoder, self._erb_decoder, self._filter_decoder = encoder, erb_decoder, filter_decoder

    @classmethod
    def open(cls, folder: Path, threads: int = 0) -> DeepFilterNet:
        return cls(*(open_onnx(folder / f"deepfilternet3_{part}.onnx", threads) for part in PARTS))

    def snr_db(self, samples: Samples, sample_rate: int) -> float:
        """Return the decibels of speech over everything else, at most 60; NaN in silence."""
        wave = soxr.resample(samples, sample_rate, DENOISER_RATE)
        speech = noise = 0.0
        for start in range(0, max(1, len(wave)), round(WINDOW_SECONDS * DENOISER_RATE)):
            noisy = wave[start : start + round(WINDOW_SECONDS * DENOISER_RATE)]
            clean = _inverse_stft(self.enhance(_stft(noisy)))[: len(noisy)]
            speech += float((clean**2).sum())
            noise += float(((noisy - clean) ** 2).sum())
        if speech + noise < SILENCE_ENERGY:
            return float("nan")
        return float(np.clip(10 * np.log10(max(speech, 1e-12) / max(noise, 1e-12)), -MAX_SNR_DB, MAX_SNR_DB))

    def enhance(self, noisy: ComplexArray) -> ComplexArray:
        """Return the spectra of speech from the spectra of a noisy clip (frames, 481)."""
        power = (np.abs(noisy) ** 2) @ _erb_filters()
        erb = _running_mean_normalized(10 * np.log10(power + 1e-10))
        low = _unit_normalized(noisy[:, :FILTERED_BINS])
        parts = np.stack([_shifted(low.real), _shifted(low.imag)])
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


def _running_mean_normalized(decibels: FloatArray) -> FloatArray:
    means = _running_mean(decibels, np.linspace(-60, -90, ERB_BANDS))
    return np.asarray((decibels - means) / 40, np.float32)


def _unit_normalized(spectra: ComplexArray) -> ComplexArray:
    means = _running_mean(np.abs(spectra), np.linspace(0.001, 0.0001, FILTERED_BINS))
    return np.asarray(spectra / np.sqrt(means), np.complex64)


def _running_mean(values: npt.NDArray[np.floating[Any]], initial: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    signal = import_optional("scipy.signal", INSTALL)
    decay = NORMALIZATION_DECAY
    means, _ = signal.lfilter([1 - decay], [1, -decay], values.astype(np.float64), axis=0, zi=decay * initial[None])
    return np.asarray(means)


def _shifted(features: FloatArray) -> FloatArray:
    return np.ascontiguousarray(np.pad(features[LOOKAHEAD:], ((0, LOOKAHEAD), (0, 0))), np.float32)
