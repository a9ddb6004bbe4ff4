"""What a server is given to serve: a model, a run, or several runs on one base model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from myna.core.errors import ConfigError
from myna.models.ref import ModelRef, display_name

NAMED_SOURCE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63})=(.+)")
"""NAME=SOURCE; a folder may have such a name too."""


class ServedSources(NamedTuple):
    """The model to open, and adapters to load beside it, by name."""

    source: str
    adapters: dict[str, str]


def resolve_sources(sources: Sequence[str], model: str | None, *, keep_adapters: bool = False) -> ServedSources:
    """One source is opened as it is: a LoRA is merged into its model, which speaks fastest. Several, each perhaps as
    NAME=SOURCE, are adapters of one base model; so is one with `keep_adapters`, as others can only be loaded beside the
    base model."""
    named = [_split_name(source) for source in sources]
    refs = [ModelRef.find(source, model) for _, source in named]
    has_lora = [ref.adapter is not None for ref in refs]
    if len(named) == 1 and (model is None or has_lora[0]) and not (keep_adapters and has_lora[0]):
        return ServedSources(named[0][1], {})
    first = 0 if has_lora[0] else 1
    if (first == 1 and model is not None) or not all(has_lora[first:]):
        others = ", ".join(source for (_, source), is_lora in zip(named, has_lora, strict=True) if not is_lora)
        raise ConfigError(
            f"only one base model can be served, and {others} is no LoRA",
            hint="myna serve MODEL RUN ..., or myna serve RUN ... [--model BASE]; another server serves another model",
        )
    base = named[0][1] if first else refs[0].base_source
    adapters = dict[str, str]()
    for name, source in named[first:]:
        if name in adapters or name == display_name(base):
            raise ConfigError(f"two models are named {name}", hint=f"give a name of your own: NAME={source}")
        adapters[name] = source
    return ServedSources(base, adapters)


def _split_name(source: str) -> tuple[str, str]:
    match = NAMED_SOURCE.fullmatch(source)
    if match is not None and not Path(source).exists():
        return match[1], match[2]
    return display_name(source).rpartition("/")[2], source
