"""The loop of Keras 3 with its JAX backend, written with the stateless calls of Keras' guide."""

from __future__ import annotations

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import optax

import stablenum_jax as sj
from benchmarks.partners.batches import FEATURES, HIDDEN, Batch
from benchmarks.partners.driving import Program, drive
from benchmarks.partners.jax_parts import adamw, guard_of, load_orbax, named, row, save_orbax, schedule_count
from benchmarks.partners.outcome import Fault, Outcome

os.environ.setdefault("KERAS_BACKEND", "jax")
import keras

if keras.backend.backend() != "jax":
    raise ImportError(f"KERAS_BACKEND must be jax for this loop; Keras runs on {keras.backend.backend()}.")

__all__ = ["keras_jax"]


def _model(dtype: str) -> Any:
    keras.utils.set_random_seed(0)
    x, z = keras.Input((FEATURES,)), keras.Input((FEATURES,))
    h = keras.layers.BatchNormalization(momentum=0.9, dtype="float32")(
        keras.layers.Dense(HIDDEN, dtype=dtype)(x)
    )
    u = keras.ops.cast(keras.layers.Dense(HIDDEN, use_bias=False, dtype=dtype)(z), "float32")
    u = u * keras.ops.rsqrt(keras.ops.mean(u * u, -1, keepdims=True))
    out = keras.layers.Dense(1, dtype=dtype)(keras.ops.relu(h) + u)
    return keras.Model([x, z], keras.ops.cast(out, "float32"))


def keras_jax(fault: Fault | None, guarded: bool) -> Outcome:
    """Keras' AdamW; guarded, optax' AdamW behind the guard."""
    model = _model("mixed_float16" if fault is Fault.FP16_OVERFLOW else "float32")
    rate = keras.optimizers.schedules.ExponentialDecay(1e-2, 4, 0.5)
    optimizer = keras.optimizers.AdamW(rate)
    optimizer.build(model.trainable_variables)
    tx = optax.chain(guard_of(fault), adamw())
    trained, others, moments = (
        [jnp.array(v.value) for v in group]
        for group in (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    )

    def start() -> Any:
        return jax.tree.map(jnp.copy, (trained, others, tx.init(trained) if guarded else moments))

    def loss_fn(trained: Any, others: Any, batch: Batch) -> Any:
        out, others = model.stateless_call(trained, others, [batch.x, batch.z], training=True)
        return jnp.mean((out - batch.y) ** 2), others

    @jax.jit
    def train(trained: Any, others: Any, opt_state: Any, batch: Batch) -> Any:
        if guarded:
            (loss, new), grads = sj.value_and_grad(loss_fn, opt_state, has_aux=True)(trained, others, batch)
            # Keras' batch norm, too, divides by an infinite variance and goes on with zeros.
            value = jnp.where(sj.policy.all_finite(new), loss, jnp.nan)
            trained, opt_state = sj.step(tx, trained, opt_state, grads, value=value)
            return (trained, sj.unless_skipped(opt_state, new, others), opt_state), loss
        (loss, others), grads = jax.value_and_grad(loss_fn, has_aux=True)(trained, others, batch)
        trained, opt_state = optimizer.stateless_apply(opt_state, grads, trained)
        return (trained, others, opt_state), loss

    def step(now: Any, batch: Batch) -> tuple[Any, Any]:
        now, loss = train(*now, batch)
        return now, row(loss, now[2] if guarded else None)

    iterations = optimizer.variables.index(optimizer.iterations)
    program = Program(
        start=start,
        step=step,
        state=lambda now: named(params=now[0], others=now[1], opt_state=now[2]),
        schedule=lambda now: schedule_count(now[2]) if guarded else float(now[2][iterations]),
        save=functools.partial(save_orbax, guarded=guarded),
        load=functools.partial(load_orbax, start(), guarded=guarded),
    )
    return drive(program, fault)
