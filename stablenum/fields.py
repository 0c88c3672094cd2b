"""The check of a number among a rule's settings."""

from __future__ import annotations

from typing import Any

from stablenum.errors import bad_field, check_int, check_number
from stablenum.formats import FLOAT32_MAX

__all__ = ["check_field"]


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
