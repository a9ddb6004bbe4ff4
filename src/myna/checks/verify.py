"""Verification of a model, a run or an adapter: opened once, and every check run on it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

import torch

from myna.checks.certificate import Certificate, VerifyCheck, VerifyStatus
from myna.checks.verify_checks import CHECKS, Finding
from myna.checks.verify_subject import NotApplicableError, VerifiedModel
from myna.core.device import pick_device
from myna.core.errors import MynaError
from myna.core.progress import ProgressCallback, silent
from myna.models.base import SpeakingFamily
from myna.models.ref import ModelRef
from myna.speak.loading import load_adapted
from myna.train.precision import choose_precision


def run_verification(
    source: str | os.PathLike[str],
    *,
    base: str | None = None,
    codec: str | None = None,
    device: str = "auto",
    quick: bool = False,
    progress: ProgressCallback = silent,
) -> Certificate:
    """Every check of a model; `base` is the base model of a run or an adapter, where it is not the one it names."""
    progress("verify", 0, len(CHECKS))
    subject = load_verified(source, base=base, codec=codec, device=device, quick=quick)
    checks = []
    for number, (name, check) in enumerate(CHECKS, start=1):
        checks.append(_run(name, check, subject))
        progress("verify", number, len(CHECKS))
    return Certificate(
        source=os.fspath(source),
        family=subject.family.name,
        device=_device_name(subject.device),
        dtype=str(subject.dtype).removeprefix("torch."),
        quick=quick,
        versions=_versions(),
        checks=tuple(checks),
    )


def load_verified(
    source: str | os.PathLike[str], *, base: str | None, codec: str | None, device: str, quick: bool
) -> VerifiedModel:
    """Open what is to be verified, in the type in which it speaks on the device; an adapter is not yet merged."""
    target = pick_device(device)
    dtype = choose_precision("auto", target).compute_dtype
    ref = ModelRef.find(source) if base is None else ModelRef.find_trained(source, base)
    family = ref.open_family(codec)
    if ref.adapter is not None:
        model = load_adapted(ref, family, dtype, target, text_head=family.has_text_head)
    else:
        model = family.load_model(dtype=dtype, device=target, text_head=family.has_weights and family.has_text_head)
    loaded = family.load_codec(device=target) if isinstance(family, SpeakingFamily) else None
    return VerifiedModel(family, model.requires_grad_(False).eval(), ref.adapter, loaded, target, dtype, quick)


def _run(name: str, check: Callable[[VerifiedModel], Finding], subject: VerifiedModel) -> VerifyCheck:
    start = time.perf_counter()
    status: VerifyStatus
    compared = (check.__doc__ or "").strip()
    try:
        finding = check(subject)
        status = "passed" if finding.passed else "failed"
    except NotApplicableError as reason:
        finding, status = Finding(True, str(reason)), "not applicable"
    except MynaError as error:
        finding, status = Finding(False, f"{error.what}: {error.hint}"), "failed"
    # Broad on purpose: whatever a kernel or a library runs into on this device is the finding of this check, and the
    # others are still to be run.
    except Exception as error:  # noqa: BLE001
        finding, status = Finding(False, f"{type(error).__name__}: {error}"), "failed"
    seconds = time.perf_counter() - start
    # JSON has no number for one that is not finite; the detail says what happened.
    difference = finding.difference if finding.difference is None or math.isfinite(finding.difference) else None
    return VerifyCheck(name, compared, status, finding.detail, difference, finding.tolerance, seconds)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("myna", "torch", "transformers", "peft")}
