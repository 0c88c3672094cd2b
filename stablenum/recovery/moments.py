"""Second moments that no gradient explains: finite, but so large that their parameters stand still.

A second moment is an average or a sum of squared gradients, so between two looks it can grow by no more than
the sum of the squared gradient norms in between. A bit that flips upwards makes it larger by many orders.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from stablenum.guard.readout import StepRecord

__all__ = ["MomentWatch", "described"]

# Coupled weight decay and gradients that were transformed on the way are not in the norm of the guard.
_SLACK = 1e6


class MomentWatch:
    """Compares the largest second moments of the parameters with those of the last look."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}
        self._squares = 0.0  # of the norms of the steps since the last look

    def add(self, row: StepRecord) -> None:
        """Take in an applied step."""
        norm = row["grad_norm"]
        if math.isfinite(norm):
            self._squares += norm * norm

    def unexplained(self, largest: Mapping[str, float]) -> list[str]:
        """Return the parameters whose second moment has grown by more than its gradients explain.

        Args:
            largest: the largest second moment of each parameter, by name. One that was not there at the last
                look is only noted.
        """
        known = {name: self._before[name] for name in largest if name in self._before}
        found = [name for name, v in known.items() if largest[name] > _SLACK * (v + self._squares)]
        self._before, self._squares = dict(largest), 0.0
        return found

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
    return f"the second moments of {of} larger than any gradient explains"
