"""What forbids a step besides its gradients: settings and parameters that are not finite."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from stablenum.guard.faults import setting_is_factor
from stablenum.guard.observation import Fault
from stablenum.guard.reasons import MAY_SPOIL_PARAMETERS, SPIKES, Reason
from stablenum_jax._trees.leaves import is_floating, real_parts, varying_axes
from stablenum_jax._trees.models import watched_parameters
from stablenum_jax._trees.names import Path
from stablenum_jax._trees.state import GuardOptState, injects_hyperparams

__all__ = ["fault_of_parameters", "fault_of_settings", "nonfinite_parameters"]

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
    params: PyTree, counted: Mapping[Path, int], before: GuardOptState, reason: jax.Array
) -> Fault | None:
    """Return the fault that the step before has made a parameter NaN or inf, for a step that is skipped.

    This reads all parameters, so it belongs into the branch of a skip. A parameter that was not finite from
    the beginning, as a mask of -inf is, does not count.

    Args:
        params: the parameters.
        counted: the paths of those that a step changes, with the indices of their norms.
        before: the guard's state before this step.
        reason: () int32, why this one is skipped.

    Returns:
        The fault, with the reason 0 if there is none; None where none can be.
    """
    by_path = dict(jax.tree_util.tree_leaves_with_path(watched_parameters(params)))
    looked_at = {path: i for path, i in counted.items() if path in by_path}
    if not looked_at:
        return None
    bad = jnp.stack([_holds_nonfinite(by_path[path]) for path in looked_at])
    at = jnp.asarray([*looked_at.values()], jnp.int32)
    if before.bad_at_init.shape[0] > max(looked_at.values()):  # not where the state is of other parameters
        bad &= ~before.bad_at_init[at]
    step, previous = before.ints[-1, 0], before.ints[-1, 1]
    by_step = (step >= 0) & _is_one_of(previous, MAY_SPOIL_PARAMETERS)
    found = bad.any() & by_step & ~_is_one_of(reason, (*SPIKES, Reason.NONFINITE_SETTING))
    code = jnp.where(found, int(Reason.NONFINITE_UPDATE), 0).astype(jnp.int32)
    return Fault(code, jnp.where(found, at[jnp.argmax(bad)], -1))


def nonfinite_parameters(params: Iterable[Any]) -> jax.Array:
    """Return which parameters hold NaN or inf: (n,) bool, not committed to the devices of the parameters.

    Of parameters that differ among the devices of a manual axis, and of those without values, none does.
    """
    bad = [not _has_no_value(param) and _holds_nonfinite(param) for param in params]
    if any(isinstance(part, jax.core.Tracer) for part in bad):
        return jnp.stack([jnp.asarray(part) for part in bad])
    return jnp.asarray(np.asarray([bool(part) for part in bad], bool))


def _has_no_value(param: Any) -> bool:
    return isinstance(param, jax.ShapeDtypeStruct) or bool(varying_axes(param))


@functools.partial(jax.jit, inline=True)
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
