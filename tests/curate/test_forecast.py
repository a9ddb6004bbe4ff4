"""Forecasts from a sample of all recordings, without files left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from myna.audio.files import probe
from myna.curate.curation import PIECE_SECONDS, SAMPLE_SECONDS, forecast, run_curation, sample_pieces
from myna.curate.models import CurationModels
from myna.curate.settings import load_curate_settings
from tests.curate.scripted import ScriptedRecogniser, contents, find_speech, scripted_models, write_recording


def test_pieces_are_drawn_over_everything_and_make_ten_minutes() -> None:
    lengths = {Path("short"): 30.0, Path("book"): 36_000.0, Path("talk"): 3600.0}
    pieces = sample_pieces(lengths)
    assert sum(end - start for _, start, end in pieces) == pytest.approx(SAMPLE_SECONDS)
    assert all(0 <= start < end <= lengths[path] for path, start, end in pieces)
    spread = [start for path, start, _ in pieces if path == Path("book")]
    assert max(spread) - min(spread) > 15_000
    assert len(pieces) == SAMPLE_SECONDS / PIECE_SECONDS and pieces == sample_pieces(lengths)


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


def test_a_curation_goes_on_from_what_a_dry_run_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run over five minutes took three of them, and the curation after it began anew."""
    path, out = tmp_path / "raw" / "talk.wav", tmp_path / "raw" / "out"
    known = scripted_models({path: write_recording(path, 6)})
    settings = load_curate_settings(None, ["keep.min_bandwidth_hz=0"])
    predicted = forecast([tmp_path / "raw"], settings, out=out, workers=1, open_models=known)
    assert not (out / "segments.parquet").exists() and not (out / "clips").exists()

    def refuse(*_: object) -> None:
        raise AssertionError("the recording is listened to again")

    monkeypatch.setattr(ScriptedRecogniser, "transcribe_words_batch", refuse)
    result = run_curation([tmp_path / "raw"], out, settings, workers=1, open_models=known)
    assert result.kept_seconds == pytest.approx(predicted.kept_seconds, abs=0.01) and result.clips
    monkeypatch.undo()
    fresh = run_curation([path], tmp_path / "fresh", settings, workers=1, open_models=known)
    assert contents(fresh.folder) == contents(out)


def test_a_forecast_heeds_the_limit(tmp_path: Path) -> None:
    paths = [tmp_path / "raw" / name for name in ("a.wav", "b.wav")]
    known = scripted_models({path: write_recording(path, 3, seed=n, first=10 * n) for n, path in enumerate(paths)})
    settings = load_curate_settings(None, ["keep.min_bandwidth_hz=0"])
    result = forecast([tmp_path / "raw"], settings, limit=1, workers=1, open_models=known)
    assert result.seconds == pytest.approx(probe(paths[0]).seconds)


def test_without_a_recogniser_the_reason_is_told(tmp_path: Path) -> None:
    """The threshold keep.max_cer was blamed, and `myna prepare` of no clip advised."""
    path = tmp_path / "raw" / "talk.wav"
    write_recording(path, 3)
    settings = load_curate_settings(None, ["keep.min_bandwidth_hz=0", "listen.asr=none"])
    result = run_curation(
        [tmp_path / "raw"], tmp_path / "out", settings, workers=1, open_models=lambda *_: CurationModels(find_speech)
    )
    assert not result.clips and "without a recogniser" in result.notes[0] and "--asr base" in result.notes[1]
    assert not any("max_cer" in note for note in result.notes)
