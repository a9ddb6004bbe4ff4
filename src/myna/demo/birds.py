"""What `myna demo` shows as long as fledgling's weights are not in the package: the way on a tiny model, in a minute.

The recordings are made here: two birds that whistle letters, each in its own register. The model is tiny and starts
from random weights, so what it can show is that the way through works: after training it whistles the lines it was
taught, code for code, each in the right bird's voice, and stops where it should.
"""

from __future__ import annotations

import html
import json
from base64 import b64encode
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from rich.console import Console
from rich.table import Table

from myna.audio.clip import write
from myna.data.codec import Codes, Samples
from myna.data.corpus import Corpus
from myna.errors import MynaError
from myna.models import save_tiny
from myna.models.base import Sampling
from myna.speak.engine import Line
from myna.workflow import open_engine, prepare, train

SAMPLE_RATE = 24_000
BIRDS = {"robin": 320.0, "heron": 110.0}
LINES = ("good morning", "what a fine day")
REFERENCE = "follow me"


@dataclass(frozen=True, slots=True)
class Taught:
    """A line as it was, and as the model says it before and after."""

    bird: str
    text: str
    real: Path
    before: Path
    after: Path
    match_before: float
    match_after: float
    stopped: bool


def whistle(text: str, pitch: float) -> Samples:
    """A letter is a tone of 60 ms with three harmonics and a soft edge; a space is a rest."""
    count = int(0.06 * SAMPLE_RATE)
    time = np.arange(count) / SAMPLE_RATE
    edge = np.minimum(1.0, np.minimum(time, time[::-1]) / 0.008)
    notes = [np.zeros(count)]
    for letter in text.lower():
        tone = pitch * 2 ** ((ord(letter) % 24) / 12)
        sound = sum(np.sin(2 * np.pi * tone * n * time) / n for n in (1, 2, 3))
        notes.append(np.zeros(count) if letter == " " else 0.25 * edge * sound)
    return np.concatenate(notes).astype(np.float32)


def record(folder: Path) -> None:
    """The recordings: one folder a bird, each clip with its text beside it."""
    for bird, pitch in BIRDS.items():
        for number, text in enumerate((REFERENCE, *LINES)):
            clip = folder / bird / f"{bird}-{number}.wav"
            write(clip, whistle(text, pitch), SAMPLE_RATE)
            clip.with_suffix(".txt").write_text(text + "\n", encoding="utf-8")


def recipe(out: Path, steps: int = 250) -> dict[str, Any]:
    return {
        "name": "birds",
        "model": {"source": str(out / "model"), "pretrained": False},
        "data": {"train": str(out / "prepared"), "row_tokens": 1024, "reference_seconds": [0.2, 10]},
        "adapt": {"rank": 16, "alpha": 32, "train_modules": ["audio_head", "audio_embedding"]},
        "train": {"steps": steps, "rows_per_step": 4, "learning_rate": 5e-3, "warmup": 10, "device": "cpu"},
    }


def run_birds(out: Path, console: Console) -> list[Taught]:
    """Everything through the same doors a user takes; the folder keeps all that was made."""
    if out.exists() and any(out.iterdir()):
        if not (out / "report.html").exists() and not (out / "recordings").exists():
            raise MynaError(f"{out} holds something else than a demo", hint="choose another folder with --out")
        raise MynaError(f"{out} holds a demo already", hint=f"rm -r {out}, or choose another folder with --out")
    torch.set_num_threads(1)  # so small a model only loses by sharing its work
    console.rule("1  recordings: two birds, three lines each")
    record(out / "recordings")
    save_tiny(out / "model")
    console.rule("2  prepare: clips become codes")
    prepare(str(out / "recordings"), out / "prepared", model=str(out / "model"), device="cpu")
    console.rule("3  before: the untrained model tries")
    before = _speak_all(out, "before", model=str(out / "model"))
    console.rule("4  train: a LoRA on the codes")
    path = out / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe(out), sort_keys=False), encoding="utf-8")
    train(path, out / "run")
    console.rule("5  after: the same lines again")
    after = _speak_all(out, "after", run=out / "run")
    taught = _compare(out, before, after)
    _report(out, taught, console)
    return taught


def _speak_all(
    out: Path, name: str, *, model: str | None = None, run: Path | None = None
) -> dict[tuple[str, str], Any]:
    engine = open_engine(run=run, model=model, codec=None, device="cpu")
    pairs = [(bird, text) for bird in BIRDS for text in LINES]
    lines = [
        Line(text, (engine.voice(_clip(out, bird, REFERENCE), REFERENCE),), id=f"{bird}/{text}") for bird, text in pairs
    ]
    spoken = engine.speak(lines, Sampling(temperature=0, max_seconds=3))
    for (bird, text), speech in zip(pairs, spoken, strict=True):
        write(out / name / f"{bird}-{LINES.index(text)}.wav", speech.samples, SAMPLE_RATE)
    return dict(zip(pairs, spoken, strict=True))


def _clip(out: Path, bird: str, text: str) -> Path:
    return out / "recordings" / bird / f"{bird}-{(REFERENCE, *LINES).index(text)}.wav"


def _compare(out: Path, before: dict[tuple[str, str], Any], after: dict[tuple[str, str], Any]) -> list[Taught]:
    corpus = Corpus.open(out / "prepared")
    taught = []
    for utterance in corpus.utterances:
        key = (utterance.speaker, utterance.text)
        if key not in after:
            continue
        real, number = corpus.codes(utterance), LINES.index(utterance.text)
        taught.append(
            Taught(
                bird=key[0],
                text=key[1],
                real=utterance.audio,
                before=out / "before" / f"{key[0]}-{number}.wav",
                after=out / "after" / f"{key[0]}-{number}.wav",
                match_before=match(before[key].codes, real),
                match_after=match(after[key].codes, real),
                stopped=after[key].stopped and len(after[key].codes) == len(real),
            )
        )
    return taught


def match(spoken: Codes, real: Codes) -> float:
    """Share of codes that agree, over the longer of the two."""
    shared = min(len(spoken), len(real))
    return float((spoken[:shared] == real[:shared]).sum() / (max(len(spoken), len(real)) * real.shape[1]))


def _report(out: Path, taught: list[Taught], console: Console) -> None:
    table = Table("bird", "line", "codes right before", "after", "stops on the right frame")
    for line in taught:
        table.add_row(
            line.bird, line.text, f"{line.match_before:.1%}", f"{line.match_after:.1%}", "yes" if line.stopped else "no"
        )
    console.print(table)
    rows = [json.loads(row) for row in (out / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    page = out / "report.html"
    page.write_text(_page(taught, [row["loss"] for row in rows if "loss" in row]), encoding="utf-8")
    console.print(f"Listen: {page}\nGo on with your own recordings: myna prepare FOLDER --out data/mine --model MODEL")


def _page(taught: list[Taught], losses: list[float]) -> str:
    """One file that opens without a network."""
    last, top = max(1, len(losses) - 1), max(losses)
    points = " ".join(f"{600 * n / last:.1f},{150 - 140 * loss / top:.1f}" for n, loss in enumerate(losses))
    lines = "".join(
        f"<tr><td>{html.escape(t.bird)}<td>{html.escape(t.text)}"
        + "".join(f"<td>{_player(path)}" for path in (t.real, t.before, t.after))
        + f"<td>{t.match_before:.1%}<td>{t.match_after:.1%}<td>{'yes' if t.stopped else 'no'}</tr>"
        for t in taught
    )
    return f"""<!doctype html><meta charset="utf-8"><title>Myna demo</title>
<style>body{{font:16px system-ui;margin:2rem;max-width:70rem}}
td,th{{padding:.3rem .8rem;text-align:left}}audio{{width:12rem}}</style>
<h1>Two birds, taught by a LoRA</h1>
<p>A tiny random model, before and after {len(losses)} optimizer steps on {len(taught)} lines.</p>
<table><tr><th>bird<th>line<th>real<th>before<th>after<th>codes right before<th>after<th>right end</tr>{lines}</table>
<h2>Loss</h2>
<svg viewBox="0 0 600 160" width="600"><polyline points="{points}" fill="none" stroke="teal" stroke-width="2"/></svg>
<p>from {losses[0]:.2f} to {losses[-1]:.3f}</p>
"""


def _player(path: Path) -> str:
    return f'<audio controls src="data:audio/wav;base64,{b64encode(path.read_bytes()).decode()}"></audio>'
