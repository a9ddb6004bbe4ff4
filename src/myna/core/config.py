"""Recipe settings: a typed tree with the meaning and the default of every key.

A recipe is a YAML file with only what differs. Unknown keys are refused with the nearest valid ones.
tools/recipe_reference.py prints the reference page, docs/reference/recipe.md.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from myna.core.errors import ConfigError
from myna.core.io import DEFAULT_SPEAKER_ENCODER, absolute_folder
from myna.core.setting_names import nearest_settings

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Quantization = Literal["none", "fp8", "int8", "nf4"]
SettingOverrides = Mapping[str, Any] | Sequence[str]
"""Settings on top of others: `{"train.steps": 60}`, or `["train.steps=60"]` as `--set` takes them."""
SCORER_KINDS = ("transformers", "resemblyzer", "ecapa", "wavlm")
"""Kinds of scorers. `KIND` takes the default weights, `KIND:PATH` those at PATH."""


AnySettings = TypeVar("AnySettings", bound="Settings")


class Settings(BaseModel):
    """Group of settings. Frozen; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    def absolute_paths(self) -> Self:
        """Return these settings with full paths."""
        paths = {name: value.absolute() for name, value in self if isinstance(value, Path)}
        return self.model_copy(update=paths)


class ModelSettings(Settings):
    """The base model."""

    source: str = Field(min_length=1)
    """Hub name or folder of the model to start from."""
    revision: str | None = None
    """Hub revision: a branch, a tag or a commit."""
    codec: str | None = None
    """Hub name (`OWNER/NAME`, or `OWNER/NAME@REVISION`) or folder of the codec; by default the model's own."""
    check_pretrained: bool = True
    """Expect a pretrained model: stop before the first step if its loss is at chance, or lower with shifted labels. Set
    false for random weights."""
    quantization: Quantization = "none"
    """Storage of the frozen layers under a LoRA: `none` keeps the compute type, `fp8` is faster on Hopper and later,
    `int8` and `nf4` take half and a quarter of the memory on any device. Trainable weights stay fp32."""


class DataSettings(Settings):
    """Training data, references and packing."""

    train: Path
    """Folder of training data, made by `myna prepare`."""
    evaluation: Path | None = None
    """Prepared folder for evaluation, never trained on."""
    reference: Literal["same_speaker", "given", "none"] = "same_speaker"
    """Source of the voice: another clip of the speaker (unless the data names one), only clips that the data names, or
    none."""
    require_reference: bool = False
    """Stop if a target has no reference, instead of training it without one."""
    reference_placement: Literal["turn", "system"] = "turn"
    """Put the reference into turns of its own, or into the system message."""
    reference_seconds: tuple[Positive, Positive] = (1.0, 15.0)
    """Shortest and longest clip to draw as a reference."""
    seconds: tuple[Positive, Positive] = (0.2, 30.0)
    """Shortest and longest target; others are left out and counted."""
    scene: str = ""
    """Sentence about the room or the manner of speaking, for targets whose data names none."""
    row_tokens: Count = 2048
    """Token budget of a packed row."""
    pack: bool = True
    """Pack several utterances into a row; false gives each utterance its own row."""
    workers: Annotated[int, Field(ge=0)] = 2
    """Data loader workers: processes when training on a GPU, threads elsewhere; 0 makes batches in the training thread.
    The data does not depend on it."""
    packing_window: Count = 4096
    """Number of utterances packed at a time: more of them fill rows better."""


class AdaptSettings(Settings):
    """Trainable weights: a LoRA, or the model itself."""

    mode: Literal["comprehensive", "audio_focused", "attention_only", "custom", "full"] = "comprehensive"
    """Projections with a LoRA. `comprehensive`: attention and both FFNs; `audio_focused`: q, v and the audio FFN;
    `attention_only`: attention; `custom`: the list in `targets`. `full` trains the model itself, without LoRA."""
    targets: tuple[str, ...] = ()
    """Endings of module names for mode `custom`, such as `audio_mlp.down_proj`."""
    rank: Count = 16
    """Rank of each LoRA."""
    alpha: Positive = 32.0
    """LoRA scale: updates are multiplied by alpha / rank."""
    dropout: BelowOne = 0.0
    """Share of a LoRA's inputs dropped in training."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead, which keeps updates of high ranks as large as those of low ones (rsLoRA)."""
    dora: bool = False
    """Train magnitude and direction of each weight separately (DoRA)."""
    train_modules: tuple[str, ...] = ()
    """Modules trained in full beside the LoRA: `text_head` (which needs `loss.text_weight` in a model that speaks),
    `audio_head`, `audio_embedding`, or any group listed under `freeze` without a LoRA."""
    init: str | None = None
    """Adapter to start from instead of a new one: a run or one of its checkpoints, or the folder or hub name of any
    LoRA saved by PEFT. It must have the same rank, alpha, modules and base model."""
    freeze: tuple[str, ...] = ()
    """Groups that stay frozen in mode `full`: `text_embedding`, `audio_embedding`, `attention`, `text_ffn`,
    `audio_ffn`, `norms`, `text_head`, `audio_head`."""
    save_precision: Literal["stored", "fp32"] = "stored"
    """Precision that a model trained in mode `full` is saved in: that of the base model's files, or fp32."""


class LossSettings(Settings):
    """Loss weights and labels."""

    codebook_weights: Literal["uniform", "1/k"] | tuple[Annotated[float, Field(ge=0)], ...] = "uniform"
    """Relative weights of the codebooks; a list gives one weight per codebook. `1/k` stresses the first codebooks,
    which carry words and speaker."""
    text_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the loss on the assistant's text; 0 leaves the text head unloaded."""
    audio_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the loss on audio codes, a mean over codebooks."""
    supervise_references: bool = False
    """Supervise every audio turn, including references, except clips marked `reference_only`."""
    label_smoothing: BelowOne = 0.0
    """Probability mass of each target spread over all classes."""


class Stage(Settings):
    """One stage of a curriculum of loss weights."""

    until: Positive
    """End of the stage: an optimizer step, or a share of all steps up to 1."""
    text_weight: Annotated[float, Field(ge=0)] = 0.0
    """`loss.text_weight` in this stage."""
    audio_weight: Annotated[float, Field(ge=0)] = 1.0
    """`loss.audio_weight` in this stage."""


class TrainSettings(Settings):
    """Optimization, precision, checkpoints and hardware."""

    epochs: Positive | None = None
    """Passes over the data. Give this or `steps`."""
    steps: Count | None = None
    """Optimizer steps. Give this or `epochs`; `--set` of one replaces the other in the recipe."""
    batch_size: Count = 8
    """Packed rows per optimizer step, over all processes and gradient accumulation."""
    micro_batch_size: Count = 1
    """Packed rows per forward pass on one device; gradient accumulation follows from this."""
    learning_rate: Positive = 1e-4
    """Peak learning rate, after the warm-up."""
    warmup: Annotated[float, Field(ge=0)] = 0.03
    """Warm-up in optimizer steps, or as a share of all steps below 1. A warm-up longer than the run becomes half of the
    run."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Decay of the learning rate after the warm-up."""
    final_learning_rate_ratio: Share = 0.0
    """Learning rate at the end of the schedule, as a share of the peak."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's decoupled weight decay."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.99)
    """AdamW's betas."""
    max_grad_norm: Positive = 1.0
    """Gradient norm to clip to."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "pure-fp16"] = "auto"
    """Compute type of the frozen part; trainable weights are fp32, except with `pure-fp16`, which is a last resort."""
    gradient_checkpointing: Literal["auto", "none", "full"] | Count = "auto"
    """Recompute layers in the backward pass to save memory: as few as fit the device by the memory plan, none, all of
    them, or one in n."""
    fused_lora: bool = True
    """Compute a plain LoRA (no dropout, no DoRA) fused with its frozen weights, on a GPU with Triton kernels: the same
    training, faster."""
    compile: bool = False
    """Compile layers that are not fused, on a GPU. The first step then waits a minute or two for the compiler."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")
    """`auto` takes the best device there is; or `cpu`, `cuda`, `cuda:1`, `mps`."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of all random choices: equal seeds and data give equal runs."""
    evaluate_every: Count | None = None
    """Optimizer steps between evaluations; by default ten times in a run."""
    save_every: Count | None = None
    """Optimizer steps between checkpoints; by default with each evaluation."""
    keep_checkpoints: Count = 2
    """Number of checkpoints to keep, in addition to the best one."""
    early_stopping_patience: Count | None = None
    """Stop after this many evaluations without a better loss; the best checkpoint is then the result."""
    ema_decay: BelowOne | None = None
    """Decay of a running mean of the trained weights, which is then evaluated and saved in their place."""
    stages: tuple[Stage, ...] = ()
    """Curriculum of loss weights for the first part of the run: stages in order. Each has `until`, its end (all of them
    as a share of the run up to 1, or all as a step), `text_weight` (by default 0) and `audio_weight` (by default 1).
    After the last stage the weights of `loss` apply. For example, text first:
    `[{until: 0.2, text_weight: 1, audio_weight: 0.5}, {until: 0.5, text_weight: 0.2}]`."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Trackers that get the metrics, in addition to `metrics.jsonl`."""


SAMPLE_SETTINGS = {"sentences", "data", "limit", "every", "seed", "language", "batch_size"}
"""Settings of `speech_eval` that need no recognizer."""


class SpeechEvalSettings(Settings):
    """Speech evaluation during training, which chooses the best checkpoint. Without `asr` the `sentences`, or the texts
    of `data`, are spoken and kept for listening, and the loss chooses."""

    asr: str | None = None
    """Name or folder of a Whisper model. If set, the untuned model and then the model in training speak the same
    sentences at every evaluation, and `best/` in the run is the checkpoint with the best score."""
    speaker_encoder: str = DEFAULT_SPEAKER_ENCODER
    """Speaker encoder for similarities: `ecapa`, or another one that `myna evaluate --speaker-encoder` accepts.
    Scores of different encoders cannot be compared."""
    sentences: Path | None = None
    """Text file with one sentence per line, spoken by the speakers of `speech_eval.data` in turn, or a list in the
    format of seed-tts-eval; by default the texts of `speech_eval.data`."""
    data: Path | None = None
    """Prepared folder with voices and texts that are not trained on; by default `data.evaluation`."""
    limit: Count = 48
    """Number of sentences; speakers take turns. Half of them are spoken at every evaluation and choose the best
    checkpoint. The untuned model and each new best checkpoint speak the others, which measure the gain. Without `asr`
    all are spoken."""
    every: Count | None = None
    """Optimizer steps between speech evaluations; by default with each evaluation of the loss, or without `asr` with
    each checkpoint."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed for choosing sentences and for sampling, equal at every evaluation."""
    language: str = ""
    """Language of sentences that name none, such as `en`."""
    forgetting_data: Path | None = None
    """Prepared folder, or list in the format of seed-tts-eval, with other languages and speakers: a checkpoint that
    gets worse on these cannot be the best."""
    patience: Count | None = None
    """Stop after this many speech evaluations without a better checkpoint."""
    min_stop_rate: Share = 0.9
    """Minimum share of sentences that end by themselves, for the best checkpoint."""
    min_mos: Annotated[float, Field(ge=1, le=5)] | None = None
    """Minimum DistillMOS of the best checkpoint; by default half a point below that of the untuned model."""
    batch_size: Count = 16
    """Sentences spoken at once: fewer need less memory. The speech does not change."""


class Recipe(Settings):
    """The complete settings of a training run."""

    name: str = Field(default="run", pattern=r"^\w[\w.-]*$")
    """Name of the run; its folder is `runs/NAME` unless `--out` says otherwise."""
    model: ModelSettings
    data: DataSettings
    adapt: AdaptSettings = AdaptSettings()
    loss: LossSettings = LossSettings()
    train: TrainSettings = TrainSettings()
    speech_eval: SpeechEvalSettings = SpeechEvalSettings()

    def absolute(self, is_model_name: Callable[[str], bool] = lambda _: False) -> Recipe:
        """Return the recipe with full paths, so that a run opens from any folder. A model for which `is_model_name` is
        true is not a folder, even if there is one of that name."""
        source, codec, init = self.model.source, self.model.codec, self.adapt.init
        source = source if is_model_name(source) else absolute_folder(source)
        evaluation = self.speech_eval.absolute_paths()
        asr, encoder = evaluation.asr, evaluation.speaker_encoder
        scorers = {"asr": asr and absolute_scorer(asr), "speaker_encoder": absolute_scorer(encoder)}
        changed = {
            "adapt": self.adapt.model_copy(update={"init": init and absolute_folder(init)}),
            "data": self.data.absolute_paths(),
            "model": self.model.model_copy(update={"source": source, "codec": codec and absolute_folder(codec)}),
            "speech_eval": evaluation.model_copy(update=scorers),
        }
        return self.model_copy(update=changed)

    @property
    def evaluates_speech(self) -> bool:
        """Whether speech is evaluated during training."""
        return self.speech_eval.asr is not None

    @property
    def speaks_samples(self) -> bool:
        """Whether sentences are spoken during training without being scored."""
        return not self.evaluates_speech and bool(self.speech_eval.sentences or self.speech_eval.data)

    @property
    def publishes_best(self) -> bool:
        """Whether the result of a run is its best checkpoint instead of the last."""
        return self.train.early_stopping_patience is not None or self.evaluates_speech

    @property
    def needs_text_head(self) -> bool:
        """Whether the text head is loaded: a loss on audio alone never reaches it."""
        return self.loss.text_weight > 0 or any(stage.text_weight > 0 for stage in self.train.stages)


def absolute_scorer(name: str) -> str:
    """Return the name of an ASR model or a speaker encoder, with a full path if it is an existing folder or file; other
    names are those of a package or of the hub."""
    kind = next((kind for kind in SCORER_KINDS if name.startswith(f"{kind}:")), "")
    path = Path(name.removeprefix(f"{kind}:")).expanduser()
    if name in SCORER_KINDS or not path.exists():
        return name
    return f"{kind}:{path.absolute()}" if kind else str(path.absolute())


def settings_group(annotation: Any) -> type[Settings] | None:
    """Return the group of settings that a field holds; None for a value."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, Settings) else None


def _groups(root: type[Settings]) -> tuple[str, ...]:
    return tuple(name for name, field in root.model_fields.items() if settings_group(field.annotation))


def shipped_recipes() -> dict[str, Path]:
    """Return the recipes of this package, by name."""
    return {path.stem: path for path in sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))}


def load_recipe(path: Path, overrides: list[str] | None = None) -> Recipe:
    """Read a YAML file or a recipe of this package by its name; `overrides` are `key.path=value` with YAML values."""
    if not path.is_file():  # a folder of that name may be the run of the recipe
        path = shipped_recipes().get(str(path), path)
    try:
        tree = read_settings_tree(path, Recipe, hint="start from one that ships: myna recipes NAME --out mine.yaml")
    except FileNotFoundError:
        close = [name for name in shipped_recipes() if path.stem in name]
        close = close or difflib.get_close_matches(path.stem, shipped_recipes(), n=1)
        nearest = f"; did you mean {close[0]}?" if close else ""
        hint = f"give a YAML file, or the name of a recipe that ships: myna recipes lists them{nearest}"
        raise ConfigError(f"there is no recipe {path}", hint=hint) from None
    return parse_recipe(tree, overrides or (), where=f"{path} with --set" if overrides else str(path))


def read_settings_tree(path: Path, root: type[Settings], *, hint: str) -> dict[str, Any]:
    """Return the plain values of a YAML file with settings of `root`; `hint` belongs to the error for an empty file."""
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # a SafeLoader
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", hint="pass the path of a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not readable as YAML: {error}", hint="mend the line it names") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds no settings", hint=hint)
    for group in _groups(root):
        if group in tree and tree[group] is None:  # a heading with nothing under it
            tree[group] = {}
    return tree


def parse_recipe(tree: dict[str, Any], overrides: Iterable[str] = (), *, where: str) -> Recipe:
    """Check a tree of plain values with `overrides` on top; `where` names it in errors."""
    given = {override(tree, setting) for setting in overrides}
    for key, other in (("steps", "epochs"), ("epochs", "steps")):
        if f"train.{key}" in given and f"train.{other}" not in given and tree["train"][key] is not None:
            tree["train"].pop(other, None)  # the recipe's own, which the new length replaces
    recipe = parse_settings(Recipe, tree, where=where)
    for what, hint in _contradictions(recipe):
        raise ConfigError(f"{where}: {what}", hint=hint)
    return recipe


def parse_settings(branch: type[AnySettings], tree: dict[str, Any], *, where: str) -> AnySettings:
    """Check a group of settings by types alone."""
    try:
        return branch.model_validate(tree)
    except ValidationError as error:
        raise _explained(error, where, branch) from None


def make_recipe(
    source: Recipe | Mapping[str, Any] | str | os.PathLike[str] | None,
    shortcuts: Mapping[str, Any],
    settings: SettingOverrides = (),
) -> Recipe:
    """Make a recipe of a recipe, a tree of settings, a YAML file or nothing; with `shortcuts` that are not None, and
    then `settings`, on top."""
    given = {key: value for key, value in shortcuts.items() if value is not None}
    overrides = [*format_overrides(given), *format_overrides(settings)]
    if isinstance(source, str | os.PathLike):
        return load_recipe(Path(source), overrides)
    tree: dict[str, Any] = {"model": {}, "data": {}, "train": {}}
    where = "the recipe"
    if isinstance(source, Recipe):
        tree, where = source.model_dump(mode="json"), f"the recipe {source.name}"
    elif source is not None:
        tree = deepcopy({**source})
    return parse_recipe(tree, overrides, where=where)


def format_overrides(settings: SettingOverrides) -> list[str]:
    """Return settings as `key=value` with YAML values."""
    if not isinstance(settings, Mapping):
        return list(settings)
    return [f"{key}={json.dumps(value, default=os.fspath)}" for key, value in settings.items()]


def dump_recipe(recipe: Recipe) -> str:
    """Return all settings as YAML, which `load_recipe` reads as the same recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def valid_keys(settings: type[Settings] = Recipe, prefix: str = "") -> dict[str, str]:
    """Return all valid dotted keys, each with the first sentence of its description."""
    keys: dict[str, str] = {}
    for name, field in settings.model_fields.items():
        branch, description = settings_group(field.annotation), " ".join((field.description or "").split())
        keys |= valid_keys(branch, f"{prefix}{name}.") if branch else {prefix + name: description.partition(". ")[0]}
    return keys


class _Loader(yaml.SafeLoader):
    """YAML loader that refuses repeated keys, of which YAML would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"`{key}` is set twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def override(tree: dict[str, Any], setting: str, root: type[Settings] = Recipe) -> str:
    """Put a `key.path=value` into a tree of settings of `root` before it is parsed; return the key."""
    key, equals, value = setting.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"--set {setting} is not KEY=VALUE", hint="for example --set train.steps=100")
    if key not in valid_keys(root):
        raise ConfigError(f"--set {setting}: there is no setting `{key}`", hint=_nearest(key, root))
    *branches, leaf = key.split(".")
    for branch in branches:
        tree = tree.setdefault(branch, {})
        if not isinstance(tree, dict):
            raise ConfigError(
                f"--set {setting}: the file's `{branch}` is a value, not a group",
                hint=_nearest(key, root),
            )
    try:
        tree[leaf] = yaml.load(value, _Loader)
    except yaml.YAMLError:
        raise ConfigError(
            f"--set {setting}: {value} is not a YAML value", hint="quote it, or close what is open"
        ) from None
    return key


def _explained(error: ValidationError, where: str, root: type[Settings]) -> ConfigError:
    lines, hints = [], []
    for problem in error.errors():
        # Inside unions pydantic also names the alternative it tried.
        path = [part for part in problem["loc"] if not str(part).startswith(("literal[", "tuple["))]
        unknown = problem["type"] in ("extra_forbidden", "invalid_key")
        key = ".".join(str(part) for part in path if unknown or isinstance(part, str))
        items = "" if unknown else "".join(f", item {part + 1}," for part in path if isinstance(part, int))
        if unknown:
            lines.append(f"{where}: there is no setting `{key}`")
            hints.append(_nearest(key, root))
        elif problem["type"] == "missing":
            lines.append(f"{where}: `{key}`{items} is missing")
            hints.append(f"complete `{key}`" if items else f"add it to the recipe, or pass --set {key}=...")
        elif problem["type"] in ("model_type", "model_attributes_type"):
            lines.append(f"{where}: `{key}` is a group of settings (got {problem['input']!r})")
            hints.append(_nearest(key, root))
        elif problem["type"] == "string_type":
            lines.append(f"{where}: `{key}`{items} should be text (got {problem['input']!r})")
            hints.append("write it in quotes")
        else:
            lines.append(f"{where}: `{key}`{items.rstrip(',')}: {problem['msg']} (got {problem['input']!r})")
            meaning = valid_keys(root).get(key)
            hints.append(f"change `{key}`: {meaning}" if meaning else f"change `{key}`")
    return ConfigError("\n".join(dict.fromkeys(lines)), hint="; ".join(dict.fromkeys(hints)))


def _nearest(key: str, root: type[Settings]) -> str:
    return nearest_settings(key, valid_keys(root), _groups(root))


def _contradictions(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield settings that contradict one another, with what to type."""
    train, adapt, data, loss = recipe.train, recipe.adapt, recipe.data, recipe.loss
    if (train.epochs is None) == (train.steps is None):
        yield "give either `train.epochs` or `train.steps`", "for example --set train.steps=1000"
    if train.batch_size % train.micro_batch_size:
        yield (
            f"`train.batch_size` ({train.batch_size}) is no multiple of `micro_batch_size` ({train.micro_batch_size})",
            "lower micro_batch_size, or raise batch_size to a multiple of it",
        )
    if adapt.mode == "custom" and not adapt.targets:
        yield "`adapt.mode: custom` needs `adapt.targets`", "for example targets: [self_attn.q_proj]"
    if adapt.targets and adapt.mode != "custom":
        yield "`adapt.targets` only counts with `adapt.mode: custom`", "set the mode or drop the targets"
    if adapt.freeze and adapt.mode != "full":
        yield (
            "`adapt.freeze` only counts with `adapt.mode: full`; a LoRA freezes the whole base",
            "drop it, or use adapt.mode: full",
        )
    if adapt.init is not None and adapt.mode == "full":
        yield (
            "`adapt.init` starts a LoRA, and `adapt.mode: full` has none",
            "to train on from a full training, --set model.source=RUN/model; from an adapter, merge it first: "
            "myna merge ADAPTER --out MODEL",
        )
    if adapt.train_modules and adapt.mode == "full":
        yield "`adapt.train_modules` says nothing with `adapt.mode: full`, which trains everything", "drop it"
    base = recipe.model.quantization
    if base != "none" and adapt.mode == "full":
        yield (
            f"`model.quantization: {base}` keeps frozen weights in fewer bits, and `adapt.mode: full` trains them",
            "--set model.quantization=none, or train a LoRA: --set adapt.mode=comprehensive",
        )
    if base != "none" and adapt.dora:
        yield (
            f"`adapt.dora` reads the weights as they are, and `model.quantization: {base}` keeps them in fewer bits",
            "--set adapt.dora=false, or --set model.quantization=none",
        )
    if train.early_stopping_patience and data.evaluation is None:
        yield "`train.early_stopping_patience` has nothing to go by", "set data.evaluation to a prepared folder"
    ends = [stage.until for stage in train.stages]
    if any(end <= 1 for end in ends) and any(end > 1 for end in ends):
        yield (
            f"`train.stages` mixes shares of the run (`until` up to 1) with steps: {', '.join(f'{e:g}' for e in ends)}",
            "give every stage's `until` as a share, such as 0.25, or every one as a step, such as 250",
        )
    if any(end > 1 and end != int(end) for end in ends):
        yield (
            f"`train.stages` ends at a step that is no whole number: {', '.join(f'{e:g}' for e in ends)}",
            "write `until` as a step, such as 250, or as a share of the run up to 1",
        )
    if list(train.stages) != sorted(train.stages, key=lambda stage: stage.until):
        yield "`train.stages` are not in order", "sort them by `until`"
    weights = [(part.text_weight, part.audio_weight) for part in train.stages] + [(loss.text_weight, loss.audio_weight)]
    if any(text == audio == 0 for text, audio in weights):
        yield "text and audio weights are both 0: nothing would be learned", "raise one of them"
    if not isinstance(loss.codebook_weights, str) and sum(loss.codebook_weights) == 0:
        yield "`loss.codebook_weights` are all zero", "give at least one codebook a weight, or write uniform"
    for name, (low, high) in (("seconds", data.seconds), ("reference_seconds", data.reference_seconds)):
        if low > high:
            yield f"`data.{name}` runs from {low} to {high}", "write the shorter one first"
    if data.require_reference and data.reference == "none":
        yield "`data.require_reference` contradicts `data.reference: none`", "drop one of the two"
    if data.evaluation is not None and data.evaluation.resolve() == data.train.resolve():
        yield "`data.evaluation` is the training data", "prepare a folder of other utterances"
    speech_eval = recipe.speech_eval
    if speech_eval.asr is None:
        used = SAMPLE_SETTINGS if recipe.speaks_samples else set()
        # `asr: null` in a recipe switches the scores off; their settings may stay.
        unused = speech_eval.model_fields_set - used if "asr" not in speech_eval.model_fields_set else ()
        for key in sorted(unused):
            yield f"`speech_eval.{key}` does nothing without `speech_eval.asr`", "--set speech_eval.asr=base"
        return
    if speech_eval.sentences is None and speech_eval.data is None and data.evaluation is None:
        yield (
            "`speech_eval.asr` is named, but there are no sentences to speak",
            "--set data.evaluation=data/HELD_OUT, or --set speech_eval.sentences=FILE with one sentence a line",
        )
    on_training_data = speech_eval.data is not None and speech_eval.data.resolve() == data.train.resolve()
    if speech_eval.sentences is None and on_training_data:
        yield (
            "`speech_eval.data` is the training data",
            "prepare a folder of other utterances, or set speech_eval.sentences",
        )
    if recipe.train.early_stopping_patience:
        yield (
            "`train.early_stopping_patience` goes by the loss, and `speech_eval.asr` has the run go by its speech",
            "--set train.early_stopping_patience=null --set speech_eval.patience=3",
        )
