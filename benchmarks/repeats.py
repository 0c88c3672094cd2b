"""A figure measured in several processes: its mean, its uncertainty, and when there are enough processes.

Rounds within one process say little about the uncertainty of a ratio. The place of each array in memory is
decided when the process starts, and it changes the ratio by several per cent, in the same way in every round.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from benchmarks.steps.errors import NoisyError
from benchmarks.timing import Times

__all__ = [
    "LEAST",
    "MOST",
    "Timed",
    "known_within",
    "pooled",
    "quotient_within",
    "ratio_to_bare",
    "restless",
    "timed",
    "until_known",
]

Part = TypeVar("Part")
# One process's times, by variant.
Timed: TypeAlias = Mapping[str, Times]

# The number of processes at first (with fewer, the interval is too often narrow by chance), their largest
# number, and the seconds to wait before each further process, so that whatever disturbed the machine can end.
LEAST, MOST, PAUSE_S = 5, 16, 3.0
# Student's t, 97.5 %, by degrees of freedom from 1 on.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306),
    *(2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
)


def known_within(values: Sequence[float]) -> tuple[float, float]:
    """The mean over processes, and half its 95 % interval (Student 1908, doi 10.1093/biomet/6.1.1).

    The interval of a single value is inf; if a value is NaN, so are both results.

    Example:
        >>> mean, half = known_within([1.2, 1.3, 1.4])
        >>> round(mean, 3), round(half, 3)
        (1.3, 0.248)
    """
    mean = statistics.fmean(values)
    if math.isnan(mean):
        return mean, math.nan  # stdev would raise
    if len(values) < 2:
        return mean, math.inf
    return mean, _T[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))


def quotient_within(above: Sequence[float], below: Sequence[float]) -> tuple[float, float] | None:
    """The quotient of two means over the same processes, and half its interval, to first order.

    This is not the mean of quotients, in which a process with a divisor that happens to be small would
    outweigh the others. It is None if the divisor's interval contains 0.

    Example:
        >>> quotient_within([1.0, 2.0], [2.0, 4.0])
        (0.5, 0.0)
        >>> quotient_within([1.0, 1.0], [-1.0, 2.0]) is None
        True
    """
    divisor, half = known_within(below)
    if len(below) > 1 and not divisor > half:
        return None
    if divisor <= 0:
        return None
    quotient = statistics.fmean(above) / divisor
    _, off = known_within([a - quotient * b for a, b in zip(above, below, strict=True)])
    return quotient, off / divisor


def timed(parts: Sequence[Mapping[str, Any]]) -> list[Timed]:
    """The times of each process, from the milliseconds in ``samples``."""
    return [{name: Times(samples) for name, samples in part["samples"].items()} for part in parts]


def pooled(processes: Sequence[Timed], name: str) -> Times:
    """A variant's rounds of all processes."""
    return Times([sample for process in processes for sample in process[name].samples])


def ratio_to_bare(processes: Sequence[Timed], name: str) -> tuple[float, float]:
    """The time relative to the bare step's, and the relative uncertainty of this ratio."""
    mean, half = known_within([process[name].median_ratio_to(process["bare"]) for process in processes])
    return mean, half / mean


def restless(what: str, processes: Sequence[Timed], bound: float) -> str:
    """A message with the ratios to the bare step whose relative uncertainty exceeds ``bound``, or ""."""
    known = {name: ratio_to_bare(processes, name)[1] for name in processes[0] if name != "bare"}
    over = {name: f"{within:.1%}" for name, within in known.items() if not within <= bound}
    if not over:
        return ""
    return f"{what}: after {len(processes)} processes the uncertainty is {over}, above {bound:.0%}."


def until_known(
    once: Callable[[int], Part],
    restless: Callable[[list[Part]], str],
    *,
    say: Callable[[str], None] = lambda _: None,
) -> list[Part]:
    """The results of ``once(0)``, ``once(1)``, ..., until ``restless`` returns "" for all of them.

    Args:
        once: measures in a process of its own; its argument is the number of processes before.
        restless: a message about what is still too uncertain, or "".
        say: called with a message before each further process.

    Raises:
        NoisyError: ``restless`` still returns a message after ``MOST`` processes.
    """
    parts = [once(turn) for turn in range(LEAST)]
    while complaint := restless(parts):
        if len(parts) >= MOST:
            raise NoisyError(f"{complaint} The machine is too busy.")
        say(f"{complaint} Measuring once more.")
        time.sleep(PAUSE_S)
        parts.append(once(len(parts)))
    return parts
