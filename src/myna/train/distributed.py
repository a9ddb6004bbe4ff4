"""Distributed training: process discovery, DDP and FSDP2 setup, sharded weights.

A LoRA is trained with DDP; full training shards the weights with FSDP2.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.util import find_spec
from itertools import chain, repeat
from pathlib import Path
from typing import Self, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list, patch_environment
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from myna.core.compat import reset_accelerator_state
from myna.core.config import Recipe
from myna.core.device import pick_device
from myna.core.errors import ConfigError, TrainingError
from myna.train.precision import Precision

Item = TypeVar("Item")

RANK_TIMEOUT = timedelta(seconds=float(os.environ.get("MYNA_RANK_TIMEOUT", "1800")))
"""Time that a rank waits for the others in a step or a check. A dead rank is detected sooner: by gloo at once, and the
launcher stops the others within half a minute (torchrun, accelerate, --gpus; Slurm with --kill-on-bad-exit). The others
only wait this long for a rank that hangs, or that dies on NCCL without a launcher."""
MAIN_RANK_TIMEOUT = timedelta(days=1)
"""Time that the other ranks wait for work of rank 0 alone, such as a speech evaluation or a checkpoint of 90 GB."""
SHUTDOWN_TIMEOUT = timedelta(minutes=30)
"""Time that processes get after SIGTERM for their last step and its checkpoint. A full one of 90 GB takes a quarter of
an hour on a slow disk."""
SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Environment variable of torchrun with the seconds between SIGTERM and SIGKILL, 30 by default."""

# Process discovery


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """Rank and world size of this process, the same for every launcher."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1

    @classmethod
    def from_environment(cls) -> Self:
        """Read the variables of torchrun, accelerate or srun; -1 is an old way to leave one unset."""
        variables = {**_slurm_variables(), **os.environ}
        rank, local_rank, world_size, local_world_size = (
            _parse_rank(variables.get(name)) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        )
        if world_size is None or world_size == 1:
            return cls(local_rank=local_rank or 0)
        if rank is None:
            raise TrainingError(
                f"WORLD_SIZE is {world_size}, but RANK does not say which of these processes this is",
                hint="launch with torchrun or with --gpus, or unset WORLD_SIZE",
            )
        if local_rank is None:
            local_rank = rank % (local_world_size or torch.cuda.device_count() or world_size)
        return cls(rank, local_rank, world_size)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and messages."""
        return self.rank == 0

    def device(self, setting: str) -> torch.device:
        """Return the device of this process: the GPU of its local rank, unless `train.device` names one."""
        device = pick_device(setting)
        named = device.index if ":" in setting else None
        if self.world_size > 1 and (named is not None or device.type == "mps"):
            raise ConfigError(
                f"`train.device: {setting}` is one device, for {self.world_size} processes",
                hint="--set train.device=cuda",
            )
        if device.type != "cuda":
            return device
        index, gpus = self.local_rank if named is None else named, torch.cuda.device_count()
        if index >= gpus:
            raise ConfigError(
                f"this process wants card {index}, and there are {gpus} here, counted from 0",
                hint="start as many processes as there are cards, or look at CUDA_VISIBLE_DEVICES",
            )
        return torch.device("cuda", index)


def _parse_rank(text: str | None) -> int | None:
    return int(text) if text and int(text) >= 0 else None


def _slurm_variables() -> dict[str, str]:
    """Derive the variables of torchrun if srun started several processes by itself."""
    slurm = os.environ
    tasks = _parse_rank(slurm.get("SLURM_STEP_NUM_TASKS"))
    if tasks is None or tasks == 1 or "RANK" in slurm:
        return {}
    # gpu[03-05,9],x1 begins with gpu03.
    first_node = re.sub(r"\[([^],-]+)[^]]*]", r"\1", slurm["SLURM_STEP_NODELIST"]).split(",")[0]
    variables = {
        "RANK": slurm["SLURM_PROCID"],
        "LOCAL_RANK": slurm["SLURM_LOCALID"],
        "WORLD_SIZE": str(tasks),
        "MASTER_ADDR": first_node,
        "MASTER_PORT": str(20_000 + int(slurm["SLURM_JOB_ID"]) % 20_000),
    }
    return {name: value for name, value in variables.items() if name not in slurm}


def shutdown_warning() -> str | None:
    """Return a warning if torchrun would kill this process too soon after SIGTERM; None without torchrun."""
    seconds, needed = float(os.environ.get(SHUTDOWN_VARIABLE, "30")), SHUTDOWN_TIMEOUT.total_seconds()
    if "TORCHELASTIC_RUN_ID" not in os.environ or seconds >= needed:
        return None
    return (
        f"torchrun kills its processes {seconds:g} s after SIGTERM, perhaps in the middle of their last checkpoint: "
        f"export {SHUTDOWN_VARIABLE}={needed:g} before it"
    )


# Accelerate


def init_accelerator(
    recipe: Recipe, precision: Precision, device: torch.device, folder: Path, *, track: bool = True
) -> Accelerator:
    """Make the accelerator, joined with the other processes if there are any. `device` comes from `ProcessInfo.device`;
    without `track`, no tracker of the recipe is started."""
    process = ProcessInfo.from_environment()
    enabled = {name for name, value in os.environ.items() if value.lower() in ("1", "true")}
    if enabled & {"ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM"}:
        raise ConfigError(
            "accelerate is configured to shard the model, which adapt.mode: full does by itself",
            hint="accelerate launch --multi_gpu, or torchrun",
        )
    if "ACCELERATE_USE_CPU" in enabled and device.type != "cpu":
        raise ConfigError("accelerate is configured for the CPU, the recipe is not", hint="--set train.device=cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    trackers = list(recipe.train.trackers)
    # Accelerate only warns of a tracker that is not installed, and goes on without it.
    absent = [name for name in trackers if find_spec(name) is None]
    if absent:
        raise ConfigError(
            f"`train.trackers`: {' and '.join(absent)} is not installed", hint=f"pip install {' '.join(absent)}"
        )
    # -1 means unset, in Accelerate too.
    variables = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"), "-1")
    if process.world_size > 1:
        variables = _slurm_variables() | {name.upper(): str(number) for name, number in asdict(process).items()}
    reset_accelerator_state()
    with patch_environment(ACCELERATE_TORCH_DEVICE=device, **variables):
        accelerator = Accelerator(
            mixed_precision=precision.mixed_precision,
            cpu=device.type == "cpu",
            log_with=trackers or None,
            project_dir=folder,
            kwargs_handlers=[InitProcessGroupKwargs(timeout=RANK_TIMEOUT)],
        )
    assert (accelerator.device, accelerator.process_index) == (device, process.rank)
    if trackers and track:
        accelerator.init_trackers(recipe.name)
    return accelerator


# Sharded weights


def shard_model(
    objective: nn.Module, layers: Sequence[nn.Module], precision: Precision, accelerator: Accelerator
) -> None:
    """Shard every weight over the ranks with FSDP2, in place. Call it before the optimizer is made.

    Weights and gradients stay fp32 and sharded; a layer is gathered in the compute type while it is used.
    """
    if precision.trainable_dtype != torch.float32:
        raise ConfigError(
            f"`train.precision: {precision.name}` does not go with full training on several processes",
            hint="--set train.precision=auto: sharded, the fp32 weights need less memory",
        )
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    policy = MixedPrecisionPolicy(param_dtype=precision.compute_dtype, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # The model also holds the layers' parameters, without showing that they are sharded.
    sharded = {parameter for layer in layers for parameter in layer.parameters()}
    fully_shard(objective, mesh=mesh, mp_policy=policy, ignored_params=sharded)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a tensor from its shards. Every rank must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor, or the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all numbers of a tensor, or of this rank's shard of it, are finite."""
    return bool(torch.isfinite(local_shard(tensor)).all())


def gather_full_tensors(tensors: Mapping[str, torch.Tensor], *, keep: bool) -> dict[str, torch.Tensor]:
    """Gather full tensors in host memory one by one, on the ranks that keep them. Every rank must call it."""
    gathered = {}
    for name, tensor in tensors.items():
        full = full_tensor(tensor.detach())
        if keep:
            gathered[name] = full.to("cpu", copy=True)
    return gathered


def shard_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor that all ranks have, sharded as `like` is."""
    if not isinstance(like, DTensor):
        return tensor.to(like.device)
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def synchronize(items: Iterable[Item], accelerator: Accelerator) -> Iterator[tuple[Item, bool]]:
    """Yield equally many items on every rank, as sharded weights need them, and whether each counts: a rank without
    items left gets one that does not count."""
    filler: Item | None = None
    for item in chain(items, repeat(None)):
        has_item = accelerator.gather(torch.tensor([int(item is not None)], device=accelerator.device)).tolist()
        if not any(has_item):
            return
        if filler is None:
            filler = broadcast_object_list([item], from_process=has_item.index(1))[0]
        assert filler is not None
        yield (filler, False) if item is None else (item, True)
