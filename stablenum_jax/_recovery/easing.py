"""Take steps more carefully for a while, by values that are set in the state."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from stablenum.recovery.hooks import Easing
from stablenum.recovery.settings import Response
from stablenum.rules.escalation import EscalationState
from stablenum_jax._recovery.eased import EasedState, is_eased
from stablenum_jax._recovery.states import replaced
from stablenum_jax._trees.state import find_guard

__all__ = ["eased_state", "possible"]

PyTree: TypeAlias = Any

_STAYS = 2**30  # good steps at a level


def eased_state(state: PyTree, easing: Easing | None, *, was_wider: bool = False) -> PyTree:
    """Return the state with what ``easing`` asks for, or as usual, as far as the state has a place for it.

    Args:
        state: a state, which may be eased already.
        easing: what is asked for; None for steps as usual.
        was_wider: whether the easing that ends here had a wider format.
    """

    def change(node: Any) -> Any:
        if is_eased(node):
            return _smaller(node, easing, was_wider)
        return _wider(node, asked=easing is not None and easing.wider, ended=was_wider)

    return replaced(state, change, lambda node: is_eased(node) or isinstance(node, EscalationState))


def possible(state: PyTree, response: Response) -> tuple[Response, list[str]]:
    """Return a response without what the state has no place for, and what would give it one."""
    neutral: dict[str, Any] = {}
    missing = []
    holds_eased = any(map(is_eased, jax.tree.leaves(state, is_leaf=is_eased)))
    if not holds_eased and (response.rate != 1.0 or response.clip is not None):
        neutral |= {"rate": 1.0, "clip": None}
        missing.append(
            "a lower rate or a tighter clip (put stablenum_jax.eased around the optimizer, as in "
            "optax.chain(stablenum_jax.guard(), stablenum_jax.eased(optax.adamw(1e-3))))"
        )
    if response.wider and not isinstance(find_guard(state).guard.escalation, EscalationState):
        neutral |= {"wider": False}
        missing.append("a wider format (give the guard an EscalatePrecision as escalate)")
    return dataclasses.replace(response, **neutral), missing


def _smaller(node: EasedState, easing: Easing | None, was_wider: bool) -> EasedState:
    rate, clip_at = (1.0, None) if easing is None else (easing.rate, easing.clip_at)
    # What is inside may be eased, or hold a guard, as well.
    return node._replace(
        rate=_like(node.rate, rate),
        clip_at=_like(node.clip_at, clip_at or 0.0),
        inner=eased_state(node.inner, easing, was_wider=was_wider),
    )


def _wider(node: EscalationState, *, asked: bool, ended: bool) -> EscalationState:
    level, left = (int(_array(x)) for x in (node.level, node.left))
    if asked:
        level, left = max(level, 1), _STAYS
    elif ended and level == 1:  # unless the guard has gone on to a still wider one
        level, left = 0, 0
    elif ended:
        left = min(left, 1)
    return node._replace(level=_like(node.level, level), left=_like(node.left, left))


def _like(old: Any, value: float) -> Any:
    """Return an array of this value that a compiled step takes in place of the old one."""
    array = _array(old)
    plain = np.full(array.shape, value, array.dtype)
    if not array.committed:
        new = jnp.asarray(plain)
    else:
        new = jax.make_array_from_callback(array.shape, array.sharding, lambda index: plain[index])
    return jax.tree.unflatten(jax.tree.structure(old), [new])


def _array(node: Any) -> jax.Array:
    """Return the array in a node: flax.nnx wraps each array in a Variable."""
    (array,) = jax.tree.leaves(node)
    return array
