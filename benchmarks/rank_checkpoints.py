"""Benchmark of checkpoint selection: speech evaluation during training against an exhaustive one afterwards.

python benchmarks/rank_checkpoints.py --model fledgling --asr base --out runs/ranking

For each seed the bundled voice, or `--voice`, is fine-tuned as `myna demo` does it, with `speech_eval:` on
`--eval-limit` sentences at every evaluation, and as many that choose nothing. Then every checkpoint is loaded again and
says `--limit` sentences, those among them, with the same metrics and the same ranking. Audio and scores are kept in OUT
and not computed again, so that it can be interrupted. `OUT/ranking.json` has both rankings, and whether they agree:

- `during_training` is the best step of the run,
- `same_sentences` is the best by the same sentences, said by the saved checkpoints,
- `exhaustive` is the best by all sentences,
- `regret` is the score, on all sentences, by which the run's choice is below the exhaustive one, with its interval.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.figures import save_figures

import myna
from myna.core.config import parse_recipe
from myna.core.run_folder import Run, checkpoint_folder, checkpoint_steps, read_checkpoint_metadata
from myna.core.statistics import RatioPart, paired_difference
from myna.demo.run import demo_recipe, prepare_voice
from myna.evaluate.callback import open_required_scorers
from myna.evaluate.items import load_eval_set, split_items
from myna.evaluate.metrics import BASE
from myna.evaluate.pipeline import SpeechSystem, System, score_systems
from myna.evaluate.ranking import (
    CheckpointScore,
    StepScores,
    best_checkpoint,
    item_score,
    score_checkpoint,
)
from myna.evaluate.scoring import ItemScores
from myna.models.ref import ModelRef
from myna.speak.loading import load_engine

SUBJECTS = (
    *("The old baker", "My younger sister", "A tired sailor", "The new teacher", "Our neighbour", "The quiet doctor"),
    *("An honest farmer", "The tall painter", "Her best friend", "The village postman"),
)
PREDICATES = (
    *("opened the heavy window", "wrote a long letter", "lost a silver button", "found the missing key"),
    *("sang about the harbour", "carried a basket of pears", "mended the broken chair", "waited for the last train"),
    *("counted the coloured stones", "told a story nobody knew"),
)
ADVERBIALS = (
    *("before breakfast", "on a rainy morning", "while the children slept", "at the edge of the forest"),
    *("without saying a word", "in the middle of winter", "just after the bell rang", "under a yellow lamp"),
    *("as the sun went down", "for the very first time"),
)


def sentences(count: int) -> list[str]:
    """Plain English sentences of no training set; no two in a row share a part."""
    most = len(SUBJECTS) * len(PREDICATES)
    if count > most:
        raise SystemExit(f"there are {most} built-in sentences; give --sentences FILE for more")
    indices = [(n % 10, (n + n // 10) % 10, (3 * n + n // 10) % 10) for n in range(count)]
    return [
        f"{SUBJECTS[subject]} {PREDICATES[predicate]} {ADVERBIALS[adverbial]}."
        for subject, predicate, adverbial in indices
    ]


def prepare(args: argparse.Namespace) -> tuple[Path, str]:
    """The prepared voice, once for all seeds; and its language."""
    out = args.out / "voice"
    _, train_clips, _ = prepare_voice(args.voice, out, model=args.model, device=args.device)
    return out, train_clips[0].language


def recipe_tree(args: argparse.Namespace, seed: int, voice: Path, language: str) -> dict[str, Any]:
    """The demo's recipe with speech evaluation, and every checkpoint kept."""
    tree = demo_recipe(voice, model=args.model, seed=seed, settings=args.set)
    tree["name"] = f"seed-{seed}"
    tree["train"] |= {"early_stopping_patience": None, "keep_checkpoints": 1000, "device": args.device}
    tree["speech_eval"] = tree.get("speech_eval", {}) | {
        "asr": args.asr,
        "sentences": str(args.out / "sentences.txt"),
        "limit": 2 * args.eval_limit,  # half of them choose
        "language": language,
    }
    return tree


def train(args: argparse.Namespace, seed: int, voice: Path, language: str) -> Run:
    """Train, or resume; a finished run is not trained again."""
    folder, path = args.out / f"seed-{seed}", args.out / f"seed-{seed}.yaml"
    if (folder / "config.yaml").is_file() and Run.open(folder).is_finished:
        return Run.open(folder)
    if (folder / "checkpoints").is_dir():
        run = myna.resume(folder)
    else:
        path.write_text(yaml.safe_dump(recipe_tree(args, seed, voice, language), sort_keys=False), encoding="utf-8")
        run = myna.train(path, out=folder)
    if not run.is_finished:
        raise SystemExit(f"{folder} was stopped; run the same command again to resume")
    return run


def score_all_checkpoints(args: argparse.Namespace, runs: Mapping[int, Run]) -> dict[str, list[ItemScores]]:
    """Scores of the base model and of every checkpoint of every run on all sentences, by system."""
    first = next(iter(runs.values())).recipe
    data, speech_eval = first.data, first.speech_eval
    plan = load_eval_set(
        data.evaluation, args.out / "sentences.txt", data, speech_eval.seed, None, speech_eval.language
    )

    def system_of(name: str, run: Path | None) -> System:
        ref = ModelRef.find(args.model if run is None else run)
        return SpeechSystem(name, lambda: load_engine(ref, device=args.device), speech_eval.seed, {})

    systems = [system_of(BASE, None)]
    for seed, run in runs.items():
        systems += [system_of(system_name(seed, step), checkpoint_folder(run, step)) for step in checkpoint_steps(run)]
    shown: set[str] = set()

    def progress(stage: str, done: int, total: int | None) -> None:
        if stage not in shown or done == total:
            print(f"{stage}: {done} of {total}", flush=True)
            shown.add(stage)

    return score_systems(
        plan,
        systems,
        open_required_scorers(speech_eval),
        args.out / "exhaustive",
        batch_size=args.batch_size,
        progress=progress,
    )


def system_name(seed: int, step: int) -> str:
    return f"seed-{seed}-step-{step:06d}"


def compare_rankings(seed: int, run: Run, rows: Mapping[str, Sequence[ItemScores]], eval_limit: int) -> dict[str, Any]:
    """Both rankings of one run, of which `eval_limit` sentences chose in training."""
    speech_eval = run.recipe.speech_eval
    steps = checkpoint_steps(run)

    def ranked(select: Callable[[Sequence[ItemScores]], Sequence[ItemScores]]) -> list[CheckpointScore]:
        base = StepScores(0, select(rows[BASE]))
        return [
            score_checkpoint(StepScores(step, select(rows[system_name(seed, step)])), base, speech_eval)
            for step in steps
        ]

    some = ranked(lambda scores: split_items(scores[: 2 * eval_limit], speech_eval.seed)[0])
    every = ranked(lambda scores: scores)
    chosen = read_checkpoint_metadata(run.best)["progress"]["step"] if run.best.is_dir() else None
    picks = {
        "during_training": chosen,
        "same_sentences": _step(best_checkpoint(some)),
        "exhaustive": _step(best_checkpoint(every)),
    }
    in_training = {
        row["step"]: row["speech_eval"]["score"]
        for row in map(json.loads, run.metrics.read_text(encoding="utf-8").splitlines())
        if "speech_eval" in row
    }
    result: dict[str, Any] = {"seed": seed, **picks, "agree": chosen == picks["exhaustive"]}
    result["scores"] = {
        str(full.step): {
            "during_training": in_training.get(full.step),
            "same_sentences": partial.score.to_json(),
            "exhaustive": full.score.to_json(),
            "gain_over_base": full.gain.to_json(),
            "violations": list(full.violations),
        }
        for full, partial in zip(every, some, strict=True)
    }
    if chosen is not None and picks["exhaustive"] is not None:
        ours, theirs = (rows[system_name(seed, step)] for step in (chosen, picks["exhaustive"]))
        result["regret"] = paired_difference(
            [RatioPart(item_score(row)) for row in theirs], [RatioPart(item_score(row)) for row in ours]
        ).to_json()
    return result


def _step(checkpoint: CheckpointScore | None) -> int | None:
    return checkpoint.step if checkpoint is not None else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="fledgling", help="hub name or folder")
    parser.add_argument("--asr", required=True, help="folder or name of a Whisper")
    parser.add_argument("--voice", help="recordings, instead of the voice that comes with Myna")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--eval-limit", type=int, default=48, help="sentences that choose, at every evaluation")
    parser.add_argument("--limit", type=int, default=96, help="sentences of the evaluation afterwards")
    parser.add_argument("--sentences", type=Path, help="a text file, instead of the built-in sentences")
    parser.add_argument("--batch-size", type=int, default=24, help="sentences synthesized at once")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--set", action="append", default=[], help="a setting of the recipe, such as train.steps=60")
    args = parser.parse_args()
    if 2 * args.eval_limit > args.limit:
        parser.error("--eval-limit is at most half of --limit")
    args.out.mkdir(parents=True, exist_ok=True)
    lines = (
        [line for line in args.sentences.read_text(encoding="utf-8").splitlines() if line.strip()][: args.limit]
        if args.sentences is not None
        else sentences(args.limit)
    )
    (args.out / "sentences.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    voice, language = prepare(args)
    parse_recipe(recipe_tree(args, args.seeds[0], voice, language), where="the recipe with --set")
    runs = {seed: train(args, seed, voice, language) for seed in args.seeds}
    rows = score_all_checkpoints(args, runs)
    compared = [compare_rankings(seed, run, rows, args.eval_limit) for seed, run in runs.items()]
    about = {"model": args.model, "eval_limit": args.eval_limit, "sentences": len(lines)}
    results = about | {"agree": all(result["agree"] for result in compared), "seeds": compared}
    save_figures(args.out / "ranking.json", results)
    for result in compared:
        picks = [
            f"{key.replace('_', ' ')} {result[key]}" for key in ("during_training", "same_sentences", "exhaustive")
        ]
        if regret := result.get("regret"):
            picks.append(f"regret {regret['mean']:.3f} [{regret['low']:.3f}, {regret['high']:.3f}]")
        print(f"seed {result['seed']}: {', '.join(picks)}")


if __name__ == "__main__":
    main()
