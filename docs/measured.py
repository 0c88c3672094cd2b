"""What the tables of measured figures have in common."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["dense", "read", "software", "table", "versions", "with_software"]


def read(results: Path, part: str) -> dict[str, Any]:
    """Return what was measured.

    Raises:
        FileNotFoundError: there are no results; the message says how to measure them.
    """
    if not results.exists():
        raise FileNotFoundError(f"{results}: missing; `python -m benchmarks {part}` writes it")
    report: dict[str, Any] = json.loads(results.read_text(encoding="utf-8"))
    return report


def software(report: dict[str, Any]) -> str:
    """Return the machine, if it is known, and the versions with which a report was made."""
    if "machine" not in report:
        return versions(report)
    machine = f"{report['machine']['cpu_count']} cores, {report['machine']['architecture']}"
    if "cuda_device" in report:
        machine = f"{report['cuda_device']['name']}, {machine}"
    return f"{machine}, Python {report['python']}, {versions(report)}"


def versions(report: dict[str, Any]) -> str:
    """Return the versions of the libraries with which a report was made."""
    return ", ".join(f"{name} {version}" for name, version in report["versions"].items())


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    return ["| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *rows]]


def dense(lines: list[str]) -> list[str]:
    """Return the lines that set a table of many columns small, so that it fits the page."""
    return [":::{container} dense", "", *lines, "", ":::"]


def with_software(lines: list[str], report: dict[str, Any]) -> str:
    """Return the text of lines, and below them with what they were measured."""
    return "\n".join([*lines, "", f"{software(report)}."]) + "\n"
