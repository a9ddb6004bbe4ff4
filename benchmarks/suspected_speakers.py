"""Suspected twins and mixed speakers of the X-ray on real voices: how often each is found, and found wrongly.

    python benchmarks/suspected_speakers.py CLIPS.parquet ... [--speakers 40]

The files have the columns `speaker` and `audio` (bytes of a sound file). ECAPA of the curation models embeds the clips.
A speaker cut in two should be found to be twins, two speakers under one name a mixture.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import soundfile

from myna.curate.xray.measures import MIN_CLIPS, SAME_VOICE_RATIO, mean_cosine, second_voice
from myna.listen.speaker_encoders import ECAPA, open_speaker_encoder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clips", nargs="+", type=Path)
    parser.add_argument("--speakers", type=int, default=40)
    parser.add_argument("--clips-each", type=int, default=8)
    arguments = parser.parse_args()
    rows = pa.concat_tables([pq.read_table(path, columns=["speaker", "audio"]) for path in arguments.clips]).to_pylist()
    by_speaker: dict[str, list[bytes]] = {}
    for row in rows:
        by_speaker.setdefault(row["speaker"], []).append(row["audio"]["bytes"])
    enough = [name for name, clips in by_speaker.items() if len(clips) >= max(MIN_CLIPS, arguments.clips_each)]
    chosen = enough[:: max(1, len(enough) // arguments.speakers)][: arguments.speakers]
    encoder = open_speaker_encoder(ECAPA)
    voices = []
    for name in chosen:
        sounds = [
            soundfile.read(io.BytesIO(clip), dtype="float32") for clip in by_speaker[name][: arguments.clips_each]
        ]
        voices.append(np.array([encoder.embed(samples, rate) for samples, rate in sounds]))

    def ratio(first: np.ndarray, second: np.ndarray) -> float:  # type: ignore[type-arg]
        return mean_cosine(first, second) / min(mean_cosine(first), mean_cosine(second))

    same = [ratio(one[::2], one[1::2]) for one in voices]
    other = [ratio(first, second) for first, second in itertools.combinations(voices, 2)]
    mixtures = [second_voice(np.concatenate(pair)) for pair in itertools.pairwise(voices)]
    result = {
        "speakers": len(voices),
        "clips each": arguments.clips_each,
        "one speaker cut in two, found": float(np.mean(np.array(same) >= SAME_VOICE_RATIO)),
        "two speakers taken for one": float(np.mean(np.array(other) >= SAME_VOICE_RATIO)),
        "two speakers under one name, found": float(np.mean([found is not None for found in mixtures])),
        "one speaker taken for two": float(np.mean([second_voice(one) is not None for one in voices])),
        "ratio of halves, 5th percentile": round(float(np.percentile(same, 5)), 2),
        "ratio of strangers, 95th percentile": round(float(np.percentile(other, 95)), 2),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
