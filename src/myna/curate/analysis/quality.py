"""Predicted quality: DNSMOS P.835 (signal, background, overall; 1 to 5) by one ONNX session, window by window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from myna.audio.files import Samples
from myna.curate.analysis.onnx import open_onnx
from myna.evaluate.dependencies import as_mono_16khz

WINDOW_SAMPLES = 144_160
"""9.01 s. Shorter clips are repeated up to it, longer ones covered by evenly spaced windows. The published code has a
window each second: its scores differed by 0.02 to 0.06 on four clips, at up to nine times the cost."""
CALIBRATIONS = {
    "dnsmos_sig": (-0.08397278, 1.22083953, 0.0052439),
    "dnsmos_bak": (-0.13166888, 1.60915514, -0.39604546),
    "dnsmos_ovrl": (-0.06766283, 1.11546468, 0.04602535),
}
"""Polynomials from the network's outputs to the scale of listeners, in the order of the outputs."""


class DNSMOSNetwork:
    def __init__(self, session: Any) -> None:
        self._session = session

    @classmethod
    def open(cls, file: Path, threads: int = 0) -> DNSMOSNetwork:
        return cls(open_onnx(file, threads))

    def score(self, samples: Samples, sample_rate: int) -> dict[str, float]:
        """Means over windows of 9 s; NaN for an empty clip."""
        wave = np.clip(as_mono_16khz(samples, sample_rate), -1, 1)
        if not len(wave):
            return dict.fromkeys(CALIBRATIONS, float("nan"))
        if len(wave) < WINDOW_SAMPLES:
            wave = np.resize(wave, WINDOW_SAMPLES)
        count = -(-len(wave) // WINDOW_SAMPLES)
        starts = np.linspace(0, len(wave) - WINDOW_SAMPLES, count).astype(int)
        windows = np.lib.stride_tricks.sliding_window_view(wave, WINDOW_SAMPLES)[starts]
        # One at a time: two at once take no less time, and twice the memory.
        raw = np.concatenate([self._session.run(None, {"input_1": window[None]})[0] for window in windows])
        scores = zip(CALIBRATIONS.items(), raw.T, strict=True)
        return {name: float(np.polyval(coefficients, values).mean()) for (name, coefficients), values in scores}
