"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections import defaultdict

import torch

from codec_training.learner import Kind, Teacher

STEPS = 10


def profile(teacher: Teacher) -> None:
    """A table of the parts of a step, each waited for; then whole steps as training takes them; then the kernels."""
    teacher.rate.fill_(0.0)
    recording, teacher.records = teacher.records, False
    everything = Kind(critics=True, letters=bool(teacher.lesson.letters))
    spent: defaultdict[str, float] = defaultdict(float)
    began = 0.0

    def lap(part: str) -> None:
        nonlocal began
        _wait(teacher.device)
        now = time.perf_counter()
        spent[part] += now - began
        began = now

    for step in range(STEPS + 3):
        if step == 3:
            spent.clear()
            teacher.lap = lap
        _wait(teacher.device)
        began = time.perf_counter()
        teacher._step(everything)
    teacher.lap = lambda _: None
    whole = sum(spent.values())
    print(f"one step in parts, {1000 * whole / STEPS:.1f} ms")
    for part, seconds in sorted(spent.items(), key=lambda item: -item[1]):
        print(f"  {part:<16}{1000 * seconds / STEPS:8.2f} ms {seconds / whole:6.1%}")
    for critics in (False, True):
        print(f"whole steps, {'with' if critics else 'without'} critics: {_rate(teacher, critics):.1f} a second")
    teacher.records = recording
    if recording:
        for critics in (False, True):
            print(f"recorded, {'with' if critics else 'without'} critics: {_rate(teacher, critics):.1f} a second")
        teacher.records = False
        _kernels(teacher, everything)
        teacher.records = True


def _rate(teacher: Teacher, critics: bool) -> float:
    steps = 5 * STEPS if teacher.records else STEPS
    for _ in range(teacher.lesson.letters_every):  # every kind of step is recorded when it is first taken
        teacher.step(critics)
    _wait(teacher.device)
    began = time.perf_counter()
    for _ in range(steps):
        teacher.step(critics)
    _wait(teacher.device)
    return steps / (time.perf_counter() - began)


def _kernels(teacher: Teacher, kind: Kind) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(3):
            teacher._step(kind)
        _wait(teacher.device)
    print(found.key_averages().table(sort_by="self_device_time_total", row_limit=30, max_name_column_width=90))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
