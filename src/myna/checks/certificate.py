"""Results of a verification, and how they are written."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from myna.core.io import save_text

VerifyStatus = Literal["passed", "failed", "not applicable"]


@dataclass(frozen=True, slots=True)
class VerifyCheck:
    """One comparison: what was compared, how far apart it was, and how far it may be."""

    name: str
    compared: str
    status: VerifyStatus
    detail: str
    """What was measured; or why the check failed, or does not apply."""
    difference: float | None = None
    tolerance: float | None = None
    """The largest difference that passes; in the unit of the difference."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Certificate:
    """All checks of one model on one device."""

    source: str
    family: str
    device: str
    dtype: str
    quick: bool
    versions: dict[str, str]
    checks: tuple[VerifyCheck, ...]

    @property
    def passed(self) -> bool:
        return self.first_failure is None

    @property
    def first_failure(self) -> VerifyCheck | None:
        return next((check for check in self.checks if check.status == "failed"), None)

    @property
    def verdict(self) -> str:
        """One line: all is well, or the first difference."""
        where = f"{self.source} on {self.device} in {self.dtype}"
        if (failure := self.first_failure) is not None:
            return f"{where}: {failure.name} failed: {failure.detail}"
        passed = sum(check.status == "passed" for check in self.checks)
        left_out = len(self.checks) - passed
        others = f", {left_out} not applicable" if left_out else ""
        return f"{where}: verified, {passed} checks passed{others}"

    def save(self, folder: Path) -> None:
        """Write verify.json and verify.html."""
        from myna.checks.verify_page import certificate_page

        folder.mkdir(parents=True, exist_ok=True)
        content = {"verdict": self.verdict, "passed": self.passed, **asdict(self)}
        save_text(folder / "verify.json", json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        save_text(folder / "verify.html", certificate_page(self))
