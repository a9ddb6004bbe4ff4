"""Real recordings from Debian packages, as parquet files: to train on, to judge by, and sounds that are not speech.

    python training/fledgling/real_corpora.py --out data/fledgling/real

Downloads the packages with apt-get, and unpacks them with dpkg-deb; nothing is installed. Sources, licences and
people are in corpus_making/real_sources.py. What is under `judge` is never trained on.

    OUT/train/NAME-0.parquet    id, text, speaker, language, seconds, audio {bytes: OGG/Opus at 24 kHz, path}, source,
    OUT/judge/...               sample_rate (of the package's file)
    OUT/noise/...               music and other sounds in pieces of ten seconds, without a text
    OUT/sources.json            package versions, licences, hours and speakers of each

Run again, it makes what is missing.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import soxr  # type: ignore[import-untyped]
from rich.progress import track

from corpus_making import debian_packages
from corpus_making.held_out import is_held_out
from corpus_making.real_sources import REAL_SOURCES, RealSource, SourceClip
from myna.audio.files import Samples, probe, read_audio
from myna.core.errors import AudioError, DataError, MynaError
from myna.core.io import atomic_write, string_hash

SAMPLE_RATE = 24_000
OPUS_BIT_RATE, OPUS_EFFORT = 48_000, "5"
"""The effort takes a fifth of the time of libsndfile's."""
HEADERLESS = {".g722": 16_000, ".gsm": 8_000}
"""Rates of files that do not tell their own; FFmpeg has to be told their format, which is their suffix."""
MIN_SECONDS, MAX_SECONDS = 1.0, 30.0
"""Seconds of a clip. Shorter ones are joined for training, and left out for judging."""
JOINED_SECONDS, PAUSE_SECONDS = 3.0, 0.2
"""Least length of clips that were joined, and the silence between them."""
PIECE_SECONDS = 10.0
"""Length of the pieces into which music is cut."""
MAX_JUDGE_CLIPS = 600
"""Recordings of a package to judge by, chosen by a hash of their names: more would never be measured."""
MIN_PEAK = 0.01
"""Minimum peak of a clip that can be heard."""
MAX_PART_BYTES = 45 << 20

Row = dict[str, Any]
DecodedClip = tuple[SourceClip, Samples, int]
"""A clip, its samples at 24 kHz, and the rate of its file."""


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    chosen = [source for source in REAL_SOURCES if not options.only or source.name in options.only]
    summaries = _read_json(options.out / "sources.json")
    try:
        for source in chosen:
            if source.name not in summaries or not any((options.out / source.part).glob(f"{source.name}-*.parquet")):
                summaries[source.name] = make_source(source, options.out, options.packages)
                with atomic_write(options.out / "sources.json") as temporary:
                    temporary.write_text(json.dumps(summaries, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except MynaError as error:
        sys.exit(f"{error}")
    print(table({source.name: summaries[source.name] for source in REAL_SOURCES if source.name in summaries}))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [source.name for source in REAL_SOURCES]
    made.add_argument("--out", type=Path, required=True, help="folder of the corpora")
    made.add_argument("--packages", type=Path, default=Path(".cache/debian"), help="folder of the downloaded packages")
    made.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    return made


def make_source(source: RealSource, out: Path, packages: Path) -> Row:
    """Write the parquet files of a source; its summary, for a model card."""
    archives = [debian_packages.download(name, packages) for name in source.packages]
    versions = {name: debian_packages.version(file) for name, file in zip(source.packages, archives, strict=True)}
    print(f"{source.name}: {', '.join(f'{name} {version}' for name, version in versions.items())}", flush=True)
    with TemporaryDirectory() as folder:
        for archive in archives:
            debian_packages.unpack(archive, Path(folder))
        clips = list(source.read(Path(folder)))
        if not clips:
            found = ", ".join(archive.name for archive in archives)
            raise DataError(f"there are no recordings of {source.name} in {found}", hint="use Debian 12's packages")
        if source.part == "judge":
            by_hash = sorted(clips, key=lambda clip: string_hash(clip.path.relative_to(folder).as_posix()))
            clips = sorted(by_hash[:MAX_JUDGE_CLIPS])
        rows = list(rows_of(source, track(clips, source.name, transient=True), versions))
    write_parts(out / source.part, source.name, rows)
    return {
        "part": source.part,
        "packages": versions,
        "licence": source.licence,
        "attribution": source.attribution,
        "clips": len(rows),
        "hours": round(sum(row["seconds"] for row in rows) / 3600, 3),
        "speakers": len({row["speaker"] for row in rows}),
        "languages": sorted({row["language"] for row in rows if row["language"]}),
        "held out by name": sorted({row["speaker"] for row in rows if is_held_out(row["speaker"])}),
    }


def rows_of(source: RealSource, clips: Iterable[SourceClip], versions: dict[str, str]) -> Iterator[Row]:
    """Clips of a source in its order, joined, left out or cut as its part asks for."""
    decoded = _decode_readable(clips)
    audible = ((clip, samples, rate) for clip, samples, rate in decoded if np.abs(samples).max(initial=0) >= MIN_PEAK)
    if source.part == "noise":
        shaped = cut(audible)
    elif source.part == "train":
        shaped = join_short(audible)
    else:
        shaped = ((clip, samples, rate) for clip, samples, rate in audible if len(samples) >= MIN_SECONDS * SAMPLE_RATE)
    for number, (clip, samples, rate) in enumerate(shaped):
        if len(samples) <= MAX_SECONDS * SAMPLE_RATE:
            yield {
                "id": f"{source.name}-{number:05d}",
                "text": clip.text,
                "speaker": clip.speaker,
                "language": clip.language,
                "seconds": len(samples) / SAMPLE_RATE,
                "audio": {"bytes": opus(samples), "path": f"{source.name}-{number:05d}.ogg"},
                "source": " ".join(f"{name}={version}" for name, version in versions.items()),
                "sample_rate": rate,
            }


def _decode_readable(clips: Iterable[SourceClip]) -> Iterator[DecodedClip]:
    """Clips that can be read; packages hold some empty files, which are named."""
    for clip in clips:
        try:
            yield clip, *decode(clip.path)
        except AudioError as error:
            print(f"left out: {error.what}", flush=True)


def join_short(clips: Iterable[DecodedClip]) -> Iterator[DecodedClip]:
    """Clips shorter than a second, joined with those that follow until they are three; texts are not kept."""
    waiting: list[DecodedClip] = []
    for clip, samples, rate in clips:
        if len(samples) >= MIN_SECONDS * SAMPLE_RATE:
            yield clip, samples, rate
            continue
        if waiting and waiting[-1][0].speaker != clip.speaker:
            waiting = []
        waiting.append((clip, samples, rate))
        pause = np.zeros(round(PAUSE_SECONDS * SAMPLE_RATE), np.float32)
        joined = np.concatenate([piece for _, some, _ in waiting for piece in (some, pause)])
        if len(joined) >= JOINED_SECONDS * SAMPLE_RATE:
            yield clip._replace(text=""), joined, rate
            waiting = []


def cut(clips: Iterable[DecodedClip]) -> Iterator[DecodedClip]:
    """Pieces of ten seconds; what is left at the end is a piece if it is as long as a clip must be."""
    size = round(PIECE_SECONDS * SAMPLE_RATE)
    for clip, samples, rate in clips:
        for start in range(0, len(samples), size):
            piece = samples[start : start + size]
            if len(piece) >= MIN_SECONDS * SAMPLE_RATE and np.abs(piece).max() >= MIN_PEAK:
                yield clip, piece, rate


def decode(path: Path) -> tuple[Samples, int]:
    """Mono samples at 24 kHz, and the rate of the file."""
    if path.suffix not in HEADERLESS:
        return read_audio(path, sample_rate=SAMPLE_RATE), probe(path).sample_rate
    import av

    with av.open(str(path), format=path.suffix.removeprefix(".")) as container:
        blocks = [frame.to_ndarray()[0] for frame in container.decode(container.streams.audio[0])]
    rate = HEADERLESS[path.suffix]
    samples = np.concatenate(blocks or [np.zeros(0, np.int16)]).astype(np.float32) / 32768
    return np.asarray(soxr.resample(samples, rate, SAMPLE_RATE, quality="VHQ"), np.float32), rate


def opus(samples: Samples, bit_rate: int = OPUS_BIT_RATE) -> bytes:
    """OGG/Opus of about that rate; the same samples give the same bytes."""
    import av

    content, options = io.BytesIO(), {"b": str(bit_rate), "compression_level": OPUS_EFFORT}
    with av.open(content, "w", format="ogg", options={"fflags": "+bitexact"}) as container:
        stream = container.add_stream("libopus", rate=SAMPLE_RATE, options=options)
        stream.layout, stream.format = "mono", "flt"
        frame = av.AudioFrame.from_ndarray(samples[None], format="flt", layout="mono")
        frame.sample_rate = SAMPLE_RATE
        for part in (frame, None):
            container.mux(stream.encode(part))
    return content.getvalue()


def write_parts(folder: Path, name: str, rows: list[Row]) -> None:
    """NAME-0.parquet and so on, each of at most 45 MiB of audio."""
    parts: list[list[Row]] = [[]]
    for row in rows:
        if parts[-1] and sum(len(other["audio"]["bytes"]) for other in (*parts[-1], row)) > MAX_PART_BYTES:
            parts.append([])
        parts[-1].append(row)
    for number, part in enumerate(parts):
        with atomic_write(folder / f"{name}-{number}.parquet") as temporary:
            pq.write_table(pa.Table.from_pylist(part), temporary, compression="none")


def table(summaries: dict[str, Row]) -> str:
    """The sources as rows of Markdown."""
    lines = [
        "| source | part | hours | clips | speakers | languages | licence | by |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in summaries.items():
        cells = [name, row["part"], f"{row['hours']:.2f}", row["clips"], row["speakers"], " ".join(row["languages"])]
        lines.append(f"| {' | '.join(map(str, [*cells, row['licence'], row['attribution']]))} |")
    return "\n".join(lines)


def _read_json(file: Path) -> Row:
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


if __name__ == "__main__":
    main()
