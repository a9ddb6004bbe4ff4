"""Ranks that know each other by network only, each started by a torchrun of its own, as on several machines.

On one GPU, NCCL takes ranks with the same host for a mistake; with another `NCCL_HOSTID` each, they talk over sockets.
The same tests run on the CPU with gloo.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from myna import resume, train
from myna.core.run_folder import Run, checkpoint_folder, checkpoint_steps
from tests.train.launched import free_ports, started
from tests.train.resume_helper import make_workspace, metrics, recipe_for
from tests.train.test_distributed import same_course

DEVICES = {"gloo": "cpu", "nccl": "cuda"}
RECIPES: dict[str, dict[str, Any]] = {
    "lora": {"adapt": {"rank": 4, "alpha": 8, "train_modules": ["audio_head"]}},
    "full": {"adapt": {"mode": "full", "rank": 16, "alpha": 32}},
    "dropout": {"adapt": {"rank": 4, "alpha": 8, "dropout": 0.2}},
    "heard": {"speech_eval": {"asr": "planted", "limit": 3, "min_stop_rate": 0.0}},
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, data, and a recipe for each kind of training."""
    folder = make_workspace(tmp_path_factory.mktemp("workspace"))
    for kind, changes in RECIPES.items():
        recipe = recipe_for(
            folder,
            data={"evaluation": str(folder / "evaluation")},
            train={"batch_size": 4, "evaluate_every": 2, "precision": "fp32", "gradient_checkpointing": "none"},
            **changes,
        )
        (folder / f"{kind}.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    return folder


@pytest.fixture(
    scope="module",
    params=[pytest.param("gloo", marks=pytest.mark.slow), pytest.param("nccl", marks=pytest.mark.gpu)],
)
def ranks(request: pytest.FixtureRequest, workspace: Path) -> Ranks:
    return Ranks(workspace, request.param)


class Ranks:
    """Trainings of a workspace by one process or by several ranks of a backend."""

    def __init__(self, workspace: Path, backend: str) -> None:
        self.workspace, self.backend = workspace, backend
        self.settings = [f"train.device={DEVICES[backend]}"]
        # An H200 gave losses within 8e-5 of those of one process.
        self.rounding = 100.0 if backend == "nccl" else 1.0

    def out(self, name: str) -> Path:
        return self.workspace / f"{self.backend}-{name}"

    def alone(self, kind: str) -> Path:
        """Return the run of one process."""
        out = self.out(f"{kind}-alone")
        if not out.exists():
            train(self.workspace / f"{kind}.yaml", out=out, settings=self.settings)
        return out

    @contextmanager
    def started(self, count: int, fault: str, *words: object, timeout: int = 600) -> Iterator[list[Any]]:
        """Start a torchrun for each rank, with its number for `{rank}` in the words. `timeout` is the time in seconds
        that ranks wait for one another."""
        torchrun: list[object] = ["torch.distributed.run", "--nnodes", count, "--nproc-per-node", 1]
        torchrun += ["--master-addr", "127.0.0.1", "--master-port", free_ports(1)[0]]
        variables = {
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_IB_DISABLE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1800",
            "MYNA_RANK_TIMEOUT": str(timeout),
            "RECORDINGS": str(self.workspace),
        }
        with ExitStack() as stack:
            launchers = [
                stack.enter_context(
                    started(
                        *(*torchrun, "--node-rank", rank, "-m", "tests.train.ranked", fault),
                        *(str(word).replace("{rank}", str(rank)) for word in words),
                        **variables,
                        NCCL_HOSTID=f"host-{rank}",
                    )
                )
                for rank in range(count)
            ]
            try:
                yield launchers
            finally:
                for launcher in launchers:
                    launcher.terminate()  # a killed one would leave its rank behind
                    launcher.wait(timeout=120)

    def train(self, name: str, kind: str, count: int, fault: str = "none", **options: Any) -> Path:
        """Train a run by several ranks to its end, or until they are asked to stop."""
        out, settings = self.out(name), [f"--set={setting}" for setting in self.settings]
        words = ["train", self.workspace / f"{kind}.yaml", "-o", out, *settings]
        if out.exists():
            words = ["train", "--resume", out]
        with self.started(count, fault, *words, **options) as launchers:
            said = [launcher.communicate(timeout=500)[0] for launcher in launchers]
        assert [launcher.returncode for launcher in launchers] == [0] * count, "\n".join(said)
        return out


def ends_of(launchers: list[subprocess.Popen[str]], seconds: float) -> list[str]:
    """Return what ranks have said that must end by themselves, and with an error."""
    until = time.monotonic() + seconds
    said = [launcher.communicate(timeout=max(1, until - time.monotonic()))[0] for launcher in launchers]
    assert all(launcher.returncode != 0 for launcher in launchers), "\n".join(said)
    return said


@pytest.mark.parametrize(("kind", "count"), [("lora", 2), ("full", 2), ("lora", 4), ("full", 4)])
def test_several_ranks_train_like_one_process(ranks: Ranks, kind: str, count: int) -> None:
    run = ranks.train(f"{kind}-{count}", kind, count)
    assert f"device {DEVICES[ranks.backend]}" in (log := (run / "log.txt").read_text()) and f" x {count}," in log
    same_course(ranks.alone(kind), run, rounding=ranks.rounding)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_stop_asked_of_one_rank_stops_all_and_one_process_resumes(ranks: Ranks, kind: str) -> None:
    run = ranks.train(f"{kind}-stopped", kind, 2, "rank 1 is asked to stop")
    assert checkpoint_steps(Run.open(run))[-1] == 3
    resume(run)
    same_course(ranks.alone(kind), run, rounding=ranks.rounding)


def test_dropout_differs_between_ranks_and_is_the_same_after_a_resume(ranks: Ranks) -> None:
    straight = ranks.train("dropout", "dropout", 2)
    stopped = ranks.train("dropout-stopped", "dropout", 2, "rank 1 is asked to stop")
    ranks.train("dropout-stopped", "dropout", 2)
    assert metrics(straight) == metrics(stopped), "bit for bit"


def test_a_rank_that_dies_stops_the_others_and_its_last_checkpoint_is_good(ranks: Ranks) -> None:
    run = ranks.out("killed")
    settings = [f"--set={setting}" for setting in ranks.settings]
    with ranks.started(
        2, "rank 1 dies", "train", ranks.workspace / "lora.yaml", "-o", run, *settings, timeout=120
    ) as launchers:
        ends_of(launchers, 240)
    assert checkpoint_steps(Run.open(run))[-1] == 2
    resume(run)
    same_course(ranks.alone("lora"), run, rounding=ranks.rounding)


def test_ranks_without_a_shared_disk_do_not_resume_from_different_steps(ranks: Ranks) -> None:
    run = ranks.train("unshared-0", "lora", 2, "rank 1 is asked to stop")
    shutil.copytree(run, ranks.out("unshared-1"))
    shutil.rmtree(checkpoint_folder(Run.open(ranks.out("unshared-1")), 3))
    with ranks.started(2, "none", "train", "--resume", ranks.out("unshared-{rank}")) as launchers:
        said = ends_of(launchers, 240)
    for words in said:
        assert "from its checkpoint of step 3, rank 1 from that of step 2" in " ".join(words.split()), words


def test_a_checkpoint_slower_than_the_collective_timeout_stops_no_rank(ranks: Ranks) -> None:
    run = ranks.train("slow", "lora", 2, "slow disk", timeout=30)
    assert Run.open(run).is_finished


def test_a_speech_evaluation_slower_than_the_collective_timeout_stops_no_rank(ranks: Ranks) -> None:
    run = ranks.train("heard", "heard", 2, "slow ears", timeout=30)
    assert Run.open(run).is_finished and (run / "best").is_dir()


def test_ranks_that_wait_for_a_checkpoint_end_when_its_writer_dies(ranks: Ranks) -> None:
    run = ranks.out("unsaved")
    settings = [f"--set={setting}" for setting in ranks.settings]
    with ranks.started(2, "dies saving", "train", ranks.workspace / "lora.yaml", "-o", run, *settings) as launchers:
        said = ends_of(launchers, 240)
    assert "lost touch with the others" in "".join(said[1].split("\n")), said[1]
