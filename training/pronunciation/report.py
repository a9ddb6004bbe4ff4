"""Report of the small pronunciation model: scores, a table and a loss curve.

python training/pronunciation/report.py --run runs/learners/run --answers runs/learners/answers.jsonl \\
    --data data/learners/prepared/test --pretraining data/learners/encoder/pretraining.json --out docs/benchmarks
python training/pronunciation/report.py --json pronunciation.json --full-size full_size.json --out docs/benchmarks

The second writes page and curve again from given results. `--full-size` adds the
results of benchmarks/pronunciation.py, if they are there.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from myna.report.page import Curve

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.figures import plot_file, save_figures

from myna.core.errors import DataError, MynaError
from myna.core.io import atomic_write
from myna.data.manifest import read_manifest
from myna.data.pronunciation import (
    MISPRONUNCIATION_F1,
    PER,
    canonical_answers,
    score_answers,
    stored_assessment,
)
from myna.models import open_family

MIN_CORRELATION, MAX_SHARE_OF_CANONICAL = 0.6, 0.5
"""Targets: of accuracy and fluency, and of the errors relative to those of always answering the canonical phones."""
Tree = dict[str, Any]


def collect_results(run: Path, answers: Path, data: Path, pretraining: Path | None) -> Tree:
    """Scores and training facts of a run, and of the pretraining of its audio encoder."""
    rows = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    utterances = {utterance.id: utterance for utterance in read_manifest(data / "manifest.jsonl")}
    stored = [stored_assessment(utterances[row["id"]]) for row in rows]
    assessments = [assessment for assessment in stored if assessment is not None]
    if not rows or len(assessments) < len(rows):
        raise DataError(f"{data} has lines without scores", hint="prepare it from learner_corpus.py's scores.jsonl")
    threads = torch.get_num_threads()
    processor = f"{'thread' if threads == 1 else f'processor with {threads} threads'} of {platform.machine()}"
    return {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else processor,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "encoder_pretraining": None if pretraining is None else pretraining_result(pretraining),
        "training": training(run),
        "held_out": {"speakers": len({utterance.speaker for utterance in utterances.values()}), "sentences": len(rows)},
        "stopped": sum(row["stopped"] for row in rows),
        "ours": score_answers(assessments, [row["answer"] for row in rows]).to_json(),
        "canonical": score_answers(assessments, canonical_answers(assessments)).to_json(),
    }


def pretraining_result(file: Path) -> Tree:
    """Results of train_audio_encoder.py, with the last point of its curve only."""
    results: Tree = json.loads(file.read_text(encoding="utf-8"))
    return results | {"curve": results["curve"][-1:]}


def training(run: Path) -> Tree:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if "speed" in row]
    model = open_family(str(_newest(run))).load_model(dtype=torch.float32, device="meta", text_head=True)
    log = (run / "log.txt").read_text(encoding="utf-8").splitlines()
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "corpus": next((line.partition(" from ")[0] for line in log if " targets, " in line), ""),
        "steps": steps[-1]["step"],
        "epochs": steps[-1]["epoch"],
        "seconds": sum(row["speed"]["seconds"] for row in steps),
        "seconds_per_step": statistics.median(row["speed"]["seconds"] for row in steps),
        "heard_seconds_per_second": statistics.median(row["speed"]["audio_per_second"] for row in steps),
        "losses": [[row["step"], round(row["loss"], 4)] for row in thinned(steps)],
        "held_out_losses": [[row["step"], round(row["evaluation"]["loss"], 4)] for row in rows if "evaluation" in row],
    }


def thinned(rows: Sequence[Tree], most: int = 100) -> list[Tree]:
    """Means of neighbours, so that a curve has no more points than can be seen."""
    size = max(1, len(rows) // most)
    heaps = [rows[start : start + size] for start in range(0, len(rows), size)]
    return [{"step": heap[-1]["step"], "loss": statistics.fmean(row["loss"] for row in heap)} for heap in heaps]


def _newest(run: Path) -> Path:
    """Return the finished model, or else the newest checkpoint."""
    return run / "model" if (run / "model").is_dir() else sorted(run.glob("checkpoints/*/model"))[-1]


def check_targets(facts: Tree) -> dict[str, tuple[str, bool]]:
    """Value of each target, and whether it is reached."""
    ours, baseline = facts["ours"]["figures"], facts["canonical"]["figures"]
    checks = {
        f"correlation of {name} at least {MIN_CORRELATION}": (
            f"{_number(ours[name])}",
            (ours[name]["mean"] or 0.0) >= MIN_CORRELATION,
        )
        for name in ("accuracy", "fluency")
    }
    share = (ours[PER]["mean"] or 0.0) / (baseline[PER]["mean"] or 1.0)
    checks[f"phone errors at most {MAX_SHARE_OF_CANONICAL:.0%} of the canonical answer's"] = (
        f"{share:.0%}",
        share <= MAX_SHARE_OF_CANONICAL,
    )
    return checks


def results_page(facts: Tree, full_size: Tree | None) -> str:
    train, ours, baseline = facts["training"], facts["ours"], facts["canonical"]
    unreadable = sum(ours["unreadable"].values())
    lines = [
        "# Pronunciation assessment",
        "",
        "Made by `training/pronunciation/learners.sh`; the numbers are in [pronunciation.json](pronunciation.json).",
        "",
        "## A small model, from random weights",
        "",
        f"{train['parameters'] / 1e6:.1f} million parameters of Phi-4-multimodal's own classes, trained on simulated",
        "learners ([how they are made](../guides/pronunciation.md#simulated-learners)) and on nothing else:",
        f"{train['steps']:,} steps, {train['epochs']:.1f} epochs, {train['seconds']:.0f} s on one {facts['machine']}",
        f"({1000 * train['seconds_per_step']:.0f} ms a step, {train['heard_seconds_per_second']:,.0f} x real time).",
        *_encoder_training(facts["encoder_pretraining"]),
        "",
        f"It answers {facts['held_out']['sentences']:,} held-out sentences of {facts['held_out']['speakers']} held-out",
        f"speakers; {unreadable} of these answers cannot be read, and count against it.",
        "",
        "| | ours | always the canonical phones |",
        "|---|---|---|",
    ]
    for name, figure in ours["figures"].items():
        other = _number(baseline["figures"][name]) if name in (PER, MISPRONUNCIATION_F1) else ""
        lines.append(f"| {name} | {_number(figure)} | {other} |")
    lines += [
        "",
        "Intervals are of 95 %, by bootstrap over sentences.",
        "",
        "| target | result | reached |",
        "|---|---|---|",
    ]
    lines += [
        f"| {name} | {value} | {'yes' if good else '**no**'} |" for name, (value, good) in check_targets(facts).items()
    ]
    lines += ["", "![loss over steps](pronunciation.svg)", ""]
    if full_size is not None:
        lines += [
            "## The full size on a small GPU",
            "",
            f"`pronunciation_paper_r64` with random weights on one {full_size['machine']}, held to",
            f"{full_size['gpu_gib']:g} GiB: fp16, gradient scaler, 64 utterances a step.",
            "",
            "| | recomputed layers | s a step | peak GiB | steps the scaler skipped | adapters with finite gradient |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {row['name']} | {row['recomputed_layers']} | {row['seconds_per_step']:.2f} "
            f"| {row['peak_gib'] or 0:.1f} | {row['skipped_steps']} | {row['finite_gradients']} of {row['adapters']} |"
            for row in full_size["rows"]
        ]
        lines += [
            "",
            f"The system this replaces took {full_size['old_system_seconds_per_step']} s on its TITAN RTX.",
            "",
        ]
    return "\n".join(lines)


def _encoder_training(pretraining: Tree | None) -> list[str]:
    if pretraining is None:
        return []
    last, error_rate = pretraining["curve"][-1], pretraining["phone_error_rate"]
    return [
        f"Before that its audio encoder was pretrained with CTC (`train_audio_encoder.py`): {last['steps']:,} steps in",
        f"{last['seconds']:.0f} s, with a phone error rate of {error_rate:.1%} on held-out learners.",
    ]


def _number(figure: Tree) -> str:
    return "" if figure["mean"] is None else f"{figure['mean']:.3f} ({figure['low']:.3f} to {figure['high']:.3f})"


def loss_curve_svg(train: Tree) -> str:
    """Draw the loss curve, with held-out losses as dots."""
    curves = [Curve("training", train["losses"]), Curve("held out", train["held_out_losses"], "dots", color=1)]
    return plot_file(curves, title="Loss of a token", x_label="steps", y_label="loss")


def write(out: Path, facts: Tree, full_size: Tree | None) -> None:
    out.mkdir(parents=True, exist_ok=True)
    save_figures(out / "pronunciation.json", facts | ({"full_size": full_size} if full_size else {}))
    texts = {
        "md": results_page(facts, full_size),
        "svg": loss_curve_svg(facts["training"]),
    }
    for kind, text in texts.items():
        with atomic_write(out / f"pronunciation.{kind}") as temporary:
            temporary.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="run folder of the small model")
    parser.add_argument("--answers", type=Path, help="output of `myna answer`")
    parser.add_argument("--data", type=Path, help="prepared folder of the held-out learners")
    parser.add_argument("--pretraining", type=Path, help="pretraining.json of train_audio_encoder.py")
    parser.add_argument("--json", type=Path, help="results of an earlier run, instead of these three")
    parser.add_argument("--full-size", type=Path, help="full_size.json, if it is there")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    there = args.full_size is not None and args.full_size.is_file()
    full_size = json.loads(args.full_size.read_text(encoding="utf-8")) if there else None
    try:
        if args.json is not None:
            facts = json.loads(args.json.read_text(encoding="utf-8"))
            full_size = full_size or facts.pop("full_size", None)
        elif None in (args.run, args.answers, args.data):
            parser.error("give --json, or --run with --answers and --data")
        else:
            facts = collect_results(args.run, args.answers, args.data, args.pretraining)
    except MynaError as error:
        sys.exit(f"{error.what}\n  → {error.hint}")
    write(args.out, facts, full_size)
    for name, (value, good) in check_targets(facts).items():
        print(f"{'yes' if good else 'NO '} {name}: {value}")


if __name__ == "__main__":
    main()
