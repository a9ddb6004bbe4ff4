"""The reference page of recipe settings, docs/reference/recipe.md: `python tools/recipe_reference.py > FILE`."""

from __future__ import annotations

from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from myna.core.config import Recipe, Settings, settings_group


def describe() -> str:
    """Every key, its default and its meaning, as Markdown."""
    return "\n".join(
        [
            "# Recipe reference",
            "",
            "A recipe is a YAML file with only what differs from these defaults. Any key can be overridden on the",
            "command line: `--set train.steps=100`. Made by `python tools/recipe_reference.py`.",
            "",
            *_table(Recipe, ""),
        ]
    )


def _table(settings: type[Settings], prefix: str) -> list[str]:
    lines, groups = ["| key | default | meaning |", "|---|---|---|"], []
    for name, field in settings.model_fields.items():
        group = settings_group(field.annotation)
        if group:
            title = " ".join((group.__doc__ or "").split())
            groups += [f"## {prefix}{name}", "", title, "", *_table(group, f"{prefix}{name}.")]
            continue
        meaning = " ".join((field.description or "").split())
        choices = _choices(field.annotation)
        if choices:
            meaning += " Choices: " + ", ".join(f"`{choice}`" for choice in choices) + "."
        default = "*required*" if field.is_required() else f"`{_yaml(field.default)}`"
        lines.append(f"| `{prefix}{name}` | {default} | {meaning.replace('|', chr(92) + '|')} |")
    return [*lines, "", *groups]


def _yaml(value: object) -> str:
    """A value as one would type it into YAML."""
    if isinstance(value, tuple):
        return "[" + ", ".join(_yaml(part) for part in value) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value) if value != "" else "''"


def _choices(annotation: Any) -> list[Any]:
    """The values a `Literal` allows, also inside a union."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if get_origin(annotation) in (Union, UnionType):
        return [choice for part in get_args(annotation) for choice in _choices(part)]
    return []


if __name__ == "__main__":
    print(describe(), end="")
