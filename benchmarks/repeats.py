"""A figure measured in several processes: its mean, how well it is known, and when there are enough of them.

Rounds within one process tell little of how well a ratio is known: where each array came to lie in memory is
settled when the process starts and moves the ratio by several per cent, the same way in every round.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from benchmarks.steps.errors import NoisyError

__all__ = ["LEAST", "MOST", "known_within", "until_known"]

Part = TypeVar("Part")

# So many processes at first; and no more than these, with a pause of some seconds before each further one.
LEAST, MOST, PAUSE_S = 3, 16, 3.0
# Student's t, 97.5 %, by degrees of freedom from 1 on.
_T = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
)


def known_within(values: Sequence[float]) -> tuple[float, float]:
    """The mean over processes, and half its 95 % interval over it (Student 1908, doi 10.1093/biomet/6.1.1).

    inf for the interval of a single value; NaN among NaN.

    Example:
        >>> mean, half = known_within([1.2, 1.3, 1.4])
        >>> round(mean, 3), round(half, 3)
        (1.3, 0.191)
    """
    mean = statistics.fmean(values)
    if math.isnan(mean):
        return mean, math.nan  # which stdev would stumble over
    if len(values) < 2:
        return mean, math.inf
    half = _T[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))
    return mean, half / abs(mean) if mean else math.inf


def until_known(
    once: Callable[[int], Part],
    restless: Callable[[list[Part]], str],
    *,
    say: Callable[[str], None] = lambda _: None,
) -> list[Part]:
    """What ``once(0)``, ``once(1)``, ... return, until ``restless`` of them all is empty.

    Args:
        once: measures in a process of its own; told how many did before.
        restless: what is not known well enough yet, in words.
        say: is told of each further one.

    Raises:
        NoisyError: something still is restless after ``MOST``.
    """
    parts = [once(turn) for turn in range(LEAST)]
    while complaint := restless(parts):
        if len(parts) >= MOST:
            raise NoisyError(complaint)
        say(f"{complaint} Once more.")
        time.sleep(PAUSE_S)
        parts.append(once(len(parts)))
    return parts
