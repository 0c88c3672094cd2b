"""The NumPy backend: ``stablenum.reference.guarded``, and the same optimizers without a guard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from stablenum.commands.compare.backends.interface import Setup
from stablenum.commands.compare.backends.numpy_models import loss_and_gradients
from stablenum.commands.compare.scenarios import OptimizerSpec, Training, tensor_names
from stablenum.commands.compare.scenarios.training_data import Batch
from stablenum.recovery.ledger import RecoveryEvent
from stablenum.recovery.loop import RecoveryLoop
from stablenum.recovery.settings import RecoveryPolicy
from stablenum.reference.guarded import SGD, Adam, Guarded, measure
from stablenum.reference.optimizers import Optimizer
from stablenum.reference.recovery import Hooks

__all__ = ["start"]

Array: TypeAlias = "np.ndarray[Any, Any]"


def start(setup: Setup, mode: str) -> GuardedRun | PlainRun:
    """Start a run."""
    if setup.guard is None:
        return PlainRun(setup)
    return GuardedRun(setup)


def make_optimizer(spec: OptimizerSpec) -> Optimizer:
    """Return the reference optimizer of a scenario."""
    if spec.name == "sgd":
        return SGD(lr=spec.lr, momentum=spec.momentum, weight_decay=spec.weight_decay)
    return Adam(lr=spec.lr, eps=spec.eps, weight_decay=spec.weight_decay, decoupled=spec.name == "adamw")


class GuardedRun:
    """A run of :class:`stablenum.reference.guarded.Guarded`."""

    def __init__(self, setup: Setup) -> None:
        self._training, self._ladder = setup.training, setup.ladder
        self.norms: Array | None = None
        self._recovery = setup.recovery
        self.rewinds: Sequence[RecoveryEvent] = ()
        self._names = tensor_names(len(setup.params))
        named = dict(zip(self._names, setup.params, strict=True))
        self._guarded = Guarded(named, make_optimizer(setup.optimizer), setup.guard)

    @property
    def loss_scale(self) -> float:
        return self._guarded.loss_scale

    @property
    def last(self) -> Mapping[str, Any]:
        return self._guarded.last

    def step(self, gradients: list[Array], loss: float) -> None:
        self.norms = measure(gradients)
        with np.errstate(all="ignore"):
            self._guarded.step(dict(zip(self._names, gradients, strict=True)), loss)

    def train(self, batch: Batch) -> None:
        level = int(self._guarded.state.escalation.level) if len(self._ladder) > 1 else 0
        compute = self._ladder[level]
        loss, gradients = _differentiate(self._training, self.params(), batch, self.loss_scale, compute)
        self.step(gradients, float(loss))

    def batches(self, steps: int) -> Iterator[int]:
        loop = RecoveryLoop(self._recovery or RecoveryPolicy(), Hooks(self._guarded), int)
        self.rewinds = loop.events
        yield from loop.batches(steps)

    def params(self) -> list[Array]:
        params: Any = self._guarded.params  # a dict, because the run was given one
        return [np.array(p) for p in params.values()]

    def guard_state_dict(self) -> dict[str, Any]:
        return self._guarded.guard_state_dict()

    def load_guard_state_dict(self, plain: Mapping[str, Any]) -> None:
        self._guarded.load_guard_state_dict(plain)


class PlainRun:
    """The bare optimizer, as most training loops use it."""

    loss_scale = 1.0
    norms = None

    def __init__(self, setup: Setup) -> None:
        self._training, self._clip = setup.training, setup.plain_clip
        self._compute = setup.ladder[0]
        self._optimizer = make_optimizer(setup.optimizer)
        self._params = [p.copy() for p in setup.params]
        self._state = [self._optimizer.init(p) for p in self._params]
        self.last: Mapping[str, Any] = {}

    def step(self, gradients: list[Array], loss: float) -> None:
        with np.errstate(all="ignore"):
            if self._clip is not None:
                gradients = _usual_clip(gradients, self._clip)
            for i, gradient in enumerate(gradients):
                self._params[i], self._state[i] = self._optimizer.update(
                    self._params[i], gradient, self._state[i]
                )

    def train(self, batch: Batch) -> None:
        loss, gradients = _differentiate(self._training, self._params, batch, 1.0, self._compute)
        self.last = {"loss": float(loss)}
        self.step(gradients, float(loss))

    def params(self) -> list[Array]:
        return [p.copy() for p in self._params]

    def guard_state_dict(self) -> dict[str, Any]:
        return {}

    def load_guard_state_dict(self, plain: Mapping[str, Any]) -> None:
        raise ValueError("a plain run has no guard")


def _differentiate(
    training: Training | None, params: list[Array], batch: Batch, scale: float, compute: str
) -> tuple[np.float32, list[Array]]:
    if training is None:
        raise ValueError("this run has no model to train")
    return loss_and_gradients(training, params, batch, scale, compute)


def _usual_clip(gradients: list[Array], max_norm: float) -> list[Array]:
    """Clip by the joint norm in the usual way, with float32 sums of squares."""
    squares = [np.sum(g.astype(np.float32) ** 2) for g in gradients]
    norm = np.sqrt(np.sum(np.asarray(squares, np.float32)))
    factor = np.minimum(np.float32(max_norm) / (norm + np.float32(1e-6)), np.float32(1))
    return [(g * factor).astype(g.dtype) for g in gradients]
