"""``skipping_program.py TRAINING ...``: trains under JAX without ever reading a guard's state.

Each guard has a parameter of its own name.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import export

import stablenum_jax
from stablenum import NonFiniteError


def _training(name: str, bad: Any, **settings: Any) -> tuple[Any, Any]:
    """Return a training step of the steps that ``bad`` marks, in wrapper form, and its carry."""
    tx = stablenum_jax.guard(optax.sgd(0.1), **settings)
    params = {name: jnp.ones(2)}

    def step(carry: Any, i: Any) -> tuple[Any, None]:
        params, opt_state = carry
        grads = {name: jnp.where(bad(i), jnp.nan, jnp.ones(2))}
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    return step, (params, tx.init(params))


def _always(i: Any) -> Any:
    return i >= 0


def _jitted(name: str, bad: Any = _always, *, steps: int = 50, **settings: Any) -> None:
    step, carry = _training(name, bad, **settings)
    compiled = jax.jit(step, donate_argnums=0)
    for i in range(steps):
        carry, _ = compiled(carry, i)


def _ahead(name: str) -> None:
    step, carry = _training(name, _always)
    compiled = jax.jit(step).lower(carry, 0).compile()
    for i in range(50):
        carry, _ = compiled(carry, i)


def _exported(name: str) -> None:
    """Export for another platform too, and run here."""
    step, carry = _training(name, _always)
    made = export.export(jax.jit(step), platforms=("cpu", "tpu"))(carry, 0)
    for i in range(50):
        carry, _ = made.call(carry, jnp.int32(i))


def _scanned(name: str, **settings: Any) -> None:
    step, carry = _training(name, _always, **settings)
    jax.jit(lambda carry: jax.lax.scan(step, carry, jnp.arange(50)))(carry)


def _stacked(name: str) -> None:
    """Train three at once, of which the last is bad."""
    step, carry = _training(name, _always)
    many = jax.tree.map(lambda x: jnp.stack([x] * 3), carry)
    run = jax.jit(jax.vmap(step))
    for _ in range(50):
        many, _ = run(many, jnp.asarray([-1, -1, 1]))


class _Model(nnx.Module):
    def __init__(self) -> None:
        self.of_nnx = nnx.Param(jnp.ones(2))


def _nnx() -> None:
    model = _Model()
    optimizer = nnx.Optimizer(model, stablenum_jax.guard(optax.sgd(0.1)), wrt=nnx.Param)

    @nnx.jit
    def step(model: _Model, optimizer: nnx.Optimizer[_Model]) -> None:
        grads = nnx.grad(lambda model: (model.of_nnx[...] * jnp.nan).sum())(model)
        optimizer.update(model, grads)

    for _ in range(50):
        step(model, optimizer)


def _heard() -> None:
    """Halt, and learn of it."""
    step, carry = _training("heard", _always, on_nonfinite="raise")
    (_, opt_state), _ = jax.jit(step)(carry, 0)
    with contextlib.suppress(NonFiniteError):
        stablenum_jax.metrics(opt_state)


TRAININGS: dict[str, Callable[[str], None]] = {
    "jitted": _jitted,
    "good": lambda name: _jitted(name, lambda i: i < 0),
    "seldom": lambda name: _jitted(name, lambda i: i % 2 == 0),
    "early": lambda name: _jitted(name, lambda i: i < 10),
    "silent": lambda name: _jitted(name, log_skips=False),
    "ahead": _ahead,
    "exported": _exported,
    "scanned": _scanned,
    "halted": lambda name: _scanned(name, max_skips_in_a_row=5),
    "raised": lambda name: _jitted(name, on_nonfinite="raise"),
    "stacked": _stacked,
    "of_nnx": lambda name: _nnx(),
    "heard": lambda name: _heard(),
}

if __name__ == "__main__":
    for name in sys.argv[1:]:
        TRAININGS[name](name)
