"""What NumPy warns of while it prepares the data: the line where a bad batch was made.

No framework sees what NumPy computes. NumPy itself warns of a division by zero, an overflow or an invalid
value, at the line of the script.
"""

from __future__ import annotations

import re
import sys
import warnings
from dataclasses import replace
from types import FrameType
from typing import Any

from stablenum.commands.explain.frames import transparent
from stablenum.diagnosis import Cause, Finding, Place, Report
from stablenum.diagnosis.replay.evidence import Evidence
from stablenum.diagnosis.replay.source_files import is_the_scripts, lines_around, place_in

__all__ = ["NumpyErrors"]

_WARNING = re.compile(r"(invalid value|divide by zero|overflow) encountered in (?:scalar )?(\w+)")


class NumpyErrors:
    """Keeps the first line at which NumPy warns of each kind of error."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[str, Place]] = {}

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
        kinds = ("invalid value", "divide by zero", "overflow")
        made = next((self._first[k] for k in kinds[findings[0].kind == "inf" :] if k in self._first), None)
        if made is None:
            return report
        maker, place = made
        first = replace(findings[0], maker=maker, place=place, around=lines_around(place), frames=(place,))
        evidence = replace(report.evidence, findings=(first, *findings[1:]))
        return Report.of(evidence, notes=report.notes, seconds=report.seconds)

    def report(self, framework: str) -> Report | None:
        """Return a report on the first warning; None if there was none."""
        kind, (maker, place) = next(iter(self._first.items()), ("", ("", None)))
        if place is None:
            return None
        bad = "nan" if kind == "invalid value" else "inf"
        finding = Finding(
            operation="input", phase="before", kind=bad, maker=maker, place=place, around=lines_around(place)
        )
        return Report.of(Evidence(framework=framework, findings=(finding,), loss_finite=False))

    def _note(self, message: str) -> None:
        said = _WARNING.match(message)
        if said is None or said[1] in self._first:
            return
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not is_the_scripts(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is not None:
            self._first[said[1]] = (f"NumPy's {said[2]}", place_in(frame.f_code, frame.f_lineno))
