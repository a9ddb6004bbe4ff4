"""Errors: messages, hints, and pickling between processes."""

from __future__ import annotations

import pickle

import pytest

from myna.core import errors

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.MynaError)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_keeps_its_hint_between_processes(kind: type[errors.MynaError]) -> None:
    error = kind("row 3 is bad", hint="mend row 3")
    there = pickle.loads(pickle.dumps(error))
    assert type(there) is kind and str(there) == str(error)
    assert (there.what, there.hint) == ("row 3 is bad", "mend row 3")
