"""Evaluate a codec by round trips of held-out speakers.

    python training/fledgling/evaluate_codec.py --codec runs/codec/codec --source CORPUS/natural \\
        --source CORPUS/espeak --whisper WHISPER_FOLDER --ecapa ecapa.safetensors --out runs/codec/evaluation.json

Word errors by faster-whisper before and after, speaker similarity by ECAPA and Resemblyzer, STOI, PESQ, and codebook
perplexity. Word errors and similarity are measured if their models are args. `--codec identity` returns its input, to
evaluate the metrics themselves; `--codec shifted` does the same for real recordings, 10 ms later and a little softer.

Real recordings that nothing was trained on (`--judge`, as real_corpora.py makes them, and speakers of a corpus that are
held out, `--held-out`) are judged by what changes between the recording and its round trip: words and characters of the
transcripts, ECAPA, level. Clips that are measured are kept in `--work`, and not measured again:

    python training/fledgling/evaluate_codec.py --codec runs/codec/codec --judge data/fledgling/real/judge \\
        --held-out CORPUS/en-real --whisper WHISPER_FOLDER --ecapa ecapa.safetensors --work runs/codec/real \\
        --out runs/codec/real.json

Any folder of recordings can judge, with a folder for each speaker in it or without: `--judge MY_RECORDINGS`.
"""

from __future__ import annotations

import argparse
import io
import json
import shlex
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from rich.progress import track

from codec_evaluation import metrics
from codec_evaluation.metrics import RoundTripMetric
from codec_evaluation.real_speech import (
    RealMetrics,
    RoundTripCodec,
    ShiftedCopy,
    measure_clips,
    other_speaker_similarity,
    real_sets,
    score_set,
)
from codec_training.evaluation import perplexity
from codec_training.recordings import Recording, clip_summary, decode, recordings, round_robin_by_speaker
from myna.audio.files import Samples, as_mono_16khz, write_audio
from myna.core.errors import ConfigError, DataError, MynaError
from myna.data.codec import Codec
from myna.models import open_codec

RATE = 24_000
TARGETS = {"word errors added": ("<=", 0.01), "ecapa": (">=", 0.80), "stoi": (">=", 0.93)}
"""Targets of the fledgling codec."""
STUDIO = {"words changed": ("<=", 0.10), "ECAPA original / round trip": (">=", 0.65)}
REAL_TARGETS = {
    **dict.fromkeys(("asterisk-es", "asterisk-it", "asterisk-ru"), STUDIO),
    "fillets-cs": {"characters changed": ("<=", 0.25), "ECAPA original / round trip": (">=", 0.65)},
}
"""Targets on real recordings that the codec never heard: studio voices, and acted dialogue."""
MIN_SECONDS = 1.0
"""Minimum length of a clip: neither STOI nor PESQ says anything about a shorter recording."""


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    options.command = sys.argv[1:] if arguments is None else arguments
    try:
        report = evaluate(options)
    except MynaError as error:
        sys.exit(f"{error}")
    print("\n".join(part(report) for part, key in ((table, "sources"), (real_table, "real")) if report[key]))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1, ensure_ascii=False), encoding="utf-8")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.set_defaults(command=[])
    add = made.add_argument
    add("--codec", required=True, help="a codec's folder, or `identity`, or with real recordings `shifted`")
    add("--source", type=Path, action="append", default=[], help="corpus, as for train_codec.py; may be repeated")
    add("--judge", type=Path, action="append", default=[], help="folder of real recordings; may be repeated")
    add("--held-out", type=Path, action="append", default=[], help="the same, of which only held-out speakers are used")
    add("--sets", nargs="+", default=[], metavar="NAME", help="only these of the real recordings, as asterisk-es")
    add("--workers", type=int, default=2, help="threads that measure real recordings")
    add("--work", type=Path, default=Path("runs/codec_evaluation"), help="folder of measured clips of real recordings")
    add("--clips", type=int, default=40, help="of each source, spread over all held-out speakers")
    add("--all-speakers", action="store_true", help="not only held-out speakers")
    add("--whisper", metavar="FOLDER", help="a CTranslate2 Whisper model, or a name to download: count word errors")
    add("--language", default="en", help="of the word errors, and of folders of audio files")
    add("--ecapa", type=Path, metavar="FILE", help="SpeechBrain's ECAPA as safetensors: speaker similarity")
    add("--resemblyzer", action="store_true", help="speaker similarity by Resemblyzer")
    add("--no-stoi", action="store_true")
    add("--no-pesq", action="store_true")
    add(
        "--samples", type=Path, metavar="FOLDER", help="write the first three originals and copies of each source there"
    )
    add("--out", type=Path, metavar="FILE", help="write the report as JSON")
    return made


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    if not (options.source or options.judge or options.held_out):
        raise ConfigError("there is nothing to evaluate on", hint="name a corpus: --source, --judge or --held-out")
    codec = None if options.codec in ("identity", "shifted") else open_codec(options.codec)
    report: dict[str, Any] = {
        "codec": options.codec,
        "revision": codec.revision if codec else None,
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python", "training/fledgling/evaluate_codec.py", *options.command]),
        "sources": {},
        "real": {},
    }
    if options.judge or options.held_out:
        report["real"] = _evaluate_real(codec, options)
    metrics_used = _metrics(options) if options.source else []
    for source in options.source:
        found = [
            recording
            for recording in recordings(source)
            if (options.all_speakers or recording.is_held_out) and _seconds(recording) >= MIN_SECONDS
        ]
        chosen = round_robin_by_speaker(found, options.clips)
        if not chosen:
            raise DataError(
                f"{source} has no held-out speaker with a clip of a second or more",
                hint="add --all-speakers, or use a corpus with more speakers",
            )
        print(f"{source}: {clip_summary(chosen)}", flush=True)
        report["sources"][source.stem] = _evaluate_source(codec, chosen, metrics_used, options, source.stem)
    return report


def _evaluate_real(trained: Codec | None, options: argparse.Namespace) -> dict[str, Any]:
    codec: RoundTripCodec | None = ShiftedCopy() if options.codec == "shifted" else trained
    if codec is None or not options.whisper or not options.ecapa:
        raise ConfigError(
            "real recordings need a codec and the models that hear its round trips",
            hint="add --codec FOLDER --whisper FOLDER --ecapa FILE",
        )
    metrics_used = RealMetrics.open(options.whisper, options.ecapa, options.workers)
    measured = {}
    sets = real_sets(options.judge, options.held_out, options.clips, options.sets, options.language)
    if unknown := sorted(set(options.sets) - sets.keys()):
        raise ConfigError(f"there is no set {', '.join(unknown)}", hint=f"name some of {', '.join(sets) or 'others'}")
    for name, clips in sets.items():
        if clips:
            bar = track(clips, name, transient=True)
            measured[name] = list(measure_clips(name, bar, codec, options.work, metrics_used, options.workers))
    other = other_speaker_similarity(measured)
    return {
        name: {
            "clips": len(some),
            "speakers": len({clip["speaker"] for clip, _, _ in some}),
            "scores": score_set(some) | ({} if other is None else {"ECAPA other speakers": other}),
        }
        for name, some in measured.items()
    }


def _seconds(recording: Recording) -> float:
    info = soundfile.info(io.BytesIO(recording.data))
    return float(info.frames / info.samplerate)


def _metrics(options: argparse.Namespace) -> list[RoundTripMetric]:
    made: list[RoundTripMetric] = []
    if options.whisper:
        made.append(metrics.word_error_metric(options.whisper, options.language))
    if options.ecapa:
        made.append(metrics.ecapa_similarity(options.ecapa))
    if options.resemblyzer:
        made.append(metrics.resemblyzer_similarity())
    if not options.no_stoi:
        made.append(metrics.stoi())
    if not options.no_pesq:
        made.append(metrics.pesq())
    return made


def _evaluate_source(
    codec: Codec | None,
    chosen: list[Recording],
    metrics_used: list[RoundTripMetric],
    options: argparse.Namespace,
    name: str,
) -> dict[str, Any]:
    found: defaultdict[str, list[float]] = defaultdict(list)
    counts = np.zeros((codec.codebooks, codec.codebook_size)) if codec else np.zeros((0, 0))
    for number, recording in enumerate(track(chosen, "evaluating", transient=True)):
        original, copy = _round_trip(codec, decode(recording.data, codec.sample_rate if codec else RATE), counts)
        rate = codec.sample_rate if codec else RATE
        if options.samples and number < 3:
            write_audio(options.samples / f"{name}-{number}-original.wav", original, rate)
            write_audio(options.samples / f"{name}-{number}-copy.wav", copy, rate)
        for metric in metrics_used:
            for measure, value in metric(
                recording.text, as_mono_16khz(original, rate), as_mono_16khz(copy, rate)
            ).items():
                found[measure].append(value)
    scores = {measure: float(np.mean(values)) for measure, values in found.items()}
    if "words" in found:
        before, after = (sum(found[f"errors in {which}"]) / sum(found["words"]) for which in ("original", "copy"))
        scores = {name: value for name, value in scores.items() if name != "words" and not name.startswith("errors")}
        scores |= {"word errors before": before, "word errors after": after, "word errors added": after - before}
        scores["+/-"] = _confidence_half_width(found["errors in original"], found["errors in copy"], found["words"])
    used: dict[str, Any] = {}
    if codec:
        used = {"perplexity": perplexity(torch.from_numpy(counts)), "codes used": (counts > 0).sum(1).tolist()}
    return {"clips": len(chosen), "speakers": len({recording.speaker for recording in chosen}), "scores": scores} | used


def _confidence_half_width(before: list[float], after: list[float], words: list[float]) -> float:
    """Half width of the 95 % bootstrap interval, over clips, of the added word error rate.

    Words of synthetic voices are so hard to recognise that a few clips more or less change the rate by points.
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
    """Text table: sources as columns, measures as rows, and the targets beside them."""
    sources = report["sources"]
    measures = list(dict.fromkeys(measure for source in sources.values() for measure in source["scores"]))
    lines = [f"{'':<20}" + "".join(f"{name:>16}" for name in sources) + f"{'target':>14}"]
    for measure in measures:
        row = "".join(f"{source['scores'][measure]:>16.4f}" for source in sources.values())
        sign, bound = TARGETS.get(measure, ("", None))
        lines.append(f"{measure:<20}{row}" + (f"{sign:>9} {bound:.2f}" if bound is not None else ""))
    lines += [
        f"perplexity, {name}: {source['perplexity']}" for name, source in sources.items() if "perplexity" in source
    ]
    return "\n".join(lines)


def real_table(report: dict[str, Any]) -> str:
    """Text table: sets of real recordings as rows."""
    titles = ("words changed", "characters changed", "ECAPA original / round trip", "ECAPA same speaker")
    lines = [f"{'real recordings':<20}{'clips':>6}" + "".join(f"{title:>29}" for title in titles)]
    for name, row in report["real"].items():
        cells = []
        for title in titles:
            sign, bound = REAL_TARGETS.get(name, {}).get(title, ("", None))
            value = f"{row['scores'][title]:.3f}" if title in row["scores"] else "-"
            cells.append(value + (f" ({sign} {bound:.2f})" if bound is not None else ""))
        lines.append(f"{name:<20}{row['clips']:>6}" + "".join(f"{cell:>29}" for cell in cells))
    if (other := next(iter(report["real"].values()))["scores"].get("ECAPA other speakers")) is not None:
        lines.append(f"ECAPA of other speakers: {other:.3f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
