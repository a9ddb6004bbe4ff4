"""Commands of Myna, one file for each or for a small family: the Python function, its options, and what it prints.

`import myna` offers the functions. `main` is the command line, which is generated from them: see `options.py`.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from cyclopts import App, CycloptsError, Group, MissingArgumentError, Parameter, UnknownOptionError
from rich.text import Text

from myna.commands.display import console
from myna.commands.options import COMMANDS, name_options
from myna.core.errors import MynaError
from myna.core.io import disk_error

PANELS = {
    "The three steps": {"prepare": "data", "train": "train", "speak": "speak"},
    "Begin here": {"demo": "train", "setup": "doctor", "doctor": "doctor", "recipes": "train", "version": "doctor"},
    "Data": dict.fromkeys(("import", "curate", "xray", "correct", "split", "render"), "data"),
    "Speech": {"speak-lines": "speak", "serve": "serve", "voice": "voice", "detect": "voice", "answer": "speak"},
    "Quality": {"evaluate": "evaluate", "compare": "evaluate"},
    "Models": {"plan": "train", "merge": "model", "verify": "model", "model": "model"},
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
    """Run a command and return its exit status. An error is raised, or printed if `shown`."""
    app = build_app(words)
    try:
        function, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        what, lists = str(error).partition(" Available commands:")[0].rstrip("."), "lists what there is"
        if isinstance(error, MissingArgumentError) and error.argument is not None:
            what, lists = f"{error.argument.name} is missing", "says what it is"
        if isinstance(error, UnknownOptionError) and words[:1] == ["train"]:
            from myna.core.config import valid_keys
            from myna.core.setting_names import own_setting

            if ours := own_setting((error.token.keyword or error.token.value).partition("=")[0], valid_keys()):
                lists = f"lists the options; here it is {ours}"
        _show_error(what, f"{' '.join(['myna', *app.parse_commands(words)[0], '--help'])} {lists}")
        return 2
    try:
        return function(*bound.args, **bound.kwargs) or 0
    except (MynaError, OSError) as error:
        # A full disk is no bug. A missing file of the package is one, and keeps its traceback.
        known = error if isinstance(error, MynaError) else disk_error(error)
        if known is None or not shown:
            raise
        parameters = inspect.signature(function).parameters.values()
        _show_error(name_options(known.what, parameters), name_options(known.hint, parameters))
    return 1


def build_app(words: Sequence[str] = ()) -> App:
    """Build the command line. Where the first word is a command, the modules of others are not imported."""
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


def _show_error(what: str, hint: str) -> None:
    text = Text.assemble(("error", "bold red"), f" {what}\n", ("  → ", "bold"), hint)
    console(stderr=True).print(text, highlight=False, soft_wrap=True)
