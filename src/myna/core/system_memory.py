"""Main memory of this process: the limits of the machine and of its control groups, and the peak it has used."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil  # type: ignore[import-untyped]


class CgroupMemory(NamedTuple):
    """Memory of one control group, in bytes."""

    limit: int
    used: int
    """Without cached files, which make room when asked."""


def memory_limit(root: Path = Path("/")) -> int:
    """Bytes that this process may have: those of the machine, or the smallest limit of its control groups."""
    return min([int(psutil.virtual_memory().total), *(group.limit for group in cgroups(root))])


def cgroups(root: Path = Path("/")) -> Iterator[CgroupMemory]:
    """Control groups (v1 and v2) of this process that limit its memory, innermost first; `root` holds proc and sys.

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
    """Largest resident memory of this process so far, in bytes."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # KiB everywhere but on macOS


def release_free_memory() -> None:
    """Give freed memory back to the system, which glibc otherwise keeps for later; nothing where there is no glibc."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def is_out_of_memory(error: RuntimeError) -> bool:
    """CUDA has a class for it (torch's, which is not imported for that); the CPU and MPS only a message."""
    message = str(error).lower()
    return type(error).__name__ == "OutOfMemoryError" or "out of memory" in message or "not enough memory" in message
