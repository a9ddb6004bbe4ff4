"""One thread per test process: two workers with two threads each fight over two cores and lose."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings

# New examples at a desk, the same ones every time where a change waits to land.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# Keys, the speech log and stored voices of the person who runs the tests are none of theirs.
os.environ["MYNA_HOME"] = tempfile.mkdtemp(prefix="myna-home-")
atexit.register(shutil.rmtree, os.environ["MYNA_HOME"], ignore_errors=True)


@pytest.fixture(autouse=True)
def torch_settings_are_kept() -> Iterator[None]:
    """A test that leaves torch's settings changed fails, in place of those after it."""
    if "torch" not in sys.modules:
        yield
        return
    from tests.torch_settings import restored_settings, torch_settings

    with restored_settings() as before:
        yield
        changed = {name: value for name, value in torch_settings().items() if value != before[name]}
        assert not changed, f"torch's settings were left changed, from {before}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need a CUDA device where there is none."""
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
