"""Registry of model families and codecs. No module outside this package names one."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from myna.core.errors import ModelError
from myna.core.io import atomic_folder

if TYPE_CHECKING:
    import torch

    from myna.data.codec import Codec
    from myna.models.base import Family


class RegisteredFamily(NamedTuple):
    """Module and class of a family. The module is imported when a checkpoint of the family is opened."""

    module: str
    class_name: str
    model_types: tuple[str, ...]
    """Values of `model_type` in config.json."""
    builtin_names: tuple[str, ...]
    """Names of built-in configurations, which have no weights."""

    def load(self) -> Any:
        return getattr(import_module(self.module), self.class_name)


HIGGS_V2 = RegisteredFamily("myna.models.higgs_v2.family", "HiggsV2", ("higgs_audio_v2", "higgs_audio"), ("higgs-v2",))
PHI4 = RegisteredFamily("myna.models.phi4.family", "Phi4", ("phi4_multimodal",), ("phi-4-multimodal",))
FAMILIES = (HIGGS_V2, PHI4)
CODECS = {"myna_mel_codec": ("myna.models.mel_codec", "MelCodec")}
"""Codecs by the `model_type` in their config.json; any other type is read by the Higgs codec."""
DEFAULT_CODEC = ("myna.models.higgs_v2.codec", "HiggsCodec")
SHIPPED = {"fledgling": Path(__file__).parent / "fledgling"}
"""Checkpoint folders of the models that come with the package, by the names that users type."""


def is_model_name(source: str) -> bool:
    """Return whether a source is the name of a shipped model or a built-in configuration, never of a folder."""
    return source in SHIPPED or any(source in family.builtin_names for family in FAMILIES)


def find_checkpoint(source: str, revision: str | None = None) -> Path | None:
    """Return the folder of a shipped model, a local checkpoint, or a download from the hub; None for a built-in
    configuration. Imports neither torch nor transformers, so that a wrong name is reported at once."""
    from myna.models.files import resolve_checkpoint

    if source not in SHIPPED:
        return None if is_model_name(source) else resolve_checkpoint(source, revision)
    folder = SHIPPED[source]
    if revision is not None:
        raise ModelError(
            f"{source} comes with Myna and has no revision {revision}",
            hint="leave the revision out, or install another Myna",
        )
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"the weights of {source} are not in this copy of Myna: {folder} is missing or empty",
            hint="install Myna again, from a wheel or a whole clone: pip install --force-reinstall --no-deps WHEEL",
        )
    return folder


def open_family(source: str, *, revision: str | None = None, codec: str | None = None) -> Family:
    """Open a checkpoint without its weights: a hub name, a folder, a shipped model, or a built-in configuration."""
    folder = find_checkpoint(source, revision)
    family: Family
    if folder is None:
        [registered] = [one for one in FAMILIES if source in one.builtin_names]
        opened = registered.load()
        family = opened(source, opened.builtin_config(), None)
        return family
    model_type = _model_type(folder)
    for registered in FAMILIES:
        if model_type in registered.model_types:
            family = registered.load().open(source, folder, codec)
            return family
    known = f"known types: {', '.join(name for one in FAMILIES for name in one.model_types)}"
    converted = "Phi-4 is read in transformers' layout: microsoft/Phi-4-multimodal-instruct@refs/pr/70"
    raise ModelError(
        f"{source} is a model of type {model_type!r}, which Myna does not know",
        hint=converted if model_type == "phi4mm" else known,
    )


def open_codec(source: str | Path, *, device: torch.device | str = "cpu") -> Codec:
    from myna.models.files import read_json, resolve_checkpoint

    folder = resolve_checkpoint(str(source), None)
    model_type = read_json(folder / "config.json").get("model_type")
    module, class_name = CODECS.get(str(model_type), DEFAULT_CODEC)
    return getattr(import_module(module), class_name).open(folder, device=device)  # type: ignore[no-any-return]


def convert_checkpoint(source: Path, out: Path, layout: str) -> None:
    """Rewrite a checkpoint or an adapter in another layout of its family."""
    import_module("myna.models.higgs_v2.checkpoint").convert_layout(source, out, layout)


def save_tiny_model(out: Path, *, seed: int = 0, answers: bool = False) -> Path:
    """Write a tiny random checkpoint of the real classes, of a speaking or of an answering family."""
    package = "phi4" if answers else "higgs_v2"
    with atomic_folder(out) as folder:
        import_module(f"myna.models.{package}.tiny").save_tiny(folder, seed=seed)
    return out


def _model_type(folder: Path) -> str:
    from myna.models.files import is_adapter, read_json

    file = folder / "config.json"
    if is_adapter(folder) and not file.is_file():
        hint = f"open it with --run {folder}, or make a model of it: myna merge {folder} --out DIR"
        raise ModelError(f"{folder} is a LoRA adapter, and not a model by itself", hint=hint)
    model_type = read_json(file).get("model_type")
    if model_type is None:
        raise ModelError(f"{file} does not name a model type", hint="download the checkpoint again")
    return str(model_type)
