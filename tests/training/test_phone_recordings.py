"""A demo, and references, with real recordings as phones make them: downloaded for the test, and never kept.

A studio voice of a Debian package reads digits, whose texts are known; it is encoded as phones and messengers do.
"""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soxr  # type: ignore[import-untyped]

import real_corpora
from corpus_making import debian_packages
from myna.audio.files import Samples
from myna.core.errors import DataError
from myna.data.manifest import read_manifest
from myna.demo.run import run_demo
from myna.speak.request import open_reference

pytestmark = pytest.mark.network

PACKAGE = "asterisk-core-sounds-es-g722"
DIGITS = ("cero", "uno", "dos", "tres", "cuatro", "cinco", "seis", "siete", "ocho", "nueve")
CLIPS, DIGITS_EACH = 14, 6
RECORDERS: tuple[tuple[Any, ...], ...] = (
    ("m4a", "mp4", "aac", 44_100, "fltp"),
    ("amr", "amr", "libopencore_amrnb", 8_000, "s16"),
    ("ogg", "ogg", "libopus", 48_000, "flt"),
    ("3gp", "3gp", "aac", 16_000, "fltp"),
    ("webm", "webm", "libopus", 48_000, "flt"),
    ("mp3", "mp3", "libmp3lame", 16_000, "fltp"),
    ("aac", "adts", "aac", 16_000, "fltp"),
)
"""Suffix, FFmpeg's container and encoder, sample rate and sample format."""


def record(path: Path, samples: Samples, container: str, codec: str, rate: int, kind: Any) -> None:
    import av

    heard = soxr.resample(samples, 24_000, rate, quality="VHQ")
    if kind == "s16":
        heard = (heard.clip(-1, 1) * 32767).astype(np.int16)
    with av.open(str(path), "w", format=container) as file:
        stream: Any = file.add_stream(codec, rate=rate)
        stream.layout, stream.format = "mono", kind
        if codec == "libopencore_amrnb":
            stream.bit_rate = 12_200
        frame = av.AudioFrame.from_ndarray(heard[None], format=kind, layout="mono")
        frame.sample_rate = rate
        for part in (frame, None):
            file.mux(stream.encode(part))


@pytest.fixture(scope="module")
def phone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recordings of one voice in the containers of phones, each with what is said beside it."""
    home, out = tmp_path_factory.mktemp("package"), tmp_path_factory.mktemp("phone")
    try:
        archive = debian_packages.download(PACKAGE, home)
    except DataError as error:
        pytest.skip(f"{PACKAGE} cannot be had: {error.what}")
    debian_packages.unpack(archive, home / "root")
    (folder,) = (home / "root").rglob("digits")
    digits = [real_corpora.decode(folder / f"{number}.g722")[0] for number in range(10)]
    rng = np.random.default_rng(0)
    for number, (suffix, *recorder) in zip(range(CLIPS), cycle(RECORDERS), strict=False):
        said = rng.permutation(10)[:DIGITS_EACH]
        record(out / f"{number:02d}.{suffix}", np.concatenate([digits[digit] for digit in said]), *recorder)
        text = " ".join(DIGITS[digit] for digit in said).capitalize() + "."
        (out / f"{number:02d}.txt").write_text(text, encoding="utf-8")
    return out


def test_a_voice_is_learned_from_phone_recordings(phone: Path, tmp_path: Path) -> None:
    quick = ["train.steps=4", "train.warmup=2", "train.evaluate_every=4"]
    result = run_demo(tmp_path / "demo", voice=str(phone), language="es", settings=quick)
    clips = read_manifest(tmp_path / "demo" / "recordings" / "manifest.jsonl")
    assert {clip.audio.suffix for clip in clips} == {f".{suffix}" for suffix, *_ in RECORDERS}, "all of them are read"
    assert len(clips) == CLIPS and (tmp_path / "demo" / "report.html").is_file()
    first, *_, last = (row["evaluation"]["loss"] for row in result.losses if "evaluation" in row)
    assert last < first
    assert not any("telephone" in note for note in result.notes), "the reference is a clip with a full band"


def test_what_is_wrong_with_a_phone_recording_is_said(phone: Path) -> None:
    recordings = [path for path in sorted(phone.glob("0[0-6].*")) if path.suffix != ".txt"]
    problems = {path.suffix: open_reference(path).problems for path in recordings}
    assert "telephone" in problems.pop(".amr")[0]
    assert not any(problems.values()), problems


def test_recordings_without_texts_are_named_with_what_to_do(phone: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="without texts") as caught:
        run_demo(tmp_path / "demo", voice=str(phone / "00.m4a"))
    assert "myna curate" in caught.value.hint
