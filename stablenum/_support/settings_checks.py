"""Checks of settings and arguments: numbers within bounds, and one of several strings."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

from stablenum.errors import bad_field, bad_type, either
from stablenum.formats import FLOAT32_MAX

__all__ = [
    "check_callable",
    "check_choice",
    "check_field",
    "check_flag",
    "check_int",
    "check_loss_scale",
    "check_number",
]


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
    if getattr(value, "requires_grad", False):  # as a plain number, the tensor would lose its gradient
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # an array, or an integer beyond float64
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
        ValueError: ``value`` is none of them; the message names ``field`` and the choices.
    """
    if not isinstance(value, str) or value not in choices:
        raise bad_field(field, either(repr(choice) for choice in choices), value)


def check_flag(field: str, value: object) -> None:
    """Check that ``value`` is True or False, and no other object with a truth value.

    Raises:
        TypeError: it is not; the message names ``field``.
    """
    if not isinstance(value, bool):
        raise bad_type(field, "True or False", value)


def check_callable(field: str, value: object, allowed: str, *, hint: str = "") -> None:
    """Check that ``value`` can be called.

    Raises:
        TypeError: it cannot; the message names ``field`` and ``allowed``, which says what it should be.
    """
    if not callable(value):
        raise bad_type(field, allowed, value, hint=hint)


def check_loss_scale(value: object) -> float:
    """Return the loss scale of a step that is replayed, as a float.

    Raises:
        ValueError: ``value`` is not a finite number above 0.
    """
    hint = "Give the scale that the loss of the failed step was multiplied by, or leave it out."
    return check_number("loss_scale", value, above=0.0, hint=hint)


def check_field(rule: object, name: str, *, whole: bool = False, **bounds: Any) -> None:
    """Check a number in a frozen dataclass and store it as a plain Python number.

    Rules compute in float32, so a number beyond float32's range is rejected too.

    Args:
        rule: the dataclass; an error message names its class.
        name: the field.
        whole: whether the number must be an integer.
        **bounds: passed to :func:`check_number` or :func:`check_int`.

    Raises:
        ValueError: the value is not allowed.
    """
    check = check_int if whole else check_number
    field, value = f"{type(rule).__name__}.{name}", getattr(rule, name)
    number = check(field, value, **bounds)
    if abs(number) > FLOAT32_MAX:
        raise bad_field(field, f"at most {FLOAT32_MAX:.3g}, the largest float32", value)
    object.__setattr__(rule, name, number)
