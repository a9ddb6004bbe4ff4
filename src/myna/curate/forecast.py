"""Forecast of a curation from a sample: ten minutes of the recordings, curated in a temporary folder."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from myna.audio.files import AudioFileError, probe, read_audio, write_audio
from myna.core.errors import DataError
from myna.core.progress import ProgressCallback, silent
from myna.curate.models import CurationModels
from myna.curate.recordings import CURATION_RATE, find_recordings
from myna.curate.runner import run_curation
from myna.curate.settings import CurateSettings
from myna.curate.worker import OpenModels, default_workers

SAMPLE_SECONDS = 600.0
PIECE_SECONDS = 120.0
SEED = 0


@dataclass(frozen=True, slots=True)
class CurationForecast:
    """What a sample says of all recordings."""

    seconds: float
    sampled_seconds: float
    kept_seconds: float
    """Of all recordings, if they are like the sample."""
    dropped: dict[str, float]
    """Share of the sample by reason."""
    work_seconds: float
    """That all recordings would take on this machine."""
    notes: tuple[str, ...] = ()


def forecast(
    sources: Sequence[Path],
    settings: CurateSettings,
    *,
    workers: int | None = None,
    open_models: OpenModels = CurationModels.open,
    progress: ProgressCallback = silent,
) -> CurationForecast:
    """Curate pieces of two minutes, drawn evenly over all recordings, and extrapolate."""
    with tempfile.TemporaryDirectory(prefix="myna-forecast-") as scratch:
        folder = Path(scratch)
        lengths, notes = {}, []
        for file in find_recordings(sources, out=folder):
            try:
                lengths[file.path] = probe(file.path).seconds
            except AudioFileError as error:
                notes.append(error.what)
        total = sum(lengths.values())
        sampled = 0.0
        for number, (path, start, end) in enumerate(sample_pieces(lengths)):
            try:
                samples = read_audio(path, sample_rate=CURATION_RATE, span=(start, end))
            except AudioFileError as error:
                notes.append(error.what)
                continue
            write_audio(folder / "sample" / f"{number:02}.flac", samples, CURATION_RATE)
            sampled += len(samples) / CURATION_RATE
        if not sampled:
            raise DataError("no recording could be read", hint="; ".join(notes) or "name other files")
        began = time.monotonic()
        processes = workers or default_workers(settings.listen.device)
        result = run_curation(
            [folder / "sample"],
            folder / "curated",
            settings,
            workers=processes,
            open_models=open_models,
            progress=progress,
        )
        took = time.monotonic() - began
    return CurationForecast(
        total,
        sampled,
        result.kept_seconds / result.seconds * total,
        {name: seconds / result.seconds for name, seconds in result.dropped.items()},
        took / sampled * total,
        tuple(notes),
    )


def sample_pieces(lengths: dict[Path, float]) -> list[tuple[Path, float, float]]:
    """Spans of recordings, up to ten minutes together; everything where there is no more than that."""
    total = sum(lengths.values())
    if total <= SAMPLE_SECONDS:
        return [(path, 0.0, seconds) for path, seconds in lengths.items()]
    rng = random.Random(SEED)
    count = int(SAMPLE_SECONDS // PIECE_SECONDS)
    pieces = []
    for number in range(count):
        # One in each equal share of the whole, wherever in it.
        at = total * (number + rng.random()) / count
        for path, seconds in lengths.items():
            if at < seconds:
                start = max(0.0, min(at, seconds - PIECE_SECONDS))
                pieces.append((path, start, min(seconds, start + PIECE_SECONDS)))
                break
            at -= seconds
    return sorted(set(pieces))
