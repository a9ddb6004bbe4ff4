"""Several processes train as one does, and end together. Two processes on the CPU, connected by gloo."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from myna import prepare, resume, train
from myna.audio.files import write_audio
from myna.core.config import load_recipe
from myna.core.errors import ConfigError, MynaError, TrainingError
from myna.core.run_folder import Run, checkpoint_folder
from myna.models import save_tiny_model
from myna.train import distributed
from myna.train import launch as launch_module
from myna.train.distributed import ProcessInfo, init_accelerator
from myna.train.launch import LAUNCHED_VARIABLE, _first_failure, launch, report_failures
from myna.train.precision import Precision, choose_precision
from tests.tone_corpus import SAMPLE_RATE, tone_speech, write_recordings
from tests.train.distributed_helper import asked_to_stop, bf16_loss, learn_from_text
from tests.train.launched import VARIABLES, free_ports, started


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make six clips to learn and one to evaluate on, which gives the second rank none; a LoRA and a full training."""
    folder = tmp_path_factory.mktemp("workspace")
    save_tiny_model(folder / "model")
    write_recordings(folder / "recordings")
    clip = folder / "others" / "robin" / "0.wav"
    write_audio(clip, tone_speech("hello", 320.0), SAMPLE_RATE)
    clip.with_suffix(".txt").write_text("hello")
    for source, out in (("recordings", "prepared"), ("others", "evaluation")):
        prepare(str(folder / source), folder / out, model=str(folder / "model"), device="cpu")
    tree: dict[str, dict[str, Any]] = {
        "model": {"source": str(folder / "model"), "check_pretrained": False},
        "data": {
            "train": str(folder / "prepared"),
            "evaluation": str(folder / "evaluation"),
            "row_tokens": 360,
            "reference_seconds": [0.2, 10],
        },
        "train": {
            "steps": 6,
            "batch_size": 4,
            "learning_rate": 2e-3,
            "warmup": 1,
            "evaluate_every": 2,
            "device": "cpu",
            "ema_decay": 0.9,
        },
    }
    for name, adapt, recomputed in (
        ("lora", {"rank": 4, "alpha": 8, "train_modules": ["audio_head"]}, "none"),
        ("full", {"mode": "full", "freeze": ["text_embedding", "norms"]}, "full"),
    ):
        tree["train"]["gradient_checkpointing"] = recomputed
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(tree | {"adapt": adapt}))
    return folder


@pytest.fixture(scope="module")
def two(workspace: Path) -> Path:
    """Runs of one process and of two, as `NAME-PROCESSES`; `NAME-1-2` was started by one process and finished by
    two."""
    for kind, stop in (("lora", 3), ("full", 2)):
        train(workspace / f"{kind}.yaml", out=workspace / f"{kind}-1")
        with asked_to_stop(stop):
            train(workspace / f"{kind}.yaml", out=workspace / f"{kind}-1-2")
    learn_from_text(workspace)
    with ExitStack() as stack:
        ports = free_ports(9)
        ranks = [stack.enter_context(started_by_srun(rank, workspace, ports)) for rank in range(2)]
        said = [rank.communicate(timeout=300)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    for kind in ("lora", "full"):
        resume(workspace / f"{kind}-2-1")
    return workspace


@contextmanager
def started_by_srun(rank: int, folder: Path, ports: list[int]) -> Iterator[subprocess.Popen[str]]:
    slurm = {"PROCID": str(rank), "LOCALID": str(rank), "STEP_NUM_TASKS": "2", "STEP_NODELIST": "localhost"}
    variables = {f"SLURM_{name}": value for name, value in slurm.items()}
    with started("tests.train.distributed_helper", folder, *ports, **variables, SLURM_JOB_ID="7") as process:
        yield process


def same_course(one: Path, other: Path, rounding: float = 1.0) -> None:
    """Check equal losses to 1e-6 in every step and evaluation, and equal weights to 1e-5 at the end, both times
    `rounding`."""
    courses = [[json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()] for run in (one, other)]
    for row, twin in zip(*courses, strict=True):
        numbers, others = (r.get("evaluation", r) for r in (row, twin))
        assert row["step"] == twin["step"] and numbers.keys() == others.keys()
        for key in numbers.keys() - {"speed", "gradient_norm"}:
            assert others[key] == pytest.approx(numbers[key], abs=1e-6 * rounding), (row["step"], key)
        if "gradient_norm" in numbers:
            assert others["gradient_norm"] == pytest.approx(numbers["gradient_norm"], rel=1e-4 * rounding)
    weights = [load_file(next(Run.open(run).result.glob("*.safetensors"))) for run in (one, other)]
    same_weights(weights[0], weights[1], rounding)


def same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], rounding: float = 1.0) -> None:
    assert one.keys() == other.keys()
    for name, weight in one.items():
        assert torch.allclose(other[name], weight, rtol=0, atol=1e-5 * rounding), name


def seen(two: Path, what: str) -> list[dict[str, Any]]:
    return [json.loads((two / f"rank-{rank}.json").read_text())[what] for rank in range(2)]


# Two are as good as one


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_two_processes_take_the_course_of_one_with_twice_the_accumulation(two: Path, kind: str) -> None:
    """Includes an averaged model, and an evaluation of a single target, which leaves one rank without any."""
    assert "device cpu x 2" in (two / f"{kind}-2" / "log.txt").read_text()
    same_course(two / f"{kind}-1", two / f"{kind}-2")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("change", ["1-2", "2-1"])
def test_a_run_goes_on_with_another_number_of_processes(two: Path, kind: str, change: str) -> None:
    """A signal stopped it, which with two processes only the second of them got."""
    log = (two / f"{kind}-{change}" / "log.txt").read_text()
    assert f"x {change[0]}, precision" in log and f"x {change[-1]}, precision" in log
    assert "as asked; go on with" in log and "going on after step" in log
    same_course(two / f"{kind}-1", two / f"{kind}-{change}")


@pytest.mark.slow
def test_a_rank_without_audio_learns_along(two: Path) -> None:
    same_weights(load_file(two / "text-1.safetensors"), load_file(two / "text-2.safetensors"))


@pytest.mark.slow
def test_only_what_learns_is_communicated_and_ranks_that_part_are_found_out(two: Path) -> None:
    for ddp in seen(two, "ddp"):
        assert ddp["communicated"] and ddp["together"] == ""
        assert ddp["bypassed"] == "the weights of rank 1 have parted from rank 0's"


@pytest.mark.slow
def test_the_wrapper_goes_before_the_connections(two: Path) -> None:
    """Otherwise torch's DDP closes them while it holds Python's lock, and hangs if a thread of gloo waits for that."""
    assert all(ddp["let go"] for ddp in seen(two, "ddp"))


@pytest.mark.slow
def test_full_training_shares_every_weight_out(two: Path) -> None:
    for fsdp in seen(two, "fsdp"):
        assert fsdp["all are shared out"] and fsdp["whole"] and fsdp["taken apart again"]
        assert fsdp["judged"] == seen(two, "fsdp")[0]["judged"] > 0
        assert fsdp["share"] == pytest.approx(0.5, abs=0.05)


@pytest.mark.slow
def test_full_training_computes_in_bf16_and_learns_in_fp32(two: Path) -> None:
    alone = bf16_loss(two)
    for rank in seen(two, "bf16"):
        assert rank["loss"] == pytest.approx(alone, abs=0.01)


def test_pure_fp16_is_not_shared_out(workspace: Path) -> None:
    device = torch.device("cpu")
    accelerator = init_accelerator(
        load_recipe(workspace / "full.yaml"), choose_precision("fp32", device), device, workspace
    )
    with pytest.raises(ConfigError, match="does not go with full training"):
        distributed.shard_model(torch.nn.Linear(2, 2), [], Precision("pure-fp16", "asked for"), accelerator)


@pytest.mark.slow
def test_dropout_has_other_random_numbers_on_every_rank(two: Path) -> None:
    first, second = (ddp["random"] for ddp in seen(two, "ddp"))
    assert len(first) == len(second) > 0 and not set(first) & set(second)


@pytest.mark.parametrize(
    ("torchrun", "seconds", "is_warned"),
    [(True, None, True), (True, "60", True), (True, "1800", False), (False, None, False)],
)
def test_torchrun_that_would_kill_during_the_last_checkpoint_is_named(
    monkeypatch: pytest.MonkeyPatch, torchrun: bool, seconds: str | None, is_warned: bool
) -> None:
    for name, value in (("TORCHELASTIC_RUN_ID", "7" if torchrun else None), (distributed.SHUTDOWN_VARIABLE, seconds)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    warning = distributed.shutdown_warning()
    assert (warning is not None) == is_warned
    assert warning is None or f"export {distributed.SHUTDOWN_VARIABLE}=1800" in warning


# Who is who


CARDS = 4
ALONE, SECOND = ProcessInfo(), ProcessInfo(rank=1, local_rank=1, world_size=2)
SRUN = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "gpu[03-04,9],x1", "SLURM_JOB_ID": "50007"}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Environment of a process without a launcher, on a machine with four GPUs."""
    for name in [name for name in os.environ if name in VARIABLES or name.startswith(("SLURM_", "ACCELERATE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: CARDS)
    return monkeypatch


@pytest.mark.parametrize(
    ("said", "place"),
    [
        ({}, ALONE),
        ({"LOCAL_RANK": "-1"}, ALONE),
        ({"LOCAL_RANK": ""}, ALONE),
        ({"LOCAL_RANK": "0"}, ALONE),
        ({"LOCAL_RANK": "-1", "RANK": "-1", "WORLD_SIZE": "1"}, ALONE),
        ({"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}, ALONE),
        ({"LOCAL_RANK": "2"}, ProcessInfo(local_rank=2)),
        ({"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2"}, SECOND),
        ({"LOCAL_RANK": "-1", "RANK": "1", "WORLD_SIZE": "2"}, SECOND),
        ({"RANK": "1", "WORLD_SIZE": "2"}, SECOND),
        ({"RANK": "5", "WORLD_SIZE": "8"}, ProcessInfo(rank=5, local_rank=5 % CARDS, world_size=8)),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2"}, ProcessInfo(rank=5, local_rank=1, world_size=8)),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "8"}, ProcessInfo(rank=5, local_rank=1, world_size=8)),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, ALONE),
        # srun started one torchrun on each node.
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "8", "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}, SECOND),
    ],
)
def test_every_launcher_and_none_says_who_we_are(
    environment: pytest.MonkeyPatch, said: dict[str, str], place: ProcessInfo
) -> None:
    for name, value in said.items():
        environment.setenv(name, value)
    assert ProcessInfo.from_environment() == place
    assert place.device("cuda") == torch.device("cuda", place.local_rank)
    assert place.device("cpu") == torch.device("cpu")


def test_the_first_node_is_where_slurm_tasks_meet(environment: pytest.MonkeyPatch) -> None:
    for name, value in {**SRUN, "SLURM_STEP_NUM_TASKS": "8"}.items():
        environment.setenv(name, value)
    assert distributed._slurm_variables()["MASTER_ADDR"] == "gpu03"
    assert distributed._slurm_variables()["MASTER_PORT"] == "30007"
    environment.setenv("MASTER_ADDR", "elsewhere")
    assert "MASTER_ADDR" not in distributed._slurm_variables()


def test_a_world_without_a_rank_is_refused(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("WORLD_SIZE", "2")
    with pytest.raises(TrainingError, match="WORLD_SIZE is 2, but RANK"):
        ProcessInfo.from_environment()


@pytest.mark.usefixtures("environment")
def test_a_named_card_is_taken_and_one_that_is_not_there_is_not() -> None:
    assert ALONE.device("cuda:3") == torch.device("cuda", 3)
    for place, asked, complaint in (
        (ALONE, "cuda:4", "card 4, and there are 4"),
        (ProcessInfo(local_rank=4), "auto", "card 4, and there are 4"),
        (SECOND, "cuda:1", "one device, for 2 processes"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            place.device(asked)


def test_local_rank_alone_is_no_reason_to_wait_for_others(
    environment: pytest.MonkeyPatch, workspace: Path, tmp_path: Path
) -> None:
    environment.setenv("LOCAL_RANK", "0")
    device = torch.device("cpu")
    accelerator = init_accelerator(
        load_recipe(workspace / "lora.yaml"), choose_precision("fp32", device), device, tmp_path
    )
    assert (accelerator.num_processes, accelerator.device) == (1, device)
    assert os.environ["LOCAL_RANK"] == "0"


@pytest.mark.parametrize("variable", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_accelerate_does_not_shard_a_second_time(
    environment: pytest.MonkeyPatch, workspace: Path, tmp_path: Path, variable: str
) -> None:
    environment.setenv(variable, "true")
    device = torch.device("cpu")
    with pytest.raises(ConfigError, match="accelerate is configured"):
        init_accelerator(load_recipe(workspace / "lora.yaml"), choose_precision("fp32", device), device, tmp_path)


# Launched, and stopped


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(
    ("count", "device", "complaint"),
    [
        (5, "auto", "5 GPUs were asked for, there are 4 here"),
        (2, "cuda:1", "one device, for 2 processes"),
        (2, "mps", "one device, for 2 processes"),
    ],
)
def test_gpus_must_be_there(count: int, device: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        launch(count, [], device)


def test_gpus_is_for_a_single_machine(environment: pytest.MonkeyPatch) -> None:
    for name, value in {**SRUN, "SLURM_STEP_NUM_TASKS": "2"}.items():
        environment.setenv(name, value)
    with pytest.raises(TrainingError, match="one of 2 processes already"):
        launch(2, [], "cuda")


def wait_for(launcher: subprocess.Popen[str], is_there: Callable[[], object]) -> None:
    until = time.monotonic() + 120
    while not is_there():
        assert time.monotonic() < until and launcher.poll() is None, launcher.communicate()[0]
        time.sleep(0.1)


def children_of(launcher: subprocess.Popen[str]) -> list[str]:
    return Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()


def ranks_of(launcher: subprocess.Popen[str], run: Path) -> list[int]:
    """Return the processes of a launcher by rank, once the first step is done."""
    rows = run / "metrics.jsonl"
    wait_for(launcher, lambda: rows.exists() and '"step": 1,' in rows.read_text())
    ranks = {}
    for child in children_of(launcher):
        said = dict(part.partition("=")[::2] for part in Path(f"/proc/{child}/environ").read_text().split("\0"))
        ranks[int(said["RANK"])] = int(child)
    return [ranks[rank] for rank in range(2)]


linux = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks processes up in /proc")


@pytest.mark.slow
@linux
def test_when_a_rank_dies_the_others_stop_and_it_is_named(workspace: Path) -> None:
    run = workspace / "killed"
    with started(
        "myna", "train", workspace / "lora.yaml", "-o", run, "--gpus", 2, "--set=train.steps=5000"
    ) as launcher:
        first, second = ranks_of(launcher, run)
        os.kill(second, signal.SIGKILL)
        said = launcher.communicate(timeout=60)[0]
    assert launcher.returncode == 1
    assert "error rank 1 died (exit code -9)" in said and "Traceback" not in said
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


@pytest.mark.slow
@linux
def test_processes_stop_on_signal_save_and_end_well(workspace: Path) -> None:
    run, longer = workspace / "stopped", ["train.steps=120", "train.evaluate_every=120"]
    train(workspace / "lora.yaml", out=workspace / "straight", settings=longer)
    settings = [f"--set={setting}" for setting in longer]
    with started("myna", "train", workspace / "lora.yaml", "-o", run, "--gpus", 2, *settings) as launcher:
        ranks_of(launcher, run)
        launcher.terminate()
        said = launcher.communicate(timeout=120)[0]
    assert launcher.returncode == 0 and "as asked; go on with" in said, said
    resume(run)
    same_course(workspace / "straight", run)


@linux
def test_processes_stopped_before_their_first_step_are_not_said_to_have_ended_well(workspace: Path) -> None:
    run = workspace / "stopped early"
    with started("myna", "train", workspace / "lora.yaml", "-o", run, "--gpus", 2) as launcher:
        wait_for(launcher, lambda: len(children_of(launcher)) == 2)
        launcher.terminate()
        said = launcher.communicate(timeout=60)[0]
    assert launcher.returncode == 1, said
    assert "before anything new was saved" in said and "give the same command again" in said and "Traceback" not in said


@pytest.mark.slow
@linux
def test_processes_that_cannot_save_when_they_are_stop_on_signal_say_why(workspace: Path) -> None:
    run = workspace / "unsaved"
    settings = ["--set=train.steps=5000", "--set=train.evaluate_every=5000"]
    with started("myna", "train", workspace / "lora.yaml", "-o", run, "--gpus", 2, *settings) as launcher:
        ranks_of(launcher, run)
        (run / "checkpoints").write_text("a file, where a folder should be")
        launcher.terminate()
        said = launcher.communicate(timeout=60)[0]
    assert launcher.returncode == 1, said
    unwrapped = "".join(said.split())
    assert "couldnotbewritten" in unwrapped and f"--resume{run}" in unwrapped, said
    assert "before anything new was saved" not in said and "Traceback" not in said


def test_a_stopped_launch_is_told_by_what_it_has_saved(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = workspace / "asked"
    with asked_to_stop(2):
        train(workspace / "lora.yaml", out=run)

    def stopped_after(step: int | None) -> Callable[..., bool]:
        def stopped(*_: object) -> bool:
            if step is not None:
                checkpoint_folder(Run.open(run), step).mkdir()
            return False

        return stopped

    monkeypatch.setattr(launch_module, "launch", stopped_after(3))
    resume(run, gpus=2)
    monkeypatch.setattr(launch_module, "launch", stopped_after(None))
    with pytest.raises(TrainingError, match="before anything new was saved") as failure:
        resume(run, gpus=2)
    assert failure.value.hint == f"myna train --resume {run}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        ["torch.distributed.run", "--standalone", "--nproc-per-node=2"],
        ["accelerate.commands.launch", "--multi_gpu", "--num_processes=2"],
    ],
    ids=["torchrun", "accelerate"],
)
def test_other_launchers_will_do(two: Path, launcher: list[str]) -> None:
    run = two / launcher[0]
    with started(*launcher, "-m", "myna", "train", two / "lora.yaml", "-o", run) as process:
        said = process.communicate(timeout=120)[0]
    assert process.returncode == 0, said
    assert said.count("parameters learn") == 1 and said.count("Try it") == 1
    same_course(two / "lora-1", run)


def failure(folder: Path, rank: int, exitcode: int, message: str = "", timestamp: int = 0) -> ProcessFailure:
    file = folder / f"{rank}.json"
    if message:
        told = {"message": message, "extraInfo": {"py_callstack": "", "timestamp": str(timestamp)}}
        file.write_text(json.dumps({"message": told}))
    return ProcessFailure(rank, pid=rank, exitcode=exitcode, error_file=str(file))


def test_the_rank_that_began_it_is_blamed(tmp_path: Path) -> None:
    lost = failure(tmp_path, 0, 1, "TrainingError: rank 0 lost touch with the others: closed\n  → it says why", 1)
    broken = failure(tmp_path, 1, 1, "DataError: a.wav: it is empty\n  → leave it out", 2)
    dead = failure(tmp_path, 2, -9)
    blamed = _first_failure(ChildFailedError("myna", {0: lost, 1: broken}))
    assert (blamed.what, blamed.hint) == ("rank 1 stopped: a.wav: it is empty", "leave it out")
    assert _first_failure(ChildFailedError("myna", {0: lost, 2: dead})).what == "rank 2 died (exit code -9)"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (TrainingError("the disk is full", hint="make room"), "TrainingError: the disk is full\n  → make room"),
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] closed"), "TrainingError: rank 1 lost touch with the others"),
    ],
)
def test_a_rank_tells_its_launcher_why_it_stops(
    environment: pytest.MonkeyPatch, tmp_path: Path, error: Exception, told: str
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_ERROR_FILE": str(tmp_path / "e")}.items():
        environment.setenv(name, value)
    with pytest.raises(MynaError), report_failures():
        raise error
    assert json.loads((tmp_path / "e").read_text())["message"]["message"].startswith(told)
    environment.setenv(LAUNCHED_VARIABLE, "1")
    with pytest.raises(SystemExit), report_failures():
        raise error


def test_alone_an_error_stays_what_it_was(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "e"))
    with pytest.raises(ZeroDivisionError), report_failures():
        raise ZeroDivisionError
    assert not (tmp_path / "e").exists()
