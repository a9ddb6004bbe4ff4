"""Profile of a codec training step."""

from __future__ import annotations

import time
from collections import defaultdict

import torch

from codec_training.trainer import CodecTrainer, StepKind

STEPS = 10


def profile(trainer: CodecTrainer) -> None:
    """Print the time of each part of a step (synchronised), the rate of whole steps, and the slowest kernels."""
    trainer.rate.fill_(0.0)
    use_cuda_graph, trainer.use_cuda_graph = trainer.use_cuda_graph, False
    everything = StepKind(adversarial=True, ctc=bool(trainer.step_config.ctc_weight))
    spent: defaultdict[str, float] = defaultdict(float)
    began = 0.0

    def lap(part: str) -> None:
        nonlocal began
        _wait(trainer.device)
        now = time.perf_counter()
        spent[part] += now - began
        began = now

    for step in range(STEPS + 3):
        if step == 3:
            spent.clear()
            trainer.lap = lap
        _wait(trainer.device)
        began = time.perf_counter()
        trainer._step(everything)
    trainer.lap = lambda _: None
    whole = sum(spent.values())
    print(f"one step in parts, {1000 * whole / STEPS:.1f} ms")
    for part, seconds in sorted(spent.items(), key=lambda item: -item[1]):
        print(f"  {part:<24}{1000 * seconds / STEPS:8.2f} ms {seconds / whole:6.1%}")
    for adversarial in (False, True):
        with_discriminators = f"{'with' if adversarial else 'without'} discriminators"
        print(f"whole steps, {with_discriminators}: {_rate(trainer, adversarial):.1f} a second")
    trainer.use_cuda_graph = use_cuda_graph
    if use_cuda_graph:
        for adversarial in (False, True):
            with_discriminators = f"{'with' if adversarial else 'without'} discriminators"
            print(f"captured, {with_discriminators}: {_rate(trainer, adversarial):.1f} a second")
        trainer.use_cuda_graph = False
        _kernels(trainer, everything)
        trainer.use_cuda_graph = True


def _rate(trainer: CodecTrainer, adversarial: bool) -> float:
    steps = 5 * STEPS if trainer.use_cuda_graph else STEPS
    for _ in range(trainer.step_config.ctc_every):  # every kind of step is captured when it is first taken
        trainer.step(adversarial)
    _wait(trainer.device)
    began = time.perf_counter()
    for _ in range(steps):
        trainer.step(adversarial)
    _wait(trainer.device)
    return steps / (time.perf_counter() - began)


def _kernels(trainer: CodecTrainer, kind: StepKind) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            trainer._step(kind)
        _wait(trainer.device)
    print(profiler.key_averages().table(sort_by="self_device_time_total", row_limit=30, max_name_column_width=90))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
