"""Second moments that no gradient explains, although they are finite.

A second moment is an average or a sum of squared gradients, so between two looks it can grow by no more than
the sum of the squared gradient norms in between. One that is larger by many orders, as after a bit has
flipped, makes its parameter stand still.

One that is too small makes its parameter jump. By the inequality of Cauchy and Schwarz, two moments of the
same gradients have ``|m| <= (1 - b1) / sqrt((1 - b2) (1 - b1**2 / b2)) sqrt(v)``: 7.3 for the usual (0.9,
0.999), and below 100 for all that are in use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from stablenum.guard.readout import StepRecord

__all__ = ["MomentWatch", "Moments", "described"]

# Coupled weight decay and gradients that were transformed on the way are not in the norm of the guard.
_SLACK = 1e6
_LARGEST_RATIO = 100.0


class Moments(NamedTuple):
    """What is measured of the moments of a parameter.

    Attributes:
        second: the largest second moment.
        ratio: the largest abs(m) / sqrt(v), of elements whose v is well above the smallest normal number of
            its format; 0 if there are none, or there is no first moment.
    """

    second: float
    ratio: float = 0.0


class MomentWatch:
    """Compares the moments of the parameters with each other, and with those of the last look."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}
        self._squares = 0.0  # of the norms of the steps since the last look

    def add(self, row: StepRecord) -> None:
        """Take in an applied step."""
        norm = row["grad_norm"]
        if math.isfinite(norm):
            self._squares += norm * norm

    def unexplained(self, moments: Mapping[str, Moments]) -> list[str]:
        """Return the parameters whose second moment is larger or smaller than gradients explain.

        Args:
            moments: of each parameter, by name. The growth of one that was not there at the last look is not
                judged.
        """
        found = [name for name, now in moments.items() if self._grew(name, now) or now.ratio > _LARGEST_RATIO]
        self._before, self._squares = {name: now.second for name, now in moments.items()}, 0.0
        return found

    def _grew(self, name: str, now: Moments) -> bool:
        return name in self._before and now.second > _SLACK * (self._before[name] + self._squares)

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, which :meth:`load_state_dict` takes."""
        finite = {name: v for name, v in self._before.items() if math.isfinite(v)}
        return {"before": finite, "squares": min(self._squares, 1e300)}

    def load_state_dict(self, plain: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        self._before, self._squares = dict(plain["before"]), plain["squares"]


def described(names: Sequence[str]) -> str:
    """Return a clause about the parameters that :meth:`MomentWatch.unexplained` returned."""
    of = "1 parameter are" if len(names) == 1 else f"{len(names)} parameters are"
    return f"the second moments of {of} such as no gradients make"
