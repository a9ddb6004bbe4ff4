"""How often segments of a long text run away, with and without the segments before them in the prompt.

python benchmarks/long_text.py TEXTS.txt [--model fledgling] [--seeds 3] [--segment-seconds 8] [--context-seconds 20]

One text a line, each of more than half a minute. Prints a line for the setting: segments, those that found no end or
said nothing, and the seconds of speech in all.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from myna.speak import segments
from myna.speak.engine import SpeechRequest
from myna.speak.loading import load_engine
from myna.text import sentences as long_text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--model", default="fledgling")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--segment-seconds", type=float, default=long_text.TARGET_SEGMENT_SECONDS)
    parser.add_argument("--context-seconds", type=float, default=segments.MAX_CONTEXT_SECONDS)
    arguments = parser.parse_args()
    long_text.TARGET_SEGMENT_SECONDS = arguments.segment_seconds
    segments.MAX_CONTEXT_SECONDS = arguments.context_seconds
    engine = load_engine(model=arguments.model, device=arguments.device)
    texts = [line for line in arguments.texts.read_text(encoding="utf-8").splitlines() if line.strip()]
    plans = [
        engine.plan(SpeechRequest(text, id=f"text {number}"), replace(engine.family.sampling, seed=seed))
        for number, text in enumerate(texts)
        for seed in range(arguments.seeds)
    ]
    speeches = [speech for _, speech in engine.speak_plans(plans)]
    print(
        f"segments of {arguments.segment_seconds:g} s, context of {arguments.context_seconds:g} s: "
        f"{sum(len(plan.segments) for plan in plans)} segments, "
        f"{sum(len(speech.warnings) for speech in speeches)} failed, "
        f"{sum(speech.seconds for speech in speeches):.0f} s of speech"
    )


if __name__ == "__main__":
    main()
