"""The verdict of an X-ray: its numbers in sentences, and lengths as people write them."""

from __future__ import annotations

from typing import Any

KEPT = "kept"


def verdict(numbers: dict[str, Any]) -> list[dict[str, str]]:
    """Sentences, the weightiest first; `section` is where the page shows it."""
    hours, found = numbers["hours"], []

    def add(kind: str, section: str, text: str) -> None:
        found.append({"kind": kind, "section": section, "text": text})

    total = hours["total_ms"]
    parts = {part["reason"]: part for part in hours["parts"]}
    kept = parts.get(KEPT, {"ms": 0, "segments": 0})
    speakers = numbers["speakers"]["count"]
    languages = ", ".join(name or "unnamed" for name in list(numbers["languages"])[:4]) or "none"
    add(
        "good" if kept["ms"] else "bad",
        "hours",
        f"{spoken_length(kept['ms'])} of {spoken_length(total)} are kept ({_share(kept['ms'], total)}): "
        f"{kept['segments']:,} clips of {speakers} {'speaker' if speakers == 1 else 'speakers'}, language: {languages}",
    )
    dropped = [part for part in hours["parts"] if part["reason"] != KEPT and part["ms"]]
    if dropped:
        listed = ", ".join(f"{part['reason']} ({spoken_length(part['ms'])})" for part in dropped[:3])
        add("plain", "hours", f"Most was lost to {listed}")
    if hours["untiled"] and numbers["curated"]:
        add("bad", "hours", f"Segments do not tile {len(hours['untiled'])} recordings: the table is damaged")
    costs = [(alone_ms(measure), measure) for measure in numbers["measures"] if measure["setting"]]
    costs.sort(key=lambda pair: -pair[0])
    if costs and costs[0][0] and numbers["curated"]:
        cost, measure = costs[0]
        add("plain", "measures", f"The threshold that alone costs most is {measure['setting']}: {spoken_length(cost)}")
    splits = numbers["splits"]
    leaks = {name: splits[f"{name}_across"] for name in ("duplicates", "texts", "speakers")}
    if any(leaks.values()):
        listed = ", ".join(f"{count} {name}" for name, count in leaks.items() if count)
        add("bad", "duplicates", f"Training and held-out clips share {listed}")
    elif splits["subsets"]:
        add(
            "good",
            "duplicates",
            "Training and held-out clips share no duplicate, no text and no held-out speaker",
        )
    for twin in numbers["speakers"]["twins"]:
        first, second = twin["speakers"]
        add(
            "bad",
            "speakers",
            f"{first} and {second} may be one person: their clips are nearly as alike as one's own",
        )
    for speaker in numbers["speakers"]["speakers"]:
        if speaker.get("second_voice"):
            share = _share(speaker["second_voice"]["share"], 1)
            add(
                "bad",
                "speakers",
                f"{speaker['speaker']} may be two people: {share} of the clips are another voice",
            )
    text = numbers["text"]
    if text["coverage"] and text["coverage"]["lost"]:
        lost = f"{len(text['coverage']['lost'])} characters, in {text['coverage']['lost_clips']:,} clips"
        add("bad", "text", f"The tokenizer loses {lost}")
    if text["digit_texts_spoken"]:
        share = f"{text['digit_texts_spoken']:,} of {text['texts']:,} texts"
        add("bad", "text", f"Digits are left in {share}: they can be read aloud in several ways")
    if text["repeated_texts"]:
        add("plain", "text", f"Clips that say what another one says: {text['repeated_texts']:,}")
    if numbers["missing_measures"]:
        names = ", ".join(numbers["missing_measures"])
        add("plain", "measures", f"Not measured, so nothing was dropped for it: {names}")
    return found


def alone_ms(measure: dict[str, Any]) -> int:
    """What is dropped for this measure's threshold and nothing else."""
    return max(0, int(sum(measure["pass_ms"]) + measure["missing_kept_ms"] - measure["kept_ms"]))


def spoken_length(milliseconds: int) -> str:
    """A length in the unit that a person would use."""
    seconds = milliseconds / 1000
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.{1 if minutes < 10 else 0}f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "0%"


def clock(milliseconds: int) -> str:
    """h:mm:ss.mmm, exact."""
    seconds, rest = divmod(int(milliseconds), 1000)
    return f"{seconds // 3600}:{seconds % 3600 // 60:02}:{seconds % 60:02}.{rest:03}"
