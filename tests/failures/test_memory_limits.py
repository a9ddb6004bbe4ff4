"""Limits of main memory: control groups, and units that differ by system."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil  # type: ignore[import-untyped]
import pytest
import torch

from myna.core.device import memory_limit
from myna.core.errors import TrainingError
from myna.train import memory_plan
from myna.train.memory_plan import available_memory, peak_memory

from .conftest import TrainWith

CPU = torch.device("cpu")
UNLIMITED_V1 = 9223372036854771712
MACHINE = 64 * 2**30


def fake_root(root: Path, membership: str, groups: dict[str, int | str]) -> Path:
    """A tree of `proc` and `sys` with control groups of these limits."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(membership)
    for name, limit in groups.items():
        folder, v1 = root / "sys/fs/cgroup" / name, name.startswith("memory")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(f"{limit}\n")
        (folder / "memory.stat").write_text("total_rss 1000\n" if v1 else "anon 1000\nfile 5000\n")
    return root


V2 = "0::/slurm/job_7/step_0\n"
V1 = "9:name=systemd:/job\n4:cpu,memory:/slurm/job_7\n0::/\n"


@pytest.mark.parametrize(
    ("membership", "groups", "expected"),
    [
        (V2, {"slurm/job_7/step_0": "max", "slurm/job_7": 3 * 2**30, "slurm": 8 * 2**30}, 3 * 2**30),
        (V2, {"slurm/job_7/step_0": 2 * 2**30, "slurm/job_7": 3 * 2**30}, 2 * 2**30),
        (V2, {"slurm/job_7/step_0": "max", "slurm/job_7": "max"}, MACHINE),
        (V2, {"slurm/job_7": 128 * 2**30}, MACHINE),
        ("0::/\n", {"": 5 * 2**30}, 5 * 2**30),
        (V1, {"memory/slurm/job_7": UNLIMITED_V1, "memory/slurm": 4 * 2**30, "memory": UNLIMITED_V1}, 4 * 2**30),
        (V1, {"memory": 6 * 2**30}, 6 * 2**30),  # a container: the path is the host's, the mount its own
        (V1, {"memory/slurm/job_7": UNLIMITED_V1}, MACHINE),
        ("1:cpu:/x\n", {"memory/x": 2**30}, MACHINE),
    ],
)
def test_the_smallest_limit_of_the_control_groups_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, membership: str, groups: dict[str, int | str], expected: int
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=MACHINE))
    root = fake_root(tmp_path, membership, groups)
    assert memory_limit(root) == available_memory(CPU, root) == expected


def test_without_control_groups_the_machine_is_the_limit(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) == psutil.virtual_memory().total
    assert 0 < memory_limit() <= psutil.virtual_memory().total


def test_weights_that_do_not_fit_the_limit_of_a_container_are_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_with: TrainWith
) -> None:
    root = fake_root(tmp_path / "root", V2, {"slurm/job_7/step_0": "max", "slurm/job_7": 400_000})
    monkeypatch.setattr(memory_plan, "memory_limit", lambda _: memory_limit(root))
    with pytest.raises(TrainingError, match=r"the weights alone take .* and there are 0\.4 MiB"):
        train_with()


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_the_peak_is_in_bytes_on_every_system(monkeypatch: pytest.MonkeyPatch, platform: str, unit: int) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=123_456))
    assert peak_memory(CPU) == 123_456 * unit
