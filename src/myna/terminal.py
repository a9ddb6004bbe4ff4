"""Terminal output of the commands: progress bars, tables and colours. Nothing else prints."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from myna.core.io import bytes_hash
from myna.core.progress import ProgressCallback

if TYPE_CHECKING:
    from myna.checks.cluster import NodeReport
    from myna.checks.verify import Certificate
    from myna.core.check import Check
    from myna.curate.curation import CurationForecast, CurationResult
    from myna.curate.xray import Xray
    from myna.demo.run import DemoResult
    from myna.evaluate.comparison import Comparison
    from myna.evaluate.evaluation import Evaluation
    from myna.evaluate.listening import PreferenceCount, Preferences
    from myna.evaluate.scoring import ItemScores
    from myna.evaluate.takes import TakeRanking
    from myna.provenance.detection import Detection
    from myna.provenance.voice_store import StoredVoice
    from myna.serve.context import ServerSettings
    from myna.serve.messages import EngineInfo
    from myna.speak.answering import DatasetAnswers
    from myna.speak.engine import Speech
    from myna.speak.lines import SpokenLines
    from myna.speak.marking import MarkedStream

STATUS_MARKS = {"passed": ("✓", "+", "green"), "warning": ("!", "!", "yellow"), "failed": ("✗", "x", "red")}
"""The mark of a check, the same in ASCII for terminals that have no more, and its colour."""
MAX_CELL_CHARACTERS = 21
"""In the table of a cluster's nodes."""
MIN_DETAIL_WIDTH = 120
"""Columns of a terminal that has room for sentences beside a table."""

LISTENING_STAGE = "listening"
"""Stage of a curation that counts seconds of audio."""

errors = Console(stderr=True, markup=False, emoji=False)


@contextmanager
def progress_bars() -> Iterator[ProgressCallback]:
    """A progress callback that draws a bar for each stage on standard error."""
    with _bars() as bars:
        tasks: dict[str, TaskID] = {}

        def update(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total, state="")
            bars.update(tasks[stage], completed=done, total=total)

        yield update


@contextmanager
def curation_bars() -> Iterator[ProgressCallback]:
    """The same for a curation, with hours of audio done in an hour while it listens."""
    with _bars() as bars:
        tasks: dict[str, TaskID] = {}
        before: dict[str, int] = {}

        def update(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage], before[stage] = bars.add_task(stage, total=total, state="", completed=done), done
            task = next(one for one in bars.tasks if one.id == tasks[stage])
            state = ""
            if stage == LISTENING_STAGE and task.elapsed and done > before[stage]:
                state = f"seconds of audio, {(done - before[stage]) / task.elapsed:.1f} hours an hour"
            bars.update(tasks[stage], completed=done, total=total, state=state)

        yield update


def _bars(*, shown: bool = True) -> Progress:
    return Progress(
        TextColumn("{task.description}", style="bold", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=errors,
        disable=not shown,
    )


class TrainingDisplay:
    """A live line with the loss, the speed and the time left, and messages above it."""

    def __init__(self, *, shown: bool = True) -> None:
        self._shown = shown
        self._bars = _bars(shown=shown)
        self._task: TaskID | None = None

    def __enter__(self) -> TrainingDisplay:
        self._bars.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bars.__exit__(*error)

    def on_message(self, text: str) -> None:
        if self._shown:
            self._bars.console.print(text, highlight=False)

    def on_start(self, steps: int, done: int) -> None:
        self._task = self._bars.add_task("training", total=steps, completed=done, state="")

    def on_metrics(self, row: dict[str, Any]) -> None:
        if "evaluation" in row:
            losses = row["evaluation"]
            gain = (
                f", {losses['against_base']:+.4f} against the model it began with" if "against_base" in losses else ""
            )
            self.on_message(f"step {row['step']}: evaluation loss {losses['loss']:.4f}{gain}")
        elif "speech_eval" in row:
            self.on_message(f"step {row['step']}: {_speech_scores(row['speech_eval'])}")
        elif self._task is not None:
            speed = row["speed"]
            pace = f"{speed['tokens_per_second']:,.0f} tokens/s  {speed['audio_per_second']:.1f} audio-s/s"
            self._bars.update(self._task, completed=row["step"], state=f"loss {row['loss']:.4f}  {pace}")

    def progress(self, stage: str, done: int, total: int | None) -> None:
        """Speech evaluation may take minutes, during which no step is made."""
        if self._task is not None:
            self._bars.update(self._task, state=f"{stage}, {done} of {total}")


class DemoDisplay(TrainingDisplay):
    """The same for a demo: one bar at a time, of the stage that is running."""

    def __init__(self) -> None:
        super().__init__()
        self._stages: dict[str, TaskID] = {}

    def on_start(self, steps: int, done: int) -> None:
        self._hide_finished()
        super().on_start(steps, done)

    def progress(self, stage: str, done: int, total: int | None) -> None:
        if stage not in self._stages:
            self._hide_finished()
            self._stages[stage] = self._bars.add_task(stage, total=total, state="")
        self._bars.update(self._stages[stage], completed=done, total=total)

    def _hide_finished(self) -> None:
        for task in self._bars.task_ids:
            self._bars.update(task, visible=False)


def _speech_scores(scores: dict[str, Any]) -> str:
    gain = f", {scores['gain']:+.3f} over the untuned model" if "gain" in scores else ""
    looped = f" ({scores['looped']} items looped)" if scores.get("looped") else ""
    wer = f", {scores['wer']:.1%} word errors{looped}" if scores["wer"] is not None else ""
    similarity = f", similarity {scores['similarity']:.3f}" if scores["similarity"] is not None else ""
    return f"score {scores['score']:.3f}{gain}{wer}{similarity}"


def show_checks(checks: Iterator[Check], console: Console) -> list[Check]:
    """Print each check as it is done, with its hint below."""
    if isinstance(console.file, io.TextIOWrapper):
        console.file.reconfigure(errors="replace")  # an old encoding is no reason to stop
    shown = []
    for check in checks:
        mark, plain, colour = STATUS_MARKS[check.status]
        line = Table.grid(padding=(0, 1))
        line.add_column(width=1)
        line.add_column(width=22)
        line.add_column(overflow="fold")
        mark = mark if console.encoding.startswith("utf") else plain
        line.add_row(Text(mark, colour), Text(check.name, "bold"), Text(check.message))
        if check.hint:
            line.add_row("", "", Text(f"→ {check.hint}", colour))
        console.print(line)
        shown.append(check)
    return shown


def show_nodes(nodes: Sequence[NodeReport], console: Console) -> None:
    """Print the nodes of a cluster side by side; what differs is told by checks."""
    facts = list(dict.fromkeys(name for node in nodes for name in node.facts))
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for title in ("node", "CPUs", "GPUs", *facts):
        table.add_column(title, overflow="fold")
    for node in nodes:
        cells = [node.facts.get(name, "-") for name in facts]
        # Of what is long, a hash: whether it is the same everywhere can be seen.
        short = [one if len(one) <= MAX_CELL_CHARACTERS else bytes_hash(one.encode())[:8] for one in cells]
        table.add_row(node.name, str(node.cpus), str(node.gpus), *short)
    console.print(table)


def show_certificate(certificate: Certificate, console: Console) -> None:
    """Print every check of a verification, and the verdict."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for title in ("check", "result", "difference", "tolerance", "seconds"):
        table.add_column(title, no_wrap=True, justify="left" if title in ("check", "result") else "right")
    is_wide = console.width >= MIN_DETAIL_WIDTH
    if is_wide:
        table.add_column("measured", overflow="fold")
    styles = {"passed": "green", "failed": "red", "skipped": "dim"}
    for check in certificate.checks:
        figures = ["" if value is None else f"{value:.2g}" for value in (check.difference, check.tolerance)]
        status = Text(check.status, styles[check.status])
        detail = [Text(check.message)] if is_wide else []
        table.add_row(Text(check.name, "bold"), status, *figures, f"{check.seconds:.1f}", *detail)
    console.print(table)
    if not is_wide:
        show_notes([f"{check.name}: {check.message}" for check in certificate.checks], console)
    show_notes([certificate.verdict], console)


def show_notes(notes: Sequence[str], console: Console) -> None:
    """Print sentences as they are."""
    for note in notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def show_curation(result: CurationResult, console: Console) -> None:
    """Print where the hours went, who speaks, and how to go on."""
    table = Table(title=f"{result.recordings} recordings, {_hours(result.seconds)}", box=None, padding=(0, 2, 0, 0))
    for title in ("", "hours", "share"):
        table.add_column(title, justify="right" if title else "left")
    for name, seconds in (("kept", result.kept_seconds), *result.dropped.items()):
        share = seconds / result.seconds if result.seconds else 0.0
        table.add_row(Text(name, "bold green" if name == "kept" else "none"), _hours(seconds), f"{share:.1%}")
    console.print(table)
    who = ", ".join(f"{name} {_hours(seconds)}" for name, seconds in list(result.speakers.items())[:10])
    show_notes([f"{result.clips} clips of {len(result.speakers)} speakers: {who}"] if result.clips else [], console)
    show_notes(result.notes, console)
    folder = result.folder
    show_notes(
        [
            f"Look at it:  myna xray {folder}",
            f"Go on:  myna prepare {folder} --model MODEL --out {folder}-prepared",
        ],
        console,
    )


def show_xray(xray: Xray, console: Console) -> None:
    """Print the verdict, and where the page is."""
    colors = {"good": "green", "bad": "red"}
    for sentence in xray.numbers["verdict"]:
        mark = Text("● ", colors.get(sentence["kind"], "dim"))
        console.print(mark.append(f"{sentence['text']}.", "none"), soft_wrap=True)
    show_notes([*xray.numbers["notes"], f"Look and listen:  {xray.page}"], console)


def show_forecast(forecast: CurationForecast, console: Console) -> None:
    """Print what a sample says of the whole."""
    sampled = f"{forecast.sampled_seconds / 60:.1f} of {forecast.seconds / 60:.1f} minutes were listened to"
    kept = f"about {_hours(forecast.kept_seconds)} of {_hours(forecast.seconds)} would be kept"
    reasons = ", ".join(f"{name} {share:.0%}" for name, share in forecast.dropped.items())
    time = f"listening to all of it would take about {_hours(forecast.work_seconds)} here"
    show_notes([sampled, kept, f"dropped: {reasons}", time, *forecast.notes], console)


def _hours(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole % 3600 // 60:02}:{whole % 60:02}"


def show_speech(file: Path, speech: Speech, console: Console) -> None:
    """Print how long a file is, and whether the model found its end; else the words at which it did not."""
    _show_end(f"{file}: ", speech, speech.seconds, console)


def show_stream(stream: MarkedStream, seconds: float, console: Console) -> None:
    """The same for a stream that has ended."""
    _show_end("", stream, seconds, console)


def _show_end(name: str, speech: Speech | MarkedStream, seconds: float, console: Console) -> None:
    end = "stopped by itself" if speech.finish_reason == "stop" else "it did not find its end"
    style = "none" if speech.finish_reason == "stop" and not speech.warnings else "yellow"
    unmarked = ", without a watermark" if speech.origin is not None and not speech.origin.watermark else ""
    for line in (f"{name}{seconds:.2f} s, {end}{unmarked}", *speech.warnings):
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def show_takes(ranking: TakeRanking, console: Console) -> None:
    """Print takes from the best on, by the metrics that were measured, and what was not."""
    columns: dict[str, list[str | float | None]] = {
        "word errors": [_word_errors(take.scores) for take in ranking.takes],
        "similarity": [take.scores.similarity for take in ranking.takes],
        "DistillMOS": [take.scores.distillmos for take in ranking.takes],
        "DNSMOS": [take.scores.dnsmos for take in ranking.takes],
    }
    measured = {title: cells for title, cells in columns.items() if any(cell is not None for cell in cells)}
    table = Table("take", "seconds", "end", *measured)
    for place, take in enumerate(ranking.takes):
        end = "stopped by itself" if take.speech.stopped else "it did not find its end"
        cells = [cells[place] for cells in measured.values()]
        shown = [f"{cell:.3f}" if isinstance(cell, float) else cell or "" for cell in cells]
        table.add_row(str(take.number), f"{take.speech.seconds:.2f}", ", ".join([end, *take.defects]), *shown)
    console.print(table)
    show_notes(ranking.notes, console)


def _word_errors(scores: ItemScores) -> str | None:
    return None if scores.word_errors is None else f"{scores.word_errors} of {scores.words}"


def show_spoken_lines(spoken: SpokenLines, console: Console) -> None:
    """Print how many lines were spoken, and at which words the model did not find its end."""
    seconds = sum(row["seconds"] for row in spoken.rows)
    before = f", {spoken.kept} of them before" if spoken.kept else ""
    for warning in spoken.warnings:
        console.print(warning, style="yellow", markup=False, highlight=False, soft_wrap=True)
    show_notes([f"{spoken.folder}: {len(spoken.rows)} lines{before}, {seconds:.1f} s"], console)


def show_detection(found: Detection, console: Console) -> None:
    """Print what was found in a file, and who signed it."""
    parts = [span for span in found.spans if span.score > 0.5]
    mark = (
        f"marked (score {max(span.score for span in parts):.2f})" if parts else f"not marked (score {found.score:.2f})"
    )
    if 0 < len(parts) < len(found.spans):
        mark += f", in {', '.join(f'{span.start:.0f}-{span.end:.0f} s' for span in parts)}"
    lines, known = [f"{found.file}: {mark}"], found.credentials
    if known is not None:
        who = {
            "own": f"signed by this installation ({known.signer})",
            "valid": f"signed by {known.signer or 'an unknown key'}, for which nobody vouches",
            "invalid": f"signature does not hold ({', '.join(known.problems) or 'damaged'}): do not trust what it says",
        }
        lines.append(f"  credentials: {who[known.state]}")
        lines += [f"    {key}: {value}" for key, value in known.speech.items()]
    if found.logged is not None:
        lines.append(f"  spoken here: {found.logged['time']}, voice {found.logged['voice'] or 'of the model'}")
    style = "yellow" if known is not None and known.state == "invalid" else "none"
    for line in lines:
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def show_voices(voices: Sequence[StoredVoice], console: Console) -> None:
    """Print stored voices, a row each."""
    table = Table("name", "language", "recordings", "similarity", "added")
    for voice in voices:
        added = datetime.fromtimestamp(voice.created_at, UTC).strftime("%Y-%m-%d")
        similarity = f"{min(voice.checks['similarities']):.2f}"
        cells = (voice.name, voice.language, str(len(voice.recordings)), similarity, added)
        table.add_row(*map(Text, cells))
    console.print(table)


def show_server(settings: ServerSettings, info: EngineInfo, console: Console, *, replicas: str = "") -> None:
    """Print what is served, where, and how to call it; with how many replicas, where it is on Ray."""
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
    address, engine = f"http://{host}:{settings.port}", settings.engine
    names = ", ".join((settings.model, *info.adapters))
    lines = [f"{names} on {info.device}{f', replicas: {replicas}' if replicas else ''}: {address}"]
    if settings.host not in ("127.0.0.1", "localhost", "::1"):
        key = "with your API key" if settings.api_key else "without a key: everybody who can reach it may speak"
        lines.append(f"it listens on {settings.host}, for other machines too, {key}")
    header = ' -H "Authorization: Bearer $MYNA_API_KEY"' if settings.api_key else ""
    if info.answers:
        lines.append(f"  curl {address}/v1/audio/assessments{header} -F file=@recording.wav")
    else:
        mark = f"marked ({info.watermark})" if info.watermark else "NOT marked as synthetic"
        each = " in each" if replicas else ""
        lines.append(f"{engine.rows} streams at a time{each}, {engine.max_waiting} more wait; speech is {mark}")
        body = f'{{"model": "{settings.model}", "voice": "default", "input": "Good morning."}}'
        key = "os.environ['MYNA_API_KEY']" if settings.api_key else "'none'"
        lines += [
            f"  curl {address}/v1/audio/speech{header} -H 'Content-Type: application/json' \\",
            f"    -d '{body}' -o morning.mp3",
            f"  OpenAI(base_url='{address}/v1', api_key={key}).audio.speech.create(",
            f"    model='{settings.model}', voice='default', input='Good morning.').write_to_file('morning.mp3')",
        ]
    lines.append(f"Fields: {address}/docs; figures: {address}/metrics. Ctrl+C ends it.")
    show_notes(lines, console)


def show_recipes(recipes: Mapping[str, Path], console: Console) -> None:
    """Print each recipe with the comment it begins with."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    for name, path in recipes.items():
        lines = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
        comment = " ".join(line.lstrip("# ") for line in lines)
        table.add_row(name, comment.partition(". ")[0].rstrip("."))
    console.print(table)


def show_warnings(warnings: Sequence[str], console: Console) -> None:
    """Print what belongs above every figure."""
    for warning in warnings:
        console.print(f"warning: {warning}", style="bold red", markup=False, highlight=False, soft_wrap=True)


def show_model_stats(title: str, numbers: dict[str, Any], console: Console) -> None:
    table = Table(title=title, show_header=False)
    for key, value in numbers.items():
        is_share = isinstance(value, float)
        table.add_row(key, f"{value:,}" if isinstance(value, int) else f"{value:.4%}" if is_share else str(value))
    console.print(table)


def show_dataset_answers(answers: DatasetAnswers, console: Console) -> None:
    """Print warnings, and the metrics where the answers are assessments."""
    show_warnings(answers.warnings, console)
    show_notes(answers.notes, console)
    if answers.assessment is not None:
        table = Table(*answers.assessment.header, title=answers.assessment.title)
        for cells in answers.assessment.rows:
            table.add_row(*cells)
        console.print(table)


def show_demo(result: DemoResult, console: Console) -> None:
    """Print the table of scores, what is missing, and where to go on."""
    header, rows = result.score_table()
    table = Table(*header)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    show_notes(result.unmeasured, console)
    minutes, gigabytes = sum(result.seconds.values()) / 60, result.peak_memory_bytes / 1e9
    console.print(f"{minutes:.1f} minutes, at most {gigabytes:.1f} GB of memory", highlight=False)
    show_notes([f"Open {result.folder / 'report.html'}"], console)
    console.print("Go on with your own recordings: myna demo --voice FOLDER --out demo-mine", highlight=False)


def show_evaluation(evaluation: Evaluation, console: Console) -> None:
    """Print the metrics of each system, what is missing, the diagnoses, and where the page is."""
    from myna.evaluate.metrics import METRICS
    from myna.evaluate.systems import system_title

    show_warnings(evaluation.warnings, console)
    table = Table("", *map(system_title, evaluation.estimates))
    for metric in METRICS:
        estimates = [of[metric.key] for of in evaluation.estimates.values()]
        if any(estimate.n for estimate in estimates):
            table.add_row(metric.title, *(metric.format_estimate(estimate) for estimate in estimates))
    console.print(table)
    show_notes([f"{key}: not measured. {reason}" for key, reason in evaluation.missing.items()], console)
    for diagnosis in evaluation.diagnoses:
        console.print(f"{diagnosis.name}: {diagnosis.text}", style="yellow", markup=False, highlight=False)
    show_notes([f"Open {evaluation.folder / 'report.html'}"], console)


def show_comparison(comparison: Comparison, console: Console) -> None:
    """Print metrics side by side, what cannot be compared, and where the page is."""
    from myna.evaluate.metrics import METRICS
    from myna.evaluate.systems import system_title

    show_warnings(comparison.warnings, console)
    table = Table("", *map(system_title, comparison.estimates))
    for metric in METRICS:
        estimates = [metrics.get(metric.key) for metrics in comparison.estimates.values()]
        if any(estimate is not None and estimate.n for estimate in estimates):
            table.add_row(metric.title, *(metric.format_estimate(value) if value else "" for value in estimates))
    console.print(table)
    show_notes([f"{key}: not compared. {reason}" for key, reason in comparison.missing.items()], console)
    show_notes(comparison.notes, console)
    show_notes(
        [
            f"Open {comparison.folder / 'compare.html'} to listen without knowing who it is,",
            f"or have answers saved: myna compare {comparison.folder} --serve",
        ],
        console,
    )


def show_preferences(preferences: Preferences, console: Console) -> None:
    """Print what listeners prefer, by item and for each pair of systems."""
    if not preferences.items:
        console.print("Nobody has listened yet.")
    show_notes([f"{name}: {answers} answers" for name, answers in preferences.listeners], console)
    if preferences.not_counted:
        console.print(f"{preferences.not_counted} answers are about sounds that are not here, and do not count")
    if preferences.items:
        table = Table("item", "preferred", "interval")
        for item, count in preferences.items:
            table.add_row(item, _wins(count), _preference_interval(count))
        console.print(table)
    show_notes([_verdict(pair) for pair in preferences.pairs], console)


def _verdict(pair: PreferenceCount) -> str:
    if not pair.decided:
        return f"{' and '.join(pair.systems)}: no answer prefers one" + _ties(pair)
    verdict = f"{pair.preferred} is preferred" if pair.preferred else "no preference can be told"
    return f"{_wins(pair)}; {_preference_interval(pair)}, sign test p = {pair.p_value:.3g}: {verdict}"


def _wins(count: PreferenceCount) -> str:
    return ", ".join(f"{name} {wins}" for name, wins in zip(count.systems, count.wins, strict=True)) + _ties(count)


def _ties(count: PreferenceCount) -> str:
    return f", no difference {count.ties}" if count.ties else ""


def _preference_interval(count: PreferenceCount) -> str:
    low, high = count.interval
    share = f"{count.share:.0%}" if count.share is not None else "nothing"
    return f"{count.systems[0]} {share} [{100 * low:.0f}, {100 * high:.0f}]"
