"""Try the safe function that a report recommends, on what the failing operation read."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stablenum.diagnosis.replay.judge import Evidence, judge
from stablenum.diagnosis.replay.trials import Read, trial_of
from stablenum_jax._trees.leaves import is_floating

__all__ = ["with_trial"]


def with_trial(evidence: Evidence, read: Read | None) -> Evidence:
    """Return the evidence with what came of the safe function, in value and derivative; as it is, if the
    function cannot be tried.

    Args:
        evidence: what a replay found.
        read: what the first finding's operation read; None if it was not kept.
    """
    verdict = judge(evidence)
    if read is None or not verdict.safe_function or evidence.first is None:
        return evidence
    arrays = [jnp.asarray(x) for x in read.arrays if is_floating(x)]
    part, name = verdict.safe_function.split(".")[-2:]
    trial = trial_of(f"{part}.{name}", evidence.first, read.primitive, [x.shape for x in arrays])
    # What is not finite already (a mask) has no finite derivative to look for.
    if trial is None or not all(_finite(x) for x in arrays[: trial.arrays]):
        return evidence
    function = getattr(importlib.import_module(f"stablenum_jax.{part}"), name)

    def total(given: list[Any]) -> tuple[Any, Any]:
        value = function(*given, *trial.numbers, **trial.options)
        return value.sum(), value

    try:
        (_, value), slopes = jax.value_and_grad(total, has_aux=True)(arrays[: trial.arrays])
    except (TypeError, ValueError):
        return replace(evidence, tried="raises")
    finite = all(_finite(x) for x in (value, *slopes))
    return replace(evidence, tried="finite" if finite else "not finite")


def _finite(x: Any) -> bool:
    return bool(np.isfinite(np.asarray(x, np.float64)).all())
