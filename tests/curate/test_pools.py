"""Pools of workers: equal bytes from one process or several, and after processes were killed."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from myna.core.errors import DataError
from myna.core.pools import MAX_ATTEMPTS
from myna.curate.curation import run_curation
from myna.curate.models import CurationModels, OpenModels
from myna.curate.settings import ListenSettings
from tests.curate.scripted import Truth, contents, scripted_models, settings, write_recording

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Truth]:
    folder = tmp_path_factory.mktemp("raw")
    truth = {folder / f"{n}.flac": write_recording(folder / f"{n}.flac", 8, seed=n, first=8 * n) for n in range(3)}
    return folder, truth


@pytest.fixture(scope="module")
def expected(source: tuple[Path, Truth], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("whole") / "out"
    run_curation([source[0]], out, settings(out), workers=1, open_models=scripted_models(source[1]))
    return contents(out)


def _open_and_die(
    deaths: Path, times: int, open_models: OpenModels, listen: ListenSettings, threads: int
) -> CurationModels:
    """Open the models, but kill the process first until that happened `times` times, as a lack of memory does."""
    if len(list(deaths.iterdir())) < times:
        (deaths / str(os.getpid())).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return open_models(listen, threads)


def test_a_killed_worker_costs_nothing(source: tuple[Path, Truth], expected: dict[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "deaths").mkdir()
    models = functools.partial(_open_and_die, tmp_path / "deaths", 1, scripted_models(source[1]))
    run_curation([source[0]], tmp_path / "out", settings(tmp_path / "out"), workers=2, open_models=models)
    assert list((tmp_path / "deaths").iterdir())
    assert contents(tmp_path / "out") == expected


def test_a_worker_that_always_dies_is_given_up(source: tuple[Path, Truth], tmp_path: Path) -> None:
    (tmp_path / "deaths").mkdir()
    models = functools.partial(_open_and_die, tmp_path / "deaths", 99, scripted_models(source[1]))
    with pytest.raises(DataError, match=f"died {MAX_ATTEMPTS} times"):
        run_curation([source[0]], tmp_path / "out", settings(tmp_path / "out"), workers=2, open_models=models)


def _curate(source: Path, out: Path, truth: Truth) -> None:
    run_curation([source], out, settings(out), workers=1, open_models=scripted_models(truth))


def test_a_killed_driver_goes_on_where_it_was(
    source: tuple[Path, Truth], expected: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for done in (1, 2):
        process = multiprocessing.get_context("spawn").Process(target=_curate, args=(source[0], out, source[1]))
        process.start()
        while process.is_alive() and len(list(out.glob("parts/*.parquet"))) < done:
            time.sleep(0.01)
        process.kill()
        process.join()
    modified = {path: path.stat().st_mtime_ns for path in out.glob("parts/*.parquet")}
    assert modified
    _curate(source[0], out, source[1])
    assert all(path.stat().st_mtime_ns == time for path, time in modified.items()), "what was done is not done again"
    assert contents(out) == expected
