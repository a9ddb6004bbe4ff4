"""Numbers of the package resemble-perth itself, which tests/provenance holds our network to.

    python tools/watermark_fixture.py tests/provenance/perth_package.npz

Needs the package with all that it imports: resemble-perth, torchaudio, librosa, scipy, pyyaml and setuptools below 81.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

SAMPLE_RATE, SECONDS = 32_000, 1.6
KEPT = slice(20_000, 24_000)


def vowel(sample_rate: int = SAMPLE_RATE, seconds: float = SECONDS) -> np.ndarray:
    """A vowel of varying pitch with some noise: the same numbers everywhere."""
    time = np.arange(round(sample_rate * seconds)) / sample_rate
    phase = 2 * np.pi * np.cumsum(120 + 30 * np.sin(2 * np.pi * 1.3 * time)) / sample_rate
    tone = sum(np.sin(harmonic * phase) / harmonic for harmonic in range(1, 30))
    noise = np.random.default_rng(0).standard_normal(len(time))
    signal: np.ndarray = (0.1 * tone * (1 + 0.5 * np.sin(2 * np.pi * 3 * time)) + 0.005 * noise).astype(np.float32)
    return signal


def main(out: Path) -> None:
    from perth import PerthImplicitWatermarker  # type: ignore[import-not-found]

    package, signal = PerthImplicitWatermarker(), vowel()
    marked = package.apply_watermark(signal, SAMPLE_RATE)
    scores = [float(package.get_watermark(clip, SAMPLE_RATE, round=False)) for clip in (signal, marked)]
    # 0 and 1 say little of a network: half a mark is in between.
    halves = [
        float(package.get_watermark(signal + part * (marked - signal), SAMPLE_RATE, round=False))
        for part in (0.3, 0.4, 0.5)
    ]
    np.savez_compressed(out, marked=marked[KEPT].astype(np.float32), scores=scores, halves=halves)
    print(scores, halves)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
