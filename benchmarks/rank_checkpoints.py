"""Does listening while training pick the checkpoint that listening to all of them afterwards would pick?

python benchmarks/rank_checkpoints.py --model fledgling --recogniser base --out runs/ranking

For each seed the voice that comes with Myna, or `--voice`, is learned as `myna demo` learns it, and the panel of
`listen:` hears `--heard` lines at every evaluation. Then every checkpoint is opened afresh and says `--lines` lines,
among them those; the same ears listen, and the same rule ranks. What was said and heard is kept in OUT and not done
again, so that it can be stopped at any moment. `OUT/ranking.json` has both rankings, and whether they agree:

- `while_training` is the step that the run itself has called its best,
- `same_lines` is the best by the same lines, said by the saved checkpoints,
- `exhaustive` is the best by all lines,
- `lost` is the mark, on all lines, by which the run's choice lies below the exhaustive one, with its interval.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from myna import workflow
from myna.config import parse_recipe
from myna.data.manifest import write_manifest
from myna.demo.run import Asked, recipe
from myna.demo.voice import BUNDLED, choose
from myna.evaluate.callback import AT_ONCE, open_required_scorers
from myna.evaluate.eval_set import eval_set_from_file
from myna.evaluate.pipeline import score_systems
from myna.evaluate.ranking import (
    CheckpointScore,
    Constraints,
    StepScores,
    best_checkpoint,
    item_score,
    score_checkpoint,
)
from myna.evaluate.scoring import ItemScores
from myna.evaluate.speech_system import SpeechSystem
from myna.evaluate.systems import BASE, System
from myna.io import replacing
from myna.speak.engine import Engine
from myna.statistics import difference
from myna.train.checkpoint import checkpoint_folder, checkpoint_steps, facts_of
from myna.train.run import Run

WHO = (
    *("The old baker", "My younger sister", "A tired sailor", "The new teacher", "Our neighbour", "The quiet doctor"),
    *("An honest farmer", "The tall painter", "Her best friend", "The village postman"),
)
DOES = (
    *("opened the heavy window", "wrote a long letter", "lost a silver button", "found the missing key"),
    *("sang about the harbour", "carried a basket of pears", "mended the broken chair", "waited for the last train"),
    *("counted the coloured stones", "told a story nobody knew"),
)
WHEN = (
    *("before breakfast", "on a rainy morning", "while the children slept", "at the edge of the forest"),
    *("without saying a word", "in the middle of winter", "just after the bell rang", "under a yellow lamp"),
    *("as the sun went down", "for the very first time"),
)


def sentences(count: int) -> list[str]:
    """Plain English that nobody is taught here; no two in a row share a part."""
    most = len(WHO) * len(DOES)
    if count > most:
        raise SystemExit(f"there are {most} lines of our own; give --sentences FILE for more")
    places = [(n % 10, (n + n // 10) % 10, (3 * n + n // 10) % 10) for n in range(count)]
    return [f"{WHO[who]} {DOES[does]} {WHEN[when]}." for who, does, when in places]


def prepare(given: argparse.Namespace) -> tuple[Path, str]:
    """The voice, learned from and held out, once for all seeds; and its language."""
    out = given.out / "voice"
    utterances = workflow.import_into(given.voice or str(BUNDLED), out / "recordings", None, 0.2, "", "")
    voice = choose(utterances, given.voice or str(BUNDLED), seed=0)
    for part, clips in (("train", voice.train), ("held_out", voice.held_out)):
        write_manifest(out / part / "manifest.jsonl", clips)
        workflow.prepare(str(out / part), out / "prepared" / part, model=given.model, device=given.device)
    return out, voice.language


def settings(given: argparse.Namespace, seed: int, voice: Path, language: str) -> dict[str, Any]:
    """The recipe of the demo, heard while it learns, with every checkpoint kept."""
    tree = recipe(Asked(given.out, model=given.model, seed=seed, settings=tuple(given.set)))
    tree["name"] = f"seed-{seed}"
    prepared = voice / "prepared"
    tree["data"] |= {"train": str(prepared / "train"), "evaluation": str(prepared / "held_out")}
    tree["train"] |= {"early_stopping_patience": None, "keep_checkpoints": 1000, "device": given.device}
    tree["speech_eval"] = tree.get("speech_eval", {}) | {
        "asr": given.recogniser,
        "sentences": str(given.out / "lines.txt"),
        "limit": given.heard,
        "language": language,
    }
    return tree


def train(given: argparse.Namespace, seed: int, voice: Path, language: str) -> Run:
    """A run that is there and finished is not trained again, and one that is not finished goes on."""
    folder, path = given.out / f"seed-{seed}", given.out / f"seed-{seed}.yaml"
    if (folder / "config.yaml").is_file() and Run.open(folder).is_finished:
        return Run.open(folder)
    if (folder / "checkpoints").is_dir():
        run = workflow.resume(folder)
    else:
        path.write_text(yaml.safe_dump(settings(given, seed, voice, language), sort_keys=False), encoding="utf-8")
        run = workflow.train(path, folder)
    if run is None or not run.is_finished:
        raise SystemExit(f"{folder} was stopped; run the same command again to go on")
    return run


def listen_to_all(given: argparse.Namespace, runs: Mapping[int, Run]) -> dict[str, list[ItemScores]]:
    """The untuned model and every checkpoint of every run say all lines; rows by system."""
    first = next(iter(runs.values())).recipe
    data, speech_eval = first.data, first.speech_eval
    plan = eval_set_from_file(
        given.out / "lines.txt", data.evaluation, data, speech_eval.seed, None, speech_eval.language
    )

    def speaker(name: str, run: Path | None) -> System:
        def opened() -> Engine:
            model = given.model if run is None else None
            return workflow.open_engine(run=run, model=model, codec=None, device=given.device)

        return SpeechSystem(name, opened, speech_eval.seed, {})

    systems = [speaker(BASE, None)]
    for seed, run in runs.items():
        systems += [speaker(name_of(seed, step), checkpoint_folder(run, step)) for step in checkpoint_steps(run)]
    told: set[str] = set()

    def tell(what: str, done: int, total: int) -> None:
        if what not in told or done == total:
            print(f"{what}: {done} of {total}", flush=True)
            told.add(what)

    return score_systems(
        plan,
        systems,
        open_required_scorers(speech_eval),
        given.out / "exhaustive",
        batch=given.batch,
        at_once=AT_ONCE,
        tell=tell,
    ).rows


def name_of(seed: int, step: int) -> str:
    return f"seed-{seed}-step-{step:06d}"


def compare(seed: int, run: Run, rows: Mapping[str, Sequence[ItemScores]], heard: int) -> dict[str, Any]:
    """Both rankings of one run. `heard` of the lines were heard in training: the first."""
    speech_eval = run.recipe.speech_eval
    floors, steps = Constraints(speech_eval.min_stop_rate, speech_eval.min_mos), checkpoint_steps(run)

    def ranked(count: int | None) -> list[CheckpointScore]:
        base = StepScores(0, rows[BASE][:count])
        return [score_checkpoint(StepScores(step, rows[name_of(seed, step)][:count]), base, floors) for step in steps]

    some, every = ranked(heard), ranked(None)
    chosen = facts_of(run.best)["progress"]["step"] if run.best.is_dir() else None
    picks = {
        "while_training": chosen,
        "same_lines": _step(best_checkpoint(some)),
        "exhaustive": _step(best_checkpoint(every)),
    }
    in_training = {
        row["step"]: row["speech_eval"]["mark"]
        for row in map(json.loads, run.metrics.read_text(encoding="utf-8").splitlines())
        if "speech_eval" in row
    }
    found: dict[str, Any] = {"seed": seed, **picks, "agree": chosen == picks["exhaustive"]}
    found["marks"] = {
        str(one.step): {
            "while_training": in_training.get(one.step),
            "same_lines": less.mark.to_json(),
            "exhaustive": one.mark.to_json(),
            "over_the_untuned": one.gain.to_json(),
            "faults": list(one.faults),
        }
        for one, less in zip(every, some, strict=True)
    }
    if chosen is not None and picks["exhaustive"] is not None:
        ours, theirs = (rows[name_of(seed, step)] for step in (chosen, picks["exhaustive"]))
        found["lost"] = difference([item_score(row) for row in theirs], [item_score(row) for row in ours]).to_json()
    return found


def _step(verdict: CheckpointScore | None) -> int | None:
    return verdict.step if verdict is not None else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="fledgling", help="hub name or folder")
    parser.add_argument("--recogniser", required=True, help="folder or name of a Whisper")
    parser.add_argument("--voice", help="recordings, instead of the voice that comes with Myna")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--heard", type=int, default=48, help="lines heard at every evaluation")
    parser.add_argument("--lines", type=int, default=96, help="lines that every checkpoint says afterwards")
    parser.add_argument("--sentences", type=Path, help="a text file of lines, instead of our own")
    parser.add_argument("--batch", type=int, default=24, help="lines said at once")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--set", action="append", default=[], help="a setting of the recipe, such as train.steps=60")
    given = parser.parse_args()
    if given.heard > given.lines:
        parser.error("--heard are some of --lines")
    given.out.mkdir(parents=True, exist_ok=True)
    lines = (
        [line for line in given.sentences.read_text(encoding="utf-8").splitlines() if line.strip()][: given.lines]
        if given.sentences is not None
        else sentences(given.lines)
    )
    (given.out / "lines.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    voice, language = prepare(given)
    parse_recipe(settings(given, given.seeds[0], voice, language), where="the recipe with --set")
    runs = {seed: train(given, seed, voice, language) for seed in given.seeds}
    rows = listen_to_all(given, runs)
    compared = [compare(seed, run, rows, given.heard) for seed, run in runs.items()]
    about = {"model": given.model, "heard": given.heard, "lines": len(lines)}
    found = about | {"agree": all(one["agree"] for one in compared), "seeds": compared}
    with replacing(given.out / "ranking.json") as temporary:
        temporary.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    for one in compared:
        picks = [f"{key.replace('_', ' ')} {one[key]}" for key in ("while_training", "same_lines", "exhaustive")]
        if lost := one.get("lost"):
            picks.append(f"lost {lost['mean']:.3f} [{lost['low']:.3f}, {lost['high']:.3f}]")
        print(f"seed {one['seed']}: {', '.join(picks)}")


if __name__ == "__main__":
    main()
