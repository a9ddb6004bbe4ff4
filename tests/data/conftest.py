from pathlib import Path

import numpy as np
import pytest

from myna.audio.files import write_audio

SECONDS = 0.25
RATE = 8_000


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Eight tiny recordings with different noise."""
    folder = tmp_path_factory.mktemp("clips")
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, (8, round(SECONDS * RATE))).astype(np.float32)
    for number, samples in enumerate(noise):
        write_audio(folder / f"{number}.wav", samples, RATE)
    return sorted(folder.iterdir())
