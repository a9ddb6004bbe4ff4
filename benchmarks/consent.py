"""Rates at which the speaker check of `myna voice add` refuses the right person and accepts another.

python benchmarks/consent.py --corpus NAME=FOLDER_OF_PARQUET ... [--speaker-encoder ecapa] [--speakers 60]
                             [--out docs/benchmarks/consent.json]

Parquet files need the columns speaker, seconds and audio {bytes}. Of each speaker the first three clips, joined, stand
for the consent, and the next three are recordings of the same person, or of every other speaker.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.figures import save_figures

from myna.audio.files import LISTENING_RATE, Samples, read_audio
from myna.core.io import DEFAULT_SPEAKER_ENCODER
from myna.listen.speaker_encoders import cosine_similarity, open_speaker_encoder
from myna.provenance.consent import required_similarity

CLIPS = 3


def speaker_clips(folder: Path, speakers: int) -> dict[str, list[Samples]]:
    """Clips of the first speakers that have enough of them."""
    rows: dict[str, list[bytes]] = defaultdict(list)
    for file in sorted(folder.glob("*.parquet")):
        for row in pq.read_table(file, columns=["speaker", "seconds", "audio"]).to_pylist():
            if row["seconds"] >= 1.5 and len(rows[row["speaker"]]) < 2 * CLIPS:
                rows[row["speaker"]].append(row["audio"]["bytes"])
    chosen = [speaker for speaker, own in rows.items() if len(own) == 2 * CLIPS][:speakers]
    return {speaker: [decode(content) for content in rows[speaker]] for speaker in chosen}


def decode(content: bytes) -> Samples:
    with tempfile.NamedTemporaryFile(suffix=".opus") as file:
        file.write(content)
        file.flush()
        return read_audio(Path(file.name), sample_rate=LISTENING_RATE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", action="append", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--speaker-encoder", default=DEFAULT_SPEAKER_ENCODER)
    parser.add_argument("--speakers", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/consent.json"))
    arguments = parser.parse_args()
    encoder = open_speaker_encoder(arguments.speaker_encoder)
    required = required_similarity(encoder.name)
    result = {"encoder": encoder.name, "required": required, "sets": {}}
    for corpus in arguments.corpus:
        name, _, folder = corpus.partition("=")
        chosen = speaker_clips(Path(folder), arguments.speakers)
        consents = {who: encoder.embed(np.concatenate(own[:CLIPS]), LISTENING_RATE) for who, own in chosen.items()}
        recordings = {who: [encoder.embed(clip, LISTENING_RATE) for clip in own[CLIPS:]] for who, own in chosen.items()}
        same = [cosine_similarity(consents[who], one) for who, own in recordings.items() for one in own]
        other = [
            cosine_similarity(consent, one)
            for who, consent in consents.items()
            for speaker, own in recordings.items()
            for one in own
            if speaker != who
        ]
        result["sets"][name] = {
            "speakers": len(chosen),
            "same": {"pairs": len(same), "median": round(float(np.median(same)), 3)},
            "other": {"pairs": len(other), "median": round(float(np.median(other)), 3)},
            "refused_of_the_same": round(float(np.mean(np.array(same) < required)), 4),
            "accepted_of_others": round(float(np.mean(np.array(other) >= required)), 4),
        }
        print(name, result["sets"][name], flush=True)
    save_figures(arguments.out, result)


if __name__ == "__main__":
    main()
