"""Audio samples and spectrograms for the trackers of a run; Accelerate logs only numbers."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from accelerate import Accelerator

from myna.train.callbacks import LoggedSample


def log_samples(accelerator: Accelerator, samples: Sequence[LoggedSample], step: int) -> None:
    """Every sample to every tracker, under the same name at all steps."""
    if not samples:
        return
    for tracker in accelerator.trackers:
        if tracker.name == "tensorboard":
            for sample in samples:
                name, rate = f"speech_eval/{sample.name}", sample.sample_rate
                tracker.tracker.add_audio(name, sample.samples, global_step=step, sample_rate=rate)
                tracker.tracker.add_image(f"{name}/mel", sample.spectrogram, global_step=step, dataformats="HWC")
        elif tracker.name in ("wandb", "trackio"):
            # The two libraries share these names.
            library = importlib.import_module(tracker.name)
            media: dict[str, Any] = {}
            for sample in samples:
                media[f"speech_eval/{sample.name}"] = library.Audio(sample.samples, sample_rate=sample.sample_rate)
                media[f"speech_eval/{sample.name}/mel"] = library.Image(sample.spectrogram)
            tracker.tracker.log(media, step=step)
