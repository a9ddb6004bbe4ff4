"""Detection of the watermark in real, natural and generated speech after codecs, telephones and attacks.

python benchmarks/watermark.py --corpus NAME=FOLDER_OF_PARQUET ... [--fledgling] [--clips 200] [--speakers 20]
                               [--attacked 24] [--out docs/benchmarks/watermark.json]

Parquet files need the columns speaker, text, seconds and audio {bytes}. Of each corpus `--clips` clips of `--speakers`
speakers are taken, those with the most clips; with --fledgling, as many lines are spoken in the voices of the first
corpus. Every clip is marked, put through each treatment, and scored; the same is done without the mark, for false
alarms. Attacks, which take long, are tried on the first `--attacked` clips. Sound quality needs pesq and pystoi, and is
left out without them.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow.parquet as pq
import soxr
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.figures import save_figures

from myna.audio.files import Samples, read_audio
from myna.models.ref import ModelRef
from myna.provenance.watermark import MARK_NAME, MARK_THRESHOLD, StreamWatermark, watermark, watermark_score

SAMPLE_RATE = 24_000
MIN_SECONDS, MAX_SECONDS = 1.5, 6.0
Treatment = Callable[[Samples], Samples]


def transcode(samples: Samples, codec: str, container: str, bit_rate: int, rate: int = SAMPLE_RATE) -> Samples:
    """Encode and decode by FFmpeg."""
    content, source = io.BytesIO(), soxr.resample(samples, SAMPLE_RATE, rate) if rate != SAMPLE_RATE else samples
    with av.open(content, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate, layout="mono")
        stream.bit_rate = bit_rate
        resampler = av.AudioResampler(stream.codec_context.format.name, "mono", rate, stream.frame_size or 1024)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(source[None], np.float32), "fltp", "mono")
        frame.sample_rate = rate
        for part in (*resampler.resample(frame), *resampler.resample(None)):
            output.mux(stream.encode(part))
        output.mux(stream.encode(None))
    content.seek(0)
    with av.open(content) as opened:
        back = av.AudioResampler("flt", "mono", SAMPLE_RATE)
        frames = [*opened.decode(audio=0), None]
        blocks = [block.to_ndarray()[0] for one in frames for block in back.resample(one)]
    return np.concatenate(blocks).astype(np.float32)


def telephone(samples: Samples, *, sharp: bool = False) -> Samples:
    """300 to 3,400 Hz at 8 kHz in eight bits by the mu law; by filters of 24 dB an octave, or cut off sharply."""
    low = soxr.resample(samples, SAMPLE_RATE, 8_000)
    frequencies = np.fft.rfftfreq(len(low), 1 / 8_000).clip(1.0)
    response = 1 / np.sqrt((1 + (300 / frequencies) ** 8) * (1 + (frequencies / 3_400) ** 8))
    filtered = np.fft.irfft(np.fft.rfft(low) * response, len(low))
    narrow = (band(low, 8_000, 300, 3_400) if sharp else filtered).clip(-1, 1)
    compressed = np.sign(narrow) * np.log1p(255 * np.abs(narrow)) / np.log(256)
    coarse = np.round(compressed * 127) / 127
    expanded = np.sign(coarse) * np.expm1(np.abs(coarse) * np.log(256)) / 255
    return np.asarray(soxr.resample(expanded, 8_000, SAMPLE_RATE), np.float32)


def band(samples: Samples, rate: int, low: float, high: float) -> Samples:
    spectrum = np.fft.rfft(samples)
    frequencies = np.fft.rfftfreq(len(samples), 1 / rate)
    spectrum[(frequencies < low) | (frequencies > high)] = 0
    return np.asarray(np.fft.irfft(spectrum, len(samples)), np.float32)


def noise(samples: Samples, decibels: float) -> Samples:
    """White noise so many decibels below the speech."""
    level = np.std(samples) * 10 ** (-decibels / 20)
    return samples + (level * np.random.default_rng(0).standard_normal(len(samples))).astype(np.float32)


def resampled(samples: Samples, speed: float) -> Samples:
    """Played faster or slower, with its pitch."""
    return np.asarray(soxr.resample(samples, SAMPLE_RATE * speed, SAMPLE_RATE), np.float32)


def stretched(samples: Samples, speed: float) -> Samples:
    """Faster or slower at the same pitch: a phase vocoder."""
    window, hop = 1024, 256
    hann = torch.hann_window(window)
    spectrum = torch.stft(torch.from_numpy(samples), window, hop, window=hann, return_complex=True)
    places = torch.arange(0, spectrum.shape[1] - 1, speed)
    floor = places.long()
    part = (places - floor)[None]
    magnitudes = (1 - part) * spectrum[:, floor].abs() + part * spectrum[:, floor + 1].abs()
    advance = torch.linspace(0, np.pi * hop, window // 2 + 1)[:, None]
    turn = spectrum[:, floor + 1].angle() - spectrum[:, floor].angle() - advance
    turn = turn - 2 * np.pi * torch.round(turn / (2 * np.pi)) + advance
    phases = torch.cat([spectrum[:, :1].angle(), turn[:, :-1]], 1).cumsum(1)
    return np.asarray(torch.istft(torch.polar(magnitudes, phases), window, hop, window=hann).numpy(), np.float32)


def reverb(samples: Samples, seconds: float) -> Samples:
    """A room of noise that decays by 60 dB in so many seconds."""
    time_axis = np.arange(int(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    room = np.random.default_rng(1).standard_normal(len(time_axis)) * 10 ** (-3 * time_axis / seconds) * 0.02
    room[0] = 1.0
    size = len(samples) + len(room)
    return np.asarray(
        np.fft.irfft(np.fft.rfft(samples, size) * np.fft.rfft(room, size), size)[: len(samples)], np.float32
    )


def middle(samples: Samples, seconds: float) -> Samples:
    start = max(0, (len(samples) - int(seconds * SAMPLE_RATE)) // 2)
    return samples[start : start + int(seconds * SAMPLE_RATE)]


def mel_codec() -> Treatment:
    """Through fledgling's own codec and back, as when speech is prepared for training."""
    from myna.models import open_family
    from myna.models.base import require_speaking

    codec = require_speaking(open_family("fledgling")).load_codec(device=torch.device("cpu"))

    def through(samples: Samples) -> Samples:
        at_rate = (
            samples if codec.sample_rate == SAMPLE_RATE else soxr.resample(samples, SAMPLE_RATE, codec.sample_rate)
        )
        whole = len(at_rate) // codec.hop * codec.hop
        decoded = codec.decode(codec.encode(at_rate[None, :whole].astype(np.float32))[0])
        return np.asarray(soxr.resample(decoded, codec.sample_rate, SAMPLE_RATE), np.float32)

    return through


TREATMENTS: dict[str, Treatment] = {
    "none": lambda clip: clip,
    "MP3 64 kbit/s": lambda clip: transcode(clip, "libmp3lame", "mp3", 64_000),
    "Opus 24 kbit/s": lambda clip: transcode(clip, "libopus", "ogg", 24_000),
    "telephone (300-3,400 Hz, 8 kHz, mu-law)": telephone,
}
"""Treatments that happen to recordings on their way."""
ATTACKS: dict[str, Treatment] = {
    "16 bits": lambda clip: (np.round(clip.clip(-1, 1) * 32767) / 32767).astype(np.float32),
    "MP3 32 kbit/s": lambda clip: transcode(clip, "libmp3lame", "mp3", 32_000),
    "AAC 64 kbit/s": lambda clip: transcode(clip, "aac", "adts", 64_000),
    "Opus 12 kbit/s": lambda clip: transcode(clip, "libopus", "ogg", 12_000),
    "telephone, cut off sharply at 300 and 3,400 Hz": lambda clip: telephone(clip, sharp=True),
    "16 kHz": lambda clip: np.asarray(soxr.resample(soxr.resample(clip, 24_000, 16_000), 16_000, 24_000), np.float32),
    "one second of it": lambda clip: middle(clip, 1.0),
    "12 dB quieter": lambda clip: clip * np.float32(0.25),
    "12 dB louder, clipped": lambda clip: (clip * 4).clip(-1, 1),
    "reverberation 0.4 s": lambda clip: reverb(clip, 0.4),
    "white noise 20 dB below": lambda clip: noise(clip, 20),
    "white noise 15 dB below": lambda clip: noise(clip, 15),
    "white noise 10 dB below": lambda clip: noise(clip, 10),
    "2 % faster, with pitch": lambda clip: resampled(clip, 1.02),
    "5 % faster, with pitch": lambda clip: resampled(clip, 1.05),
    "10 % faster, same pitch": lambda clip: stretched(clip, 1.10),
    "10 % slower, same pitch": lambda clip: stretched(clip, 0.90),
    "nothing below 2 kHz": lambda clip: band(clip, SAMPLE_RATE, 2_000, 12_000),
}
"""Attacks that may remove the mark, or be taken for it."""


def corpus_clips(folder: Path, clips: int, speakers: int) -> Iterator[tuple[str, str, Samples]]:
    """Speaker, text and samples of the clips of the speakers with the most."""
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for file in sorted(folder.glob("*.parquet")):
        for row in pq.read_table(file, columns=["speaker", "text", "seconds", "audio"]).to_pylist():
            if MIN_SECONDS <= row["seconds"] <= MAX_SECONDS:
                rows[row["speaker"]].append(row)
    chosen = sorted(rows, key=lambda speaker: (-len(rows[speaker]), speaker))[:speakers]
    taken = [rows[speaker][turn] for turn in range(clips) for speaker in chosen if turn < len(rows[speaker])][:clips]
    for row in taken:
        yield row["speaker"], row["text"], decode(row["audio"]["bytes"])


def decode(content: bytes) -> Samples:
    import tempfile

    with tempfile.NamedTemporaryFile(suffix=".opus") as file:
        file.write(content)
        file.flush()
        return read_audio(Path(file.name), sample_rate=SAMPLE_RATE)


def fledgling_clips(clips: list[tuple[str, str, Samples]]) -> list[tuple[str, str, Samples]]:
    """Speak as many lines, each in the voice of the speaker's clip before it."""
    from myna.data.conversation import AudioClip, Reference
    from myna.speak.engine import encode_clip
    from myna.speak.loading import load_engine
    from myna.speak.request import SpeechRequest

    engine = load_engine(ModelRef.find_model("fledgling"), device="cpu")
    first = {}
    for speaker, text, samples in clips:
        if speaker not in first:
            at_rate = soxr.resample(samples, SAMPLE_RATE, engine.codec.sample_rate).astype(np.float32)
            first[speaker] = Reference(text, AudioClip(speaker, encode_clip(engine.codec, at_rate)))
    requests = [SpeechRequest(text, (first[speaker],), max_seconds=MAX_SECONDS) for speaker, text, _ in clips]
    plans = [engine.plan(request) for request in requests]
    spoken = dict(engine.speak_plans(plans, batch_size=16))
    rate = engine.codec.sample_rate
    return [
        (speaker, text, np.asarray(soxr.resample(spoken[number].samples, rate, SAMPLE_RATE), np.float32))
        for number, (speaker, text, _) in enumerate(clips)
        if len(spoken[number].samples) >= SAMPLE_RATE
    ]


def streamed(samples: Samples, seed: int) -> Samples:
    """Marked as a stream of random pieces."""
    random, stream, pieces, place = np.random.default_rng(seed), StreamWatermark(SAMPLE_RATE), [], 0
    while place < len(samples):
        size = int(random.integers(1, 6_000))
        pieces.append(stream.push(samples[place : place + size]))
        place += size
    return np.concatenate([*pieces, stream.finish()])


def sound_quality(plain: Samples, marked: Samples) -> dict[str, float]:
    from pesq import pesq  # type: ignore[import-not-found]
    from pystoi import stoi  # type: ignore[import-not-found]

    wide = [soxr.resample(one, SAMPLE_RATE, 16_000) for one in (plain, marked)]
    return {"pesq": float(pesq(16_000, *wide, "wb")), "stoi": float(stoi(*wide, 16_000))}


def measure(
    name: str, clips: list[tuple[str, str, Samples]], attacks: dict[str, Treatment], attacked: int, only: str
) -> tuple[dict[str, Any], dict[str, dict[str, list[float]]]]:
    """The figures of a set of clips, and all scores."""
    treatments = TREATMENTS | attacks if not only else {only: (TREATMENTS | attacks)[only]}
    scores: dict[str, dict[str, list[float]]] = {key: {"marked": [], "unmarked": []} for key in treatments}
    quality: dict[str, list[float]] = defaultdict(list)
    with_quality = all(importlib.util.find_spec(package) for package in ("pesq", "pystoi"))
    equal, seconds, spent = 0, 0.0, 0.0
    for number, (_, _, samples) in enumerate(clips):
        start = time.process_time()
        marked = watermark(samples, SAMPLE_RATE)
        spent += time.process_time() - start
        seconds += len(samples) / SAMPLE_RATE
        equal += np.array_equal(streamed(samples, number), marked)
        quality["mark_db"].append(20 * np.log10(np.std(marked - samples) / np.std(samples)))
        for key, value in (sound_quality(samples, marked) if with_quality and number < attacked else {}).items():
            quality[key].append(value)
        for key, treatment in (treatments if number < attacked or only else TREATMENTS).items():
            for kind, clip in (("marked", marked), ("unmarked", samples)):
                scores[key][kind].append(watermark_score(treatment(clip), SAMPLE_RATE))
        if (number + 1) % 20 == 0:
            print(f"{name}: {number + 1} of {len(clips)}", flush=True)
    rows = {}
    for key, kinds in scores.items():
        if not kinds["marked"]:
            continue
        found = [score > MARK_THRESHOLD for score in kinds["marked"]]
        false = [score > MARK_THRESHOLD for score in kinds["unmarked"]]
        rows[key] = {
            "detected": sum(found),
            "clips": len(found),
            "lowest_score": round(min(kinds["marked"]), 4),
            "false_alarms": sum(false),
            "highest_unmarked_score": round(max(kinds["unmarked"]), 4),
        }
    figures = {
        "clips": len(clips),
        "speakers": len({speaker for speaker, _, _ in clips}),
        "seconds": round(seconds, 1),
        "streams_equal_to_files": int(equal),
        "cpu_seconds_per_second": round(spent / seconds, 4),
        "quality": {
            key: {"mean": round(float(np.mean(values)), 3), "worst": round(float(_worst(key, values)), 3)}
            for key, values in quality.items()
        },
        "treatments": rows,
    }
    return figures, scores


def _worst(key: str, values: list[float]) -> float:
    return max(values) if key == "mark_db" else min(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", action="append", default=[], metavar="NAME=FOLDER", required=True)
    parser.add_argument("--fledgling", action="store_true", help="Also speech of fledgling.")
    parser.add_argument("--only-fledgling", action="store_true", help="Nothing else.")
    parser.add_argument("--clips", type=int, default=200)
    parser.add_argument("--speakers", type=int, default=20)
    parser.add_argument("--attacked", type=int, default=24)
    parser.add_argument("--only-treatment", default="", help="On all clips; its figures are added to those of --out.")
    parser.add_argument("--scores", type=Path, help="Write every score to this JSON file too.")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/watermark.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    attacks = ATTACKS | {"fledgling's codec and back": mel_codec()}
    sets = {}
    for corpus in arguments.corpus:
        name, _, folder = corpus.partition("=")
        sets[name] = list(corpus_clips(Path(folder), arguments.clips, arguments.speakers))
    if arguments.fledgling or arguments.only_fledgling:
        spoken = fledgling_clips(next(iter(sets.values())))
        sets = {**({} if arguments.only_fledgling else sets), "fledgling": spoken}
    machine = {"processor": platform.machine(), "torch": torch.__version__, "threads": 1}
    result: dict[str, Any] = {"mark": MARK_NAME, "threshold": MARK_THRESHOLD, "machine": machine, "sets": {}}
    all_scores = {}
    for name, clips in sets.items():
        result["sets"][name], all_scores[name] = measure(
            name, clips, attacks, arguments.attacked, arguments.only_treatment
        )
        if arguments.scores is not None:
            arguments.scores.write_text(json.dumps(all_scores), encoding="utf-8")
    if arguments.out.is_file():  # other sets of the same mark stay
        known = json.loads(arguments.out.read_text(encoding="utf-8"))
        if (known["mark"], known["threshold"]) == (MARK_NAME, MARK_THRESHOLD):
            for name in arguments.only_treatment and known["sets"].keys() & result["sets"].keys():
                treatments = known["sets"][name]["treatments"] | result["sets"][name]["treatments"]
                result["sets"][name] = known["sets"][name] | {"treatments": treatments}
            result["sets"] = known["sets"] | result["sets"]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    save_figures(arguments.out, result)
    for name, found in result["sets"].items():
        print(f"\n{name}: {found['clips']} clips of {found['speakers']} speakers, {found['quality']}")
        for treatment, row in found["treatments"].items():
            print(
                f"  {treatment:42} {row['detected']:4}/{row['clips']}  lowest {row['lowest_score']:.2f}  "
                f"false {row['false_alarms']}/{row['clips']}"
            )


if __name__ == "__main__":
    main()
