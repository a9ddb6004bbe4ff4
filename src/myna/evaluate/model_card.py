"""Model card of a run: README.md beside its weights, in the layout of the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from myna.core.errors import MynaError
from myna.core.io import save_text
from myna.core.run_folder import RunFolder
from myna.data.dataset import ManifestTable, PreparedDataset
from myna.evaluate.metrics import METRICS
from myna.models import SHIPPED, find_checkpoint
from myna.models.files import read_json
from myna.models.ref import display_name, weights_sha256
from myna.train.run import Run

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
    speakers = _speakers(run)
    parts = [
        _front_matter(run, speakers),
        f"# {run.recipe.name}\n\n{_summary(run, folder)}",
        f"## Data\n\n{_data(run, speakers)}",
        f"## Consent\n\n{_consent(speakers, consents)}",
        f"## Training\n\n{_training(run)}",
        f"## Evaluation\n\n{_scores(run)}",
        f"## Licence\n\n{_license_text(run)}",
        f"## Use, and the mark on what it says\n\n{_usage(run, speakers)}",
    ]
    save_text(folder / CARD_FILE, "\n\n".join(parts) + "\n")
    return folder / CARD_FILE


def write_run_card(run: RunFolder, folder: Path | None = None) -> None:
    """Write the card of a finished run with the consents of the user's stored voices. An error is only logged: a card
    is not worth the weights."""
    from myna.provenance.voice_store import VoiceStore

    try:
        write_model_card(run, {voice.name: voice.consent.id for voice in VoiceStore().list_voices()}, folder)
    except (MynaError, OSError) as error:
        if isinstance(run, Run):
            run.log(f"no model card was written: {error}")


def _front_matter(run: RunFolder, speakers: Speakers) -> str:
    source, license = run.recipe.model.source, base_license(run.recipe.model.source)
    languages = sorted({row["language"] for row in speakers if row["language"]})
    is_adapter = run.recipe.adapt.mode != "full"
    lines = [
        "---",
        f"base_model: {display_name(source)}",
        *(["library_name: peft"] if is_adapter else []),
        *([f"license: {license}"] if re.fullmatch(r"[a-z0-9.-]+", license) else []),
        *(["language:", *(f"- {language}" for language in languages)] if languages else []),
        "tags:",
        "- myna",
        "---",
    ]
    return "\n".join(lines)


def _summary(run: RunFolder, folder: Path) -> str:
    recipe, kind = run.recipe, "A fully trained model"
    if recipe.adapt.mode != "full":
        kind = f"A LoRA of rank {recipe.adapt.rank} ({recipe.adapt.mode})"
    base = display_name(recipe.model.source) + (f"@{recipe.model.revision}" if recipe.model.revision else "")
    hash_line = ""
    if recipe.adapt.mode != "full":
        hash_line = f" Its weights have the sha256 `{weights_sha256(folder)}`."
    return f"{kind} of `{base}`, made with Myna.{hash_line}"


def _speakers(run: RunFolder) -> Speakers:
    """Count the speakers of the training data; none if it cannot be read any more."""
    try:
        dataset = PreparedDataset.open(run.recipe.data.train)
    except (MynaError, OSError):
        return []
    return speaker_rows(dataset.table, dataset.info.frame_rate)


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


def _data(run: RunFolder, rows: Speakers) -> str:
    if not rows:
        return f"Unknown: {run.recipe.data.train.name} could not be read when this card was written."
    clips, hours = sum(row["clips"] for row in rows), sum(row["hours"] for row in rows)
    lines = [
        f"{hours:.2f} hours, {clips:,} clips, {len(rows):,} speakers, from `{run.recipe.data.train.name}`.",
        "",
        "| speaker | language | clips | minutes |",
        "|---|---|---|---|",
        *(
            f"| {_cell(row['speaker'])} | {_cell(row['language']) or '?'} | {row['clips']} | {60 * row['hours']:.1f} |"
            for row in rows[:MAX_LISTED]
        ),
    ]
    if len(rows) > MAX_LISTED:
        lines.append(f"| and {len(rows) - MAX_LISTED} more | | | |")
    return "\n".join(lines)


def _consent(rows: Speakers, consents: Mapping[str, str]) -> str:
    known = {row["speaker"]: consents[row["speaker"]] for row in rows if row["speaker"] in consents}
    lines = [
        f"- {speaker}: `{consent}`, read aloud and checked when the voice of that name was stored on the machine that "
        "trained this. The clips of the training were not compared with it."
        for speaker, consent in list(known.items())[:MAX_LISTED]
    ]
    missing = len(rows) - len(known)
    if missing or not rows:
        count = f"{missing} of {len(rows)} speakers" if rows else "any speaker"
        lines.append(
            f"**No consent of {count} is on record.** Whether these voices may be used is for whoever trained this to "
            "show. `myna voice add NAME` records a consent."
        )
    return "\n".join(lines)


def _training(run: RunFolder) -> str:
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
    table = "\n".join(f"| {name} | {value} |" for name, value in settings.items())
    return f"| | |\n|---|---|\n{table}\n\nEvery setting is in the run's `config.yaml`."


def _scores(run: RunFolder) -> str:
    file = run.folder / "evaluation" / "evaluation.json"
    try:
        found = read_json(file) if file.is_file() else None
    except MynaError as error:
        return f"The evaluation cannot be read ({error.what}): `myna evaluate {run.folder.name}` makes it anew."
    if not found:
        return f"Not evaluated yet: `myna evaluate {run.folder.name}`."
    systems = {name: found["systems"][name] for name in (found["model"], "base", "real") if name in found["systems"]}
    titles = {found["model"]: "this", "base": "its base", "real": "recordings"}
    scorers = ", ".join(sorted(found["scorers"].values())) or "no scorer"
    lines = [
        f"{found['items']} items, by {scorers}. In brackets 95 % intervals by bootstrap over items. Speech is measured "
        "without its watermark.",
        "",
        "| | " + " | ".join(titles[name] for name in systems) + " |",
        "|---" * (len(systems) + 1) + "|",
    ]
    for metric in METRICS:
        cells = [system.get(metric.key) or {} for system in systems.values()]
        if not any(cell.get("n") for cell in cells):
            continue
        shown = [
            f"{metric.format(cell['mean'])} ({metric.format(cell['low'])} to {metric.format(cell['high'])})"
            if cell.get("n") and cell.get("low") is not None
            else metric.format(cell.get("mean"))
            for cell in cells
        ]
        lines.append(f"| {metric.title} | {' | '.join(shown)} |")
    return "\n".join([*lines, *(f"\n**{warning}**" for warning in found.get("warnings", ()))])


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


def _license_text(run: RunFolder) -> str:
    source = run.recipe.model.source
    known = base_license(source)
    if known:
        return f"The base `{display_name(source)}` is under `{known}`; what is made from it is bound by that."
    return f"The licence of the base `{display_name(source)}` is not known here: see where it was published."


def _usage(run: RunFolder, speakers: Speakers) -> str:
    name = run.result.name
    if any(row["answers"] for row in speakers):
        return (
            f"```\nmyna answer RECORDING.wav --run {name}\n```\n\nIt answers in words, and speaks nothing to be marked."
        )
    return (
        f'```\nmyna speak "your words" --run {name} --reference REF.wav --reference-text "..." -o out.wav\n'
        "myna detect out.wav\n```\n\n"
        "What `myna speak` and `myna serve` say carries the watermark `perth-implicit-1`, unless it was switched off, "
        "and files carry content credentials (C2PA) with the hash above. `myna detect FILE` shows both. A missing mark "
        "does not prove that a recording is real: loud noise or a change of speed removes it."
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
