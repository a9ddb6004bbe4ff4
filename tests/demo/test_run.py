"""The demo end to end on a tiny model that has learned nothing: every part is there, whatever it sounds like."""

from __future__ import annotations

import base64
import io
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
import yaml
from rich.console import Console
from typer.testing import CliRunner

from myna import workflow
from myna.audio.files import read, write
from myna.cli import app
from myna.data.dataset import PreparedDataset
from myna.data.manifest import read_manifest
from myna.demo.listening import SYSTEMS
from myna.demo.run import RUNAWAY, Asked, recipe, run_demo
from myna.demo.voice import choose
from myna.errors import ConfigError, DataError, ModelError, MynaError
from myna.models import save_tiny
from myna.models.base import Sampling
from myna.speak.engine import SpeechRequest
from myna.train.run import Run
from tests.birds import SAMPLE_RATE, whistle
from tests.demo.ears import give_ears, take_ears
from tests.report.test_markup import Reader

LINES = [f"the {number} bird sings & <b>flies</b>" for number in ("first", "second", "third", "fourth", "fifth")]
LINES += [f"a {number} bird sits in the tree" for number in ("sixth", "seventh", "eighth", "ninth", "tenth")]
QUICK = (
    "model.check_pretrained=false",
    "train.steps=3",
    "train.evaluate_every=2",
    "train.warmup=1",
    "adapt.rank=2",
    "train.learning_rate=0.05",
)


@pytest.fixture(scope="module")
def nest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and a bird's recordings."""
    folder = tmp_path_factory.mktemp("nest")
    save_tiny(folder / "model")
    for number, text in enumerate(LINES):
        clip = folder / "robin" / f"{number}.wav"
        write(clip, whistle(text, 320.0), SAMPLE_RATE)
        clip.with_suffix(".txt").write_text(text, encoding="utf-8")
    return folder


def asked(nest: Path, out: Path, **changes: object) -> Asked:
    given = {"voice": str(nest / "robin"), "model": str(nest / "model"), "recogniser": "parrot", "settings": QUICK}
    return Asked(out, **(given | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def shown(nest: Path) -> Iterator[tuple[Path, str]]:
    """A demo with ears, and what it printed."""
    console = Console(file=io.StringIO(), width=200)
    with pytest.MonkeyPatch.context() as monkeypatch:
        give_ears(monkeypatch, "a sixth bird sits in a <tree>")
        run_demo(asked(nest, nest / "demo"), console)
    assert isinstance(console.file, io.StringIO)
    yield nest / "demo", console.file.getvalue()


def test_the_folder_keeps_all_that_was_made(shown: tuple[Path, str]) -> None:
    out, _ = shown
    held_out = PreparedDataset.open(out / "prepared" / "held_out")
    train = PreparedDataset.open(out / "prepared" / "train")
    assert (len(train.utterances), len(held_out.utterances)) == (7, 3)
    assert [path.name for path in sorted((out / "real").iterdir())] == ["01.wav", "02.wav", "03.wav"]
    assert (out / "run" / "adapter").is_dir() and (out / "reference.wav").is_file()
    said = json.loads((out / "scores.json").read_text(encoding="utf-8"))
    assert set(said["systems"]) == {"real", "before", "after"}
    assert said["lines"] == [utterance.text for utterance in held_out.utterances]
    assert set(said["seconds"]) == {"voice", "prepare", "before", "train", "after", "listen"}


def test_the_recipe_that_was_trained_is_there_to_be_trained_again(shown: tuple[Path, str]) -> None:
    out, _ = shown
    written = yaml.safe_load((out / "recipe.yaml").read_text(encoding="utf-8"))
    assert written["train"]["steps"] == 3
    result = CliRunner().invoke(
        app, ["train", str(out / "recipe.yaml"), "-o", str(out / "again"), "--dry-run"], catch_exceptions=False
    )
    assert result.exit_code == 0 and "preflight passed" in result.output


def test_the_page_has_all_parts(shown: tuple[Path, str]) -> None:
    out, _ = shown
    page = (out / "report.html").read_text(encoding="utf-8")
    assert len(re.findall(r'<audio src="data:audio/flac;base64,', page)) == sum(
        1 for name in ("real", "before", "after") for _ in (out / name).glob("*.wav")
    )
    assert page.count('src="data:image/png;base64,') == page.count('src="data:audio/flac;base64,')
    read_page = Reader(page)
    for words in ("similarity to the voice", "word errors", "change", "training, smoothed", "evaluation, on the held-"):
        assert words in read_page.text
    for command in ("myna demo --voice FOLDER", "myna train ", "myna speak "):
        assert command in read_page.text
    assert "codebook_weights" in read_page.text, "the settings"
    assert not [url for url in re.findall(r'(?:src|href)="([^"]*)"', page) if not url.startswith("data:")]
    assert len(page) < 10_000_000


def test_the_commands_on_the_page_work(
    shown: tuple[Path, str], nest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, _ = shown
    page = (out / "report.html").read_text(encoding="utf-8")
    commands = "\n".join(unescape(block) for block in re.findall(r"<pre>(.*?)</pre>", page, re.DOTALL))
    lines = commands.replace("\\\n", " ").splitlines()
    monkeypatch.chdir(tmp_path)
    for beginning, extra in (
        ("myna prepare", []),
        ("myna train", ["--dry-run"]),
        ("myna speak", ["--max-seconds", "0.4", "--temperature", "0"]),
    ):
        (line,) = [line for line in lines if line.startswith(beginning)]
        words = [str(nest / "robin") if word == "FOLDER" else word for word in shlex.split(line)[1:]]
        result = CliRunner().invoke(app, [*words, *extra], catch_exceptions=False)
        assert result.exit_code == 0, result.output


def test_the_sounds_on_the_page_are_those_in_the_folder(shown: tuple[Path, str]) -> None:
    out, _ = shown
    page = (out / "report.html").read_text(encoding="utf-8")
    found = re.findall(r'<audio src="data:audio/flac;base64,([^"]+)"[^>]* aria-label="play line (\d+), (\w+)"', page)
    assert len(found) == sum(1 for name in SYSTEMS for _ in (out / name).glob("*.wav"))
    for content, line, name in found:
        heard, rate = soundfile.read(io.BytesIO(base64.b64decode(content)), dtype="float32")
        kept = read(out / name / f"{int(line):02d}.wav", sample_rate=rate)
        assert len(heard) == len(kept) and np.abs(heard - kept).max() < 1e-4
    for place, utterance in enumerate(PreparedDataset.open(out / "prepared" / "held_out").utterances, start=1):
        real = read(out / "real" / f"{place:02d}.wav")
        assert np.abs(real - read(utterance.audio)).max() < 1e-3, "and the real ones are the recordings"


def test_before_speaks_the_model_and_after_the_run(shown: tuple[Path, str], nest: Path) -> None:
    """Each is what its engine says when it is asked again."""
    out, _ = shown
    manifest = read_manifest(out / "voice" / "held_out" / "manifest.jsonl")
    learned = choose(read_manifest(out / "recordings" / "manifest.jsonl"), "here", seed=0)
    lengths = [len(read(utterance.audio, sample_rate=SAMPLE_RATE)) for utterance in manifest]
    sampling = replace(Sampling(), max_seconds=RUNAWAY * max(lengths) / SAMPLE_RATE)
    told = {}
    for name, run, model in (("before", None, str(nest / "model")), ("after", out / "run", None)):
        engine = workflow.open_engine(run=run, model=model, codec=None, device="cpu")
        reference = (engine.voice(out / "reference.wav", learned.reference.text),)
        lines = [
            SpeechRequest(utterance.text, reference, id=f"line {place}") for place, utterance in enumerate(manifest)
        ]
        told[name] = [speech.samples for speech in engine.speak(lines, sampling)]
        for number, samples in enumerate(told[name], start=1):
            file = out / name / f"{number:02d}.wav"
            assert file.is_file() == bool(len(samples))
            if len(samples):
                assert np.abs(read(file, sample_rate=SAMPLE_RATE) - samples).max() < 1e-4
    assert any(not np.array_equal(*pair) for pair in zip(told["before"], told["after"], strict=True))


def test_what_a_user_wrote_is_shown_and_not_run(shown: tuple[Path, str]) -> None:
    out, _ = shown
    page = (out / "report.html").read_text(encoding="utf-8")
    read_page = Reader(page)
    assert "<b>flies</b>" not in page and "<b>flies</b>" in read_page.text
    assert "<tree>" in unescape(read_page.text) and "tree" not in read_page.tags
    assert read_page.tags.count("script") == 1


def test_the_console_says_where_to_look_and_what_it_took(shown: tuple[Path, str]) -> None:
    _, printed = shown
    assert "report.html" in printed and "minutes" in printed and "GB of memory" in printed
    for stage in ("1  voice", "2  prepare", "3  before", "4  train", "5  after", "6  listen"):
        assert stage in printed
    assert re.search(r"change .*[+-]\d\.\d{3} ± \d\.\d{3}", printed)


def test_threads_are_given_back(shown: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, nest: Path) -> None:
    """Whatever else the process does afterwards should not be slower for it."""
    assert shown
    monkeypatch.setattr("myna.demo.run._voice", lambda *_: (_ for _ in ()).throw(DataError("stop", hint="here")))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(DataError, match="stop"):
            run_demo(asked(nest, nest / "stopped"), Console(quiet=True))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_without_ears_the_demo_goes_on_and_says_what_is_missing(
    nest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_ears(monkeypatch)
    console = Console(file=io.StringIO(), width=200)
    scores = run_demo(asked(nest, tmp_path / "demo"), console)
    assert scores.likeness is None and scores.words is None
    text = Reader((tmp_path / "demo" / "report.html").read_text(encoding="utf-8")).text
    assert isinstance(console.file, io.StringIO)
    for shown in (text, " ".join(console.file.getvalue().split())):
        assert "not measured" in shown
        assert "pip install --no-deps resemblyzer==0.1.4" in shown and "no recogniser parrot here" in shown
    assert "→ nan" not in text and "nan" not in json.dumps(scores.to_json()).lower()


def test_nothing_is_overwritten(nest: Path, shown: tuple[Path, str], tmp_path: Path) -> None:
    out, _ = shown
    before = (out / "report.html").read_bytes()
    with pytest.raises(MynaError, match="holds a demo already") as caught:
        run_demo(asked(nest, out), Console(quiet=True))
    assert "--out" in caught.value.hint and (out / "report.html").read_bytes() == before
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "love.txt").write_text("...")
    with pytest.raises(MynaError, match="something else than a demo"):
        run_demo(asked(nest, tmp_path / "letters"), Console(quiet=True))
    (tmp_path / "file").write_text("...")
    with pytest.raises(MynaError, match="is a file"):
        run_demo(asked(nest, tmp_path / "file"), Console(quiet=True))


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"model": "nowhere/at-all"}, ModelError, "nowhere"),
        ({"settings": ("train.stpes=1",)}, ConfigError, "train.stpes"),
        ({"settings": ("train.steps=none of them",)}, ConfigError, "steps"),
        ({"voice": "nowhere"}, DataError, "nowhere"),
    ],
)
def test_what_is_typed_wrongly_is_told_before_anything_is_made(
    nest: Path, tmp_path: Path, changes: dict[str, object], error: type[MynaError], match: str
) -> None:
    with pytest.raises(error, match=match):
        run_demo(asked(nest, tmp_path / "demo", **changes), Console(quiet=True))
    assert not (tmp_path / "demo" / "prepared").exists()


def test_too_few_recordings_are_refused(nest: Path, tmp_path: Path) -> None:
    for number in range(4):
        clip = tmp_path / "few" / f"{number}.wav"
        write(clip, whistle(LINES[number], 320.0), SAMPLE_RATE)
        clip.with_suffix(".txt").write_text(LINES[number], encoding="utf-8")
    with pytest.raises(DataError, match="holds 4 clips") as caught:
        run_demo(asked(nest, tmp_path / "demo", voice=str(tmp_path / "few")), Console(quiet=True))
    assert "record some more" in caught.value.hint


def test_recordings_that_were_mended_go_into_the_same_folder(
    nest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        with pytest.raises(DataError, match="is in no layout we know"):
            (tmp_path / "empty").mkdir(exist_ok=True)
            run_demo(asked(nest, tmp_path / "demo", voice=str(tmp_path / "empty")), Console(quiet=True))
    (tmp_path / "demo" / "recordings").mkdir(parents=True, exist_ok=True)
    (tmp_path / "demo" / "recordings" / "rejected.jsonl").write_text("")
    monkeypatch.setattr("myna.demo.run._voice", lambda *_: (_ for _ in ()).throw(DataError("so far", hint="here")))
    with pytest.raises(DataError, match="so far"):
        run_demo(asked(nest, tmp_path / "demo"), Console(quiet=True))
    (tmp_path / "demo" / "recordings" / "mine.wav").write_bytes(b"")
    with pytest.raises(MynaError, match="something else than a demo"):
        run_demo(asked(nest, tmp_path / "demo"), Console(quiet=True))


def test_a_training_that_was_stopped_ends_the_demo(nest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take_ears(monkeypatch)
    trained = workflow.train

    def stopped(recipe: Path, out: Path) -> Run | None:
        run = trained(recipe, out)
        shutil.rmtree(out / "adapter")
        return run

    monkeypatch.setattr(workflow, "train", stopped)
    with pytest.raises(MynaError, match="training was stopped") as caught:
        run_demo(asked(nest, tmp_path / "demo"), Console(quiet=True))
    assert "--resume" in caught.value.hint
    assert not (tmp_path / "demo" / "report.html").exists()


def test_the_command_takes_what_it_says(nest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caught: list[Asked] = []
    monkeypatch.setattr("myna.demo.run.run_demo", lambda asked, _console: caught.append(asked))
    words = ["demo", "--out", str(tmp_path), "--voice", "mine", "--model", str(nest / "model"), "--seed", "3"]
    words += ["--recogniser", "base", "--language", "vi", "--format", "ljspeech", "--set", "train.steps=2"]
    words += ["--strength", "0.7"]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    model = str(nest / "model")
    assert caught == [Asked(tmp_path, "mine", "ljspeech", "vi", model, 3, "base", ("train.steps=2",), 0.7)]
    CliRunner().invoke(app, ["demo"], catch_exceptions=False)
    assert caught[1] == Asked(Path("demo"), model="fledgling")


def test_only_fledgling_speaks_with_a_share_of_what_it_learned(tmp_path: Path) -> None:
    assert Asked(tmp_path).applied < 1 == Asked(tmp_path, model="another").applied
    assert Asked(tmp_path, strength=0.7).applied == Asked(tmp_path, model="another", strength=0.7).applied == 0.7


def test_the_seed_is_that_of_the_training_too(tmp_path: Path) -> None:
    assert recipe(Asked(tmp_path, seed=7))["train"]["seed"] == 7


def test_the_bundled_voice_goes_through_with_fledgling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps and no ears: that the parts fit, not how it sounds."""
    take_ears(monkeypatch)
    quick = ("train.steps=2", "train.evaluate_every=2", "train.batch_size=1", "train.warmup=1")
    asked = Asked(tmp_path / "demo", settings=quick)
    run_demo(asked, Console(quiet=True))
    page = Reader((tmp_path / "demo" / "report.html").read_text(encoding="utf-8")).text
    assert f"the training alone, {asked.applied:.0%} of it" in page and f"--strength {asked.applied:g}" in page
    assert json.loads((tmp_path / "demo" / "scores.json").read_text(encoding="utf-8"))["strength"] == asked.applied
