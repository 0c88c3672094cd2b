"""The exceptions of stablenum, and the one way in which a wrong setting is reported."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["NonFiniteError", "bad_field", "check_choice", "check_int", "check_number"]


class NonFiniteError(ArithmeticError):
    """Training was told to stop because steps could not be applied.

    Raised on the host only, after the step was refused: parameters and optimizer state are
    those from before it.

    Attributes:
        metrics: what ``last`` (torch) or ``metrics`` (JAX) says about the refused step.
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
    """A ValueError that names the field, what is allowed and what came."""
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
    """``value`` as a float if it is a finite real number within the bounds.

    Raises:
        ValueError: it is not; the message names ``field``, the bounds and the value.
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
    """A real number of any library as a plain float, None for anything else."""
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
        return None
    if getattr(value, "requires_grad", False):  # a plain number would part it from its gradient
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # arrays, integers beyond float64
        return None


def check_int(field: str, value: object, *, at_least: int, at_most: int = 2**31 - 1) -> int:
    """``value`` as an int if it is a whole number from ``at_least`` to ``at_most`` (the largest int32).

    Raises:
        ValueError: it is not; the message names ``field``, the bounds and the value.
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
    """Nothing, if ``value`` is one of the words ``choices``.

    Raises:
        ValueError: it is not; the message names ``field`` and the words.
    """
    if not isinstance(value, str) or value not in choices:
        raise bad_field(field, " or ".join(repr(choice) for choice in choices), value)
