"""JAX: a compiled step that keeps its state between calls, for measuring the cost of rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

__all__ = ["Compiled", "make_gradients", "optax_step"]


Shapes: TypeAlias = Sequence[tuple[int, ...]]


def _params(shapes: Shapes) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    return {f"w{i:03d}": jnp.asarray(rng.standard_normal(s, np.float32)) for i, s in enumerate(shapes)}


def make_gradients(shapes: Shapes) -> dict[str, jax.Array]:
    """Gradients with a standard deviation of 0.01."""
    rng = np.random.default_rng(1)
    return {f"w{i:03d}": jnp.asarray(rng.standard_normal(s, np.float32) * 0.01) for i, s in enumerate(shapes)}


def optax_step(tx: optax.GradientTransformation) -> Callable[..., Any]:
    """A step as optax documents it."""

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


class Compiled:
    """A jitted step with donated parameters and state; each call continues from the last."""

    def __init__(
        self, tx: optax.GradientTransformation, step: Callable[..., Any], grads: Any, shapes: Shapes
    ) -> None:
        self.params = _params(shapes)
        self.state = jax.jit(tx.init)(self.params)
        self.grads = grads
        self.compiled = jax.jit(step, donate_argnums=(0, 1)).lower(self.params, self.state, grads).compile()

    def __call__(self) -> None:
        self.params, self.state = self.compiled(self.params, self.state, self.grads)
        jax.block_until_ready((self.params, self.state))

    @property
    def temp_bytes(self) -> int:
        """Memory in addition to arguments and results."""
        return int(self.compiled.memory_analysis().temp_size_in_bytes)
