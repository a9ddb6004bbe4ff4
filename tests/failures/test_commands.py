"""Mistakes on the command line, and files that a command must not touch."""

from __future__ import annotations

import json
import re
import resource
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import myna
from myna.audio.files import write_audio
from myna.commands import main
from myna.core.config import dump_recipe, load_recipe, shipped_recipes
from myna.core.io import FREE_BYTES
from myna.evaluate.evaluation import EvaluationSettings, Subject
from myna.speak.engine import Engine
from myna.speak.request import SpeechRequest
from tests.tone_corpus import SAMPLE_RATE, tone_speech

from .tiny_setup import make_recipe

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Runs a command in an empty folder, as if typed: its exit status, and all that it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["myna", *map(str, words)])
        status = 0
        try:
            main()
        except SystemExit as stop:
            status = int(stop.code or 0)
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return run


@pytest.fixture
def refused(command: Command) -> Callable[..., str]:
    """The message of a command that must fail: one error that ends with what to do, and no traceback."""

    def run(*words: object) -> str:
        status, output = command(*words)
        message = re.search(r"^error .+\n  → .+", output, re.MULTILINE | re.DOTALL)
        assert status == 1 and message and "Traceback" not in output, output
        return " ".join(message[0].split())

    return run


@pytest.fixture
def speak(workspace: Path) -> list[object]:
    """Words of a command that speaks with the tiny model for a moment."""
    return ["speak", "hi", "-m", workspace / "model", "--device", "cpu", "--max-seconds", 0.2]


@pytest.fixture
def reference(workspace: Path, tmp_path: Path) -> Path:
    """A person's recording, in the folder they work in."""
    return Path(shutil.copy(workspace / "recordings/robin/who.wav", tmp_path / "ref.wav"))


# Overwritten files


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_a_reference_is_never_the_output(
    refused: Callable[..., str], speak: list[object], reference: Path, force: list[str]
) -> None:
    before = reference.read_bytes()
    (reference.parent / "folder").mkdir()
    (reference.parent / "link.wav").symlink_to(reference)
    for name in ("ref.wav", "folder/../ref.wav", "link.wav"):
        message = refused(*speak, "--reference", "ref.wav", "--reference-text", "who", "--out", name, *force)
        assert "is an input" in message and name in message
    assert reference.read_bytes() == before


def test_a_file_that_is_there_is_replaced_only_if_asked(
    command: Command, refused: Callable[..., str], speak: list[object], tmp_path: Path
) -> None:
    for option, name in (("--out", "mine.wav"), ("--codes", "mine.npy")):
        file = tmp_path / name
        file.write_bytes(b"mine")
        words = [*speak, option, name] if option == "--out" else [*speak, "--out", "new.wav", option, name]
        message = refused(*words)
        assert f"{name} exists" in message and "--force" in message
        assert file.read_bytes() == b"mine" and not (tmp_path / "new.wav").exists(), "before anything is spoken"
        assert command(*words, "--force")[0] == 0
        assert file.read_bytes() != b"mine"


def test_speech_saved_from_python_is_not_overwritten(workspace: Path, tmp_path: Path) -> None:
    speech = myna.load(workspace / "model", device="cpu").speak("hi", max_seconds=0.2)
    file = tmp_path / "mine.wav"
    file.write_bytes(b"mine")
    with pytest.raises(myna.MynaError, match=r"mine\.wav exists"):
        speech.save(file)
    assert file.read_bytes() == b"mine"
    speech.save(file, force=True)
    assert file.read_bytes() != b"mine"


@pytest.mark.parametrize("name", ["evaluate", "compare"])
def test_a_folder_that_myna_did_not_make_is_left_alone(
    refused: Callable[..., str], workspace: Path, tmp_path: Path, name: str
) -> None:
    """Even --force does not replace a folder that the command reads."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "report.html").write_text("mine")
    model = workspace / "model"
    subjects = [model] if name == "evaluate" else [f"a={model}", f"b={model}"]
    words = [name, *subjects, "--data", workspace / "evaluation", "--device", "cpu"]
    message = refused(*words, "--out", folder)
    assert "mine is not empty" in message and "--force" in message
    assert [path.name for path in folder.iterdir()] == ["report.html"]
    assert "is an input" in refused(*words, "--out", workspace / "evaluation", "--force")
    assert (folder / "report.html").read_text() == "mine"


def test_an_evaluation_stopped_early_can_go_on(
    monkeypatch: pytest.MonkeyPatch, workspace: Path, tmp_path: Path
) -> None:
    """Killed before the first item was scored, it holds audio and no results; and goes on."""
    from myna.evaluate import pipeline

    out = tmp_path / "evaluation"
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(pipeline, "score_systems", _interrupted)
        myna.evaluate(workspace / "model", data=workspace / "evaluation", out=out, device="cpu")
    assert (out / "audio").is_dir()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(pipeline, "score_systems", _interrupted)
        myna.evaluate(workspace / "model", data=workspace / "evaluation", out=out, device="cpu")


def _interrupted(_eval_set: object, _systems: object, _scorers: object, out: Path, **_: object) -> None:
    (out / "audio").mkdir(parents=True, exist_ok=True)
    raise KeyboardInterrupt


def test_answers_and_checkpoints_are_not_overwritten(
    refused: Callable[..., str], workspace: Path, tmp_path: Path
) -> None:
    prepared, model, mine = workspace / "prepared", workspace / "model", tmp_path / "mine"
    mine.mkdir()
    (mine / "adapter_config.json").write_text("mine")
    (tmp_path / "answers.jsonl").write_text("mine")
    answer = ["answer", prepared, "--model", model, "--out"]
    assert "answers.jsonl exists" in refused(*answer, "answers.jsonl")
    assert "is an input" in refused(*answer, prepared / "manifest.jsonl", "--force")
    for words in (["extract", model, model], ["convert", model], ["tiny"]):
        assert "mine exists and is not empty" in refused("model", *words, "--out", mine)
    assert (mine / "adapter_config.json").read_text() == (tmp_path / "answers.jsonl").read_text() == "mine"


def test_a_foreign_manifest_is_not_replaced(refused: Callable[..., str], workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "manifest.jsonl").write_text("mine")
    message = refused("import", workspace / "recordings", "--out", tmp_path)
    assert "manifest.jsonl" in message and "--out" in message
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.jsonl"]
    assert (tmp_path / "manifest.jsonl").read_text() == "mine"


def test_a_foreign_config_is_not_replaced(refused: Callable[..., str], workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.yaml").write_text("mine")
    (tmp_path / "recipe.yaml").write_text(dump_recipe(make_recipe(workspace)))
    assert "mine holds a config.yaml" in refused("train", "recipe.yaml", "--out", "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["config.yaml"]
    assert (tmp_path / "mine/config.yaml").read_text() == "mine"


# Disks that are full or read-only


@contextmanager
def full_disk(room: int = 4096) -> Iterator[None]:
    """No file may grow beyond `room` bytes: the system refuses as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_the_output_is_checked_before_speech_is_generated(
    monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str], speak: list[object], tmp_path: Path
) -> None:
    monkeypatch.setattr("myna.speak.loading.load_engine", lambda *_, **__: pytest.fail("a model was opened"))
    (tmp_path / "folder.wav").mkdir()
    (tmp_path / "file").touch()
    assert "folder.wav is a folder" in refused(*speak, "--out", "folder.wav")
    assert "cannot write to file" in refused(*speak, "--out", "file/out.wav")
    assert "cannot write to /sys" in refused(*speak, "--out", "/sys/folder/out.wav")
    assert "cannot write to /sys" in refused(*speak, "--out", "out.wav", "--codes", "/sys/out.npy")
    assert "too long" in refused(*speak, "--out", "x" * 300 + ".wav")
    with full_disk():
        assert "File too large" in refused(*speak, "--out", "out.wav")
    assert {path.name for path in tmp_path.iterdir()} == {"folder.wav", "file"}


def test_no_command_ends_in_a_traceback_on_a_full_disk(refused: Callable[..., str], workspace: Path) -> None:
    """The file that could not be written is named."""
    model, data = workspace / "model", workspace / "evaluation"
    with full_disk(1000):
        assert "prepared" in refused("prepare", workspace / "recordings", "-o", "prepared", "-m", model)
        assert "converted" in refused("model", "convert", model, "-o", "converted", "--layout", "original")
        assert "tiny" in refused("model", "tiny", "-o", "tiny")
    with full_disk(FREE_BYTES + 1000):  # full while it is written to
        assert "half: File too large" in refused("model", "tiny", "-o", "half")
    with full_disk():
        assert "evaluation" in refused("evaluate", model, "--data", data, "-o", "evaluation")
    with full_disk(0):
        assert "imported" in refused("import", workspace / "recordings", "-o", "imported")


def test_no_command_ends_in_a_traceback_where_nothing_can_be_written(
    refused: Callable[..., str], workspace: Path, tmp_path: Path
) -> None:
    model, data = workspace / "model", workspace / "evaluation"
    (tmp_path / "file").touch()
    for out in ("/sys/out", "file/out"):
        for words in (
            ["import", workspace / "recordings"],
            ["prepare", workspace / "recordings", "-m", model],
            ["evaluate", model, "--data", data],
            ["compare", f"a={model}", f"b={model}", "--data", data],
            ["model", "convert", model, "--layout", "original"],
            ["model", "extract", model, model],
            ["model", "tiny"],
            ["demo"],
        ):
            assert out.split("/o")[0] in refused(*words, "--out", out), words


# Silent, cut or too long references


def test_a_silent_or_cut_reference_is_refused_before_a_model_is_opened(
    monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str], speak: list[object], reference: Path
) -> None:
    monkeypatch.setattr("myna.speak.loading.load_engine", lambda *_, **__: pytest.fail("a model was opened"))
    words = [*speak, "--out", "out.wav", "--reference", reference, "--reference-text", "who"]
    write_audio(reference, tone_speech("a longer line", 320.0), SAMPLE_RATE)
    whole = reference.read_bytes()
    reference.write_bytes(whole[: len(whole) * 2 // 3])
    assert "ref.wav: cut short" in refused(*words)
    write_audio(reference, np.zeros(48_000, np.float32), 24_000)
    assert "ref.wav: silence" in refused(*words)


def test_a_silent_reference_is_refused_from_python(workspace: Path, tmp_path: Path) -> None:
    write_audio(tmp_path / "silent.wav", np.zeros(48_000, np.float32), 24_000)
    with pytest.raises(myna.MynaError, match="silence"):
        myna.load(workspace / "model", device="cpu").speak(
            "hi", reference=tmp_path / "silent.wav", reference_text="who"
        )


def test_three_hours_as_a_reference_are_refused_and_not_decoded(
    refused: Callable[..., str], speak: list[object], tmp_path: Path
) -> None:
    """A stereo WAV at 48 kHz, of 2 GB on paper and nothing on the disk."""
    seconds, bytes_per_second = 3 * 3600, 48_000 * 4
    size = seconds * bytes_per_second
    header = struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", size + 36, b"WAVE", b"fmt ", 16, 1, 2, 48_000, bytes_per_second, 4, 16, b"data", size)  # fmt: skip # noqa: E501
    with (tmp_path / "long.wav").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    message = refused(*speak, "--out", "out.wav", "--reference", "long.wav", "--reference-text", "who")
    assert "long.wav: too long" in message and "60 s" in message
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10, "in KiB"


# Tags and references that do not fit


@pytest.mark.parametrize(
    ("text", "count", "named"),
    [
        ("[SPEAKER1] hi [SPEAKER2] you", 2, "[SPEAKER1], [SPEAKER2], but the 2 references are [SPEAKER0], [SPEAKER1]"),
        ("[SPEAKER0] hi [SPEAKER1] you [SPEAKER2] who", 2, "the 2 references are [SPEAKER0], [SPEAKER1]"),
        ("[SPEAKER0] hi", 2, "the 2 references are [SPEAKER0], [SPEAKER1]"),
        ("hi you", 2, "nothing in the text says who speaks"),
        ("[SPEAKER0] hi [SPEAKER1] you", 1, "the one reference is [SPEAKER0]"),
        ("[SPEAKER1] hi", 1, "the one reference is [SPEAKER0]"),
        ("[SPEAKER1] hi [SPEAKER2] you", 0, "speakers are numbered from 0"),
    ],
)
def test_tags_that_do_not_fit_the_references_are_named(
    monkeypatch: pytest.MonkeyPatch,
    refused: Callable[..., str],
    speak: list[object],
    workspace: Path,
    text: str,
    count: int,
    named: str,
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("myna.speak.loading.load_engine", lambda *_, **__: pytest.fail("a model was opened"))
        recordings = [workspace / "recordings" / speaker / "who.wav" for speaker in ("robin", "heron")][:count]
        voices = [word for path in recordings for word in ("--reference", path, "--reference-text", "who")]
        assert named in refused("speak", text, *speak[2:], "--out", "out.wav", *voices)
    with pytest.raises(myna.MynaError, match=re.escape(named)):
        myna.Voice(None).speak(text, reference=recordings, reference_text=["who"] * count)  # type: ignore[arg-type]


def test_a_reference_without_its_text_is_named(
    refused: Callable[..., str], speak: list[object], reference: Path
) -> None:
    message = refused(*speak, "--out", "out.wav", "--reference", reference, "--reference-text", " ")
    assert "the text of reference 1 is empty" in message


def test_tags_that_fit_are_spoken(command: Command, speak: list[object], workspace: Path) -> None:
    """Tags are spoken with a reference for each speaker, or without any, in voices chosen by the model."""
    recordings = [workspace / "recordings" / speaker / "who.wav" for speaker in ("robin", "heron")]
    voices = [word for path in recordings for word in ("--reference", path, "--reference-text", "who")]
    text = "[SPEAKER0] hi [SPEAKER1] you"
    assert command("speak", text, *speak[2:], "--out", "two.wav", *voices)[0] == 0
    assert command("speak", text, *speak[2:], "--out", "free.wav")[0] == 0


# Texts taken for options, missing recipes


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-5 degrees"], "-5 degrees"),
        (["--", "-5 degrees"], "-5 degrees"),
        (["--", "-o"], "-o"),
        (["-5"], "-5"),
        (["-hi"], "-hi"),
        (["- hi -"], "- hi -"),
        (["--hi you"], "--hi you"),
        (["--text-file", "text.txt"], "-5 degrees\n"),
        (["--scene", "-5 degrees", "hi"], "hi"),
        (["--scene=-5 degrees", "-5"], "-5"),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, list) else "",
)
def test_a_text_may_begin_with_a_dash(
    monkeypatch: pytest.MonkeyPatch, command: Command, speak: list[object], words: list[str], text: str
) -> None:
    Path("text.txt").write_text("-5 degrees\n")
    spoken, original = [], myna.Voice.speak_takes

    def recorded(self: myna.Voice, text: str, *rest: Any, **options: Any) -> list[myna.Speech]:
        spoken.append(text)
        return original(self, text, *rest, **options)

    monkeypatch.setattr(myna.Voice, "speak_takes", recorded)
    status, output = command("speak", *speak[2:], "--out", "out.wav", *words)
    assert status == 0 and spoken == [text], output


def test_a_misspelt_option_is_no_text(command: Command, speak: list[object]) -> None:
    for words in (["--temprature", "0"], ["--seeed=3"]):
        status, output = command(*speak, "--out", "out.wav", *words)
        assert status == 2 and "Unknown option" in output


def test_a_missing_recipe_is_reported_without_heavy_imports(tmp_path: Path) -> None:
    """Seconds went into torch before the file was looked for."""
    code = (
        "import sys; from myna.commands import main\n"
        "try: main()\n"
        "finally: print(sorted({'torch', 'numpy', 'transformers'} & {*sys.modules}))"
    )
    for words in (["train", "nowhere.yaml"], ["train", "nowhere"], ["train", "--resume", "nowhere"]):
        result = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert result.returncode == 1 and "nowhere" in result.stderr and "Traceback" not in result.stderr
        assert result.stdout == "[]\n"


def test_recipes_that_ship_are_found_by_name_listed_and_copied(
    command: Command, refused: Callable[..., str], tmp_path: Path
) -> None:
    status, output = command("recipes")
    assert status == 0 and all(name in output for name in shipped_recipes())
    assert "did you mean vietnamese_tts?" in refused("train", "vietnamese_tt")
    name, *_ = shipped_recipes()
    assert command("recipes", name, "--out", "mine.yaml")[0] == 0
    assert load_recipe(tmp_path / "mine.yaml") == load_recipe(Path(name))
    assert "mine.yaml exists" in refused("recipes", name, "--out", "mine.yaml")


# Scene that is trained and not spoken

RECIPE_SCENE, DATA_SCENE = "A quiet room.", "A loud street."


@pytest.fixture
def scene_data(workspace: Path, tmp_path: Path) -> Path:
    """Prepared data in which two of three clips name a scene."""
    source, prepared = tmp_path / "source", tmp_path / "prepared"
    source.mkdir()
    lines = [json.loads(line) for line in (workspace / "prepared/manifest.jsonl").read_text().splitlines()]
    named = [line | ({"extras": {"scene": DATA_SCENE}} if "who" not in line["id"] else {}) for line in lines]
    (source / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in named))
    myna.prepare(source, prepared, model=str(workspace / "model"), device="cpu")
    return prepared


def test_a_run_speaks_in_the_scene_it_was_trained_in(
    monkeypatch: pytest.MonkeyPatch, train_with: Any, scene_data: Path, tmp_path: Path
) -> None:
    """The recipe's, or the one that most of the data names; from a checkpoint and a copied adapter too."""
    scenes: list[str] = []
    original = Engine.plan

    def recorded(self: Engine, request: SpeechRequest, *rest: Any, **options: Any) -> Any:
        scenes.append(str(self.resolve(request).scene))
        return original(self, request, *rest, **options)

    monkeypatch.setattr(Engine, "plan", recorded)
    by_recipe, _ = train_with(data={"scene": RECIPE_SCENE})
    by_data, _ = train_with(data={"train": str(scene_data), "scene": RECIPE_SCENE})
    untold, _ = train_with()
    shutil.copytree(by_data.adapter, tmp_path / "adapter")
    checkpoint = next((by_data.folder / "checkpoints").iterdir())
    for source, expected in (
        (by_recipe.folder, RECIPE_SCENE),
        (by_data.folder, DATA_SCENE),
        (checkpoint, DATA_SCENE),
        (tmp_path / "adapter", DATA_SCENE),
        (untold.folder, ""),
    ):
        voice = myna.load(source, device="cpu")
        voice.speak("hi", max_seconds=0.1)
        voice.speak("hi", max_seconds=0.1, scene="Elsewhere.")
        voice.speak("hi", max_seconds=0.1, scene="")
        assert scenes == [expected, "Elsewhere.", ""], source
        scenes.clear()


def test_evaluation_speaks_in_the_scene_of_the_training(train_with: Any, scene_data: Path, tmp_path: Path) -> None:
    """Sentences of a file or a list, whose voices come from the data or from recordings of their own."""
    sentences, reference = tmp_path / "sentences.txt", tmp_path / "ref.wav"
    sentences.write_text("one\ntwo\n")
    write_audio(reference, tone_speech("who", 320.0), SAMPLE_RATE)
    (tmp_path / "list.lst").write_text(f"a|who|{reference}|one\n")
    run, _ = train_with(data={"train": str(scene_data), "scene": RECIPE_SCENE})
    subject = Subject.parse(str(run.folder))
    targets = EvaluationSettings(data=scene_data).eval_set(subject)
    assert {(item.id.split("/")[1], item.scene) for item in targets.items} == {
        ("hi", DATA_SCENE),
        ("you", DATA_SCENE),
        ("who", RECIPE_SCENE),
    }
    spoken = EvaluationSettings(data=scene_data, sentences=sentences).eval_set(subject)
    assert [item.scene for item in spoken.items] == [DATA_SCENE, DATA_SCENE]
    listed = EvaluationSettings(sentences=tmp_path / "list.lst").eval_set(subject)
    assert [item.scene for item in listed.items] == [DATA_SCENE]
