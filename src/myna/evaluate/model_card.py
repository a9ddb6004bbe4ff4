"""Model card of a run: README.md beside its weights, in the layout of the Hugging Face hub; `model_card.md` is its
template."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from myna.core.errors import MynaError
from myna.core.io import save_text
from myna.core.run_folder import Run, RunFolder
from myna.data.dataset import ManifestTable, PreparedDataset
from myna.evaluate.metrics import METRICS
from myna.models import SHIPPED, find_checkpoint
from myna.models.files import read_json
from myna.models.ref import display_name, weights_sha256
from myna.report.page import render_template

CARD_FILE = "README.md"
MAX_LISTED = 12
"""Maximum number of speakers that are listed by name."""
Speakers = list[dict[str, Any]]
"""Rows of the speakers of the training data."""


def write_model_card(run: RunFolder, consents: Mapping[str, str], folder: Path | None = None) -> Path | None:
    """Write the card of a finished run; None for a run that has no weights yet. `consents` are consent ids by the names
    of stored voices, `folder` is where the result is while it is being written.

    A card must never fail a run: whatever cannot be found out is said to be unknown.
    """
    folder = folder or run.result
    if not folder.is_dir():
        return None
    recipe, name = run.recipe, run.folder.name
    license, is_adapter = base_license(recipe.model.source), recipe.adapt.mode != "full"
    try:
        dataset = PreparedDataset.open(recipe.data.train)
        speakers = speaker_rows(dataset.table, dataset.info.frame_rate)
    except (MynaError, OSError):
        speakers = []  # it cannot be read any more
    evaluation, not_evaluated = {}, f"Not evaluated yet: `myna evaluate {name}`."
    try:
        if (file := run.folder / "evaluation" / "evaluation.json").is_file():
            evaluation = read_json(file)
    except MynaError as error:
        not_evaluated = f"The evaluation cannot be read ({error.what}): `myna evaluate {name}` makes it anew."
    titles = {evaluation.get("model", ""): "this", "base": "its base", "real": "recordings"}
    columns = {system: title for system, title in titles.items() if system in evaluation.get("systems", ())}
    card = render_template(
        "evaluate/model_card.md",
        recipe=recipe,
        base=display_name(recipe.model.source),
        license=license,
        has_license_id=re.fullmatch(r"[a-z0-9.-]+", license),
        is_adapter=is_adapter,
        kind=f"A LoRA of rank {recipe.adapt.rank} ({recipe.adapt.mode})" if is_adapter else "A fully trained model",
        sha256=weights_sha256(folder) if is_adapter else "",
        speakers=speakers,
        languages=sorted({row["language"] for row in speakers if row["language"]}),
        consents=[(row["speaker"], consents[row["speaker"]]) for row in speakers if row["speaker"] in consents],
        max_listed=MAX_LISTED,
        settings=_training_settings(run),
        evaluation=evaluation,
        not_evaluated=not_evaluated,
        columns=columns,
        scores=_score_rows([evaluation["systems"][system] for system in columns]),
        result=run.result.name,
    )
    save_text(folder / CARD_FILE, card)
    return folder / CARD_FILE


def write_run_card(run: RunFolder, folder: Path | None = None) -> None:
    """Write the card of a finished run with the consents of the user's stored voices. An error is only logged, so that
    a card never costs the weights."""
    from myna.provenance.voice_store import VoiceStore

    try:
        write_model_card(run, {voice.name: voice.consent.id for voice in VoiceStore().list_voices()}, folder)
    except (MynaError, OSError) as error:
        if isinstance(run, Run):
            run.log(f"no model card was written: {error}")


def speaker_rows(table: ManifestTable, frame_rate: float) -> Speakers:
    """List the speakers of a table with language (of most of their clips), clips and hours; most hours first."""
    is_target = np.asarray(table.is_target, bool) | table.has_answer
    speakers, languages = table.speaker.indices[is_target], table.language.indices[is_target]
    clips = np.bincount(speakers)
    hours = np.bincount(speakers, weights=table.frames[is_target]) / frame_rate / 3600
    answers = np.bincount(speakers, weights=table.has_answer[is_target]) > 0
    pairs, counts = np.unique(np.stack([speakers, languages]), axis=1, return_counts=True)
    order = np.lexsort([-pairs[1], counts])  # of several assignments the last one stays
    language = np.zeros(len(clips), int)
    language[pairs[0, order]] = pairs[1, order]
    rows = [
        {
            "speaker": str(table.speaker.dictionary[index].as_py()) or "unnamed",
            "language": str(table.language.dictionary[int(language[index])].as_py()),
            "clips": int(clips[index]),
            "hours": float(hours[index]),
            "answers": bool(answers[index]),
        }
        for index in map(int, np.flatnonzero(clips))
    ]
    return sorted(rows, key=lambda row: -row["hours"])


def _training_settings(run: RunFolder) -> dict[str, Any]:
    recipe = run.recipe
    settings = {
        "steps": recipe.train.steps or f"{recipe.train.epochs:g} epochs",
        "batch size": recipe.train.batch_size,
        "learning rate": recipe.train.learning_rate,
        "precision": recipe.train.precision,
        "base in": recipe.model.quantization,
        "seed": recipe.train.seed,
    }
    try:
        rows = run.read_metrics()
    except MynaError as error:
        rows, settings["loss"] = [], f"not known: {error.what}"
    losses = [row["loss"] for row in rows if row.get("loss") is not None]
    held_out = [row["evaluation"]["loss"] for row in rows if (row.get("evaluation") or {}).get("loss") is not None]
    if losses:
        settings["loss, first and last step"] = f"{losses[0]:.3f}, {losses[-1]:.3f}"
    if held_out:
        settings["loss on held-out data, last"] = f"{held_out[-1]:.3f}"
    return settings


def _score_rows(systems: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return title and cells of each metric that was measured."""
    rows = []
    for metric in METRICS:
        cells = [system.get(metric.key) or {} for system in systems]
        shown = [
            f"{metric.format(cell['mean'])} ({metric.format(cell['low'])} to {metric.format(cell['high'])})"
            if cell.get("n") and cell.get("low") is not None
            else metric.format(cell.get("mean"))
            for cell in cells
        ]
        if any(cell.get("n") for cell in cells):
            rows.append((metric.title, shown))
    return rows


def base_license(source: str) -> str:
    """Read the licence of a model from its own card; empty if it names none."""
    if source in SHIPPED:
        return "apache-2.0"
    try:
        folder = find_checkpoint(source)
        card = folder / CARD_FILE if folder is not None else None
        text = card.read_text(encoding="utf-8", errors="replace") if card is not None and card.is_file() else ""
    except (MynaError, OSError):
        return ""
    front = re.match(r"---\n(.*?)\n---", text, re.S)
    named = re.search(r"^license(?:_name)?:\s*[\"']?([^\"'\n]+)", front[1], re.M) if front else None
    return named[1].strip() if named else ""
