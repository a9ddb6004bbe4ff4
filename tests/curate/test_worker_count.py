"""Number of workers: cores, main memory, and the free memory of a GPU."""

from __future__ import annotations

import os

import pytest
import torch

from myna.core.errors import ConfigError
from myna.curate import first_pass
from myna.curate.first_pass import GPU_WORKER_BYTES, WORKER_BYTES, default_workers


@pytest.mark.parametrize(
    ("device", "cores", "memory", "gpu_memory", "expected"),
    [
        ("cpu", 16, 64 * WORKER_BYTES, 0, 16),
        ("cpu", 16, 3 * WORKER_BYTES, 0, 3),
        ("cuda", 16, 64 * WORKER_BYTES, 17 * GPU_WORKER_BYTES, 16),
        ("cuda:0", 16, 64 * WORKER_BYTES, 3 * GPU_WORKER_BYTES - 1, 2),
        ("auto", 16, 64 * WORKER_BYTES, 3 * GPU_WORKER_BYTES, 3),
        ("cuda", 16, 2 * WORKER_BYTES, 9 * GPU_WORKER_BYTES, 2),
        ("cuda", 16, 64 * WORKER_BYTES, GPU_WORKER_BYTES // 2, 1),
    ],
)
def test_workers_fit_cores_and_memory_and_the_gpu(
    monkeypatch: pytest.MonkeyPatch, device: str, cores: int, memory: int, gpu_memory: int, expected: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(first_pass, "memory_limit", lambda: memory)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (gpu_memory, 100 * GPU_WORKER_BYTES))
    assert default_workers(device) == expected


def test_a_gpu_that_is_not_there_is_told_before_processes_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="`cuda` is not available"):
        default_workers("cuda")
