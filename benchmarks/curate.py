"""`myna curate` on planted faults: precision and recall of every reason, diarization, cut words, text, seconds kept.

python benchmarks/planted_faults.py --corpus CORPUS --seed 11 --out seed-11
python benchmarks/curate.py seed-11 --out curated --asr base --json docs/benchmarks/curate.json

`--settings` curates by other settings: curate_gpt_sovits.yaml and curate_emilia.yaml beside this file are the rules of
those pipelines. `--analysis` measures diarization, music and noise alone, without `myna curate`; it also takes a folder
of real recordings with .rttm files beside them, such as tests/data of pyannote-audio (excerpts of AMI meetings).
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
from rapidfuzz.distance import Levenshtein

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.figures import save_figures

from myna.audio.files import Samples, probe, read_audio
from myna.audio.signal_measures import frame_levels_db
from myna.core.io import curation_models_folder
from myna.text.normalization import words

FRAME_SECONDS = 0.01
COLLAR_SECONDS = 0.25
REASONS = {
    "overlap": ("overlap", "mixed speakers"),
    "music": ("music",),
    "jingle": ("music", "no speech"),
    "narrow band": ("narrow band",),
    "clipped": ("clipped",),
    "noisy": ("noisy",),
    "duplicate": ("duplicate",),
}
"""Reasons that name a fault rightly."""
EDGE_CHARACTERS = 12
MAX_EDGE_CER = 0.2
CHECKED_CUTS = 200
SOUND_DB = 30.0
"""Level below the speech around it that counts as silence at a cut."""
CUT_WINDOW_SECONDS = 0.02

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Truth:
    """Faults planted in one recording, in frames of 10 ms."""

    frames: int
    utterances: list[dict[str, Any]]
    faults: list[dict[str, Any]]

    def mask(self, spans: list[tuple[float, float]]) -> BoolArray:
        mask = np.zeros(self.frames, np.bool_)
        for start, end in spans:
            mask[round(start / FRAME_SECONDS) : round(end / FRAME_SECONDS)] = True
        return mask

    def activity(self) -> dict[str, BoolArray]:
        """Speech of each speaker, without pauses."""
        speakers = sorted({one["speaker"] for one in self.utterances})
        return {
            speaker: self.mask([span for one in self.utterances if one["speaker"] == speaker for span in one["speech"]])
            for speaker in speakers
        }

    def fault(self, kind: str) -> BoolArray:
        return self.mask([(one["start"], one["end"]) for one in self.faults if one["kind"] == kind])

    def speech(self) -> BoolArray:
        return self.mask([(one["start"], one["end"]) for one in self.utterances])

    def good(self, *, exact: bool = False) -> BoolArray:
        """Speech of utterances that no fault touches; only of those with `exact` text, which are synthetic."""
        bad = self.mask([(one["start"], one["end"]) for one in self.faults])
        spans = [(one["start"], one["end"]) for one in self.utterances if one["exact"] or not exact]
        return self.mask([span for span in spans if not bad[self.mask([span])].any()])


def load_truth(folder: Path) -> dict[str, Truth]:
    """Read the truth by recording; of real ones only the speakers are known."""
    if rttms := sorted(folder.glob("*.rttm")):
        return load_rttms(folder, rttms)
    tree = json.loads((folder / "truth.json").read_text(encoding="utf-8"))
    return {
        name: Truth(round(one["seconds"] / FRAME_SECONDS), one["utterances"], one["faults"])
        for name, one in tree.items()
    }


def load_rttms(folder: Path, files: list[Path]) -> dict[str, Truth]:
    """Turns by SPEAKER lines: recording, channel, start, seconds and speaker; of recordings that are there."""
    turns = defaultdict[str, list[dict[str, Any]]](list)
    for line in (line.split() for file in files for line in file.read_text(encoding="utf-8").splitlines()):
        start, seconds = float(line[3]), float(line[4])
        span = (start, start + seconds)
        turns[f"{line[1]}.wav"].append({"start": span[0], "end": span[1], "speaker": line[7], "speech": [span]})
    there = {name: folder / name for name in sorted(turns) if (folder / name).is_file()}
    return {name: Truth(round(probe(path).seconds / FRAME_SECONDS), turns[name], []) for name, path in there.items()}


def diarization_error(reference: dict[str, BoolArray], hypothesis: BoolArray) -> tuple[float, float]:
    """Seconds of error (missed, false, confused) and of reference speech, outside the collar, under the best mapping.

    `hypothesis` is (frames, speakers).
    """
    from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]

    truth = np.stack(list(reference.values()), 1)
    near = np.zeros(len(truth), np.bool_)
    collar = round(COLLAR_SECONDS / FRAME_SECONDS)
    for speaker in truth.T:
        for edge in np.flatnonzero(np.diff(speaker.astype(int))):
            near[max(0, edge - collar) : edge + collar] = True
    truth, guess = truth[~near], hypothesis[~near]
    both = truth.T.astype(float) @ guess.astype(float)
    rows, columns = linear_sum_assignment(-both)
    said, guessed = truth.sum(1), guess.sum(1)
    right = (truth[:, rows] & guess[:, columns]).sum(1)
    return float((np.maximum(said, guessed) - right).sum()) * FRAME_SECONDS, float(said.sum()) * FRAME_SECONDS


def measure_analysis(planted: Path, truths: dict[str, Truth], models_folder: Path) -> dict[str, Any]:
    """Diarization error and overlap detection of each recording, and music and noise in and outside their stretches."""
    from myna.curate.models import NO_ASR, CurationModels
    from myna.curate.settings import ListenSettings
    from myna.listen.diarization import find_local_speakers, frame_times, label_speakers

    models = CurationModels.open(ListenSettings(asr=NO_ASR, models=str(models_folder)))
    assert models.segmentation is not None and models.speaker_encoder is not None, f"no models in {models_folder}"
    report: dict[str, Any] = {}
    totals: dict[str, float] = defaultdict(float)
    for name, truth in truths.items():
        if not truth.utterances:
            continue
        folder = planted / "audio" if (planted / "audio").is_dir() else planted
        samples = read_audio(folder / name, sample_rate=16_000)
        clock = time.perf_counter()
        local = find_local_speakers(samples, 16_000, models.segmentation, models.speaker_encoder)
        elapsed = time.perf_counter() - clock
        frames = (np.arange(truth.frames) + 0.5) * FRAME_SECONDS
        row: dict[str, Any] = {"rtf": elapsed / (len(samples) / 16_000)}
        reference = truth.activity()
        for label, speakers in {"der": None, "der_known_number": len(reference)}.items():
            turns = label_speakers(local, speakers=speakers)
            nearest = np.searchsorted(frame_times(len(turns.overlap)), frames).clip(0, len(turns.overlap) - 1)
            error, spoken = diarization_error(reference, turns.active[nearest])
            row[label] = error / spoken
            if label == "der":
                row["speakers"] = len(turns.embeddings)
            totals[label] += error
        totals["spoken"] += spoken
        found, planted_overlap = turns.overlap[nearest] > 0.3, np.stack(list(reference.values())).sum(0) > 1
        row["overlap_precision"] = _share(found & _wide(planted_overlap), found)
        row["overlap_recall"] = _share(found & planted_overlap, planted_overlap)
        for fault in ("music", "noisy"):
            inside = truth.fault(fault)
            if inside.any():
                row[f"{fault}_stretch"] = _levels(models, samples, inside)
        report[name] = row
    report["all"] = {label: totals[label] / totals["spoken"] for label in ("der", "der_known_number")}
    return report


def _levels(models: Any, samples: Samples, inside: BoolArray) -> dict[str, float]:
    step = round(16_000 * FRAME_SECONDS)
    first, last = np.flatnonzero(inside)[[0, -1]] * step
    stretches = {"in": samples[first:last], "after": samples[last : last + 16_000 * 30]}
    return {
        f"{measure}_{place}": round(value, 3)
        for place, part in stretches.items()
        for measure, value in (
            ("music", models.music.music_share(part, 16_000)),
            ("snr", models.noise.snr_db(part, 16_000)),
        )
    }


def measure_curation(planted: Path, truths: dict[str, Truth], table: list[dict[str, Any]]) -> dict[str, Any]:
    """Everything that the table of a curation gets right or wrong."""
    rows = defaultdict(list)
    for row in table:
        rows[row["recording"]].append(row)
    seconds: dict[str, float] = defaultdict(float)
    planted_s, caught, named, claimed, rightly = (defaultdict[str, float](float) for _ in range(5))
    for name, truth in truths.items():
        kept = truth.mask([_span(row) for row in rows[name] if row["status"] == "kept"])
        reason = np.full(truth.frames, "", object)
        for row in rows[name]:
            if row["status"] != "kept":
                reason[truth.mask([_span(row)])] = row["reason"]
        for kind, good in {"good": truth.good(), "synthetic": truth.good(exact=True)}.items():
            seconds[kind] += good.sum() * FRAME_SECONDS
            seconds[f"{kind} kept"] += (good & kept).sum() * FRAME_SECONDS
        seconds["kept"] += kept.sum() * FRAME_SECONDS
        seconds["all"] += truth.frames * FRAME_SECONDS
        for fault, reasons in REASONS.items():
            # A jingle is all sound; other faults count where somebody speaks.
            target = truth.fault(fault) & (truth.speech() | (fault == "jingle"))
            planted_s[fault] += target.sum() * FRAME_SECONDS
            caught[fault] += (target & ~kept).sum() * FRAME_SECONDS
            named[fault] += (target & np.isin(reason, reasons)).sum() * FRAME_SECONDS
        for row in rows[name]:
            if row["status"] == "kept" or row["kind"] != "clip" or row["reason"] not in KNOWN_REASONS:
                continue
            length = (row["end_ms"] - row["start_ms"]) / 1000
            claimed[row["reason"]] += length
            touched = [fault for fault in REASONS if truth.fault(fault)[truth.mask([_span(row)])].any()]
            rightly[row["reason"]] += length * any(row["reason"] in REASONS[fault] for fault in touched)
    faults = {
        fault: {
            "planted_s": planted_s[fault],
            "recall": _ratio(caught[fault], planted_s[fault]),
            "recall_by_name": _ratio(named[fault], planted_s[fault]),
        }
        for fault in REASONS
    }
    precision = {
        name: {"dropped_s": claimed[name], "precision": _ratio(rightly[name], claimed[name])} for name in claimed
    }
    return {
        "hours": seconds["all"] / 3600,
        "kept_hours": seconds["kept"] / 3600,
        "good_seconds_kept": _ratio(seconds["good kept"], seconds["good"]),
        "synthetic_good_seconds_kept": _ratio(seconds["synthetic kept"], seconds["synthetic"]),
        "faults": faults,
        "reasons": precision,
        "dropped_seconds": _dropped(table),
        **measure_speakers(truths, rows),
        **measure_cuts(planted, truths, rows),
        **measure_text(truths, rows),
    }


KNOWN_REASONS = {reason for reasons in REASONS.values() for reason in reasons}


def measure_speakers(truths: dict[str, Truth], rows: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Share of the kept speech that is the clip's main speaker's, and of a label's main speaker's."""
    pure = total = 0.0
    labels: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for name, truth in truths.items():
        reference = truth.activity()
        for row in rows[name]:
            if row["status"] == "kept":
                inside = truth.mask([_span(row)])
                shares = {speaker: float((mask & inside).sum()) for speaker, mask in reference.items()}
                pure += max(shares.values(), default=0.0)
                total += sum(shares.values())
                for speaker, share in shares.items():
                    labels[row["speaker"]][speaker] += share
    whole = sum(sum(shares.values()) for shares in labels.values())
    main = sum(max(shares.values()) for shares in labels.values() if shares)
    names = {speaker for shares in labels.values() for speaker, share in shares.items() if share}
    return {
        "clip_purity": _ratio(pure, total),
        "label_purity": _ratio(main, whole),
        "speakers_found": len(labels),
        "speakers_true": len(names),
    }


def measure_cuts(planted: Path, truths: dict[str, Truth], rows: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Check random cuts of kept clips: how many lie in sound of the recording itself, and in an utterance; how many
    are of a clip whose two transcriptions differ by more than a fifth of the characters at an edge."""
    cuts = [
        (name, time_ms / 1000, row["edge_cer"])
        for name in truths
        for row in rows[name]
        if row["status"] == "kept"
        for time_ms in (row["start_ms"], row["end_ms"])
    ]
    chosen = np.random.default_rng(0).permutation(len(cuts))[:CHECKED_CUTS]
    by_name = defaultdict(list)
    for index in sorted(chosen.tolist()):
        by_name[cuts[index][0]].append(cuts[index][1])
    differ = sum(not cuts[index][2] <= MAX_EDGE_CER for index in chosen)  # NaN where nothing was heard
    within = in_sound = 0
    for name, times in by_name.items():
        samples = read_audio(planted / "audio" / name, sample_rate=16_000)
        for cut in times:
            around = [one for one in truths[name].utterances if one["start"] < cut < one["end"]]
            within += bool(around)
            if around:
                speech = samples[round(around[0]["start"] * 16_000) : round(around[0]["end"] * 16_000)]
                loud = float(np.percentile(frame_levels_db(speech, 16_000), 95))
                first = max(0, round((cut - CUT_WINDOW_SECONDS) * 16_000))
                here = frame_levels_db(samples[first : round((cut + CUT_WINDOW_SECONDS) * 16_000)], 16_000)
                in_sound += bool(len(here) and here.min() > loud - SOUND_DB)
    return {
        "cuts_checked": len(chosen),
        "cuts_within_an_utterance": within,
        "cuts_in_sound": in_sound,
        "cuts_where_transcriptions_differ": differ,
    }


def measure_text(truths: dict[str, Truth], rows: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """CER of kept text against what was said, in clips of whole utterances with exact text, and cut words by the second
    transcription: the first and last 12 characters of what it heard against what was said."""
    errors = characters = clips = cut_ends = ends = 0
    for name, truth in truths.items():
        for row in rows[name]:
            if row["status"] != "kept":
                continue
            start, end = _span(row)
            inside = [one for one in truth.utterances if one["start"] < end and one["end"] > start]
            whole = all(start - 0.15 <= one["start"] and one["end"] <= end + 0.15 for one in inside)
            if not inside or not whole or not all(one["exact"] for one in inside):
                continue
            said = _characters(" ".join(one["text"] for one in inside))
            errors += Levenshtein.distance(said, _characters(row["text"]))
            characters += len(said)
            clips += 1
            heard = _characters(row["check_text"])
            for edge in (slice(None, EDGE_CHARACTERS), slice(-EDGE_CHARACTERS, None)):
                ends += 1
                cut_ends += Levenshtein.distance(said[edge], heard[edge]) > MAX_EDGE_CER * EDGE_CHARACTERS
    return {
        "text_clips": clips,
        "kept_cer": _ratio(errors, characters),
        "edges_wrong_by_second_transcription": cut_ends,
        "edges_checked": ends,
    }


def _characters(text: str) -> str:
    return "".join(words(text, "en"))


def _span(row: dict[str, Any]) -> tuple[float, float]:
    return row["start_ms"] / 1000, row["end_ms"] / 1000


def _dropped(table: list[dict[str, Any]]) -> dict[str, float]:
    dropped: dict[str, float] = defaultdict(float)
    for row in table:
        if row["status"] != "kept":
            dropped[row["reason"]] += (row["end_ms"] - row["start_ms"]) / 1000
    return dict(sorted(dropped.items(), key=lambda item: -item[1]))


def _wide(mask: BoolArray) -> BoolArray:
    """Mask with the collar around it."""
    size = 2 * round(COLLAR_SECONDS / FRAME_SECONDS) + 1
    return np.asarray(np.convolve(mask, np.ones(size), "same") > 0)


def _share(part: BoolArray, whole: BoolArray) -> float:
    return _ratio(float(part.sum()), float(whole.sum()))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")


def run_curate(
    planted: Path, out: Path, asr: str, models: Path, settings: Path | None, workers: int | None
) -> dict[str, float]:
    """`myna curate` in a process of its own: its time, and the most memory it and its workers had."""
    command = [sys.executable, "-m", "myna", "curate", str(planted / "audio"), "--out", str(out), "--asr", asr]
    command += ["--language", "en", "--set", f"listen.models={models}"]
    command += ["--settings", str(settings)] if settings else []
    command += ["--workers", str(workers)] if workers else []
    clock = time.perf_counter()
    subprocess.run(command, check=True)
    return {
        "seconds": time.perf_counter() - clock,
        "max_process_gb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("planted", type=Path, help="folder of planted_faults.py")
    parser.add_argument("--out", type=Path, help="curated folder; where it is finished it is only measured")
    parser.add_argument("--asr", default="base", help="as of `myna curate`")
    parser.add_argument("--models", type=Path, default=curation_models_folder(), help="folder of myna setup curation")
    parser.add_argument("--settings", type=Path, help="settings of `myna curate`")
    parser.add_argument("--workers", type=int, help="as of `myna curate`")
    parser.add_argument("--analysis", action="store_true", help="measure diarization, music and noise alone")
    parser.add_argument("--json", type=Path, help="file to add the report to, by settings and folder")
    arguments = parser.parse_args()
    truths = load_truth(arguments.planted)
    if arguments.analysis:
        report = measure_analysis(arguments.planted, truths, arguments.models)
    elif arguments.out is None:
        parser.error("--out is missing: where myna curate puts its folder")
    else:
        cost: dict[str, float] = {}
        table = arguments.out / "segments.parquet"
        if not table.is_file():
            cost = run_curate(
                arguments.planted,
                arguments.out,
                arguments.asr,
                arguments.models,
                arguments.settings,
                arguments.workers,
            )
        report = cost | measure_curation(arguments.planted, truths, pq.read_table(table).to_pylist())
    print(json.dumps(_rounded(report), indent=1))
    if arguments.json is not None:
        rules = arguments.settings.stem.removeprefix("curate_") if arguments.settings else "myna"
        name = f"{'diarization' if arguments.analysis else rules} of {arguments.planted.name}"
        tree = json.loads(arguments.json.read_text(encoding="utf-8")) if arguments.json.is_file() else {}
        save_figures(arguments.json, tree | {name: _rounded(report)})


def _rounded(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _rounded(value) for name, value in tree.items()}
    number = float(tree)
    return None if np.isnan(number) else round(number, 4) if isinstance(tree, float) else tree


if __name__ == "__main__":
    main()
