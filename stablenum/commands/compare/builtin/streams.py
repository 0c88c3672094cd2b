"""The built-in gradient streams."""

from __future__ import annotations

import math

from stablenum.commands.compare.scenarios import (
    Event,
    Expected,
    OptimizerSpec,
    Outcome,
    Stream,
    TensorSpec,
    Tolerance,
)
from stablenum.guard.config import GuardConfig
from stablenum.rules.clipping import ClipByGlobalNorm, ClipByNorm, ClipByValue
from stablenum.rules.loss_scale import DynamicLossScale

__all__ = ["STREAMS"]

NAN, INF = math.nan, math.inf
SURVIVES, DIES, STALLS = Outcome.SURVIVES, Outcome.DIES, Outcome.STALLS

_MOMENTUM = OptimizerSpec(name="sgd", lr=0.01, momentum=0.9)
_ADAM = OptimizerSpec(name="adam", lr=1e-3)
_ADAM_TOLERANCE = Tolerance(params=1e-4, why="Adam divides by a root of the squares")
_HALF_SHAPES = ((8, 5), (5,), (3, 2, 4))


def _tensors(*dtypes: str) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(shape=s, dtype=d) for s, d in zip(_HALF_SHAPES, dtypes, strict=True))


def _half_tolerance(params: float) -> Tolerance:
    return Tolerance(
        params=params, why="half-precision parameters are rounded at every step, differently in each backend"
    )


STREAMS: tuple[Stream, ...] = (
    Stream(
        name="clean",
        about="200 ordinary steps of Adam with clipping: the guard changes nothing except by clipping.",
        steps=200,
        optimizer=_ADAM,
        guard=GuardConfig(clip=5.0),
        compiled_in="all-zero",
        expected=Expected(plain=SURVIVES, guarded=SURVIVES, skips=0),
        tolerance=_ADAM_TOLERANCE,
    ),
    Stream(
        name="single-inf",
        about="One inf at one step of 200: plain momentum SGD diverges, the guard skips that step.",
        steps=200,
        seed=1,
        events=(Event(step=20, tensor=1, value=INF),),
        optimizer=_MOMENTUM,
        compiled_in="clip-rules",
        expected=Expected(plain=DIES, guarded=SURVIVES, skips=1),
    ),
    Stream(
        name="single-nan",
        about="One NaN in one tensor, Adam with loss scaling: a poisoned moment would stay poisoned.",
        steps=200,
        seed=2,
        events=(Event(step=20, tensor=2, value=NAN),),
        optimizer=_ADAM,
        guard=GuardConfig(clip=1.0, loss_scale=1024.0),
        expected=Expected(plain=DIES, guarded=SURVIVES, skips=1, final_loss_scale=1024.0),
        tolerance=_ADAM_TOLERANCE,
    ),
    Stream(
        name="first-step-bad",
        about="The very first step is bad: momentum buffers that were never written must not be used.",
        seed=3,
        events=(Event(step=0, until=1, tensor=0, value=NAN, everywhere=True),),
        optimizer=_MOMENTUM,
        compiled_in="clip-rules",
        expected=Expected(plain=DIES, guarded=SURVIVES, skips=2),
    ),
    Stream(
        name="nan-loss",
        about="The loss is NaN while the gradients are finite: the step is skipped, the loss scale "
        "unchanged.",
        seed=4,
        events=(Event(step=10, until=12, tensor="loss", value=NAN),),
        guard=GuardConfig(loss_scale="dynamic"),
        compiled_in="bad-200",
        expected=Expected(plain=SURVIVES, guarded=SURVIVES, skips=3, final_loss_scale=2.0**16),
    ),
    Stream(
        name="bad-200",
        about="200 bad steps in a row: the loss scale stops at its minimum, and training goes on from there.",
        steps=240,
        seed=5,
        events=(Event(step=20, until=219, tensor=0, value=INF),),
        optimizer=_MOMENTUM,
        guard=GuardConfig(loss_scale=DynamicLossScale(growth_interval=10)),
        expected=Expected(plain=DIES, guarded=SURVIVES, skips=200, final_loss_scale=4.0),
    ),
    Stream(
        name="growth-boundary",
        about="Overflow exactly where the scale would grow, and just after it has grown.",
        steps=45,
        seed=6,
        events=(Event(step=9, tensor=0, value=INF), Event(step=20, tensor=0, value=INF)),
        guard=GuardConfig(loss_scale=DynamicLossScale(growth_interval=10)),
        compiled_in="bad-200",
        expected=Expected(plain=DIES, guarded=SURVIVES, skips=2, final_loss_scale=2.0**17),
    ),
    Stream(
        name="hysteresis",
        about="Single overflows and a pair, with a hysteresis of 2: only the second in a row lowers "
        "the scale.",
        steps=60,
        seed=7,
        events=tuple(Event(step=s, tensor=0, value=INF) for s in (5, 15, 25, 26, 40)),
        guard=GuardConfig(loss_scale=DynamicLossScale(hysteresis=2)),
        compiled_in="bad-200",
        expected=Expected(plain=DIES, guarded=SURVIVES, skips=5, final_loss_scale=2.0**15),
    ),
    Stream(
        name="huge-1e20",
        about="Gradients of 1e20: their squares overflow float32. The usual clipping zeroes them, the "
        "guard's clipping does not.",
        seed=8,
        magnitude=1e20,
        guard=GuardConfig(clip=1.0),
        plain_clip=1.0,
        compiled_in="clip-rules",
        expected=Expected(plain=STALLS, guarded=SURVIVES, skips=0),
    ),
    Stream(
        name="tiny-1e-30",
        about="Gradients of 1e-30: their squares vanish in float32, their norm does not.",
        seed=9,
        magnitude=1e-30,
        start=0.0,
        guard=GuardConfig(clip=1.0),
        compiled_in="clip-rules",
        expected=Expected(plain=SURVIVES, guarded=SURVIVES, skips=0),
    ),
    Stream(
        name="all-zero",
        about="All-zero gradients: nothing divides by their norm.",
        seed=10,
        magnitude=0.0,
        optimizer=_ADAM,
        guard=GuardConfig(clip=(ClipByNorm(1.0), ClipByGlobalNorm(1.0)), loss_scale="dynamic"),
        expected=Expected(plain=SURVIVES, guarded=SURVIVES, skips=0, final_loss_scale=2.0**16),
        tolerance=_ADAM_TOLERANCE,
    ),
    Stream(
        name="clip-rules",
        about="Three clip rules in order (the norm of each tensor, the joint norm, each element), and "
        "one inf.",
        seed=11,
        magnitude=3.0,
        events=(Event(step=7, tensor=0, value=-INF),),
        optimizer=_MOMENTUM,
        guard=GuardConfig(clip=(ClipByNorm(5.0), ClipByGlobalNorm(6.0), ClipByValue(0.5)), loss_scale=256.0),
        expected=Expected(plain=DIES, guarded=SURVIVES, skips=1),
    ),
    Stream(
        name="fp16-leaves",
        about="float16 parameters and gradients, with dynamic scaling that repeatedly grows until it "
        "overflows.",
        steps=200,
        seed=12,
        tensors=_tensors("float16", "float16", "float16"),
        magnitude=0.05,
        # The learning rate is high enough that the parameters move by far more than the tolerance.
        optimizer=OptimizerSpec(name="sgd", lr=0.05, momentum=0.9),
        guard=GuardConfig(loss_scale=DynamicLossScale(growth_interval=10, init_scale=2.0**14)),
        expected=Expected(plain=SURVIVES, guarded=SURVIVES, skips=13),
        tolerance=_half_tolerance(1e-2),
    ),
    Stream(
        name="bf16-leaves",
        about="bfloat16, float16 and float32 parameters side by side, and one inf.",
        seed=13,
        tensors=_tensors("bfloat16", "float16", "float32"),
        magnitude=0.1,
        events=(Event(step=11, tensor=0, value=INF),),
        optimizer=OptimizerSpec(name="sgd", lr=0.3),  # steps that bfloat16 does not round away
        guard=GuardConfig(clip=1.0, loss_scale=DynamicLossScale(growth_interval=20, init_scale=2.0**12)),
        expected=Expected(plain=DIES, guarded=SURVIVES, skips=1, final_loss_scale=2.0**13),
        tolerance=_half_tolerance(2e-2),
    ),
    Stream(
        name="empty-tensors",
        about="Some parameters have no elements.",
        seed=14,
        tensors=(TensorSpec(shape=(0, 3)), TensorSpec(shape=(4,)), TensorSpec(shape=(0,), dtype="float16")),
        guard=GuardConfig(clip=1.0, loss_scale=DynamicLossScale(growth_interval=10)),
        events=(Event(step=5, tensor=1, value=NAN),),
        expected=Expected(plain=DIES, guarded=SURVIVES, skips=1),
    ),
    Stream(
        name="empty-tree",
        about="No parameters at all (not on PyTorch, whose optimizers reject an empty list).",
        steps=20,
        seed=15,
        tensors=(),
        guard=GuardConfig(clip=1.0, loss_scale=DynamicLossScale(growth_interval=10)),
        events=(Event(step=5, tensor="loss", value=NAN),),
        expected=Expected(plain=SURVIVES, guarded=SURVIVES, skips=1),
    ),
    Stream(
        name="adam-1e-50",
        about="Adam with gradients of 1e-50: in float32 they are exactly 0, and the update is 0 / (0 + eps) "
        "= 0, not NaN.",
        seed=16,
        magnitude=1e-50,
        optimizer=_ADAM,
        compiled_in="all-zero",
        expected=Expected(plain=SURVIVES, guarded=SURVIVES, skips=0),
        tolerance=_ADAM_TOLERANCE,
    ),
    Stream(
        name="adam-1e-50-eps-0",
        about="The same with eps = 0: the update is 0 / 0. The guard watches gradients, which are "
        "finite, and losses, which a stream gives, too. In a training, the loss of the next step is NaN: "
        "that step is skipped, and names the parameter.",
        steps=10,
        seed=16,
        magnitude=1e-50,
        optimizer=OptimizerSpec(name="adam", lr=1e-3, eps=0.0),
        compiled_in="all-zero",
        expected=Expected(plain=DIES, guarded=DIES, skips=0),
        tolerance=_ADAM_TOLERANCE,
    ),
    Stream(
        name="adam-1e-50-fp16",
        about="The same in pure float16: eps = 1e-8 rounds to 0, so the update is 0 / 0 again. Keep Adam's "
        "state in float32.",
        steps=10,
        seed=16,
        tensors=_tensors("float16", "float16", "float16"),
        magnitude=1e-50,
        optimizer=_ADAM,
        compiled_in="single-nan",
        expected=Expected(plain=DIES, guarded=DIES, skips=0),
        tolerance=_half_tolerance(2e-2),
    ),
    Stream(
        name="fp16-stall",
        about="float16 parameters of 1 and steps of 1e-4, which are below half an ulp: nothing moves, and "
        "nothing reports it.",
        steps=200,
        seed=17,
        tensors=_tensors("float16", "float16", "float16"),
        start=1.0,
        magnitude=0.01,
        optimizer=OptimizerSpec(name="sgd", lr=0.005),
        guard=GuardConfig(loss_scale=DynamicLossScale(init_scale=2.0**10)),
        compiled_in="fp16-leaves",
        expected=Expected(plain=STALLS, guarded=STALLS, skips=0),
    ),
)
