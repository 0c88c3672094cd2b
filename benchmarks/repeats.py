"""A figure measured in several processes: its mean, how well it is known, and when there are enough of them.

Rounds within one process tell little of how well a ratio is known: where each array came to lie in memory is
settled when the process starts and moves the ratio by several per cent, the same way in every round.
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

# So many processes at first, for an interval of fewer is narrow by chance too often; and no more than these.
# A pause before each further one lets pass what made the machine restless.
LEAST, MOST, PAUSE_S = 5, 16, 3.0
# Student's t, 97.5 %, by degrees of freedom from 1 on.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306),
    *(2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
)


def known_within(values: Sequence[float]) -> tuple[float, float]:
    """The mean over processes, and half its 95 % interval (Student 1908, doi 10.1093/biomet/6.1.1).

    inf for the interval of a single value; NaN among NaN.

    Example:
        >>> mean, half = known_within([1.2, 1.3, 1.4])
        >>> round(mean, 3), round(half, 3)
        (1.3, 0.248)
    """
    mean = statistics.fmean(values)
    if math.isnan(mean):
        return mean, math.nan  # which stdev would stumble over
    if len(values) < 2:
        return mean, math.inf
    return mean, _T[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))


def quotient_within(above: Sequence[float], below: Sequence[float]) -> tuple[float, float] | None:
    """The quotient of two means over the same processes, and half its interval, to first order.

    Not the mean of quotients: a process in which the divisor happens to be small would outweigh the others.
    None if the divisor is not told from 0.

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
    """The times of each process, of which ``samples`` has the milliseconds."""
    return [{name: Times(samples) for name, samples in part["samples"].items()} for part in parts]


def pooled(processes: Sequence[Timed], name: str) -> Times:
    """A variant's rounds of all processes."""
    return Times([sample for process in processes for sample in process[name].samples])


def ratio_to_bare(processes: Sequence[Timed], name: str) -> tuple[float, float]:
    """How many times as long as the bare step, and within how much of itself that is known."""
    mean, half = known_within([process[name].median_ratio_to(process["bare"]) for process in processes])
    return mean, half / mean


def restless(what: str, processes: Sequence[Timed], bound: float) -> str:
    """Which ratios to the bare step are not known within ``bound`` of themselves yet; "" if all are."""
    known = {name: ratio_to_bare(processes, name)[1] for name in processes[0] if name != "bare"}
    over = {name: f"{within:.1%}" for name, within in known.items() if not within <= bound}
    if not over:
        return ""
    return f"{what}: after {len(processes)} processes known within {over}, beyond {bound:.0%}."


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
            raise NoisyError(f"{complaint} The machine is too busy.")
        say(f"{complaint} Once more.")
        time.sleep(PAUSE_S)
        parts.append(once(len(parts)))
    return parts
