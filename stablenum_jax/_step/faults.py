"""What forbids a step besides its gradients: settings and parameters that are not finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from stablenum.guard.faults import setting_is_factor
from stablenum.guard.observation import Fault
from stablenum.guard.reasons import MAY_SPOIL_PARAMETERS, SPIKES, Reason
from stablenum.guard.recorder import Recorder
from stablenum_jax._trees.leaves import is_floating, real_parts
from stablenum_jax._trees.models import watched_parameters
from stablenum_jax._trees.names import Path
from stablenum_jax._trees.state import injects_hyperparams

__all__ = ["fault_of_parameters", "fault_of_settings"]

PyTree: TypeAlias = Any


def fault_of_settings(opt_state: PyTree, inside: Any = False) -> Fault | None:
    """Return the fault of settings that are not finite; None where none can be.

    Args:
        opt_state: the state, with the settings of ``optax.inject_hyperparams`` in it.
        inside: whether settings inside the optimizer make the whole update NaN or inf: a bool, or () bool.
    """
    bad = [
        jnp.isnan(value) | (jnp.isinf(value) if setting_is_factor(name) else False)
        for node in jax.tree.leaves(opt_state, is_leaf=injects_hyperparams)
        if injects_hyperparams(node)
        for name, value in _settings(node)
    ]
    bad += [] if inside is False else [jnp.asarray(inside)]
    if not bad:
        return None
    found = jnp.stack(bad).any()
    reason = jnp.where(found, int(Reason.NONFINITE_SETTING), 0).astype(jnp.int32)
    return Fault(reason, jnp.full_like(reason, -1))


def fault_of_parameters(
    params: PyTree, paths: Sequence[Path], before: Recorder, reason: jax.Array
) -> Fault | None:
    """Return the fault that a parameter is not finite, for a step that is skipped; None where none can be.

    This reads all parameters, so it belongs into the branch of a skip.

    Args:
        params: the parameters.
        paths: those that the guard watches, in the order of their norms.
        before: the steps before this one.
        reason: () int32, why this one is skipped.
    """
    by_path = dict(jax.tree_util.tree_leaves_with_path(watched_parameters(params)))
    if not paths:
        return None
    bad = jnp.stack([_holds_nonfinite(by_path[path]) if path in by_path else False for path in paths])
    step, previous = before.ints[-1, 0], before.ints[-1, 1]
    by_step = (step >= 0) & _is_one_of(previous, MAY_SPOIL_PARAMETERS)
    found = bad.any() & by_step & ~_is_one_of(reason, (*SPIKES, Reason.NONFINITE_SETTING))
    code = jnp.where(found, int(Reason.NONFINITE_UPDATE), 0).astype(jnp.int32)
    return Fault(code, jnp.where(found, jnp.argmax(bad), -1).astype(jnp.int32))


def _holds_nonfinite(param: Any) -> jax.Array:
    """Return () bool. On a CPU, ``isfinite(param).all()`` would take memory for each element."""
    total = sum(jnp.sum(part - part) for part in real_parts(jnp.asarray(param)))
    return total != 0.0  # NaN - NaN and inf - inf are NaN


def _is_one_of(reason: jax.Array, reasons: Sequence[Reason]) -> jax.Array:
    return jnp.isin(reason, jnp.asarray([int(code) for code in reasons], jnp.int32))


def _settings(node: Any) -> list[tuple[str, Any]]:
    own = [(name, x) for name, x in node.hyperparams.items() if is_floating(x) and jnp.shape(x) == ()]
    inner = jax.tree.leaves(node.inner_state, is_leaf=injects_hyperparams)
    return own + [pair for part in inner if injects_hyperparams(part) for pair in _settings(part)]
