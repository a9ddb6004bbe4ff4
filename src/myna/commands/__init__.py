"""Commands of Myna, one file for each or for a small family: the Python function, its options, and what it prints.

`import myna` offers the functions. `main` is the command line, which is generated from them: see `command.py`.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from myna.core.errors import MynaError

if TYPE_CHECKING:
    from cyclopts import App

PANELS = {
    "The three steps": {"prepare": "data", "train": "train", "speak": "speak"},
    "Begin here": {"demo": "demo", "setup": "setup", "doctor": "doctor", "recipes": "train", "version": "doctor"},
    "Data": {
        "import": "data",
        "curate": "curate",
        "xray": "curate",
        "correct": "curate",
        "split": "data",
        "render": "data",
    },
    "Speech": {"speak-lines": "speak", "serve": "serve", "voice": "voice", "detect": "voice", "answer": "speak"},
    "Quality": {"evaluate": "evaluate", "compare": "evaluate"},
    "Models": {"merge": "model", "verify": "model", "model": "model"},
}
"""Panels of `myna --help`: each command, and the module that defines it."""
FAMILIES = {
    "model": "Inspect checkpoints and convert them.",
    "setup": "Download models that curation and evaluation need.",
    "voice": "Named voices, each with the consent of its speaker.",
}
"""Commands that have commands of their own."""
HELP = """Fine-tune speech language models: recordings in, speech out.

**prepare** turns recordings into codes, **train** turns codes into a LoRA, **speak** turns text into speech.
`myna demo` does all of it, end to end."""


def main() -> None:
    """Run the command that was typed. Errors that a person can act on are shown without a traceback."""
    try:
        status = run(sys.argv[1:], shown=True)
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has left: nothing is to be flushed
        status = 1
    sys.exit(status)


def run(words: Sequence[str], *, shown: bool = False) -> int:
    """Run a command and return its exit status. `shown` prints an error, where it is raised otherwise."""
    from cyclopts import CycloptsError, MissingArgumentError

    app = build_app(words)
    try:
        function, bound, _ = app.parse_args(_texts_last(app, words), exit_on_error=False, print_error=False)
    except MissingArgumentError as error:
        missing = error.argument.name if error.argument is not None else "an argument"
        _show_error(f"{missing} is missing", f"{_help_command(app, words)} says what it is")
        return 2
    except CycloptsError as error:
        what = str(error).partition(" Available commands:")[0].rstrip(".")
        _show_error(what, f"{_help_command(app, words)} lists what there is")
        return 2
    try:
        return function(*bound.args, **bound.kwargs) or 0
    except MynaError as error:
        if not shown:
            raise
        _show_error(_as_typed(app, words, error.what), _as_typed(app, words, error.hint))
    except OSError as error:
        from myna.core.io import disk_error

        # A full disk is no bug; a file of ours that is not where it should be is one, and keeps its traceback.
        known = disk_error(error)
        if known is None or not shown:
            raise
        _show_error(known.what, known.hint)
    return 1


def build_app(words: Sequence[str] = ()) -> App:
    """Build the command line. Where the first word is a command, the modules of others are not imported."""
    from cyclopts import App, Group, Parameter

    from myna.commands.command import COMMANDS

    app = App(
        name="myna",
        help=HELP,
        help_format="markdown",
        version_flags=(),
        default_parameter=Parameter(negative=()),
        group_arguments=Group("Arguments", sort_key=0),
        group_parameters=Group("Options", sort_key=1),
        suppress_keyboard_interrupt=False,
    )
    app["--help"].group = Group("Options")
    is_known = bool(words) and any(words[0] in names for names in PANELS.values())
    for place, (panel, names) in enumerate(PANELS.items()):
        group = Group(panel, sort_key=place)
        for position, (name, module) in enumerate(names.items()):
            if is_known and name != words[0]:
                continue
            import_module(f"myna.commands.{module}")
            if name in FAMILIES:
                known = App(name=name, help=FAMILIES[name], version_flags=())
                for full_name, member in COMMANDS.items():
                    if full_name.startswith(f"{name} "):
                        known.command(member.app())
            else:
                known = COMMANDS[name].app()
            known.group, known.sort_key = (group,), position
            app.command(known)
    return app


def _texts_last(app: App, words: Sequence[str]) -> list[str]:
    """Put the text of a command that takes one behind `--`: it may begin with a dash, as `-5 degrees` does."""
    from myna.commands.command import COMMANDS

    if not words or words[0] not in COMMANDS or not COMMANDS[words[0]].takes_text:
        return list(words)
    arguments = app[words[0]].assemble_argument_collection()
    takes_value = {name: argument.token_count()[0] > 0 for argument in arguments for name in argument.names}
    takes_value |= {"--help": False, "-h": False}
    options, texts, waiting = [words[0]], list[str](), list(words[1:])
    while waiting and waiting[0] != "--":
        word = waiting.pop(0)
        name = word.partition("=")[0] if word.startswith("--") else word[:2]
        # A single word after two dashes is an option, perhaps a misspelt one.
        is_option = name in takes_value and (word.startswith("--") or takes_value[name] or len(word) == 2)
        if word[:1] == "-" and not is_option and (not word.startswith("--") or " " in name):
            texts.append(word)
            continue
        options.append(word)
        if takes_value.get(word) and waiting:
            options.append(waiting.pop(0))
    return [*options, "--", *texts, *waiting[1:]]


def _help_command(app: App, words: Sequence[str]) -> str:
    chain, _, _ = app.parse_commands(words)
    return " ".join(["myna", *chain, "--help"])


def _as_typed(app: App, words: Sequence[str], text: str) -> str:
    """Write the parameters that an error names as options."""
    from myna.commands.command import name_options

    _, apps, _ = app.parse_commands(words)
    command = apps[-1].default_command
    return name_options(text, inspect.signature(command).parameters.values()) if command is not None else text


def _show_error(what: str, hint: str) -> None:
    from rich.text import Text

    from myna.commands.display import console

    text = Text.assemble(("error", "bold red"), f" {what}\n", ("  → ", "bold"), hint)
    console(stderr=True).print(text, highlight=False, soft_wrap=True)
