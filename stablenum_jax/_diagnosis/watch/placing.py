"""Places what went wrong inside a library at the user's line that called it."""

from __future__ import annotations

import inspect
from dataclasses import replace

from stablenum.diagnosis import Finding, Place, Report
from stablenum.diagnosis.replay.source_files import lines_around
from stablenum_jax._diagnosis.replay.source_lines import callers, is_user_code, place_in

__all__ = ["at_the_caller", "users_line"]


def users_line() -> Place | None:
    """Return the user's line that is running; None if there is none."""
    frame = inspect.currentframe()
    while frame is not None and not is_user_code(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else place_in(frame.f_code, frame.f_lineno)


def at_the_caller(report: Report, phase: str = "", library: str = "", *, operation: bool = False) -> Report:
    """Return the report with failures outside the user's code placed at the user's line that is running.

    Args:
        report: the report on a call that this line makes.
        phase: the phase of the call, if all of it belongs to one.
        library: the library whose function is called, if it is not in the report.
        operation: whether the call is the operation itself, whose arguments have no names.
    """
    here = users_line()
    frames = callers() if operation else ()

    def placed(f: Finding) -> Finding:
        if f.phase == "before" and not operation:
            return f
        f = replace(f, phase=phase or f.phase, frames=f.frames or frames)
        if operation:
            unnamed = tuple(tuple(replace(s, name="") for s in some) for some in (f.inputs, f.outputs))
            f = replace(f, inputs=unnamed[0], outputs=unnamed[1], name="")
        if f.place is not None or here is None:
            return f
        return replace(f, place=here, around=lines_around(here), library=f.library or library)

    findings = tuple(map(placed, report.findings))
    evidence = replace(report.evidence, findings=findings, loss_finite=True)
    if operation:
        evidence = replace(evidence, bad_parameters=())
    return Report.of(evidence, notes=report.notes, seconds=report.seconds)
