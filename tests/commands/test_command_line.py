"""The door: every command explains itself, and every error a person can act on says how, without a traceback."""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import myna
from myna import __version__
from myna.commands import FAMILIES, PANELS, build_app, main
from myna.commands.options import COMMANDS
from myna.core.errors import MynaError
from tests.command_line import run_command

Complain = Callable[..., str]


APP = build_app()
NAMES = [*COMMANDS, *FAMILIES]


@pytest.fixture
def complain(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Complain:
    """Run a command that must fail in an empty folder, and return its error as one line."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> str:
        monkeypatch.setattr(sys, "argv", ["myna", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            main()
        said = capsys.readouterr().err
        assert left.value.code == 1, said
        complaint = re.search(r"^error .+\n  → .+", said, re.MULTILINE | re.DOTALL)
        assert complaint and "Traceback" not in said, said
        return " ".join(complaint[0].split())

    return run


# Help


def test_all_commands_are_listed_in_panels_the_three_steps_first() -> None:
    listed = [name for names in PANELS.values() for name in names]
    assert listed[:3] == ["prepare", "train", "speak"]
    assert set(listed) == {name.split()[0] for name in COMMANDS}
    assert {"import", "render", "demo", "version", "model stats", "model convert", "model tiny"} <= set(COMMANDS)
    shown = run_command(["--help"]).output
    places = [shown.index(f"│ {name} ") for name in listed]
    assert places == sorted(places) and all(panel in shown for panel in PANELS)


def test_help_of_speak_has_its_options_in_panels_the_voice_before_the_sampling() -> None:
    shown = run_command(["speak", "--help"]).output
    panels = re.findall(r"╭─ (\w+) ─", shown)
    assert panels == ["Arguments", "Options", "Model", "Voice", "Output", "Takes", "Scores", "Sampling"]


@pytest.mark.parametrize("name", NAMES)
def test_help_explains_the_command_and_every_option(name: str) -> None:
    result = run_command([*name.split(), "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0, result.output
    assert f"Usage: myna {name}" in result.output
    if name in FAMILIES:
        assert FAMILIES[name] in result.output
        return
    command = APP
    for word in name.split():
        command = command[word]
    words = (command.help or "").split()
    assert len(words) >= 3 and words[0] in result.output, "a sentence says what it does"
    assert f"Example: {COMMANDS[name].example}"[:60] in result.output
    for argument in command.assemble_argument_collection():
        assert argument.parameter.help, f"{argument.name} is explained"


def test_examples_can_be_typed() -> None:
    for command in COMMANDS.values():
        words = shlex.split(command.example)
        assert words[0] == "myna" and command.name in command.example
        APP.parse_args(words[1:], exit_on_error=False, print_error=False)


def test_no_command_at_all_shows_the_steps() -> None:
    assert "recordings in, speech out" in run_command([]).output


def test_version() -> None:
    assert run_command(["version"]).output == f"{__version__}\n"


# Errors, as a shell sees them


def shell(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "myna", *words]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_an_error_is_two_lines_on_stderr_and_exit_1(tmp_path: Path) -> None:
    result = shell("train", "nowhere.yaml", folder=tmp_path)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr == (
        "error there is no recipe nowhere.yaml\n"
        "  → give a YAML file, or the name of a recipe that ships: myna recipes lists them\n"
    )
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train", "--no-such-option"), "Unknown option: --no-such-option"),
        (("train", "vietnamese_tts", "--fp16"), "here it is --set train.precision=fp16"),
        (("train", "vietnamese_tts", "--learning-rate=1"), "here it is --set train.learning_rate=..."),
        (("train", "--dry-rum"), "Did you mean --dry-run?"),
        (("trian",), 'Did you mean "train"?'),
        (("prepare", "recordings", "--model", "fledgling"), "--out is missing"),
        (("split", "data", "--texts", "many"), 'unable to convert "many" into int'),
        (("serve", "fledgling", "--port", "99999"), "Must be <= 65535"),
        (("model", "stat"), 'Did you mean "stats"?'),
    ],
)
def test_a_wrong_word_is_a_usage_error_and_exit_2(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    result = shell(*words, folder=tmp_path)
    assert result.returncode == 2 and result.stdout == ""
    assert re.fullmatch(r"error [^\n]+\n  → myna [^\n]*--help [^\n]+\n", result.stderr), result.stderr
    assert message in result.stderr


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m myna recipes vietnamese_tts | true"
    result = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0 and result.stderr == ""


def test_help_does_not_wait_for_torch(tmp_path: Path) -> None:
    heavy = "('torch', 'transformers', 'datasets')"
    probe = f"import sys, myna.commands; sys.exit(sum(name in sys.modules for name in {heavy}))"
    assert subprocess.run([sys.executable, "-c", probe], cwd=tmp_path, timeout=120, check=False).returncode == 0


# Recipes

RECIPE: dict[str, dict[str, Any]] = {"model": {"source": "m"}, "data": {"train": "d"}, "train": {"steps": 1}}


def write_recipe(**changes: dict[str, Any]) -> None:
    Path("recipe.yaml").write_text(yaml.safe_dump({key: RECIPE[key] | changes.get(key, {}) for key in RECIPE}))


@pytest.mark.parametrize(("key", "nearest"), [("train.stpes", "train.steps"), ("data.sene", "data.scene")])
def test_an_unknown_key_is_refused_with_the_nearest(complain: Complain, key: str, nearest: str) -> None:
    write_recipe()
    said = complain("train", "recipe.yaml", "--set", f"{key}=1")
    assert f"there is no setting `{key}`" in said and f"→ did you mean `{nearest}`" in said
    group, leaf = key.split(".")
    write_recipe(**{group: {leaf: 1}})
    said = complain("train", "recipe.yaml")
    assert f"recipe.yaml: there is no setting `{key}` → did you mean `{nearest}`" in said
    assert not Path("runs").exists(), "before anything is made"


def test_a_setting_without_a_value_is_refused(complain: Complain) -> None:
    write_recipe()
    assert "is not KEY=VALUE" in complain("train", "recipe.yaml", "--set", "train.steps")
    assert "steps" in complain("train", "recipe.yaml", "--set", "train.steps=none of them")


def test_an_error_names_an_option_here_and_a_parameter_in_python(complain: Complain, tiny: Path) -> None:
    assert "no --data, no --sentences" in complain("evaluate", tiny)
    with pytest.raises(MynaError, match="no `data`, no `sentences`"):
        myna.evaluate(tiny)
    assert "--shared and --asr are for a cluster" in complain("doctor", "--shared", "x")


# What is not there


def test_a_missing_folder_is_named_with_the_command_that_makes_it(complain: Complain, tiny: Path) -> None:
    assert "→ myna prepare SOURCE --out nowhere" in complain("render", "nowhere", "-m", tiny)
    write_recipe(model={"source": str(tiny)}, data={"train": "nowhere"}, train={"device": "cpu"})
    assert "nowhere is not a prepared folder" in complain("train", "recipe.yaml")


def test_a_missing_model_is_named(complain: Complain) -> None:
    assert "there is no model folder nomodel" in complain("render", "nowhere", "-m", "nomodel")


def test_a_missing_source_is_said_to_be_missing_without_the_layouts(complain: Complain, tiny: Path) -> None:
    said = complain("prepare", "nowhere", "-o", "out", "-m", tiny)
    assert "nowhere: there is no such file or folder" in said and "ljspeech" not in said


def test_a_folder_that_is_no_run_is_named(complain: Complain, tiny: Path) -> None:
    Path("empty").mkdir()
    assert "empty is neither a run nor an adapter" in complain("speak", "hi", "-o", "x.wav", "--run", "empty")
    assert "--run or --model" in complain("speak", "hi", "-o", "x.wav")
    assert "empty is neither" in complain("speak", "hi", "-o", "x.wav", "--run", "empty", "-m", tiny)
    voice = ["--reference", "a.wav", "--reference-text", "a", "--reference", "b.wav"]
    assert "2 references but 1 reference texts" in complain("speak", "hi", "-o", "x.wav", "-m", tiny, *voice)


def test_a_missing_voice_is_named(complain: Complain, tiny: Path) -> None:
    words = ["speak", "hi", "-o", "x.wav", "-m", tiny, "--device", "cpu"]
    assert "nobody.wav: missing file" in complain(*words, "--reference", "nobody.wav", "--reference-text", "hi")
    assert "there is no text to speak" in complain("speak", " ", *words[2:])


def test_an_unknown_layout_is_refused(complain: Complain) -> None:
    Path("model").mkdir()
    assert "no layout onnx" in complain("model", "convert", "model", "-o", "out", "--layout", "onnx")


def test_brackets_are_printed_as_they_are(complain: Complain) -> None:
    assert "there is no run [red]run" in complain("speak", "hi", "-o", "x.wav", "--run", "[red]run")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from myna.models import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def test_a_stage_with_brackets_in_its_name_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages carry names that people chose, of runs and of systems."""
    from rich.console import Console

    from myna.commands import display

    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    monkeypatch.setattr(display, "console", lambda **_: console)
    with display.progress_bars() as progress:
        progress("take[/b]: speaking", 1, 2)
    assert isinstance(console.file, io.StringIO) and "take[/b]: speaking" in console.file.getvalue()


def test_a_list_of_words_may_stand_around_options(tmp_path: Path) -> None:
    words = ("curate", tmp_path / "one", "--out", tmp_path / "out", "--limit", 1, tmp_path / "two")
    with pytest.raises(MynaError, match=r"there is no .*one"):
        run_command(words)
    (tmp_path / "one").mkdir()
    with pytest.raises(MynaError, match=r"there is no .*two"):
        run_command(words)


@pytest.mark.parametrize(("name", "argument"), [("serve", "SOURCES"), ("compare", "SUBJECTS"), ("detect", "FILES")])
def test_a_list_that_is_required_is_asked_for(name: str, argument: str) -> None:
    result = run_command([name], catch=True)
    assert result.exit_code == 2 and f"{argument} is missing" in result.output
