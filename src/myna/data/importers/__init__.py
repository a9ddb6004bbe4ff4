"""Importers: recordings and transcripts in any of twelve layouts, read into one manifest.

Each layout is an `Importer`, an entry of `FORMATS`. The module `validation` checks everything they
read; `rejected.jsonl` names what cannot be used, and too much of it stops the import.
"""

import difflib
import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from myna.core.errors import DataError
from myna.core.io import atomic_write, disk_error
from myna.core.progress import ProgressCallback, silent
from myna.data.importers import conversations, folders, scored, tables
from myna.data.importers.records import RECORDING_SUFFIXES, ImportContext, Importer, RejectedRecord, RejectionReason
from myna.data.importers.validation import TextCheck, validate_utterances
from myna.data.manifest import Utterance, write_manifest

FORMATS = {
    "myna": Importer(folders.matches_myna, folders.read_myna),
    "folder": Importer(folders.matches_folder, folders.read_folder),
    "ljspeech": Importer(folders.matches_ljspeech, folders.read_ljspeech),
    "transcripts": Importer(folders.matches_transcripts, folders.read_transcripts),
    "webdataset": Importer(tables.matches_webdataset, tables.read_webdataset),
    "table": Importer(tables.matches_table, tables.read_table),
    "metadata_json": Importer(conversations.matches_samples, conversations.read_samples),
    "chatml": Importer(conversations.matches_chatml, conversations.read_chatml),
    "ms_swift": Importer(conversations.matches_ms_swift, conversations.read_ms_swift),
    "hf": Importer(tables.matches_hub, tables.read_hub),
    "scored_jsonl": Importer(scored.matches_scored, scored.read_scored),
    "speechocean": Importer(scored.matches_speechocean, scored.read_speechocean),
}
MAX_SEARCHED_ENTRIES = 100
"""Maximum number of entries of an unknown folder that are looked at, to name one in a known layout."""
MAX_NAMED_REJECTIONS = 5
"""Maximum number of rejected records that an error names; the others are in `rejected.jsonl`."""


@dataclass(slots=True)
class ImportResult:
    utterances: list[Utterance]
    rejected: list[RejectedRecord]
    format: str
    notes: tuple[str, ...] = ()
    """Sentences for the user on what was accepted and may be wrong."""

    @property
    def counts(self) -> dict[RejectionReason, int]:
        """Number of rejected records by reason, the most frequent first."""
        return dict(Counter(item.reason for item in self.rejected).most_common())


def detect_format(source: str) -> str:
    """Detect the layout of a source by its names and first bytes."""
    path = Path(source)
    matching = _matching_formats(path)
    is_missing = not path.exists() and tables.locate(path)[0] is None
    if is_missing and (not matching or path.parent.is_dir()):  # otherwise it is named like a dataset on the hub
        raise missing_source_error(path)
    if len(matching) == 1 or matching[:1] == ["myna"]:  # the codes of a prepared folder look like a dataset
        return matching[0]
    inside = sorted(path.iterdir())[:MAX_SEARCHED_ENTRIES] if path.is_dir() and not matching else []
    if parts := [entry for entry in inside if _matching_formats(entry)]:
        named = ", ".join(entry.name for entry in parts[:MAX_NAMED_REJECTIONS])
        problem = f"{source} is in no layout we know, but what lies in it is: {named}"
        raise DataError(problem, hint=f"give one of them: {parts[0]}")
    if not matching and _is_raw(path):
        raise DataError(
            f"{source} holds recordings without texts",
            hint=f"have them cut and written down: myna curate {source} --out data/NAME, then give data/NAME; or put "
            "what is said in clip.m4a into clip.txt beside it",
        )
    problem = f"could be any of {', '.join(matching)}" if matching else "is in no layout we know"
    raise DataError(
        f"{source} {problem}; {_describe_path(path)}\n{_list_formats()}", hint="name one of these with --format"
    )


def check_source(source: str, format: str | None = None) -> str:
    """Return the layout of a source, given or detected; raise an error if the source does not exist."""
    if format is not None and format not in FORMATS:
        raise DataError(f"there is no format `{format}`", hint=f"use one of {', '.join(FORMATS)}")
    if format not in (None, "hf") and not Path(source).exists():
        raise missing_source_error(Path(source))
    try:
        return format or detect_format(source)
    except OSError as error:
        raise disk_error(error) or error from None


def missing_source_error(path: Path) -> DataError:
    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, n=1)
    hint = f"did you mean {path.parent / near[0]}?" if near else "check the path; --format hf reads from the hub"
    return DataError(f"{path}: there is no such file or folder", hint=hint)


def import_source(
    source: str,
    *,
    media: Path,
    format: str | None = None,
    language: str = "",
    speaker: str = "",
    check_text: TextCheck | None = None,
    progress: ProgressCallback = silent,
) -> ImportResult:
    """Read and validate a whole source. Embedded audio goes to `media`; nothing else is written.

    `language` and `speaker` are defaults for records that name none. Texts that `check_text` refuses are rejected.
    """
    path, layout = Path(source), check_source(source, format)
    try:
        items = FORMATS[layout].read(path, ImportContext(media, language, speaker))
        utterances, rejected, notes = validate_utterances(items, progress, check_text)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise _wrong_format(source, layout, str(error)) from None
    except OSError as error:
        problem = DataError(f"{source} cannot be imported: {error}", hint="check permissions and free space")
        raise disk_error(error) or problem from None
    if not utterances and not rejected and layout not in _matching_formats(path):
        raise _wrong_format(source, layout, "it holds not one utterance")
    return ImportResult(utterances, rejected, layout, notes)


def _matching_formats(path: Path) -> list[str]:
    return [name for name, importer in FORMATS.items() if importer.matches(path)]


def _is_raw(path: Path) -> bool:
    """Whether the path is a recording, or a folder of nothing but recordings."""
    if path.is_dir():
        files = [entry for entry in path.rglob("*") if entry.is_file() and not entry.name.startswith(".")]
        return bool(files) and all(file.suffix.lower() in RECORDING_SUFFIXES for file in files)
    return path.is_file() and path.suffix.lower() in RECORDING_SUFFIXES


def _list_formats() -> str:
    lines = ((name, (importer.read.__doc__ or "").partition("\n")[0]) for name, importer in FORMATS.items())
    return "\n".join(f"  {name:14}{description.removesuffix('.')}" for name, description in lines)


def _wrong_format(source: str, format: str, reason: str) -> DataError:
    matching = " or ".join(_matching_formats(Path(source)))
    remedy = f"leave --format away, or give --format {matching}: that is what it looks like"
    return DataError(
        f"{source} cannot be read as `{format}`: {reason}\n{_list_formats()}",
        hint=remedy if matching else "name one of these with --format",
    )


def write_import(imported: ImportResult, out: Path, *, max_bad: float = 0.01) -> None:
    """Write `rejected.jsonl` and `manifest.jsonl`; above `max_bad` only the former, and raise an error with the
    reasons."""
    rejected = out / "rejected.jsonl"
    with atomic_write(rejected) as temporary:
        lines = "".join(json.dumps(item.to_json(), ensure_ascii=False) + "\n" for item in imported.rejected)
        temporary.write_bytes(lines.encode(errors="backslashreplace"))  # invalid characters become JSON escapes
    bad, good = len(imported.rejected), len(imported.utterances)
    share = bad / max(1, good + bad)
    if good and share <= max_bad:
        write_manifest(out / "manifest.jsonl", imported.utterances)
        return
    if not bad:
        raise DataError("the source holds not one utterance", hint="check that it is the right file or folder")
    reasons = ", ".join(f"{count} {reason}" for reason, count in imported.counts.items())
    first = "".join(f"\n  {item}" for item in imported.rejected[:MAX_NAMED_REJECTIONS])
    more = f"\n  and {bad - MAX_NAMED_REJECTIONS} more" if bad > MAX_NAMED_REJECTIONS else ""
    accept = f", or accept the loss with --max-bad {math.ceil(share * 100) / 100:g}" if good else ""
    raise DataError(
        f"{bad} of {bad + good} items cannot be used ({share:.1%}, `max_bad` is {max_bad:.1%}): {reasons}{first}{more}",
        hint=f"{rejected} names every one; mend them{accept}",
    )


def _describe_path(path: Path) -> str:
    """Describe the content of a folder or the beginning of a file for an error message."""
    if path.is_dir():
        names = sorted(entry.name + "/" * entry.is_dir() for entry in path.iterdir())
        return f"it holds {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}" if names else "it is empty"
    if path.is_file():
        with path.open("rb") as file:
            return f"it begins with {file.read(60)!r}"
    return "there is no such file or folder"
