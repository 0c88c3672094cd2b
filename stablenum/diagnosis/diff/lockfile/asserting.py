"""``assert_same``: a comparison as an assertion, with the report's first screen as its message."""

from __future__ import annotations

from typing import Any

from stablenum.diagnosis.diff.compare import diff
from stablenum.diagnosis.diff.report.report import DiffReport

__all__ = ["assert_same"]


def assert_same(left: Any, right: Any, **as_diff: Any) -> DiffReport:
    """Assert that two programs compute the same, up to rounding.

    Experimental: the names of causes and the JSON may change in a minor version.

    Args:
        left, right: as for :func:`diff`: live programs, or recordings from :func:`load_program`.
        **as_diff: ``weights`` and ``steps`` of :func:`diff`.

    Returns:
        The report.

    Raises:
        AssertionError: they differ; its text is that of the report: the first difference with both source
            lines, the cause and the remedy. Its attribute ``report`` is the report.
        TypeError, ValueError, ProgramError: as for :func:`diff`.

    Example:
        >>> import stablenum, stablenum_torch, torch
        >>> x = torch.linspace(-2, 2, 5, requires_grad=True)
        >>> sides = [stablenum_torch.program(f, x) for f in (torch.sin, torch.tanh)]
        >>> stablenum.assert_same(sides[0], sides[0]).verdict
        'the same in exact arithmetic'
        >>> stablenum.assert_same(*sides)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        AssertionError: The two programs differ: output, by 0.083 of its size in float64, ...
    """
    report = diff(left, right, **as_diff)
    if not report.ok:
        error = AssertionError(str(report))
        error.report = report  # type: ignore[attr-defined]  # for those who catch it
        raise error
    return report
