"""Fuzzing of the importers: sources of every layout with wrong structure, and damaged files of every readable format.

    python -m tests.data.importer_fuzz --cases 5000 --seed 0 --out fuzz.json

Each case is a small folder that a worker process imports as `myna prepare` would, reading every recording that passes.
Bad items may be rejected and bad sources refused with a `MynaError`. A traceback, a crash, more than 10 seconds or
more than 2 GB is a fault; it is shrunk by hypothesis and shown with its files.
"""

from __future__ import annotations

import argparse
import base64
import csv
import io
import json
import multiprocessing
import os
import resource
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import soundfile
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from myna.audio.files import read_audio
from myna.core.errors import MynaError
from myna.data.code_store import span_bounds
from myna.data.importers import FORMATS, import_source, write_import
from myna.data.importers.records import AUDIO_SUFFIXES
from myna.data.manifest import TASKS, read_manifest

MAX_SECONDS = 10.0
MAX_BYTES = 2 * 10**9
GUARD_BYTES = 8 * 10**9
"""Address space of a worker: memory use that would take the machine down fails in the worker instead."""
START_TIMEOUT_SECONDS = 120.0
CASES_PER_SEARCH = 125
RATE = 16_000


@dataclass(frozen=True, slots=True)
class Case:
    """A source to import."""

    files: dict[str, bytes]
    source: str
    format: str | None

    def __repr__(self) -> str:
        files = {name: data if len(data) < 1000 else f"{len(data)} bytes" for name, data in self.files.items()}
        return f"Case(format={self.format!r}, source={self.source!r}, files={files})"

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        printer.text(repr(self))  # hypothesis would show the recordings byte by byte

    def write(self, folder: Path) -> Path:
        for name, data in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        os.mkfifo(folder / "fifo")  # nobody ever writes to it
        return folder / self.source


# The worker


def import_case(case: Case, folder: Path) -> dict[str, Any]:
    """Import a case, read everything that passed, and return counts."""
    out = folder / "out"
    try:
        result = import_source(str(case.write(folder / "in")), media=out / "media", format=case.format)
    except MynaError as error:
        return {"outcome": "refused", "message": str(error)}
    for utterance in result.utterances:
        read_audio(utterance.audio, span=span_bounds(utterance.span))
    try:
        write_import(result, out, max_bad=1.0)
    except MynaError as error:
        return {"outcome": "refused", "message": str(error), "rejected": len(result.rejected)}
    assert len(read_manifest(out / "manifest.jsonl")) == len(result.utterances)
    lines = (out / "rejected.jsonl").read_text(encoding="utf-8").splitlines()
    assert len([json.loads(line) for line in lines]) == len(result.rejected)
    return {"outcome": "imported", "utterances": len(result.utterances), "rejected": len(result.rejected)}


def work(connection: Connection, log: str) -> None:
    """Import cases until the connection closes."""
    resource.setrlimit(resource.RLIMIT_AS, (GUARD_BYTES, GUARD_BYTES))
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os.environ["HF_HUB_OFFLINE"] = "1"
    connection.send({"ready": True})
    while True:
        try:
            case: Case = connection.recv()
        except EOFError:
            return
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="myna-fuzz-") as folder:
            os.chdir(folder)  # sources may name files relative to it
            Path(folder, "in").mkdir()
            try:
                answer = import_case(case, Path(folder))
            except BaseException:  # noqa: BLE001 - this is what is looked for
                answer = {"outcome": "fault", "message": traceback.format_exc()}
            os.chdir("/")
        connection.send(answer | {"seconds": time.monotonic() - start, "peak": _peak_bytes()})


def _peak_bytes() -> int:
    """Peak bytes since the program began; getrusage may report the parent's peak."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@dataclass(slots=True)
class FuzzReport:
    """Counts of a fuzzing run."""

    cases: int = 0
    imported: int = 0
    refused: int = 0
    """Sources refused with a `MynaError`."""
    utterances: int = 0
    rejected: int = 0
    """Items named in `rejected.jsonl`."""
    faults: int = 0
    slowest_seconds: float = 0.0
    peak_bytes: int = 0
    kinds: dict[str, int] = field(default_factory=dict)


class FuzzWorker:
    """Process that imports cases, replaced when a case takes it down."""

    def __init__(self) -> None:
        self.report = FuzzReport()
        self._log = tempfile.NamedTemporaryFile(prefix="myna-fuzz-", suffix=".log")  # noqa: SIM115 - lives as long
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs, self._log.name), daemon=True)
        self._process.start()
        theirs.close()
        assert self._connection.poll(START_TIMEOUT_SECONDS), "the worker did not start"
        self._connection.recv()

    def close(self) -> None:
        self._connection.close()
        self._process.join(START_TIMEOUT_SECONDS)
        self._log.close()

    def check(self, case: Case, kind: str = "") -> str:
        """Import a case; return its fault, or an empty string."""
        self._connection.send(case)
        self.report.cases += 1
        self.report.kinds[kind] = self.report.kinds.get(kind, 0) + 1
        problem = ""
        try:
            answer = self._connection.recv() if self._connection.poll(2 * MAX_SECONDS) else None
        except (EOFError, ConnectionResetError):
            answer = None
            self._process.join()
            problem = f"the process ended with {self._process.exitcode}: {self._tail()}"
        if answer is None:
            problem = problem or f"still at it after {2 * MAX_SECONDS:g} s"
            self._process.kill()
            self._start()
        else:
            for count in ("utterances", "rejected"):
                setattr(self.report, count, getattr(self.report, count) + answer.get(count, 0))
            self.report.slowest_seconds = max(self.report.slowest_seconds, answer["seconds"])
            self.report.peak_bytes = max(self.report.peak_bytes, answer["peak"])
            if answer["outcome"] == "fault":
                problem = answer["message"]
            elif answer["seconds"] > MAX_SECONDS:
                problem = f"took {answer['seconds']:.1f} s"
            else:
                setattr(self.report, answer["outcome"], getattr(self.report, answer["outcome"]) + 1)
            if answer["peak"] > MAX_BYTES:
                problem = problem or f"took {answer['peak'] / 1e9:.1f} GB"
                self._process.kill()
                self._start()
        self.report.faults += bool(problem)
        return f"{problem}\n{case!r}" if problem else ""

    def _tail(self) -> str:
        return Path(self._log.name).read_text(errors="replace")[-2000:]


# Recordings


CONTAINERS = {
    ".m4a": ("ipod", "aac"),
    ".mp4": ("mp4", "aac"),
    ".mov": ("mov", "alac"),
    ".webm": ("webm", "libopus"),
    ".mka": ("matroska", "libopus"),
    ".avi": ("avi", "pcm_s16le"),
    ".aac": ("adts", "aac"),
    ".ts": ("mpegts", "mp2"),
}
"""FFmpeg's names of container and codec by suffix."""


@cache
def media() -> dict[str, bytes]:
    """A short recording in every readable format, and some variants of WAV, by file name."""
    seconds = np.arange(RATE // 2) / RATE
    tone = (0.3 * np.sin(2 * np.pi * 220 * seconds) * np.sin(2 * np.pi * 3 * seconds)).astype(np.float32)
    kinds = {
        "wav": ("WAV", "PCM_16", tone),
        "float.wav": ("WAV", "FLOAT", np.stack([tone, tone], axis=1)),
        "alaw.wav": ("WAV", "ALAW", tone),
        "adpcm.wav": ("WAV", "IMA_ADPCM", tone),
        "rf64.wav": ("RF64", "PCM_24", tone),
        "flac": ("FLAC", "PCM_16", tone),
        "mp3": ("MP3", "MPEG_LAYER_III", tone),
        "ogg": ("OGG", "VORBIS", tone),
        "opus": ("OGG", "OPUS", tone),
        "aiff": ("AIFF", "PCM_16", tone),
        "caf": ("CAF", "ALAC_16", tone),
    }
    found = {}
    for suffix, (container, subtype, samples) in kinds.items():
        buffer = io.BytesIO()
        soundfile.write(buffer, samples, RATE, format=container, subtype=subtype)
        found[f"clip.{suffix}"] = buffer.getvalue()
    return found | {f"clip{suffix}": _encode_container(tone, suffix) for suffix in CONTAINERS}


def _encode_container(samples: Any, suffix: str) -> bytes:
    """The samples in a container that FFmpeg writes."""
    import av

    container, codec = CONTAINERS[suffix]
    buffer, rate = io.BytesIO(), 48_000
    with av.open(buffer, "w", format=container) as file:
        stream: Any = file.add_stream(codec, rate=rate)
        stream.layout = "mono"
        wide = np.repeat(samples, rate // RATE)[None]
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(wide, np.float32), format="fltp", layout="mono")
        frame.sample_rate = rate
        resampler = av.AudioResampler(stream.format, "mono", rate, frame_size=stream.frame_size or 1024)
        for part in (*resampler.resample(frame), *resampler.resample(None)):
            file.mux(stream.encode(part))
        file.mux(stream.encode(None))
    return buffer.getvalue()


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes cut off, bits flipped, bytes overwritten, pieces taken out, doubled or moved."""
    for _ in range(draw(st.integers(1, 3))):
        # Half of the damage is done to the beginning, where headers are.
        limit = len(data) if draw(st.booleans()) else min(len(data), 120)
        position = draw(st.integers(0, max(0, limit - 1)))
        length = draw(st.integers(1, 64))
        piece = data[position : position + length]
        match draw(st.integers(0, 6)):
            case 0:
                data = data[:position]
            case 1 | 2:
                flipped = bytes(byte ^ (1 << draw(st.integers(0, 7))) for byte in piece[: draw(st.integers(1, 4))])
                data = data[:position] + flipped + data[position + len(flipped) :]
            case 3:
                written = draw(st.sampled_from([b"\xff", b"\x00", b"\x7f\xff\xff\xff", b"\x00\x04", b"\x01"]))
                data = data[:position] + written + data[position + len(written) :]
            case 4:
                data = data[:position] + data[position + length :]
            case 5:
                data = data[:position] + piece * draw(st.sampled_from([2, 50])) + data[position + length :]
            case _:
                data = data[:position] + draw(st.binary(max_size=16)) + data[position:]
    return data


@st.composite
def damaged_media(draw: st.DrawFn) -> Case:
    """One damaged recording, under its own suffix or another's."""
    name = draw(st.sampled_from(sorted(media())))
    suffix = Path(name).suffix if draw(st.integers(0, 4)) else draw(st.sampled_from(AUDIO_SUFFIXES))
    data = draw(damaged(media()[name]))
    return Case({f"a{suffix}": data, "x.csv": b"audio,text\na%s,hello" % suffix.encode()}, "x.csv", "table")


# Structure

PATHS = [
    *("clip.wav", "a.txt", "missing.wav", "../in/clip.wav", "sub/clip.wav", "", ".", "..", "/", "~", "clip.raw"),
    *("fifo", "/dev/zero", "/dev/stdin", "/proc/self/mem", "clip.wav\0", "x" * 5000, "file:///etc/passwd", "C:\\a.wav"),
    *("clip.RAW", "clip.vox", "train.json", "metadata.json", "\ud800.wav", "https://example.com/a.wav"),
]
TEXTS = ["", " ", "Tiếng Việt", "<audio>", "[SPEAKER0] a [SPEAKER1] b", "\ud800", "a\0b", "<|eot_id|>", "x" * 20_000]
NUMBERS = [0, 1, -1, 0.1, 10**400, -(10**400), float("nan"), float("inf"), 1e308, 5e-324, "0.1", "1e999", "9" * 5000]
NAMES = ["a", "b", "b/ref0", "a/0", "0", *TASKS]
texts = st.sampled_from(TEXTS) | st.text(st.characters(), max_size=20)  # lone surrogates too: JSON can write them
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts | st.sampled_from([*PATHS, *NUMBERS, *NAMES])
junk = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6
)


def nodes(tree: Any) -> list[tuple[Any, Any]]:
    """Yield every container of a JSON tree with every key or index into it."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else []
    return [node for key in keys for node in ((tree, key), *nodes(tree[key]))]


def _like(value: Any) -> list[Any]:
    """Odd values of a node's own kind."""
    if isinstance(value, int | float):
        return NUMBERS
    return PATHS if isinstance(value, str) and Path(value).suffix else [*TEXTS, *NAMES]


@st.composite
def mutated(draw: st.DrawFn, tree: Any) -> Any:
    """A JSON tree with up to three of its nodes replaced, taken out, doubled, wrapped, or swapped with others."""
    tree = json.loads(json.dumps(tree))
    for _ in range(draw(st.integers(0, 3))):
        places = nodes(tree)
        if not places:
            return draw(junk)
        (container, key), (other, other_key) = draw(st.sampled_from(places)), draw(st.sampled_from(places))
        match draw(st.integers(0, 8)):
            case 0 | 1 | 2:
                container[key] = draw(st.sampled_from(_like(container[key])))
            case 3:
                container[key] = draw(scalars)
            case 4:
                container[key] = draw(junk)
            case 5:
                del container[key]
            case 6:
                container[key] = draw(st.sampled_from([[container[key]], {"text": container[key]}, []]))
            case 7 if isinstance(container, list):
                container.append(json.loads(json.dumps(container[key])))
            case _:
                container[key] = json.loads(json.dumps(other[other_key]))
    return tree


def line(id: str, audio: str = "clip.wav", **more: Any) -> dict[str, Any]:
    return {"id": id, "audio": audio, "text": "hello there", "speaker": "anna"} | more


MANIFEST = [
    line("a", language="en", span={"start": 0.1, "end": 0.4}, extras={"references": ["b"], "scene": "a room"}),
    line("b", "clip.flac", extras={"reference_only": True}),
    line("c", "clip.mp3", span={"start": 0.1, "end": None}, extras={"task": TASKS[0], "answer": "x", "question": "y"}),
]
WORDS = [
    {
        "text": "hello",
        "accuracy": 9,
        "stress": 10,
        "total": 9.5,
        "phones": "HH AH0 L OW1",
        "phone_scores": [2, 1, 0, 2],
    },
    {"text": "there", "phones": ["DH", "EH1", "R"], "pronounced": ["D", "EH", "R"]},
]
SCORED = [
    line("a", scores={"accuracy": 8, "fluency": 7.5, "prosodic": 9, "total": 8}, words=WORDS),
    line("b", scores={"accuracy": 0, "fluency": 0, "prosodic": 0, "total": 0}, start=0.1, end=0.3),
]
FILES = {"audio_file": "clip.wav", "transcript_file": "a.txt", "speaker_id": "anna", "language": "vi", "duration": 0.5}
SAMPLES = [
    {"id": "a", "ref_audio_file": "clip.flac", "ref_transcript": "some words", "task_type": TASKS[0]} | FILES,
    {"id": "b", "task_type": TASKS[1], "scene": "a room"} | FILES,
    {
        "id": "c",
        "task_type": TASKS[3],
        "ref_speakers": [
            {"speaker_id": "x", "speaker_tag": "[SPEAKER0]", "ref_audio_file": "clip.flac", "ref_transcript": "one"},
            {"speaker_id": "y", "speaker_tag": "[SPEAKER1]", "ref_audio_file": "clip.mp3", "ref_transcript": "two"},
        ],
    }
    | FILES
    | {"transcript_file": "tags.txt"},
]
METADATA = {"dataset_info": {"total_samples": 3}, "samples": SAMPLES}


def chatml_samples() -> list[Any]:
    raw = base64.b64encode(media()["clip.flac"]).decode()
    return [
        {
            "messages": [
                {"role": "system", "content": "<|scene_desc_start|>a room<|scene_desc_end|>"},
                {"role": "user", "content": "as I said"},
                {"role": "assistant", "content": {"type": "audio", "audio_url": "clip.flac"}},
                {"role": "user", "content": [{"type": "text", "text": "hello there"}]},
                {
                    "role": "assistant",
                    "content": {"type": "audio", "audio_url": "clip.wav", "offset": 0, "duration": 0.4},
                },
            ],
            "start_index": 3,
            "speaker": "anna",
            "misc": {"sample_id": "a", "ref_transcript": "x", "target_transcript": "y"},
        },
        {
            "messages": [
                {"role": "user", "content": "raw"},
                {"role": "assistant", "content": [{"type": "audio", "audio_url": "placeholder", "raw_audio": raw}]},
            ],
            "speaker": "ben",
        },
    ]


SWIFT = [
    {
        "id": "a",
        "messages": [{"role": "user", "content": "as <audio>"}, {"role": "assistant", "content": "hello<audio>"}],
        "audios": ["clip.flac", "clip.wav"],
        "speaker": "anna",
    },
    {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "audios": ["clip.wav"]},
]
ASSESSED = {
    "a": {
        "accuracy": 8,
        "fluency": 9,
        "prosodic": 9,
        "total": 8,
        "completeness": 10.0,
        "words": [
            {
                "text": "HELLO",
                "accuracy": 10,
                "phones": "HH AH0 L OW1",
                "phones-accuracy": [2, 2, 1.8, 0],
                "mispronunciations": [{"index": 3, "canonical-phone": "OW", "pronounced-phone": "<DEL>"}],
            }
        ],
    },
    "b": {"accuracy": 1, "fluency": 1, "prosodic": 1, "total": 1, "words": [{"text": "B", "phones": ["B", "IY0"]}]},
}
DEEP = '{"id": "a", "audio": "clip.wav", "text": "x", "speaker": "s", "messages": [], "audios": [], "extras": %s}'
odd_lines = st.sampled_from(
    [DEEP % ("[" * depth + "]" * depth) for depth in (100, 300, 450, 900, 2_000, 100_000)]
    + [DEEP % ('{"x":' * depth + "0" + "}" * depth) for depth in (100, 300, 450, 900, 2_000)]
    + [DEEP % ("9" * digits) for digits in (400, 5000)]
    + ["", "null", "[]", "{}", '"samples": ', "\ufeff{}"]
).map(str.encode)


def as_json(tree: Any) -> bytes:
    return json.dumps(tree).encode()


@st.composite
def json_files(draw: st.DrawFn, name: str, tree: Any, *, as_lines: bool) -> dict[str, bytes]:
    tree = draw(mutated(tree))
    lined = isinstance(tree, list) and as_lines
    data = b"".join(as_json(item) + b"\n" for item in tree) if lined else as_json(tree)
    if not draw(st.integers(0, 11)):
        data = draw(odd_lines) + (b"\n" + data if lined else b"")
    return {name: data}


@st.composite
def chatml_files(draw: st.DrawFn) -> dict[str, bytes]:
    return draw(json_files("train.json", chatml_samples(), as_lines=draw(st.booleans())))


@st.composite
def tables(draw: st.DrawFn) -> dict[str, bytes]:
    suffix, delimiter = draw(st.sampled_from([(".csv", ","), (".tsv", "\t"), (".csv", ";"), (".csv", "|")]))
    header = ["audio", "text", "id", "speaker", "start", "end", "gender"]
    body = [["clip.wav", "hello", "a", "anna", "0.1", "0.4", "f"], ["clip.flac", 'say "no"', "b", "", "", "", ""]]
    rows = draw(mutated([header, *body]))
    cells = [[str(cell) for cell in row] if isinstance(row, list) else [str(row)] for row in rows]
    if draw(st.booleans()):
        buffer = io.StringIO()
        csv.writer(buffer, delimiter=delimiter, escapechar="\\").writerows(cells)
        text = buffer.getvalue()
    else:
        text = "\n".join(delimiter.join(row) for row in cells)
    return {f"data{suffix}": text.encode(errors="surrogatepass")}


@st.composite
def ljspeech_folders(draw: st.DrawFn) -> dict[str, bytes]:
    rows = draw(mutated([["clip", "words", "words"], ["../clip", "Dr. X", "Doctor X"], ["sub/x", "y"]]))
    text = "\n".join("|".join(map(str, row if isinstance(row, list) else [row])) for row in rows)
    return {"metadata.csv": text.encode(errors="surrogatepass"), "wavs/clip.wav": media()["clip.wav"]}


@st.composite
def transcript_folders(draw: st.DrawFn) -> dict[str, bytes]:
    rows = draw(mutated([["clip", "words"], ['"sub/clip.wav"', '"words"'], ["( clip", '"words" )'], ["../clip", "y"]]))
    separator = draw(st.sampled_from([" ", "|", "\t"]))
    text = "\n".join(separator.join(map(str, row if isinstance(row, list) else [row])) for row in rows)
    name = draw(st.sampled_from(["prompts.txt", "txt/text", "orthographic-transcript.txt", "a/b/c.trans.txt"]))
    return {name: text.encode(errors="surrogatepass"), "wav/clip.wav": media()["clip.wav"]}


@st.composite
def shards(draw: st.DrawFn) -> dict[str, bytes]:
    buffer = io.BytesIO()
    fields = json.dumps(draw(mutated({"text": "words", "speaker": "x"}))).encode(errors="surrogatepass")
    members = {
        "clip.wav": media()["clip.wav"],
        "clip.txt": b"words",
        "b.json": fields,
        "b.flac": b"fLaC",
        "c.txt": b"\xff",
    }
    with tarfile.open(fileobj=buffer, mode="w") as shard:
        for name in draw(st.lists(st.sampled_from(sorted(members)), max_size=6)):
            member = tarfile.TarInfo(draw(st.sampled_from(["", "./", "sub/", "../", "/"])) + name)
            member.size = len(members[name])
            shard.addfile(member, io.BytesIO(members[name]))
    return {"data.tar": buffer.getvalue()}


@st.composite
def folders(draw: st.DrawFn) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for stem in draw(st.lists(st.sampled_from(["a", "b", "sub/c", "sub/deep/d", ".hidden", "ü"]), max_size=4)):
        name = draw(st.sampled_from(sorted(media())))
        found[stem + draw(st.sampled_from([Path(name).suffix, *AUDIO_SUFFIXES, ".WAV", ".raw"]))] = media()[name]
        for suffix in draw(st.lists(st.sampled_from([".txt", ".lab", ".md"]), max_size=2)):
            found[stem + suffix] = draw(texts | st.just("hello")).encode(errors="surrogatepass")
    return found


@st.composite
def kaldi_folders(draw: st.DrawFn) -> dict[str, bytes]:
    lists = [[["a", "clip.wav"], ["b", "clip.flac"]], [["a", "HELLO"], ["b", "B"]], [["a", "0001"], ["b", "0002"]]]
    scores, *lines = [draw(mutated(tree)) for tree in (ASSESSED, *lists)]
    separator = draw(st.sampled_from(["\t", " "]))
    found = {
        name: "\n".join(separator.join(map(str, row)) if isinstance(row, list) else str(row) for row in rows)
        for name, rows in zip(("wav.scp", "text", "utt2spk"), lines, strict=True)
    } | {"scores.json": json.dumps(scores, ensure_ascii=draw(st.booleans()))}
    return {name: text.encode(errors="surrogatepass") for name, text in found.items()}


ARROW_TYPES = [
    *(pa.string(), pa.large_string(), pa.int64(), pa.uint64(), pa.float16(), pa.bool_(), pa.null(), pa.binary()),
    *(pa.timestamp("ns"), pa.timestamp("s"), pa.date64(), pa.duration("ns"), pa.time64("ns")),
    *(pa.decimal128(38, 3), pa.list_(pa.string()), pa.map_(pa.string(), pa.int64())),
    *(pa.dictionary(pa.int32(), pa.string()), pa.month_day_nano_interval()),
]
EMBEDDED = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def _column(values: list[Any], kind: Any) -> Any:
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError, TypeError, ValueError):
        return pa.array([None] * len(values), kind)


@st.composite
def arrow_files(draw: st.DrawFn) -> dict[str, bytes]:
    clips = [{"bytes": media()["clip.wav"], "path": "clip.wav"}, {"bytes": b"RIFF", "path": None}, None]
    columns = {
        "audio": draw(
            st.sampled_from(
                [
                    _column(clips, EMBEDDED),
                    _column(["clip.wav", "clip.flac", "/dev/zero"], pa.string()),
                    _column([media()["clip.mp3"], b"", b"OggS"], pa.binary()),
                    _column([1, 2, 3], pa.int64()),
                ]
            )
        ),
        "text": _column(["one", "two", "three"], pa.string()),
        "id": _column(["a", "b", "c"], pa.string()),
        "start": _column([None, 0.1, 0.0], pa.float64()),
    }
    for name in draw(
        st.lists(st.sampled_from(["text", "id", "speaker", "start", "end", "references", "x"]), max_size=3)
    ):
        kind = draw(st.sampled_from(ARROW_TYPES))
        value = st.integers(-(2**63), 2**63 - 1) if pa.types.is_temporal(kind) else scalars | st.just(["a"])
        columns[name] = _column([draw(value) for _ in range(3)], kind)
    dropped = draw(st.none() | st.sampled_from(sorted(columns)))
    table, buffer = pa.table({name: column for name, column in columns.items() if name != dropped}), io.BytesIO()
    match draw(st.sampled_from(["parquet", "file", "stream"])):
        case "parquet":
            try:
                pq.write_table(table, buffer, compression=draw(st.sampled_from(["snappy", "zstd", "none"])))
            except pa.ArrowException:  # not every type can be written
                buffer.write(b"PAR1")
            return {"data.parquet": buffer.getvalue()}
        case "file":
            with pa.ipc.new_file(buffer, table.schema) as writer:
                writer.write_table(table)
        case _:
            with pa.ipc.new_stream(buffer, table.schema) as writer:
                writer.write_table(table)
    return {"data.arrow": buffer.getvalue()}


LAYOUTS: dict[str, tuple[str, st.SearchStrategy[dict[str, bytes]]]] = {
    "myna": (".", json_files("manifest.jsonl", MANIFEST, as_lines=True)),
    "scored_jsonl": ("data.jsonl", json_files("data.jsonl", SCORED, as_lines=True)),
    "metadata_json": (".", json_files("metadata.json", METADATA, as_lines=False)),
    "chatml": ("train.json", chatml_files()),
    "ms_swift": ("train.jsonl", json_files("train.jsonl", SWIFT, as_lines=True)),
    "ljspeech": (".", ljspeech_folders()),
    "transcripts": (".", transcript_folders()),
    "webdataset": (".", shards()),
    "table": (".", tables()),
    "folder": (".", folders()),
    "hf": (".", arrow_files()),
    "speechocean": (".", kaldi_folders()),
}
assert LAYOUTS.keys() == FORMATS.keys()


@st.composite
def malformed_sources(draw: st.DrawFn) -> Case:
    """A source of one layout with wrong structure, at times read as another layout, at times with damaged bytes."""
    layout = draw(st.sampled_from(sorted(LAYOUTS)))
    source, content = LAYOUTS[layout]
    written = draw(content)
    if written and not draw(st.integers(0, 3)):
        name = draw(st.sampled_from(sorted(written)))
        written[name] = draw(damaged(written[name]))
    clips = {name: media()[name] for name in ("clip.wav", "clip.flac", "clip.mp3")}
    clips |= {"clip.raw": media()["clip.wav"], "a.txt": b"some words", "tags.txt": b"[SPEAKER0] one [SPEAKER1] two"}
    asked = draw(st.sampled_from([layout] * 10 + [None] * 4 + [*FORMATS])) if layout != "folder" else layout
    if not draw(st.integers(0, 9)):
        source = draw(st.sampled_from([".", *sorted(written)]))
    return Case((clips if layout != "folder" else {}) | written, source, asked)


KINDS: dict[str, Callable[[], st.SearchStrategy[Case]]] = {"source": malformed_sources, "media": damaged_media}


def fuzz(worker: FuzzWorker, kind: str, cases: int, on_fault: Callable[[str], None], number: int | None = None) -> None:
    """Check so many cases of a kind. If `on_fault` raises, the fault is shrunk and raised again."""

    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(KINDS[kind]())
    def run(case: Case) -> None:
        if problem := worker.check(case, kind):
            on_fault(problem)

    (seed(number)(run) if number is not None else run)()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    worker, faults = FuzzWorker(), dict[str, str]()

    def collect(problem: str) -> None:
        places = [line for line in problem.splitlines() if line.lstrip().startswith("File ")]
        faults.setdefault(places[-1] if places else problem.splitlines()[0], problem)

    # One search tends to stay with what it knows: many short ones see more.
    for number in range(-(-arguments.cases // (CASES_PER_SEARCH * len(KINDS)))):
        for kind in KINDS:
            fuzz(worker, kind, CASES_PER_SEARCH, collect, arguments.seed + number)
    worker.close()
    text = json.dumps(asdict(worker.report) | {"distinct_faults": list(faults.values())}, indent=2)
    print(text.replace("\\n", "\n"))
    if arguments.out:
        arguments.out.write_text(text + "\n")
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    main()
