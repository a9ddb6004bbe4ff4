"""Preparation of training data: read a source in any supported layout, then encode its clips with a model's codec."""

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from myna.core.device import pick_device
from myna.core.errors import ConfigError, DataError
from myna.core.io import check_writable, is_file, save_text
from myna.core.pools import Pool, open_pool
from myna.core.progress import ProgressCallback, silent
from myna.data.codec import Encoder
from myna.data.corrections import check_corrections_applied, corrected_utterances
from myna.data.dataset import MANIFEST_FILE, DataFolder, DatasetInfo, PreparedDataset
from myna.data.encoding import ShardEncoder, encode_dataset
from myna.data.importers import check_source, import_source, write_import
from myna.data.importers.records import OUTPUT_FILES
from myna.data.importers.validation import TextCheck
from myna.data.lengths import LengthEstimator, count_text_tokens
from myna.data.manifest import Utterance, iterate_manifest

SOURCE_FILE = "source.txt"
"""File with the source of a folder's manifest."""


class EncodingModel(LengthEstimator, Protocol):
    """Parts of a model family that preparation needs: its audio encoder and its token counter."""

    @property
    def has_weights(self) -> bool:
        """False for a built-in configuration, whose tokenizer is not the released one."""

    def load_encoder(self, *, device: Any = "cpu") -> Encoder: ...


@dataclass(frozen=True, slots=True)
class ImportSettings:
    """Settings of an import."""

    format: str | None = None
    """Layout of the source; detected by default."""
    max_bad: float = 0.01
    """Share of bad items above which the import fails."""
    language: str = ""
    speaker: str = ""
    only: Sequence[str] = ()
    """Speakers to take; by default all."""


def import_folder(
    source: str, out: Path, settings: ImportSettings, *, progress: ProgressCallback = silent
) -> DataFolder:
    """Read recordings and texts in any supported layout into one manifest, without encoding them."""
    return _import(source, out, _checked(source, out, settings), progress)[1]


def prepare_folder(
    source: str,
    out: Path,
    open_model: Callable[[], EncodingModel],
    settings: ImportSettings,
    *,
    device: str = "auto",
    workers: int | None = None,
    ray: str | None = None,
    progress: ProgressCallback = silent,
) -> DataFolder:
    """Import a source and encode its clips with the model's encoder. Called again, it encodes only what is new.

    `workers` processes of this machine encode, or actors of the Ray cluster at the address `ray`, by default this
    process; the result is the same. Workers call `open_model` too: it must be picklable, and name folders by their
    absolute path.
    """
    settings = _checked(source, out, settings)
    pool = _open_encoding_pool(open_model, device, workers, ray)
    model = open_model()
    encoder = model.load_encoder(device=pick_device(device if pool is None else "cpu"))
    check_text = model.count_tokens if model.has_weights else None
    utterances, imported = _import(source, out, settings, progress, check_text)
    notes = list(imported.notes)
    with pool or nullcontext():
        report = encode_dataset(utterances, encoder, out, pool=pool, progress=progress, notify=notes.append)
    if report.encoded:
        notes.append(f"{report.seconds / 3600:.2f} hours of audio encoded, {report.pace:.1f} audio-hours/hour")
    notes += [f"left out: {id} is shorter than one frame" for id in report.too_short]
    DatasetInfo.from_codec(encoder).write(out)
    if model.has_weights:
        # Counted now, so that training does not have to wait for it.
        count_text_tokens(PreparedDataset.open(out), model)
    return replace(imported, utterances=report.utterances, encoded=report.encoded, notes=tuple(notes))


def _open_encoding_pool(
    open_model: Callable[[], EncodingModel], device: str, workers: int | None, ray: str | None
) -> Pool[ShardEncoder] | None:
    """Open the workers that encode; None if this process encodes."""
    if ray is None and (workers or 1) == 1:
        return None
    if ray is None and pick_device(device).type != "cpu":
        raise ConfigError(
            f"one process keeps a GPU busy, and {workers} were asked for",
            hint="leave --workers out; for several GPUs: ray start --head, then --ray auto; for CPUs: --device cpu",
        )
    threads = 1 if ray is not None else max(1, (os.cpu_count() or 1) // (workers or 1))
    worker_device = "cuda" if device.startswith("cuda") else device
    open_encoder = partial(_open_worker_encoder, open_model, worker_device, threads)
    return open_pool(partial(ShardEncoder, open_encoder), workers, ray, device)


def _open_worker_encoder(open_model: Callable[[], EncodingModel], device: str, threads: int) -> Encoder:
    """Load the encoder in a worker process, which does nothing else."""
    import torch

    torch.set_num_threads(threads)
    return open_model().load_encoder(device=pick_device(device))


def _checked(source: str, out: Path, settings: ImportSettings) -> ImportSettings:
    """Check that a source exists and can be imported into `out`; return the settings with its layout."""
    if Path(source).absolute() in (out.absolute(), (out / "manifest.jsonl").absolute()):
        raise DataError(f"{source} would be imported over itself", hint="choose another folder with --out")
    check_writable(out)
    check_corrections_applied(Path(source))
    if (out / "manifest.jsonl").exists() and not any((out / name).exists() for name in OUTPUT_FILES):
        raise DataError(
            f"{out / 'manifest.jsonl'} was made by something else",
            hint="choose another folder with --out, or move that file away",
        )
    return replace(settings, format=check_source(source, settings.format))


def _import(
    source: str, out: Path, settings: ImportSettings, progress: ProgressCallback, check_text: TextCheck | None = None
) -> tuple[list[Utterance], DataFolder]:
    """Read, validate and correct a source; write its manifest and its rejected records."""
    imported = import_source(
        source,
        media=out / "media",
        format=settings.format,
        language=settings.language,
        speaker=settings.speaker,
        check_text=check_text,
        progress=progress,
    )
    notes: list[str] = []
    folder = Path(source) if Path(source).is_dir() else Path(source).parent
    imported.utterances = corrected_utterances(folder, imported.utterances, notes.append)
    if settings.only:
        speakers = {one.speaker for one in imported.utterances}
        if unknown := sorted(set(settings.only) - speakers):
            hint = f"the speakers are {', '.join(sorted(speakers)[:20])}"
            raise DataError(f"{source} has no speaker {unknown[0]}", hint=hint)
        kept = [one for one in imported.utterances if one.speaker in settings.only]
        references = {id for one in kept for id in one.references or ()}
        others = [one for one in imported.utterances if one.speaker not in settings.only and one.id in references]
        kept += [replace(one, extras={**one.extras, "reference_only": True}) for one in others]
        imported.utterances = kept
    _check_replaced(source, out, imported.utterances)
    write_import(imported, out, max_bad=settings.max_bad)
    save_text(out / SOURCE_FILE, f"{_absolute_source(source)}\n")
    count, rejected = len(imported.utterances), len(imported.rejected)
    targets = sum(one.is_target for one in imported.utterances)
    kinds = f" ({targets} targets, {count - targets} references)" if targets < count else ""
    note = f"{count} utterances{kinds} from {source} ({imported.format}), {rejected} rejected"
    return imported.utterances, DataFolder(out, count, rejected, notes=(note, *imported.notes, *notes))


def _absolute_source(source: str) -> str:
    return os.fspath(Path(source).absolute()) if Path(source).exists() else source


def _check_replaced(source: str, out: Path, utterances: Sequence[Utterance]) -> None:
    """Refuse to replace the manifest of another source, unless all of its utterances are in this one too."""
    record, manifest = out / SOURCE_FILE, out / MANIFEST_FILE
    former = record.read_text(encoding="utf-8").strip() if is_file(record) and is_file(manifest) else ""
    if former in ("", _absolute_source(source)):
        return
    ids = {one.id for one in utterances}
    if lost := sum(one.id not in ids for one in iterate_manifest(manifest)):
        raise DataError(
            f"{out} holds {lost} utterances of {former} that {source} would replace",
            hint=f"choose another folder with --out; or rm {manifest} to give them up",
        )
