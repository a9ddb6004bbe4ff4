"""Evaluate `myna demo` over several seeds.

python training/fledgling/evaluate_demo.py --out data/fledgling/demo_evaluation --asr base

Each seed is a demo of its own in `OUT/seed-N`; one that is there is not run again. `OUT/evaluation.json` has the table.
The demo passes if fine-tuning raises the speaker similarity to the real recordings by 0.03 on average over the seeds,
and does not raise the word error rate.

With `--real-voice data/fledgling/real/judge/asterisk-en-0.parquet` the voice is three minutes of a real person, whose
texts Whisper writes down, with ten more recordings held out; similarity is then to rise by 0.05.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from codec_training.recordings import decode, recordings
from myna.audio.files import write_audio
from myna.core.io import atomic_write, string_hash
from myna.data.manifest import Utterance, write_manifest
from myna.listen.asr import ASR

SAMPLE_RATE = 24_000

MIN_SIMILARITY_GAIN, MIN_REAL_SIMILARITY_GAIN = 0.03, 0.05
"""Gain in speaker similarity by fine-tuning, as a mean over seeds; and with a real voice."""
TRAINING_SECONDS, HELD_OUT_CLIPS, CLIP_SECONDS = 180.0, 10, (2.0, 12.0)
"""Sizes for a real voice: seconds to learn from, recordings that are held out, and their lengths."""
MIN_WORDS = 4
"""Minimum number of words of a recording: fewer give no error rate."""


def write_real_voice(source: Path, asr: ASR, out: Path) -> float:
    """Recordings of the only speaker of a parquet file as a corpus for the demo; seconds to learn from.

    Held-out recordings come first, in an order by their ids, so that all demos have the same ones.
    """
    utterances: list[Utterance] = []
    learned = 0.0
    for one in sorted(recordings(source), key=lambda one: string_hash(f"demo/{one.id}")):
        samples = decode(one.data, SAMPLE_RATE)
        length, is_held_out = len(samples) / SAMPLE_RATE, len(utterances) < HELD_OUT_CLIPS
        if learned >= TRAINING_SECONDS or not CLIP_SECONDS[0] <= length <= CLIP_SECONDS[1]:
            continue
        text = one.text or asr.transcribe(samples, SAMPLE_RATE, "en").text
        if len(text.split()) < MIN_WORDS or any(text == known.text for known in utterances):
            continue
        write_audio(out / f"{one.id}.wav", samples, SAMPLE_RATE)
        extras = {"held_out": True} if is_held_out else {}
        utterances.append(Utterance(one.id, out / f"{one.id}.wav", text, one.speaker, "en", extras=extras))
        learned += 0.0 if is_held_out else length
    write_manifest(out / "manifest.jsonl", utterances)
    return learned


def summarise(scores: Sequence[dict[str, Any]], min_gain: float = MIN_SIMILARITY_GAIN) -> dict[str, Any]:
    """A row per seed, their means, and whether the demo passes; None where a metric is missing."""
    rows = []
    for score in scores:
        row = {
            "seed": score["seed"],
            "ended_by_itself": score["ended_by_itself"],
            "seconds": sum(score["seconds"].values()),
        }
        for key, metric in (("similarity", "similarity"), ("word_error_rate", "wer")):
            means = {name: score["systems"][name][metric]["mean"] for name in ("real", "before", "after")}
            row[key] = means | {"change": _difference(means["after"], means["before"])}
        rows.append(row)
    gain, wer_change = (_mean([row[key]["change"] for row in rows]) for key in ("similarity", "word_error_rate"))
    return {
        "seeds": rows,
        "similarity_gain": gain,
        "min_similarity_gain": min_gain,
        "word_error_rate_change": wer_change,
        "passed": None if gain is None or wer_change is None else gain >= min_gain and wer_change <= 0,
        "missing": [score["missing"] for score in scores if score["missing"]],
    }


def run_demo(seed: int, out: Path, options: Sequence[str]) -> dict[str, Any]:
    """The scores of one demo, in a process of its own as a user would run it."""
    folder = out / f"seed-{seed}"
    if not (folder / "scores.json").is_file():
        command = [sys.executable, "-m", "myna", "demo", "--out", str(folder), "--seed", str(seed), *options]
        subprocess.run(command, check=True)
    scores: dict[str, Any] = json.loads((folder / "scores.json").read_text(encoding="utf-8"))
    return scores | {"seed": seed}


def _difference(after: float | None, before: float | None) -> float | None:
    return None if after is None or before is None else after - before


def _mean(numbers: Sequence[float | None]) -> float | None:
    found = [number for number in numbers if number is not None]
    return sum(found) / len(found) if found and len(found) == len(numbers) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the demos and the table")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--model", default="fledgling")
    parser.add_argument("--asr", help="folder or name of a Whisper")
    parser.add_argument("--voice", help="recordings, instead of the voice that comes with Myna")
    parser.add_argument("--real-voice", type=Path, help="parquet file of one real person, of which a voice is made")
    parser.add_argument("--set", action="append", default=[], help="a setting of the recipe, as `myna demo` takes it")
    args = parser.parse_args()
    options = ["--model", args.model, *(word for setting in args.set for word in ("--set", setting))]
    options += ["--asr", args.asr] if args.asr else []
    options += ["--voice", args.voice] if args.voice else []
    min_gain = MIN_SIMILARITY_GAIN
    if args.real_voice:
        min_gain, voice = MIN_REAL_SIMILARITY_GAIN, args.out / "voice"
        if not (voice / "manifest.jsonl").is_file():
            write_real_voice(args.real_voice, ASR.open(args.asr or "base"), voice)
        options += ["--voice", str(voice)]
    table = summarise([run_demo(seed, args.out, options) for seed in args.seeds], min_gain)
    written = json.dumps(table, indent=2) + "\n"
    with atomic_write(args.out / "evaluation.json") as temporary:
        temporary.write_text(written, encoding="utf-8")
    print(written)


if __name__ == "__main__":
    main()
