"""What NumPy warns of while it prepares the data: the line where a bad batch was made.

No framework sees what NumPy computes. NumPy itself warns of a division by zero, an overflow or an invalid
value, at the line of the script.
"""

from __future__ import annotations

import ast
import re
import sys
import warnings
from dataclasses import replace
from types import FrameType
from typing import Any, NamedTuple

from stablenum.diagnosis import Cause, Finding, Place, Report
from stablenum.diagnosis.replay.evidence import Evidence
from stablenum.diagnosis.replay.source_files import is_the_scripts, lines_around, place_in
from stablenum.diagnosis.watch.frames import transparent

__all__ = ["NumpyErrors"]

_WARNING = re.compile(r"(invalid value|divide by zero|overflow) encountered in (?:scalar )?(\w+)")


class _Warning(NamedTuple):
    """What NumPy says, the function that it names, and the line."""

    text: str
    function: str
    place: Place

    def finding(self, finding: Finding) -> Finding:
        """Return the finding with this as the origin of its values."""
        return replace(
            finding,
            maker=f"NumPy's {self.function}",
            warned=self.text,
            place=self.place,
            around=lines_around(self.place),
            frames=(self.place,),
        )

    def is_read_by(self, other: _Warning) -> bool:
        """Return whether the other line, in the same function, reads what this line assigns."""
        same = (self.place.file, self.place.function) == (other.place.file, other.place.function)
        return same and not _names(self.place.code, ast.Store).isdisjoint(_names(other.place.code, ast.Load))


def _names(code: str, context: type[ast.expr_context]) -> set[str]:
    """Return the variables that a line assigns or reads; none if it is a part of a statement."""
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except SyntaxError:
        return set()
    return {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, context)}


class NumpyErrors:
    """Keeps the first line at which NumPy warns of each kind of error."""

    def __init__(self) -> None:
        self._first: dict[str, _Warning] = {}

    def listen(self) -> None:
        """Note warnings from now on; they are shown as before."""
        show = warnings.showwarning

        @transparent
        def showwarning(message: Any, *args: Any, **kwargs: Any) -> None:
            self._note(str(message))
            show(message, *args, **kwargs)

        warnings.showwarning = showwarning

    def placed(self, report: Report) -> Report:
        """Return the report, with the line at which NumPy made the bad batch or the bad setting of the
        optimizer, if there was a warning."""
        findings = report.findings
        if not findings or not (report.verdict.cause is Cause.BATCH or report.evidence.settings):
            return report
        made = self._origin(findings[0].kind)
        if made is None:
            return report
        evidence = replace(report.evidence, findings=(made.finding(findings[0]), *findings[1:]))
        return Report.of(evidence, notes=report.notes, seconds=report.seconds)

    def _origin(self, kind: str) -> _Warning | None:
        """Return the warning of where a NaN or inf was made: a NaN may come of an infinity before it."""
        kinds = ("invalid value", "divide by zero", "overflow")
        made = next((self._first[k] for k in kinds[kind == "inf" :] if k in self._first), None)
        if made is None:
            return None
        known = list(self._first.values())
        return next((w for w in known[: known.index(made)] if w.is_read_by(made)), made)

    def report(self, framework: str) -> Report | None:
        """Return a report on the first warning; None if there was none."""
        if not self._first:
            return None
        kind, warning = next(iter(self._first.items()))
        bad = "nan" if kind == "invalid value" else "inf"
        finding = warning.finding(Finding(operation="input", phase="before", kind=bad))
        return Report.of(Evidence(framework=framework, findings=(finding,), loss_finite=False))

    def _note(self, message: str) -> None:
        said = _WARNING.match(message)
        if said is None or said[1] in self._first:
            return
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not is_the_scripts(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is not None:
            self._first[said[1]] = _Warning(said[0], said[2], place_in(frame.f_code, frame.f_lineno))
