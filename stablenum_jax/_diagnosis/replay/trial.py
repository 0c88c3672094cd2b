"""Try the safe function that a report recommends, in JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stablenum.diagnosis.replay import trials
from stablenum.diagnosis.replay.judge import Evidence
from stablenum.diagnosis.replay.trials import Read, Trial
from stablenum_jax._trees.leaves import is_floating

__all__ = ["with_trial"]


def with_trial(evidence: Evidence, read: Read | None) -> Evidence:
    """Do what :func:`stablenum.diagnosis.replay.trials.with_trial` does, with JAX's arrays."""
    return trials.with_trial(
        evidence,
        read,
        package="stablenum_jax",
        floating=_floating,
        finite=_finite,
        evaluate=_evaluate,
        exp=jnp.exp,
    )


def _floating(arrays: Sequence[Any]) -> list[Any]:
    return [jnp.asarray(x) for x in arrays if is_floating(x)]


def _evaluate(function: Callable[..., Any], arrays: list[Any], trial: Trial) -> list[Any]:
    def total(given: list[Any]) -> tuple[Any, Any]:
        value = function(*given, *trial.numbers, **trial.options)
        return value.sum(), value

    (_, value), slopes = jax.value_and_grad(total, has_aux=True)(arrays)
    return [value, *slopes]


def _finite(x: Any) -> bool:
    return bool(np.isfinite(np.asarray(x, np.float64)).all())
