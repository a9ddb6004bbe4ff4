"""One process or many: who they are, who starts them, how they stay of one mind and how they end together.

A LoRA is trained with DDP, which every rank holds whole; full training shards the weights with FSDP2.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list
from torch import nn
from torch.distributed import DistError
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, get_error_handler
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.launcher.api import LaunchConfig, launch_agent
from torch.distributed.tensor import DTensor, distribute_tensor

from myna.config import Recipe
from myna.errors import ConfigError, MynaError, TrainingError
from myna.train.precision import Precision, pick_device

if TYPE_CHECKING:
    from myna.train.trainer import Trainer

Item = TypeVar("Item")


RANK_TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the others. Rank 0 may write and read back the checkpoint of a fully trained model, some
90 GB: a quarter of an hour on a slow disk. The death of a rank shows sooner: to gloo at once, and the launcher stops
the others within half a minute (torchrun, accelerate, --gpus; Slurm with --kill-on-bad-exit). Only a rank that hangs,
or dies on NCCL without a launcher, makes the others wait for so long."""
SHUTDOWN_TIMEOUT = timedelta(minutes=10)
"""How long processes that were asked to stop may take for their last step and its checkpoint."""
LAUNCHED = "MYNA_LAUNCHED"
"""Set where `launch` started us, and will say what went wrong."""
LOST = "lost touch with the others"


# Who we are


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """Which of how many processes this is, the same for every launcher."""

    rank: int = 0
    local_rank: int = 0
    """Its number on this machine, which is that of its card."""
    world: int = 1

    @classmethod
    def find(cls) -> ProcessInfo:
        """From what torchrun, accelerate or srun put into the environment; -1 is an old way to leave something out."""
        said = {**_from_slurm(), **os.environ}
        rank, local_rank, world, neighbours = (
            _number(said.get(name)) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        )
        if world is None or world == 1:
            return cls(local_rank=local_rank or 0)
        if rank is None:
            raise TrainingError(
                f"WORLD_SIZE is {world}, but RANK does not say which of these processes this is",
                hint="launch with torchrun or with --gpus, or unset WORLD_SIZE",
            )
        if local_rank is None:
            local_rank = rank % (neighbours or torch.cuda.device_count() or world)
        return cls(rank, local_rank, world)

    @property
    def leads(self) -> bool:
        """Whether this process writes and speaks for all."""
        return self.rank == 0

    def device(self, asked: str) -> torch.device:
        """The device of this process: the card of its number, unless one is named."""
        device = pick_device(asked)
        named = device.index if ":" in asked else None
        if self.world > 1 and (named is not None or device.type == "mps"):
            raise ConfigError(
                f"`train.device: {asked}` is one device, for {self.world} processes", hint="--set train.device=cuda"
            )
        if device.type != "cuda":
            return device
        index, cards = self.local_rank if named is None else named, torch.cuda.device_count()
        if index >= cards:
            raise ConfigError(
                f"this process wants card {index}, and there are {cards} here, counted from 0",
                hint="start as many processes as there are cards, or look at CUDA_VISIBLE_DEVICES",
            )
        return torch.device("cuda", index)


def _number(text: str | None) -> int | None:
    return int(text) if text and int(text) >= 0 else None


def _from_slurm() -> dict[str, str]:
    """What torchrun would have said, where srun started several of us by itself."""
    said = os.environ
    tasks = _number(said.get("SLURM_STEP_NUM_TASKS"))
    if tasks is None or tasks == 1 or "RANK" in said:
        return {}
    # gpu[03-05,9],x1 begins with gpu03.
    first = re.sub(r"\[([^],-]+)[^]]*]", r"\1", said["SLURM_STEP_NODELIST"]).split(",")[0]
    meant = {
        "RANK": said["SLURM_PROCID"],
        "LOCAL_RANK": said["SLURM_LOCALID"],
        "WORLD_SIZE": str(tasks),
        "MASTER_ADDR": first,
        "MASTER_PORT": str(20_000 + int(said["SLURM_JOB_ID"]) % 20_000),
    }
    return {name: value for name, value in meant.items() if name not in said}


# How we come together


def start(recipe: Recipe, precision: Precision, device: torch.device, folder: Path) -> Accelerator:
    """Join the other processes, if there are any. `device` is what `Place.device` says."""
    place = ProcessInfo.find()
    asked = {name for name, value in os.environ.items() if value.lower() in ("1", "true")}
    if asked & {"ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM"}:
        raise ConfigError(
            "accelerate is configured to share the model out, which adapt.mode: full does by itself",
            hint="accelerate launch --multi_gpu, or torchrun",
        )
    if "ACCELERATE_USE_CPU" in asked and device.type != "cpu":
        raise ConfigError("accelerate is configured for the CPU, the recipe is not", hint="--set train.device=cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    trackers = list(recipe.train.trackers)
    # Accelerate only warns of a tracker that is not there, and goes on without it.
    absent = [name for name in trackers if find_spec(name) is None]
    if absent:
        raise ConfigError(
            f"`train.trackers`: {' and '.join(absent)} is not installed", hint=f"pip install {' '.join(absent)}"
        )
    # Accelerate remembers the device and the precision of an earlier training in this process, which are not ours.
    AcceleratorState._reset_state(reset_partial_state=True)
    with _environment(_for_accelerate(place, device)):
        accelerator = Accelerator(
            mixed_precision=precision.mixed_precision,
            cpu=device.type == "cpu",
            log_with=trackers or None,
            project_dir=folder,
            kwargs_handlers=[InitProcessGroupKwargs(timeout=RANK_TIMEOUT)],
        )
    assert (accelerator.device, accelerator.process_index) == (device, place.rank)
    if trackers:
        accelerator.init_trackers(recipe.name)
    return accelerator


def _for_accelerate(place: ProcessInfo, device: torch.device) -> dict[str, str | None]:
    """Variables that make it see what we see; None takes one away."""
    if place.world == 1:
        alone = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        return {**alone, "ACCELERATE_TORCH_DEVICE": str(device)}
    ranks = {"RANK": place.rank, "LOCAL_RANK": place.local_rank, "WORLD_SIZE": place.world}
    return {
        **_from_slurm(),
        **{name: str(number) for name, number in ranks.items()},
        "ACCELERATE_TORCH_DEVICE": str(device),
    }


@contextmanager
def _environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}

    def put(values: Mapping[str, str | None]) -> None:
        for name, value in values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    put(changes)
    try:
        yield
    finally:
        put(before)


# How we share weights


def shards(recipe: Recipe, accelerator: Accelerator) -> bool:
    """Full training is shared out by weights, a LoRA is not worth it."""
    return recipe.adapt.mode == "full" and accelerator.num_processes > 1


def shard(objective: nn.Module, layers: Sequence[nn.Module], precision: Precision, accelerator: Accelerator) -> None:
    """Leave each rank its part of every weight, in place. Call it before the optimizer is made.

    Weights and gradients stay fp32 and sharded; a layer is put together in the compute type while it works.
    """
    if precision.trainable != torch.float32:
        raise ConfigError(
            f"`train.precision: {precision.name}` does not go with full training on several processes",
            hint="--set train.precision=auto: shared out, the fp32 weights need less room",
        )
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    policy = MixedPrecisionPolicy(param_dtype=precision.frozen, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # What the layers hold is reached by another way too, through the model, where it does not show as shared out.
    done = {parameter for layer in layers for parameter in layer.parameters()}
    fully_shard(objective, mesh=mesh, mp_policy=policy, ignored_params=done)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with all its parts. Every rank must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather(tensors: Mapping[str, torch.Tensor], *, keep: bool) -> dict[str, torch.Tensor]:
    """Whole tensors, copied to host memory one after the other, for the rank that keeps them. Every rank must ask."""
    kept = {}
    for name, tensor in tensors.items():
        assembled = whole(tensor.detach())
        if keep:
            kept[name] = assembled.to("cpu", copy=True)
    return kept


def part_of(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The opposite of `whole`: this rank's part of a tensor that all have, shared out as `like` is."""
    if not isinstance(like, DTensor):
        return tensor.to(like.device)
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def synchronize(items: Iterable[Item], accelerator: Accelerator) -> Iterator[tuple[Item, bool]]:
    """Equally many items on every rank, as sharded weights need them: a rank that has run out gets one that does not
    count."""
    filler: Item | None = None
    for item in chain(items, repeat(None)):
        has_one = accelerator.gather(torch.tensor([int(item is not None)], device=accelerator.device)).tolist()
        if not any(has_one):
            return
        if filler is None:
            filler = broadcast_object_list([item], from_process=has_one.index(1))[0]
        assert filler is not None
        yield (filler, False) if item is None else (item, True)


def check_same_weights(student: Trainer) -> None:
    """All ranks must hold the same weights; a wrapped module that was bypassed shows here. Parts are nobody's twice."""
    if student.accelerator.num_processes == 1 or student.sharded:
        return
    weights = (parameter.detach().double() for parameter in student.trainables.values())
    sums = torch.stack([part for weight in weights for part in (weight.sum(), weight.square().sum())])
    everybody = student.accelerator.gather(sums[None])
    strays = (everybody != everybody[0]).any(dim=1).nonzero().flatten().tolist()
    if strays:
        raise TrainingError(
            f"the weights of rank {strays[0]} have parted from rank 0's", hint="report this: gradients were not shared"
        )


def shutdown(student: Trainer) -> None:
    """The end of a training. DDP goes before the processes part: were it the last to hold on to their connections, it
    would close them with Python's lock in hand, for which one of gloo's threads may still be waiting."""
    accelerator = student.accelerator
    if accelerator.num_processes > 1:
        student.objective = accelerator.unwrap_model(student.objective)
        accelerator.free_memory()
        gc.collect()
    accelerator.end_training()


# How we begin and end


def launch(count: int, words: Sequence[object], device: str) -> bool:
    """Run `python -m myna WORDS` in several processes on this machine, and name the one that failed.

    Whether they came to their end: False where somebody asked them to stop, however far they were.
    """
    _check_room(count, device)
    variables = {
        LAUNCHED: "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count))),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(SHUTDOWN_TIMEOUT.total_seconds())),
    }
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    logging.disable()  # what the launcher logs of a failure, our error says better
    try:
        with tempfile.TemporaryDirectory(prefix="myna-") as folder, _environment(variables):
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=count,
                run_id=uuid.uuid4().hex,
                rdzv_backend="c10d",
                rdzv_endpoint="127.0.0.1:0",
                local_addr="127.0.0.1",
                max_restarts=0,
                logs_specs=DefaultLogsSpecs(log_dir=folder),
            )
            try:
                launch_agent(config, sys.executable, ["-m", "myna", *map(str, words)])
            except SignalException:
                # We were asked to stop, and so were the processes. The launcher does not look how they took it.
                if failures := _reasons_in(Path(folder)):
                    raise ChildFailedError("myna", failures) from None
                return False
    except ChildFailedError as error:
        raise _first_failure(error) from None
    finally:
        logging.disable(logging.NOTSET)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return True


def _check_room(count: int, device: str) -> None:
    world = ProcessInfo.find().world
    if world > 1:
        raise TrainingError(
            f"this is one of {world} processes already", hint="drop --gpus: it starts processes on a single machine"
        )
    cards = torch.cuda.device_count()
    if device == "cpu" or (device in ("auto", "cuda") and count <= cards):
        return
    if device in ("auto", "cuda"):
        what, hint = f"{count} GPUs were asked for, there are {cards} here", f"--gpus {cards}"
        raise ConfigError(what, hint=hint if cards else "--set train.device=cpu, for processes without a GPU")
    raise ConfigError(f"`train.device: {device}` is one device, for {count} processes", hint="--set train.device=cuda")


def _first_failure(error: ChildFailedError) -> TrainingError:
    """The rank to blame: not one that only lost touch with it."""
    rank, failure = min(error.failures.items(), key=lambda item: (LOST in _told(item[1]), item[1].timestamp))
    what, _, hint = _told(failure).partition("\n  → ")
    if hint:
        return TrainingError(f"rank {rank} stopped: {what.partition(': ')[2]}", hint=hint)
    if what:
        return TrainingError(f"rank {rank} stopped: {what}", hint="its traceback stands above")
    killed = failure.exitcode == -signal.SIGKILL
    return TrainingError(
        f"rank {rank} died (exit code {failure.exitcode})",
        hint="the system kills what takes too much memory: lower train.micro_batch_size or data.row_tokens"
        if killed
        else "what it printed last stands above",
    )


def _reasons_in(folder: Path) -> dict[int, ProcessFailure]:
    """Why processes stopped that were asked to, and failed over it, by rank. Not all of them get the signal at once, so
    that one which lost touch with the others has failed over nothing."""
    files = sorted((int(file.parent.name), file) for file in folder.rglob("error.json"))
    failures = {rank: ProcessFailure(rank, pid=0, exitcode=1, error_file=str(file)) for rank, file in files}
    return {rank: failure for rank, failure in failures.items() if LOST not in _told(failure)}


def _told(failure: ProcessFailure) -> str:
    message: Any = failure.message
    return str(message["message"] if isinstance(message, dict) else "")


@contextmanager
def reporting() -> Iterator[None]:
    """Tell whoever started us why we stop. The death of another rank comes to us as a broken connection."""
    try:
        yield
    except Exception as error:
        place = ProcessInfo.find()
        if place.world == 1:
            raise
        lost = isinstance(error, DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
        what = f"rank {place.rank} {LOST}: {str(error).partition(chr(10))[0]}"
        reason = TrainingError(what, hint="the rank that went first says why") if lost else error
        get_error_handler().record_exception(reason)
        if isinstance(reason, MynaError) and LAUNCHED in os.environ:
            raise SystemExit(1) from error
        if lost:
            raise reason from error
        raise
