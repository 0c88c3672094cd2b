"""Data that was bad before the step: which of its columns are NaN, and the line that made it.

A column of features that is NaN in every row was divided by a standard deviation of 0, or is missing from the
file. The array from which the batch was taken has the same columns, so it can be found among the variables of
the script, with the line that assigned it.
"""

from __future__ import annotations

from dataclasses import replace
from types import FrameType
from typing import Any

import numpy as np

from stablenum.diagnosis.replay.findings import Finding
from stablenum.diagnosis.replay.script_variables import variables
from stablenum.diagnosis.replay.source_files import lines_around

__all__ = ["nan_columns", "with_maker"]

# Larger arrays are not looked through.
_MOST_ELEMENTS = 50_000_000


def nan_columns(x: Any) -> tuple[int, ...]:
    """Return the columns (along the last axis) of an array that are NaN in every row; empty if all are, or if
    there are other NaN.

    Example:
        >>> nan_columns(np.array([[1.0, np.nan], [2.0, np.nan]]))
        (1,)
    """
    if x.ndim < 2 or not x.size or x.dtype.kind != "f":
        return ()
    bad = np.isnan(x).reshape(-1, x.shape[-1])
    whole = bad.all(axis=0)
    if whole.all() or np.count_nonzero(bad) != bad.shape[0] * np.count_nonzero(whole):
        return ()
    return tuple(int(i) for i in np.flatnonzero(whole))


def with_maker(finding: Finding, frame: FrameType | None) -> Finding:
    """Return a finding about an input with the variable that holds its data and the line that assigned it, if
    whole columns are NaN and such a variable is found.

    Args:
        finding: any finding.
        frame: the innermost of the frames whose variables are searched.
    """
    if finding.phase != "before" or not finding.outputs or not finding.outputs[0].nan_columns:
        return finding
    columns, shape = finding.outputs[0].nan_columns, finding.outputs[0].shape
    found = variables(frame, lambda value: _holds(value, columns, shape))
    if not found:
        return finding
    first = min(found, key=lambda v: (v.place.line, -len(v.value)))
    called = f"{first.name} ({finding.name})" if finding.name not in ("", first.name) else first.name
    return replace(finding, name=called, place=first.place, around=lines_around(first.place))


def _holds(value: Any, columns: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether a value is an array with the same columns of NaN, in as many rows or more."""
    held = getattr(value, "shape", None)
    if not isinstance(held, tuple) or len(held) != len(shape) or tuple(held[1:]) != shape[1:]:
        return False
    if held[0] < shape[0] or held[0] * int(np.prod(shape[1:])) > _MOST_ELEMENTS:
        return False
    try:
        array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError):  # no array, one of another format, or a deleted one
        return False
    return nan_columns(array) == columns
