"""The runner of checks: results in order, and errors as failed results."""

from __future__ import annotations

from collections.abc import Iterator

from myna.core.check import Check, CheckFunction, CheckSkipped, run_check
from myna.core.errors import ConfigError


def two_results(limit: float) -> Iterator[Check]:
    yield Check("first", "passed", "fine")
    yield Check("", "failed", "too far apart", difference=float("inf"), tolerance=limit)


def raises_with_hint(_: float) -> Check:
    raise ConfigError("no device", hint="use cpu")


def fails_unexpectedly(_: float) -> Iterator[Check]:
    yield Check("half", "passed", "fine")
    raise ZeroDivisionError("by zero")


def imports_something_absent(_: float) -> Check:
    raise ModuleNotFoundError("no module named x")


def does_not_apply(_: float) -> Check:
    raise CheckSkipped("there is no adapter")


def test_results_come_in_order_whatever_a_check_raises() -> None:
    checks = [
        CheckFunction("two", two_results, compared="one and two"),
        CheckFunction("device", raises_with_hint),
        CheckFunction("broken", fails_unexpectedly, hint="install it again"),
        CheckFunction("absent", imports_something_absent),
        CheckFunction("adapter", does_not_apply),
    ]
    results = [result for check in checks for result in run_check(check, 0.5)]
    assert [(result.name, result.status, result.message, result.hint) for result in results] == [
        ("first", "passed", "fine", ""),
        ("two", "failed", "too far apart", ""),
        ("device", "failed", "no device", "use cpu"),
        ("half", "passed", "fine", ""),
        ("broken", "failed", "ZeroDivisionError: by zero", "install it again"),
        ("absent", "failed", "ModuleNotFoundError: no module named x", "pip install myna, which brings what it needs"),
        ("adapter", "skipped", "there is no adapter", ""),
    ]
    assert results[1].compared == "one and two" and results[1].tolerance == 0.5
    assert results[1].difference is None, "JSON has no number for what is not finite"
