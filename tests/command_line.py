"""Commands run in the process of a test, as if they were typed."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from unittest.mock import patch

from myna.commands import run


@dataclass(frozen=True)
class CommandResult:
    """Outcome of a command. `output` is all that it printed, `exception` an error that it raised."""

    exit_code: int
    stdout_bytes: bytes
    stderr: str
    output: str
    exception: BaseException | None = None

    @property
    def stdout(self) -> str:
        return self.stdout_bytes.decode()


def run_command(words: Sequence[object], *, catch: bool = False, env: Mapping[str, str] | None = None) -> CommandResult:
    """Run a command with these words. An error is raised, or returned if it is to be caught."""
    both = io.BytesIO()
    output, errors = _Tee(both), _Tee(both)
    stdout, stderr = (io.TextIOWrapper(one, encoding="utf-8", write_through=True) for one in (output, errors))
    status, exception = 1, None
    with patch.dict(os.environ, env or {}), redirect_stdout(stdout), redirect_stderr(stderr):
        try:
            status = run([str(word) for word in words])
        except SystemExit as stop:
            status = int(stop.code or 0)
        except Exception as error:
            if not catch:
                raise
            exception = error
    printed = both.getvalue().decode(errors="replace")
    return CommandResult(status, output.getvalue(), errors.getvalue().decode(), printed, exception)


class _Tee(io.BytesIO):
    """Bytes that are written to another file too."""

    def __init__(self, other: io.BytesIO) -> None:
        super().__init__()
        self._other = other

    def write(self, data: object) -> int:
        self._other.write(data)  # type: ignore[arg-type]
        return super().write(data)  # type: ignore[arg-type]
