"""The wheel alone, in an empty folder: it holds the whole package, and its commands need nothing of the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.tone_corpus import REFERENCE, write_recordings

ROOT = Path(__file__).parents[1]
REPOSITORY_ONLY = re.compile(r"\bmake [a-z]|\b(?:tests|docs|tools|training|benchmarks)/")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheel built from a copy of the sources, without a network."""
    folder = tmp_path_factory.mktemp("sources")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    words = ["pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", "wheels", "."]
    built = subprocess.run([sys.executable, "-m", *words], cwd=folder, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    [wheel] = (folder / "wheels").glob("*.whl")
    return wheel


@pytest.mark.slow
def test_the_wheel_holds_the_recipes_and_every_other_file_of_the_package(wheel: Path) -> None:
    files = set(zipfile.ZipFile(wheel).namelist())
    listed = subprocess.run(["git", "ls-files", "src/myna"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = {name.removeprefix("src/") for name in listed.stdout.split() if (ROOT / name).is_file()}
    assert len(tracked) > 150
    assert not tracked - files


@pytest.mark.slow
def test_a_wheel_in_an_empty_folder_prepares_trains_and_speaks(wheel: Path, tmp_path: Path) -> None:
    site, work = tmp_path / "site", tmp_path / "work"
    install = ["pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run([sys.executable, "-m", *install], check=True)
    work.mkdir()
    write_recordings(tmp_path / "all")
    recordings = work / "recordings" / "robin"
    recordings.mkdir(parents=True)
    for number in (0, 1):
        for suffix in (".wav", ".txt"):
            shutil.copy(tmp_path / "all" / "robin" / f"robin-{number}{suffix}", recordings)
    environment = os.environ | {"PYTHONPATH": str(site), "MYNA_HOME": str(tmp_path / "home")}

    def run(*words: str) -> str:
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        assert not REPOSITORY_ONLY.search(done.stdout + done.stderr), f"{words}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    assert Path(run("-c", "import myna; print(myna.__file__)").strip()).is_relative_to(site)
    assert "higgs_v2_lora_24gb" in run("-m", "myna", "recipes")
    run("-m", "myna", "--help")
    run("-m", "myna", "prepare", "recordings", "--out", "data", "--model", "fledgling")
    settings = ("train.steps=2", "train.epochs=null", "data.reference_seconds=[0.2,10]", "model.check_pretrained=false")
    sets = [word for setting in ("model.source=fledgling", *settings) for word in ("--set", setting)]
    run("-m", "myna", "train", "higgs_v2_lora_24gb", "--data", "data", "--out", "runs/robin", *sets)
    reference = ("--reference", "recordings/robin/robin-0.wav", "--reference-text", REFERENCE)
    run(
        "-m",
        "myna",
        "speak",
        "Good morning.",
        "--run",
        "runs/robin",
        *reference,
        "--max-seconds",
        "1",
        "--out",
        "a.wav",
    )
    assert (work / "a.wav").stat().st_size > 1000
    assert "marked" in run("-m", "myna", "detect", "a.wav")
