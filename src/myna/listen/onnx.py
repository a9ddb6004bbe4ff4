"""ONNX models, run by onnxruntime on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from myna.core.errors import CheckpointError
from myna.core.optional import import_optional
from myna.listen.models import INSTALL
from myna.listen.weights import remake_hint


def open_onnx(file: Path, threads: int = 0) -> Any:
    """A session with this many threads; 0 lets onnxruntime choose."""
    runtime = import_optional("onnxruntime", INSTALL)
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    # An arena is as large as everything that the longest clip needed, and is never given back.
    options.enable_cpu_mem_arena = False
    try:
        return runtime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise CheckpointError(
            f"{file} cannot be opened: {str(error).splitlines()[0]}",
            hint=remake_hint(file),
        ) from error
