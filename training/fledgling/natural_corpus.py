"""Corpus of natural speech by Kokoro-82M, with many blended voices, as parquet files like the corpus `en-natural`.

python training/fledgling/natural_corpus.py --texts data/fledgling/texts --out data/fledgling/natural \\
    --hours 10 --speakers 600
python training/fledgling/natural_corpus.py --texts data/fledgling/texts --out data/fledgling/natural_augmented \\
    --augment --hours 150 --speakers 4000 --device cuda --weights data/fledgling/kokoro --jobs 7 --seconds 300

Two cores make about three hours an hour; a GPU is hundreds of times as fast. Interrupted, it continues when it is run
again, and loses some minutes at most. Columns: id, text, speaker, language, seconds, audio
{bytes, path}: OGG/Opus, or WAV on a GPU, where encoding would take longer than synthesis. Held-out speakers are
among the others; `augment_natural.py` separates them. With `--augment` no parquet files are written, but the folder
that `augment_natural.py` would make of them: no audio is written and read twice.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import soundfile

from augment_natural import SEED, augmented_unwritten_clips
from corpus_making.corpus_folder import CorpusFolder
from corpus_making.held_out import is_held_out
from corpus_making.kokoro import SAMPLE_RATE, Kokoro, KokoroSpeaker, OnnxKokoro, Samples, SynthesisRequest, joined_model
from corpus_making.lines import DECLARATIONS, TextPool
from corpus_making.loudness import speaker_formant_factor, speaker_tract_factor
from myna.core.errors import ConfigError, MynaError
from myna.core.io import atomic_write

MIN_CLIPS, SPEAKERS_PER_FILE, SPEAKERS_PER_TASK = 6, 2, 12
"""Clips of a speaker, speakers of a file, and speakers that take turns where no file is to be filled."""
EXPECTED_CLIP_SECONDS, MAX_SECONDS = 4.2, 32.0
"""Seconds of a clip, which has some 4.7 in the mean: how many are config for at once is counted with the first, since a
few too many cost less than another round. What is longer than the second is left out."""
TEMPO_EXPONENT = 0.7
"""Exponent by which the tempo that a smaller or larger speaker is played at is undone beforehand: small people do
not speak that much faster."""
MAX_HELD_OUT_SPEAKERS = 60
"""More held-out speakers would not make the evaluation better."""
WRITER_THREADS = 4
"""Threads of a process that write, since a disk may take its time for every file."""
SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("id", "text", "speaker", "language")),
        ("seconds", pa.float32()),
        ("audio", pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
    ]
)


@dataclass(frozen=True, slots=True)
class CorpusConfig:
    """Settings of the corpus."""

    hours: float
    speakers: int
    seed: int
    languages: tuple[str, ...] = ()
    """Languages of the speakers who do not speak English."""
    language_share: float = 0.5
    """Share of these speakers, where there are such languages."""

    def settings(self) -> dict[str, Any]:
        """Settings as they are kept in the folder; older folders have no languages."""
        settings = asdict(self)
        if not self.languages:
            del settings["languages"], settings["language_share"]
        return settings

    def language(self, name: str) -> str:
        rng = random.Random(f"{self.seed}/language/{name}")
        return rng.choice(self.languages) if self.languages and rng.random() < self.language_share else "en"

    def names(self) -> list[str]:
        names = [f"kokoro{self.seed}-{number:04d}" for number in range(self.speakers)]
        held_out = set(list(filter(is_held_out, names))[:MAX_HELD_OUT_SPEAKERS])
        return [name for name in names if name in held_out or not is_held_out(name)]

    def parts(self) -> Iterator[tuple[str, list[str]]]:
        names = self.names()
        for at in range(0, len(names), SPEAKERS_PER_FILE):
            yield f"part-{at // SPEAKERS_PER_FILE:04d}.parquet", names[at : at + SPEAKERS_PER_FILE]


@dataclass(frozen=True, slots=True)
class SynthesisConfig:
    """Settings of the synthesis."""

    texts: Path
    packages: Path
    weights: tuple[Path, ...]
    device: str
    exactly: bool = False
    """Whether to use single precision, without our own kernels."""
    channels: bool = True
    """Whether speech that is augment at once goes through microphones and rooms."""

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"


@cache
def _open_tools(synthesis: SynthesisConfig) -> tuple[TextPool, Kokoro]:
    """Open texts and network of one process, on one thread: two processes get more done than two threads."""
    lines = TextPool.read(synthesis.texts)
    if not synthesis.on_gpu:
        return lines, OnnxKokoro(synthesis.packages, threads=1)
    import torch

    from corpus_making.kokoro_torch import TorchKokoro

    torch.set_num_threads(1)
    return lines, TorchKokoro(synthesis.weights, synthesis.device, synthesis.exactly)


def make_parquet_file(
    config: CorpusConfig, synthesis: SynthesisConfig, until: float, file: Path, names: list[str]
) -> float:
    """One parquet file; how many seconds it holds. None is begun after the moment `until`."""
    if time.time() >= until:
        return 0.0
    lines, kokoro = _open_tools(synthesis)
    rows = record_rows(config, lines, kokoro, names, "wav" if synthesis.on_gpu else "opus")
    with atomic_write(file) as temporary:  # sound is not made smaller by what makes columns smaller
        pq.write_table(pa.Table.from_pylist(rows, SCHEMA), temporary, compression="none", use_dictionary=False)
    return float(sum(row["seconds"] for row in rows))


def make_augmented(
    config: CorpusConfig, synthesis: SynthesisConfig, until: float, out: Path, names: list[str]
) -> float:
    """Synthesize and augment some speakers; seconds of speech. None is begun after the moment `until`."""
    if time.time() >= until:
        return 0.0
    lines, kokoro = _open_tools(synthesis)
    corpus = CorpusFolder(out)

    def write(session: SpeakerSession) -> float:
        name = session.speaker.name
        clips = augmented_unwritten_clips(name, session.clips, channels=synthesis.channels)
        return corpus.add(name, session.language, clips)

    with ThreadPoolExecutor(WRITER_THREADS) as pool:
        return sum(pool.map(write, record_sessions(config, lines, kokoro, names, shaped=synthesis.channels)))


def make(
    config: CorpusConfig,
    synthesis: SynthesisConfig,
    out: Path,
    jobs: int,
    seconds: float = math.inf,
    *,
    augment: bool = False,
) -> float:
    """Make speech for so many seconds; return how much was made and what it takes to finish what was begun then."""
    corpus = CorpusFolder(out)
    settings = config.settings() | ({"augment": True} if augment else {"speakers of a part": SPEAKERS_PER_FILE})
    if augment and synthesis.channels:
        settings["channels"] = True  # left out where there are none: older folders have no such key
    corpus.begin(settings)
    if not synthesis.on_gpu:
        joined_model(synthesis.packages)  # by one process, before the others look for it
    if augment:
        lacking = [name for name in config.names() if not corpus.has(name)]
        missing = [(out, lacking[at : at + SPEAKERS_PER_TASK]) for at in range(0, len(lacking), SPEAKERS_PER_TASK)]
    else:
        missing = [(out / file, names) for file, names in config.parts() if not (out / file).is_file()]
    work = make_augmented if augment else make_parquet_file
    began, until, made, number = time.monotonic(), time.time() + seconds, 0.0, 0
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        begun = {pool.submit(work, config, synthesis, until, where, names): names for where, names in missing}
        for done in as_completed(begun):
            length = done.result()
            if length == 0:
                continue
            number, made = number + 1, made + length
            pace = made / (time.monotonic() - began)
            speakers = f"{begun[done][0]} to {begun[done][-1]}"
            so_far = f"{number} of {len(missing)}; {made / 3600:.2f} h now, {pace:.2f} x real time"
            print(f"{speakers}: {so_far}", flush=True)
    if augment:
        for part, count in corpus.finish().items():
            print(f"{out / part}: {count} clips", flush=True)
    return made


@dataclass(slots=True)
class SpeakerSession:
    """Clips of one speaker, synthesized until there are enough."""

    speaker: KokoroSpeaker
    rng: random.Random
    wanted: float
    """Seconds."""
    used_texts: set[str] = field(default_factory=set)
    clips: list[tuple[str, Samples]] = field(default_factory=list)
    seconds: float = 0.0
    language: str = "en"
    speed: float = 1.0
    """Factor on the speaker's own."""
    formants: float = 1.0

    @property
    def enough(self) -> bool:
        return self.seconds >= self.wanted and len(self.clips) >= MIN_CLIPS

    def requests(self, lines: TextPool, most: int) -> Iterator[SynthesisRequest]:
        """Lines for about what is still wanted, each of them new."""
        count = max(math.ceil((self.wanted - self.seconds) / EXPECTED_CLIP_SECONDS), MIN_CLIPS - len(self.clips), 1)
        for _ in range(min(count, most)):
            text = self._draw(lines)
            while text in self.used_texts:
                text = self._draw(lines)
            self.used_texts.add(text)
            speed = self.speed * self.speaker.speed * self.rng.uniform(0.95, 1.05)
            yield SynthesisRequest(text, self.speaker, speed, self.formants, self.language)

    def _draw(self, lines: TextPool) -> str:
        if self.language == "en":
            return lines.draw_natural(self.rng)
        # There are some hundred lines of each other language: two in a new order are a new line.
        return " ".join(lines.draw(self.language, self.rng) for _ in range(1 if self.rng.random() < 0.9 else 2))

    def add_clip(self, text: str, samples: Samples) -> None:
        if 0 < len(samples) <= MAX_SECONDS * SAMPLE_RATE:
            self.seconds += len(samples) / SAMPLE_RATE
            self.clips.append((text, samples))

    def rows(self, format: str) -> Iterator[dict[str, Any]]:
        name = self.speaker.name
        for number, (text, samples) in enumerate(self.clips):
            id = f"{name}-{number:03d}"
            audio = {"bytes": _encoded(samples, format), "path": f"{id}.{format}"}
            length = len(samples) / SAMPLE_RATE
            yield {
                **{"id": id, "text": text, "speaker": name, "language": self.language, "seconds": length},
                "audio": audio,
            }


def record_sessions(
    config: CorpusConfig, lines: TextPool, kokoro: Kokoro, names: Sequence[str], *, shaped: bool = False
) -> list[SpeakerSession]:
    """All clips of these speakers, synthesized in batches over speakers. `shaped`: with vocal tracts of their own; what
    `augment_natural.py` does to a speaker's size is foreseen in the tempo."""
    sessions = [
        SpeakerSession(
            KokoroSpeaker.draw(name, kokoro.voices, config.seed),
            random.Random(f"{config.seed}/clips/{name}"),
            config.hours * 3600 / config.speakers,
            language=config.language(name),
            speed=speaker_tract_factor(name, SEED) ** TEMPO_EXPONENT if shaped else 1.0,
            formants=speaker_formant_factor(name, SEED) if shaped else 1.0,
        )
        for name in names
    ]
    while waiting := [session for session in sessions if not session.enough]:
        turns = [(session, request) for session in waiting for request in session.requests(lines, kokoro.batch_size)]
        sounds = kokoro.say([request for _, request in turns])
        for (session, request), samples in zip(turns, sounds, strict=True):
            session.add_clip(request.text, samples)
    return sessions


def record_rows(
    config: CorpusConfig, lines: TextPool, kokoro: Kokoro, names: Sequence[str], format: str = "opus"
) -> list[dict[str, Any]]:
    """Return the clips as rows of a table."""
    return [row for session in record_sessions(config, lines, kokoro, names) for row in session.rows(format)]


def _encoded(samples: Samples, format: str) -> bytes:
    """Opus takes about 35 kilobits a second, and is transparent for speech at this rate."""
    file = io.BytesIO()
    container, subtype = {"opus": ("OGG", "OPUS"), "wav": ("WAV", "PCM_16")}[format]
    soundfile.write(file, samples.clip(-1, 1), SAMPLE_RATE, format=container, subtype=subtype)
    return file.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True, help="folder made by extract_texts.py")
    parser.add_argument("--out", type=Path, required=True, help="folder for the parquet files")
    parser.add_argument(
        "--packages", type=Path, default=Path("data/fledgling/packages"), help="where archives are kept"
    )
    parser.add_argument("--hours", type=float, default=10.0)
    parser.add_argument("--speakers", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--languages", nargs="+", default=[], choices=DECLARATIONS, metavar="LANGUAGE", help="of some of the speakers"
    )
    parser.add_argument("--language-share", type=float, default=0.5, help="share of those speakers")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="onnxruntime, or PyTorch on a card")
    parser.add_argument(
        "--weights", type=Path, nargs="+", default=[], help="for --device cuda: folders with what export_kokoro.py made"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no part after so many")
    parser.add_argument("--augment", action="store_true", help="write the folder that augment_natural.py would make")
    parser.add_argument("--exactly", action="store_true", help="for --device cuda: in fp32, without kernels of our own")
    parser.add_argument("--clean", action="store_true", help="for --augment: no channel simulation")
    args = parser.parse_args()
    config = CorpusConfig(args.hours, args.speakers, args.seed, tuple(args.languages), args.language_share)
    synthesis = SynthesisConfig(
        args.texts, args.packages, tuple(args.weights), args.device, args.exactly, not args.clean
    )
    try:
        if synthesis.on_gpu and not synthesis.weights:
            raise ConfigError("--device cuda needs weights", hint="--weights FOLDER, as export_kokoro.py made it")
        make(config, synthesis, args.out, args.jobs, args.seconds, augment=args.augment)
    except MynaError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
