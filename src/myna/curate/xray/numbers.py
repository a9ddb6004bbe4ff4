"""Numbers of an X-ray: hours by reason, measures, speakers, recordings, texts, duplicates."""

import unicodedata
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rapidfuzz.distance import Levenshtein

from myna.core.progress import ProgressCallback, silent
from myna.curate.curation import INDEX_FILE, CurationIndex
from myna.curate.decision import decide
from myna.curate.xray.measures import measure_histograms, missing_measures, speaker_summary
from myna.curate.xray.source import XraySource
from myna.data.corrections import apply_hand_decisions, is_corrected
from myna.data.segments import DROP_REASONS, lengths_ms, values_of
from myna.data.split import SPEAKERS, TEXTS, TRAIN
from myna.text.normalization import UNSPACED, alphanumeric, base_language

KEPT = "kept"
SHOWN_RECORDINGS = 200


def xray_numbers(source: XraySource, tokenizer: Any = None, progress: ProgressCallback = silent) -> dict[str, Any]:
    """Return everything that the page shows as plain values. Lengths are in milliseconds, and add up exactly."""
    stages = 5
    progress("X-ray", 0, stages)
    table = source.table
    kept = table.filter(pc.equal(table["status"], KEPT))
    numbers: dict[str, Any] = {
        "myna": version("myna"),
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "folder": str(source.folder),
        "curated": source.is_curated,
        "notes": [*source.notes, *_stale_notes(source)],
        "hours": hours_by_reason(table),
    }
    progress("X-ray", 1, stages)
    numbers["measures"] = measure_histograms(source)
    numbers["missing_measures"] = missing_measures(table)
    progress("X-ray", 2, stages)
    numbers["speakers"] = speaker_summary(source)
    progress("X-ray", 3, stages)
    numbers["recordings"] = _recordings(table)
    numbers["languages"] = _milliseconds_by(kept, "language")
    numbers["text_sources"] = _milliseconds_by(kept, "text_source")
    texts, spoken = (kept[name].to_pylist() for name in ("text", "normalised_text"))
    numbers["text"] = text_summary(texts, [one or text for one, text in zip(spoken, texts, strict=True)], tokenizer)
    progress("X-ray", 4, stages)
    copies = table.filter(pc.not_equal(table["duplicate_of"], ""))
    kept_copies = int(pc.sum(pc.equal(copies["status"], KEPT)).as_py() or 0)
    numbers["duplicates"] = {"segments": len(copies), "ms": int(lengths_ms(copies).sum()), "kept": kept_copies}
    numbers["splits"] = _splits(kept)
    numbers["corrections"] = len(source.corrections)
    numbers["settings"] = source.settings.model_dump(mode="json") if source.is_curated else None
    has_models = source.is_curated and (source.folder / INDEX_FILE).is_file()
    numbers["models"] = CurationIndex.load(source.folder).models if has_models else []
    numbers["verdict"] = verdict(numbers)
    progress("X-ray", stages, stages)
    return numbers


def hours_by_reason(table: pa.Table) -> dict[str, Any]:
    """Return the milliseconds of all recordings by their outcome; the sum is the length of all recordings."""
    lengths = lengths_ms(table)
    reasons = pc.if_else(pc.equal(table["status"], KEPT), KEPT, table["reason"])
    columns = pa.table({"reason": reasons, "ms": lengths})
    grouped = columns.group_by("reason").aggregate([("ms", "sum"), ("ms", "count")]).to_pylist()
    order = {reason: n for n, reason in enumerate((KEPT, *DROP_REASONS))}
    parts = [{"reason": row["reason"], "ms": row["ms_sum"], "segments": row["ms_count"]} for row in grouped]
    parts.sort(key=lambda part: (part["reason"] != KEPT, -part["ms"], order.get(part["reason"], len(order))))
    names, starts, ends = (values_of(table, name) for name in ("recording", "start_ms", "end_ms"))
    # Segments follow one another from 0 on, or sums over their recording would be wrong.
    expected = np.where(np.r_[False, names[1:] == names[:-1]], np.r_[0, ends[:-1]], 0) if len(names) else starts
    return {
        "total_ms": int(lengths.sum()),
        "parts": parts,
        "recordings": len(table["recording"].unique()),
        "segments": len(table),
        "clips": int(pc.sum(pc.equal(table["kind"], "clip")).as_py() or 0),
        "untiled": sorted(set(names[starts != expected])),
    }


def _milliseconds_by(table: pa.Table, column: str) -> dict[str, int]:
    grouped = pa.table({"key": table[column], "ms": lengths_ms(table)}).group_by("key").aggregate([("ms", "sum")])
    pairs = zip(grouped["key"].to_pylist(), grouped["ms_sum"].to_pylist(), strict=True)
    return {str(key): int(ms) for key, ms in sorted(pairs, key=lambda pair: -pair[1])}


def _recordings(table: pa.Table) -> dict[str, Any]:
    """Return the recordings in order of decreasing loss."""
    lengths, is_kept = lengths_ms(table), values_of(table, "status") == KEPT
    columns = {
        "recording": table["recording"],
        "ms": lengths,
        "kept_ms": np.where(is_kept, lengths, 0),
        "clips": is_kept.astype(np.int64),
        **{name: pc.if_else(pc.is_nan(table[name]), None, table[name]) for name in ("bandwidth_hz", "snr_db")},
    }
    totals = [("ms", "sum"), ("kept_ms", "sum"), ("clips", "sum"), ("bandwidth_hz", "mean"), ("snr_db", "mean")]
    grouped = pa.table(columns).group_by("recording").aggregate(totals)
    rows = []
    for row in grouped.to_pylist():
        row = {name.removesuffix("_sum").removesuffix("_mean"): value for name, value in row.items()}
        bandwidth, snr = row["bandwidth_hz"], row["snr_db"]
        row["bandwidth_hz"] = None if bandwidth is None else round(bandwidth)
        row["snr_db"] = None if snr is None else round(snr, 1)
        rows.append(row)
    rows.sort(key=lambda row: (row["kept_ms"] - row["ms"], row["recording"]))
    return {"count": len(rows), "shown": rows[:SHOWN_RECORDINGS]}


def _splits(kept: pa.Table) -> dict[str, Any]:
    """Return the clips of each subset, and counts of leaks between the sides of a split, which must be zero."""
    splits = values_of(kept, "split")
    subset_of = dict(zip(kept["id"].to_pylist(), splits, strict=True))
    pairs = kept.filter(pc.not_equal(kept["duplicate_of"], "")).select(["id", "duplicate_of"]).to_pylist()
    sides = [(subset_of[pair["id"]], subset_of.get(pair["duplicate_of"])) for pair in pairs]
    crossing = [pair for pair in sides if pair[1] is not None and pair[0] != pair[1]]

    def values(column: str, subset: str) -> set[str]:
        return set(kept[column].filter(pa.array(splits == subset)).to_pylist()) - {""}

    texts = {subset: {alphanumeric(text) for text in values("text", subset)} for subset in (TRAIN, TEXTS)}
    return {
        "subsets": {name: int((splits == name).sum()) for name in sorted(set(splits)) if name},
        "duplicates_across": len(crossing),
        "texts_across": len(texts[TRAIN] & texts[TEXTS] - {""}),
        "speakers_across": len(values("speaker", TRAIN) & values("speaker", SPEAKERS)),
    }


def _stale_notes(source: XraySource) -> list[str]:
    """Return notes on settings or corrections that are newer than the table."""
    if not source.is_curated:
        return []
    again = f"myna curate --out {source.folder}"
    if not is_corrected(source.table, source.corrections):
        return [f"corrections were made after the table was: {again}"]
    decided = apply_hand_decisions(decide(source.table, source.settings), source.corrections)
    different = int(pc.sum(pc.not_equal(decided["status"], source.table["status"])).as_py() or 0)
    otherwise = f"{different} segments would be decided otherwise with these settings and corrections: {again}"
    return [otherwise] if different else []


def verdict(numbers: dict[str, Any]) -> list[dict[str, str]]:
    """Return sentences in order of importance; `section` is the place of the page that shows them."""
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
        add("good", "duplicates", "Training and held-out clips share no duplicate, no text and no held-out speaker")
    for twin in numbers["speakers"]["twins"]:
        first, second = twin["speakers"]
        found_pair = f"{first} and {second} may be one person"
        add("bad", "speakers", f"{found_pair}: their clips are nearly as alike as one's own")
    for speaker in numbers["speakers"]["speakers"]:
        if speaker.get("second_voice"):
            share = _share(speaker["second_voice"]["share"], 1)
            found_voice = f"{share} of the clips are another voice"
            add("bad", "speakers", f"{speaker['speaker']} may be two people: {found_voice}")
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
    """Return the milliseconds that only this measure's threshold drops."""
    return max(0, int(sum(measure["pass_ms"]) + measure["missing_kept_ms"] - measure["kept_ms"]))


def spoken_length(milliseconds: int) -> str:
    """Return a length in the unit that a person would use."""
    seconds = milliseconds / 1000
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.{1 if minutes < 10 else 0}f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "0%"


def clock(milliseconds: int) -> str:
    """Return h:mm:ss.mmm, exactly."""
    seconds, rest = divmod(int(milliseconds), 1000)
    return f"{seconds // 3600}:{seconds % 3600 // 60:02}:{seconds % 60:02}.{rest:03}"


GRAPHEME_TEXTS = 20_000
"""Texts whose grapheme clusters and tokens are counted; of more texts, an even sample."""
SHOWN_CHARACTERS = 400
RARE_COUNT = 5
"""Maximum clips in which a rare character occurs."""
REPEATED = 20
"""Repeated sentences that are shown."""


class DiffPiece(NamedTuple):
    """Stretch of two texts: equal, or with words of one, the other or both."""

    equal: str
    first: str
    second: str


def text_diff(first: str, second: str, language: str) -> list[DiffPiece]:
    """Compare two texts by words, or by characters in languages without blanks. Case and punctuation are ignored."""
    is_spaced = base_language(language) not in UNSPACED
    texts = [text.split() if is_spaced else list(text) for text in (first, second)]
    keys = [[alphanumeric(word) or word for word in words] for words in texts]
    glue = " " if is_spaced else ""
    pieces = []
    for step in Levenshtein.opcodes(*keys):
        left = glue.join(texts[0][step.src_start : step.src_end])
        right = glue.join(texts[1][step.dest_start : step.dest_end])
        pieces.append(DiffPiece(left, "", "") if step.tag == "equal" else DiffPiece("", left, right))
    return pieces


def text_summary(texts: Sequence[str], spoken: Sequence[str], tokenizer: Any = None) -> dict[str, Any]:
    """Summarise the characters of the kept texts; `spoken` are their spoken forms."""
    import regex  # type: ignore[import-untyped]

    characters: Counter[str] = Counter()
    clips: Counter[str] = Counter()
    for text in texts:
        characters.update(text)
        clips.update(set(text))
    step = max(1, -(-len(texts) // GRAPHEME_TEXTS))
    graphemes = Counter(cluster for text in texts[::step] for cluster in regex.findall(r"\X", text))
    combined = {cluster: count for cluster, count in graphemes.items() if len(cluster) > 1}
    keys = [alphanumeric(text) for text in texts]
    sentences = Counter(filter(None, keys))
    repeated = {key: count for key, count in sentences.most_common(REPEATED) if count > 1}
    originals = {key: text for key, text in zip(keys, texts, strict=True) if key in repeated}
    coverage = None
    if tokenizer is not None:
        coverage = tokenizer_coverage(characters, texts[::step], tokenizer)
        coverage["lost_clips"] = sum(not set(coverage["lost"]).isdisjoint(text) for text in texts)
    common = characters.most_common(SHOWN_CHARACTERS)
    return {
        "texts": len(texts),
        "characters": sum(characters.values()),
        "distinct": len(characters),
        "common": [
            {"character": one, "name": unicodedata.name(one, f"U+{ord(one):04X}"), "count": count, "clips": clips[one]}
            for one, count in common
            if not one.isspace()
        ],
        "rare": sorted(one for one, count in clips.items() if count <= RARE_COUNT and not one.isspace()),
        "graphemes": {
            "texts": len(texts[::step]),
            "distinct": len(graphemes),
            "combined": sorted(combined, key=lambda one: -combined[one])[:SHOWN_CHARACTERS],
        },
        "digit_texts": sum(any(map(str.isdecimal, text)) for text in texts),
        "digit_texts_spoken": sum(any(map(str.isdecimal, text)) for text in spoken),
        "repeated_texts": sum(count - 1 for count in sentences.values()),
        "repeated": [{"text": originals[key], "clips": count} for key, count in repeated.items()],
        "coverage": coverage,
    }


def tokenizer_coverage(characters: Counter[str], texts: Sequence[str], tokenizer: Any) -> dict[str, Any]:
    """Compare characters, by their counts, and whole texts with a tokenizer of transformers.

    `lost` are characters that decoding does not restore, except for their case; `split` those that take several tokens,
    such as the bytes that spell them, with their number.
    """

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    lost, split = [], {}
    for one, _ in characters.most_common():
        back = tokenizer.decode(encode(f"a{one}a"), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        tokens = len(encode(f"a{one}")) - len(encode("a"))
        if one.casefold() not in back.casefold():
            lost.append(one)
        elif tokens > 1:
            split[one] = tokens
    tokens = sum(len(encode(text)) for text in texts)
    return {
        "lost": sorted(lost),
        "split": split,
        "split_share": sum(characters[one] for one in split) / max(1, characters.total()),
        "tokens_per_character": tokens / max(1, sum(map(len, texts))),
    }
