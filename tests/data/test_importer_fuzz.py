"""Sources with wrong structure and damaged recordings: rejected or refused, never a traceback, a hang or a crash.

MYNA_FUZZ_CASES sets how many cases of each kind are tried; `python -m tests.data.importer_fuzz` tries thousands.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import pytest

from myna.data.importers import FORMATS

from .importer_fuzz import (
    ASSESSED,
    DEEP,
    KINDS,
    MANIFEST,
    METADATA,
    SCORED,
    SWIFT,
    Case,
    FuzzWorker,
    as_json,
    chatml_samples,
    fuzz,
    media,
)

CASES = int(os.environ.get("MYNA_FUZZ_CASES", "150"))
CLIPS = {name: data for name, data in media().items() if name in ("clip.wav", "clip.flac", "clip.mp3")}
CLIPS |= {"a.txt": b"some words", "tags.txt": b"[SPEAKER0] one [SPEAKER1] two"}


@pytest.fixture(scope="module")
def worker() -> Iterator[FuzzWorker]:
    worker = FuzzWorker()
    yield worker
    worker.close()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_no_source_brings_an_import_down(worker: FuzzWorker, kind: str) -> None:
    def fail(problem: str) -> None:
        raise AssertionError(problem)

    fuzz(worker, kind, CASES, fail)


def lines(items: list[object]) -> bytes:
    return b"".join(as_json(item) + b"\n" for item in items)


UNHARMED = {
    "myna": ("manifest.jsonl", lines([*MANIFEST])),
    "scored_jsonl": ("data.jsonl", lines([*SCORED])),
    "metadata_json": ("metadata.json", as_json(METADATA)),
    "chatml": ("train.json", as_json(chatml_samples())),
    "ms_swift": ("train.jsonl", lines([*SWIFT])),
}


@pytest.mark.parametrize("format", sorted(UNHARMED))
def test_the_sources_are_right_before_they_are_mutated(worker: FuzzWorker, format: str) -> None:
    name, data = UNHARMED[format]
    before = (worker.report.imported, worker.report.rejected)
    assert not worker.check(Case(CLIPS | {name: data}, name, format))
    assert (worker.report.imported, worker.report.rejected) == (before[0] + 1, before[1])


@pytest.mark.parametrize("name", sorted(media()))
def test_the_recordings_are_right_before_they_are_damaged(worker: FuzzWorker, name: str) -> None:
    before = worker.report.utterances
    assert not worker.check(Case({name: media()[name], "x.csv": b"audio,text\n%s,x" % name.encode()}, "x.csv", "table"))
    assert worker.report.utterances == before + 1


def wav(channels: int, rate: int, frames: int = 4000) -> bytes:
    """A WAV file whose header promises anything."""
    data = b"\0\x30\0\xd0" * (frames // 2)
    block = min(2 * channels, 65535)
    fmt = struct.pack("<HHIIHH", 1, channels, rate, min(rate * block, 2**32 - 1), block, 16)
    body = b"WAVEfmt " + struct.pack("<I", len(fmt)) + fmt + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def manifest(**changes: object) -> Case:
    return Case(CLIPS | {"manifest.jsonl": lines([MANIFEST[1] | {"extras": {}} | changes])}, ".", "myna")


def sample(**changes: object) -> Case:
    return Case(
        CLIPS | {"metadata.json": as_json({"samples": [METADATA["samples"][2] | changes]})},  # type: ignore[index]
        ".",
        "metadata_json",
    )


def kaldi(scores: bytes) -> Case:
    index = {"wav.scp": b"a clip.wav\n", "text": b"a HELLO\n", "utt2spk": b"a 1\n"}
    return Case(CLIPS | index | {"scores.json": scores}, ".", "speechocean")


def mispronounced(mistakes: object) -> Case:
    word = ASSESSED["a"]["words"][0] | {"mispronunciations": mistakes}  # type: ignore[index]
    return kaldi(as_json({"a": ASSESSED["a"] | {"words": [word]}}))


FOUND = (
    {
        "a transcript without an end": sample(transcript_file="/dev/zero"),
        "a transcript that nobody writes": sample(transcript_file="fifo"),
        "a recording without an end": manifest(audio="/dev/zero"),
        "a recording named as raw samples": Case(
            {"clip.raw": media()["clip.wav"], "x.csv": b"audio,text\nclip.raw,x"}, "x.csv", "table"
        ),
        "a tag of thousands of digits": sample(
            ref_speakers=[{"ref_audio_file": "clip.flac", "speaker_tag": "9" * 5000, "ref_transcript": "x"}]
        ),
        "a number of thousands of digits": Case(
            CLIPS | {"manifest.jsonl": (DEEP % ("9" * 5000)).encode()}, ".", "myna"
        ),
        "a span beyond all floats": manifest(span={"start": 0, "end": 10**400}),
        "an offset beyond all floats": Case(
            CLIPS | {"data.jsonl": lines([SCORED[1] | {"end": 10**400}])}, "data.jsonl", "scored_jsonl"
        ),
        "mistakes that are none": mispronounced(None),
        "a mistake that is a word": mispronounced(["OW"]),
        "scores that are not UTF-8": kaldi(b'{"\xff": {}}'),
        "a table with old line ends": Case(CLIPS | {"x.csv": b"audio,text\rclip.wav,x\r"}, "x.csv", "table"),
        "a thousand channels": Case({"a.wav": wav(1024, 16_000), "a.txt": b"x"}, ".", "folder"),
    }
    | {
        f"{rate} samples a second": Case({"a.wav": wav(1, rate, 2_000_000), "a.txt": b"x"}, ".", "folder")
        for rate in (0, 1, 101, 2_000_000_000, 2**32 - 1)
    }
    | {
        f"{depth} nested {kind}": Case(CLIPS | {"manifest.jsonl": (DEEP % text).encode()}, ".", "myna")
        for depth in (60, 900, 2_000, 100_000)
        for kind, text in (
            ("lists", f'{{"x": {"[" * depth}{"]" * depth}}}'),
            ("objects", '{"x":' * depth + "0" + "}" * depth),
        )
    }
)
"""Cases that have brought an import down, or nearly so."""


@pytest.mark.parametrize("name", sorted(FOUND))
def test_what_has_brought_an_import_down(worker: FuzzWorker, name: str) -> None:
    assert not worker.check(FOUND[name])


def test_every_layout_is_fuzzed() -> None:
    from .importer_fuzz import LAYOUTS

    assert LAYOUTS.keys() == FORMATS.keys()
