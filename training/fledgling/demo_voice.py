"""Recordings of `myna demo`: three minutes of Kokoro-82M in a voice and with sentences of no fledgling corpus.

python training/fledgling/demo_voice.py --out src/myna/demo/recordings

Writes clips as OGG/Opus and `manifest.jsonl`, in which some are marked as held out, for the demo's evaluation. About
four minutes of one core. The same seed gives the same clips with the same version of the encoder.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import soundfile

from corpus_making.held_out import is_held_out_line
from corpus_making.kokoro import (
    DEMO_VOICES,
    RESERVED_VOICES,
    SAMPLE_RATE,
    KokoroSpeaker,
    OnnxKokoro,
    Samples,
    SynthesisRequest,
)
from myna.core.errors import DataError, MynaError
from myna.core.io import atomic_write
from myna.data.manifest import Utterance, write_manifest

SPEED_FACTORS = (0.95, 1.05)
TARGET_RMS = 0.08
LEADING_SECONDS, TRAILING_SECONDS = 0.1, 0.25
"""Seconds of silence that are left at both ends."""
SILENCE_RATIO = 0.01
"""Relative to the loudest sample."""

TRAIN_SENTENCES = (
    "A bass voice is lower than a baritone voice.",
    "A collar of flowers was placed about the neck of the winning horse.",
    "A great congregation of birds flew over.",
    "A light lilting voice like a silver bell.",
    "A particular bird, exactly and tersely described in the book of birds.",
    "A sensed presence in the room raised goosebumps on her arms.",
    "Abdominal breathing is practiced by singers.",
    "An outfitter provided everything needed for the safari.",
    "Careful cleaning was responsible for the enhanced value of the painting.",
    "Conserve your energy for the ascent to the summit.",
    "Distinguished English subjects are buried in Westminster Abbey.",
    "Don't forget to call the chairman of the board to the meeting!",
    "Granted that it is dangerous, all the same I still want to go.",
    "He asks questions that are germane and central to the issue.",
    "He burst out of the house into the cool night.",
    "He calculated the circumference of the circle.",
    "He enjoyed a sense of peace and protection in his new home.",
    "He gave a speech as part of his installation into the hall of fame.",
    "He grimaced when he saw the amount of homework he had to do.",
    "He was famous for the regularity of his habits.",
    "His voice wobbled with restrained emotion.",
    "How many people are carried on the payroll?",
    "I am proud of my contribution in advancing the project.",
    "I have given this tailor my custom for many years.",
    "I lost my wallet; this was during the visit to my parents' house.",
    "I saw through his little game from the start.",
    "Interchange this screw for one of a smaller size.",
    "It is the university that gives the scene its stately splendor.",
    "John was ruled out as a possible suspect because he had a strong alibi.",
    "Let's use these intelligence tests judiciously.",
    "Many countries in Asia are now developing at a very fast pace.",
    "My younger brother often tagged along when I went out with my friends.",
    "Noble metals include gold and silver and platinum.",
    "Scramble the message so that nobody can understand it.",
    "She nudged my elbow when she saw her friend enter the restaurant.",
    "The equator is the boundary between the northern and southern hemispheres.",
    "The film cut back to an earlier event in the story.",
    "The movers were very careful with the grand piano.",
    "The opening of his arms was the sign I was waiting for.",
    "The planes don't connect and you will have to wait for four hours.",
    "The play was dramatically interesting, but the direction was bad.",
    "The skyline is easily discernible even at a distance of several miles.",
    "There was never an occasion for her to demonstrate her skill.",
    "They heard a live rendition of three pieces by Schubert.",
    "They used to drive the cattle across the open range every spring.",
    "When I called her name, she gave me a blank look, as though she didn't know me.",
    "You must take the receiver off the hook before you dial.",
)
"""Examples from WordNet that no corpus of fledgling reads: whole, plain sentences, which people would say."""
HELD_OUT_SENTENCES = (
    "After fishing for an hour he still had not had a bite.",
    "I guess I can squeeze by on this lousy salary.",
    "I kept your little secret to myself all these years.",
    "In this life nothing is certain but death and taxes.",
    "Please put the clean dishes back in the cabinet when you have washed them.",
    "She felt the heat when she got out of the car.",
    "The bus we travelled in broke down on the way to town.",
    "The children traced along the edge of the dark forest.",
    "The winning goal came with less than a minute left to play.",
    "We ran out of time just as the discussion was getting interesting.",
)


def make(out: Path, packages: Path, voice: str, seed: int) -> float:
    """Write clips and manifest; the seconds of training audio."""
    for text in (*TRAIN_SENTENCES, *HELD_OUT_SENTENCES):
        if not is_held_out_line(text):
            raise DataError(f"a corpus may have read {text!r}", hint="take lines of texts/held_out.txt.gz only")
    kokoro = OnnxKokoro(packages, threads=1)
    name = voice.partition("_")[2]
    speaker = KokoroSpeaker(name, (voice, voice), share=1.0, speed=1.0)
    utterances, seconds = [], 0.0
    for id, text, held_out in _lines(name):
        speed = random.Random(f"{seed}/{voice}/{text}").uniform(*SPEED_FACTORS)
        samples = trim_and_level(kokoro.say([SynthesisRequest(text, speaker, speed)])[0])
        with atomic_write(out / f"{id}.opus") as temporary:
            soundfile.write(temporary, samples, SAMPLE_RATE, format="OGG", subtype="OPUS")
        extras = {"held_out": True} if held_out else {}
        utterances.append(Utterance(id, out / f"{id}.opus", text, name, "en", extras=extras))
        seconds += 0.0 if held_out else len(samples) / SAMPLE_RATE
    write_manifest(out / "manifest.jsonl", utterances)
    return seconds


def trim_and_level(samples: Samples) -> Samples:
    """Trim to a moment of silence at both ends, and bring to the common level."""
    loud = np.flatnonzero(np.abs(samples) > SILENCE_RATIO * np.abs(samples).max())
    first, last = (
        int(loud[0]) - round(LEADING_SECONDS * SAMPLE_RATE),
        int(loud[-1]) + round(TRAILING_SECONDS * SAMPLE_RATE),
    )
    kept = samples[max(0, first) : last]
    level = float(np.sqrt(np.mean(np.square(kept, dtype=np.float64))))
    return np.asarray(np.clip(kept * (TARGET_RMS / level), -0.99, 0.99), np.float32)


def _lines(name: str) -> Iterator[tuple[str, str, bool]]:
    """Id, text, and whether it is held out."""
    # The kinds are in the ids of the recordings that ship.
    for kind, texts in (("learn", TRAIN_SENTENCES), ("judge", HELD_OUT_SENTENCES)):
        for number, text in enumerate(texts, start=1):
            yield f"{name}-{kind}-{number:02d}", text, kind == "judge"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for clips and manifest")
    parser.add_argument(
        "--packages", type=Path, default=Path("data/fledgling/packages"), help="where archives are kept"
    )
    parser.add_argument(
        "--voice",
        default="im_nicola",
        choices=(*DEMO_VOICES, *RESERVED_VOICES),
        help="the last three are nearer to what fledgling knows: for benchmarks/rank_checkpoints.py --voice",
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        print(f"{args.out}: {make(args.out, args.packages, args.voice, args.seed):.0f} s to learn from")
    except MynaError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
