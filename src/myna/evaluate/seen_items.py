"""Items that a run has seen before its evaluation: it was trained on them, or they chose its checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from myna.core.errors import MynaError
from myna.core.run_folder import RunFolder
from myna.data.overlap import ComparedClip, TrainedClips
from myna.evaluate.items import EvalItem
from myna.evaluate.results import ITEMS_FILE, read_item_scores, step_folder
from myna.evaluate.scoring import ItemScores
from myna.evaluate.systems import System
from myna.models.files import format_names


def mark_seen_items(
    systems: Iterable[System], items: Sequence[EvalItem], rows: Mapping[str, Sequence[ItemScores]]
) -> list[str]:
    """Set `trained_on` and `chose_checkpoint` of the scores of each run; notes for people on what cannot be known."""
    notes = []
    for system in systems:
        run = RunFolder.find(Path(system.metadata["run"])) if "run" in system.metadata else None
        if run is None:
            continue
        try:
            trained = TrainedClips.open(run.recipe)
        except MynaError as error:
            notes.append(f"whether {system.name} was trained on these items cannot be told: {error.what}")
            continue
        found = trained.find([_clip(item, trained) for item in items], unnamed_speakers=True)
        chosen_by = _choosing_items(run)
        for row in rows[system.name]:
            row.trained_on = found.get(row.id, "")
            row.chose_checkpoint = (row.id, row.text) in chosen_by
    return notes


def seen_warnings(rows: Mapping[str, Sequence[ItemScores]]) -> list[str]:
    """Sentences for the head of a report: how many items of which system it had seen before."""
    warnings = []
    for system, scores in rows.items():
        trained = {row.id: row.trained_on for row in scores if row.trained_on}
        if trained:
            same = Counter(trained.values())
            warnings.append(
                f"{system} was trained on {len(trained)} of these {len(scores)} items ({same['audio']} with the same "
                f"audio, {same['words']} with the same words): {format_names(list(trained))}. Its scores on them say "
                "nothing about new texts; hold items out before training: myna split DATA --texts 20"
            )
        if chose := sum(bool(row.chose_checkpoint) for row in scores):
            warnings.append(
                f"{chose} of these {len(scores)} items chose the checkpoint of {system}: its gain on them is too high. "
                "Evaluate it on other items; those that chose nothing are in speech_eval/report.html of the run"
            )
    return warnings


def _clip(item: EvalItem, trained: TrainedClips) -> ComparedClip:
    recording = item.recording
    key = trained.key(recording.audio, recording.span) if recording is not None else ""
    return ComparedClip(item.id, item.speaker, item.text, key)


def _choosing_items(run: RunFolder) -> set[tuple[str, str]]:
    """Ids and texts of the items by which the best checkpoint was chosen; `best/` and checkpoints are inside a run."""
    for folder in (run.folder, *run.folder.absolute().parents[:2]):
        file = folder / "speech_eval" / step_folder(0) / ITEMS_FILE
        if file.is_file():
            return {(row.id, row.text) for row in read_item_scores(file)}
    return set()
