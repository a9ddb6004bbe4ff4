"""Verification of a model, a run or an adapter: opened once, then every check is run on it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from myna.checks.verified_model import VerifiedModel
from myna.checks.verify_checks import CHECKS
from myna.core.check import Check, run_checks
from myna.core.device import pick_device
from myna.core.io import save_text
from myna.core.progress import ProgressCallback, silent
from myna.models.base import SpeakingFamily
from myna.models.ref import ModelRef
from myna.report import page
from myna.speak.loading import load_adapted
from myna.train.precision import choose_precision


@dataclass(frozen=True, slots=True)
class Certificate:
    """All checks of one model on one device."""

    source: str
    family: str
    device: str
    dtype: str
    quick: bool
    versions: dict[str, str]
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return self.first_failure is None

    @property
    def first_failure(self) -> Check | None:
        return next((check for check in self.checks if check.status == "failed"), None)

    @property
    def verdict(self) -> str:
        """One line that says that all checks passed, or names the first failure."""
        where = f"{self.source} on {self.device} in {self.dtype}"
        if (failure := self.first_failure) is not None:
            return f"{where}: {failure.name} failed: {failure.explanation}"
        passed = sum(check.status == "passed" for check in self.checks)
        left_out = len(self.checks) - passed
        others = f", {left_out} skipped" if left_out else ""
        return f"{where}: verified, {passed} checks passed{others}"

    def save(self, folder: Path) -> None:
        """Write verify.json and verify.html."""
        folder.mkdir(parents=True, exist_ok=True)
        content = {"verdict": self.verdict, "passed": self.passed, **asdict(self)}
        save_text(folder / "verify.json", json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        save_text(folder / "verify.html", certificate_page(self))


def certificate_page(certificate: Certificate) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in certificate.versions.items())
    extent = "quick checks" if certificate.quick else "full checks"
    setting = f"{certificate.family}, {certificate.device}, {certificate.dtype}, {extent}; {versions}"
    header = ("Check", "Compared", "Result", "Measured", "Difference", "Tolerance", "Seconds")
    return page.render_page(
        f"Verification of {certificate.source}",
        [
            page.heading("Verified" if certificate.passed else "Not verified", 1),
            page.paragraph(certificate.verdict, "lead"),
            page.table("Checks", header, map(_check_row, certificate.checks)),
            page.paragraph(setting, "note"),
            page.footer("Every figure is in verify.json."),
        ],
    )


def _check_row(check: Check) -> list[page.Cell]:
    status = page.cell(check.status, {"passed": "good", "failed": "bad"}.get(check.status, "note"))
    figures = ("" if value is None else f"{value:.3g}" for value in (check.difference, check.tolerance))
    return [check.name, check.compared, status, check.explanation, *figures, f"{check.seconds:.1f}"]


def run_verification(
    source: str | os.PathLike[str],
    *,
    base: str | None = None,
    codec: str | None = None,
    device: str = "auto",
    quick: bool = False,
    progress: ProgressCallback = silent,
) -> Certificate:
    """Run every check of a model. `base` replaces the base model that a run or an adapter names."""
    progress("verify", 0, len(CHECKS))
    verified = load_verified(source, base=base, codec=codec, device=device, quick=quick)
    checks, target = tuple(run_checks(CHECKS, verified, stage="verify", progress=progress)), verified.device
    return Certificate(
        source=os.fspath(source),
        family=verified.family.name,
        device=torch.cuda.get_device_name(target) if target.type == "cuda" else target.type,
        dtype=str(verified.dtype).removeprefix("torch."),
        quick=quick,
        versions={name: version(name) for name in ("myna", "torch", "transformers", "peft")},
        checks=checks,
    )


def load_verified(
    source: str | os.PathLike[str], *, base: str | None, codec: str | None, device: str, quick: bool
) -> VerifiedModel:
    """Load the model in the type in which it speaks on the device; an adapter is not merged yet."""
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
