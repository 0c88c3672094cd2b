"""Loops in flax: ``TrainState``, ``DynamicScale`` and ``nnx.Optimizer``."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import nnx
from flax.training import train_state
from flax.training.dynamic_scale import DynamicScale

import stablenum_jax as sj
from benchmarks.partners.batches import Batch
from benchmarks.partners.driving import Program, drive
from benchmarks.partners.jax_models import NnxNet
from benchmarks.partners.jax_parts import (
    Net,
    adamw,
    dtype_of,
    guard_of,
    load_flax,
    loss_of,
    named,
    row,
    save_flax,
    unscaled,
    variables,
)
from benchmarks.partners.outcome import Fault, Outcome
from stablenum_jax.integrations.flax import TrainState

__all__ = ["flax_dynamic_scale", "flax_train_state", "nnx_optimizer"]


class BatchNormState(train_state.TrainState):
    """flax's ``TrainState`` with running statistics, as in flax's guide to batch norm."""

    batch_stats: Any


class ScaledState(BatchNormState):
    """With flax's ``DynamicScale``, as in flax's ImageNet example."""

    dynamic_scale: DynamicScale


class GuardedScaledState(TrainState):
    dynamic_scale: DynamicScale


def _flax_program(
    kind: Any, tx: Any, fault: Fault | None, guarded: bool, train: Any, log: Any, **more: Any
) -> Program:
    net = Net(dtype_of(fault))

    def start() -> Any:
        params, stats = variables(net)
        return kind.create(apply_fn=net.apply, params=params, tx=tx, batch_stats=stats, **more)

    train = jax.jit(functools.partial(train, net))

    def step(now: Any, batch: Batch) -> tuple[Any, Any]:
        now, loss = train(now, batch)
        return now, row(loss, now if guarded else None, **log(now))

    return Program(
        start=start,
        step=step,
        state=lambda now: named(params=now.params, stats=now.batch_stats, opt_state=now.opt_state),
        schedule=lambda now: float(now.step),
        save=save_flax,
        load=functools.partial(load_flax, start()),
    )


def flax_train_state(fault: Fault | None, guarded: bool) -> Outcome:
    """flax's ``TrainState``; guarded, that of :mod:`stablenum_jax.integrations.flax`."""

    def train(net: Net, state: Any, batch: Batch) -> Any:
        def loss_fn(params: Any) -> Any:
            return loss_of(net, params, state.batch_stats, batch)

        if guarded:
            (loss, stats), grads = sj.value_and_grad(loss_fn, state, has_aux=True)(state.params)
            return state.apply_gradients(grads=grads, value=loss, batch_stats=stats), loss
        (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=stats), loss

    kind = TrainState if guarded else BatchNormState
    tx = optax.chain(guard_of(fault), adamw()) if guarded else adamw()
    return drive(_flax_program(kind, tx, fault, guarded, train, lambda now: {}), fault)


def flax_dynamic_scale(fault: Fault | None, guarded: bool) -> Outcome:
    """flax's ``DynamicScale`` beside its ``TrainState``; guarded, it goes on scaling, and the guard skips."""

    def train(net: Net, state: Any, batch: Batch) -> Any:
        def loss_fn(params: Any) -> Any:
            return loss_of(net, params, state.batch_stats, batch)

        scale, finite, (loss, stats), grads = state.dynamic_scale.value_and_grad(loss_fn, has_aux=True)(
            state.params
        )
        if guarded:
            return state.apply_gradients(
                grads=grads, value=loss, batch_stats=stats, dynamic_scale=scale
            ), loss
        after = state.apply_gradients(grads=grads, batch_stats=stats)
        keep = functools.partial(jnp.where, finite)
        return after.replace(
            opt_state=jax.tree.map(keep, after.opt_state, state.opt_state),
            params=jax.tree.map(keep, after.params, state.params),
            dynamic_scale=scale,
        ), loss

    kind = GuardedScaledState if guarded else ScaledState
    scale = DynamicScale(fin_steps=jnp.asarray(0), scale=jnp.asarray(1024.0))
    log = lambda now: {"scale": now.dynamic_scale.scale}  # noqa: E731
    tx = optax.chain(guard_of(unscaled(fault)), adamw()) if guarded else adamw()
    return drive(_flax_program(kind, tx, fault, guarded, train, log, dynamic_scale=scale), fault)


def nnx_optimizer(fault: Fault | None, guarded: bool) -> Outcome:
    """``nnx.Optimizer``; guarded, with ``stablenum_jax.guard(inner)``, statistics and ``step`` held."""

    def start() -> Any:
        model = NnxNet(nnx.Rngs(0), dtype_of(fault))
        tx = guard_of(fault, adamw()) if guarded else adamw()
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def train(model: Any, optimizer: Any, batch: Batch) -> jax.Array:
        def loss_fn(model: Any) -> jax.Array:
            return jnp.mean((model(batch.x, batch.z) - batch.y) ** 2)

        if not guarded:
            loss, grads = nnx.value_and_grad(loss_fn)(model)
            optimizer.update(model, grads)
            return loss
        held = lambda: nnx.as_pure((nnx.state(model, nnx.Not(nnx.Param)), optimizer.step))  # noqa: E731
        before = held()
        loss, grads = sj.value_and_grad(loss_fn, optimizer)(model)
        optimizer.update(model, grads, value=loss)
        kept, optimizer.step[...] = sj.unless_skipped(optimizer, held(), before)
        nnx.update(model, kept)
        return loss

    def step(now: Any, batch: Batch) -> tuple[Any, Any]:
        loss = train(*now, batch)
        return now, row(loss, now[1] if guarded else None)

    def state(now: Any) -> Any:
        model, optimizer = now
        return named(model=nnx.to_pure_dict(nnx.state(model)), opt_state=nnx.as_pure(optimizer.opt_state))

    def save(now: Any, folder: Path) -> None:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / "state", nnx.to_pure_dict(nnx.state(now)))

    def load(folder: Path) -> Any:
        now = start()
        like = nnx.state(now)
        with ocp.StandardCheckpointer() as checkpointer:
            found = checkpointer.restore(folder / "state", nnx.to_pure_dict(like))
        nnx.replace_by_pure_dict(like, found)
        nnx.update(now, like)
        return now

    program = Program(
        start=start,
        step=step,
        state=state,
        schedule=lambda now: float(now[1].step[...]),
        save=save,
        load=load,
    )
    return drive(program, fault)
