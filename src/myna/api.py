"""The Python API: what the commands do, as functions. `import myna` offers all of it.

Nothing is printed. Long work reports to the `progress` callback it is given, and every error is a `MynaError` whose
`hint` says what to do. Heavy packages are imported by the function that needs them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from myna.core.errors import MynaError
from myna.core.io import report_disk_errors
from myna.core.progress import ProgressCallback, silent
from myna.speak.voice import Voice

if TYPE_CHECKING:
    from myna.checks.verify import Certificate
    from myna.core.check import Check
    from myna.core.config import Quantization, Recipe
    from myna.curate.curation import CurationForecast, CurationResult
    from myna.curate.settings import CurateSettings
    from myna.curate.xray import Xray
    from myna.data.dataset import DataFolder
    from myna.evaluate.comparison import Comparison
    from myna.evaluate.evaluation import Evaluation
    from myna.models.base import RenderedSequence
    from myna.models.merge import MergeCheck
    from myna.models.ref import ModelRef
    from myna.provenance.detection import Detection
    from myna.provenance.voice_store import StoredVoice
    from myna.speak.answering import AnswerModel
    from myna.train.loop import TrainingObserver
    from myna.train.run import Run

PathLike = str | os.PathLike[str]
SettingOverrides = Mapping[str, Any] | Sequence[str]
"""Recipe settings on top of a recipe: `{"train.steps": 60}`, or `["train.steps=60"]` as `--set` takes them."""


# Data


@report_disk_errors()
def import_dataset(
    source: PathLike,
    out: PathLike,
    *,
    format: str | None = None,
    max_bad: float = 0.01,
    language: str = "",
    speaker: str = "",
    progress: ProgressCallback = silent,
) -> DataFolder:
    """Read recordings and texts in any supported layout into one manifest, without encoding them."""
    from myna.data.prepare import import_folder

    return import_folder(
        os.fspath(source),
        Path(out),
        format=format,
        max_bad=max_bad,
        language=language,
        speaker=speaker,
        progress=progress,
    )


@report_disk_errors()
def prepare(
    source: PathLike,
    out: PathLike,
    *,
    model: str,
    codec: str | None = None,
    format: str | None = None,
    max_bad: float = 0.01,
    language: str = "",
    speaker: str = "",
    device: str = "auto",
    workers: int | None = None,
    ray: str | None = None,
    progress: ProgressCallback = silent,
) -> DataFolder:
    """Import a source and encode its clips with the model's codec. Called again, it encodes only what is new.

    `workers` processes of this machine encode, or those of the Ray cluster at the address `ray`, which must find the
    recordings, the model and `out` under the same paths. By default this process does. The result is the same.
    """
    from myna.core.pools import absolute_folder
    from myna.data.prepare import prepare_folder
    from myna.models import is_model_name, open_family

    there = model if is_model_name(model) else absolute_folder(model)
    return prepare_folder(
        os.fspath(source),
        Path(out),
        partial(open_family, there, codec=codec and absolute_folder(codec)),
        format=format,
        max_bad=max_bad,
        language=language,
        speaker=speaker,
        device=device,
        workers=workers,
        ray=ray,
        progress=progress,
    )


@report_disk_errors()
def curate(
    sources: PathLike | Sequence[PathLike],
    out: PathLike,
    *,
    asr: str | None = None,
    language: str | None = None,
    speakers: int | None = None,
    enrol: Sequence[str] = (),
    script: PathLike | None = None,
    settings_file: PathLike | None = None,
    settings: SettingOverrides = (),
    limit: int | None = None,
    workers: int | None = None,
    ray: str | None = None,
    progress: ProgressCallback = silent,
) -> CurationResult:
    """Turn raw recordings into clips with text and speaker, kept or dropped with a reason; `prepare` reads the result.

    `asr`, `language`, `speakers` and `enrol` are short for `listen.asr`, `listen.language`, `speakers.number` and
    `speakers.enrolment`. The folder remembers its settings. Called again it goes on where it was; called with no
    sources (`[]`) it decides again with other thresholds, and listens to nothing. `workers` processes of this machine
    do the work, or those of the Ray cluster at the address `ray`.
    """
    from myna.curate.curation import run_curation

    folder = Path(out)
    return run_curation(
        _paths(sources),
        folder,
        _curate_settings(folder, asr, language, speakers, enrol, settings_file, settings),
        script=Path(script) if script is not None else None,
        limit=limit,
        workers=workers,
        ray=ray,
        progress=progress,
    )


@report_disk_errors()
def forecast_curation(
    sources: PathLike | Sequence[PathLike],
    *,
    asr: str | None = None,
    language: str | None = None,
    speakers: int | None = None,
    enrol: Sequence[str] = (),
    settings_file: PathLike | None = None,
    settings: SettingOverrides = (),
    workers: int | None = None,
    progress: ProgressCallback = silent,
) -> CurationForecast:
    """What `curate` would keep, and how long it would take, from ten minutes of the sources. Nothing is written."""
    from myna.curate.curation import forecast

    chosen = _curate_settings(None, asr, language, speakers, enrol, settings_file, settings)
    return forecast(_paths(sources), chosen, workers=workers, progress=progress)


@report_disk_errors()
def xray(folder: PathLike, *, model: str | None = None, progress: ProgressCallback = silent) -> Xray:
    """Show what a curated or prepared folder holds: FOLDER/xray/report.html to look at and listen to, and xray.json.

    With `model`, its texts are compared with that model's tokenizer.
    """
    from myna.curate.xray import run_xray

    return run_xray(Path(folder), model=model, progress=progress)


@report_disk_errors()
def correct(
    folder: PathLike,
    clip: str | None = None,
    *,
    text: str | None = None,
    drop: bool = False,
    restore: bool = False,
    speaker: str | None = None,
    start: float | None = None,
    end: float | None = None,
) -> list[str]:
    """Add one correction to FOLDER/corrections.jsonl: of a clip its text, its speaker, its edges in seconds of the
    recording, or whether it is used; or, with `speaker="A=B"` and no clip, that A is B. Returns notes on the file.

    `curate` applies them when it decides again, `prepare` when it reads a folder that was not curated.
    """
    from myna.data.corrections import add_correction, make_correction

    notes: list[str] = []
    made = make_correction(clip, text=text, drop=drop, restore=restore, speaker=speaker, start=start, end=end)
    add_correction(Path(folder), made, notes.append)
    return notes


def _paths(sources: PathLike | Sequence[PathLike]) -> list[Path]:
    return [Path(one) for one in ([sources] if isinstance(sources, str | os.PathLike) else sources)]


def _curate_settings(
    folder: Path | None,
    asr: str | None,
    language: str | None,
    speakers: int | None,
    enrol: Sequence[str],
    file: PathLike | None,
    settings: SettingOverrides,
) -> CurateSettings:
    from myna.curate.settings import load_curate_settings

    named = {"listen.asr": asr, "listen.language": language, "speakers.number": speakers}
    shortcuts: dict[str, Any] = {key: value for key, value in named.items() if value is not None}
    shortcuts |= {"speakers.enrolment": list(enrol)} if enrol else {}
    overrides = [*_overrides(shortcuts), *_overrides(settings)]
    return load_curate_settings(folder, overrides, Path(file) if file is not None else None)


@report_disk_errors()
def split(data: PathLike, *, speakers: int = 0, texts: int = 10, seed: int = 0) -> dict[str, DataFolder]:
    """Hold out speakers and texts of a prepared folder: a prepared folder for each subset, by its name."""
    from myna.data.split import split_folder

    return split_folder(Path(data), speakers=speakers, texts=texts, seed=seed)


def render(
    data: PathLike, *, model: str, id: str | None = None, count: int = 1, settings: SettingOverrides = ()
) -> list[RenderedSequence]:
    """Training sequences of a prepared folder: token ids, delayed codes and labels, as the model sees them."""
    from myna.core.config import parse_recipe
    from myna.train.loop import render_targets

    tree = {"model": {"source": model}, "data": {"train": os.fspath(data)}, "train": {"steps": 1}}
    return render_targets(parse_recipe(_with_settings(tree, settings), where="--set"), id=id, count=count)


# Training


def train(
    recipe: Recipe | Mapping[str, Any] | PathLike | None = None,
    *,
    model: str | None = None,
    data: PathLike | None = None,
    evaluation: PathLike | None = None,
    steps: int | None = None,
    out: PathLike | None = None,
    settings: SettingOverrides = (),
    gpus: int = 1,
    dry_run: bool = False,
    progress: ProgressCallback = silent,
    observer: TrainingObserver | None = None,
) -> Run:
    """Train into a run folder, `runs/NAME` unless `out` is given.

    `recipe` is a `Recipe`, a tree of settings, or a YAML file; `model`, `data`, `evaluation` and `steps` are short for
    `model.source`, `data.train`, `data.evaluation` and `train.steps`, and enough without a recipe.
    """
    shortcuts = {"model.source": model, "data.train": data, "data.evaluation": evaluation, "train.steps": steps}
    given = {key: os.fspath(value) if isinstance(value, os.PathLike) else value for key, value in shortcuts.items()}
    loaded = _load_recipe(recipe, {key: value for key, value in given.items() if value is not None}, settings)
    from myna.train.run import Run

    run = Run(Path(out) if out is not None else Path("runs") / loaded.name, loaded)
    return _start_training(run, observer, gpus=gpus, dry_run=dry_run, progress=progress)


def resume(
    run: Run | PathLike,
    *,
    settings: SettingOverrides = (),
    gpus: int = 1,
    progress: ProgressCallback = silent,
    observer: TrainingObserver | None = None,
) -> Run:
    """Continue a run from its newest checkpoint. `settings` may change how and how long it is trained (`train.steps`),
    not what it learns. A finished run goes on if it is given more steps."""
    from myna.train.run import Run

    overrides = _overrides(settings)
    opened = Run.open(_run_folder(run), overrides)
    return _start_training(opened, observer, gpus=gpus, resume=True, settings=overrides, progress=progress)


def _start_training(run: Run, observer: TrainingObserver | None, **options: Any) -> Run:
    from myna.evaluate.callback import SpeechEvaluation
    from myna.train.launch import start_training

    return start_training(run, observer, open_evaluation=SpeechEvaluation.from_recipe, describe=_write_card, **options)


def _write_card(run: Run, folder: Path | None = None) -> None:
    """Write the model card of a run that is finished. Weights are not lost for a card: what goes wrong is logged."""
    from myna.evaluate.model_card import write_model_card
    from myna.provenance.voice_store import VoiceStore

    try:
        write_model_card(run, {voice.name: voice.consent.id for voice in VoiceStore().list_voices()}, folder)
    except (MynaError, OSError) as error:
        run.log(f"no model card was written: {error}")


def _load_recipe(
    recipe: Recipe | Mapping[str, Any] | PathLike | None, given: Mapping[str, Any], settings: SettingOverrides
) -> Recipe:
    from myna.core.config import Recipe, load_recipe, parse_recipe
    from myna.models import is_model_name

    if isinstance(recipe, str | os.PathLike):
        return load_recipe(Path(recipe), [*_overrides(given), *_overrides(settings)]).absolute(is_model_name)
    tree: dict[str, Any]
    if recipe is None:
        tree, where = {"model": {}, "data": {}, "train": {}}, "the recipe"
    elif isinstance(recipe, Recipe):
        tree, where = recipe.model_dump(mode="json"), f"the recipe {recipe.name}"
    else:
        tree, where = {**recipe}, "the recipe"
    overrides = [*_overrides(given), *_overrides(settings)]
    return parse_recipe(_with_settings(tree, overrides), where=where).absolute(is_model_name)


def _overrides(settings: SettingOverrides) -> list[str]:
    """Settings as `key=value` with YAML values."""
    if not isinstance(settings, Mapping):
        return list(settings)
    import json

    return [f"{key}={json.dumps(value, default=os.fspath)}" for key, value in settings.items()]


def _with_settings(tree: Mapping[str, Any], settings: SettingOverrides) -> dict[str, Any]:
    from copy import deepcopy

    from myna.core.config import override

    changed = deepcopy(dict(tree))
    for setting in _overrides(settings):
        override(changed, setting)
    return changed


def _run_folder(run: Run | PathLike) -> Path:
    return Path(run) if isinstance(run, str | os.PathLike) else run.folder


# Speaking and answering


def load(
    source: Run | PathLike,
    *,
    model: str | None = None,
    codec: str | None = None,
    device: str = "auto",
    strength: float = 1.0,
    quantization: Quantization = "none",
    exact: bool = False,
) -> Voice:
    """Open a model that speaks: a run or one of its checkpoints, a LoRA adapter of PEFT, or an untuned model; folders,
    or names on the hub.

    `model` is the base of a run or an adapter, where it is not the one that it names; `strength` is how much of what a
    LoRA has learned is applied; `quantization` stores the weights smaller: fp8 (recent GPUs alone) and int8 in half,
    nf4 in a quarter. With `exact`, speech is the same bits whatever else is spoken at the same time, and slower.
    """
    return Voice.open(
        _model_ref(source, model),
        codec=codec,
        device=device,
        strength=strength,
        quantization=quantization,
        exact=exact,
    )


def load_answer_model(
    source: Run | PathLike, *, model: str | None = None, device: str = "auto", batch_size: int = 16
) -> AnswerModel:
    """Open a model that answers in words, as `load` opens one that speaks."""
    from myna.speak.answering import AnswerModel

    return AnswerModel.open(_model_ref(source, model), device=device, batch_size=batch_size)


def _model_ref(source: Run | PathLike, base: str | None) -> ModelRef:
    from myna.models.ref import ModelRef

    return ModelRef.find(source) if base is None else ModelRef.find_trained(source, base)


# Voices and marks


def add_voice(
    name: str,
    recordings: Sequence[PathLike],
    consent: PathLike,
    *,
    language: str = "en",
    texts: Sequence[str] = (),
    asr: str = "base",
    speaker_encoder: str = "resemblyzer",
    device: str = "auto",
) -> StoredVoice:
    """Store a voice by its recordings and the recording of its speaker's consent, in which the sentence of
    `consent_sentence` is read aloud. The words are checked by the ASR and the voice by the speaker encoder, both as of
    `evaluate`. `texts` are transcripts of the recordings, by default those of the ASR."""
    from myna.core.device import pick_device
    from myna.provenance.consent import ConsentChecker
    from myna.provenance.voice_store import VoiceStore, check_voice_name

    check_voice_name(name)
    store = VoiceStore()
    store.check_new_name(name)
    checker = ConsentChecker.open(asr, speaker_encoder, str(pick_device(device)))
    known = store.create_consent(name, Path(consent), language, checker)
    try:
        return store.create_voice(name, [Path(one) for one in recordings], known.id, checker, texts=texts)
    except BaseException:
        store.delete_consent(known.id)  # of no use without its voice
        raise


def consent_sentence(name: str, *, language: str = "en") -> str:
    """The sentence that a speaker of that name reads aloud today, to agree to a stored voice."""
    from myna.provenance.consent import sentence_of_day
    from myna.provenance.voice_store import check_voice_name

    check_voice_name(name)
    return sentence_of_day(name, language).text


def detect(file: PathLike, *, device: str = "cpu") -> Detection:
    """Look for the watermark and content credentials in an audio file, and for the file in this machine's log."""
    from myna.provenance.detection import inspect_file

    return inspect_file(Path(file), device=device)


# Evaluation


def evaluate(
    subject: Run | PathLike,
    *,
    data: PathLike | None = None,
    sentences: PathLike | None = None,
    against: Sequence[str] = (),
    out: PathLike | None = None,
    asr: str | None = None,
    speaker_encoder: str = "resemblyzer",
    language: str = "",
    strength: float = 1.0,
    model: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    batch_size: int = 16,
    device: str = "auto",
    force: bool = False,
    progress: ProgressCallback = silent,
) -> Evaluation:
    """Evaluate speech: word errors, speaker similarity, quality and stopping, beside the real recordings and the
    untuned base. Writes `evaluation.json`, `items.parquet` and `report.html`; called again, does what is missing. Into
    a folder that holds anything but an evaluation it writes only with `force`."""
    from myna.evaluate.evaluation import EvaluationSettings, evaluate_system
    from myna.train.run import Run

    settings = EvaluationSettings(
        data=_path(data),
        sentences=_path(sentences),
        asr=asr,
        speaker_encoder=speaker_encoder,
        language=language,
        seed=seed,
        limit=limit,
        batch_size=batch_size,
        device=device,
        model=model,
        force=force,
    )
    evaluation = evaluate_system(
        subject if isinstance(subject, str) else str(_run_folder(subject)),
        settings,
        against=tuple(against),
        out=_path(out),
        strength=strength,
        progress=progress,
    )
    if evaluation.run is not None:
        _write_card(Run(evaluation.run.folder, evaluation.run.recipe))
    return evaluation


def compare(
    subjects: Sequence[Run | PathLike],
    *,
    data: PathLike | None = None,
    sentences: PathLike | None = None,
    out: PathLike | None = None,
    asr: str | None = None,
    speaker_encoder: str = "resemblyzer",
    language: str = "",
    model: str | None = None,
    limit: int | None = None,
    trials: int = 20,
    seed: int = 0,
    batch_size: int = 16,
    device: str = "auto",
    force: bool = False,
    progress: ProgressCallback = silent,
) -> Comparison:
    """Compare runs, models or evaluations on the same sentences: metrics with paired differences, and a page for blind
    listening. Writes `compare.json` and `compare.html`; into a folder that holds anything but a comparison, only with
    `force`."""
    from myna.evaluate.comparison import compare_systems
    from myna.evaluate.evaluation import EvaluationSettings

    settings = EvaluationSettings(
        data=_path(data),
        sentences=_path(sentences),
        asr=asr,
        speaker_encoder=speaker_encoder,
        language=language,
        seed=seed,
        limit=limit,
        batch_size=batch_size,
        device=device,
        model=model,
        force=force,
    )
    names = [one if isinstance(one, str) else str(_run_folder(one)) for one in subjects]
    return compare_systems(names, settings, out=_path(out), trials=trials, progress=progress)


def _path(value: PathLike | None) -> Path | None:
    return None if value is None else Path(value)


# Checkpoints and the machine


def model_stats(
    model: str,
    *,
    lora: str = "comprehensive",
    rank: int = 16,
    targets: Sequence[str] = (),
    train_modules: Sequence[str] = (),
) -> dict[str, Any]:
    """Count the parameters of a model and those a LoRA would train, from shapes alone."""
    from myna.core.config import AdaptSettings, parse_settings
    from myna.models import open_family
    from myna.models.lora import count_model

    tree = {"mode": lora, "rank": rank, "targets": tuple(targets), "train_modules": tuple(train_modules)}
    return count_model(open_family(model), parse_settings(AdaptSettings, tree, where="--lora"))


def convert(source: PathLike, out: PathLike, *, layout: str = "transformers") -> Path:
    """Rewrite a checkpoint or an adapter in another layout, `transformers` or `original`, bit for bit."""
    from myna.models import convert_checkpoint

    convert_checkpoint(Path(source), Path(out), layout)
    return Path(out)


def merge(
    source: Run | PathLike,
    out: PathLike,
    *,
    model: str | None = None,
    layout: str = "transformers",
    strength: float = 1.0,
    dtype: str = "auto",
    device: str = "cpu",
) -> MergeCheck:
    """Merge the LoRA of a run or an adapter into its base: a whole model with tokenizer and codec, in the layout of
    transformers or in the `original` one. Returns how far its logits are from the adapter's.

    `dtype` is the base model's own, or float32, bfloat16 or float16. `model` is as for `load`.
    """
    from myna.models.ref import ModelRef
    from myna.speak.loading import merge_tuned

    return merge_tuned(
        ModelRef.find_trained(source, model), Path(out), layout=layout, strength=strength, dtype=dtype, device=device
    )


@report_disk_errors()
def verify(
    source: Run | PathLike,
    out: PathLike | None = None,
    *,
    model: str | None = None,
    codec: str | None = None,
    device: str = "auto",
    quick: bool = False,
    progress: ProgressCallback = silent,
) -> Certificate:
    """Compare every path of a model, a run or an adapter with transformers' own and with one another, on this device.

    A failed check is no exception: `certificate.passed` and `certificate.verdict` say how it went. verify.json and
    verify.html are written into `out`, where given. `model` is as for `load`; `quick` generates less.
    """
    from myna.checks.verify import run_verification
    from myna.core.io import check_writable

    if out is not None:
        check_writable(Path(out))
    certificate = run_verification(
        _run_folder(source), base=model, codec=codec, device=device, quick=quick, progress=progress
    )
    if out is not None:
        certificate.save(Path(out))
    return certificate


def extract_lora(
    base: str, tuned: str, out: PathLike, *, rank: int = 16, lora: str = "comprehensive"
) -> dict[str, Any]:
    """Turn a fully trained model into a LoRA of its base by truncated SVD; the report names the relative error."""
    from myna.models.merge import extract_adapter

    return dict(extract_adapter(base, tuned, Path(out), rank, mode=lora))


def make_tiny(out: PathLike, *, seed: int = 0, answers: bool = False) -> Path:
    """Write a tiny random checkpoint of the real classes; of a model that answers in words, if asked."""
    from myna.models import save_tiny_model

    return save_tiny_model(Path(out), seed=seed, answers=answers)


def doctor(
    model: str | None = None, *, ray: str | None = None, shared: PathLike | None = None, asr: str | None = None
) -> list[Check]:
    """Check this machine, and a model if one is named; each problem comes with what to type.

    With `ray` the nodes of the cluster at that address are compared instead: their versions, models of curation, the
    model's codec, the recogniser `asr`, and whether `shared` is one folder on all of them.
    """
    from myna.checks.cluster import check_cluster
    from myna.checks.doctor import run_doctor

    if ray is not None:
        return check_cluster(ray, shared=_path(shared), model=model, asr=asr).checks
    return list(run_doctor(model))
