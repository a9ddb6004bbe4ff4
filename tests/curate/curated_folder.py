"""Curated folder for tests: real speech in parts, planted measures, and the decision of the real settings."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from myna.audio.files import Samples, read_audio, write_audio
from myna.curate.decision import decide
from myna.curate.second_pass import write_segments
from myna.curate.settings import CurateSettings
from myna.data.manifest import read_manifest
from tests.data.segment_rows import segment, segments_table

RATE = 24_000
RECORDINGS = Path(__file__).parents[2] / "src" / "myna" / "demo" / "recordings"
HOSTILE = '</script><script>document.title = "owned"</script> <img src=x onerror="document.title=1">'
ARABIC = "كَانَ اليَومُ جَميلًا"
PER_RECORDING = 14


def voice(name: str, number: int) -> list[float]:
    """Return an embedding near that of a speaker; clara is nearly anna, and ben is two people."""
    direction = {"anna": 0, "ben": 1 + number % 2, "clara": 0}[name]
    random = np.random.default_rng(number + 100 * len(name))
    vector = 0.25 * random.normal(size=16) / 4
    vector[direction] += 1.0
    return [float(value) for value in vector / np.linalg.norm(vector)]


def planted(number: int, speaker: str, text: str) -> dict[str, Any]:
    """Return measures of a clip: most are good, and some of every kind are bad."""
    random = np.random.default_rng(number)
    wrong = text.replace("the", "a").replace("I ", "eye ") if number % 3 == 0 else text
    return {
        "speaker": speaker,
        "text": text,
        "normalised_text": text,
        "check_text": wrong,
        "text_source": "recognised",
        "language": "en",
        "language_probability": 0.99,
        "avg_log_prob": -0.2 - 0.3 * random.random(),
        "compression_ratio": 1.3,
        "cer": 0.0 if wrong == text else 0.02 + 0.12 * random.random(),
        "edge_cer": 0.0 if wrong == text else 0.22 * random.random(),
        "characters_per_second": 12 + 4 * random.random(),
        "unique_word_share": 0.9,
        "overlap_share": 0.3 if number % 17 == 4 else 0.0,
        "music_share": 0.8 if number % 19 == 5 else 0.01,
        "snr_db": 14 + 25 * random.random(),
        "bandwidth_hz": 3900 if number % 13 == 6 else 11_000 - 500 * random.random(),
        "clipped_share": 0.02 if number % 23 == 7 else 0.0,
        "dnsmos_ovrl": 2.95 + 0.9 * random.random(),
        "dnsmos_bak": 4.0 if number % 3 else 3.0,
        "loudness_lufs": -26 + 4 * random.random(),
        "speaker_similarity": 0.8,
        "start_speaker_similarity": 0.1 if number % 29 == 8 else 0.7,
        "end_speaker_similarity": 0.7,
        "start_gap_ms": 200 + 100 * random.random(),
        "end_gap_ms": 200 + 100 * random.random(),
        "embedding": voice(speaker, number),
        "split": "held_out_texts" if number % 10 == 9 else "train",
    }


def write_curated_folder(folder: Path) -> pa.Table:
    """Write a folder with three recordings of the demo voice, two minutes in all, and a file that cannot be read."""
    (folder / "parts").mkdir(parents=True)
    clips = read_manifest(RECORDINGS / "manifest.jsonl")[: 3 * PER_RECORDING]
    rows: list[dict[str, Any]] = []
    for recording, speaker in enumerate(("anna", "ben", "clara")):
        name, start = f"tape {recording + 1}.mp3", 0
        pieces: list[Samples] = []
        for number in range(recording * PER_RECORDING, (recording + 1) * PER_RECORDING):
            text = {1: f"{clips[3].text} {HOSTILE}", 2: ARABIC}.get(number, clips[number].text)
            samples = read_audio(clips[number].audio, sample_rate=RATE)
            silence = np.zeros(RATE * (300 + 37 * (number % 5)) // 1000, np.float32)
            for kind, sound in (("gap", silence), ("clip", samples[: len(samples) // 24 * 24])):
                end = start + round(1000 * len(sound) / RATE)
                values = planted(number, speaker, text) if kind == "clip" else {"music_share": math.nan}
                audio = f"parts/{recording}.flac"
                rows.append(segment(f"{name}-{start}", name, start, end, kind, audio=audio, **values))
                pieces.append(sound)
                start = end
        write_audio(folder / f"parts/{recording}.flac", np.concatenate(pieces), RATE)
    for row, check in ((rows[3], HOSTILE), (rows[5], "كان اليوم جميل")):
        row |= {"check_text": check, "cer": 0.09, "edge_cer": 0.1, "snr_db": 30.0, "dnsmos_ovrl": 3.5}
    copies = [row for row in rows if row["kind"] == "clip"][-2:]
    copies[1]["duplicate_of"] = copies[0]["id"]
    broken = segment("broken", "zzz broken.m4a", 0, 1234, "gap", audio="", part="", reason="unreadable")
    table = decide(segments_table([*rows, broken]), CurateSettings())
    write_segments(folder, table)
    CurateSettings().save(folder)
    (folder / "recordings.json").write_text('{"first_pass": "", "models": ["whisper-base 1"], "recordings": []}')
    return table
