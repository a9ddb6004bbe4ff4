"""Importer for Hugging Face datasets: Parquet or Arrow files here, or a name on the hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from myna.core.errors import DataError
from myna.data.importers import tabular
from myna.data.importers.base import ImportContext, ImportItem, RecordError, SourceRecord, build_utterances
from myna.data.importers.reading import list_files
from myna.data.utterance import Utterance

DESCRIPTION = "Hugging Face: a folder or file of Parquet or Arrow, or OWNER/NAME[/CONFIG][:SPLIT] on the hub"

SUFFIXES = (".parquet", ".arrow")
HUB = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(/(?P<config>[\w.-]+))?(:(?P<split>[\w.+-]+))?")
FILES = (".json", ".jsonl", ".csv", ".tsv", ".txt", *SUFFIXES)
BATCH = 64
"""Records in memory at a time."""


def matches(source: Path) -> bool:
    if source.exists():
        return bool(_files(source))
    return HUB.fullmatch(source.as_posix()) is not None and source.suffix not in FILES


def read(source: Path, context: ImportContext) -> Iterator[ImportItem]:
    def make(record: SourceRecord) -> Iterator[Utterance]:
        yield tabular.utterance_from_row(record, context, (record.source.parent, Path()))

    records = (record for file in _files(source) for record in _local(file)) if source.exists() else _hub(source)
    return build_utterances(records, make)


def _files(source: Path) -> list[Path]:
    files = list_files(source, *SUFFIXES) if source.is_dir() else [source]
    return [file for file in files if file.suffix in SUFFIXES and not file.name.startswith("cache-")]


def _local(file: Path) -> Iterator[SourceRecord]:
    number = 0
    try:
        for batch in _batches(file):
            for position in range(batch.num_rows):
                number += 1
                try:
                    yield SourceRecord(file, number, batch.slice(position, 1).to_pylist()[0])
                except UnicodeDecodeError as error:
                    yield SourceRecord(file, number, RecordError("not UTF-8", str(error)))
                except (ValueError, OverflowError) as error:  # a date that Python has no number for
                    yield SourceRecord(file, number, RecordError("malformed", str(error)))
    except (pa.ArrowException, OSError) as error:
        yield SourceRecord(file, number + 1, RecordError("malformed", str(error)))


def _batches(file: Path) -> Iterator[pa.RecordBatch]:
    if file.suffix == ".parquet":
        yield from pq.ParquetFile(file).iter_batches(BATCH)
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
            for start in range(0, batch.num_rows, BATCH):
                yield batch.slice(start, BATCH)


def _hub(source: Path) -> Iterator[SourceRecord]:
    """Records of a dataset on the hub, audio undecoded."""
    import datasets  # slow to import, and only needed here

    name = HUB.fullmatch(source.as_posix())
    try:
        if name is None:
            raise ValueError("it is not named like one")
        loaded = datasets.load_dataset(name["name"], name["config"], split=name["split"])
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{source} is neither a file here nor a dataset that loads from the hub: {error}",
            hint="check the name, OWNER/NAME[/CONFIG][:SPLIT], and your connection",
        ) from None
    splits = loaded.values() if isinstance(loaded, dict) else [loaded]
    number = 0
    for split in splits:
        for column, feature in split.features.items():
            if isinstance(feature, datasets.Audio):
                split = split.cast_column(column, datasets.Audio(decode=False))
        for row in split:
            number += 1
            yield SourceRecord(source, number, row)
