"""Loops in plain optax: alone, with ``MultiSteps``, ``apply_if_finite`` and jmp's loss scale."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax

import stablenum_jax as sj
from benchmarks.partners.batches import Batch
from benchmarks.partners.driving import Program, drive
from benchmarks.partners.jax_parts import (
    Net,
    adamw,
    dtype_of,
    guard_of,
    load_flax,
    load_orbax,
    loss_of,
    named,
    row,
    save_flax,
    save_orbax,
    schedule_count,
    unscaled,
    variables,
)
from benchmarks.partners.outcome import Fault, Outcome

__all__ = ["apply_if_finite", "jmp_loss_scale", "multisteps", "orbax_manager", "plain_optax"]


class Training(NamedTuple):
    """The state of a loop that is written in plain optax."""

    params: Any
    stats: Any
    opt_state: Any


def _optax_program(fault: Fault | None, guarded: bool, tx: Any, log: Any = None, **files: Any) -> Program:
    """Return a plain loop around an optax transformation, which has a guard inside if it is guarded."""
    net = Net(dtype_of(fault))

    @jax.jit
    def train(now: Training, batch: Batch) -> tuple[Training, jax.Array]:
        def loss_fn(params: Any) -> Any:
            return loss_of(net, params, now.stats, batch)

        if guarded:
            (loss, stats), grads = sj.value_and_grad(loss_fn, now.opt_state, has_aux=True)(now.params)
            params, opt_state = sj.step(tx, now.params, now.opt_state, grads, value=loss)
            stats = sj.unless_skipped(opt_state, stats, now.stats, before=now.opt_state)
        else:
            (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(now.params)
            updates, opt_state = tx.update(grads, now.opt_state, now.params)
            params = optax.apply_updates(now.params, updates)
        return Training(params, stats, opt_state), loss

    def start() -> Training:
        params, stats = variables(net)
        return Training(params, stats, tx.init(params))

    def step(now: Training, batch: Batch) -> tuple[Training, Any]:
        now, loss = train(now, batch)
        more = {} if log is None or guarded else log(now.opt_state)
        return now, row(loss, now if guarded else None, **more)

    return Program(
        start=start,
        step=step,
        state=lambda now: named(**now._asdict()),
        schedule=lambda now: schedule_count(now.opt_state),
        save=files.get("save", save_flax),
        load=functools.partial(files.get("load", load_flax), start()),
    )


def plain_optax(fault: Fault | None, guarded: bool) -> Outcome:
    """A loop of ``tx.update`` and ``optax.apply_updates``; guarded, of ``stablenum_jax.step``."""
    tx = optax.chain(guard_of(fault), adamw()) if guarded else adamw()
    return drive(_optax_program(fault, guarded, tx), fault)


def orbax_manager(fault: Fault | None, guarded: bool) -> Outcome:
    """The plain loop with Orbax' ``CheckpointManager``; guarded, with ``GuardedSave``."""
    tx = optax.chain(guard_of(fault), adamw()) if guarded else adamw()
    save, load = (functools.partial(file, guarded=guarded) for file in (save_orbax, load_orbax))
    return drive(_optax_program(fault, guarded, tx, save=save, load=load), fault)


def multisteps(fault: Fault | None, guarded: bool) -> Outcome:
    """``optax.MultiSteps`` over two micro-batches; guarded, with the guard around it."""
    tx = optax.MultiSteps(adamw(), 2).gradient_transformation()
    return drive(_optax_program(fault, guarded, guard_of(fault, tx) if guarded else tx), fault)


def apply_if_finite(fault: Fault | None, guarded: bool) -> Outcome:
    """``optax.apply_if_finite``; guarded, inside the guard."""
    tx = optax.apply_if_finite(adamw(), max_consecutive_errors=5)

    def log(state: Any) -> Mapping[str, Any]:
        return {"notfinite_count": state.notfinite_count, "total_notfinite": state.total_notfinite}

    return drive(_optax_program(fault, guarded, guard_of(fault, tx) if guarded else tx, log), fault)


def jmp_loss_scale(fault: Fault | None, guarded: bool) -> Outcome:
    """jmp's ``DynamicLossScale`` and ``select_tree``; guarded, it goes on scaling, and ``step`` selects."""
    net = Net(dtype_of(fault))
    tx = optax.chain(guard_of(unscaled(fault)), adamw()) if guarded else adamw()

    @jax.jit
    def train(now: Training, scale: Any, batch: Batch) -> Any:
        def loss_fn(params: Any) -> Any:
            loss, stats = loss_of(net, params, now.stats, batch)
            return scale.scale(loss), (loss, stats)

        (_, (loss, stats)), grads = jax.value_and_grad(loss_fn, has_aux=True)(now.params)
        grads = scale.unscale(grads)
        finite = jmp.all_finite(grads)
        scale = scale.adjust(finite)
        if guarded:
            params, opt_state = sj.step(tx, now.params, now.opt_state, grads, value=loss)
            stats = sj.unless_skipped(opt_state, stats, now.stats)
        else:
            updates, opt_state = tx.update(grads, now.opt_state, now.params)
            params = optax.apply_updates(now.params, updates)
            params, opt_state = jmp.select_tree(finite, (params, opt_state), (now.params, now.opt_state))
        return Training(params, stats, opt_state), scale, loss

    def start() -> Any:
        params, stats = variables(net)
        return Training(params, stats, tx.init(params)), jmp.DynamicLossScale(jnp.asarray(1024.0))

    def step(now: Any, batch: Batch) -> tuple[Any, Any]:
        now, scale, loss = train(*now, batch)
        return (now, scale), row(loss, now if guarded else None, loss_scale=scale.loss_scale)

    program = Program(
        start=start,
        step=step,
        state=lambda now: named(**now[0]._asdict()),
        schedule=lambda now: schedule_count(now[0].opt_state),
        save=_save_pickle,
        load=_load_pickle,
    )
    return drive(program, fault)


def _save_pickle(state: Any, folder: Path) -> None:
    (folder / "state.pickle").write_bytes(pickle.dumps(jax.tree.map(np.asarray, state)))


def _load_pickle(folder: Path) -> Any:
    return jax.tree.map(jnp.asarray, pickle.loads((folder / "state.pickle").read_bytes()))
