"""Planted-fault recordings for `myna curate`: podcasts of three voices with known turns, and faults at known seconds.

python benchmarks/planted_faults.py --corpus CORPUS --out planted

CORPUS holds en-natural/*.parquet and en-real/*.parquet with the columns id, text, speaker, seconds and audio. Music
comes from two Debian packages (`apt-get download`), or from the audio files under --music. `truth.json` names for every
file its utterances, speakers, texts and faults, in seconds. `--long-hours 3` makes one file of that length beside them,
half of it of real people, in a folder `long` of the same form.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow.parquet as pq
import soundfile
import soxr  # type: ignore[import-untyped]

from myna.audio.files import Samples, read_audio
from myna.audio.signal_measures import speech_spans

SAMPLE_RATE = 24_000
MUSIC_PACKAGES = ("extremetuxracer-data", "frozen-bubble-data")
MIN_MUSIC_SECONDS = 30.0
OVERLAP_SHARE = 0.04
"""Share of the speech of a podcast."""
FAULT_SECONDS = 60.0
"""Seconds of a stretch with a fault, or a third of its recording where that is less."""
JINGLE_SECONDS = 20.0
MUSIC_SNR_DB, NOISE_SNR_DB, CLIPPING_DB = 10.0, 5.0, 12.0
NARROW_RATE = 8_000
ROOM_TONE = 10 ** (-75 / 20)
"""Amplitude of the noise between turns: digital silence would be too easy."""
PEAK = 0.7


@dataclass(frozen=True)
class SpokenClip:
    speaker: str
    text: str
    samples: Samples
    exact: bool
    """Whether the text is what was said."""
    speech: tuple[tuple[float, float], ...]
    """Spans of sound in seconds, without the pauses within it."""


@dataclass(frozen=True)
class TrueUtterance:
    start: float
    end: float
    speaker: str
    text: str
    exact: bool
    speech: tuple[tuple[float, float], ...]

    def shifted(self, seconds: float) -> TrueUtterance:
        spans = tuple((start + seconds, end + seconds) for start, end in self.speech)
        return replace(self, start=self.start + seconds, end=self.end + seconds, speech=spans)


@dataclass(frozen=True)
class PlantedFault:
    kind: str
    start: float
    end: float

    def shifted(self, seconds: float) -> PlantedFault:
        return replace(self, start=self.start + seconds, end=self.end + seconds)


@dataclass(frozen=True)
class PlantedRecording:
    samples: Samples
    utterances: tuple[TrueUtterance, ...] = ()
    faults: tuple[PlantedFault, ...] = ()

    @property
    def seconds(self) -> float:
        return len(self.samples) / SAMPLE_RATE

    def with_fault(self, kind: str, start: float, end: float, samples: Samples) -> PlantedRecording:
        return replace(self, samples=samples, faults=(*self.faults, PlantedFault(kind, start, end)))

    def after(self, other: PlantedRecording) -> PlantedRecording:
        """The other recording, then this one."""
        shift = other.seconds
        utterances = [one.shifted(shift) for one in self.utterances]
        faults = [one.shifted(shift) for one in self.faults]
        return PlantedRecording(
            np.concatenate([other.samples, self.samples]),
            (*other.utterances, *utterances),
            (*other.faults, *faults),
        )


@dataclass
class Corpus:
    """Clips by speaker, in an order of the seed's; every speaker is used in one recording only."""

    clips: dict[str, list[dict[str, Any]]]
    exact: bool
    max_clips: int | None = None
    used: set[str] = field(default_factory=set)

    @classmethod
    def open(
        cls, files: Iterable[Path], rng: np.random.Generator, max_clips: int | None, source: str | None = None
    ) -> Corpus:
        """The half of the speakers that has most speech, shuffled."""
        clips: dict[str, list[dict[str, Any]]] = {}
        for file in files:
            for row in pq.read_table(file).to_pylist():
                if source is None or row["source"] == source:
                    clips.setdefault(row["speaker"], []).append(row)
        longest = sorted(clips, key=lambda name: (-sum(row["seconds"] for row in clips[name]), name))
        order = rng.permutation(longest[: len(longest) // 2]).tolist()
        return cls({name: clips[name] for name in order}, source is None, max_clips)

    def take(self, speakers: int) -> list[list[SpokenClip]]:
        chosen = [name for name in self.clips if name not in self.used][:speakers]
        self.used.update(chosen)
        return [list(self._decoded(name)) for name in chosen]

    def _decoded(self, speaker: str) -> Iterator[SpokenClip]:
        for row in self.clips[speaker][: self.max_clips]:
            samples, rate = soundfile.read(io.BytesIO(row["audio"]["bytes"]), dtype="float32")
            samples = soxr.resample(samples, rate, SAMPLE_RATE)
            spans = speech_spans(samples, SAMPLE_RATE)
            if spans:
                first, last = (round(time * SAMPLE_RATE) for time in (spans[0][0], spans[-1][1]))
                level = PEAK / max(1e-3, float(np.abs(samples).max()))
                speech = tuple((start - spans[0][0], end - spans[0][0]) for start, end in spans)
                yield SpokenClip(speaker, row["text"], samples[first:last] * level, self.exact, speech)


def podcast(voices: list[list[SpokenClip]], rng: np.random.Generator) -> PlantedRecording:
    """Turns of one to three clips in random order, pauses between them, and now and then an interruption."""
    queues = [list(voice) for voice in voices]
    turns: list[list[SpokenClip]] = []
    last = -1
    while remaining := [index for index, queue in enumerate(queues) if queue]:
        others = [index for index in remaining if index != last] or remaining
        last = int(rng.choice(others))
        turns.append([queues[last].pop(0) for _ in range(min(len(queues[last]), int(rng.integers(1, 4))))])
    total = sum(len(clip.samples) for turn in turns for clip in turn)
    wave = np.zeros(total + len(turns) * 2 * SAMPLE_RATE + 10 * SAMPLE_RATE * len(turns), np.float32)
    utterances: list[TrueUtterance] = []
    faults: list[PlantedFault] = []
    position, overlapped, spoken = round(0.5 * SAMPLE_RATE), 0, 0
    for index, turn in enumerate(turns):
        changed = index > 0 and turns[index - 1][0].speaker != turn[0].speaker
        for number, clip in enumerate(turn):
            start = position
            previous = utterances[-1] if utterances else None
            if number == 0 and changed and previous and overlapped < OVERLAP_SHARE * spoken:
                wanted = round(float(rng.uniform(0.6, 1.5)) * SAMPLE_RATE)
                length = min(wanted, len(clip.samples) // 2, round((previous.end - previous.start) * SAMPLE_RATE) // 2)
                start = round(previous.end * SAMPLE_RATE) - length
                faults.append(PlantedFault("overlap", start / SAMPLE_RATE, previous.end))
                overlapped += length
            end = start + len(clip.samples)
            wave[start:end] += clip.samples
            seconds = len(clip.samples) / SAMPLE_RATE
            utterance = TrueUtterance(0.0, seconds, clip.speaker, clip.text, clip.exact, clip.speech)
            utterances.append(utterance.shifted(start / SAMPLE_RATE))
            spoken += len(clip.samples)
            position = end + round(float(rng.uniform(0.25, 0.9)) * SAMPLE_RATE)
    wave = wave[: position + SAMPLE_RATE // 2]
    wave += (ROOM_TONE * rng.standard_normal(len(wave))).astype(np.float32)
    return PlantedRecording(wave / max(1.0, float(np.abs(wave).max())), tuple(utterances), tuple(faults))


def narrow_stretch(one: PlantedRecording) -> PlantedRecording:
    """A stretch as it came through a telephone's sample rate."""
    return _change(
        one,
        "narrow band",
        lambda part: soxr.resample(soxr.resample(part, SAMPLE_RATE, NARROW_RATE), NARROW_RATE, SAMPLE_RATE),
    )


def clipped_stretch(one: PlantedRecording) -> PlantedRecording:
    return _change(one, "clipped", lambda part: np.clip(part * 10 ** (CLIPPING_DB / 20), -PEAK, PEAK))


def noisy_stretch(one: PlantedRecording, rng: np.random.Generator) -> PlantedRecording:
    noise = rng.standard_normal(round(FAULT_SECONDS * SAMPLE_RATE)).astype(np.float32)
    return _change(one, "noisy", lambda part: part + _at_snr(part, noise[: len(part)], NOISE_SNR_DB))


def music_stretch(one: PlantedRecording, music: Samples) -> PlantedRecording:
    return _change(one, "music", lambda part: part + _at_snr(part, music[: len(part)], MUSIC_SNR_DB))


def jingle(music: Samples) -> PlantedRecording:
    samples = music[: round(JINGLE_SECONDS * SAMPLE_RATE)] * (PEAK / float(np.abs(music).max()))
    return PlantedRecording(samples, (), (PlantedFault("jingle", 0.0, len(samples) / SAMPLE_RATE),))


def repeated(one: PlantedRecording) -> PlantedRecording:
    """A stretch of a recording again, from one pause to another, as a recording of its own that is all duplicate."""
    start, end = one.seconds / 3, one.seconds / 3 + min(FAULT_SECONDS, one.seconds / 3)
    inside = [each for each in one.utterances if each.start >= start and each.end <= end]
    first, last = inside[0].start - 0.1, max(each.end for each in inside) + 0.1
    samples = one.samples[round(first * SAMPLE_RATE) : round(last * SAMPLE_RATE)]
    shifted = [each.shifted(-first) for each in inside]
    faults = [each.shifted(-first) for each in one.faults]
    faults = [each for each in faults if each.start >= 0 and each.end <= last - first]
    return PlantedRecording(samples, tuple(shifted), (*faults, PlantedFault("duplicate", 0.0, last - first)))


def _change(one: PlantedRecording, kind: str, change: Any) -> PlantedRecording:
    start = one.seconds / 3
    end = start + min(FAULT_SECONDS, one.seconds / 3)
    first, last = round(start * SAMPLE_RATE), round(end * SAMPLE_RATE)
    samples = one.samples.copy()
    part = change(samples[first:last])[: last - first]  # resampled, it may be a sample longer or shorter
    samples[first : first + len(part)] = part
    return one.with_fault(kind, start, end, samples.astype(np.float32))


def _at_snr(speech: Samples, other: Samples, snr_db: float) -> Samples:
    """The other sound as loud as the ratio of mean powers asks for. Speech is measured where it is."""
    spans = speech_spans(speech, SAMPLE_RATE)
    spoken = np.concatenate([speech[round(a * SAMPLE_RATE) : round(b * SAMPLE_RATE)] for a, b in spans] or [speech])
    ratio = np.sqrt((spoken**2).mean() / (other**2).mean() / 10 ** (snr_db / 10))
    return np.asarray(other * ratio, np.float32)


def encode(path: Path, samples: Samples, codec: str, bit_rate: int, rate: int = SAMPLE_RATE) -> None:
    """Write mono audio with a codec of FFmpeg, in the container of the suffix."""
    pcm = (np.clip(samples, -1, 1) * 32767).astype(np.int16)[None]
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(codec, rate=rate)
        stream.bit_rate, stream.layout = bit_rate, "mono"
        stream.codec_context.open()
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(pcm), format="s16", layout="mono")
        frame.sample_rate = SAMPLE_RATE
        resampler = av.AudioResampler(
            stream.codec_context.format.name, "mono", rate, frame_size=stream.codec_context.frame_size or 1024
        )
        for resampled in [*resampler.resample(frame), *resampler.resample(None)]:
            container.mux(stream.encode(resampled))
        container.mux(stream.encode(None))


def encode_silent_video(path: Path) -> None:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for index in range(20):
            image = np.full((64, 64, 3), index * 10, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode(None))


def download_music(folder: Path) -> list[Path]:
    """Sound tracks of two games, out of their Debian packages, which are unpacked and not installed."""
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["apt-get", "download", *MUSIC_PACKAGES], cwd=scratch, check=True, capture_output=True)
        for package in sorted(Path(scratch).glob("*.deb")):
            subprocess.run(["dpkg", "-x", str(package), str(folder)], check=True)
    return music_files(folder)


def music_files(folder: Path) -> list[Path]:
    found = sorted(file for file in folder.rglob("*") if file.suffix in (".ogg", ".mp3", ".flac"))
    return [file for file in found if soundfile.info(file).duration >= MIN_MUSIC_SECONDS]


def read_track(file: Path) -> Samples:
    """The first 90 s of a piece of music from its first sound on: the silence before it is no fault."""
    track = read_audio(file, sample_rate=SAMPLE_RATE, span=(0.0, 90.0))
    return track[round(speech_spans(track, SAMPLE_RATE)[0][0] * SAMPLE_RATE) :]


def build(corpus: Path, out: Path, music: list[Path], seed: int, max_clips: int | None, long_hours: float) -> None:
    rng = np.random.default_rng(seed)
    natural = Corpus.open(sorted((corpus / "en-natural").glob("*.parquet")), rng, max_clips)
    real = Corpus.open(sorted((corpus / "en-real").glob("*.parquet")), rng, max_clips, "speechocean762")
    tracks = [read_track(file) for file in music if _is_long(file, 90)]

    def episode() -> PlantedRecording:
        return podcast(natural.take(3), rng)

    audio = out / "audio"
    audio.mkdir(parents=True)
    truth: dict[str, Any] = {}

    def add(name: str, one: PlantedRecording, codec: str = "", bit_rate: int = 0, rate: int = SAMPLE_RATE) -> None:
        path = audio / name
        if codec:
            encode(path, one.samples, codec, bit_rate, rate)
        else:
            soundfile.write(path, one.samples, SAMPLE_RATE, subtype="PCM_16")
        truth[name] = {
            "seconds": one.seconds,
            "utterances": [asdict(each) for each in one.utterances],
            "faults": [asdict(each) for each in sorted(one.faults, key=lambda fault: fault.start)],
        }

    first = episode()
    add("a_clean.wav", first)
    add("b_clean.m4a", episode(), "aac", 96_000)
    add("c_clean.webm", episode(), "libopus", 48_000, 48_000)
    add("d_clean_32kbps.mp3", episode(), "libmp3lame", 32_000)
    phone = episode()
    add(
        "e_phone.amr",
        replace(phone, faults=(*phone.faults, PlantedFault("narrow band", 0.0, phone.seconds))),
        "libopencore_amrnb",
        12_200,
        8_000,
    )
    add("f_narrow_stretch.wav", narrow_stretch(episode()))
    add("g_clipped_stretch.wav", clipped_stretch(episode()))
    add("h_music.wav", music_stretch(episode(), tracks[0]).after(jingle(tracks[1])))
    add("i_music.mp3", music_stretch(episode(), tracks[2]).after(jingle(tracks[3])), "libmp3lame", 96_000)
    add("j_noise.wav", noisy_stretch(episode(), rng))
    add("k_repeated_minute.mp3", repeated(first).after(episode()), "libmp3lame", 64_000)
    add("l_real_voices.wav", podcast(real.take(3), rng))
    add("m_silence.wav", PlantedRecording((ROOM_TONE * rng.standard_normal(60 * SAMPLE_RATE)).astype(np.float32)))
    shutil.copy(audio / "a_clean.wav", audio / "n_copy_of_a.wav")
    truth["n_copy_of_a.wav"] = truth["a_clean.wav"] | {
        "faults": [asdict(PlantedFault("duplicate", 0.0, first.seconds))]
    }
    add("o_truncated.m4a", episode(), "aac", 96_000)
    content = (audio / "o_truncated.m4a").read_bytes()
    (audio / "o_truncated.m4a").write_bytes(content[: len(content) // 2])  # its index is at the end
    truth["o_truncated.m4a"] = {"seconds": 0.0, "utterances": [], "faults": []}
    encode_silent_video(audio / "p_video_without_sound.mp4")
    truth["p_video_without_sound.mp4"] = {"seconds": 0.0, "utterances": [], "faults": []}
    (out / "truth.json").write_text(json.dumps(truth, indent=1) + "\n", encoding="utf-8")
    if long_hours:
        write_long(out, natural, real, tracks, long_hours)


def write_long(out: Path, natural: Corpus, real: Corpus, tracks: list[Samples], hours: float) -> None:
    """One MP3 of many hours with its truth: podcasts of synthetic and of real voices in turn, jingles between them.

    Where the corpus has no more speakers they say all of it again, and that is a repeat.
    """
    rng = np.random.default_rng(0)
    path = out / "long" / "audio" / "long.mp3"
    path.parent.mkdir(parents=True)
    utterances, faults, position, episode = [], [], 0.0, 0
    heard: set[str] = set()
    with soundfile.SoundFile(path, "w", SAMPLE_RATE, 1, format="MP3") as file:
        while position < 3600 * hours:
            corpus = (natural, real)[episode % 2]
            if len(corpus.used) + 3 > len(corpus.clips):
                corpus.used.clear()
            one = podcast(corpus.take(3), rng)
            if episode % 4 == 0:
                one = one.after(jingle(tracks[episode // 4 % len(tracks)]))
            again = [
                PlantedFault("duplicate", each.start, each.end) for each in one.utterances if each.speaker in heard
            ]
            one = replace(one, faults=(*one.faults, *again))
            heard |= {each.speaker for each in one.utterances}
            file.write(one.samples)
            utterances += [asdict(each.shifted(position)) for each in one.utterances]
            faults += [asdict(each.shifted(position)) for each in one.faults]
            position += one.seconds
            episode += 1
    truth = {path.name: {"seconds": position, "utterances": utterances, "faults": faults}}
    (out / "long" / "truth.json").write_text(json.dumps(truth, indent=1) + "\n", encoding="utf-8")


def _is_long(file: Path, seconds: float) -> bool:
    return float(soundfile.info(file).duration) > seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="folder with en-natural and en-real")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--music", type=Path, help="folder of music; by default two Debian packages are downloaded")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-clips", type=int, help="clips of each speaker; 5 make a set of ten minutes")
    parser.add_argument("--long-hours", type=float, default=0.0, help="length of long/audio/long.mp3; by default none")
    arguments = parser.parse_args()
    if arguments.out.exists():
        parser.error(f"{arguments.out} exists: choose another folder, or remove it")
    with tempfile.TemporaryDirectory() as scratch:
        music = music_files(arguments.music) if arguments.music else download_music(Path(scratch))
        if sum(_is_long(file, 90) for file in music) < 4:
            parser.error("at least four pieces of music of 90 s are needed")
        build(arguments.corpus, arguments.out, music, arguments.seed, arguments.max_clips, arguments.long_hours)
    truth = json.loads((arguments.out / "truth.json").read_text(encoding="utf-8"))
    seconds = sum(one["seconds"] for one in truth.values())
    print(f"{arguments.out}: {len(truth)} recordings, {seconds / 60:.0f} minutes; truth.json says what is in them")


if __name__ == "__main__":
    main()
