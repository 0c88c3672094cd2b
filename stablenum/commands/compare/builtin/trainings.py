"""The built-in trainings: a model, batches and what goes wrong."""

from __future__ import annotations

import dataclasses

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

__all__ = ["TRAININGS"]

SURVIVES, DIES, STALLS, STOPS = Outcome.SURVIVES, Outcome.DIES, Outcome.STALLS, Outcome.STOPS

_HALF = Tolerance(
    norm=3e-2,
    loss=1e-2,
    params=3e-2,
    why="the gradients themselves are rounded to float16, differently in each backend",
)
_FLOAT = Tolerance(
    norm=1e-4, loss=1e-4, params=1e-3, why="each framework sums its own gradients, in its own order"
)
_DIGITS = Tolerance(
    norm=0.1,
    loss=0.05,
    params=0.1,
    why="gradients are rounded to float16, differently in each backend, and 300 steps amplify the "
    "differences",
)
# max_scale leaves a margin: an ordinary batch never overflows, and a bad batch always does.
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
        compiled_in="clip-rules",
        expected=Expected(plain=DIES, guarded=SURVIVES, skips=3),
        tolerance=_FLOAT,
    ),
    Training(
        name="deep-1-to-10",
        about="14 layers with weights from [1, 10]: activations of 1e23, and gradients whose squares "
        "overflow. With clipping, the model learns.",
        model="deep",
        depth=14,
        steps=60,
        seed=21,
        optimizer=OptimizerSpec(name="sgd", lr=1.0),
        guard=GuardConfig(clip=1.0),
        goal=Goal(measure="loss", of_start=0.1),
        compiled_in="clip-rules",
        expected=Expected(plain=DIES, guarded=SURVIVES, skips=0),
        tolerance=_FLOAT,
    ),
    Training(
        name="deep-1-to-10-overflow",
        about="30 such layers: the forward pass itself overflows at every step. The guard stops after "
        "20 steps and says why.",
        model="deep",
        depth=30,
        steps=40,
        seed=22,
        optimizer=OptimizerSpec(name="sgd", lr=1.0),
        guard=GuardConfig(clip=1.0, max_skips_in_a_row=20),
        goal=Goal(measure="loss", of_start=0.1),
        compiled_in="clip-rules",
        expected=Expected(plain=DIES, guarded=STOPS, skips=20),
        tolerance=_FLOAT,
    ),
    Training(
        name="loss-1e-7-fp16",
        about="A loss of 1e-7 computed in float16 without loss scaling: every gradient rounds to 0, and "
        "the model learns nothing.",
        model="regression",
        compute="float16",
        loss_factor=1e-7,
        steps=80,
        seed=23,
        optimizer=OptimizerSpec(name="sgd", lr=1e6),
        goal=Goal(measure="loss", of_start=0.1),
        compiled_in="clip-rules",
        expected=Expected(plain=STALLS, guarded=STALLS, skips=0),
        tolerance=_HALF,
    ),
    Training(
        name="loss-1e-7-fp16-scaled",
        about="The same loss with dynamic loss scaling: the model learns.",
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
        compiled_in="digits-mlp",
        expected=Expected(plain=STALLS, guarded=SURVIVES, skips=0, final_loss_scale=2.0**22),
        tolerance=_HALF,
    ),
    Training(
        name="loss-1e10-clipped",
        about="A loss of 1e10: the first plain step ruins the weights; with clipping, the model learns.",
        model="regression",
        loss_factor=1e10,
        steps=80,
        seed=24,
        optimizer=OptimizerSpec(name="sgd", lr=0.05),
        guard=GuardConfig(clip=1.0),
        goal=Goal(measure="loss", of_start=0.2),
        compiled_in="clip-rules",
        expected=Expected(plain=DIES, guarded=SURVIVES, skips=0),
        tolerance=_FLOAT,
    ),
    Training(
        name="digits-mlp",
        about="Handwritten digits: an MLP in float16 with float32 master weights, and five bad batches.",
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
        about="The same with a small convolutional network.",
        model="digits-conv",
        compute="float16",
        steps=300,
        seed=26,
        faults=_BAD_BATCHES,
        optimizer=OptimizerSpec(name="sgd", lr=0.05, momentum=0.9),
        guard=_SCALING,
        goal=Goal(measure="accuracy", below_clean=0.01),
        compiled_in="digits-mlp",
        expected=Expected(plain=DIES, guarded=SURVIVES, skips=5, final_loss_scale=2.0**13),
        tolerance=_DIGITS,
    ),
    Training(
        name="escalate-fp16",
        about="Digits again. For 240 steps, pixels range from 0 to 60,000, not 0 to 1, and activations "
        "overflow float16 at any loss scale. After 3 skips, the guard has 60 steps computed in "
        "float32.",
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
