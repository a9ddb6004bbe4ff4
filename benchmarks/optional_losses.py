"""Benchmark of the optional losses: codebook weights, speaker contrast and reference consistency, over several seeds.

python benchmarks/optional_losses.py prepare SPEECH --out runs/optional_losses      any layout `myna prepare` reads
python benchmarks/optional_losses.py train --out runs/optional_losses --device cuda --jobs 6
python benchmarks/optional_losses.py score --out runs/optional_losses --asr base

`prepare` holds out speakers, gives them sentences of no training set to say, and packs codes alone into
OUT/prepared.tar.xz, for a machine without the recordings. `train` needs nothing else: it fine-tunes fledgling once for
each option and seed, and writes OUT/trained.json (losses on the held-out speakers) and OUT/generated.npz (the codes of
what every model says). `score` decodes and scores these beside the recordings, and writes the table to docs/benchmarks.
Every option is compared with `uniform`, trained in the same run with the same seeds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

SCRIPT = Path(__file__).resolve()
ROOT = SCRIPT.parent.parent
if str(ROOT) not in sys.path:  # run as a script, which knows only its own folder
    sys.path.insert(0, str(ROOT))

from benchmarks.rank_checkpoints import sentences  # noqa: E402

from myna import api  # noqa: E402
from myna.core.config import DataSettings, override, parse_recipe  # noqa: E402
from myna.core.io import atomic_write, bytes_hash  # noqa: E402
from myna.core.statistics import RatioPart, estimate, paired_difference  # noqa: E402
from myna.data.codec import Codec, Codes  # noqa: E402
from myna.data.conversation import AudioClip, Reference, speech_conversation  # noqa: E402
from myna.data.dataset import PreparedDataset  # noqa: E402
from myna.data.manifest import read_manifest, write_manifest  # noqa: E402
from myna.data.split import SPEAKERS, TRAIN, subset_folder  # noqa: E402
from myna.evaluate.eval_set import load_eval_set  # noqa: E402
from myna.evaluate.items import EvalItem, EvalSet  # noqa: E402
from myna.evaluate.metrics import METRICS_BY_KEY  # noqa: E402
from myna.evaluate.pipeline import score_systems  # noqa: E402
from myna.evaluate.scorers import Scorers  # noqa: E402
from myna.evaluate.scoring import ItemScores  # noqa: E402
from myna.evaluate.systems import SystemOutput  # noqa: E402
from myna.models import open_family  # noqa: E402
from myna.speak.loading import load_engine  # noqa: E402
from myna.speak.scheduler import SPARE_POSITIONS, BatchScheduler, request_sampling  # noqa: E402

MODEL, UNTUNED, BASELINE = "fledgling", "untuned", "uniform"
OPTIONS: dict[str, dict[str, Any]] = {
    BASELINE: {},
    "1/k": {"codebook_weights": "1/k"},
    "adaptive": {"codebook_weights": "adaptive"},
    "contrastive 0.1": {"speaker_contrastive_weight": 0.1},
    "contrastive 1": {"speaker_contrastive_weight": 1.0},
    "consistency 0.1": {"reference_consistency_weight": 0.1},
    "consistency 1": {"reference_consistency_weight": 1.0},
}
METRICS = ("wer", "similarity", "distillmos", "stop_rate")
MIN_CLIPS = 4
"""Clips of a speaker that is used: one to learn, and some to draw its reference from."""
CODEBOOKS = tuple(f"code{k}" for k in range(8))
SEED_OF_CHOICE = 0
"""Of the held-out speakers, the sentences' references and of sampling, the same for all."""


def recipe_tree(
    data: Path, option: str, seed: int, device: str, steps: int, settings: Sequence[str] = ()
) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "name": "optional-losses",
        "model": {"source": MODEL},
        "data": {
            "train": str(subset_folder(data, TRAIN)),
            "evaluation": str(subset_folder(data, SPEAKERS)),
            "row_tokens": 4096,
        },
        "adapt": {"rank": 16, "alpha": 32},
        "loss": OPTIONS[option],
        "train": {
            "steps": steps,
            "batch_size": 4,
            "micro_batch_size": 4 if device == "cuda" else 1,
            "learning_rate": 1e-3,
            "warmup": min(20, steps // 4),
            "ema_decay": 0.95,
            "evaluate_every": max(1, steps // 5),
            "save_every": steps,
            "device": device,
            "seed": seed,
        },
    }
    for setting in settings:
        override(tree, setting)
    return tree


# Preparing


def prepare(args: argparse.Namespace) -> None:
    recordings, data = args.out / "recordings", args.out / "data"
    if not (recordings / "manifest.jsonl").is_file():
        api.import_dataset(args.speech, recordings, max_bad=0.2)
    utterances = read_manifest(recordings / "manifest.jsonl")
    clips = Counter(utterance.speaker for utterance in utterances)
    write_manifest(recordings / "manifest.jsonl", [each for each in utterances if clips[each.speaker] >= MIN_CLIPS])
    api.prepare(recordings, data, model=MODEL, device=args.device)
    api.split(data, speakers=args.held_out_speakers, texts=0, seed=SEED_OF_CHOICE)
    lines = args.out / "sentences.txt"
    lines.write_text("\n".join(sentences(args.sentences)) + "\n", encoding="utf-8")
    items = [
        {
            "id": item.id,
            "text": item.text,
            "reference": item.references[0].id,
            "max_seconds": item.max_seconds,
        }
        for item in eval_set(args.out).items
    ]
    (data / "items.json").write_text(json.dumps(items, indent=1) + "\n", encoding="utf-8")
    with tarfile.open(args.out / "prepared.tar.xz", "w:xz") as archive:
        archive.add(data / "items.json", "items.json")
        archive.add(data / "subsets", "subsets")


def eval_set(out: Path) -> EvalSet:
    """The built-in sentences, spoken by the held-out speakers in turn."""
    held_out = subset_folder(out / "data", SPEAKERS)
    settings = DataSettings(train=held_out, reference_seconds=(2.0, 10.0))
    return load_eval_set(held_out, out / "sentences.txt", settings, SEED_OF_CHOICE, None, "en")


# Training and generation


@dataclass(slots=True)
class Job:
    """One training and what its model says; without an option, what the untuned model says."""

    data: Path
    option: str | None
    seed: int
    device: str
    steps: int
    settings: Sequence[str]

    @property
    def name(self) -> str:
        return UNTUNED if self.option is None else f"{self.option}/{self.seed}"


def run_job(job: Job) -> tuple[dict[str, Any], dict[str, Codes]]:
    """The results of a job as JSON, and the codes it generates by item."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result: dict[str, Any] = {"option": job.option, "seed": job.seed}
        run = None
        if job.option is not None:
            tree = recipe_tree(job.data, job.option, job.seed, job.device, job.steps, job.settings)
            run = api.train(tree, out=Path(folder) / "run").folder
            rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
            result |= summary(rows)
        result["training_seconds"] = time.perf_counter() - start
        engine = load_engine(run=run, model=None if run else MODEL, device=job.device)
        generated = generate(engine.family, engine.model, job.data)
    result["stopped"] = {id: stopped for id, (_, stopped) in generated.items()}
    result["seconds"] = time.perf_counter() - start
    return result, {id: codes for id, (codes, _) in generated.items()}


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Losses of a run: on held-out speakers at every evaluation, and of the last tenth of the training."""
    steps = [row for row in rows if "evaluation" not in row]
    last = steps[-max(1, len(steps) // 10) :]
    voices = [name for name in ("speaker_contrastive", "reference_consistency") if name in last[0]]
    return {
        "held_out": {
            str(row["step"]): {
                "mean": statistics.fmean(row["evaluation"][name] for name in CODEBOOKS),
                **{name: row["evaluation"][name] for name in CODEBOOKS},
            }
            for row in rows
            if "evaluation" in row
        },
        "train": {name: statistics.fmean(row[name] for row in last) for name in (*CODEBOOKS, *voices)},
        "first_step": {name: steps[0][name] for name in voices},
        "codebook_weights": last[-1].get("codebook_weights"),
        "step_seconds": statistics.median(row["speed"]["seconds"] for row in steps[2:] or steps),
    }


def generate(family: Any, model: Any, data: Path) -> dict[str, tuple[Codes, bool]]:
    """What a model says: the items of one maximum length in a batch, from codes alone."""
    dataset = PreparedDataset.open(subset_folder(data, SPEAKERS))
    by_id = {utterance.id: utterance for utterance in dataset.utterances}
    items = json.loads((data / "items.json").read_text(encoding="utf-8"))
    generated: dict[str, tuple[Codes, bool]] = {}
    for seconds in sorted({item["max_seconds"] for item in items}):
        same = [item for item in items if item["max_seconds"] == seconds]
        prompts = []
        for item in same:
            reference = by_id[item["reference"]]
            clip = AudioClip(reference.id, dataset.codes_at(dataset.index_of(reference)))
            voice = (Reference(reference.text, clip),)
            prompts.append(family.render(speech_conversation(item["text"], id=item["id"], references=voice)))
        sampling, frames = replace(family.sampling, seed=SEED_OF_CHOICE), max(1, int(seconds * family.frame_rate))
        positions = max(map(len, prompts)) + frames + SPARE_POSITIONS
        scheduler = BatchScheduler(family.speech_decoder(model, len(prompts), positions))
        spoken = [scheduler.submit(prompt, request_sampling(sampling, prompt.id), frames) for prompt in prompts]
        while scheduler.busy:
            scheduler.advance()
        for item, generation in zip(same, spoken, strict=True):
            generated[item["id"]] = (generation.codes(), generation.finish_reason == "stop")
    return generated


def train(args: argparse.Namespace) -> None:
    data = args.data or args.out / "data"
    if args.packed is not None:
        data = Path(tempfile.mkdtemp())
        with tarfile.open(args.packed) as archive:
            archive.extractall(data, filter="data")
    options = args.options or list(OPTIONS)
    how = (args.device, args.steps, args.set)
    recipe = parse_recipe(recipe_tree(data, BASELINE, 0, *how), where="the benchmark's recipe")
    jobs = [Job(data, None, SEED_OF_CHOICE, *how)]
    jobs += [Job(data, option, seed, *how) for seed in args.seeds for option in options]
    results: dict[str, Any] = {
        "model": MODEL,
        "steps": args.steps,
        "seeds": args.seeds,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
        "options": {option: OPTIONS[option] for option in options},
        "recipe": {group: recipe.model_dump(mode="json")[group] for group in ("adapt", "loss", "train")},
        "jobs": {},
    }
    codes: dict[str, Codes] = {}
    args.out.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    failed = []
    with ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
        pending = {pool.submit(run_job, job): job for job in jobs}
        for future in as_completed(pending):
            job = pending[future]
            try:
                result, said = future.result()
            except Exception as error:  # noqa: BLE001 - the others go on, and it is reported at the end
                failed.append(job.name)
                print(f"{job.name}: {error!r}", file=sys.stderr, flush=True)
                continue
            results["jobs"][job.name] = result
            codes |= {f"{job.name}/{id}": each for id, each in said.items()}
            # After each job, so that a machine that is taken away leaves what is done.
            with atomic_write(args.out / "trained.json") as temporary:
                temporary.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            with atomic_write(args.out / "generated.npz") as temporary, temporary.open("wb") as file:
                np.savez_compressed(file, **codes)  # type: ignore[arg-type]
            loss = list(result["held_out"].values())[-1]["mean"] if "held_out" in result else float("nan")
            print(f"{job.name}: held-out loss {loss:.4f}, {result['seconds']:.1f} s", flush=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


# Scoring


@dataclass(slots=True)
class GeneratedSpeech:
    """Codes that a model has generated, as a system to score."""

    name: str
    codec: Codec
    codes: Mapping[str, Codes]
    stopped: Mapping[str, bool]
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sample_rate(self) -> int:
        return self.codec.sample_rate

    def key(self, item: EvalItem) -> str:
        return bytes_hash(self.codes[item.id].tobytes())

    def supports(self, item: EvalItem) -> bool:
        return item.id in self.codes

    def speak(self, items: Sequence[EvalItem], batch_size: int) -> Iterator[tuple[EvalItem, SystemOutput]]:  # noqa: ARG002
        for item in items:
            codes = self.codes[item.id]
            samples = self.codec.decode(codes) if len(codes) else np.zeros(0, np.float32)
            yield item, SystemOutput(samples, self.stopped[item.id])

    def close(self) -> None: ...


def score(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    trained = json.loads((args.out / "trained.json").read_text(encoding="utf-8"))
    family: Any = open_family(trained["model"])
    codec = family.load_codec(device="cpu")
    by_system: dict[str, dict[str, Codes]] = {}
    with np.load(args.out / "generated.npz") as file:
        for name in file.files:
            system, _, item = name.rpartition("/")
            by_system.setdefault(system, {})[item] = file[name]
    systems = [
        GeneratedSpeech(name.replace("/", "-"), codec, codes, trained["jobs"][name]["stopped"])
        for name, codes in by_system.items()
    ]
    scorers = Scorers.open(args.asr, workers=args.workers)

    def progress(stage: str, done: int, total: int | None) -> None:
        if done == total:
            print(stage, flush=True)

    items, folder = eval_set(args.out), args.out / "scores"
    scores = score_systems(items, systems, scorers, folder, workers=args.workers, progress=progress)
    rows = {name: scores.rows[name.replace("/", "-")] for name in by_system}
    results = trained | {
        "metrics": dict(scorers.names),
        "missing": dict(scorers.missing),
        "table": table(trained, rows),
    }
    folder = args.report or ROOT / "docs" / "benchmarks"
    for name, text in (("json", json.dumps(results, indent=1) + "\n"), ("md", page(results))):
        with atomic_write(folder / f"optional_losses.{name}") as temporary:
            temporary.write_text(text, encoding="utf-8")
    print(page(results))


def table(trained: Mapping[str, Any], rows: Mapping[str, Sequence[ItemScores]]) -> dict[str, Any]:
    """For each option the held-out loss and the metrics, and their difference from the baseline's."""
    jobs, seeds = trained["jobs"], trained["seeds"]

    def losses(option: str, name: str) -> list[float]:
        return [list(jobs[f"{option}/{seed}"]["held_out"].values())[-1][name] for seed in seeds]

    def parts(names: Sequence[str], metric: str) -> list[RatioPart | None]:
        return [METRICS_BY_KEY[metric].ratio(row) for name in names for row in rows[name]]

    def measured(names: Sequence[str], baseline: Sequence[str]) -> dict[str, Any]:
        result = {}
        for metric in METRICS:
            pairs = [(a, b) for a, b in zip(parts(names, metric), parts(baseline, metric), strict=True) if a and b]
            if not pairs:
                continue
            mine, theirs = zip(*pairs, strict=True)
            result[metric] = {"value": estimate(mine).to_json()}
            if list(names) != list(baseline):
                result[metric]["difference"] = paired_difference(mine, theirs).to_json()
        return result

    baseline = [f"{BASELINE}/{seed}" for seed in seeds]
    result: dict[str, Any] = {UNTUNED: {"metrics": measured([UNTUNED] * len(seeds), baseline)}}
    result[UNTUNED]["loss"] = {"mean": next(iter(jobs[baseline[0]]["held_out"].values()))["mean"]}
    for option in trained["options"]:
        names = [f"{option}/{seed}" for seed in seeds]
        mean, first = losses(option, "mean"), losses(option, "code0")
        differences = [mine - other for mine, other in zip(mean, losses(BASELINE, "mean"), strict=True)]
        result[option] = {
            "loss": {"mean": statistics.fmean(mean), "code0": statistics.fmean(first), "by_seed": mean},
            "loss_difference": {"mean": statistics.fmean(differences), "by_seed": differences},
            "step_seconds": statistics.median(jobs[name]["step_seconds"] for name in names),
            "metrics": measured(names, baseline),
        }
    return result


def page(results: Mapping[str, Any]) -> str:
    titles = {"wer": "word errors", "similarity": "similarity", "distillmos": "DistillMOS", "stop_rate": "stops"}
    shown = [metric for metric in METRICS if metric in results["table"][BASELINE]["metrics"]]
    lines = [
        "# Optional losses",
        "",
        "Made by `benchmarks/optional_losses.py`; the numbers are in [optional_losses.json](optional_losses.json), and",
        "what the losses are in [decision 21](../decisions/0021-optional-losses.md).",
        "",
        f"{results['model']}, a LoRA of rank 16 over {results['steps']} steps on {results['device']}, seeds "
        f"{', '.join(map(str, results['seeds']))}.",
        "Speakers are held out: `loss` is the mean over codebooks on their clips, and the other columns are of",
        "sentences of no training set in their voices. Below a value stands its difference from `uniform`, over the",
        "same sentences and seeds, with its 95 % interval, **bold** where that excludes 0; below the loss, with its",
        "least and greatest over seeds.",
        "",
        "| | loss | " + " | ".join(titles[metric] for metric in shown) + " |",
        "|---|---|" + "---|" * len(shown),
    ]
    for option, row in results["table"].items():
        cells = [f"{row['loss']['mean']:.4f}"]
        if option not in (BASELINE, UNTUNED):
            seeds = row["loss_difference"]["by_seed"]
            cells[0] += f"<br>{row['loss_difference']['mean']:+.4f} ({min(seeds):+.4f} to {max(seeds):+.4f})"
        for metric in shown:
            value = row["metrics"][metric]
            text = f"{value['value']['mean']:.3f}"
            if difference := value.get("difference"):
                change = f"{difference['mean']:+.3f} ({difference['low']:+.3f} to {difference['high']:+.3f})"
                text += f"<br>**{change}**" if difference["low"] > 0 or difference["high"] < 0 else f"<br>{change}"
            cells.append(text)
        lines.append(f"| {option} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help in (("prepare", "encode and split"), ("train", "train and generate"), ("score", "score the speech")):
        command = commands.add_parser(name, help=help)
        command.add_argument("--out", type=Path, required=True)
        if name == "prepare":
            command.add_argument("speech", help="recordings of many speakers with transcripts")
            command.add_argument("--held-out-speakers", type=int, default=24)
            command.add_argument("--sentences", type=int, default=48)
            command.add_argument("--device", default="cpu")
        if name == "train":
            command.add_argument("--data", type=Path, help="the prepared folder; OUT/data by default")
            command.add_argument("--packed", type=Path, help="OUT/prepared.tar.xz, instead of a folder")
            command.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
            command.add_argument("--options", nargs="+", choices=OPTIONS)
            command.add_argument("--steps", type=int, default=200)
            command.add_argument("--set", action="append", default=[], help="a setting of the recipe")
            command.add_argument("--jobs", type=int, default=1, help="trainings at a time")
            command.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
        if name == "score":
            command.add_argument("--asr", help="folder or name of a Whisper")
            command.add_argument("--workers", type=int, default=2)
            command.add_argument("--report", type=Path, help="where the table goes; docs/benchmarks by default")
    args = parser.parse_args()
    {"prepare": prepare, "train": train, "score": score}[args.command](args)


if __name__ == "__main__":
    main()
