"""The exceptions of stablenum, and the shared checks that report a wrong setting."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["NonFiniteError", "bad_field", "check_choice", "check_int", "check_number"]


class NonFiniteError(ArithmeticError):
    """Training stops because too many steps in a row were non-finite.

    Raised on the host only, after the step was skipped: parameters and optimizer state have the
    values they had before that step.

    Attributes:
        metrics: the skipped step as ``last`` (torch) or ``metrics`` (JAX) reports it.
        history: the flight recorder's rows, oldest first.

    Example:
        >>> raise NonFiniteError("3 steps in a row were skipped")
        Traceback (most recent call last):
        stablenum.NonFiniteError: 3 steps in a row were skipped
    """

    def __init__(
        self,
        message: str,
        *,
        metrics: Mapping[str, Any] | None = None,
        history: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        super().__init__(message)
        self.metrics = dict(metrics or {})
        self.history = [dict(row) for row in history]

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions cross process boundaries (DataLoader workers, launchers) by pickling.
        return (_rebuild, (str(self), self.metrics, self.history))


def _rebuild(message: str, metrics: dict[str, Any], history: list[Any]) -> NonFiniteError:
    return NonFiniteError(message, metrics=metrics, history=history)


def bad_field(field: str, allowed: str, got: object, *, hint: str = "") -> ValueError:
    """Return a ValueError that names the field, what is allowed and what it got instead."""
    shown = repr(got)
    shown = shown if len(shown) <= 200 else shown[:197] + "..."
    return ValueError(f"{field} must be {allowed}; got {shown}." + (f" {hint}" if hint else ""))


def check_number(
    field: str,
    value: object,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    hint: str = "",
) -> float:
    """Return ``value`` as a float if it is a finite real number within the bounds.

    Raises:
        ValueError: ``value`` is not such a number; the message names ``field``, the bounds and ``value``.
    """
    bounds = [
        f"{word} {bound:g}"
        for word, bound in (("above", above), ("at least", at_least), ("below", below), ("at most", at_most))
        if bound is not None
    ]
    allowed = " ".join(["a finite number", " and ".join(bounds)]).strip()
    number = _as_float(value)
    inside = (
        number is not None
        and math.isfinite(number)
        and (above is None or number > above)
        and (at_least is None or number >= at_least)
        and (below is None or number < below)
        and (at_most is None or number <= at_most)
    )
    if number is None or not inside:
        raise bad_field(field, allowed, value, hint=hint)
    return number


def _as_float(value: object) -> float | None:
    """Return a real number of any library as a plain float; None for anything else."""
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
        return None
    if getattr(value, "requires_grad", False):  # a tensor would lose its gradient as a plain number
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # arrays, integers beyond float64
        return None


def check_int(field: str, value: object, *, at_least: int, at_most: int = 2**31 - 1) -> int:
    """Return ``value`` as an int if it is an integer from ``at_least`` to ``at_most`` (default: the largest
    int32).

    Raises:
        ValueError: ``value`` is not such an integer; the message names ``field``, the bounds and ``value``.
    """
    allowed = f"a whole number from {at_least} to {at_most}"
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):  # not a number, or an array
        number = None
    if number is None or not at_least <= number <= at_most:
        raise bad_field(field, allowed, value)
    return number


def check_choice(field: str, value: object, choices: Sequence[str]) -> None:
    """Check that ``value`` is one of the strings ``choices``.

    Raises:
        ValueError: it is not; the message names ``field`` and the choices.
    """
    if not isinstance(value, str) or value not in choices:
        raise bad_field(field, " or ".join(repr(choice) for choice in choices), value)
