"""Bundle for a machine without network, in parts of a limited size: wheels, texts, networks, speech, a checkpoint.

python training/fledgling/pack_offline.py --texts data/fledgling/texts --kokoro data/fledgling/kokoro \\
    --natural PARQUET_FOLDER --real PARQUET_FOLDER_OR_FILE... --background AUDIO_FOLDER --out data/fledgling/bundle

espeak-ng is packed without the dictionaries of other languages. The first part holds wheels and texts; Kokoro and
the other files follow where they fit. Real speech keeps the name of its folder or file, by which `fledgling.sh` weighs
it.
"""

from __future__ import annotations

import argparse
import io
import math
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import soundfile
import soxr  # type: ignore[import-untyped]

from corpus_making.espeak import DICTIONARIES
from myna.core.errors import DataError, MynaError

WHEELS = (
    *("espeakng-loader==0.2.4", "soundfile==0.14.0", "cffi==2.1.1", "pycparser==3.12", "soxr==1.1.0", "peft==0.21.2"),
    *("pydantic==2.14.3", "pydantic-core==2.50.4", "annotated-types==0.8.0", "typing-inspection==0.4.5"),
    *("rapidfuzz==3.14.6", "platformdirs==4.14.5", "cyclopts==5.4.0", "docstring-parser==0.18.0", "rich-rst==2.2.0"),
)
"""Imports that the GPU machine lacks; torch, transformers, accelerate, pyarrow, attrs and rich are there."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "any")


MIN_BACKGROUND_SECONDS, MAX_BACKGROUND_SECONDS = 1.0, 12.0
"""Seconds of a recording without speech: shorter ones would be repeated too often, longer ones are cut."""


class RealSpeech(NamedTuple):
    """A parquet file, or a folder of them, and the bytes that each file may have."""

    path: Path
    limit: float = math.inf

    @classmethod
    def parse(cls, text: str) -> RealSpeech:
        path, _, limit = text.rpartition("=")
        return cls(Path(path), float(limit) * 2**20) if path else cls(Path(text))


def pack(
    texts: Path,
    natural: Sequence[Path],
    out: Path,
    python: str,
    limit: int,
    kokoro: Path | None = None,
    real: Sequence[RealSpeech] = (),
    backgrounds: Sequence[Path] = (),
    init: Path | None = None,
    words: Path | None = None,
    speech_encoder: Path | None = None,
) -> list[int]:
    """Write the parts; their sizes in bytes."""
    if out.exists():
        raise DataError(f"{out} exists", hint=f"rm -r {out}, or choose another folder with --out")
    first = out / "0"
    shutil.copytree(texts, first / "texts")
    if words is not None:
        shutil.copy(words, first / "real_words.json")
    _wheels(first / "wheels", python)
    for source in backgrounds:
        home = first / "background" / f"{source.stem}.parquet"
        if source.suffix == ".parquet":
            home.parent.mkdir(exist_ok=True)
            shutil.copy(source, home)
        else:
            _pack_backgrounds(source, home)
    sizes = [_size(first)]
    thinned = out / "thinned"
    encoder = [(speech_encoder, "speech_encoder.safetensors")] if speech_encoder else []
    for file, name in (*_kokoro(kokoro), *_natural(natural), *_real(real, thinned), *encoder, *_tree(init, "init")):
        size = file.stat().st_size
        if size > limit:
            raise DataError(f"{file} is larger than a part", hint=f"--limit {size / 2**20 + 1:.0f}")
        part = next((number for number, full in enumerate(sizes) if full + size <= limit), len(sizes))
        sizes[part:] = [sum(sizes[part : part + 1]) + size, *sizes[part + 1 :]]
        home = out / str(part) / name
        home.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, home)
    shutil.rmtree(thinned, ignore_errors=True)
    return sizes


def _kokoro(folder: Path | None) -> Iterator[tuple[Path, str]]:
    for file in sorted(folder.glob("*.safetensors")) if folder else ():
        yield file, f"kokoro/{file.name}"


def _natural(folders: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    for file in sorted(file for folder in folders for file in folder.glob("*.parquet")):
        yield file, f"natural/{file.parent.name}-{file.name}"


def _tree(folder: Path | None, name: str) -> Iterator[tuple[Path, str]]:
    if folder is not None:
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            yield file, f"{name}/{file.relative_to(folder).as_posix()}"


def _real(speech: Sequence[RealSpeech], thinned: Path) -> Iterator[tuple[Path, str]]:
    for source, limit in speech:
        files = sorted(source.glob("*.parquet")) if source.is_dir() else [source]
        if not files:
            raise DataError(f"{source} has no parquet files", hint="name a folder of them, or a file")
        for file in files:
            name = source.name if source.is_dir() else re.sub(r"-\d+$", "", source.stem)
            yield _thin(file, thinned / name / file.name, limit), f"real/{name}/{file.name}"


def _thin(file: Path, out: Path, limit: float) -> Path:
    """The file, or a copy with every n-th row that has about `limit` bytes at most."""
    every = math.ceil(file.stat().st_size / limit)
    if every <= 1:
        return file
    table = pq.read_table(file)
    out.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.take(list(range(0, len(table), every))), out)
    return out


def _pack_backgrounds(folder: Path, out: Path) -> None:
    """The audio files of a folder as one parquet file of Opus, mono at 24 kHz, as a source of `train_codec.py`."""
    rows = []
    for file in sorted(path for path in folder.rglob("*") if path.suffix in (".flac", ".wav", ".ogg", ".mp3")):
        samples, rate = soundfile.read(file, dtype="float32", always_2d=True)
        mono = soxr.resample(samples.mean(1), rate, 24_000)[: int(MAX_BACKGROUND_SECONDS * 24_000)]
        if len(mono) >= MIN_BACKGROUND_SECONDS * 24_000:
            coded = io.BytesIO()
            soundfile.write(coded, mono, 24_000, format="OGG", subtype="OPUS")
            audio = {"bytes": coded.getvalue(), "path": file.name}
            rows.append({"id": file.stem, "speaker": "background", "text": "", "audio": audio})
    if not rows:
        raise DataError(f"{folder} has no audio file of a second or more", hint="name a folder of FLAC or WAV files")
    out.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), out)


def _wheels(out: Path, python: str) -> None:
    options = [f"--platform={platform}" for platform in PLATFORMS]
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += [f"--python-version={python}", *options, f"--dest={scratch}", *WHEELS]
        try:
            subprocess.run(command, check=True)
        except subprocess.CalledProcessError as error:
            raise DataError(f"pip did not give the wheels: {error}", hint="see what it says above") from None
        out.mkdir(parents=True)
        for wheel in sorted(Path(scratch).glob("*.whl")):
            if wheel.name.startswith("espeakng_loader"):
                _strip_languages(wheel, out / wheel.name)
            else:
                shutil.copy(wheel, out)


def _strip_languages(wheel: Path, out: Path) -> None:
    """Write the wheel with a tenth of its size; links to the library, which a zip holds as copies, are left out too."""
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as part:
        for name in whole.namelist():
            spoken = not name.endswith("_dict") or name.endswith(DICTIONARIES)
            if spoken and not Path(name).name.startswith("libespeak-ng.so."):
                part.writestr(name, whole.read(name))


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True, help="folder made by extract_texts.py")
    parser.add_argument("--natural", type=Path, nargs="*", default=[], help="folders of parquet files")
    parser.add_argument(
        "--real",
        type=RealSpeech.parse,
        nargs="*",
        default=[],
        metavar="PATH[=MIB]",
        help="real speech: parquet files, or their folders; of a larger file than MIB some rows are left out",
    )
    parser.add_argument(
        "--background", type=Path, nargs="*", default=[], help="parquet files, or folders of audio files: no speech"
    )
    parser.add_argument("--kokoro", type=Path, help="folder made by export_kokoro.py")
    parser.add_argument("--init", type=Path, help="checkpoint that the language model begins with, with its codec")
    parser.add_argument("--words", type=Path, help="file that augment_real.py made of real speech")
    parser.add_argument("--speech-encoder", type=Path, help="file made by export_speech_encoder.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--python", default="3.12", help="version of Python over there")
    parser.add_argument("--limit", type=float, default=56, help="MiB of a part; the checkout is copied beside it")
    args = parser.parse_args()
    try:
        limit = int(args.limit * 2**20)
        sizes = pack(
            args.texts,
            args.natural,
            args.out,
            args.python,
            limit,
            args.kokoro,
            args.real,
            args.background,
            args.init,
            args.words,
            args.speech_encoder,
        )
    except MynaError as error:
        parser.exit(1, f"{error}\n")
    for number, size in enumerate(sizes):
        print(f"{args.out / str(number)}: {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
