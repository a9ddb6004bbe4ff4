"""Forecasts from a sample of all recordings, without files left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from myna.curate.curation import PIECE_SECONDS, SAMPLE_SECONDS, forecast, sample_pieces
from myna.curate.settings import load_curate_settings
from tests.curate.scripted import scripted_models, write_recording


def test_pieces_are_drawn_over_everything_and_make_ten_minutes() -> None:
    lengths = {Path("short"): 30.0, Path("book"): 36_000.0, Path("talk"): 3600.0}
    pieces = sample_pieces(lengths)
    assert sum(end - start for _, start, end in pieces) == pytest.approx(SAMPLE_SECONDS)
    assert all(0 <= start < end <= lengths[path] for path, start, end in pieces)
    spread = [start for path, start, _ in pieces if path == Path("book")]
    assert max(spread) - min(spread) > 15_000
    assert len(pieces) == SAMPLE_SECONDS / PIECE_SECONDS and pieces == sample_pieces(lengths)
    assert sample_pieces({Path("short"): 30.0}) == [(Path("short"), 0.0, 30.0)]


def test_a_short_source_is_its_own_sample(tmp_path: Path) -> None:
    path = tmp_path / "raw" / "talk.wav"
    known = scripted_models({path: write_recording(path, 6)})
    (tmp_path / "raw" / "broken.mp3").write_text("no sound")
    settings = load_curate_settings(None, ["keep.min_bandwidth_hz=0"])
    result = forecast([tmp_path / "raw"], settings, workers=1, open_models=known)
    assert result.sampled_seconds == pytest.approx(result.seconds, abs=0.01)
    assert 0.5 * result.seconds < result.kept_seconds < result.seconds and result.work_seconds > 0
    assert list(result.dropped) == ["no speech"] and "broken.mp3" in result.notes[0]
    assert sorted(one.name for one in tmp_path.rglob("*")) == ["broken.mp3", "raw", "talk.wav"]
