"""Devices that commands compute on, and main memory of this process: what there is, its limits, and its peak."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from myna.core.errors import ConfigError

if TYPE_CHECKING:
    import torch

TRITON_CAPABILITY = (8, 0)
"""First compute capability that Triton supports."""


def pick_device(setting: str) -> torch.device:
    """Return the torch device of a setting: `auto` is the best available; anything else must be available."""
    import torch

    if setting == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if not available.get(setting.partition(":")[0], False):
        raise ConfigError(
            f"the device `{setting}` is not available here",
            hint="use `auto`, or one of: " + ", ".join(name for name, is_there in available.items() if is_there),
        )
    return torch.device(setting)


def supports_triton(x: torch.Tensor) -> bool:
    """Whether Triton kernels can run on the tensor's device."""
    return x.is_cuda and not why_no_triton(x.device.index)


@cache
def why_no_triton(device: int) -> str:
    """Return the reason why Triton kernels cannot run on a CUDA device; empty if they can."""
    import torch

    if find_spec("triton") is None:
        return "Triton is not installed"
    if torch.cuda.get_device_capability(device) < TRITON_CAPABILITY:
        return "Triton needs compute capability {}.{}".format(*TRITON_CAPABILITY)
    return ""


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error says that memory has run out: CUDA has a class for it, the CPU and MPS only a message."""
    message = str(error).lower()
    return type(error).__name__ == "OutOfMemoryError" or "out of memory" in message or "not enough memory" in message


class CgroupMemory(NamedTuple):
    """Memory of one control group, in bytes."""

    limit: int
    used: int
    """Memory in use, without cached files, which the system drops when memory is needed."""


def memory_limit(root: Path = Path("/")) -> int:
    """Return the bytes this process may have: those of the machine, or the smallest limit of its control groups."""
    import psutil  # type: ignore[import-untyped]

    return min([int(psutil.virtual_memory().total), *(group.limit for group in cgroups(root))])


def cgroups(root: Path = Path("/")) -> Iterator[CgroupMemory]:
    """Yield the control groups (v1 and v2) that limit the memory of this process, innermost first; `root` holds proc
    and sys.

    In a container the path that the kernel names may be the host's: its folders are then absent, and the limit stands
    in the mounted one above them.
    """
    membership, mount = root / "proc/self/cgroup", root / "sys/fs/cgroup"
    for line in membership.read_text().splitlines() if membership.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            hierarchy, limit_file, used_key = mount, "memory.max", "anon"
        elif "memory" in controllers.split(","):
            hierarchy, limit_file, used_key = mount / "memory", "memory.limit_in_bytes", "total_rss"
        else:
            continue
        innermost = hierarchy / path.lstrip("/")
        for folder in (innermost, *innermost.parents):
            limit, stat = folder / limit_file, folder / "memory.stat"
            if limit.is_file() and stat.is_file() and (number := limit.read_text().strip()) != "max":
                used = dict(line.split() for line in stat.read_text().splitlines())
                yield CgroupMemory(int(number), int(used[used_key]))
            if folder == hierarchy:
                break


def peak_process_memory() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # KiB everywhere but on macOS


def release_free_memory() -> None:
    """Give freed memory back to the system, which glibc otherwise keeps for later. Without glibc this does nothing."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
