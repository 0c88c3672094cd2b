"""Functions of JAX over rows, each of which is one call of many equations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax.extend import core

from stablenum.diagnosis.replay.operations import REMEDIES, ROWS
from stablenum_jax._diagnosis.replay.cells import Composed
from stablenum_jax._diagnosis.replay.jax_internals import sub_jaxpr
from stablenum_jax._diagnosis.replay.naming import function_name
from stablenum_jax._trees.leaves import is_floating

__all__ = ["axis_of", "composed_by", "reduces"]


def composed_by(eqn: Any, jaxpr: Any, inputs: Sequence[Any], stack: str) -> Composed | None:
    """Return the function over rows that an equation calls; None if it calls another one.

    Args:
        eqn: an equation that calls a function.
        jaxpr: the function.
        inputs: the arrays that it is given.
        stack: the name stack, which shows a ``vmap``.
    """
    operation = function_name([str(eqn.params.get("name", ""))])
    remedy = REMEDIES.get(operation)
    rows = [x for x in inputs if is_floating(x) and np.ndim(x)]
    if remedy is None or remedy.name not in ROWS or len(rows) != 1:
        return None
    reduced = next(_reductions(jaxpr), None)
    if reduced is None:
        return None
    ndim = len(reduced.invars[0].aval.shape)
    if ndim != np.ndim(rows[0]):
        return None
    options: dict[str, Any] = {"axis": axis_of(reduced, stack)}
    if operation in ("std", "var"):
        numbers = [v.val for v in eqn.invars if isinstance(v, core.Literal)]
        options["correction"] = int(numbers[0]) if numbers else 0
        options["count"] = math.prod(np.shape(rows[0])[a] for a in reduced.params["axes"])
    if operation in ("std", "var", "norm", "logsumexp"):
        options["keepdims"] = len(eqn.outvars[0].aval.shape) == ndim
    return Composed(operation, rows, options)


def reduces(eqn: Any) -> bool:
    """Return whether an equation is a sum or a maximum over axes."""
    return "axes" in eqn.params and eqn.primitive.name.startswith("reduce_")


def axis_of(eqn: Any, stack: str) -> tuple[int, ...] | None:
    """Return the axes that an equation reduces, as a user writes them: None for all of several, and from the
    last one where ``vmap`` has added a first one."""
    ndim = len(eqn.invars[0].aval.shape)
    axes = sorted(int(a) for a in eqn.params["axes"])
    if len(axes) == ndim > 1:
        return None
    return tuple(a - ndim if "vmap(" in stack or a == ndim - 1 else a for a in axes)


def _reductions(jaxpr: Any) -> Iterator[Any]:
    """Return the equations that reduce an array, in order, those of inner functions included."""
    for eqn in jaxpr.eqns:
        if reduces(eqn):
            yield eqn
        for value in eqn.params.values():
            if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                yield from _reductions(sub_jaxpr(value)[0])
