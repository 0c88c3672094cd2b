"""What an adapter knows besides the gradients that forbids a step: a setting that is not finite, for example.

It looks where that costs nothing: at settings that the host knows, in each step, and at parameters in a step
that is skipped anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["NO_SETTINGS", "BadSetting", "bad_setting", "setting_is_factor"]

# Settings that are multiplied with every element of an update, or divide it. Others may be inf, which means
# no bound: the growth_rate of Prodigy, a largest norm.
_FACTORS = frozenset(
    (
        *("lr", "learning_rate", "weight_decay", "momentum", "dampening", "eps", "alpha", "rho", "lambd"),
        *("betas", "beta", "beta1", "beta2", "b1", "b2"),
    )
)
NO_SETTINGS = frozenset(("params", "param_names"))


class BadSetting:
    """A setting of an optimizer that is not finite.

    Attributes:
        place: where it is, such as ``param_groups[0]['lr']``.
        value: NaN or inf.
    """

    __slots__ = ("place", "value")

    def __init__(self, place: str, value: float) -> None:
        self.place, self.value = place, value

    def __str__(self) -> str:
        return (
            f"{self.place} is {self.value}. Applied, the step would make parameters NaN or inf. Set it to a "
            "finite number, and look at what sets it: a schedule, a state dict, a search of hyperparameters."
        )


def bad_setting(
    settings: Mapping[str, Any], place: str, number: Callable[[Any], float | None]
) -> BadSetting | None:
    """Return the first setting that is NaN, or that is inf where every update is multiplied by it.

    Args:
        settings: a group of an optimizer.
        place: how messages name the group.
        number: returns what the host knows of a value that is not of Python's own class ``float``; None for
            one that is no number, or is in a device's memory.

    Example:
        >>> print(bad_setting({"lr": float("nan")}, "param_groups[0]", lambda value: None).place)
        param_groups[0]['lr']
    """
    for name, value in settings.items():
        if value is None or value is True or value is False or name in NO_SETTINGS:
            continue
        for part in value if isinstance(value, (tuple, list)) else (value,):
            found = part if part.__class__ is float else number(part)
            if found is not None and found - found != 0.0:  # NaN or inf
                break
        else:
            continue
        if math.isnan(found) or (math.isinf(found) and setting_is_factor(name)):
            return BadSetting(f"{place}[{name!r}]", found)
    return None


def setting_is_factor(name: str) -> bool:
    """Return whether every update is multiplied or divided by a setting, so that it must not be inf either.

    Example:
        >>> setting_is_factor("lr"), setting_is_factor("growth_rate")
        (True, False)
    """
    return name in _FACTORS
