"""Worker of the first pass: decodes recordings and refines parts, and commits each result to a file.

A result is written under a temporary name, flushed and renamed: a process that is killed costs only what it held, and
work that is done twice gives the same bytes. Pools (myna/pools) map its methods over recordings and parts.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from myna.core.device import pick_device
from myna.core.io import atomic_write, fsync
from myna.core.pools import absolute_folder
from myna.core.system_memory import memory_limit
from myna.curate.models import CurationModels, analysis_settings
from myna.curate.recordings import CURATION_RATE, PARTS_FOLDER, DecodedRecording, decode_recording
from myna.curate.refine import Part, refine
from myna.curate.settings import CurateSettings, ListenSettings

WORKER_BYTES = 2 << 30
"""Memory that a worker needs, at most."""
GPU_WORKER_BYTES = 8 << 30
"""GPU memory that a worker needs: eight with whisper-base had 51.2 GiB of an H200 at most, 6.4 each."""

OpenModels = Callable[[ListenSettings, int], CurationModels]
"""Opens the models in a worker, with so many threads each; must be picklable."""


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What every worker needs to know; sent to it once."""

    folder: Path
    settings: CurateSettings
    open_models: OpenModels = CurationModels.open
    threads: int = 1


def with_absolute_paths(settings: CurateSettings) -> CurateSettings:
    """Settings for workers, which may have another working directory."""
    listen = settings.listen
    absolute = {
        "asr": absolute_folder(listen.asr),
        "check_asr": listen.check_asr and absolute_folder(listen.check_asr),
        "models": str(analysis_settings(listen).folder.absolute()),
    }
    return settings.model_copy(update={"listen": listen.model_copy(update=absolute)})


def default_workers(device: str) -> int:
    """A process for every core, as far as the memory allows, of a GPU the free one: one thread each wastes least."""
    fitting = memory_limit() // WORKER_BYTES
    if (target := pick_device(device)).type == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info(target)
        fitting = min(fitting, free // GPU_WORKER_BYTES)
    return max(1, min(os.cpu_count() or 1, fitting))


def findings_path(folder: Path, part: Part) -> Path:
    return folder / PARTS_FOLDER / f"{part.id}.parquet"


class CurationWorker:
    """Decodes and refines with models that are opened once, when they are first needed."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._models: CurationModels | None = None

    @property
    def models(self) -> CurationModels:
        if self._models is None:
            import torch

            torch.set_num_threads(self._context.threads)
            self._models = self._context.open_models(self._context.settings.listen, self._context.threads)
        return self._models

    def model_names(self) -> list[str]:
        return self.models.names

    def decode(self, path: Path) -> DecodedRecording:
        listen = self._context.settings.listen
        find = self.models.find_speech
        return decode_recording(path, self._context.folder, listen, lambda samples: find(samples, CURATION_RATE))

    def refine(self, part: Part) -> str:
        """Refine and commit a part; returns its id."""
        folder = self._context.folder
        table = refine(part, part.read(folder), self.models, self._context.settings)
        path = findings_path(folder, part)
        with atomic_write(path) as temporary:
            pq.write_table(table, temporary, compression="zstd")
            fsync(temporary)
        fsync(path.parent)
        return part.id
