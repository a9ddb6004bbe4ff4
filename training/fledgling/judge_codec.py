"""Judge a codec by round trips of speakers that it never learned from.

    python training/fledgling/judge_codec.py --codec runs/codec/codec --source CORPUS/natural --source CORPUS/espeak \\
        --whisper WHISPER_FOLDER --ecapa ecapa.safetensors --out runs/codec/judged.json

Word errors by faster-whisper before and after, similarity of the voice by ECAPA and Resemblyzer, STOI, PESQ, and the
codes in use. Words and voices are measured where their listeners are named. `--codec identity` gives back what it is
given, to try the ears themselves.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from rich.progress import track

from codec_judging import ears
from codec_judging.ears import Listener
from codec_training.judging import perplexity
from codec_training.sounds import Recording, decode, described, recordings, turn_by_turn
from myna.audio.files import Samples, write
from myna.data.codec import Codec
from myna.errors import DataError, MynaError
from myna.evaluate.dependencies import heard_at
from myna.models.codecs import open_codec

RATE = 24_000
TARGETS = {"word errors added": ("<=", 0.01), "ecapa": (">=", 0.80), "stoi": (">=", 0.93)}
"""What the codec of fledgling is to reach."""
SHORTEST = 1.0
"""Seconds of a clip: neither STOI nor PESQ says anything about a shorter one."""


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    try:
        report = judge(options)
    except MynaError as error:
        sys.exit(f"{error}")
    print(table(report))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1, ensure_ascii=False), encoding="utf-8")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("--codec", required=True, help="a codec's folder, or `identity`")
    add("--source", type=Path, action="append", required=True, help="as for train_codec.py; may be repeated")
    add("--clips", type=int, default=40, help="of each source, spread over all held-out speakers")
    add("--everyone", action="store_true", help="take the speakers that were trained on, too")
    add("--whisper", metavar="FOLDER", help="a CTranslate2 Whisper model, or a name to download: count word errors")
    add("--language", default="en", help="of the word errors")
    add("--ecapa", type=Path, metavar="FILE", help="SpeechBrain's ECAPA as safetensors: similarity of the voice")
    add("--resemblyzer", action="store_true", help="similarity of the voice by Resemblyzer")
    add("--no-stoi", action="store_true")
    add("--no-pesq", action="store_true")
    add(
        "--samples", type=Path, metavar="FOLDER", help="write the first three originals and copies of each source there"
    )
    add("--out", type=Path, metavar="FILE", help="write the report as JSON")
    return made


def judge(options: argparse.Namespace) -> dict[str, Any]:
    listeners = _listeners(options)
    codec = None if options.codec == "identity" else open_codec(options.codec)
    report: dict[str, Any] = {"codec": options.codec, "revision": codec.revision if codec else None, "sources": {}}
    for source in options.source:
        found = [
            one for one in recordings(source) if (options.everyone or one.is_held_out) and _seconds(one) >= SHORTEST
        ]
        chosen = turn_by_turn(found, options.clips)
        if not chosen:
            raise DataError(
                f"{source} holds no held-out speaker with a clip of a second or more",
                hint="add --everyone, or judge on more speakers",
            )
        print(f"{source}: {described(chosen)}", flush=True)
        report["sources"][source.stem] = _of_source(codec, chosen, listeners, options, source.stem)
    return report


def _seconds(recording: Recording) -> float:
    info = soundfile.info(io.BytesIO(recording.data))
    return float(info.frames / info.samplerate)


def _listeners(options: argparse.Namespace) -> list[Listener]:
    made: list[Listener] = []
    if options.whisper:
        made.append(ears.words_heard(options.whisper, options.language))
    if options.ecapa:
        made.append(ears.voice_by_ecapa(options.ecapa))
    if options.resemblyzer:
        made.append(ears.voice_by_resemblyzer())
    if not options.no_stoi:
        made.append(ears.intelligibility())
    if not options.no_pesq:
        made.append(ears.quality())
    return made


def _of_source(
    codec: Codec | None, chosen: list[Recording], listeners: list[Listener], options: argparse.Namespace, name: str
) -> dict[str, Any]:
    found: defaultdict[str, list[float]] = defaultdict(list)
    counts = np.zeros((codec.codebooks, codec.codebook_size)) if codec else np.zeros((0, 0))
    for number, one in enumerate(track(chosen, "listening", transient=True)):
        original, copy = _round_trip(codec, decode(one.data, codec.sample_rate if codec else RATE), counts)
        rate = codec.sample_rate if codec else RATE
        if options.samples and number < 3:
            write(options.samples / f"{name}-{number}-original.wav", original, rate)
            write(options.samples / f"{name}-{number}-copy.wav", copy, rate)
        for listener in listeners:
            for measure, value in listener(one.text, heard_at(original, rate), heard_at(copy, rate)).items():
                found[measure].append(value)
    scores = {measure: float(np.mean(values)) for measure, values in found.items()}
    if "words" in found:
        before, after = (sum(found[f"errors in {which}"]) / sum(found["words"]) for which in ("original", "copy"))
        scores = {name: value for name, value in scores.items() if name != "words" and not name.startswith("errors")}
        scores |= {"word errors before": before, "word errors after": after, "word errors added": after - before}
        scores["give or take"] = _doubt(found["errors in original"], found["errors in copy"], found["words"])
    used: dict[str, Any] = {}
    if codec:
        used = {"perplexity": perplexity(torch.from_numpy(counts)), "codes used": (counts > 0).sum(1).tolist()}
    return {"clips": len(chosen), "speakers": len({one.speaker for one in chosen}), "scores": scores} | used


def _doubt(before: list[float], after: list[float], words: list[float]) -> float:
    """Half of the 95 % interval of the word errors added, by drawing the clips anew a thousand times.

    A robot's words are so hard to make out that a few clips more or less change the sum by points.
    """
    added, due = np.subtract(after, before), np.array(words)
    drawn = np.random.default_rng(0).integers(0, len(due), (1000, len(due)))
    low, high = np.percentile(added[drawn].sum(1) / np.maximum(1, due[drawn].sum(1)), [2.5, 97.5])
    return float(high - low) / 2


def _round_trip(codec: Codec | None, wave: Samples, counts: np.ndarray[Any, Any]) -> tuple[Samples, Samples]:
    if codec is None:
        return wave, wave
    wave = wave[: len(wave) // codec.hop * codec.hop]
    codes = codec.encode(wave[None])[0]
    for book, column in enumerate(codes.T):
        np.add.at(counts[book], column, 1)
    return wave, codec.decode(codes)


def table(report: dict[str, Any]) -> str:
    """Sources as columns, measures as rows, and what is to be reached beside them."""
    sources = report["sources"]
    measures = list(dict.fromkeys(measure for source in sources.values() for measure in source["scores"]))
    lines = [f"{'':<20}" + "".join(f"{name:>16}" for name in sources) + f"{'to reach':>14}"]
    for measure in measures:
        row = "".join(f"{source['scores'][measure]:>16.4f}" for source in sources.values())
        sign, bound = TARGETS.get(measure, ("", None))
        lines.append(f"{measure:<20}{row}" + (f"{sign:>9} {bound:.2f}" if bound is not None else ""))
    lines += [
        f"codes in use, {name}: {source['perplexity']}" for name, source in sources.items() if "perplexity" in source
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
