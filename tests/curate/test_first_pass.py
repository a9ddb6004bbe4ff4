"""First pass over one part: measures that need more than a clip's own samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from myna.audio.files import Samples, write_audio
from myna.curate.first_pass import run_first_pass
from myna.curate.models import CurationModels
from myna.curate.recordings import CURATION_RATE, Part
from myna.curate.settings import CurateSettings
from tests.curate.scripted import ScriptedRecogniser, make_recording


def test_a_hum_that_begins_in_a_clip_is_found_in_the_silence_after_it(tmp_path: Path) -> None:
    samples, sentences = make_recording(6)
    middle = (sentences[-1].start + sentences[-1].end) / 2
    hum = 0.02 * np.sin(2 * np.pi * 200 * np.arange(len(samples)) / CURATION_RATE).astype(np.float32)
    hum[: round(middle * CURATION_RATE)] = 0

    def gap_snrs(samples: Samples) -> list[float]:
        path = tmp_path / "talk.wav"
        write_audio(path, samples, CURATION_RATE)
        recogniser = ScriptedRecogniser(((path, tuple(sentences)),))
        spans = [(one.start, one.end) for one in sentences]
        models = CurationModels(lambda *_: spans, recogniser, recogniser)
        part = Part(0, round(1000 * len(samples) / CURATION_RATE), "hash", "talk.flac")
        table = run_first_pass(part, (samples * 32767).astype(np.int16), models, CurateSettings())
        return [row["gap_snr_db"] for row in table.to_pylist() if row["kind"] == "clip"]

    assert min(gap_snrs(samples)) > 40
    *clear, last = gap_snrs(samples + hum)
    assert min(clear) > 40
    assert last < 25
