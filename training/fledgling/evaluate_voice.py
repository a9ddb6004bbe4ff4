"""Evaluate zero-shot voice cloning on held-out speakers and held-out sentences.

    python training/fledgling/evaluate_voice.py --model fledgling --source data/fledgling/natural_shaped \\
        --sentences data/fledgling/texts/held_out.txt.gz --asr WHISPER_FOLDER --out runs/evaluation

Ten speakers with ten sentences each, cloned from one clip of three to eight seconds. Word error rate by Whisper,
speaker similarity to the reference and its rank among the ten by Resemblyzer, DistillMOS, stop rate (on a hundred more
sentences, half of them single words), and speed. Real recordings of the same speakers and their codec round trips are
scored beside it. Run again, it does what is missing; all audio is kept.

With `--real-people` the source is a corpus of real recordings such as en-real: thirty held-out people, who may have one
recording each, are cloned, and all speakers of `--also` (asterisk-en of real_corpora.py). `--ecapa` measures similarity
by ECAPA in place of Resemblyzer:

    python training/fledgling/evaluate_voice.py --model fledgling --real-people --source CORPUS/en-real \\
        --also data/fledgling/real/judge/asterisk-en-0.parquet --speakers 30 --per-speaker 2 --words 15 --more 15 \\
        --ecapa ecapa.safetensors --sentences data/fledgling/texts/held_out.txt.gz --asr WHISPER_FOLDER \\
        --out runs/evaluation_real

`--sweep temperature=0.6,0.8,1.0` evaluates each value in a folder of its own; values of several settings are combined.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from myna.core.errors import ConfigError, MynaError
from myna.listen.speaker_encoders import SpeakerEmbedding
from myna.models.base import Sampling
from myna.models.ref import ModelRef
from myna.speak.engine import Engine
from myna.speak.loading import load_engine
from voice_evaluation.plan import EvaluationPlan, make_plan, make_real_plan, read_lines
from voice_evaluation.scoring import (
    Row,
    VoiceMetrics,
    cloned_clips,
    mean_scores,
    real_clips,
    reference_embeddings,
    score_clips,
    transcribe_references,
)
from voice_evaluation.synthesis import (
    OnProgress,
    begin_folder,
    encode_references,
    fingerprint,
    measure_speed,
    synthesize_missing,
    write_json,
    write_real_clips,
)

TARGETS = {
    "word error rate": ("<=", 0.15),
    "similarity": (">=", 0.80),
    "top-1 speaker accuracy": (">=", 0.80),
    "DistillMOS": (">=", 3.0),
    "stop rate": (">=", 0.99),
    "times real time": (">=", 1.5),
}
"""Targets of fledgling."""
REAL_TARGETS = TARGETS | {
    "word error rate": ("<=", 0.08),
    "similarity": (">=", 0.45),
    "top-1 speaker accuracy": (">=", 0.70),
    "times real time": (">=", 4.0),
}
"""Targets with real people, similarity by ECAPA."""
SPEED_SENTENCES = 11
"""Sentences that are synthesized one at a time to measure the speed, the first of them to warm up."""
MAX_SECONDS = 20.0
"""No held-out sentence takes so long: speech that lasts until then did not stop."""


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    try:
        reports = evaluate_all(options)
    except MynaError as error:
        sys.exit(f"{error}")
    print(table(reports[0]) if len(reports) == 1 else sweep_table(reports))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("--model", help="a folder, a hub name, or fledgling")
    add("--run", type=Path, help="or the folder of a run")
    add(
        "--source", type=Path, required=True, help="natural speech: a folder of augment_natural.py, or of parquet files"
    )
    add("--real-people", action="store_true", help="the source is of real people, who may have one recording each")
    add("--also", type=Path, action="append", default=[], help="real recordings of others to clone; may be repeated")
    add("--ecapa", type=Path, metavar="FILE", help="SpeechBrain's ECAPA as safetensors, in place of Resemblyzer")
    add("--sentences", type=Path, required=True, metavar="FILE", help="held_out.txt.gz of extract_texts.py")
    add("--asr", default="base", help="a CTranslate2 Whisper model, or a name to download")
    add("--out", type=Path, required=True, help="folder for audio and scores")
    add("--real", type=Path, help="folder for what does not depend on the model; OUT/real if not given")
    add("--speakers", type=int, default=10)
    add("--per-speaker", type=int, default=10, help="sentences of each speaker with all scores")
    add("--words", type=int, default=50, help="one-word sentences, for the stop rate")
    add("--more", type=int, default=50, help="other sentences, for the stop rate")
    add("--plan-seed", type=int, default=0, help="of the choice of speakers and sentences; the model card has 0")
    add("--batch-size", type=int, default=20, help="sentences synthesized at once")
    add("--threads", type=int, default=2, help="cores to use")
    add("--device", default="cpu", help="of the model; metrics run on the CPU")
    add("--sweep", action="append", default=[], metavar="SETTING=A,B", help="evaluate these values; may be repeated")
    for name, default in asdict(Sampling()).items():
        default_text = f"{MAX_SECONDS:g}" if name == "max_seconds" else "the model's own"
        add(f"--{name.replace('_', '-')}", type=type(default), help=f"sampling, {default_text} if not given")
    return made


def evaluate_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    counts = (options.speakers, options.per_speaker, options.words, options.more)
    lines = read_lines(options.sentences)
    if options.real_people:
        plan = make_real_plan(options.source, options.also, lines, options.plan_seed, *counts)
    else:
        plan = make_plan(options.source, lines, options.plan_seed, *counts)
    metrics = VoiceMetrics.open(options.asr, options.threads, options.ecapa)
    plan = transcribe_references(plan, metrics.asr)
    engine = load_engine(ModelRef.from_options(options.run, options.model), codec=None, device=options.device)
    chosen = list(sweep_settings(options.sweep, sampling_of(engine, options)))
    real = score_real(options.real or options.out / "real", plan, engine, metrics, options)
    reports = []
    for name, sampling in chosen:
        report = {
            "settings": name,
            **evaluate_setting(options.out / name, plan, engine, metrics, sampling, real, options),
        }
        write_json(options.out / name / "scores.json", report)
        (options.out / name / "scores.txt").write_text(table(report) + "\n", encoding="utf-8")
        reports.append(report)
    if options.sweep:
        write_json(options.out / "sweep.json", reports)
        (options.out / "sweep.txt").write_text(sweep_table(reports) + "\n", encoding="utf-8")
    return reports


def sampling_of(engine: Engine, options: argparse.Namespace) -> Sampling:
    """The model's sampling settings, overridden by the options."""
    typed = {field.name: getattr(options, field.name) for field in fields(Sampling)}
    overrides = {name: value for name, value in typed.items() if value is not None}
    return replace(engine.family.sampling, **({"max_seconds": MAX_SECONDS} | overrides))


def sweep_settings(sweep: list[str], given: Sampling) -> Iterator[tuple[str, Sampling]]:
    """Every combination of the swept values with a name for its folder; `given` alone without a sweep."""
    kinds: dict[str, type[float]] = {name: type(value) for name, value in asdict(Sampling()).items()}
    swept: dict[str, list[Any]] = {}
    for option in sweep:
        name, _, values = option.partition("=")
        name = name.replace("-", "_")
        try:
            swept[name] = [kinds[name](value) for value in values.split(",")]
        except (KeyError, ValueError):
            raise ConfigError(
                f"cannot sweep {option}", hint=f"--sweep temperature=0.6,0.8; settings are {', '.join(kinds)}"
            ) from None
    for combined in itertools.product(*swept.values()):
        changed = dict(zip(swept, combined, strict=True))
        folder_name = "_".join(f"{name}-{value:g}" for name, value in changed.items())
        yield folder_name or "default", replace(given, **changed)


@dataclass(frozen=True, slots=True)
class RealSpeech:
    """Speaker embeddings of the references, and scores of real recordings."""

    embeddings: list[SpeakerEmbedding]
    rows: dict[str, list[Row]]


def score_real(
    folder: Path, plan: EvaluationPlan, engine: Engine, metrics: VoiceMetrics, options: argparse.Namespace
) -> RealSpeech:
    begin_folder(
        folder,
        {
            "codec": engine.codec.revision,
            "asr": options.asr,
            **({"speaker encoder": "ECAPA"} if options.ecapa else {}),
            "references": [speaker.reference.id for speaker in plan.speakers],
            "originals": [original.id for speaker in plan.speakers for original in speaker.originals],
        },
    )
    torch.set_num_threads(options.threads)
    clips = real_clips(plan)
    with progress_bar("originals and round trips", len(clips) // 2) as on_progress:
        write_real_clips(folder, plan, engine, on_progress)
    embeddings = reference_embeddings(folder, plan, metrics.speaker_encoder)
    with progress_bar("scoring them", len(clips)) as on_progress:
        return RealSpeech(embeddings, score_clips(folder, clips, embeddings, metrics, options.threads, on_progress))


def evaluate_setting(
    folder: Path,
    plan: EvaluationPlan,
    engine: Engine,
    metrics: VoiceMetrics,
    sampling: Sampling,
    real: RealSpeech,
    options: argparse.Namespace,
) -> dict[str, Any]:
    about = {
        "model": str(options.run or options.model),
        "weights": fingerprint(engine),
        "codec": engine.codec.revision,
        "sampling": asdict(sampling),
        "asr": options.asr,
        "references": [speaker.reference.id for speaker in plan.speakers],
        "tasks": {task.id: task.text for task in plan.tasks},
    }
    begin_folder(folder, about)
    torch.set_num_threads(options.threads)
    references = encode_references(plan, engine, clean=options.real_people)
    with progress_bar(f"{folder.name}: synthesis", len(plan.tasks)) as on_progress:
        notes = synthesize_missing(folder, plan.tasks, references, engine, sampling, options.batch_size, on_progress)
    speed = measure_speed(
        folder / "speed.json",
        [task for task in plan.tasks if task.is_scored][:SPEED_SENTENCES],
        references,
        engine,
        sampling,
    )
    clips = cloned_clips(plan)
    with progress_bar(f"{folder.name}: scoring", len(clips)) as on_progress:
        rows = real.rows | score_clips(folder, clips, real.embeddings, metrics, options.threads, on_progress)
    single = [notes[task.id]["stopped"] for task in plan.tasks if task.is_one_word]
    stopping = {
        "stop rate": sum(note["stopped"] for note in notes.values()) / len(notes),
        "stop rate, one word": sum(single) / len(single) if single else None,
        "sentences": len(notes),
        "longest": max(note["seconds"] for note in notes.values()),
    }
    systems = {system: mean_scores(system_rows) for system, system_rows in rows.items()}
    report = {**about, "systems": systems, "stopping": stopping, "speed": speed}
    if options.real_people:
        grouped: dict[str, list[Row]] = {}
        for clip, row in zip(clips, rows["clones"], strict=True):
            grouped.setdefault(plan.speakers[clip.speaker].name.partition("-")[0], []).append(row)
        report["groups"] = {name: mean_scores(some) for name, some in grouped.items()}
    return report


@contextmanager
def progress_bar(description: str, total: int) -> Iterator[OnProgress]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        task = bar.add_task(description, total=total)
        yield lambda more: bar.advance(task, more)


def table(report: dict[str, Any]) -> str:
    """Text table: systems as columns, measures as rows, and the targets beside them."""
    systems = report["systems"]
    targets = REAL_TARGETS if "groups" in report else TARGETS
    lines = [f"{'':<28}" + "".join(f"{name.replace('_', ' '):>13}" for name in systems) + f"{'target':>12}"]
    for measure in next(iter(systems.values())):
        row = "".join(f"{system[measure]:>13.3f}" for system in systems.values())
        lines.append(f"{measure:<28}{row}{_target(measure, systems['clones'][measure], targets)}")
    for part in ("stopping", "speed"):
        for measure, value in report[part].items():
            shown = f"{value:>13.3f}" if value is not None else f"{'':>13}"
            lines.append(f"{measure:<28}{'':>26}{shown}{_target(measure, value, targets)}")
    for name, scores in report.get("groups", {}).items():
        measures = ("word error rate", "similarity", "top-1 speaker accuracy", "sentences")
        lines.append(f"clones of {name}: " + ", ".join(f"{measure} {scores[measure]:.3f}" for measure in measures))
    return "\n".join(lines)


def _target(measure: str, value: float, targets: Mapping[str, tuple[str, float]]) -> str:
    if measure not in targets:
        return ""
    sign, bound = targets[measure]
    reached = value <= bound if sign == "<=" else value >= bound
    return f"{sign:>7} {bound:.2f} {'reached' if reached else 'missed'}"


def sweep_table(reports: list[dict[str, Any]]) -> str:
    """Text table: settings as rows, measures as columns."""
    measures = ("word error rate", "loops", "similarity", "top-1 speaker accuracy", "DistillMOS")
    lines = [f"{'':<44}" + "".join(f"{name:>24}" for name in (*measures, "stop rate"))]
    for report in reports:
        values = [report["systems"]["clones"][name] for name in measures] + [report["stopping"]["stop rate"]]
        lines.append(f"{report['settings']:<44}" + "".join(f"{value:>24.3f}" for value in values))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
