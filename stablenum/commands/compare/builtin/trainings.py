"""The built-in trainings (a model, batches and what goes wrong), and the numbers they stand for."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from stablenum.commands.compare.scenarios import (
    Expected,
    Fault,
    Goal,
    OptimizerSpec,
    Outcome,
    Tolerance,
    Training,
)
from stablenum.guard.config import GuardConfig
from stablenum.rules.escalation import EscalatePrecision
from stablenum.rules.loss_scale import DynamicLossScale

__all__ = ["NORM_EPS", "TRAININGS", "Batch", "Data", "batch_at", "data_of", "initial_params"]

Array: TypeAlias = "np.ndarray[Any, Any]"

SURVIVES, DIES, STALLS, STOPS = Outcome.SURVIVES, Outcome.DIES, Outcome.STALLS, Outcome.STOPS

_BATCH = 64
# Added to the mean square in "digits-normed", so that a row of zeros stays one.
NORM_EPS = 1e-6
_HALF = Tolerance(
    norm=3e-2,
    loss=1e-2,
    params=3e-2,
    why="the gradients themselves are rounded to float16, and not everywhere alike",
)
_FLOAT = Tolerance(
    norm=1e-4, loss=1e-4, params=1e-3, why="each framework sums its own gradients, in its own order"
)
_DIGITS = Tolerance(
    norm=0.1,
    loss=0.05,
    params=0.1,
    why="float16 rounds the gradients, not everywhere alike, and 300 steps of training make more of it",
)
# max_scale leaves a margin: an ordinary batch never overflows, a bad one always does.
_SCALING = GuardConfig(loss_scale=DynamicLossScale(init_scale=2.0**12, max_scale=2.0**13, growth_interval=20))
_BAD_BATCHES = (
    Fault(step=15, kind="nan"),
    Fault(step=40, kind="weight", factor=1e6),
    Fault(step=41, kind="weight", factor=1e6),
    Fault(step=70, kind="scale", factor=1e6),
    Fault(step=90, kind="nan"),
)

TRAININGS: tuple[Training, ...] = (
    Training(
        name="bce-saturated",
        about="Binary cross entropy written with log: three batches saturate the sigmoid, and 0 log 0 "
        "is NaN.",
        model="sigmoid-bce",
        steps=60,
        seed=20,
        faults=tuple(Fault(step=s, kind="scale", factor=1e4) for s in (20, 21, 40)),
        optimizer=OptimizerSpec(name="sgd", lr=0.5),
        goal=Goal(measure="accuracy", at_least=0.95),
        expected=Expected(plain=DIES, guarded=SURVIVES, skips=3),
        tolerance=_FLOAT,
    ),
    Training(
        name="deep-1-to-10",
        about="14 layers, weights from [1, 10]: activations of 1e23, gradients whose squares overflow. "
        "Clipped, it learns.",
        model="deep",
        depth=14,
        steps=60,
        seed=21,
        optimizer=OptimizerSpec(name="sgd", lr=1.0),
        guard=GuardConfig(clip=1.0),
        goal=Goal(measure="loss", of_start=0.1),
        expected=Expected(plain=DIES, guarded=SURVIVES, skips=0),
        tolerance=_FLOAT,
    ),
    Training(
        name="deep-1-to-10-overflow",
        about="30 such layers: the forward pass itself overflows at every step. The guard stops after "
        "20 and says why.",
        model="deep",
        depth=30,
        steps=40,
        seed=22,
        optimizer=OptimizerSpec(name="sgd", lr=1.0),
        guard=GuardConfig(clip=1.0, max_skips_in_a_row=20),
        goal=Goal(measure="loss", of_start=0.1),
        expected=Expected(plain=DIES, guarded=STOPS, skips=20),
        tolerance=_FLOAT,
    ),
    Training(
        name="loss-1e-7-fp16",
        about="A loss of 1e-7, float16 compute, no loss scaling: every gradient rounds to 0 and "
        "nothing is learnt.",
        model="regression",
        compute="float16",
        loss_factor=1e-7,
        steps=80,
        seed=23,
        optimizer=OptimizerSpec(name="sgd", lr=1e6),
        goal=Goal(measure="loss", of_start=0.1),
        expected=Expected(plain=STALLS, guarded=STALLS, skips=0),
        tolerance=_HALF,
    ),
    Training(
        name="loss-1e-7-fp16-scaled",
        about="The same loss with dynamic loss scaling: it learns.",
        model="regression",
        compute="float16",
        loss_factor=1e-7,
        steps=80,
        seed=23,
        optimizer=OptimizerSpec(name="sgd", lr=1e6),
        guard=GuardConfig(
            loss_scale=DynamicLossScale(init_scale=2.0**20, max_scale=2.0**22, growth_interval=20)
        ),
        goal=Goal(measure="loss", of_start=0.1),
        expected=Expected(plain=STALLS, guarded=SURVIVES, skips=0, final_loss_scale=2.0**22),
        tolerance=_HALF,
    ),
    Training(
        name="loss-1e10-clipped",
        about="A loss of 1e10: the first plain step throws the weights away; clipped to norm 1, it learns.",
        model="regression",
        loss_factor=1e10,
        steps=80,
        seed=24,
        optimizer=OptimizerSpec(name="sgd", lr=0.05),
        guard=GuardConfig(clip=1.0),
        goal=Goal(measure="loss", of_start=0.2),
        expected=Expected(plain=DIES, guarded=SURVIVES, skips=0),
        tolerance=_FLOAT,
    ),
    Training(
        name="digits-mlp",
        about="Handwritten digits, an MLP in float16 with float32 master weights, five bad batches.",
        model="digits-mlp",
        compute="float16",
        steps=300,
        seed=25,
        faults=_BAD_BATCHES,
        optimizer=OptimizerSpec(name="sgd", lr=0.05, momentum=0.9),
        guard=_SCALING,
        goal=Goal(measure="accuracy", below_clean=0.01),
        expected=Expected(plain=DIES, guarded=SURVIVES, skips=5, final_loss_scale=2.0**13),
        tolerance=_DIGITS,
    ),
    Training(
        name="digits-conv",
        about="The same with a small convolutional net.",
        model="digits-conv",
        compute="float16",
        steps=300,
        seed=26,
        faults=_BAD_BATCHES,
        optimizer=OptimizerSpec(name="sgd", lr=0.05, momentum=0.9),
        guard=_SCALING,
        goal=Goal(measure="accuracy", below_clean=0.01),
        expected=Expected(plain=DIES, guarded=SURVIVES, skips=5, final_loss_scale=2.0**13),
        tolerance=_DIGITS,
    ),
    Training(
        name="escalate-fp16",
        about="Digits again. For 240 steps pixels come as 0 to 60,000, not 0 to 1: activations overflow "
        "float16 at any loss scale. After 3 refusals the guard has 60 steps computed in float32.",
        model="digits-normed",
        compute="float16",
        steps=300,
        seed=27,
        faults=tuple(Fault(step=step, kind="scale", factor=6e4) for step in range(30, 270)),
        optimizer=OptimizerSpec(name="sgd", lr=0.005, momentum=0.9),
        guard=dataclasses.replace(_SCALING, escalate=EscalatePrecision(after=3, for_steps=60)),
        goal=Goal(measure="loss", of_start=0.1),
        expected=Expected(plain=DIES, guarded=SURVIVES, skips=12, final_loss_scale=2.0**13),
        tolerance=_DIGITS,
    ),
)


class Data(NamedTuple):
    """Training and held-out examples, float32 inputs; labels int64 or float32 targets."""

    x: Array
    y: Array
    x_test: Array
    y_test: Array


class Batch(NamedTuple):
    """One step's examples, and the factor on their mean loss."""

    x: Array
    y: Array
    weight: np.float32


def data_of(training: Training) -> Data:
    """The examples of a training, from its model and seed."""
    return _data(training.model, training.seed)


@functools.lru_cache(maxsize=16)
def _data(model: str, seed: int) -> Data:
    rng = np.random.default_rng([seed, 0])
    if model.startswith("digits"):
        return _digits(rng)
    n, width = 256, 8
    x: Array
    y: Array
    x = rng.random((n, width)) if model == "deep" else rng.normal(size=(n, width))
    if model == "deep":
        y = np.ones(n)
    elif model == "sigmoid-bce":
        y = (x @ rng.normal(size=width) > 0) * 1.0
    else:
        y = np.sin(x @ rng.normal(size=width) / math.sqrt(width))
    x, y = x.astype(np.float32), y.astype(np.float32)
    return Data(x, y, x, y)


def _digits(rng: np.random.Generator) -> Data:
    """scikit-learn's bundled 8 x 8 images (1797 of them), shuffled; the last 360 are held out."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = rng.permutation(len(labels))
    x, y = (images[order] / 16).astype(np.float32), labels[order].astype(np.int64)
    return Data(x[:-360], y[:-360], x[-360:], y[-360:])


def batch_at(training: Training, step: int, *, faults: bool = True) -> Batch:
    """The batch of one step; without ``faults`` as it would have been."""
    data = data_of(training)
    rng = np.random.default_rng([training.seed, 1, step])
    chosen = rng.choice(len(data.y), size=_BATCH, replace=False)
    x, weight = data.x[chosen].copy(), training.loss_factor
    for fault in training.faults:
        if not faults or fault.step != step:
            continue
        if fault.kind == "nan":
            x[0] = math.nan
        elif fault.kind == "scale":
            x *= np.float32(fault.factor)
        else:
            weight *= fault.factor
    return Batch(x, data.y[chosen], np.float32(weight))


def initial_params(training: Training) -> list[Array]:
    """The float32 parameters at the start."""
    rng = np.random.default_rng([training.seed, 2])

    def he(*shape: int, fan_in: int) -> Array:
        return (rng.normal(size=shape) * math.sqrt(2 / fan_in)).astype(np.float32)

    def zeros(n: int) -> Array:
        return np.zeros(n, np.float32)

    match training.model:
        case "sigmoid-bce":
            return [he(8, 1, fan_in=8), zeros(1)]
        case "deep":
            return [rng.uniform(1, 10, size=(8, 8)).astype(np.float32) for _ in range(training.depth)]
        case "regression":
            return [he(8, 32, fan_in=8), zeros(32), he(32, 1, fan_in=32), zeros(1)]
        case "digits-mlp" | "digits-normed":
            return [he(64, 48, fan_in=64), zeros(48), he(48, 10, fan_in=48), zeros(10)]
        case _:
            return [he(8, 1, 3, 3, fan_in=9), zeros(8), he(8 * 6 * 6, 10, fan_in=8 * 6 * 6), zeros(10)]
