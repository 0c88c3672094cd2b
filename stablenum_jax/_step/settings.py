"""Settings of an optimizer that are known before its update: those of ``optax.inject_hyperparams``."""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from stablenum.guard.faults import setting_is_factor
from stablenum.guard.observation import Fault
from stablenum.guard.reasons import Reason
from stablenum_jax._trees.leaves import is_floating
from stablenum_jax._trees.state import injects_hyperparams

__all__ = ["fault_of_settings"]

PyTree: TypeAlias = Any


def fault_of_settings(opt_state: PyTree) -> Fault | None:
    """Return the fault of settings that are not finite; None if the state has no settings.

    The value of a schedule is not in the state until its update has run.
    """
    bad = [
        jnp.isnan(value) | (jnp.isinf(value) if setting_is_factor(name) else False)
        for node in jax.tree.leaves(opt_state, is_leaf=injects_hyperparams)
        if injects_hyperparams(node)
        for name, value in _settings(node)
    ]
    if not bad:
        return None
    found = jnp.stack(bad).any()
    reason = jnp.where(found, int(Reason.NONFINITE_SETTING), 0).astype(jnp.int32)
    return Fault(reason, jnp.full_like(reason, -1))


def _settings(node: Any) -> list[tuple[str, Any]]:
    own = [(name, x) for name, x in node.hyperparams.items() if is_floating(x) and jnp.shape(x) == ()]
    inner = jax.tree.leaves(node.inner_state, is_leaf=injects_hyperparams)
    return own + [pair for part in inner if injects_hyperparams(part) for pair in _settings(part)]
