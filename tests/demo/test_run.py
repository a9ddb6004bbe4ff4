"""The demo end to end on a tiny untrained model: every part is there, whatever it sounds like."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from html import unescape
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import soundfile
import torch
import yaml

from myna.audio.files import read_audio, write_audio
from myna.commands.train import show_demo
from myna.core.errors import ConfigError, DataError, ModelError, MynaError
from myna.core.run_folder import Run
from myna.data.dataset import PreparedDataset
from myna.data.manifest import Utterance, read_manifest
from myna.demo import run as runner
from myna.demo.run import AFTER, BEFORE, STRENGTHS, DemoResult, demo_recipe, run_demo
from myna.evaluate.items import EvalItem
from myna.evaluate.metrics import REAL
from myna.evaluate.pipeline import SpeechSystem
from myna.listen.speaker_encoders import cosine_similarity
from myna.models import save_tiny_model
from myna.models.ref import ModelRef
from myna.speak.loading import load_engine
from myna.train import launch
from tests.command_line import run_command
from tests.demo.stub_scorers import SpectrumEncoder, install_scorers, remove_scorers
from tests.report.html_reader import Reader
from tests.tone_corpus import SAMPLE_RATE, tone_speech

SYSTEMS = (REAL, BEFORE, AFTER)
TRANSCRIPT = "a sixth speaker sits in a <tree>"
LINES = [f"the {number} speaker sings & <b>flies</b>" for number in ("first", "second", "third", "fourth", "fifth")]
LINES += [f"a {number} speaker sits in the tree" for number in ("sixth", "seventh", "eighth", "ninth", "tenth")]
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
    """A tiny model, and a speaker's recordings."""
    folder = tmp_path_factory.mktemp("nest")
    save_tiny_model(folder / "model")
    for number, text in enumerate(LINES):
        clip = folder / "robin" / f"{number}.wav"
        write_audio(clip, tone_speech(text, 320.0), SAMPLE_RATE)
        clip.with_suffix(".txt").write_text(text, encoding="utf-8")
    return folder


class Messages:
    """An observer that collects what it is told."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def on_message(self, text: str) -> None:
        self.messages.append(text)

    def on_start(self, steps: int, done: int) -> None: ...

    def on_metrics(self, row: dict[str, Any]) -> None: ...


def demo(nest: Path, out: Path, **changes: Any) -> DemoResult:
    given = {"voice": str(nest / "robin"), "model": str(nest / "model"), "asr": "constant", "settings": QUICK}
    return run_demo(out, **(given | changes))


def printed(result: DemoResult) -> str:
    with patch.dict(os.environ, {"COLUMNS": "200"}), redirect_stdout(io.StringIO()) as output:
        show_demo(result)
    return output.getvalue()


@pytest.fixture(scope="module")
def shown(nest: Path) -> Iterator[tuple[Path, str]]:
    """A demo with scorers, and what it printed."""
    observer = Messages()
    with pytest.MonkeyPatch.context() as monkeypatch:
        install_scorers(monkeypatch, TRANSCRIPT)
        result = demo(nest, nest / "demo", observer=observer)
    yield nest / "demo", "\n".join([*observer.messages, printed(result)])


def failing(message: str) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise DataError(message, hint="here")

    return fail


def clips(out: Path, system: str) -> list[Path]:
    return sorted((out / "evaluation" / "audio" / system).glob("*.flac"))


def test_the_folder_keeps_all_results(shown: tuple[Path, str]) -> None:
    out, _ = shown
    held_out = PreparedDataset.open(out / "data" / "subsets" / "held_out_texts")
    train = PreparedDataset.open(out / "data" / "subsets" / "train")
    assert (len(train.utterances), len(held_out.utterances)) == (7, 3)
    assert len(clips(out, REAL)) == 3
    assert (out / "run" / "adapter").is_dir() and (out / "reference.wav").is_file()
    scores = json.loads((out / "scores.json").read_text(encoding="utf-8"))
    assert set(scores["systems"]) == set(SYSTEMS)
    assert scores["texts"] == [utterance.text for utterance in held_out.utterances]
    assert set(scores["seconds"]) == {"prepare", "train", "evaluate"}
    assert set(scores["missing"]) == {"distillmos"}
    for system in SYSTEMS:
        assert scores["systems"][system]["wer"]["mean"] > 0 and scores["systems"][system]["similarity"]["mean"] > 0
        transcripts = scores["transcripts"][system]
        assert TRANSCRIPT in transcripts and set(transcripts) <= {TRANSCRIPT, ""}, "a random model may end at once"


def test_similarity_is_to_the_real_recordings_of_the_other_texts(shown: tuple[Path, str]) -> None:
    """Recordings of held-out sentences are not compared with themselves."""
    out, _ = shown
    encoder = SpectrumEncoder()
    voices = [encoder.embed(read_audio(file, sample_rate=16_000), 16_000) for file in clips(out, REAL)]
    expected = np.mean(
        [cosine_similarity(voices[n], np.mean(voices[:n] + voices[n + 1 :], axis=0)) for n in range(len(voices))]
    )
    scores = json.loads((out / "scores.json").read_text(encoding="utf-8"))
    assert scores["systems"][REAL]["similarity"]["mean"] == pytest.approx(expected, abs=1e-3)


def test_the_saved_recipe_trains_again(shown: tuple[Path, str]) -> None:
    out, _ = shown
    written = yaml.safe_load((out / "recipe.yaml").read_text(encoding="utf-8"))
    assert written["train"]["steps"] == 3
    result = run_command(["train", str(out / "recipe.yaml"), "-o", str(out / "again"), "--dry-run"])
    assert result.exit_code == 0 and "preflight passed" in result.output


def test_the_page_has_all_parts(shown: tuple[Path, str]) -> None:
    out, _ = shown
    page = (out / "report.html").read_text(encoding="utf-8")
    count = sum(len(clips(out, system)) for system in SYSTEMS)
    assert len(re.findall(r'<audio src="data:audio/flac;base64,', page)) == count
    assert page.count('src="data:image/png;base64,') == page.count('src="data:audio/flac;base64,')
    read_page = Reader(page)
    for words in ("similarity", "word error", "change", "training, smoothed", "evaluation, on the held-"):
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
        result = run_command([*words, *extra])
        assert result.exit_code == 0, result.output


def test_the_page_plays_the_audio_of_the_folder(shown: tuple[Path, str]) -> None:
    out, _ = shown
    page = (out / "report.html").read_text(encoding="utf-8")
    found = re.findall(r'<audio src="data:audio/flac;base64,([^"]+)"[^>]* aria-label="play ([^",]+), (\w+)', page)
    assert len(found) == sum(len(clips(out, system)) for system in SYSTEMS)
    kept = {(file.parent.name, file.stem): file for system in SYSTEMS for file in clips(out, system)}
    for content, id, system in found:
        played, rate = soundfile.read(io.BytesIO(base64.b64decode(content)), dtype="float32")
        saved = read_audio(kept[system, id], sample_rate=rate)
        assert len(played) == len(saved) and np.abs(played - saved).max() < 1e-4
    for utterance in PreparedDataset.open(out / "data" / "subsets" / "held_out_texts").utterances:
        real = read_audio(kept[REAL, utterance.id])
        assert np.abs(real - read_audio(utterance.audio)).max() < 1e-3, "and the real ones are the recordings"


def test_before_is_the_model_and_after_is_the_run(shown: tuple[Path, str], nest: Path) -> None:
    """The engine generates each file again, from the reference in the folder."""
    out, _ = shown
    held_out = read_manifest(out / "data" / "subsets" / "held_out_texts" / "manifest.jsonl")
    train = read_manifest(out / "data" / "subsets" / "train" / "manifest.jsonl")
    page = Reader((out / "report.html").read_text(encoding="utf-8")).text
    (text,) = {clip.text for clip in train if f"--reference-text {shlex.quote(clip.text)}" in page}
    reference = Utterance("reference", out / "reference.wav", text, "robin")
    engines = {
        BEFORE: load_engine(ModelRef.find_model(str(nest / "model")), device="cpu"),
        AFTER: load_engine(ModelRef.find_trained(out / "run"), device="cpu"),
    }
    generated: dict[str, list[Any]] = {name: [] for name in engines}
    for name, engine in engines.items():
        system = SpeechSystem(name, engine.__class__, 0, {})
        system._engine = engine
        for clip in held_out:
            item = EvalItem(clip.id, clip.text, clip.speaker, clip.language, (reference,), recording=clip)
            [(_, spoken)] = system.speak([item], 1)
            samples = spoken.samples
            generated[name].append(samples)
            files = [file for file in clips(out, name) if file.stem == clip.id]
            assert bool(files) == bool(len(samples))
            if files:
                assert np.abs(read_audio(files[0], sample_rate=SAMPLE_RATE) - np.clip(samples, -1, 1)).max() < 1e-4
    assert any(not np.array_equal(*pair) for pair in zip(generated[BEFORE], generated[AFTER], strict=True))


def test_text_of_users_is_escaped(shown: tuple[Path, str]) -> None:
    out, _ = shown
    page = (out / "report.html").read_text(encoding="utf-8")
    read_page = Reader(page)
    assert "<b>flies</b>" not in page and "<b>flies</b>" in read_page.text
    assert "<tree>" in unescape(read_page.text) and "tree" not in read_page.tags
    assert read_page.tags.count("script") == 1


def test_the_console_names_the_page_and_the_time(shown: tuple[Path, str]) -> None:
    _, text = shown
    assert "report.html" in text and "minutes" in text and "GB of memory" in text
    for stage in ("1  prepare", "2  train", "3  evaluate"):
        assert stage in text
    assert re.search(r"change .*[+-]\d\.\d{3} \[[+-]\d\.\d{3}, [+-]\d\.\d{3}\]", text)


def test_the_thread_count_is_restored(shown: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, nest: Path) -> None:
    """A demo that fails leaves torch's number of threads as it was."""
    assert shown
    monkeypatch.setattr("myna.demo.run.prepare_voice", failing("stop"))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(DataError, match="stop"):
            demo(nest, nest / "stopped")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_without_scorers_the_demo_names_what_is_missing(
    nest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove_scorers(monkeypatch)
    result = demo(nest, tmp_path / "demo")
    assert set(result.missing) >= {"similarity", "wer"}
    text = Reader((tmp_path / "demo" / "report.html").read_text(encoding="utf-8")).text
    for shown in (text, " ".join(printed(result).split())):
        assert "not measured" in shown
        assert "myna setup metrics" in shown and "no ASR model constant here" in shown
    assert "→ nan" not in text and "nan" not in json.dumps(result.to_json()).lower()
    assert result.to_json()["systems"][AFTER]["similarity"]["mean"] is None


def test_a_transcript_that_loops_is_wholly_wrong_and_counted(
    nest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_scorers(monkeypatch, "red green blue grey " * 40)
    result = demo(nest, tmp_path / "demo")
    assert result.estimates[REAL]["loop_rate"].mean == 1.0 and result.estimates[REAL]["wer"].mean == 1.0
    assert result.to_json()["looped"][REAL] == len(result.texts)


def test_nothing_is_overwritten(nest: Path, shown: tuple[Path, str], tmp_path: Path) -> None:
    out, _ = shown
    before = (out / "report.html").read_bytes()
    with pytest.raises(MynaError, match="holds a demo already") as caught:
        demo(nest, out)
    assert "--out" in caught.value.hint and (out / "report.html").read_bytes() == before
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "love.txt").write_text("...")
    with pytest.raises(MynaError, match="something else than a demo"):
        demo(nest, tmp_path / "letters")
    (tmp_path / "file").write_text("...")
    with pytest.raises(MynaError, match="is a file"):
        demo(nest, tmp_path / "file")


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"model": "nowhere/at-all"}, ModelError, "nowhere"),
        ({"settings": ("train.stpes=1",)}, ConfigError, "train.stpes"),
        ({"settings": ("train.steps=none of them",)}, ConfigError, "steps"),
        ({"voice": "nowhere"}, DataError, "nowhere"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_made(
    nest: Path, tmp_path: Path, changes: dict[str, object], error: type[MynaError], match: str
) -> None:
    with pytest.raises(error, match=match):
        demo(nest, tmp_path / "demo", **changes)
    assert not (tmp_path / "demo" / "data").exists()


def test_too_few_recordings_are_refused(nest: Path, tmp_path: Path) -> None:
    for number in range(4):
        clip = tmp_path / "few" / f"{number}.wav"
        write_audio(clip, tone_speech(LINES[number], 320.0), SAMPLE_RATE)
        clip.with_suffix(".txt").write_text(LINES[number], encoding="utf-8")
    for _ in range(2):
        with pytest.raises(DataError, match="holds 4 clips") as caught:
            demo(nest, tmp_path / "demo", voice=str(tmp_path / "few"))
        assert "record some more" in caught.value.hint
    shutil.copytree(tmp_path / "few", tmp_path / "others")
    with pytest.raises(DataError, match="holds 4 clips"):
        demo(nest, tmp_path / "demo", voice=str(tmp_path / "others"))


def test_repaired_recordings_use_the_same_folder(nest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        with pytest.raises(DataError, match="is in no layout we know"):
            (tmp_path / "empty").mkdir(exist_ok=True)
            demo(nest, tmp_path / "demo", voice=str(tmp_path / "empty"))
    (tmp_path / "demo" / "recordings").mkdir(parents=True, exist_ok=True)
    (tmp_path / "demo" / "recordings" / "rejected.jsonl").write_text("")
    monkeypatch.setattr("myna.demo.run.prepare_voice", failing("so far"))
    with pytest.raises(DataError, match="so far"):
        demo(nest, tmp_path / "demo")
    (tmp_path / "demo" / "recordings" / "mine.wav").write_bytes(b"")
    with pytest.raises(MynaError, match="something else than a demo"):
        demo(nest, tmp_path / "demo")


def test_a_training_that_was_stopped_ends_the_demo(nest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remove_scorers(monkeypatch)
    trained = launch.start_training

    def stopped(run: Run, *rest: Any, **options: Any) -> Run:
        run = trained(run, *rest, **options)
        shutil.rmtree(run.folder / "adapter")
        return run

    monkeypatch.setattr(runner, "start_training", stopped)
    with pytest.raises(MynaError, match="training was stopped") as caught:
        demo(nest, tmp_path / "demo")
    assert "--resume" in caught.value.hint
    assert not (tmp_path / "demo" / "report.html").exists()


def test_the_command_passes_its_options_on(nest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caught: list[tuple[Path, dict[str, Any]]] = []
    monkeypatch.setattr("myna.demo.run.run_demo", lambda out, **options: caught.append((out, options)))
    monkeypatch.setattr("myna.commands.train.show_demo", lambda *_: None)
    words = ["demo", "--out", str(tmp_path), "--voice", "mine", "--model", str(nest / "model"), "--seed", "3"]
    words += ["--asr", "base", "--language", "vi", "--format", "ljspeech", "--set", "train.steps=2"]
    words += ["--strength", "0.7"]
    result = run_command(words)
    assert result.exit_code == 0, result.output
    run_command(["demo"])
    names = ("voice", "format", "language", "model", "seed", "asr", "settings", "strength")
    (out, given), (default_out, default) = caught
    model = str(nest / "model")
    assert out == tmp_path
    assert [given[name] for name in names] == ["mine", "ljspeech", "vi", model, 3, "base", ["train.steps=2"], 0.7]
    assert default_out == Path("demo")
    assert [default[name] or None for name in names] == [None, None, None, "fledgling", None, None, None, None]


def test_the_seed_is_used_for_training(tmp_path: Path) -> None:
    assert demo_recipe(tmp_path, seed=7)["train"]["seed"] == 7


@pytest.mark.slow
def test_the_bundled_voice_completes_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps and no scorers: that the parts fit, not how it sounds."""
    remove_scorers(monkeypatch)
    quick = ("train.steps=2", "train.evaluate_every=2", "train.batch_size=1", "train.warmup=1")
    result = run_demo(tmp_path / "demo", settings=quick)
    strength = STRENGTHS["fledgling"]
    assert result.strength == strength < 1 and len(result.texts) == 10
    page = " ".join(Reader((tmp_path / "demo" / "report.html").read_text(encoding="utf-8")).text.split())
    assert f"the training alone, {strength:.0%} of it" in page and f"--strength {strength:g}" in page
    assert json.loads((tmp_path / "demo" / "scores.json").read_text(encoding="utf-8"))["strength"] == strength
