"""Try a cure: change a running JAX training in one way, and leave all else as it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import optax

from stablenum.diagnosis.checkup.remedies import Change, Remedy

__all__ = ["CHANGES", "with_remedy", "with_settings"]

# What is tried -> the argument of optax's functions, and its value.
_ARGUMENTS: dict[Change, tuple[str, Callable[[float], float]]] = {
    Change.EPS: ("eps", lambda eps: eps),
    Change.NO_DECAY: ("weight_decay", lambda _: 0.0),
    Change.NO_CLIP: ("max_norm", lambda _: float("inf")),
}
# What can be tried.
CHANGES = frozenset({Change.RATE, Change.CLIP, Change.INITIALISE, *_ARGUMENTS})
_clip_by_global_norm = optax.clip_by_global_norm


def with_remedy(remedy: Remedy, update: Callable[..., Any], updates: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what ``update`` returns, with another rate or with gradients that are clipped first."""
    if remedy.change is Change.CLIP:
        updates, _ = _clip_by_global_norm(remedy.number).update(updates, optax.EmptyState())
    changed, state = update(updates, *args, **kwargs)
    if remedy.change is Change.RATE:
        changed = jax.tree.map(lambda u: (u * remedy.number).astype(u.dtype), changed)
    return changed, state


def with_settings(
    remedy: Remedy, function: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Any, Any, bool]:
    """Return the arguments of a function of optax with the setting that is tried, and whether it has it."""
    name, value = _ARGUMENTS.get(remedy.change, ("", float))
    if name not in inspect.signature(function).parameters:
        return args, kwargs, False
    given = inspect.signature(function).bind(*args, **kwargs)
    given.arguments[name] = value(remedy.number)
    return given.args, given.kwargs, True
