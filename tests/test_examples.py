"""The notebook, the README's commands and the guide to Python run as written, with fewer steps and a small model."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from myna.audio.files import write_audio
from tests.command_line import run_command
from tests.tone_corpus import REFERENCE, SAMPLE_RATE, tone_speech, write_recordings

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "first_voice.ipynb"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON_GUIDE = (ROOT / "docs" / "guides" / "python.md").read_text(encoding="utf-8")
LAYOUTS_GUIDE = (ROOT / "docs" / "guides" / "data-layouts.md").read_text(encoding="utf-8")
LAYOUT_FILES = {
    "ljspeech": {"lj/metadata.csv": 1},
    "table": {"table/clips.csv": 0},
    "transcripts": {"vi-corpus/prompts.txt": 1},
    "metadata_json": {"vi/metadata.json": 1},
    "chatml": {"chatml/train.json": 0},
    "ms_swift": {"swift/train.jsonl": 0},
    "scored_jsonl": {"learners/scores.jsonl": 0},
    "myna": {"own/manifest.jsonl": 0},
}
"""Files of the layouts, and which code block of their section shows them, not counting commands."""
LAYOUT_RECORDINGS = (
    *("recordings/marta/0001.wav", "recordings/marta/0002.wav", "lj/wavs/LJ-1.wav", "lj/wavs/LJ-2.wav", "a.wav"),
    *("table/clips/a.wav", "table/clips/b.wav", "vi/a.wav", "vi/b.wav", "chatml/clips/ref.wav", "chatml/clips/a.wav"),
    *("swift/clips/ref.wav", "swift/clips/a.wav", "learners/clips/a.wav", "own/clips/a.wav", "own/clips/b.wav"),
    *("vi-corpus/waves/SPK01/SPK01_R1.wav", "vi-corpus/waves/SPK02/SPK02_R1.wav"),
)
LAYOUT_TEXTS = {
    "recordings/marta/0001.txt": "Good morning.",
    "recordings/marta/0002.txt": "What a fine day.",
    "a.txt": "Good morning.",
    "vi/a.txt": "Xin chào.",
}
NEEDED_EXTRAS = {"speak": {"mark"}, "serve": {"mark", "serve"}}
"""Extras without which a command of the README stops. The environment of the tests has them all."""
TINY_TRAINING = ("model.source=tiny", "model.check_pretrained=false", "train.epochs=null", "train.steps=2")
REFERENCE_LENGTH = "data.reference_seconds=[0.2,10]"


def commands(heading: str) -> list[str]:
    """Return the commands of a section of the README, without comments; lines ending in a backslash are joined."""
    section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", README, re.DOTALL | re.MULTILINE)
    assert section, heading
    text = "".join(re.findall(r"```bash\n(.*?)```", section[1], re.DOTALL)).replace("\\\n", "")
    return [line.partition(" #")[0].strip() for line in text.splitlines()]


def as_started(command: str) -> str:
    """Return the command with the Python of the tests in place of the installed `myna`."""
    return re.sub(r"^myna ", f"{shlex.quote(sys.executable)} -m myna ", command)


def run(command: str, folder: Path) -> None:
    result = subprocess.run(as_started(command), shell=True, cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"


@pytest.mark.slow
def test_the_notebook_runs_and_speaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    namespace: dict[str, Any] = {}
    for number, cell in enumerate(cells):
        assert not cell["outputs"], "the notebook is committed without outputs"
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), namespace)
    assert (tmp_path / "good-morning.wav").stat().st_size > 10_000
    assert "<audio" in namespace["speech"]._repr_html_()


def test_the_install_commands_name_extras_and_targets_that_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    asked = set(",".join(re.findall(r"\[([a-z,]+)\]\"", " ".join(commands("Install")))).split(","))
    listed = set(re.findall(r"`(\w+)`", README.partition("Other extras:")[2].partition("\n\n")[0]))
    assert asked and listed and not asked & listed
    assert asked | listed == extras.keys() - {"dev", "browser", "corpus"}  # which only the repository needs
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"make ([a-z-]+)", " ".join(commands("Install") + commands("Try it")))
    assert targets == ["setup", "demo"] and all(f"\n{target}:" in makefile for target in targets)


def test_the_install_commands_bring_what_the_commands_of_the_readme_need() -> None:
    needed = set().union(*(NEEDED_EXTRAS.get(name, set()) for name in re.findall(r"^myna (\w+)", README, re.MULTILINE)))
    assert needed == {"mark", "serve"}
    for command in (line for line in commands("Install") if "pip install" in line):
        (extras,) = re.findall(r"\[([a-z,]+)\]", command)
        assert needed <= set(extras.split(",")), command


@pytest.mark.slow
def test_the_demo_of_the_readme_writes_its_page(tmp_path: Path) -> None:
    assert "`myna demo`" not in commands("Try it")[0]
    run("myna demo --set train.steps=2 --set train.evaluate_every=2", tmp_path)
    assert (tmp_path / "demo" / "report.html").stat().st_size > 100_000


@pytest.mark.slow
def test_the_commands_for_a_voice_prepare_train_speak_and_serve(tmp_path: Path) -> None:
    """The released model is replaced by a tiny random one, and the training has two steps."""
    prepare, train, speak, serve = commands("Your voice, on a 24 GB GPU")
    write_recordings(tmp_path / "recordings")
    shutil.copy(tmp_path / "recordings" / "robin" / "robin-0.wav", tmp_path / "reference.wav")
    run("myna model tiny --out tiny", tmp_path)
    run(prepare.replace("bosonai/higgs-audio-v2-generation-3B-base", "tiny"), tmp_path)
    settings = shlex.join(word for setting in (*TINY_TRAINING, REFERENCE_LENGTH) for word in ("--set", setting))
    run(f"{train} {settings}", tmp_path)
    run(f"{speak.replace('What is said in it.', REFERENCE)} --max-seconds 0.4", tmp_path)
    assert (tmp_path / "morning.wav").is_file()
    with subprocess.Popen(
        f"exec {as_started(serve)} --port 0 --device cpu --streams 1 --positions 512",
        shell=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as server:
        assert server.stdout is not None
        output, deadline = "", time.monotonic() + 120
        while "Ctrl+C ends it" not in output and time.monotonic() < deadline and server.poll() is None:
            output += server.stdout.readline()
        server.terminate()
    assert "Ctrl+C ends it" in output, output


@pytest.mark.slow
def test_the_python_of_the_guide_speaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_recordings(tmp_path / "recordings")
    shutil.copy(tmp_path / "recordings" / "heron" / "heron-0.wav", tmp_path / "ref.wav")
    block = re.findall(r"```python\n(.*?)```", PYTHON_GUIDE, re.DOTALL)[0]
    fewer = 'steps=2, settings={"data.reference_seconds": [0.2, 10]}'
    for text, instead in (("steps=60", fewer), ("...", REFERENCE)):
        assert text in block
        block = block.replace(text, instead, 1)
    exec(compile(block, "python.md", "exec"), {})
    assert (tmp_path / "out.wav").is_file()


def test_the_examples_of_the_guide_to_data_layouts_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sections = re.split(r"^## ", LAYOUTS_GUIDE, flags=re.MULTILINE)[1:]
    blocks = {section.split()[0]: re.findall(r"```(\w*)\n(.*?)```", section, re.DOTALL) for section in sections}
    for number, name in enumerate(LAYOUT_RECORDINGS):
        write_audio(tmp_path / name, tone_speech("good morning my dear friend", 200.0 + 10 * number), SAMPLE_RATE)
    files = dict(LAYOUT_TEXTS)
    for layout, shown in LAYOUT_FILES.items():
        samples = [text for language, text in blocks[layout] if language != "bash"]
        files |= {name: samples[number] for name, number in shown.items()}
    for name, text in files.items():
        Path(name).write_text(text, encoding="utf-8")
    for layout, folder in (("webdataset", "shards"), ("hf", "hf")):
        Path(folder).mkdir()
        (program,) = (text for language, text in blocks[layout] if language == "python")
        exec(compile(program, f"data-layouts.md, {layout}", "exec"), {})
    imported = set()
    for layout, parts in blocks.items():
        lines = "".join(text for language, text in parts if language == "bash").splitlines()
        for command in (line for line in lines if line.startswith("myna import") and layout != "speechocean"):
            result = run_command(shlex.split(command)[1:])
            assert result.exit_code == 0 and "0 rejected" in result.output, f"{command}\n{result.output}"
            imported.add(layout)
    assert imported == blocks.keys() - {"speechocean"}
