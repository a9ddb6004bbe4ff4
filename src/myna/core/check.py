"""Result of a check, for doctor, verify and the preflight, and the runner of the functions that make them."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from myna.core.errors import MynaError

CheckStatus = Literal["passed", "warning", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check."""

    name: str
    status: CheckStatus
    message: str
    """Finding of the check, or the reason why it was skipped."""
    hint: str = ""
    """Remedy for a warning or a failure, if possible a command to type."""
    difference: float | None = None
    """Measured difference of a comparison."""
    tolerance: float | None = None
    """Largest difference that passes, in the unit of the difference."""
    compared: str = ""
    """The two things that were compared."""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return self.status == "passed"

    @property
    def explanation(self) -> str:
        """Message and hint in one line."""
        return f"{self.message}: {self.hint}" if self.hint else self.message


class CheckSkipped(Exception):  # noqa: N818 - no error
    """Raised by a check that does not apply; the message is the reason."""


class CheckFunction(NamedTuple):
    """A check that can be run. It returns or yields results, or raises an error with what to type."""

    name: str
    """Name of results that have none."""
    run: Callable[..., Check | Iterable[Check]]
    hint: str = ""
    """Remedy for an unexpected exception."""
    compared: str = ""


def run_check(check: CheckFunction, *arguments: Any) -> Iterator[Check]:
    """Yield the results of one check. Any exception becomes a failed result: the checks after it still have to run,
    also on a machine where anything may be broken."""
    start = time.perf_counter()

    def completed(result: Check) -> Check:
        # JSON has no number for a difference that is not finite; the message says what happened.
        is_finite = result.difference is not None and math.isfinite(result.difference)
        return replace(
            result,
            name=result.name or check.name,
            compared=result.compared or check.compared,
            difference=result.difference if is_finite else None,
            seconds=time.perf_counter() - start,
        )

    try:
        found = check.run(*arguments)
        yield from map(completed, [found] if isinstance(found, Check) else found)
    except CheckSkipped as reason:
        yield completed(Check("", "skipped", str(reason)))
    except MynaError as error:
        yield completed(Check("", "failed", error.what, error.hint))
    except Exception as error:  # noqa: BLE001 - see above
        hint = "pip install myna, which brings what it needs" if isinstance(error, ModuleNotFoundError) else check.hint
        yield completed(Check("", "failed", f"{type(error).__name__}: {error}", hint))
