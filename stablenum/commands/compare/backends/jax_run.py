"""The JAX backends: ``stablenum_jax.step``, eager and jitted; and bare optax."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from stablenum.commands.compare.backends.interface import Setup
from stablenum.commands.compare.backends.jax_models import loss_function
from stablenum.commands.compare.scenarios import OptimizerSpec
from stablenum.commands.compare.scenarios.training_data import Batch
from stablenum.errors import NonFiniteError
from stablenum.guard.config import GuardConfig
from stablenum.guard.halting import check_halted
from stablenum.guard.readout import metrics
from stablenum.recovery.ledger import RecoveryEvent

__all__ = ["start"]

Array: TypeAlias = "np.ndarray[Any, Any]"


def start(setup: Setup, mode: str) -> GuardedRun | PlainRun:
    """Start a run; ``mode`` is ``"eager"`` or ``"jit"``. Plain runs are jitted."""
    return PlainRun(setup) if setup.guard is None else GuardedRun(setup, mode)


def make_optimizer(spec: OptimizerSpec, guard: GuardConfig | None = None) -> optax.GradientTransformation:
    """Return the optax chain of a scenario.

    A guard that measures updates in units of the learning rate must find that rate in the optimizer's state.
    """
    if guard is not None and guard.update_rule is not None and guard.update_rule.per_lr:
        return optax.inject_hyperparams(_chain_of, static_args=("spec",), hyperparam_dtype=jnp.float32)(
            learning_rate=spec.lr, spec=spec
        )
    return _chain_of(spec.lr, spec)


def _chain_of(learning_rate: Any, spec: OptimizerSpec) -> optax.GradientTransformation:
    if spec.name == "adamw":
        return optax.adamw(learning_rate, eps=spec.eps, weight_decay=spec.weight_decay)
    decay = [optax.add_decayed_weights(spec.weight_decay)] if spec.weight_decay else []
    if spec.name == "adam":
        return optax.chain(*decay, optax.adam(learning_rate, eps=spec.eps))
    return optax.chain(*decay, optax.sgd(learning_rate, momentum=spec.momentum or None))


class PlainRun:
    """Bare optax, with ``clip_by_global_norm`` if the scenario clips."""

    loss_scale = 1.0
    norms = None

    def __init__(self, setup: Setup) -> None:
        clip = [] if setup.plain_clip is None else [optax.clip_by_global_norm(setup.plain_clip)]
        tx = optax.chain(*clip, make_optimizer(setup.optimizer))
        loss = None if setup.training is None else loss_function(setup.training, setup.ladder[0])
        self._params = [jnp.asarray(p) for p in setup.params]
        self._opt_state = tx.init(self._params)

        @jax.jit
        def step(params: Any, opt_state: Any, gradients: Any) -> Any:
            updates, opt_state = tx.update(gradients, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        @jax.jit
        def train(params: Any, opt_state: Any, batch: Any) -> Any:
            if loss is None:
                raise ValueError("this run has no model to train")
            value, gradients = jax.value_and_grad(loss)(params, *batch)
            return *step(params, opt_state, gradients), value

        self._step, self._train = step, train
        self.last: Mapping[str, Any] = {}

    def step(self, gradients: list[Array], loss: float) -> None:
        given = [jnp.asarray(g) for g in gradients]
        self._params, self._opt_state = self._step(self._params, self._opt_state, given)

    def train(self, batch: Batch) -> None:
        self._params, self._opt_state, loss = self._train(self._params, self._opt_state, _to_jax(batch))
        self.last = {"loss": float(loss)}

    def params(self) -> list[Array]:
        return [np.array(p) for p in self._params]

    def guard_state_dict(self) -> dict[str, Any]:
        return {}

    def load_guard_state_dict(self, plain: Mapping[str, Any]) -> None:
        raise ValueError("a plain run has no guard")


class GuardedRun:
    """``chain(guard, optimizer)`` driven by ``stablenum_jax.step``."""

    norms = None

    def __init__(self, setup: Setup, mode: str) -> None:
        self._adapter: Any = importlib.import_module("stablenum_jax")
        self._config = setup.guard
        self._recovery = setup.recovery
        self.rewinds: Sequence[RecoveryEvent] = ()
        adapter, differentiate = self._adapter, _differentiation(self._adapter, setup)
        inner = make_optimizer(setup.optimizer, setup.guard)
        if setup.recovery is not None:
            inner = adapter.eased(inner)
        tx = optax.chain(adapter.guard(None, setup.guard), inner)
        self._params = [jnp.asarray(p) for p in setup.params]
        self._opt_state = tx.init(self._params)

        def step(params: Any, opt_state: Any, gradients: Any, loss: Any) -> Any:
            return adapter.step(tx, params, opt_state, gradients, value=loss)

        def train(params: Any, opt_state: Any, batch: Any) -> Any:
            loss, gradients = differentiate(params, opt_state, batch)
            return step(params, opt_state, gradients, loss)

        jitted = mode == "jit"
        self._step: Any = jax.jit(step) if jitted else step
        self._train: Any = jax.jit(train) if jitted else train

    @property
    def loss_scale(self) -> float:
        return float(self._adapter.loss_scale(self._opt_state))

    @property
    def last(self) -> Mapping[str, Any]:
        return metrics(self._adapter.guard_state(self._opt_state))

    def step(self, gradients: list[Array], loss: float) -> None:
        self._take(self._step, [jnp.asarray(g) for g in gradients], jnp.float32(loss))

    def train(self, batch: Batch) -> None:
        self._take(self._train, _to_jax(batch))

    def _take(self, function: Any, *arguments: Any) -> None:
        try:
            self._params, self._opt_state = function(self._params, self._opt_state, *arguments)
        except NonFiniteError as error:  # without jit, the call itself raises; the error has the new state
            self._opt_state = error.opt_state  # type: ignore[attr-defined]
            raise
        check_halted(self._adapter.guard_state(self._opt_state), config=self._config)

    def batches(self, steps: int) -> Iterator[int]:
        recovery = self._adapter.Recovery((self._params, self._opt_state), self._recovery, data=int)
        self.rewinds = recovery.events
        try:
            for number in recovery.batches(steps):
                self._params, self._opt_state = recovery.state
                yield number
                recovery.state = self._params, self._opt_state
        finally:
            self._params, self._opt_state = recovery.state

    def params(self) -> list[Array]:
        return [np.array(p) for p in self._params]

    def guard_state_dict(self) -> dict[str, Any]:
        return self._adapter.guard_state_dict(self._opt_state)

    def load_guard_state_dict(self, plain: Mapping[str, Any]) -> None:
        self._opt_state = self._adapter.load_guard_state_dict(self._opt_state, plain)


def _differentiation(adapter: Any, setup: Setup) -> Any:
    """Return ``f(params, opt_state, batch)``: loss and gradients, in the format that the guard asks for."""
    if setup.training is None:

        def fail(params: Any, opt_state: Any, batch: Any) -> Any:
            raise ValueError("this run has no model to train")

        return fail
    ladder = setup.ladder
    if len(ladder) == 1:
        loss_of = loss_function(setup.training, ladder[0])
        # An escalating guard requires a policy even if its ladder is not used. The ladder is not used here,
        # because the loss function casts by itself.
        policy = "float32" if setup.guard is not None and setup.guard.escalate is not None else None
        # In the eager run too: the guard's step is compared, and without jit differentiation takes ten times
        # as long.
        return jax.jit(
            lambda params, opt_state, batch: adapter.value_and_grad(loss_of, opt_state, policy=policy)(
                params, *batch
            )
        )
    loss_as_cast, policy = loss_function(setup.training, None), f"params=float32,compute={ladder[0]}"

    @jax.jit  # in the eager run too, because outside jit a switch is compiled again at each step
    def by_level(params: Any, opt_state: Any, batch: Any) -> Any:
        x, y, weight = batch

        def loss(params: Any, x: Any) -> Any:  # only arguments are cast
            return loss_as_cast(params, x, y, weight)

        return adapter.value_and_grad(loss, opt_state, policy=policy, formats=ladder)(params, x)

    return by_level


def _to_jax(batch: Batch) -> tuple[Any, ...]:
    labels = batch.y.astype(np.int32) if batch.y.dtype.kind == "i" else batch.y
    return jnp.asarray(batch.x), jnp.asarray(labels), jnp.asarray(batch.weight)
