"""Utterances of every script, and each layout written the way its tools write it."""

from __future__ import annotations

import base64
import csv
import io
import json
import shutil
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from myna.core.io import file_hash
from myna.data.importers import ImportResult, import_source
from myna.data.manifest import Span, Utterance, write_manifest
from myna.text.normalization import normalise_text

Write = Callable[[Path, list[Utterance]], Path]

TEXTS = (
    "وَمِنْ ثُمَّ قَالُوا أَنَّهُ لا يُوجَدُ",
    "Tiếng Việt có dấu: ngữ điệu, phở, đường",
    "Tie\u0302\u0301ng Vie\u0323\u0302t",  # the same marks, decomposed
    "👩‍👩‍👧 family, 👍🏽 and a flag 🇻🇳",
    "q\u0323\u0307 combining marks in an order that NFC keeps",
    'She said "no", and left',
    "שלום — mixed עברית and English",
    "tab\there, line\nthere,\r\nand\u2028more",
)
CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\ufeff")
texts = (st.sampled_from(TEXTS) | st.text(CHARACTERS, min_size=1, max_size=30)).filter(normalise_text)
lines = texts.map(normalise_text)
names = st.text("abcdefغنىệ0123456789 -", min_size=1, max_size=8).map(str.strip).filter(bool)
languages = st.sampled_from(["ar", "vi", "en"])
spans = st.builds(  # in 128ths of a second, whose sums are exact
    lambda start, length: Span(start / 128, (start + length) / 128), st.integers(0, 8), st.integers(1, 20)
) | st.just(Span(0.125, None))
whole: st.SearchStrategy[Span | None] = st.none()
nothing: st.SearchStrategy[dict[str, Any]] = st.just({})


@st.composite
def utterances(
    draw: st.DrawFn,
    *,
    text: st.SearchStrategy[str] = texts,
    speaker: st.SearchStrategy[str] = lines,
    language: st.SearchStrategy[str] = languages,
    span: st.SearchStrategy[Span | None] = whole,
    extras: st.SearchStrategy[dict[str, Any]] = nothing,
) -> list[Utterance]:
    """Up to four utterances, whose `audio` is the number of a clip until the layout is written."""
    ids = draw(st.lists(names, min_size=1, max_size=4, unique=True))
    return [
        Utterance(id, Path(f"{number}.wav"), draw(text), draw(speaker), draw(language), draw(span), draw(extras))
        for number, id in enumerate(ids)
    ]


def expected(written: list[Utterance]) -> list[Utterance]:
    """Return an utterance as the importer should find it: the text normalised, whatever the name of the file."""
    return [replace(utterance, text=normalise_text(utterance.text), audio=Path()) for utterance in written]


def found(imported: ImportResult) -> list[Utterance]:
    return [replace(utterance, audio=Path()) for utterance in imported.utterances]


@contextmanager
def imported(write: Write, written: list[Utterance], clips: list[Path], **options: Any) -> Iterator[ImportResult]:
    """Write utterances, copy them beside their clips, and import them again."""
    with TemporaryDirectory() as name:
        folder = Path(name) / "source"
        folder.mkdir()
        for utterance in written:
            shutil.copy(clips[int(utterance.audio.stem)], folder / utterance.audio)
        source = write(folder, [replace(utterance, audio=folder / utterance.audio) for utterance in written])
        result = import_source(str(source), media=Path(name) / "media", **options)
        sounds = {utterance.id: file_hash(utterance.audio) for utterance in result.utterances}
        for utterance in written:
            if utterance.id in sounds:
                assert sounds[utterance.id] == file_hash(clips[int(utterance.audio.stem)])
        yield result


def write_lines(path: Path, objects: list[dict[str, Any]]) -> Path:
    path.write_text(
        "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in objects), encoding="utf-8", newline="\n"
    )
    return path


def write_json(path: Path, tree: Any) -> Path:
    path.write_text(json.dumps(tree, ensure_ascii=False), encoding="utf-8")
    return path


def myna(folder: Path, written: list[Utterance]) -> Path:
    write_manifest(folder / "manifest.jsonl", written)
    return folder


def folder_of_pairs(folder: Path, written: list[Utterance]) -> Path:
    for utterance in written:
        stem = folder / utterance.id
        stem.parent.mkdir(exist_ok=True)
        utterance.audio.rename(stem.with_suffix(".wav"))
        stem.with_suffix(".txt").write_text(utterance.text, encoding="utf-8", newline="")
    return folder


def ljspeech(folder: Path, written: list[Utterance]) -> Path:
    (folder / "wavs").mkdir()
    rows = []
    for utterance in written:
        utterance.audio.rename(folder / "wavs" / f"{utterance.id}.wav")
        rows.append("|".join([utterance.id, utterance.extras.get("original_text", utterance.text), utterance.text]))
    (folder / "metadata.csv").write_text("\n".join(rows) + "\n", encoding="utf-8", newline="\n")
    return folder


def transcripts(folder: Path, written: list[Utterance]) -> Path:
    """Write the layout of VIVOS: a folder for each speaker below waves."""
    for utterance in written:
        speaker = folder / "waves" / utterance.speaker
        speaker.mkdir(parents=True, exist_ok=True)
        utterance.audio.rename(speaker / f"{utterance.id}.wav")
    lines = [f"{utterance.id} {utterance.text}\n" for utterance in written]
    (folder / "prompts.txt").write_text("".join(lines), encoding="utf-8", newline="\n")
    return folder


def webdataset(folder: Path, written: list[Utterance]) -> Path:
    with tarfile.open(folder / "shard-000000.tar", "w") as shard:
        for utterance in written:
            fields = {"speaker": utterance.speaker, "language": utterance.language, **utterance.extras}
            members = {"wav": utterance.audio.read_bytes(), "txt": utterance.text.encode()}
            for suffix, data in (members | {"json": json.dumps(fields).encode()}).items():
                member = tarfile.TarInfo(f"{utterance.id}.{suffix}")
                member.size = len(data)
                shard.addfile(member, io.BytesIO(data))
    return folder


def _cells(utterance: Utterance) -> dict[str, Any]:
    span = utterance.span or Span(0, None)
    return {"start": span.start if utterance.span else "", "end": "" if span.end is None else span.end}


def table(folder: Path, written: list[Utterance], *, suffix: str = ".csv", delimiter: str = ",") -> Path:
    path = folder / f"data{suffix}"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(["ID", "path", "sentence", "client_id", "locale", "start", "end", "gender"])
        for utterance in written:
            row = _cells(utterance)
            named = [utterance.id, utterance.audio.name, utterance.text, utterance.speaker, utterance.language]
            writer.writerow([*named, row["start"], row["end"], utterance.extras["gender"]])
    return path


def metadata_json(folder: Path, written: list[Utterance]) -> Path:
    samples = []
    for utterance in written:
        (folder / f"{utterance.id}.txt").write_text(utterance.text, encoding="utf-8", newline="")
        extras = dict(utterance.extras)
        sample = {"id": utterance.id, "audio_file": utterance.audio.name, "transcript_file": f"{utterance.id}.txt"}
        sample |= {"speaker_id": utterance.speaker, "language": utterance.language, "task_type": extras.pop("task")}
        extras.pop("references", None)
        samples.append(sample | extras)
    write_json(folder / "metadata.json", {"dataset_info": {"total_samples": len(samples)}, "samples": samples})
    return folder


def clip(utterance: Utterance, *, raw: bool = False) -> dict[str, Any]:
    """An audio part of a ChatML message."""
    span = {}
    if utterance.span:
        span = {"offset": utterance.span.start}
        if utterance.span.end is not None:
            span |= {"duration": utterance.span.end - utterance.span.start}
    if raw:
        return {
            "type": "audio",
            "audio_url": "",
            "raw_audio": base64.b64encode(utterance.audio.read_bytes()).decode(),
        } | span
    return {"type": "audio", "audio_url": utterance.audio.name} | span


def chatml(folder: Path, written: list[Utterance], *, raw: bool = False) -> Path:
    samples = []
    for utterance in written:
        messages = [
            {"role": "user", "content": utterance.text},
            {"role": "assistant", "content": clip(utterance, raw=raw)},
        ]
        misc = {"sample_id": utterance.id} | utterance.extras
        samples.append(
            {"messages": messages, "speaker": utterance.speaker, "language": utterance.language, "misc": misc}
        )
    return write_json(folder / "train.json", samples)


def ms_swift(folder: Path, written: list[Utterance]) -> Path:
    return write_lines(
        folder / "train.jsonl",
        [
            {
                "id": utterance.id,
                "messages": [
                    {"role": "user", "content": "Read this out."},
                    {"role": "assistant", "content": f"{utterance.text}<audio>"},
                ],
                "audios": [utterance.audio.name],
                "speaker": utterance.speaker,
                "language": utterance.language,
            }
            | utterance.extras
            for utterance in written
        ],
    )


def rows(written: list[Utterance]) -> list[dict[str, Any]]:
    return [
        {
            "id": utterance.id,
            "text": utterance.text,
            "speaker": utterance.speaker,
            "language": utterance.language,
            "audio": {"bytes": utterance.audio.read_bytes(), "path": utterance.audio.name},
        }
        | utterance.extras
        for utterance in written
    ]


def parquet(folder: Path, written: list[Utterance]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows(written)), folder / "part-0.parquet")
    return folder
