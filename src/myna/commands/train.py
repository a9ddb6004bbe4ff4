"""`myna train`, `recipes` and `demo`: from a recipe to a run folder, and all steps on one voice with a page."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table

from myna.commands import options as opt
from myna.commands.display import TrainingDisplay, console, show, show_table
from myna.commands.options import Call, PathLike, command, option
from myna.core.errors import ConfigError, TrainingError
from myna.core.io import check_output_file, save_text
from myna.core.progress import ProgressCallback, silent

if TYPE_CHECKING:
    from rich.progress import TaskID

    from myna.core.config import Recipe
    from myna.core.run_folder import Run
    from myna.demo.run import DemoResult
    from myna.train.loop import TrainingObserver
    from myna.train.memory_plan import MemoryPlan


def train(
    recipe: Annotated[
        Recipe | Mapping[str, Any] | PathLike | None, option("A YAML file, or a name that `myna recipes` lists.")
    ] = None,
    *,
    model: Annotated[str | None, option("Short for `model.source`.", "-m")] = None,
    data: Annotated[PathLike | None, option("Short for `data.train`: a folder made by `myna prepare`.")] = None,
    evaluation: Annotated[PathLike | None, option("Short for `data.evaluation`.")] = None,
    steps: Annotated[int | None, option("Short for `train.steps`.", least=1)] = None,
    out: Annotated[PathLike | None, option("Run folder; runs/NAME by default.", "-o")] = None,
    settings: opt.Settings = (),
    gpus: Annotated[int, option("GPUs of this machine to use, a process each.", least=1)] = 1,
    dry_run: Annotated[bool, option("Check everything, plan the memory, train nothing.")] = False,
    progress: ProgressCallback = silent,
    observer: TrainingObserver | None = None,
) -> Run:
    """Train a LoRA, or a whole model, into a run folder.

    In Python `recipe` may also be a `Recipe` or a tree of settings. `model`, `data` and `steps` are enough without a
    recipe; every other setting can be changed too.
    """
    from myna.core.config import make_recipe
    from myna.models import is_model_name

    shortcuts = {"model.source": model, "data.train": data, "data.evaluation": evaluation, "train.steps": steps}
    made = make_recipe(recipe, shortcuts, settings).absolute(is_model_name)
    from myna.core.run_folder import Run

    run = Run(Path(out) if out is not None else Path("runs") / made.name, made)
    return _start(run, observer, gpus=gpus, dry_run=dry_run, progress=progress)


def resume(
    run: PathLike,
    *,
    settings: opt.SettingOverrides = (),
    gpus: int = 1,
    progress: ProgressCallback = silent,
    observer: TrainingObserver | None = None,
) -> Run:
    """Continue a run from its newest checkpoint. `settings` may change how and how long it is trained (`train.steps`),
    not what it learns. A finished run continues if it is given more steps."""
    from myna.core.config import format_overrides
    from myna.core.run_folder import Run

    overrides = format_overrides(settings)
    opened = Run.open(run.folder if isinstance(run, Run) else Path(run), overrides)
    return _start(opened, observer, gpus=gpus, resume=True, settings=overrides, progress=progress)


def _start(run: Run, observer: TrainingObserver | None, **options: Any) -> Run:
    from myna.evaluate import callback, model_card
    from myna.train.launch import start_training

    open_evaluation, describe = callback.SpeechEvaluation.from_recipe, model_card.write_run_card
    return start_training(run, observer, open_evaluation=open_evaluation, describe=describe, **options)


@command("train", train, example="myna train --model fledgling --data data/marta --steps 60")
def _(
    call: Call[Run],
    *,
    stopped: Annotated[
        PathLike | None, option("Continue this run; with --set train.steps=... for longer.", name="--resume")
    ] = None,
) -> None:
    options, run_training = dict(call.keywords), call
    gpus, settings = options.get("gpus", 1), list(options.get("settings", ()))
    named = options.keys() - {"gpus", "settings"}
    if (stopped is not None and named) or (stopped is None and not named & {"recipe", "model", "data", "steps"}):
        raise ConfigError(
            "give a recipe, or --resume RUN; beside --resume only --set and --gpus are allowed",
            hint="myna train RECIPE.yaml, or myna train --resume runs/NAME",
        )
    # Report mistakes in the settings before importing torch, which takes seconds.
    if stopped is not None:
        from myna.core.run_folder import Run

        Run.open(Path(stopped), settings)
        run_training = partial(resume, stopped, **options)
    elif "recipe" in options:
        from myna.core.config import load_recipe

        load_recipe(Path(options["recipe"]), settings)
    from myna.train.distributed import ProcessInfo

    leads = ProcessInfo.from_environment().is_main
    with TrainingDisplay(shown=leads and gpus == 1) as display:
        run = run_training(progress=display.progress, observer=display)
    if leads and gpus == 1 and not options.get("dry_run") and run.is_finished:
        from myna.models import base, open_family

        source = run.recipe.model
        family = open_family(source.source, revision=source.revision, codec=source.codec)
        speak = f'myna speak "your words" --run {run.folder} --reference REF.wav --reference-text "..." -o out.wav'
        is_speaking = isinstance(family, base.SpeakingFamily)
        show("", f"Try it:  {speak if is_speaking else f'myna answer RECORDING.wav --run {run.folder}'}")


def plan_training(
    recipe: Annotated[
        Recipe | Mapping[str, Any] | PathLike | None, option("A YAML file, or a name that `myna recipes` lists.")
    ] = None,
    *,
    memory: Annotated[str, option("Memory of the GPU, such as 24GB.")],
    model: Annotated[str | None, option("Short for `model.source`; `higgs-v2` needs no download.", "-m")] = None,
    settings: opt.Settings = (),
) -> MemoryPlan:
    """Plan the memory of a training for a GPU that need not be here, without weights and data."""
    from myna.core.config import make_recipe
    from myna.train.memory_plan import plan_for_gpu

    if (size := re.fullmatch(r"(\d+(?:\.\d+)?) *(?:GB|GiB|G)?", memory.strip(), re.IGNORECASE)) is None:
        raise ConfigError(f"{memory} is no amount of memory", hint="for example --memory 24GB")
    defaults = {} if recipe is not None else {"data.train": "data", "train.steps": 1}
    return plan_for_gpu(make_recipe(recipe, defaults | {"model.source": model}, settings), float(size[1]))


@command("plan", plan_training, example="myna plan higgs_v2_lora_24gb --model higgs-v2 --memory 24GB")
def _(call: Call[MemoryPlan]) -> None:
    from myna.train.memory_plan import cheapest_saving

    plan = call()
    show(plan.table())
    if not plan.fits:
        raise TrainingError("it does not fit", hint=cheapest_saving(plan, plan.recipe))
    show(f"It fits into {call.keywords['memory']}.")


@command("recipes", example="myna recipes higgs_v2_lora_24gb --out mine.yaml")
def _(
    name: Annotated[str | None, option("A recipe to print; all are listed if left out.")] = None,
    *,
    out: Annotated[PathLike | None, option("Copy it to this file, to change it.", "-o")] = None,
    force: opt.Force = False,
) -> None:
    """List the recipes that ship, print one, or copy one to start from. `myna train NAME` takes their names too."""
    from myna.core.config import shipped_recipes

    shipped = shipped_recipes()
    if name is None:
        if out is not None:
            raise ConfigError("--out copies one recipe", hint="myna recipes NAME --out mine.yaml")
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True, style="bold")
        for known, path in shipped.items():
            lines = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
            comment = " ".join(line.lstrip("# ") for line in lines)
            table.add_row(known, comment.partition(". ")[0].rstrip("."))
        console().print(table)
        return
    if name not in shipped:
        raise ConfigError(f"no recipe {name} ships", hint=f"name one of {', '.join(shipped)}")
    content = shipped[name].read_text(encoding="utf-8")
    if out is None:
        print(content, end="")
        return
    check_output_file(Path(out), force=force)
    save_text(Path(out), content)
    show(f"{os.fspath(out)}: change it, then myna train {os.fspath(out)}")


@command("demo", example="myna demo --voice recordings --out demo-mine")
def _(
    out: Annotated[PathLike, option("Folder to write.", "-o")] = "demo",
    *,
    voice: Annotated[
        str | None, option("Your recordings, in any layout that `myna prepare` reads; at least 8 clips.")
    ] = None,
    format: opt.Layout = None,
    language: opt.Language = "",
    model: Annotated[str, option("Hub name or folder of the model.", "-m")] = "fledgling",
    asr: opt.ASR = None,
    seed: opt.Seed = 0,
    settings: opt.Settings = (),
    strength: Annotated[
        float | None, option("Scale of the LoRA when speaking; if not given, by the model.", least=0)
    ] = None,
) -> None:
    """Fine-tune a voice and hear it before and after: recordings, codes, a LoRA, evaluation, and a page."""
    from myna.demo.run import run_demo

    with DemoDisplay() as display:
        result = run_demo(
            Path(out),
            voice=voice,
            format=format,
            language=language,
            model=model,
            asr=asr,
            seed=seed,
            settings=list(settings),
            strength=strength,
            progress=display.progress,
            observer=display,
        )
    show_demo(result)


class DemoDisplay(TrainingDisplay):
    """Training display that shows one bar at a time, of the stage that is running."""

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


def show_demo(result: DemoResult) -> None:
    """Print the table of scores, the metrics that are missing, and the next command."""
    show_table(*result.score_table())
    minutes, gigabytes = sum(result.seconds.values()) / 60, result.peak_memory_bytes / 1e9
    show(*result.unmeasured(), f"{minutes:.1f} minutes, at most {gigabytes:.1f} GB of memory")
    show(f"Open {result.folder / 'report.html'}")
    show("Go on with your own recordings: myna demo --voice FOLDER --out demo-mine")
