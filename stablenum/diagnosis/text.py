"""A report as plain text. The first named place is the first cause's, written ``file.py:LINE``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stablenum.diagnosis.findings import Finding
    from stablenum.diagnosis.report import Report

__all__ = ["as_text"]


def as_text(report: Report) -> str:
    """Plain text, about 80 columns, no colours."""
    verdict = report.verdict
    if report.ok:
        return "\n".join([f"Nothing wrong: {verdict.what}.", *_notes(report)])
    lines = [str(report.findings[0])] if report.findings else []
    if report.findings:
        lines += _code(report.findings[0])
    lines += ["", f"Cause: {verdict.cause.value}. {verdict.what[0].upper()}{verdict.what[1:]}."]
    lines += [f"  - {fact}" for fact in verdict.evidence]
    lines += ["", f"Remedy: {verdict.remedy}."]
    if verdict.code:
        lines.append(f"    {verdict.code}")
    lines += [f"Then also {finding}" for finding in report.findings[1:4]]
    return "\n".join([*lines, *_notes(report)]).lstrip("\n")


def _code(finding: Finding) -> list[str]:
    place = finding.place
    return [f"    {place.code}"] if place is not None and place.code else []


def _notes(report: Report) -> list[str]:
    return [f"Note: {note}." for note in report.notes]
