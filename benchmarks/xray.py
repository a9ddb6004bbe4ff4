"""X-ray of a million segments: how long it takes, how large the page is, and how long deciding again takes.

    python benchmarks/xray.py [--rows 1000000] [--out FOLDER]

The table is synthetic: speakers, texts and measures are drawn at random, and every part is the same minute of noise.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from myna.audio.files import write_audio
from myna.curate.decision import decide
from myna.curate.settings import CurateSettings, load_curate_settings
from myna.curate.xray import run_xray
from myna.curate.xray.source import open_xray_source
from myna.data.segments import MEASURES, SCHEMA, TABLE_FILE

ROWS_PER_RECORDING = 200
GROUP_ROWS = 100_000
SPEAKERS, DIMENSIONS = 40, 192
WORDS = ("the", "of", "and", "river", "morning", "bird", "sings", "over", "quiet", "hill", "früh", "năm", "يوم")
SCALES = {
    "language_probability": (0.97, 0.03),
    "avg_log_prob": (-0.3, 0.2),
    "compression_ratio": (1.4, 0.2),
    "cer": (0.03, 0.05),
    "edge_cer": (0.04, 0.08),
    "characters_per_second": (14.0, 2.0),
    "unique_word_share": (0.85, 0.1),
    "overlap_share": (0.0, 0.01),
    "music_share": (0.0, 0.06),
    "snr_db": (24.0, 7.0),
    "gap_snr_db": (45.0, 8.0),
    "bandwidth_hz": (10_000.0, 1200.0),
    "clipped_share": (0.0, 0.0005),
    "start_gap_ms": (260.0, 50.0),
    "end_gap_ms": (260.0, 50.0),
}
"""Mean and standard deviation of a measure; others are 3 and 0.4."""


def write_table(folder: Path, rows: int) -> None:
    random = np.random.default_rng(0)
    voices = random.normal(size=(SPEAKERS, DIMENSIONS)).astype(np.float32)
    texts = [" ".join(random.choice(WORDS, size=12)) for _ in range(20_000)]
    write_audio(folder / "parts" / "noise.flac", (0.1 * random.normal(size=24_000 * 60)).astype(np.float32), 24_000)
    with pq.ParquetWriter(folder / TABLE_FILE, SCHEMA, compression="zstd") as writer:
        for first in range(0, rows, GROUP_ROWS):
            writer.write_table(_group(random, voices, texts, first, min(GROUP_ROWS, rows - first)))
    CurateSettings().save(folder)


def _group(random: np.random.Generator, voices: np.ndarray, texts: list[str], first: int, count: int) -> pa.Table:  # type: ignore[type-arg]
    number = np.arange(first, first + count)
    place = number % ROWS_PER_RECORDING
    is_clip = place % 2 == 1
    lengths = np.where(place % 2 == 1, 6000, 400)
    start = (place // 2) * 6400 + np.where(is_clip, 400, 0)
    recording = [f"recording-{n:06}.mp3" for n in (number // ROWS_PER_RECORDING).tolist()]
    who = random.integers(0, SPEAKERS, count)
    noise = random.normal(scale=1.2, size=(count, DIMENSIONS)).astype(np.float32)
    vectors = (voices[who] + noise)[is_clip]
    offsets = np.concatenate([[0], np.cumsum(is_clip * DIMENSIONS)]).astype(np.int32)
    text = np.where(is_clip, np.array(texts, object)[random.integers(0, len(texts), count)], "")
    columns = {name: pa.array([""] * count) for name in SCHEMA.names if SCHEMA.field(name).type == pa.string()}
    for name in MEASURES:
        mean, deviation = SCALES.get(name, (3.4, 0.3))
        values = random.normal(mean, deviation, count)
        values = np.maximum(values, 0) if mean >= 0 else values
        columns[name] = pa.array(np.where(is_clip, values, np.nan).astype(np.float32))
    columns |= {
        "id": pa.array([f"{n:016x}" for n in number.tolist()]),
        "recording": pa.array(recording),
        "recording_hash": pa.array(recording),
        "part": pa.array(recording),
        "start_ms": pa.array(start),
        "end_ms": pa.array(start + lengths),
        "kind": pa.array(np.where(is_clip, "clip", "gap")),
        "audio": pa.array(["parts/noise.flac"] * count),
        "audio_start_ms": pa.array(start % 50_000),
        "speaker": pa.array(np.where(is_clip, np.array([f"speaker-{n}" for n in range(SPEAKERS)])[who], "")),
        "text": pa.array(text),
        "normalised_text": pa.array(text),
        "check_text": pa.array(text),
        "language": pa.array(np.where(is_clip, "en", "")),
        "gain_db": pa.array(np.zeros(count, np.float32)),
        "embedding": pa.ListArray.from_arrays(pa.array(offsets), pa.array(vectors.ravel())),
        "fingerprint": pa.array([b""] * count),
        "split": pa.array(np.where(is_clip, "train", "")),
    }
    table = pa.table({name: columns[name].cast(SCHEMA.field(name).type) for name in SCHEMA.names}, schema=SCHEMA)
    return decide(table, CurateSettings())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, help="keep the folder here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.out or Path(scratch)
        seconds: dict[str, float] = {}
        begun = time.perf_counter()
        if not (folder / TABLE_FILE).is_file():
            write_table(folder, arguments.rows)
        seconds["write the table"] = time.perf_counter() - begun
        begun = time.perf_counter()
        source = open_xray_source(folder)
        seconds["read the table"] = time.perf_counter() - begun
        strict = load_curate_settings(folder, ["keep.min_snr_db=20"])
        begun = time.perf_counter()
        decided = decide(source.table, strict)
        seconds["decide again"] = time.perf_counter() - begun
        begun = time.perf_counter()
        result = run_xray(folder)
        seconds["X-ray"] = time.perf_counter() - begun
        clips = list((folder / "xray" / "clips").iterdir())
        print(
            json.dumps(
                {
                    "rows": len(source.table),
                    "clips": int(result.numbers["hours"]["clips"]),
                    "kept with a stricter threshold": decided["status"].to_pylist().count("kept"),
                    "seconds": {name: round(value, 1) for name, value in seconds.items()},
                    "page_megabytes": round(result.page.stat().st_size / 1e6, 2),
                    "json_megabytes": round(result.page.with_name("xray.json").stat().st_size / 1e6, 2),
                    "pieces": result.pieces,
                    "pieces_megabytes": round(sum(file.stat().st_size for file in clips) / 1e6, 1),
                    "table_megabytes": round((folder / TABLE_FILE).stat().st_size / 1e6),
                    "peak_memory_gigabytes": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 1),
                    "machine": f"{platform.machine()}, {platform.python_version()}",
                },
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
