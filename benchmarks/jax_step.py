"""JAX on a CPU: a guarded adamw step against the bare one and against optax's own guard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

import stablenum_jax
from benchmarks.timing import interleaved

__all__ = ["Compiled", "guarded_step", "make_gradients", "optax_step", "run"]

SHAPES = [(350, 1000)] * 108
ROUNDS = 15
MAX_NORM = 1.0


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


def guarded_step(tx: optax.GradientTransformation) -> Callable[..., Any]:
    """A step by ``stablenum_jax.step``."""

    def step(params: Any, state: Any, grads: Any) -> Any:
        return stablenum_jax.step(tx, params, state, grads)

    return step


class Compiled:
    """A jitted step with donated parameters and state, and the state that it goes on from."""

    def __init__(
        self, tx: optax.GradientTransformation, step: Callable[..., Any], grads: Any, shapes: Shapes = SHAPES
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
        """Memory beside arguments and results."""
        return int(self.compiled.memory_analysis().temp_size_in_bytes)


def run() -> list[dict[str, Any]]:
    """One row: times, ratios to the bare step, temporary memory."""
    grads, adamw = make_gradients(SHAPES), optax.adamw(1e-4)
    clipped = optax.chain(optax.clip_by_global_norm(MAX_NORM), adamw)
    guard = optax.chain(stablenum_jax.guard(clip=MAX_NORM), adamw)
    wrapped = stablenum_jax.chain(stablenum_jax.guard(clip=MAX_NORM), adamw)
    peer = optax.apply_if_finite(clipped, max_consecutive_errors=5)
    variants = {
        "bare adamw": Compiled(adamw, optax_step(adamw), grads),
        "optax clip + adamw": Compiled(clipped, optax_step(clipped), grads),
        "optax apply_if_finite(clip + adamw)": Compiled(peer, optax_step(peer), grads),
        "stablenum step(guard + adamw)": Compiled(guard, guarded_step(guard), grads),
        "stablenum chain(guard, adamw)": Compiled(wrapped, optax_step(wrapped), grads),
    }
    times = interleaved(variants, rounds=ROUNDS)
    ours, theirs = variants["stablenum step(guard + adamw)"], variants["optax apply_if_finite(clip + adamw)"]
    for name, value in ours.params.items():
        np.testing.assert_allclose(value, theirs.params[name], rtol=1e-4, atol=1e-6)
    base = times["bare adamw"].median
    step = times["stablenum step(guard + adamw)"].median
    return [
        {
            "size": "38 M in 108 tensors",
            "times": {name: t.as_dict() for name, t in times.items()},
            "ratio to bare adamw": {name: round(t.median / base, 3) for name, t in times.items()},
            "apply_if_finite over stablenum step": round(
                times["optax apply_if_finite(clip + adamw)"].median / step, 3
            ),
            "temp_bytes": {name: variant.temp_bytes for name, variant in variants.items()},
        }
    ]
