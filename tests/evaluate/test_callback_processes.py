"""Two processes on the CPU, connected by gloo: the first one evaluates while the other waits."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from myna import train
from myna.core.run_folder import Run, checkpoint_folder
from tests.evaluate.callback_process import SIMILARITY
from tests.evaluate.scripted_scorers import ScriptedScorers, scripted_scorers
from tests.train.launched import free_ports, started
from tests.train.resume_helper import contents, make_workspace, recipe_for

pytestmark = pytest.mark.slow

RECIPES: dict[str, dict[str, Any]] = {
    "lora": {"rank": 4, "alpha": 8, "train_modules": ["audio_head"]},
    "full": {"mode": "full", "rank": 16, "alpha": 32},
    "broken": {"rank": 4, "alpha": 8},
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the runs of one process and of two, named `NAME-PROCESSES`."""
    folder = make_workspace(tmp_path_factory.mktemp("workspace"))
    for name, adapt in RECIPES.items():
        recipe = recipe_for(
            folder,
            data={"evaluation": str(folder / "evaluation")},
            adapt=adapt,
            train={"steps": 4, "evaluate_every": 2, "ema_decay": 0.9},
            speech_eval={"asr": "planted", "limit": 3, "min_stop_rate": 0.0},
        )
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    for name in ("lora", "full"):
        with scripted_scorers(ScriptedScorers(folder, similarity=SIMILARITY)):
            train(folder / f"{name}.yaml", out=folder / f"{name}-1")
    with ExitStack() as stack:
        ports = free_ports(len(RECIPES))
        ranks = [
            stack.enter_context(
                started(
                    *("tests.evaluate.callback_process", folder, *ports),
                    **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
                )
            )
            for rank in range(2)
        ]
        said = [rank.communicate(timeout=300)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    return folder


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_rank_0_evaluates_and_all_ranks_agree_on_the_best(workspace: Path, kind: str) -> None:
    heard = [json.loads((workspace / f"heard-{rank}.json").read_text())[kind] for rank in range(2)]
    assert heard == [8, 0], "two lines three times, and one by the base and the best, all by one process"
    told = []
    for world in (1, 2):
        run = Run.open(workspace / f"{kind}-{world}")
        rows = [row for row in map(json.loads, run.metrics.read_text().splitlines()) if "speech_eval" in row]
        told.append([(row["step"], row["speech_eval"]["best_step"], row["speech_eval"]["score"]) for row in rows])
        assert contents(run.folder / "best" / run.result.name) == contents(checkpoint_folder(run, 2) / run.result.name)
        assert contents(run.result) == contents(run.folder / "best" / run.result.name)
    assert [(step, best) for step, best, _ in told[0]] == [(0, None), (2, 2), (4, 2)]
    for one, two in zip(*told, strict=True):
        assert one[:2] == two[:2] and two[2] == pytest.approx(one[2], abs=0.02), "the lines may be a frame longer"


def test_an_error_in_the_evaluation_stops_all_ranks(workspace: Path) -> None:
    heard = [json.loads((workspace / f"heard-{rank}.json").read_text())["broken"] for rank in range(2)]
    assert heard == ["this cannot be heard"] * 2
