"""A small training for tests of recovery: what it is made of, and how it is hurt."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import stablenum_jax
from stablenum import DynamicLossScale, RecoveryPolicy
from stablenum.typing import Response

POLICY = RecoveryPolicy(
    every=10, keep=4, good_after=10, check_every=5, window=16, skips_in_a_row=4, runaway_steps=6
)
AGAIN = Response(skip_data=False)

_RNG = np.random.default_rng(0)
INPUTS = _RNG.normal(size=(16, 6, 4)).astype(np.float32)
TARGETS = INPUTS @ _RNG.normal(size=4).astype(np.float32) + 0.1 * _RNG.normal(size=(16, 6)).astype(np.float32)

State = dict[str, Any]


def batch_at(number: int) -> tuple[np.ndarray, np.ndarray]:
    """The batch of a number: 16 of them, again and again."""
    return INPUTS[number % 16], TARGETS[number % 16]


def _optimizer() -> optax.GradientTransformation:
    rate = optax.warmup_cosine_decay_schedule(0.0, 0.02, 10, 200)
    scale = DynamicLossScale(init_scale=8.0, growth_interval=15, min_scale=4.0, max_scale=64.0)
    guard = stablenum_jax.guard(clip=10.0, loss_scale=scale)
    return optax.chain(guard, stablenum_jax.eased(optax.adamw(rate)))


OPTIMIZER = _optimizer()


def first_state() -> State:
    """All that a training keeps: bfloat16 and float32 parameters, moments, a key, statistics."""
    rng = np.random.default_rng(1)
    params = {
        "first": jnp.asarray(rng.normal(size=(4, 8)) / 2, jnp.bfloat16),
        "last": jnp.asarray(rng.normal(size=8) / 3, jnp.float32),
    }
    return {
        "params": params,
        "opt_state": OPTIMIZER.init(params),
        "key": jax.random.key(2),
        "seen": jnp.asarray(0.0),  # weakly typed
        "mask": jnp.where(jnp.arange(8) < 7, 0.0, -jnp.inf),
        "mean": jnp.zeros(8),
    }


def _train_step(state: State, batch: Any) -> tuple[State, jax.Array]:
    inputs, targets = batch
    key, for_dropout = jax.random.split(state["key"])

    def loss_fn(params: Any) -> Any:
        hidden = jnp.tanh(inputs.astype(jnp.bfloat16) @ params["first"]).astype(jnp.float32)
        kept = jax.random.bernoulli(for_dropout, 0.9, hidden.shape)
        out = (hidden * kept / 0.9) @ params["last"]
        return ((out - targets) ** 2).mean(), hidden.mean(0)

    value_and_grad = stablenum_jax.value_and_grad(loss_fn, state["opt_state"], has_aux=True)
    (loss, mean), grads = value_and_grad(state["params"])
    params, opt_state = stablenum_jax.step(OPTIMIZER, state["params"], state["opt_state"], grads, value=loss)
    mean = stablenum_jax.unless_skipped(opt_state, 0.9 * state["mean"] + 0.1 * mean, state["mean"])
    new = {"params": params, "opt_state": opt_state, "key": key, "mean": mean}
    return {**state, **new, "seen": state["seen"] + 1}, loss


train_step = jax.jit(_train_step)
donating_step = jax.jit(_train_step, donate_argnums=0)

Hurt = Callable[[stablenum_jax.Recovery, int], Any]


def nothing(recovery: stablenum_jax.Recovery, step: int) -> None:
    """Leave the training alone."""


def once(step: int, harm: Callable[[Any], Any]) -> Hurt:
    """Replace the state by a hurt one before a step, the first time that it is made, as a fault of the
    machine does."""
    done: list[int] = []

    def hurt(recovery: stablenum_jax.Recovery, at: int) -> None:
        if at == step and not done:
            done.append(at)
            recovery.state = harm(recovery.state)

    return hurt


def run(
    steps: int = 60,
    hurt: Hurt = nothing,
    *,
    data: Any = batch_at,
    policy: RecoveryPolicy = POLICY,
    step: Callable[..., Any] = train_step,
    spoil: Callable[[int, Any], Any] | None = None,
    **options: Any,
) -> stablenum_jax.Recovery:
    """Train; ``hurt`` harms the state before each step, ``spoil`` changes its batch."""
    recovery = stablenum_jax.Recovery(first_state(), policy, data=data, **options)
    for batch in recovery.batches(steps):
        hurt(recovery, recovery.step + 1)
        given = batch if spoil is None else spoil(recovery.step + 1, batch)
        recovery.state, _ = step(recovery.state, given)
    return recovery


def changed(state: State, path: tuple[Any, ...], change: Callable[[Any], Any]) -> State:
    """Return the state with another leaf at a path of keys, numbers and fields."""
    if not path:
        return change(state)
    here, *rest = path
    if isinstance(state, dict):
        return {**state, here: changed(state[here], tuple(rest), change)}
    if isinstance(here, str):
        return state._replace(**{here: changed(getattr(state, here), tuple(rest), change)})
    parts = list(state)
    parts[here] = changed(parts[here], tuple(rest), change)
    return tuple(parts)


SECOND_MOMENT = ("opt_state", 1, "inner", 0, "nu", "last")


def put(path: tuple[Any, ...], value: float) -> Callable[[State], State]:
    """Return a harm: one element at the path becomes ``value``."""
    return functools.partial(changed, path=path, change=lambda x: x.at[(0,) * x.ndim].set(value))


def same(one: Any, other: Any) -> bool:
    """Whether two states have the same structure, dtypes, weak types and bits."""
    if jax.tree.structure(one) != jax.tree.structure(other):
        return False
    return all(_same_leaf(*pair) for pair in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def _same_leaf(one: Any, other: Any) -> bool:
    if isinstance(one, jax.Array) and jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
        one, other = jax.random.key_data(one), jax.random.key_data(other)
    if not hasattr(one, "dtype"):
        return bool(one == other)
    if getattr(one, "weak_type", None) != getattr(other, "weak_type", None):
        return False
    one, other = np.asarray(one), np.asarray(other)
    return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
