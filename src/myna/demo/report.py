"""What the demo has to tell, as a page that opens without a network."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from myna.demo.listening import AFTER, BEFORE, REAL, SYSTEMS, Scores, Sounds
from myna.demo.voice import Voice
from myna.report.document import document
from myna.report.markup import Markup, element, join, table
from myna.report.player import clip
from myna.report.plot import Curve, plot, smoothed

NOT_MEASURED = "not measured"
NAMES = {REAL: "real", BEFORE: "before", AFTER: "after"}
SMOOTH = 0.85
"""How much of the past the smoothed training loss keeps."""


class Cell(NamedTuple):
    """One of the table of scores."""

    text: str = ""
    mood: Literal["", "good", "bad"] = ""


@dataclass(frozen=True, slots=True, eq=False)
class Told:
    """Everything that the page shows."""

    asked_voice: str | None
    """None for the voice that comes with Myna."""
    model: str
    strength: float
    """Share of what was learned with which the tuned model speaks."""
    voice: Voice
    sounds: Sounds
    stopped: Mapping[str, Sequence[bool]]
    sample_rate: int
    scores: Scores
    metrics: Sequence[Mapping[str, Any]]
    recipe: str
    seconds: Mapping[str, float]
    memory: int
    """Bytes, at most."""
    out: Path

    @property
    def texts(self) -> list[str]:
        return [utterance.text for utterance in self.voice.held_out]

    @property
    def missing(self) -> list[str]:
        """Which scores are not there, and what brings them."""
        scores = self.scores
        return [
            f"{name}: not measured. {reason}"
            for name, reason in (("Similarity", scores.no_likeness), ("Word errors", scores.no_words))
            if reason
        ]

    @property
    def gain(self) -> tuple[float, float] | None:
        """By how much the voice is more like the real one, line by line, and twice the standard error of that."""
        if self.scores.likeness is None:
            return None
        before, after = (np.array(self.scores.likeness[name].to_voice) for name in (BEFORE, AFTER))
        return float(np.mean(after - before)), float(2 * np.std(after - before, ddof=1) / np.sqrt(len(after)))

    def score_table(self) -> tuple[list[str], list[list[Cell]]]:
        """For the console and the page alike."""
        header = ["", "similarity to the voice", "to the same line", "word errors", "ended by itself"]
        return header, [*(self._score_row(name) for name in SYSTEMS), self._change_row()]

    def to_json(self) -> dict[str, Any]:
        ended = {name: sum(stopped) for name, stopped in self.stopped.items()}
        about = {"model": self.model, "strength": self.strength, "speaker": self.voice.speaker, "lines": self.texts}
        return about | self.scores.to_json() | {"ended_by_itself": ended, "seconds": dict(self.seconds)}

    def _score_row(self, name: str) -> list[Cell]:
        likeness, words = self.scores.likeness, self.scores.words
        alike = likeness[name] if likeness else None
        to_line = NOT_MEASURED if alike is None else "" if alike.line_mean is None else f"{alike.line_mean:.3f}"
        wrong = words[name].total if words else None
        ended = self.stopped.get(name)
        return [
            Cell(NAMES[name]),
            Cell(f"{alike.mean:.3f}" if alike else NOT_MEASURED),
            Cell(to_line),
            Cell(f"{wrong.rate:.1%} ({wrong.errors} of {wrong.words})" if wrong else NOT_MEASURED),
            Cell(f"{sum(ended)} of {len(ended)}" if ended is not None else ""),
        ]

    def _change_row(self) -> list[Cell]:
        likeness, words = self.scores.likeness, self.scores.words
        cells = [Cell("change"), Cell(), Cell(), Cell(), Cell()]
        if likeness and self.gain:
            change, doubt = self.gain
            cells[1] = _change(f"{change:+.3f} ± {doubt:.3f}", change)
            to_line = (likeness[AFTER].line_mean or 0.0) - (likeness[BEFORE].line_mean or 0.0)
            cells[2] = _change(f"{to_line:+.3f}", to_line)
        if words:
            more = words[AFTER].total.rate - words[BEFORE].total.rate
            cells[3] = _change(f"{100 * more:+.1f} points", -more)
        ended = sum(self.stopped[AFTER]) - sum(self.stopped[BEFORE])
        cells[4] = _change(f"{ended:+d}", ended)
        return cells


def page(told: Told) -> str:
    voice = told.voice
    training = told.seconds.get("train", 0.0)
    return document(
        f"Myna demo: {voice.speaker}",
        element("h1", f"One voice, before and after {training / 60:.1f} minutes of training"),
        element(
            "p",
            f"{told.model} had never heard {voice.speaker}. It was given {len(voice.train)} clips, "
            f"{_minutes(voice.seconds)} in all, and learned a LoRA from them on this machine's processor. The lines "
            "below were kept from it. All of them are spoken with the same clip as a reference, so what differs "
            f"between before and after is the training alone{_share(told.strength)}.",
            class_="lead",
        ),
        _figures(told),
        element("h2", "Listen"),
        element("p", "A click on a picture plays from there. Time runs to the right, pitch upwards."),
        *(_line(told, place) for place in range(len(told.texts))),
        element("h2", "Scores"),
        _scores(told),
        element("h2", "Loss"),
        _losses(told),
        element("h2", "Go on"),
        _next(told),
        element("h2", "How it was made"),
        _making(told),
        _footer(told),
    )


def _figures(told: Told) -> Markup:
    likeness, words = told.scores.likeness, told.scores.words
    figures: list[tuple[object, str]] = []
    if likeness and told.gain:
        figures.append((f"{likeness[BEFORE].mean:.2f} → {likeness[AFTER].mean:.2f}", "similarity to the real voice"))
    if words:
        rates = [words[name].total.rate for name in (BEFORE, AFTER)]
        figures.append((f"{rates[0]:.0%} → {rates[1]:.0%}", "words that are heard wrongly"))
    figures.append((_minutes(sum(told.seconds.values())), "for all of it"))
    figures.append((f"{told.memory / 1e9:.1f} GB", "of memory at most"))
    return element(
        "div",
        *(element("div", element("b", number), element("span", about), class_="figure") for number, about in figures),
        class_="figures",
    )


def _line(told: Told, place: int) -> Markup:
    """Real, before and after side by side, on one scale of time."""
    text = told.texts[place]
    longest = max(len(told.sounds[name][place]) for name in SYSTEMS) / told.sample_rate
    clips = [
        clip(
            told.sounds[name][place],
            told.sample_rate,
            title=NAMES[name],
            label=f"line {place + 1}, {NAMES[name]}",
            longest=longest,
            note=_note(told, name, place),
        )
        for name in SYSTEMS
    ]
    return element("section", element("h3", text), element("div", *clips, class_="trio"), class_="card")


def _note(told: Told, name: str, place: int) -> Markup:
    """What ears made of one sound."""
    parts: list[object] = []
    if told.scores.likeness is not None:
        parts.append(f"similarity {told.scores.likeness[name].to_voice[place]:.2f}")
    if name in told.stopped and not told.stopped[name][place]:
        parts.append(element("span", "cut: it found no end", class_="bad"))
    if told.scores.words is not None:
        heard = told.scores.words[name].heard[place]
        if heard.looped:
            parts.append("not understood: the recogniser went round in circles")
        elif heard.text:
            parts.append(join(("heard as “", marked(told.texts[place], heard.text), "”")))
        else:
            parts.append("nothing was understood")
    return _between(" · ", parts)


def marked(text: str, heard: str) -> Markup:
    """What was heard, with the words that were not to be said in bold."""
    due, said = [_plain(word) for word in text.split()], heard.split()
    same: set[int] = set()
    for block in SequenceMatcher(None, due, [_plain(word) for word in said], autojunk=False).get_matching_blocks():
        same.update(range(block.b, block.b + block.size))
    words = [word if place in same else element("b", word) for place, word in enumerate(said)]
    return element("span", _between(" ", words), class_="heard")


def _scores(told: Told) -> Markup:
    header, rows = told.score_table()
    lines = len(told.texts)
    about = (
        f"Over {lines} lines. Similarity is that of each line to the mean of the real recordings of the other lines, "
        "by Resemblyzer: two clips of one person have about 0.87, two people about 0.6. The change is with twice its "
        f"standard error over the lines; {lines} lines are few, and a change within that says nothing. Word errors are "
        "those of a Whisper that writes down what it hears; it makes some with real recordings too. Of the checkpoints "
        "that training left, the one with the lowest evaluation loss speaks."
    )
    missing = [element("p", reason, class_="missing") for reason in told.missing]
    shown = [[_mooded(cell) for cell in row] for row in rows]
    scored = table(header, shown, caption="Scores of the real recordings, before and after")
    return join((scored, *missing, element("p", about, class_="note")))


def _losses(told: Told) -> Markup:
    trained = [(float(row["step"]), float(row["loss"])) for row in told.metrics if "loss" in row]
    judged = [(float(row["step"]), float(row["evaluation"]["loss"])) for row in told.metrics if "evaluation" in row]
    curves = [
        Curve("training, every step", trained, "faint"),
        Curve("training, smoothed", smoothed(trained, SMOOTH)),
        Curve("evaluation, on the held-out lines", judged, "dots", colour=1),
    ]
    return plot(curves, title="Loss while training", across="optimizer step", upwards="loss")


def _share(strength: float) -> str:
    if strength == 1.0:
        return ""
    return f", {strength:.0%} of it: with more the voice is more alike, and more words are lost"


def _next(told: Told) -> Markup:
    out = told.out
    reference = (
        f"--voice {shlex.quote(str(out / 'reference.wav'))} --voice-text {shlex.quote(told.voice.reference.text)}"
    )
    run = shlex.quote(str(out / "run"))
    return join(
        (
            element("p", "The same with your own recordings, each beside a text file of the same name:"),
            element("pre", "myna demo --voice FOLDER --out demo-mine"),
            element("p", "Say something else in this voice:"),
            element(
                "pre",
                f'myna speak "Good morning." --run {run} --strength {told.strength:g} \\\n  {reference} \\\n'
                "  --out good-morning.wav",
            ),
            element("p", "Train for longer, or otherwise; every setting of the recipe may be changed:"),
            element(
                "pre",
                f"myna prepare FOLDER --out data/mine --model {shlex.quote(told.model)}\n"
                f"myna train {shlex.quote(str(out / 'recipe.yaml'))} --out runs/mine --set data.train=data/mine "
                "\\\n  --set data.evaluation=null --set train.early_stopping_patience=null --set train.steps=300",
            ),
        )
    )


def _making(told: Told) -> Markup:
    total = sum(told.seconds.values())
    rows = [(name, f"{seconds:.1f} s") for name, seconds in told.seconds.items()]
    times = table(("stage", "took"), [*rows, ("in all", f"{total:.1f} s")], caption="How long each stage took")
    notes = [element("p", note) for note in told.voice.notes]
    recipe = element("details", element("summary", "The recipe"), element("pre", told.recipe), open=True)
    learned = element("ul", *(element("li", utterance.text) for utterance in told.voice.train))
    return join(
        (
            times,
            *notes,
            recipe,
            element("details", element("summary", "The lines it learned from"), learned),
        )
    )


def _footer(told: Told) -> Markup:
    bundled = (
        "The voice belongs to no person: it was made with Kokoro-82M (Apache-2.0), and reads examples from WordNet."
        if told.asked_voice is None
        else "Clone a voice only if its owner agrees."
    )
    return element("footer", element("p", bundled))


def _change(text: str, better: float) -> Cell:
    return Cell(text, "" if abs(better) < 1e-9 else "good" if better > 0 else "bad")


def _mooded(cell: Cell) -> object:
    """Better and worse in words as well as in colour."""
    if not cell.mood:
        return cell.text
    return element("span", cell.text, ", better" if cell.mood == "good" else ", worse", class_=cell.mood)


def _between(mark: str, parts: Sequence[object]) -> Markup:
    return join(part for place, one in enumerate(parts) for part in ((mark, one) if place else (one,)))


def _plain(word: str) -> str:
    return "".join(letter for letter in word.casefold() if letter.isalnum())


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"
