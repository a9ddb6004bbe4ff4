"""The typed tree: every setting, what it means, and what it is unless a recipe says otherwise.

A recipe is a YAML file with only what differs. Unknown keys are refused with the nearest valid ones.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from myna.errors import ConfigError

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]


class Settings(BaseModel):
    """A branch of the tree. Frozen, and deaf to keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ModelSettings(Settings):
    source: str = Field(min_length=1)
    """Hub name or folder of the model to start from."""
    revision: str | None = None
    """Hub revision: a branch, a tag or a commit."""
    codec: str | None = None
    """Hub name or folder of the codec; by default the one that belongs to the model."""


class DataSettings(Settings):
    train: Path
    """A folder made by `myna prepare`."""
    evaluation: Path | None = None
    """Another such folder, never trained on."""
    reference: Literal["same_speaker", "given", "none"] = "same_speaker"
    """Where the voice comes from: another clip of the speaker (unless the data names one), only what the data names,
    or nothing."""
    require_reference: bool = False
    """Stop if a target finds no reference, instead of training it without."""
    reference_place: Literal["turn", "system"] = "turn"
    """Put the reference into turns of its own, or into the system message."""
    reference_seconds: tuple[Positive, Positive] = (1.0, 15.0)
    """Shortest and longest reference to pick by ourselves."""
    seconds: tuple[Positive, Positive] = (0.2, 30.0)
    """Shortest and longest target; others are left out and counted."""
    scene: str = ""
    """A sentence about the room or the manner, for targets whose data names none."""
    row_tokens: Count = 2048
    """Token budget of a packed row."""
    pack: bool = True
    """Several utterances to a row; false gives every utterance a row of its own."""
    window: Count = 1024
    """Utterances shuffled and packed together at a time."""


class AdaptSettings(Settings):
    mode: Literal["comprehensive", "audio_focused", "attention_only", "custom", "full"] = "comprehensive"
    """Which projections get a LoRA: attention and both FFNs; q, v and the audio FFN; attention; the list under
    `targets`. `full` trains the model itself, without LoRA."""
    targets: tuple[str, ...] = ()
    """With `custom`: ends of module names, such as `audio_mlp.down_proj`."""
    rank: Count = 16
    alpha: Positive = 32.0
    dropout: Share = 0.0
    rslora: bool = False
    """Scale by alpha / sqrt(rank)."""
    dora: bool = False
    """Learn magnitude and direction apart."""
    train_modules: tuple[str, ...] = ()
    """Trained in full beside the LoRA: `text_head`, `audio_head`, `audio_embedding`."""
    freeze: tuple[str, ...] = ()
    """With `full`: what stays as it is, for example `text_embedding`, `text_ffn`, `attention`."""


class LossSettings(Settings):
    codebook_weights: Literal["uniform", "1/k"] | tuple[Annotated[float, Field(ge=0)], ...] = "uniform"
    """How codebooks are weighed against one another; a list gives one weight per codebook."""
    text_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the assistant's text; 0 leaves the text head unloaded."""
    all_audio: bool = False
    """Supervise every audio turn, references too."""
    label_smoothing: Share = 0.0


class TrainSettings(Settings):
    epochs: Positive | None = None
    """Passes over the data. Give this or `steps`."""
    steps: Count | None = None
    """Optimizer steps. Give this or `epochs`."""
    rows_per_step: Count = 8
    """Rows behind one optimizer step, over all processes and accumulation."""
    rows_per_pass: Count = 1
    """Rows in one forward pass on one device; accumulation follows from this."""
    learning_rate: Positive = 1e-4
    warmup: Annotated[float, Field(ge=0)] = 0.03
    """Optimizer steps, or a share of them below 1."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    final_learning_rate: Share = 0.0
    """Where the schedule ends, as a share of `learning_rate`."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: tuple[Share, Share] = (0.9, 0.99)
    clip: Positive = 1.0
    """Largest gradient norm."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Compute type of the frozen part; trainable weights are always fp32."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `mps`."""
    seed: int = 0
    evaluate_every: Count | None = None
    """Optimizer steps between evaluations; by default ten times in a run."""
    save_every: Count | None = None
    """Optimizer steps between checkpoints; by default with each evaluation."""


class Recipe(Settings):
    """All of a training."""

    name: str = Field(default="run", pattern=r"^[\w.-]+$")
    """What the run is called; its folder is `runs/NAME` unless `--out` says otherwise."""
    model: ModelSettings
    data: DataSettings
    adapt: AdaptSettings = AdaptSettings()
    loss: LossSettings = LossSettings()
    train: TrainSettings = TrainSettings()


def load_recipe(path: Path, overrides: list[str] | None = None) -> Recipe:
    """Read a recipe; `overrides` are `key.path=value` with YAML values, applied on top."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no recipe {path}", hint="ls recipes/ shows the ones that ship") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not readable as YAML: {error}", hint="mend the line it names") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds no settings", hint="start from a file in recipes/")
    for override in overrides or []:
        _override(tree, override)
    return parse_recipe(tree, where=str(path))


def parse_recipe(tree: dict[str, Any], *, where: str) -> Recipe:
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        raise _explained(error, where) from None
    _check_sense(recipe, where)
    return recipe


def dump_recipe(recipe: Recipe) -> str:
    """The resolved tree as YAML that `load_recipe` reads back to the same recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def valid_keys(settings: type[Settings] = Recipe, prefix: str = "") -> list[str]:
    """Every dotted key the tree knows."""
    keys = []
    for name, field in settings.model_fields.items():
        branch = field.annotation
        if isinstance(branch, type) and issubclass(branch, Settings):
            keys += valid_keys(branch, f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return keys


def _override(tree: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {override} is not KEY=VALUE", hint="for example --set train.steps=100")
    *branches, leaf = key.strip().split(".")
    for branch in branches:
        tree = tree.setdefault(branch, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"--set {override}: `{branch}` is a value, not a group", hint=_nearest(key))
    tree[leaf] = yaml.safe_load(value)


def _explained(error: ValidationError, where: str) -> ConfigError:
    lines, hint = [], "see docs/reference/recipe.md"
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"] if not str(part).startswith(("literal[", "tuple[")))
        if problem["type"] == "extra_forbidden":
            lines.append(f"{where}: there is no setting `{key}`")
            hint = _nearest(key)
        elif problem["type"] == "missing":
            lines.append(f"{where}: `{key}` is missing")
            hint = f"add it to the recipe, or pass --set {key}=..."
        else:
            lines.append(f"{where}: `{key}`: {problem['msg']} (got {problem['input']!r})")
            hint = f"change `{key}` in the recipe, or pass --set {key}=..."
    return ConfigError("\n".join(dict.fromkeys(lines)), hint=hint)


def _nearest(key: str) -> str:
    known = valid_keys()
    close = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
    close += [k for k in known if k.split(".")[-1] == key.split(".")[-1] and k not in close]
    if close:
        return "did you mean " + " or ".join(f"`{k}`" for k in close) + "?"
    group = [k for k in known if k.startswith(key.split(".")[0] + ".")] or known
    return "valid settings: " + ", ".join(group)


def _check_sense(recipe: Recipe, where: str) -> None:
    """What types alone cannot say."""
    train, adapt, data = recipe.train, recipe.adapt, recipe.data
    if (train.epochs is None) == (train.steps is None):
        raise ConfigError(f"{where}: give either `train.epochs` or `train.steps`", hint="for example --set train.steps=1000")
    if adapt.mode == "custom" and not adapt.targets:
        raise ConfigError(f"{where}: `adapt.mode: custom` needs `adapt.targets`", hint="for example targets: [self_attn.q_proj]")
    if adapt.targets and adapt.mode != "custom":
        raise ConfigError(f"{where}: `adapt.targets` only counts with `adapt.mode: custom`", hint="set the mode or drop the targets")
    if adapt.freeze and adapt.mode != "full":
        raise ConfigError(
            f"{where}: `adapt.freeze` only counts with `adapt.mode: full`; a LoRA freezes the whole base",
            hint="drop it, or use adapt.mode: full",
        )
    for name, (low, high) in (("seconds", data.seconds), ("reference_seconds", data.reference_seconds)):
        if low > high:
            raise ConfigError(f"{where}: `data.{name}` runs from {low} to {high}", hint="write the shorter one first")
    if data.evaluation is not None and data.evaluation.resolve() == data.train.resolve():
        raise ConfigError(f"{where}: `data.evaluation` is the training data", hint="prepare a folder of other utterances")
