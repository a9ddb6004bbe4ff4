"""`command`: makes a command of a typed function. Its parameters are the options, its docstring is the help.

    @command("xray", prepare_xray, example="myna xray data/marta")
    def _(call: Callable[..., Xray], *, as_json: Json = False) -> None: ...

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

from cyclopts import App, Parameter

HIDDEN = ("progress", "observer", "return")
"""Parameters that only Python has."""
TAKES_DASHES = Parameter(allow_leading_hyphen=True)
"""Setting of options with a value: `--text "- no"` is a text."""
COMMANDS: dict[str, Command] = {}
"""Commands of the modules that were imported, by name: `train`, `model stats`."""

Terminal = TypeVar("Terminal", bound=Callable[..., int | None])


@dataclass(frozen=True)
class Command:
    """One command: its typed function, if it has one in Python, and its terminal's side."""

    name: str
    function: Callable[..., Any] | None
    terminal: Callable[..., int | None]
    example: str
    takes_text: bool
    """Whether its argument may begin with a dash."""

    def app(self) -> App:
        """The command as a part of the command line."""
        app = App(name=self.name.split()[-1], help_epilogue=f"Example: `{self.example}`", version_flags=())
        app.default(self._bind())
        return app

    def _bind(self) -> Callable[..., int | None]:
        """Return a function with all options in its signature, which runs the command."""
        own = list(_option_parameters(self.function)) if self.function is not None else []
        names = [parameter.name for parameter in own]
        extras = [one for one in _option_parameters(self.terminal) if self.function is None or one.name != "call"]
        parameters = sorted([*own, *extras], key=lambda one: one.kind)
        signature = inspect.Signature(parameters)

        def run(*words: Any, **options: Any) -> int | None:
            bound = signature.bind(*words, **options).arguments
            given = {name: value for name, value in bound.items() if value != ()}
            if self.function is None:
                return self.terminal(**given)
            extra = {one.name: given.pop(one.name) for one in extras if one.name in given}
            return self.terminal(partial(self.function, **given), **extra)

        documents = [inspect.getdoc(one) for one in (self.function, self.terminal) if one is not None]
        run.__doc__ = name_options("\n\n".join(text for text in documents if text), parameters)
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        vars(run)["__signature__"] = signature
        assert not set(names) & {one.name for one in extras}, f"{self.name} defines an option twice"
        return run


def command(
    name: str, function: Callable[..., Any] | None = None, *, example: str, takes_text: bool = False
) -> Callable[[Terminal], Terminal]:
    """Register the decorated function as the terminal's side of a command."""

    def register(terminal: Terminal) -> Terminal:
        COMMANDS[name] = Command(name, function, terminal, example, takes_text)
        return terminal

    return register


def name_options(text: str, parameters: Iterable[inspect.Parameter]) -> str:
    """Write parameters as options: `reference_text` becomes `--reference-text`."""
    names = {one.name: _option_name(one) for one in parameters if one.kind is one.KEYWORD_ONLY}
    return re.sub(r"`([a-z_]+)`", lambda match: names.get(match[1], match[0]), text)


def _option_name(parameter: inspect.Parameter) -> str:
    settings = getattr(parameter.annotation, "__metadata__", ())
    named = [name for one in settings if isinstance(one, Parameter) for name in one.name or ()]
    return named[0] if named else "--" + parameter.name.replace("_", "-")


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
        is_named = any(isinstance(one, Parameter) and (one.alias or one.name) for one in settings)
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
            yield from _group_parameters(names[base])
    panel = group.__name__.removesuffix("Options")
    for node, below in zip(definition.body, [*definition.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign):
            continue
        hint, settings = _split(eval(ast.unparse(node.annotation), {}, names))
        text = below.value if isinstance(below, ast.Expr) else None
        name = ast.unparse(node.target)
        if not settings and isinstance(text, ast.Constant):
            negative = f"--no-{name}" if hint is bool else ()
            settings = [Parameter(help=inspect.cleandoc(str(text.value)), group=panel, negative=negative)]
        settings = [*settings, Parameter(show_default=False), *([TAKES_DASHES] if hint is not bool else [])]
        optional: Any = Annotated[(_typed_type(hint) | None, *settings)]
        kind = inspect.Parameter.KEYWORD_ONLY
        yield inspect.Parameter(name, kind, default=None, annotation=optional)


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
        is_path = any(one is os.PathLike or typing.get_origin(one) is os.PathLike for one in kept)
        if repeated:
            typed = _typed_type(repeated[0])
        elif is_path:
            typed = str if _Unknown in kept else Path
        else:
            [typed] = [_typed_type(one) for one in kept if one is not _Unknown]
        hint = typed | None if type(None) in members else typed
    elif origin is Sequence:
        hint = types.GenericAlias(list, (_typed_type(members[0]),))
    return Annotated[(hint, *settings)] if settings else hint
