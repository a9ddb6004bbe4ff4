"""`command` makes a command of a typed function: its parameters are the options, its docstring is the help. Below are
options that several commands have.

    @opt.command("xray", xray, example="myna xray data/marta")
    def _(call: Call[Xray], *, as_json: opt.Json = False) -> None: ...

The decorated function is the terminal's side of the command. It is given `call`, the typed function with the options of
the command line, shows progress, calls it and prints the result. Its keyword parameters are further options. Without a
typed function it is the command itself.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, TypeVar

from cyclopts import App, Group, Parameter
from cyclopts.validators import Number

HIDDEN = ("progress", "observer", "call")
"""Parameters that only Python has."""
TAKES_DASHES = Parameter(allow_leading_hyphen=True)
"""Setting of parameters whose value may begin with a dash: `--text "- no"` is a text."""
OPTION_PANELS = ("Model", "Voice", "Output", "Takes", "Scores", "Sampling", "Address", "Capacity", "Ray")
"""Panels of options in the help of a command, in this order."""
COMMANDS: dict[str, Command] = {}
"""Commands of the modules that were imported, by name: `train`, `model stats`."""

Call = partial
"""Typed function with the options of the command line."""
Terminal = TypeVar("Terminal", bound=Callable[..., int | None])


@dataclass(frozen=True)
class Command:
    """One command: its typed function, if it has one in Python, and its terminal's side."""

    name: str
    function: Callable[..., Any] | None
    terminal: Callable[..., int | None]
    example: str

    def app(self) -> App:
        """The command as a part of the command line, with the options of both functions."""
        own = _option_parameters(self.function) if self.function is not None else []
        extras = _option_parameters(self.terminal)
        parameters = sorted([*own, *extras], key=lambda one: one.kind)
        signature = inspect.Signature(parameters)

        def run(*words: Any, **options: Any) -> int | None:
            given = {name: value for name, value in signature.bind(*words, **options).arguments.items() if value != ()}
            if self.function is None:
                return self.terminal(**given)
            extra = {one.name: given.pop(one.name) for one in extras if one.name in given}
            return self.terminal(partial(self.function, **given), **extra)

        documents = [inspect.getdoc(one) for one in (self.function, self.terminal) if one is not None]
        run.__doc__ = name_options("\n\n".join(text for text in documents if text), parameters)
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        vars(run)["__signature__"] = signature
        app = App(name=self.name.split()[-1], help_epilogue=f"Example: `{self.example}`", version_flags=())
        app.default(run)
        return app


def command(name: str, function: Callable[..., Any] | None = None, *, example: str) -> Callable[[Terminal], Terminal]:
    """Register the decorated function as the terminal's side of a command."""

    def register(terminal: Terminal) -> Terminal:
        COMMANDS[name] = Command(name, function, terminal, example)
        return terminal

    return register


def name_options(text: str, parameters: Iterable[inspect.Parameter]) -> str:
    """Write parameters as options: `reference_text` becomes `--reference-text`."""
    names = {}
    for one in parameters:
        if one.kind is one.KEYWORD_ONLY:
            settings = getattr(one.annotation, "__metadata__", ())
            named = [name for setting in settings if isinstance(setting, Parameter) for name in setting.name or ()]
            names[one.name] = named[0] if named else "--" + one.name.replace("_", "-")
    return re.sub(r"`([a-z_]+)`", lambda match: names.get(match[1], match[0]), text)


class _Unknown:
    """Stand-in for a type that is imported for type checkers only."""


class _Names(dict[str, Any]):
    """Names of a module for the evaluation of its annotations."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, _Unknown)


def _option_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function as options: named ones by their name, others by their place."""
    function = inspect.unwrap(function)
    names = _Names(function.__globals__)
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in HIDDEN:
            continue
        hint = eval(parameter.annotation, {}, names)
        if parameter.kind is parameter.VAR_KEYWORD:  # Unpack[TypedDict]
            parameters += _group_parameters(typing.get_args(hint)[0])
            continue
        hint, settings = _split(hint)
        default = parameter.default
        if default is None or default is False or default in ((), ""):
            settings = [*settings, Parameter(show_default=False)]
        is_named = any(one.alias or one.name for one in settings)
        by_name = is_named or parameter.kind is parameter.KEYWORD_ONLY
        settings = [*settings, TAKES_DASHES] if by_name and hint is not bool else settings
        kind: Any = parameter.KEYWORD_ONLY if by_name else parameter.POSITIONAL_ONLY
        typed = _typed_type(hint)
        if not by_name and typing.get_origin(typed) is list:
            # Words of the list may stand before and after options: `curate one --out data/marta two`.
            settings = [*settings, Parameter(required=default is parameter.empty)]
            typed, kind, default = typing.get_args(typed)[0], parameter.VAR_POSITIONAL, parameter.empty
        annotation = Annotated[(typed, *settings)] if settings else typed
        parameters.append(parameter.replace(annotation=annotation, kind=kind, default=default))
    return parameters


def _group_parameters(group: Any) -> Iterator[inspect.Parameter]:
    """Return the fields of a TypedDict as options, with the strings below them as help, in a panel of its name."""
    [definition] = ast.parse(inspect.getsource(group)).body
    assert isinstance(definition, ast.ClassDef)
    names = _Names(vars(sys.modules[group.__module__]))
    for base in map(ast.unparse, definition.bases):
        if base != "TypedDict":
            yield from _group_parameters(eval(base, {}, names))
    panel = group.__name__.removesuffix("Options")
    for node, below in zip(definition.body, [*definition.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign):
            continue
        hint, settings = _split(eval(ast.unparse(node.annotation), {}, names))
        name = ast.unparse(node.target)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            negative = f"--no-{name}" if hint is bool else ()
            settings = [
                Parameter(help=inspect.cleandoc(str(below.value.value)), group=_panel(panel), negative=negative)
            ]
        settings = [*settings, Parameter(show_default=False), *([TAKES_DASHES] if hint is not bool else [])]
        optional: Any = Annotated[(_typed_type(hint) | None, *settings)]
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=optional)


def _split(hint: Any) -> tuple[Any, list[Any]]:
    """Split Annotated into its type and the rest."""
    if typing.get_origin(hint) is not Annotated:
        return hint, []
    return hint.__origin__, list(hint.__metadata__)


def _typed_type(hint: Any) -> Any:
    """Return the type of what is typed for a parameter that takes more in Python: `str | PathLike` is a path, a
    sequence is an option that can be repeated."""
    hint, settings = _split(hint)
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        kept = [one for one in members if one is not type(None)]
        repeated = [one for one in kept if typing.get_origin(one) is Sequence]
        if repeated:
            typed = _typed_type(repeated[0])
        elif any(one is os.PathLike or typing.get_origin(one) is os.PathLike for one in kept):
            typed = str if _Unknown in kept else Path
        else:
            [typed] = [_typed_type(one) for one in kept if one is not _Unknown]
        hint = typed | None if type(None) in members else typed
    elif origin is Sequence:
        hint = types.GenericAlias(list, (_typed_type(members[0]),))
    return Annotated[(hint, *settings)] if settings else hint


PathLike = str | os.PathLike[str]
SettingOverrides = Mapping[str, Any] | Sequence[str]
"""Recipe settings on top of a recipe: `{"train.steps": 60}`, or `["train.steps=60"]` as `--set` takes them."""


def _panel(name: str) -> Group:
    """Return a panel of options. Those that most people need come first."""
    return Group(name, sort_key=2 + OPTION_PANELS.index(name))


def option(
    help: str,
    *aliases: str,
    panel: str | None = None,
    least: float | None = None,
    most: float | None = None,
    **settings: Any,
) -> Parameter:
    """Describe an option: its help, further names such as `-o`, its panel in the help, its range, and whatever else
    cyclopts knows, as the `name` that replaces the parameter's."""
    settings |= {"group": _panel(panel)} if panel is not None else {}
    settings |= {"validator": Number(gte=least, lte=most)} if least is not None or most is not None else {}
    return Parameter(help=help, alias=aliases, **settings)


Source = Annotated[PathLike, option("Folder, file or hub name of a dataset.")]
Out = Annotated[PathLike, option("Folder to write.", "-o")]
Model = Annotated[str, option("Hub name or folder of the model.", "-m")]
BaseModel = Annotated[
    str | None, option("Base model of a run or an adapter, if not the one that it names.", "-m", panel="Model")
]
Codec = Annotated[str | None, option("Hub name or folder of another codec than the model's.", panel="Model")]
Device = Annotated[str, option("auto, cpu, cuda or mps.", panel="Model")]
Strength = Annotated[
    float, option("Scale of the run's LoRA: less keeps more of the untuned model.", panel="Model", least=0)
]
StoredWeights = Annotated[
    Literal["none", "fp8", "int8", "nf4"],
    option("Store the weights smaller: fp8 or int8 in half, nf4 in a quarter.", panel="Model"),
]
Layout = Annotated[str | None, option("Layout of the source; detected if left out.")]
Language = Annotated[str, option("Language of utterances whose source names none.")]
ASR = Annotated[
    str | None, option("Name or folder of a Whisper (base, transformers:base), for word error rates.", panel="Scores")
]
SpeakerEncoder = Annotated[
    str, option("ecapa, ecapa:FILE.safetensors, resemblyzer, wavlm, or the folder of a WavLM.", panel="Scores")
]
Limit = Annotated[int | None, option("Use this many sentences; speakers take turns.", least=1)]
BatchSize = Annotated[int, option("Sentences or recordings processed at once.", least=1)]
Seed = Annotated[int, option("Same seed, same choice and same speech.", least=0)]
Settings = Annotated[
    SettingOverrides, option("Change a setting: KEY=VALUE, as train.steps=100; repeatable.", name="--set")
]
Ray = Annotated[str | None, option("Address of a Ray cluster that shares the folders, or auto.")]
Workers = Annotated[int | None, option("Processes of this machine that share the work.", least=1)]
WeightsLayout = Annotated[str, option("transformers or original (boson).")]
Json = Annotated[bool, option("Print the result as JSON.", name="--json")]
Force = Annotated[bool, option("Replace existing files; inputs are never replaced.")]


class ModelOptions(TypedDict, total=False):
    """Options of commands that open a model to speak with: keyword arguments of `load_engine`."""

    run: Annotated[
        PathLike | None,
        option("Run folder, one of its checkpoints, or a LoRA adapter: folder or hub name.", panel="Model"),
    ]
    model: Annotated[
        str | None, option("Hub name or folder of an untuned model; beside --run, its base model.", "-m", panel="Model")
    ]
    strength: Strength
    quantization: StoredWeights
    codec: Codec
    device: Device
