"""Sounds and pictures for the trackers of a run; numbers go there through Accelerate, which knows no sound."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from accelerate import Accelerator

from myna.train.callbacks import LoggedSample


def show(accelerator: Accelerator, samples: Sequence[LoggedSample], step: int) -> None:
    """Every sample to every tracker, under one name at all steps, so that it can be followed."""
    if not samples:
        return
    for tracker in accelerator.trackers:
        if tracker.name == "tensorboard":
            _on_tensorboard(tracker.tracker, samples, step)
        elif tracker.name in ("wandb", "trackio"):
            # Both have the same words for it.
            _in_words(importlib.import_module(tracker.name), tracker.tracker, samples, step)


def _on_tensorboard(writer: Any, samples: Sequence[LoggedSample], step: int) -> None:
    for sample in samples:
        writer.add_audio(f"listen/{sample.name}", sample.samples, global_step=step, sample_rate=sample.sample_rate)
        writer.add_image(f"listen/{sample.name}/mel", sample.picture, global_step=step, dataformats="HWC")


def _in_words(library: Any, run: Any, samples: Sequence[LoggedSample], step: int) -> None:
    told: dict[str, Any] = {}
    for sample in samples:
        told[f"listen/{sample.name}"] = library.Audio(sample.samples, sample_rate=sample.sample_rate)
        told[f"listen/{sample.name}/mel"] = library.Image(sample.picture)
    run.log(told, step=step)
