"""Whether a script goes on with what a call returned whose loss was NaN and whose gradients were finite."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax

from stablenum.diagnosis import Cause, Report
from stablenum_jax._diagnosis.watch.calls import Call
from stablenum_jax._diagnosis.watch.results import floating_leaves
from stablenum_jax._diagnosis.watch.trees import Tree

__all__ = ["Adoption", "matters"]

_FAULTS = (Cause.DOMAIN, Cause.OVERFLOW, Cause.LOW_PRECISION_OVERFLOW)


class Adoption:
    """What a call returned in the shape of its arguments (parameters, gradients), and whether it is used.

    Attributes:
        seen: whether a later call has read all of it.
    """

    def __init__(self, call: Call, result: Any) -> None:
        given = Counter((x.shape, x.dtype) for _, x in floating_leaves(call.given) if x.ndim)
        leaves = [x for _, x in floating_leaves(Tree(result)) if given[x.shape, x.dtype]]
        self._leaves: list[jax.Array] = leaves
        self.seen = False

    def look(self, call: Call) -> None:
        """See whether a call reads what was returned."""
        if self._leaves:
            read = set(map(id, call.given.leaves))
            self.seen = all(id(x) in read for x in self._leaves)
            self._leaves = [] if self.seen else self._leaves


def matters(call: Call, report: Report) -> bool:
    """Return whether only the loss is NaN, through a fault in the function, and no test in the call saw it.

    The update is then that of a loss that has no value. A guard tests its loss by itself.
    """
    f = report.evidence.first
    fault = report.verdict.cause in _FAULTS and f is not None and (f.phase, f.kind) == ("forward", "nan")
    return bool(fault and report.evidence.only_loss and not call.given.guards)
