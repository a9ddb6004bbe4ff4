"""Importers for records with named columns: CSV and TSV files, Hugging Face datasets, and WebDataset shards."""

import csv
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from myna.core.errors import DataError
from myna.data.importers import records
from myna.data.importers.records import ImportContext, ImportItem, RecordError, SourceRecord, build_utterances
from myna.data.manifest import Utterance

COLUMNS = {
    "audio": ("audio", "audio_file", "audio_path", "path", "file", "file_name", "filename", "wav"),
    "text": ("text", "transcript", "raw_transcription", "transcription", "sentence"),
    "speaker": ("speaker", "speaker_id", "client_id"),
    "language": ("language", "lang", "locale"),
    "id": ("id",),
    "start": ("start", "offset"),
    "end": ("end",),
    "duration": ("duration",),
}
"""Column names of each field, the most likely first."""


def map_columns(columns: Iterable[str]) -> dict[str, str]:
    """Map each field to the column that holds it."""
    present = {column.strip().lower(): column for column in columns}
    return {field: present[name] for field, names in COLUMNS.items() for name in names[::-1] if name in present}


def utterance_from_row(record: SourceRecord, context: ImportContext, folders: Iterable[Path]) -> Utterance:
    """Make an utterance from a record with columns; columns without a field become extras."""
    row: Mapping[str, Any] = record.data
    columns = {field: column for field, column in map_columns(row).items() if row[column] not in (None, "")}
    embedded = [column for column, item in row.items() if isinstance(item, dict) and "bytes" in item]
    if embedded and columns.get("audio") not in embedded:
        columns["audio"] = embedded[0]
    if "raw_transcription" in row:  # FLEURS numbers its sentences, which several people read
        columns.pop("id", None)
    if "start" not in columns or "end" in columns:  # the duration is redundant then
        columns.pop("duration", None)
    value = {field: row[column] for field, column in columns.items()}
    record.id = str(value["id"]) if "id" in value else None
    span = records.parse_span(value.get("start"), value.get("end"), value.get("duration"))
    audio, name = _row_audio(value.get("audio"), context, folders)
    record.id = record.id or name + (f"@{span.start:g}" if span else "")
    defaults = {"text": "", "speaker": context.speaker, "language": context.language}
    text, speaker, language = (str(value.get(field, default)) for field, default in defaults.items())
    extras = records.collect_extras({key: item for key, item in row.items() if key not in columns.values()})
    return Utterance(record.id, audio, text, speaker, language, span, extras)


def _row_audio(value: Any, context: ImportContext, folders: Iterable[Path]) -> tuple[Path, str]:
    """Return the audio file, and an id for the clip if it has no other."""
    match value:
        case {"bytes": bytes(data), **rest}:
            path = context.save_embedded_audio(data)
            return path, _clip_name(str(rest.get("path") or path))
        case bytes(data):
            path = context.save_embedded_audio(data)
            return path, path.stem
        case {"path": str(name)} | str(name):
            return records.find_file(name, *folders), _clip_name(name)
        case _:
            raise RecordError("missing file", "the row names no audio")


def _clip_name(audio: str) -> str:
    path = Path(audio)
    return path.stem if path.is_absolute() else (path.parent / path.stem).as_posix()


# CSV and TSV

TABLE_SUFFIXES = (".csv", ".tsv")
LITERAL_DELIMITERS = "\t|"
"""Delimiters that never occur in texts, so that quotes beside them are literal."""
QUOTED = re.compile(r'"(?:[^"]|"")*"', re.DOTALL)
CLIPS = "clips"
"""Folder in which Common Voice keeps the audio its tables name. FLEURS has audio/SPLIT beside SPLIT.tsv."""
FLEURS_HEADER = ["id", "file_name", "raw_transcription", "transcription", "letters", "num_samples", "gender"]
"""Columns of FLEURS, whose tables have no header."""
FLEURS_LINE = re.compile(r"\d+\t\S+\.wav(\t[^\t]*){3}\t\d+\t\w+")


def matches_table(source: Path) -> bool:
    file = _find_table(source)
    return file is not None and {"audio", "text"} <= map_columns(_header(file)[1]).keys()


def read_table(source: Path, context: ImportContext) -> Iterator[ImportItem]:
    """A CSV or TSV file whose header names at least an audio and a text column."""
    file = _find_table(source) or source
    folders = (file.parent, file.parent / CLIPS, file.parent / "audio" / file.stem, Path())
    return build_utterances(_rows(file), lambda record: [utterance_from_row(record, context, folders)])


def _find_table(source: Path) -> Path | None:
    """Return the file itself, or the only table in a folder."""
    tables = [source] if source.is_file() else sorted(source.glob("[!.]*")) if source.is_dir() else []
    tables = [path for path in tables if path.suffix.lower() in TABLE_SUFFIXES]
    return tables[0] if len(tables) == 1 else None


def _header(file: Path) -> tuple[str, list[str]]:
    """Return the delimiter that gives the first line most known columns, and the columns."""
    first = records.read_head(file).removeprefix("\ufeff").splitlines()[:1]
    if first and FLEURS_LINE.fullmatch(first[0]):
        return "\t", FLEURS_HEADER
    splits = [(delimiter, next(_parse(iter(first), delimiter), list[str]())) for delimiter in ",\t;|"]
    return max(splits, key=lambda split: (len(map_columns(split[1])), len(split[1])))


def _rows(file: Path) -> Iterator[SourceRecord]:
    delimiter, header = _header(file)
    with file.open(encoding="utf-8-sig", errors="surrogateescape", newline="\n") as lines:
        reader, number = _parse(lines, delimiter), 1
        while True:
            try:
                if any(cells := next(reader)) and (number > 1 or header is FLEURS_HEADER):
                    yield SourceRecord(file, number, _row(header, cells, unquote=delimiter in LITERAL_DELIMITERS))
            except StopIteration:
                return
            except csv.Error as error:
                yield SourceRecord(file, number, RecordError("malformed", str(error)))
                if number == 1:
                    return
            number = reader.line_num + 1


def _parse(lines: Iterator[str], delimiter: str) -> Any:
    is_literal = delimiter in LITERAL_DELIMITERS
    return csv.reader(lines, delimiter=delimiter, quoting=csv.QUOTE_NONE if is_literal else csv.QUOTE_MINIMAL)


def _row(header: list[str], cells: list[str], *, unquote: bool) -> dict[str, str] | RecordError:
    if any("\udc80" <= letter <= "\udcff" for cell in cells for letter in cell):
        return RecordError("not UTF-8")
    if len(cells) != len(header):
        return RecordError("malformed", f"{len(cells)} cells under {len(header)} columns")
    if unquote:  # a spreadsheet puts quotes around a whole cell
        cells = [cell[1:-1].replace('""', '"') if QUOTED.fullmatch(cell) else cell for cell in cells]
    return dict(zip(header, cells, strict=True))


# Hugging Face

HF_SUFFIXES = (".parquet", ".arrow")
HUB = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(/(?P<config>[\w.-]+))?(:(?P<split>[\w.+-]+))?")
FILE_SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".txt", *HF_SUFFIXES)
SHARD_NUMBER = re.compile(r"-\d+(-of-\d+)?$")
SPLITS = (
    "train", "training", "validation", "valid", "val", "dev", "test", "testing", "eval", "validated", "invalidated",
)  # fmt: skip
"""Names of files and folders that are splits. A name before `-00000-of-00001` is one whatever it is."""
RECORDS_PER_BATCH = 64
"""Maximum number of records in memory at a time."""


def matches_hub(source: Path) -> bool:
    if (local := locate(source)[0]) is not None:
        return bool(_hf_files(local))
    return HUB.fullmatch(source.as_posix()) is not None and source.suffix not in FILE_SUFFIXES


def read_hub(source: Path, context: ImportContext) -> Iterator[ImportItem]:
    """Hugging Face: a folder or file of Parquet or Arrow, or OWNER/NAME[/CONFIG][:SPLIT] on the hub."""

    def make(record: SourceRecord) -> list[Utterance]:
        return [utterance_from_row(record, context, (record.source.parent, Path()))]

    folder, split = locate(source)
    return build_utterances(_hub_records(source) if folder is None else _local_splits(folder, split), make)


def locate(source: Path) -> tuple[Path | None, str]:
    """Return the local folder or file of a source, None for the hub, and the split after its colon."""
    folder, _, split = source.as_posix().rpartition(":")
    if source.exists() or not folder or not Path(folder).exists():
        return (source if source.exists() else None), ""
    return Path(folder), split


def _local_splits(source: Path, chosen: str) -> Iterator[SourceRecord]:
    files = {file: _split_name(file, source) for file in _hf_files(source)}
    wanted = _choose_splits(source, [name for name in dict.fromkeys(files.values()) if name], chosen)
    for file, split in files.items():
        if split in wanted or not chosen:
            yield from _with_split(_local_records(file), split)


def _split_name(file: Path, source: Path) -> str:
    """Return the split that a file belongs to by its own name or its folder's; empty if neither names one."""
    name, folder = SHARD_NUMBER.sub("", file.stem), file.parent.name if file.parent != source else ""
    if "-of-" in file.stem.removeprefix(name):
        return name if name != "data" else folder  # `data` is what `save_to_disk` calls the files of every split
    return next((split for split in (name, folder) if split in SPLITS), "")


def _choose_splits(source: Path, splits: list[str], chosen: str) -> list[str]:
    """Return the chosen splits, joined by +; without a choice there may be one. All would be trained on otherwise."""
    wanted = chosen.split("+") if chosen else splits
    if len(splits) > 1 and not chosen:
        problem = f"{source} has the splits {', '.join(splits)}, and all of them would become one dataset"
        raise DataError(
            problem, hint=f"name one, as {source}:{splits[0]}, or join some, as {source}:{'+'.join(splits)}"
        )
    if missing := [name for name in wanted if name not in splits]:
        raise DataError(
            f"{source} has no split {missing[0]}", hint=f"its splits are {', '.join(splits) or 'not named'}"
        )
    return wanted


def _with_split(found: Iterable[SourceRecord], split: str) -> Iterator[SourceRecord]:
    """Record the split of each row in its column `split`."""
    for record in found:
        if split and isinstance(record.data, dict):
            record.data.setdefault("split", split)
        yield record


def _hf_files(source: Path) -> list[Path]:
    files = records.list_files(source, *HF_SUFFIXES) if source.is_dir() else [source]
    return [file for file in files if file.suffix in HF_SUFFIXES and not file.name.startswith("cache-")]


def _local_records(file: Path) -> Iterator[SourceRecord]:
    number = 0
    try:
        for batch in _local_batches(file):
            for position in range(batch.num_rows):
                number += 1
                try:
                    yield SourceRecord(file, number, batch.slice(position, 1).to_pylist()[0])
                except (ValueError, OverflowError) as error:  # a date outside Python's range
                    reason: records.RejectionReason = (
                        "not UTF-8" if isinstance(error, UnicodeDecodeError) else "malformed"
                    )
                    yield SourceRecord(file, number, RecordError(reason, str(error)))
    except (pa.ArrowException, OSError) as error:
        yield SourceRecord(file, number + 1, RecordError("malformed", str(error)))


def _local_batches(file: Path) -> Iterator[pa.RecordBatch]:
    if file.suffix == ".parquet":
        yield from pq.ParquetFile(file).iter_batches(RECORDS_PER_BATCH)
        return
    with pa.memory_map(str(file)) as mapped:
        try:
            reader = pa.ipc.open_file(mapped)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        except pa.ArrowInvalid:  # an Arrow stream, the format of `datasets`
            mapped.seek(0)
            batches = pa.ipc.open_stream(mapped)
        for batch in batches:
            batch.validate(full=True)  # offsets in a damaged file may point anywhere
            for start in range(0, batch.num_rows, RECORDS_PER_BATCH):
                yield batch.slice(start, RECORDS_PER_BATCH)


def _hub_records(source: Path) -> Iterator[SourceRecord]:
    """Yield the records of a dataset on the hub, with undecoded audio."""
    import datasets  # slow to import, and only needed here

    name = HUB.fullmatch(source.as_posix())
    try:
        if name is None:
            raise ValueError("it is not named like one")
        split = name["split"]
        if split is None:
            [split] = _choose_splits(source, datasets.get_dataset_split_names(name["name"], name["config"]), "")
        loaded = datasets.load_dataset(name["name"], name["config"], split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{source} is neither a file here nor a dataset that loads from the hub: {error}",
            hint="check the name, OWNER/NAME[/CONFIG][:SPLIT], and your connection",
        ) from None
    for column, feature in loaded.features.items():
        if isinstance(feature, datasets.Audio):
            loaded = loaded.cast_column(column, datasets.Audio(decode=False))
    yield from _with_split((SourceRecord(source, number, row) for number, row in enumerate(loaded, start=1)), split)


# WebDataset


def matches_webdataset(source: Path) -> bool:
    return bool(_shards(source))


def read_webdataset(source: Path, context: ImportContext) -> Iterator[ImportItem]:
    """WebDataset: .tar shards, in each the audio of a sample beside its .txt or .json."""

    def make(record: SourceRecord) -> list[Utterance]:
        fields: dict[str, Any] = {}
        own: dict[str, Any] = {"id": record.id}
        for name, data in record.data:
            suffix = Path(name).suffix.lower()
            if suffix in records.RECORDING_SUFFIXES:
                own["audio"] = {"bytes": data, "path": name}
            elif suffix == ".txt":
                own["text"] = data.decode("utf-8-sig").strip()
            elif suffix == ".json":
                fields = records.require_type(records.parse_json(data), dict, name)
        record.data = fields | own
        return [utterance_from_row(record, context, ())]

    return build_utterances(_samples(source), make)


def _shards(source: Path) -> list[Path]:
    return sorted(source.glob("[!.]*.tar")) if source.is_dir() else [source] if source.suffix == ".tar" else []


def _samples(source: Path) -> Iterator[SourceRecord]:
    """Yield names and contents of the files of each sample: those that share a name up to its first dot."""
    for shard in _shards(source):
        try:
            with tarfile.open(shard) as tar:
                files = (member for member in tar if member.isfile() and not Path(member.name).name.startswith("."))
                for number, (key, members) in enumerate(groupby(files, key=_sample_key), start=1):
                    contents = [(member.name, data.read()) for member in members if (data := tar.extractfile(member))]
                    yield SourceRecord(shard, number, contents, key)
                file = tar.fileobj
                assert file is not None
                file.seek(tar.offset)
                end = file.read(512)  # tarfile stops at a damaged header without an error
                if not end or end.strip(b"\0"):
                    raise tarfile.ReadError("it does not end as a tar file does")
        except (tarfile.TarError, EOFError) as error:
            yield SourceRecord(shard, None, RecordError("malformed", f"the shard is damaged: {error}"))


def _sample_key(member: tarfile.TarInfo) -> str:
    path = Path(member.name)
    return (path.parent / path.name.partition(".")[0]).as_posix()
