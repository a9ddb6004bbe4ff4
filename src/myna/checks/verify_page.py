"""Certificate as a self-contained HTML page."""

from __future__ import annotations

from myna.checks.verify import Certificate
from myna.core.check import Check
from myna.report.document import html_document
from myna.report.markup import element, html_table

STATUS_CLASSES = {"passed": "good", "failed": "bad", "skipped": "note"}


def certificate_page(certificate: Certificate) -> str:
    failure = certificate.first_failure
    return html_document(
        f"Verification of {certificate.source}",
        element("h1", "Verified" if failure is None else "Not verified"),
        element("p", certificate.verdict, class_="lead"),
        html_table(
            ("Check", "Compared", "Result", "Measured", "Difference", "Tolerance", "Seconds"),
            map(_row, certificate.checks),
            caption="Checks",
        ),
        element("p", _setting(certificate), class_="note"),
        element("footer", element("p", "Every figure is in verify.json.")),
    )


def format_figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _row(check: Check) -> tuple[object, ...]:
    return (
        check.name,
        check.compared,
        element("span", check.status, class_=STATUS_CLASSES[check.status]),
        check.message,
        format_figure(check.difference),
        format_figure(check.tolerance),
        f"{check.seconds:.1f}",
    )


def _setting(certificate: Certificate) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in certificate.versions.items())
    extent = "quick checks" if certificate.quick else "full checks"
    return f"{certificate.family}, {certificate.device}, {certificate.dtype}, {extent}; {versions}"
