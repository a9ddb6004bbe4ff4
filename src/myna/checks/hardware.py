"""Checks of the hardware: GPUs, precision, disks, memory and the processes of a launcher."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

from myna.checks.check import Check, Status

MODEL_BYTES, RUN_BYTES, LEAST_BYTES = 15e9, 5e9, 1e9
"""On disk: the 3B model with its codec; a LoRA run with three checkpoints; too little for anything."""
MEMORY_BYTES = 8e9
"""Main memory below which loading a 3B model gets tight."""
CUDA_TORCH = "pip install --force-reinstall torch, in the build that https://pytorch.org/get-started names for the GPU"
CPU_TORCH = "install the CPU build of torch: pytorch.org/get-started has the line for this machine"
TRITON = "pip install triton (on Linux), with a card of compute capability 8.0 or later"
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
NVIDIA = Path("/proc/driver/nvidia/version")


def check_torch() -> Iterator[Check]:
    import torch

    cuda, rocm = torch.version.cuda, torch.version.hip
    build = f"CUDA {cuda}" if cuda else f"ROCm {rocm}" if rocm else "CPU"
    detail = f"{torch.__version__}, {build} build"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        works = torch.cuda.is_available()
    if build == "CPU" and NVIDIA.exists():
        yield Check("torch", "warning", f"{detail}, but there is an NVIDIA driver: the GPUs lie idle", CUDA_TORCH)
    elif build == "CPU" or works:
        yield Check("torch", "ok", detail)
    elif os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        yield Check("torch", "warning", f"{detail}; CUDA_VISIBLE_DEVICES hides every GPU", "unset CUDA_VISIBLE_DEVICES")
    else:
        reason = str(caught[0].message).splitlines()[0] if caught else "no GPU answers"
        smi = "rocm-smi" if rocm else "nvidia-smi"
        yield Check(
            "torch",
            "warning",
            f"{detail} without a working driver ({reason}): training would run on the CPU",
            f"{smi} shows whether the driver works: if not, install or update it; if there is no GPU, {CPU_TORCH}",
        )


def check_gpu() -> Iterator[Check]:
    import torch

    from myna.core.device import why_no_triton

    if not torch.cuda.is_available():
        here = "Apple MPS" if torch.backends.mps.is_available() else "none: the CPU will do for tiny models and tests"
        yield Check("gpu", "ok", here)
        return
    for number in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        detail = (
            f"{card.name}, {total / 2**30:.1f} GiB of memory ({free / 2**30:.1f} free), "
            f"compute capability {card.major}.{card.minor}"
        )
        if not torch.version.hip and not _built_for(card.major, card.minor, torch.cuda.get_arch_list()):
            detail += f", which this torch has no kernels for ({', '.join(torch.cuda.get_arch_list())})"
            yield Check(f"gpu {number}", "failed", detail, CUDA_TORCH)
        elif free < total / 2:
            yield Check(f"gpu {number}", "warning", f"{detail}: most of it is taken", "nvidia-smi shows who holds it")
        elif reason := why_no_triton(number):
            detail += f". {reason}: speaking and training take plain paths there, which are slower"
            yield Check(f"gpu {number}", "warning", detail, TRITON)
        else:
            yield Check(f"gpu {number}", "ok", detail)


def _built_for(major: int, minor: int, kernels: list[str]) -> bool:
    """Machine code serves later cards of its generation, PTX (`compute_..`) all later cards."""
    for kernel in kernels:
        kind, _, digits = kernel.partition("_")
        number = int("".join(digit for digit in digits if digit.isdigit()) or 0)
        generation, step = divmod(number, 10)
        if (generation == major and step <= minor) or (kind == "compute" and (generation, step) <= (major, minor)):
            return True
    return False


def check_precision() -> Iterator[Check]:
    from myna.core.device import pick_device
    from myna.train.precision import choose_precision

    yield Check("precision", "ok", str(choose_precision("auto", pick_device("auto"))))


def check_disk() -> Iterator[Check]:
    from huggingface_hub import constants

    yield _disk_space("disk for runs", Path("runs"), RUN_BYTES, "myna train RECIPE --out /a/bigger/disk/NAME")
    cache = Path(constants.HF_HUB_CACHE)
    yield _disk_space("disk for the hub cache", cache, MODEL_BYTES, "export HF_HOME=/a/bigger/disk/huggingface")


def _disk_space(name: str, folder: Path, wanted: float, hint: str) -> Check:
    there = next(part for part in (folder.absolute(), *folder.absolute().parents) if part.is_dir())
    free = shutil.disk_usage(there).free
    detail = f"{free / 1e9:.0f} GB free at {folder.absolute()}"
    if not os.access(there, os.W_OK | os.X_OK):
        return Check(name, "warning", f"{there} cannot be written to", hint)
    if free < wanted:
        status: Status = "failed" if free < LEAST_BYTES else "warning"
        return Check(name, status, f"{detail}, {wanted / 1e9:.0f} GB are wanted", hint)
    return Check(name, "ok", detail)


def check_memory(root: Path = Path("/")) -> Iterator[Check]:
    import psutil  # type: ignore[import-untyped]

    from myna.core.system_memory import cgroups

    free = psutil.virtual_memory().available
    detail = f"{free / 1e9:.1f} GB free of {psutil.virtual_memory().total / 1e9:.1f}"
    left = min((group.limit - group.used for group in cgroups(root)), default=free)
    if left < free:
        free, detail = left, f"{left / 1e9:.1f} GB left by the limit of this container or job"
    if free < MEMORY_BYTES:
        hint = "close other programs, or ask for more where there is a limit: sbatch --mem=64G, docker run --memory=64g"
        yield Check("memory", "warning", f"{detail}; a 3B model wants {MEMORY_BYTES / 1e9:.0f} GB", hint)
    else:
        yield Check("memory", "ok", detail)


def check_processes() -> Iterator[Check]:
    """What torchrun, accelerate or srun has put into the environment."""
    from myna.train.distributed import ProcessInfo

    variables = {name: os.environ[name] for name in LAUNCHER_VARIABLES if name in os.environ}
    listing = ", ".join(f"{name}={value}" for name, value in variables.items())
    start_over = f"unset {' '.join(LAUNCHER_VARIABLES)}, then: myna train RECIPE --gpus N"
    if bad := [name for name in LAUNCHER_VARIABLES[:3] if not variables.get(name, "0").removeprefix("-").isdecimal()]:
        yield Check("processes", "failed", f"{' and '.join(bad)} should be a number: {listing}", start_over)
        return
    process = ProcessInfo.from_environment()
    launched = "WORLD_SIZE" in variables  # srun has variables of its own, and the rest follows from them
    absent = [name for name in LAUNCHER_VARIABLES[3:] if name not in variables and launched and process.world_size > 1]
    if absent:
        yield Check("processes", "failed", f"several processes, but no {' and '.join(absent)}: {listing}", start_over)
    elif max(process.rank, int(variables.get("RANK", "0"))) >= process.world_size:
        yield Check("processes", "failed", f"ranks run from 0 to WORLD_SIZE - 1: {listing}", start_over)
    elif process.world_size > 1:
        detail = (
            f"rank {process.rank} of {process.world_size} on {process.device('auto')}, as {listing or 'Slurm has it'}"
        )
        yield Check("processes", "ok", detail)
    else:
        single = "LOCAL_RANK=-1 means a single process" if variables.get("LOCAL_RANK") == "-1" else "a single process"
        yield Check("processes", "ok", f"{single} ({listing})" if listing else single)
