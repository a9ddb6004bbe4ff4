"""The Python API on a tiny real model: what the commands do, as functions that print nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import myna
from myna.audio.files import read_audio
from tests.tone_corpus import LINES, REFERENCE, recipe, write_recordings

Calls = list[tuple[str, int, int | None]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recordings of two speakers and a tiny model."""
    folder = tmp_path_factory.mktemp("api")
    write_recordings(folder / "recordings")
    myna.make_tiny(folder / "model")
    return folder


@pytest.fixture(scope="module")
def data(folder: Path) -> myna.DataFolder:
    return myna.prepare(folder / "recordings", folder / "prepared", model=str(folder / "model"), device="cpu")


@pytest.fixture(scope="module")
def run(folder: Path, data: myna.DataFolder) -> myna.Run:
    tree = recipe(folder)
    tree["data"] |= {"train": str(data.folder)}
    return myna.train(tree, steps=2, out=folder / "run")


def test_everything_public_is_there_and_documented() -> None:
    for name in set(myna.__all__) - {"ProgressCallback"}:
        assert getattr(myna, name).__doc__, name
    assert set(myna.__all__) <= set(dir(myna))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        getattr(myna, "nothing")  # noqa: B009


@pytest.mark.parametrize("first", ["functions", "modules"])
def test_functions_keep_their_names_when_all_modules_are_imported(first: str) -> None:
    """Packages have the names of some functions: train, curate, evaluate."""
    code = (
        "import importlib, pkgutil, sys, types, myna\n"
        "names = [module.name for module in pkgutil.walk_packages(myna.__path__, 'myna.')]\n"
        "if sys.argv[1] == 'functions': [getattr(myna, name) for name in myna.__all__]\n"
        "for name in names:\n"
        "    if 'kernel' not in name and not name.endswith(('.cuda', '__main__', 'ray_app')):\n"
        "        importlib.import_module(name)\n"
        "import myna.train.loop, myna.evaluate.metrics, myna.curate.settings\n"
        "for name in set(myna.__all__) - {'ProgressCallback'}:\n"
        "    value = getattr(myna, name)\n"
        "    assert not isinstance(value, types.ModuleType) and value.__name__ == name, name\n"
        "print(len(names))"
    )
    words = [sys.executable, "-c", code, first]
    result = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 100


def test_type_checkers_see_every_public_name() -> None:
    source = Path(myna.__file__).read_text(encoding="utf-8")
    lines = re.findall(r"^    from myna\.([\w.]+) import ([\w, ]+)$", source, re.MULTILINE)
    seen = {name: module for module, names in lines for name in names.split(", ")}
    assert seen.keys() == set(myna.__all__) and len(myna.__all__) == len(seen)
    assert seen == myna._PLACES


def test_prepare_reports_and_is_silent(
    folder: Path, data: myna.DataFolder, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    calls: Calls = []
    again = myna.prepare(
        folder / "recordings",
        tmp_path / "prepared",
        model=str(folder / "model"),
        device="cpu",
        progress=lambda *call: calls.append(call),
    )
    assert again.utterances == data.utterances > 0 and again.encoded > 0 and again.rejected == 0
    assert {stage for stage, _, _ in calls} == {"importing", "encoding"}
    assert calls[-1][1] == calls[-1][2]
    assert "audio-hours/hour" in again.notes[-1]
    assert capfd.readouterr() == ("", "")


def test_training_takes_a_tree_a_recipe_or_a_file_and_shortcuts(folder: Path, data: myna.DataFolder) -> None:
    tree = recipe(folder)
    given = {"data": data, "steps": 1, "settings": {"train.evaluate_every": 1, "adapt.rank": 2}}
    path = folder / "recipe.yaml"
    path.write_text(__import__("yaml").safe_dump(tree))
    runs = [
        myna.train(start, out=folder / f"run-{number}", **given)  # type: ignore[arg-type]
        for number, start in enumerate((tree, myna.load_recipe(path), path))
    ]
    assert len({str(run.recipe) for run in runs}) == 1 and all(run.is_finished for run in runs)
    assert runs[0].recipe.adapt.rank == 2 and runs[0].recipe.data.train == data.folder.absolute()
    with pytest.raises(myna.MynaError, match=r"data\.train"):
        myna.train(model=str(folder / "model"), steps=1, out=folder / "nowhere")


def test_progress_of_training_is_told_step_by_step(folder: Path, data: myna.DataFolder) -> None:
    calls: Calls = []
    myna.train(recipe(folder), data=data, steps=2, out=folder / "told", progress=lambda *call: calls.append(call))
    assert calls == [("training", 0, 2), ("training", 1, 2), ("training", 2, 2)]


def test_a_run_speaks_and_the_speech_is_saved(folder: Path, run: myna.Run, tmp_path: Path) -> None:
    voice = myna.load(run, device="cpu")
    reference = folder / "recordings" / "robin" / "robin-0.wav"
    speech = voice.speak(LINES[0], reference=reference, reference_text=REFERENCE, max_seconds=0.4, temperature=0)
    speech.save(tmp_path / "out.wav")
    saved = read_audio(tmp_path / "out.wav", sample_rate=voice.sample_rate)
    assert len(saved) == len(speech.samples) and speech.seconds == pytest.approx(len(saved) / voice.sample_rate)
    assert np.array_equal(
        speech.codes,
        myna.load(run.folder, device="cpu")
        .speak(LINES[0], reference=[reference], reference_text=[REFERENCE], max_seconds=0.4, temperature=0)
        .codes,
    )
    untuned = myna.load(folder / "model", device="cpu").speak("hi", max_seconds=0.2)
    assert untuned.sample_rate == voice.sample_rate
    with pytest.raises(myna.MynaError, match="1 references but 2 reference texts"):
        voice.speak("hi", reference=reference, reference_text=[REFERENCE, REFERENCE])


def test_importing_it_brings_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "numpy", "pydantic", "rich", "cyclopts")
    probe = f"import sys, myna; sys.exit(', '.join(name for name in {heavy} if name in sys.modules) or 0)"
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_long_texts_and_takes(folder: Path) -> None:
    voice = myna.load(folder / "model", device="cpu")
    text = "The wind blew over the hills all night, and in the morning the river had risen above its banks. " * 6
    speech = voice.speak(text, max_seconds=0.2, seed=1)
    assert speech.finish_reason == "length" and len(speech.warnings) > 2
    stream = voice.stream(text, max_seconds=0.2, seed=1)
    assert np.array_equal(np.concatenate(list(stream)), speech.samples)
    assert stream.warnings == speech.warnings
    takes = voice.speak_takes("hi", 2, max_seconds=0.4, seed=3)
    for number, take in enumerate(takes):
        assert np.array_equal(take.codes, voice.speak("hi", max_seconds=0.4, seed=3 + number).codes)
