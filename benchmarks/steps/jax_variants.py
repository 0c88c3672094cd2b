"""JAX: the bare step, the peers as their documentation uses them, and ours.

Each variant is one jitted function of (parameters, states), gradients and loss, with parameters and states
donated.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

import stablenum
import stablenum_jax
from benchmarks.steps.errors import WrongResultError
from benchmarks.steps.reference import (
    CLIP_AT,
    FACTORS,
    LEARNING_RATE,
    MOMENTUM,
    SCALE,
    WEIGHT_DECAY,
    check_decided,
)
from benchmarks.steps.rows import Row

__all__ = ["MAKE", "JaxProblem", "JaxVariant", "build", "multiplied"]

Tree: TypeAlias = Any
# A step: (carry, gradients, loss) -> carry, where the carry begins with parameters and the optimizer's state.
Step: TypeAlias = Callable[[tuple[Any, ...], Tree, Any], tuple[Any, ...]]


class JaxProblem:
    """The gradients of a row.

    Attributes:
        raw: the gradients at factor 1, never changed.
        grads: the gradients that the optimizers get, in the same memory for all of them.
        start: the parameters before the first step.
        norm: the norm of ``raw``, computed in float64.
        loss: () the loss that belongs to the gradients.
    """

    def __init__(self, row: Row) -> None:
        self.row, self.dtype = row, getattr(jnp, row.dtype)
        self.raw = self._drawn(1, 1e-2)
        self.norm = math.sqrt(
            math.fsum(float(np.square(np.asarray(g, np.float64)).sum()) for g in self.raw.values())
        )
        self.max_norm = CLIP_AT * self.norm
        self.loss = jnp.asarray(2.0)
        self.start = self._drawn(0, 1e-3)
        self.grads = jax.tree.map(jnp.zeros_like, self.raw)

    def _drawn(self, seed: int, size: float) -> dict[str, jax.Array]:
        draw = np.random.default_rng(seed)
        return {
            f"w{i:04d}": jnp.asarray(draw.standard_normal(self.row.shape, np.float32) * size, self.dtype)
            for i in range(self.row.tensors)
        }

    def put(self, step: int, scale: float) -> None:
        """Write the gradients of a step, multiplied by the loss scale."""
        factor = jnp.asarray(FACTORS[step % len(FACTORS)] * scale, self.dtype)
        self.grads = jax.block_until_ready(multiplied(self.grads, self.raw, factor))

    def parameters(self) -> Tree:
        """The parameters before the first step, the same each time."""
        return jax.tree.map(jnp.copy, self.start)


@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
def multiplied(_into: Tree, raw: Tree, factor: Any) -> Tree:
    """``raw`` times the factor, written into the memory of the first argument."""
    return jax.tree.map(lambda g: g * factor, raw)


class JaxVariant:
    """One variant of the step, compiled.

    Attributes:
        name: as in ``rows``.
        carry: parameters, the optimizer's state, and what else is carried from step to step.
        scale: the loss scale that the gradients are multiplied by.
        skips: whether a non-finite gradient leaves parameters and state unchanged.
        compile_s: seconds to lower and compile.
        steps: the number of steps so far.
    """

    def __init__(
        self,
        problem: JaxProblem,
        name: str,
        tx: optax.GradientTransformation,
        step: Step,
        *,
        extra: tuple[Any, ...] = (),
        scale: float = 1.0,
        skips: bool = False,
        read: Callable[[tuple[Any, ...]], object] | None = None,
        check: Callable[[tuple[Any, ...], int], None] = lambda _carry, _steps: None,
    ) -> None:
        self.problem, self.name, self.scale, self.skips = problem, name, scale, skips
        self._read, self._check, self.steps = read, check, 0
        params = problem.parameters()
        self.carry: tuple[Any, ...] = (params, jax.jit(tx.init)(params), *extra)
        begin = time.perf_counter()
        self.lowered = jax.jit(step, donate_argnums=0).lower(self.carry, problem.grads, problem.loss)
        self.compiled = self.lowered.compile()
        self.compile_s = time.perf_counter() - begin

    @property
    def reads_metrics(self) -> bool:
        """Whether the host reads the guard's metrics after each step."""
        return self._read is not None

    def put(self) -> None:
        """Write the gradients of the next step."""
        self.problem.put(self.steps, self.scale)
        self.steps += 1

    def step(self) -> None:
        """Run one whole step and wait for its results."""
        self.step_on(self.problem.grads)

    def step_on(self, grads: Tree) -> None:
        """Run one step on other gradients."""
        self.carry = self.compiled(self.carry, grads, self.problem.loss)
        if self._read is not None:
            self._read(self.carry)
        jax.block_until_ready(self.carry)

    def check(self) -> None:
        """Raise ``WrongResultError`` if a result is not what the name says."""
        self._check(self.carry, self.steps)


def make_optimizer(row: Row) -> optax.GradientTransformation:
    """The row's optimizer."""
    lr = LEARNING_RATE[row.optimizer]
    if row.optimizer == "sgd":
        return optax.sgd(lr, momentum=MOMENTUM)
    return optax.adamw(lr, weight_decay=WEIGHT_DECAY)


def _by_optax(tx: optax.GradientTransformation) -> Step:
    def step(carry: tuple[Any, ...], grads: Tree, _loss: Any) -> tuple[Any, ...]:
        params, state = carry
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def _by_us(tx: optax.GradientTransformation, *, value: bool = False) -> Step:
    def step(carry: tuple[Any, ...], grads: Tree, loss: Any) -> tuple[Any, ...]:
        params, state = carry
        return stablenum_jax.step(tx, params, state, grads, value=loss if value else None)

    return step


def _bare(problem: JaxProblem) -> JaxVariant:
    tx = make_optimizer(problem.row)
    return JaxVariant(problem, "bare", tx, _by_optax(tx))


def _clip(problem: JaxProblem) -> JaxVariant:
    tx = _clipped(problem)
    return JaxVariant(problem, "clip", tx, _by_optax(tx))


def _apply_if_finite(problem: JaxProblem) -> JaxVariant:
    tx = optax.apply_if_finite(_clipped(problem), max_consecutive_errors=5)
    return JaxVariant(problem, "apply_if_finite", tx, _by_optax(tx), skips=True)


def _clipped(problem: JaxProblem) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(problem.max_norm), make_optimizer(problem.row))


@jax.custom_vjp
def _loss_of(params: Tree, grads: Tree, loss: Any) -> Any:
    """A loss with known gradients: flax's ``value_and_grad`` computes them, and the other variants get
    them."""
    return loss


_loss_of.defvjp(lambda _params, grads, loss: (loss, grads), lambda grads, _: (grads, None, None))


def _dynamic_scale(problem: JaxProblem) -> JaxVariant:
    """The step of flax's examples, which chooses between old and new by ``jnp.where``."""
    from flax.training.dynamic_scale import DynamicScale

    tx = _clipped(problem)

    def step(carry: tuple[Any, ...], grads: Tree, loss: Any) -> tuple[Any, ...]:
        params, state, dynamic_scale = carry
        found = dynamic_scale.value_and_grad(lambda p: _loss_of(p, grads, loss))(params)
        updates, after = tx.update(found.grad, state, params)
        stepped = optax.apply_updates(params, updates)

        def chosen(new: Any, old: Any) -> Any:
            return jnp.where(found.finite, new, old)

        params = jax.tree.map(chosen, stepped, params)
        return params, jax.tree.map(chosen, after, state), found.dynamic_scale

    start = DynamicScale(fin_steps=jnp.asarray(0), scale=jnp.asarray(SCALE))
    check = _scale_is_kept("dynamic_scale", lambda carry: carry[2].scale)
    return JaxVariant(
        problem, "dynamic_scale", tx, step, extra=(start,), scale=SCALE, skips=True, check=check
    )


def _jmp(problem: JaxProblem) -> JaxVariant:
    """The step of jmp's README, with the optimizer's state selected too."""
    import jmp

    tx = _clipped(problem)
    # jmp's class rejects the abstract arguments that `jit(...).lower` creates, so it is carried as leaves.
    leaves, structure = jax.tree.flatten(jmp.DynamicLossScale(jnp.asarray(SCALE)))

    def step(carry: tuple[Any, ...], grads: Tree, _loss: Any) -> tuple[Any, ...]:
        params, state, flat = carry
        loss_scale = jax.tree.unflatten(structure, flat)
        grads = loss_scale.unscale(grads)
        finite = jmp.all_finite(grads)
        loss_scale = loss_scale.adjust(finite)
        updates, after = tx.update(grads, state, params)
        stepped = optax.apply_updates(params, updates)
        params, state = jmp.select_tree(finite, (stepped, after), (params, state))
        return params, state, jax.tree.leaves(loss_scale)

    check = _scale_is_kept("jmp", lambda carry: jax.tree.unflatten(structure, carry[2]).loss_scale)
    return JaxVariant(problem, "jmp", tx, step, extra=(leaves,), scale=SCALE, skips=True, check=check)


def _idle(problem: JaxProblem) -> JaxVariant:
    tx = optax.chain(stablenum_jax.guard(clip=1e30), make_optimizer(problem.row))
    check = _decided("idle", problem, clipped=False, scale=1.0)
    return JaxVariant(problem, "idle", tx, _by_us(tx), skips=True, check=check)


def _wrapper(problem: JaxProblem) -> JaxVariant:
    tx = stablenum_jax.chain(stablenum_jax.guard(clip=problem.max_norm), make_optimizer(problem.row))
    check = _decided("wrapper", problem, clipped=True, scale=1.0)
    return JaxVariant(problem, "wrapper", tx, _by_optax(tx), skips=True, check=check)


def _fold(problem: JaxProblem) -> JaxVariant:
    guard = stablenum_jax.guard(
        clip=problem.max_norm, loss_scale=stablenum.DynamicLossScale(init_scale=SCALE)
    )
    tx = optax.chain(guard, make_optimizer(problem.row))
    check = _decided("fold", problem, clipped=True, scale=SCALE)
    return JaxVariant(problem, "fold", tx, _by_us(tx), scale=SCALE, skips=True, check=check)


def _all(problem: JaxProblem) -> JaxVariant:
    guard = stablenum_jax.guard(
        clip=problem.max_norm,
        loss_scale=stablenum.DynamicLossScale(init_scale=SCALE),
        spike="skip",
    )
    tx = optax.chain(guard, make_optimizer(problem.row))
    return JaxVariant(
        problem,
        "all",
        tx,
        _by_us(tx, value=True),
        scale=SCALE,
        skips=True,
        read=lambda carry: stablenum_jax.metrics(carry[1]),
        check=_decided("all", problem, clipped=True, scale=SCALE),
    )


MAKE: dict[str, Callable[[JaxProblem], JaxVariant]] = {
    "bare": _bare,
    "clip": _clip,
    "apply_if_finite": _apply_if_finite,
    "dynamic_scale": _dynamic_scale,
    "jmp": _jmp,
    "idle": _idle,
    "wrapper": _wrapper,
    "fold": _fold,
    "all": _all,
}


def build(problem: JaxProblem, turn: int = 0) -> dict[str, JaxVariant]:
    """The variants of the problem's row, created in the order of that turn."""
    return {name: MAKE[name](problem) for name in problem.row.in_turn(turn)}


def _scale_is_kept(
    name: str, scale: Callable[[tuple[Any, ...]], Any]
) -> Callable[[tuple[Any, ...], int], None]:
    def check(carry: tuple[Any, ...], _steps: int) -> None:
        if float(scale(carry)) != SCALE:
            raise WrongResultError(
                f"{name}: the loss scale is {float(scale(carry))}; expected {SCALE}, unchanged."
            )

    return check


def _decided(
    name: str, problem: JaxProblem, *, clipped: bool, scale: float
) -> Callable[[tuple[Any, ...], int], None]:
    """Checks that every step was applied, with the loss scale and the clipping that the name says."""

    def check(carry: tuple[Any, ...], steps: int) -> None:
        last = stablenum_jax.metrics(carry[1])
        check_decided(name, last, norm=problem.norm, steps=steps, clipped=clipped, scale=scale)

    return check
