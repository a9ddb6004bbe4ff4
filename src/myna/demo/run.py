"""`myna demo`: a voice from recordings to before and after, in minutes, with every step the real one.

Each step goes through the same door that a user takes, and the folder keeps all that was made:

    recordings/     what was imported: a manifest
    voice/          the same, split into what is learned from and what is judged by; prepared/ has their codes
    real/ before/ after/   the held-out lines as recorded, and as the model says them untuned and tuned
    recipe.yaml     what was trained, for `myna train`; run/ is what came of it
    scores.json     what ears made of it
    report.html     all of it on one page, which opens without a network
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.progress import TextColumn
from rich.table import Table

from myna import workflow
from myna.audio.files import Samples, write
from myna.config import override, parse_recipe
from myna.data.manifest import write_manifest
from myna.demo.listening import AFTER, BEFORE, REAL, Scores, Sounds, listen
from myna.demo.report import Told, page
from myna.demo.voice import BUNDLED, Voice, choose, samples_of
from myna.errors import MynaError
from myna.models import open_family
from myna.report.document import save
from myna.speak.engine import SpeechRequest
from myna.train.memory_plan import peak

MODEL = "fledgling"
STRENGTHS = {MODEL: 0.4}
"""Of what a LoRA has learned, by model; others speak with all of it. A small model that takes on the whole of a far
voice loses words with it, and less than half brings most of the likeness: docs/decisions/0011-fledgling.md."""
DEVICE = "cpu"
THREADS = 1
"""Two would save a third of the training on an idle machine, and lose tenfold on a busy one: so small are the pieces of
work that they would spend their time waiting for one another."""
MAX_BAD = 0.2
"""Share of recordings that may be unusable: a first try is no corpus."""
RUNAWAY = 2.5
"""Times the longest line's length at which a model that finds no end is cut."""
REFERENCE_NAME = "reference.wav"
IMPORTED = {"manifest.jsonl", "rejected.jsonl", "media"}
"""What an import leaves."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a person typed."""

    out: Path
    voice: str | None = None
    """Recordings in any layout that the importers read; None for the voice that comes with Myna."""
    format: str | None = None
    language: str = ""
    """Of recordings that do not name theirs."""
    model: str = MODEL
    seed: int = 0
    recogniser: str | None = None
    """A Whisper's folder or name, to count wrong words with."""
    settings: tuple[str, ...] = ()
    """Changes to the recipe, as `--set` takes them."""
    strength: float | None = None
    """Share of what was learned with which the tuned model speaks; None for what suits the model."""

    @property
    def applied(self) -> float:
        return STRENGTHS.get(self.model, 1.0) if self.strength is None else self.strength


@dataclass(slots=True)
class Clock:
    """How long each stage took."""

    console: Console
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str, about: str) -> Iterator[None]:
        self.console.rule(f"{len(self.seconds) + 1}  {name}: {about}", align="left")
        began = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - began


@dataclass(frozen=True, slots=True, eq=False)
class Spoken:
    """The held-out lines as one model says them."""

    sounds: list[Samples]
    stopped: list[bool]
    """Which of them ended by themselves, and were not cut."""
    sample_rate: int


def recipe(asked: Asked) -> dict[str, Any]:
    """What differs from the defaults: a few minutes of one voice, learned in two on a laptop."""
    tree: dict[str, Any] = {
        "name": "demo",
        "model": {"source": asked.model},
        "data": {
            "train": str(asked.out / "prepared" / "train"),
            "evaluation": str(asked.out / "prepared" / "held_out"),
            "row_tokens": 1024,
        },
        "adapt": {"rank": 8, "alpha": 16},
        "loss": {"codebook_weights": "1/k"},
        "train": {
            "steps": 60,
            "batch_size": 2,
            "learning_rate": 2e-3,
            "warmup": 10,
            "ema_decay": 0.95,
            "evaluate_every": 20,
            "early_stopping_patience": 3,
            "device": DEVICE,
            "seed": asked.seed,
        },
    }
    for setting in asked.settings:
        override(tree, setting)
    return tree


def run_demo(asked: Asked, console: Console) -> Scores:
    """All stages in order; the scores, which the folder keeps as well."""
    out, clock = asked.out, Clock(console)
    _refuse_to_overwrite(out)
    # What is typed wrongly should be told now, and not after minutes.
    open_family(asked.model)
    parse_recipe(recipe(asked), where="the demo's recipe with --set")
    with _threads(THREADS):
        with clock.stage("voice", "recordings are read and split"):
            voice = _voice(asked, console)
        with clock.stage("prepare", "clips become codes"):
            for part, clips in (("train", voice.train), ("held_out", voice.held_out)):
                write_manifest(out / "voice" / part / "manifest.jsonl", clips)
                workflow.prepare(str(out / "voice" / part), out / "prepared" / part, model=asked.model, device=DEVICE)
        with clock.stage("before", "the untuned model says the held-out lines"):
            before = _speak(asked, voice, BEFORE)
        with clock.stage("train", "a LoRA learns the voice"):
            path = out / "recipe.yaml"
            path.write_text(yaml.safe_dump(recipe(asked), sort_keys=False, allow_unicode=True), encoding="utf-8")
            run = workflow.train(path, out / "run")
            if run is None or not run.is_finished:
                raise MynaError(
                    "the training was stopped, so there is nothing to compare",
                    hint=f"rm -r {out}, and begin again; or only train on: myna train --resume {out / 'run'}",
                )
        with clock.stage("after", "the tuned model says them too"):
            after = _speak(asked, voice, AFTER)
        with clock.stage("listen", "ears compare both with the real recordings"):
            real = _real(asked, voice, before.sample_rate)
            sounds = {REAL: real, BEFORE: before.sounds, AFTER: after.sounds}
            scores = _listen(asked, voice, sounds, before.sample_rate)
    told = Told(
        asked_voice=asked.voice,
        model=asked.model,
        strength=asked.applied,
        voice=voice,
        sounds=sounds,
        stopped={BEFORE: before.stopped, AFTER: after.stopped},
        sample_rate=before.sample_rate,
        scores=scores,
        metrics=_metrics(out / "run" / "metrics.jsonl"),
        recipe=(out / "recipe.yaml").read_text(encoding="utf-8"),
        seconds=clock.seconds,
        memory=peak(torch.device(DEVICE)),
        out=out,
    )
    save(out / "scores.json", json.dumps(told.to_json(), indent=2, ensure_ascii=False) + "\n")
    save(out / "report.html", page(told))
    _say(told, console)
    return scores


def _refuse_to_overwrite(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise MynaError(f"{out} is a file", hint="choose another folder with --out")
    held = {path.name for path in out.iterdir()} if out.exists() else set()
    if not held:
        return
    imported = {path.name for path in (out / "recordings").iterdir()} if (out / "recordings").is_dir() else {""}
    if held == {"recordings"} and imported <= IMPORTED:
        return  # recordings that could not be used: they have been mended, or others are tried
    if "report.html" in held or "voice" in held:
        raise MynaError(f"{out} holds a demo already", hint=f"rm -r {out}, or choose another folder with --out")
    raise MynaError(f"{out} holds something else than a demo", hint="choose another folder with --out")


def _voice(asked: Asked, console: Console) -> Voice:
    source, imported = asked.voice or str(BUNDLED), asked.out / "recordings"
    utterances = workflow.import_into(source, imported, asked.format, MAX_BAD, asked.language, "")
    voice = choose(utterances, source, asked.seed)
    for note in voice.notes:
        console.print(note, markup=False, highlight=False)
    console.print(
        f"{len(voice.train)} clips to learn from, {voice.seconds:.0f} s; {len(voice.held_out)} are kept to judge by"
    )
    return voice


def _speak(asked: Asked, voice: Voice, name: str) -> Spoken:
    """All lines at once, which takes hardly longer than one, and with the same reference."""
    tuned = name == AFTER
    run, model, strength = (asked.out / "run", None, asked.applied) if tuned else (None, asked.model, 1.0)
    engine = workflow.open_engine(run=run, model=model, codec=None, device=DEVICE, strength=strength)
    codec = engine.codec
    recording = asked.out / REFERENCE_NAME
    write(recording, samples_of(voice.reference, codec.sample_rate), codec.sample_rate)
    reference = (engine.voice(recording, voice.reference.text),)
    lines = [
        SpeechRequest(utterance.text, reference, id=f"line {place}") for place, utterance in enumerate(voice.held_out)
    ]
    longest = max(len(samples_of(utterance, codec.sample_rate)) for utterance in voice.held_out) / codec.sample_rate
    sampling = replace(engine.family.sampling, max_seconds=RUNAWAY * longest, seed=asked.seed)
    with workflow.progress("speaking", TextColumn("{task.fields[heard]}")) as bar:
        task = bar.add_task("speaking", total=None, heard="")

        def advance(frames: int) -> None:
            bar.update(task, completed=frames, heard=f"{frames / codec.frame_rate:.1f} s of {len(lines)} lines at once")

        spoken = engine.speak(lines, sampling, advance)
    for number, speech in enumerate(spoken, start=1):
        # A model that ended at once leaves no file, since there is nothing in it.
        if len(speech.samples):
            write(asked.out / name / f"{number:02d}.wav", speech.samples, codec.sample_rate)
    return Spoken([speech.samples for speech in spoken], [speech.stopped for speech in spoken], codec.sample_rate)


def _real(asked: Asked, voice: Voice, sample_rate: int) -> list[Samples]:
    real = [samples_of(utterance, sample_rate) for utterance in voice.held_out]
    for number, samples in enumerate(real, start=1):
        write(asked.out / REAL / f"{number:02d}.wav", samples, sample_rate)
    return real


def _listen(asked: Asked, voice: Voice, sounds: Sounds, sample_rate: int) -> Scores:
    ears = 1 if asked.recogniser is None else 2
    with workflow.progress("listening") as bar:
        task = bar.add_task("listening", total=ears * sum(map(len, sounds.values())))
        return listen(
            sounds,
            [utterance.text for utterance in voice.held_out],
            sample_rate,
            recogniser=asked.recogniser,
            language=voice.language,
            advance=lambda: bar.advance(task),
        )


def _metrics(path: Path) -> list[dict[str, Any]]:
    return [json.loads(row) for row in path.read_text(encoding="utf-8").splitlines()]


def _say(told: Told, console: Console) -> None:
    """The table of scores, what is missing, and where to go on."""
    header, rows = told.score_table()
    table = Table(*header)
    for row in rows:
        table.add_row(*(cell.text for cell in row))
    console.print(table)
    for reason in told.missing:
        console.print(reason, markup=False, highlight=False)
    total = sum(told.seconds.values())
    console.print(f"{total / 60:.1f} minutes, at most {told.memory / 1e9:.1f} GB of memory")
    console.print(f"Open {told.out / 'report.html'}", markup=False, highlight=False, soft_wrap=True)
    console.print("Go on with your own recordings: myna demo --voice FOLDER --out demo-mine", highlight=False)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(min(count, before))
    try:
        yield
    finally:
        torch.set_num_threads(before)
