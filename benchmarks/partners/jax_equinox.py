"""The loop in equinox."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import stablenum_jax as sj
from benchmarks.partners.batches import Batch
from benchmarks.partners.driving import Program, drive
from benchmarks.partners.jax_models import EqxNet
from benchmarks.partners.jax_parts import adamw, dtype_of, guard_of, named, row, schedule_count
from benchmarks.partners.outcome import Fault, Outcome

__all__ = ["equinox_filter_jit"]


def equinox_filter_jit(fault: Fault | None, guarded: bool) -> Outcome:
    """equinox with ``eqx.nn.State`` for batch norm; guarded, with ``stablenum_jax.step``."""
    tx = optax.chain(guard_of(fault), adamw()) if guarded else adamw()

    def start() -> Any:
        model, stats = eqx.nn.make_with_state(EqxNet)(jax.random.key(0), dtype_of(fault))
        return model, stats, tx.init(eqx.filter(model, eqx.is_inexact_array))

    def loss_fn(model: Any, stats: Any, batch: Batch) -> Any:
        forward = jax.vmap(model, axis_name="batch", in_axes=(0, 0, None), out_axes=(0, None))
        out, stats = forward(batch.x, batch.z, stats)
        return jnp.mean((out - batch.y) ** 2), stats

    @eqx.filter_jit
    def train(model: Any, stats: Any, opt_state: Any, batch: Batch) -> Any:
        if guarded:
            (loss, new), grads = sj.value_and_grad(loss_fn, opt_state, has_aux=True)(model, stats, batch)
            # equinox's batch norm divides by an infinite variance and goes on with zeros: only the statistics
            # show that the batch was bad.
            value = jnp.where(sj.policy.all_finite(new), loss, jnp.nan)
            model, opt_state = sj.step(tx, model, opt_state, grads, value=value)
            return model, sj.unless_skipped(opt_state, new, stats), opt_state, loss
        (loss, stats), grads = eqx.filter_value_and_grad(loss_fn, has_aux=True)(model, stats, batch)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), stats, opt_state, loss

    def step(now: Any, batch: Batch) -> tuple[Any, Any]:
        *after, loss = train(*now, batch)
        return tuple(after), row(loss, after[2] if guarded else None)

    program = Program(
        start=start,
        step=step,
        state=lambda now: named(
            params=eqx.filter(now[0], eqx.is_inexact_array), stats=now[1], opt_state=now[2]
        ),
        schedule=lambda now: schedule_count(now[2]),
        save=lambda now, folder: eqx.tree_serialise_leaves(folder / "state.eqx", now),
        load=lambda folder: eqx.tree_deserialise_leaves(folder / "state.eqx", start()),
    )
    return drive(program, fault)
