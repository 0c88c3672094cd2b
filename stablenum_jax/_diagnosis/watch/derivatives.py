"""Derivatives that the script makes, and which part of their results is judged."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

__all__ = ["Derivative", "derivative_of", "judged_part", "label"]

_OUR_SCALING, _FLAX_SCALING = "stablenum_jax/_step/scaled_loss.py", "flax/training/dynamic_scale.py"


class Derivative(NamedTuple):
    """What a watched derivative was made from.

    Attributes:
        fun: the differentiated function.
        settings: the settings of its replay.
        judged: returns the part of its result that is judged.
    """

    fun: Callable[..., Any]
    settings: dict[str, Any]
    judged: Callable[[Any], Any]


def label(function: Any, derivative: Derivative) -> None:
    """Attach to a function what it is the derivative of."""
    # Other wrappers copy this attribute, so it says whose it is.
    function.stablenum_derivative = (function, derivative)


def derivative_of(fun: Any) -> Derivative | None:
    """Return what ``fun`` is the derivative of; None for a function around one, such as
    ``jax.vmap(jax.grad(f))``."""
    found = getattr(fun, "stablenum_derivative", None)
    return found[1] if found is not None and found[0] is fun else None


def judged_part(result: Any, *, value: bool, has_aux: bool) -> Any:
    """Return the result of a derivative without what the function returns beside its loss."""
    scaling = _scaling() if value else ""
    if scaling:
        return _loss_before_scaling(result[0], ours=scaling == _OUR_SCALING)
    if not has_aux:
        return result
    return (result[0][0], result[1]) if value else result[0]


def _scaling() -> str:
    """Return the file of a running function that scales losses, whose gradients may overflow: then the scale
    comes down."""
    frame = inspect.currentframe()
    while frame is not None:
        file = frame.f_code.co_filename.replace("\\", "/")
        found = next((name for name in (_OUR_SCALING, _FLAX_SCALING) if file.endswith(name)), "")
        if found:
            return found
        frame = frame.f_back
    return ""


def _loss_before_scaling(value: Any, *, ours: bool) -> Any:
    """Return the loss that our scaling keeps beside the scaled one. In flax's, only NaN counts."""
    leaves = jax.tree.leaves(value)
    return [leaves[1] if ours else jnp.where(jnp.isinf(leaves[0]), 0, leaves[0])]
