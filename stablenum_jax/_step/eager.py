"""Where a guarded update runs: in its caller's trace or, for an eager caller, compiled here."""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import jax
import numpy as np
import optax

import stablenum
from stablenum_jax._step.decide_and_update import Add, decide_and_update
from stablenum_jax._step.driver_mode import current_mode
from stablenum_jax._step.measure.norms import scalar_loss, within_range
from stablenum_jax._step.readout import raise_if_halted
from stablenum_jax._trees.state import find_guard

__all__ = ["guarded_update"]

Array: TypeAlias = jax.Array
PyTree: TypeAlias = Any


class _Compiled:
    """An eager caller's update, compiled once per transformation.

    If the update ran operation by operation, each ``lax.cond`` would be compiled again at every step.
    """

    def __init__(self, tx: optax.GradientTransformation, add: Add, static: dict[str, Any]) -> None:
        self.config = stablenum.GuardConfig()

        def run(
            params: PyTree, opt_state: PyTree, grads: PyTree, loss: Array | None, arrays: dict[str, Any]
        ) -> tuple[PyTree, PyTree]:
            target, opt_state, self.config = decide_and_update(
                tx, params, opt_state, grads, arrays | static, loss=loss, add=add, reuse_grads=False
            )
            return target, opt_state

        self.run = jax.jit(run)


@functools.lru_cache(maxsize=32)
def _compiled(tx: optax.GradientTransformation, add: Add, static: tuple[tuple[str, Any], ...]) -> _Compiled:
    return _Compiled(tx, add, dict(static))


def _is_traced(tree: PyTree) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _is_arrays(value: Any) -> bool:
    """Return whether a value may be traced. A bool may not, because transformations branch on their flags."""
    return all(
        isinstance(leaf, (int, float, complex, np.ndarray, np.generic, jax.Array))
        and not isinstance(leaf, bool)
        for leaf in jax.tree.leaves(value)
    )


def guarded_update(
    tx: optax.GradientTransformation,
    params: PyTree,
    opt_state: PyTree,
    grads: PyTree,
    extra: dict[str, Any],
    *,
    add: Add,
) -> tuple[PyTree, PyTree]:
    """Run one guarded update and return the new parameters, or the updates, and the new state.

    Args:
        tx: a transformation with one guard somewhere inside.
        params: the parameters; may be None if ``add`` is None.
        opt_state: the state, from ``tx.init``.
        grads: the gradients.
        extra: extra arguments of ``tx.update``; ``value``, if given, is the unscaled loss.
        add: a module-level function that makes the new parameters from the old ones and the updates. If it
            is None, the updates are returned, which are -0.0 on a skip.

    Raises:
        NonFiniteError: called eagerly, and the guard has halted the training.
        ValueError: ``opt_state`` holds no guard or more than one; ``tx.update`` changes the
            structure of the state; the loss is not a scalar.
    """
    loss = scalar_loss(extra.get("value"))
    if loss is not None:
        extra = {**extra, "value": within_range(extra["value"])}
    arrays = {name: value for name, value in extra.items() if _is_arrays(value)}
    static = tuple((name, value) for name, value in extra.items() if name not in arrays)
    eager = current_mode() is None and not _is_traced((params, opt_state, grads, loss, extra))
    if not eager or jax.config.jax_disable_jit or not _is_hashable((tx, static)):
        target, opt_state, config = decide_and_update(
            tx, params, opt_state, grads, extra, loss=loss, add=add, reuse_grads=not eager
        )
    else:
        find_guard(opt_state)  # a missing guard is an error before anything is compiled
        compiled = _compiled(tx, add, static)
        target, opt_state = compiled.run(params, opt_state, grads, loss, arrays)
        config = compiled.config
    if config.skip_limit is not None and not _is_traced(opt_state):
        raise_if_halted(opt_state, config)
    return target, opt_state
