"""Progress of a training for people who watch it: lines for its log, and report.html with the loss curve."""

import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

from myna.core.run_folder import Run
from myna.report import page

LINE_SECONDS = 60.0
"""Seconds between two lines about the steps."""
PAGE_SECONDS = 30.0
"""Seconds between two versions of the page."""
MAX_POINTS = 1000
"""Maximum number of points that a curve is drawn with."""
SMOOTHING = 0.9
"""Decay of the running mean in the loss curve."""
RELOAD = "setTimeout(() => location.reload(), 60000)"
"""Script that shows the newest version of the page while the run trains."""
Points = list[tuple[float, float]]


class RunReport:
    """Summary of the rows of metrics.jsonl, as lines and as a page."""

    def __init__(self, run: Run, steps: int, done: int) -> None:
        self.run, self.steps, self.step = run, steps, done
        self._first, self._start = done, time.monotonic()
        self._next_line, self._next_page = self._start + LINE_SECONDS, self._start
        self._curves = collect_curves(run.read_metrics())

    def add(self, row: dict[str, Any]) -> str | None:
        """Add a row, and write the page from time to time. Return a line about the row if one is due."""
        self.step = max(self.step, row["step"])
        _add_points(self._curves, row)
        if time.monotonic() >= self._next_page:
            self.write(RELOAD)
            self._next_page = time.monotonic() + PAGE_SECONDS
        if "speech_eval" in row:
            line = f"step {row['step']}: {_describe_speech(row['speech_eval'])}"
        elif "evaluation" in row:
            losses = row["evaluation"]
            gain = f", {losses['against_base']:+.4f} against the start" if "against_base" in losses else ""
            line = f"step {row['step']}: evaluation loss {losses['loss']:.4f}{gain}"
        elif time.monotonic() < self._next_line:
            return None
        else:
            line = (
                f"step {row['step']} of {self.steps}: loss {row['loss']:.4f}, "
                f"gradient norm {row['gradient_norm']:.3g}, learning rate {row['learning_rate']:.3g}, "
                f"{row['speed']['tokens_per_second']:,.0f} tokens/s, {self.time_left()} left"
            )
        self._next_line = time.monotonic() + LINE_SECONDS
        return line

    def time_left(self) -> str:
        """Return the time that the remaining steps will take, evaluations included."""
        seconds = (time.monotonic() - self._start) * (self.steps - self.step) / max(1, self.step - self._first)
        hours, minutes = divmod(round(seconds / 60), 60)
        return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"

    def write(self, script: str = "") -> None:
        """Write report.html, complete or not at all."""
        curves = self._curves
        numbers = [(f"{self.step} of {self.steps}", "steps"), (self.time_left(), "left")]
        numbers += [
            (f"{points[-1][1]:.4g}", title)
            for title, points in (("loss", curves["loss"]), ("evaluation loss", curves["evaluation"]))
            if points
        ]
        sections = [
            page.heading(self.run.recipe.name, 1),
            page.figures(numbers),
            loss_plot(curves),
            self._plot("gradient_norm", "Gradient norm, before it is clipped"),
            self._plot("learning_rate", "Learning rate"),
        ]
        if curves["score"]:
            sections.append(self._plot("score", "Score of the speech"))
            sections.append(page.paragraph("Listen to the evaluations", href="speech_eval/report.html"))
        self.run.save_report(page.render_page(f"{self.run.recipe.name}, training", sections, script=script))

    def _plot(self, key: str, title: str) -> page.Section:
        curve = page.Curve(title, _thin(self._curves[key]))
        return page.line_plot([curve], title=title, x_label="optimizer step", y_label="")


def collect_curves(rows: Iterable[Mapping[str, Any]]) -> dict[str, Points]:
    """Collect the numbers that are drawn from rows of metrics.jsonl, by name."""
    curves: dict[str, Points] = {key: [] for key in ("loss", "gradient_norm", "learning_rate", "evaluation", "score")}
    for row in rows:
        _add_points(curves, row)
    return curves


def _add_points(curves: Mapping[str, Points], row: Mapping[str, Any]) -> None:
    """Add the numbers of a row to the curves. One that is not finite has no place on a page."""
    values = {"evaluation": row.get("evaluation", {}).get("loss"), "score": row.get("speech_eval", {}).get("score")}
    for key, points in curves.items():
        value = values.get(key, row.get(key))
        if value is not None and math.isfinite(value):
            points.append((float(row["step"]), float(value)))


def loss_plot(curves: Mapping[str, Points]) -> page.Section:
    """Draw the loss of training and evaluation."""
    drawn = [
        page.Curve("training, every step", _thin(curves["loss"]), "faint"),
        page.Curve("training, smoothed", _thin(page.smooth_curve(curves["loss"], SMOOTHING))),
        page.Curve("evaluation, on the held-out data", curves["evaluation"], "dots", color=1),
    ]
    return page.line_plot(drawn, title="Loss while training", x_label="optimizer step", y_label="loss")


def _thin(points: Points) -> Points:
    return points[:: -(-len(points) // MAX_POINTS) or 1]


def _describe_speech(scores: dict[str, Any]) -> str:
    gain = f", {scores['gain']:+.3f} over the untuned model" if "gain" in scores else ""
    looped = f" ({scores['looped']} items looped)" if scores.get("looped") else ""
    wer = f", {scores['wer']:.1%} word errors{looped}" if scores["wer"] is not None else ""
    similarity = f", similarity {scores['similarity']:.3f}" if scores["similarity"] is not None else ""
    return f"score {scores['score']:.3f}{gain}{wer}{similarity}"
