"""The check of a number in a rule's settings."""

from __future__ import annotations

from typing import Any

from stablenum.errors import bad_field, check_int, check_number
from stablenum.formats import FLOAT32_MAX

__all__ = ["check_field"]


def check_field(rule: object, name: str, *, whole: bool = False, **bounds: Any) -> None:
    """Check a number in a frozen dataclass and store it as a plain Python number.

    Rules compute in float32, so what lies beyond its range is refused too.

    Args:
        rule: the dataclass; its class is named in the message.
        name: the field.
        whole: a whole number instead of any.
        **bounds: as :func:`check_number` or :func:`check_int` take them.

    Raises:
        ValueError: the value is not allowed.
    """
    check = check_int if whole else check_number
    field, value = f"{type(rule).__name__}.{name}", getattr(rule, name)
    number = check(field, value, **bounds)
    if abs(number) > FLOAT32_MAX:
        raise bad_field(field, f"at most {FLOAT32_MAX:.3g}, the largest float32", value)
    object.__setattr__(rule, name, number)
