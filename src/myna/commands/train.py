"""`myna train` and `myna recipes`: from a recipe to a run folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.table import Table

from myna.commands.command import command
from myna.commands.display import TrainingDisplay, console
from myna.commands.options import Force, PathLike, SettingOverrides, Settings, option
from myna.core.errors import ConfigError
from myna.core.progress import ProgressCallback, silent

if TYPE_CHECKING:
    from myna.core.config import Recipe
    from myna.core.run_folder import Run
    from myna.train.loop import TrainingObserver

GPUs = Annotated[int, option("GPUs of this machine to use, a process each.", least=1)]


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
    settings: Settings = (),
    gpus: GPUs = 1,
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
    settings: SettingOverrides = (),
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
    from myna.evaluate.callback import SpeechEvaluation
    from myna.evaluate.model_card import write_run_card
    from myna.train.launch import start_training

    evaluation = SpeechEvaluation.from_recipe
    return start_training(run, observer, open_evaluation=evaluation, describe=write_run_card, **options)


@command("train", train, example="myna train --model fledgling --data data/marta --steps 60")
def _(
    call: partial[Run],
    *,
    stopped: Annotated[
        PathLike | None,
        Parameter(name="--resume", help="Continue this run; with --set train.steps=... for longer."),
    ] = None,
) -> None:
    options, run_training = dict(call.keywords), call
    gpus, settings = options.get("gpus", 1), list(options.get("settings", ()))
    named = options.keys() - {"gpus", "settings"}
    if (stopped is not None and named) or (stopped is None and not named & {"recipe", "model", "data", "steps"}):
        raise ConfigError(
            "give a recipe, or --resume with a run and nothing else that says where or what",
            hint="myna train RECIPE.yaml, or myna train --resume runs/NAME",
        )
    # Mistakes in the settings are reported before seconds go into importing torch.
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
        console().print(f"\nTry it:  {_next_command(run)}", soft_wrap=True)


def _next_command(run: Run) -> str:
    from myna.models import open_family
    from myna.models.base import SpeakingFamily

    source = run.recipe.model
    family = open_family(source.source, revision=source.revision, codec=source.codec)
    if isinstance(family, SpeakingFamily):
        return f'myna speak "your words" --run {run.folder} --reference REF.wav --reference-text "..." -o out.wav'
    return f"myna answer RECORDING.wav --run {run.folder}"


@command("recipes", example="myna recipes higgs_v2_lora_24gb --out mine.yaml")
def _(
    name: Annotated[str | None, option("A recipe to print; all are listed if left out.")] = None,
    *,
    out: Annotated[PathLike | None, option("Copy it to this file, to change it.", "-o")] = None,
    force: Force = False,
) -> None:
    """List the recipes that ship, print one, or copy one to start from. `myna train NAME` takes their names too."""
    from myna.core.config import shipped_recipes
    from myna.core.io import check_output_file, save_text

    shipped = shipped_recipes()
    if name is None:
        if out is not None:
            raise ConfigError("--out copies one recipe", hint="myna recipes NAME --out mine.yaml")
        _show_recipes(shipped)
        return
    if name not in shipped:
        raise ConfigError(f"no recipe {name} ships", hint=f"name one of {', '.join(shipped)}")
    content = shipped[name].read_text(encoding="utf-8")
    if out is None:
        print(content, end="")
        return
    check_output_file(Path(out), force=force)
    save_text(Path(out), content)
    console().print(f"{os.fspath(out)}: change it, then myna train {os.fspath(out)}", soft_wrap=True)


def _show_recipes(recipes: Mapping[str, Path]) -> None:
    """Print each recipe with the comment it begins with."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    for name, path in recipes.items():
        lines = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
        comment = " ".join(line.lstrip("# ") for line in lines)
        table.add_row(name, comment.partition(". ")[0].rstrip("."))
    console().print(table)
