"""Checks of a report, shared by the tests of the replay."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stablenum.diagnosis import Report


def marked_line(function: Callable[..., Any], mark: str = "# BAD") -> int:
    """Number of the one line of a function that ends with ``mark``."""
    lines, start = inspect.getsourcelines(inspect.unwrap(function))
    (line,) = [start + i for i, text in enumerate(lines) if text.rstrip().endswith(mark)]
    return line


def check(
    report: Report, test: Callable[..., Any], cause: str, operation: str, phase: str = "forward"
) -> None:
    """The verdict, and the first finding: its operation, its phase and the line that ``test`` marks."""
    assert report.verdict.cause.value == cause, str(report)
    first = report.findings[0]
    assert (first.operation, first.phase) == (operation, phase), str(report)
    assert first.place is not None
    assert (Path(first.place.file).name, first.place.line) == (
        Path(inspect.getfile(test)).name,
        marked_line(test),
    )
    assert str(report).startswith(f"{first.place.file}:{first.place.line}: ")
    assert not report.ok
