"""The built-in gradient streams, and the numbers that a stream stands for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

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

__all__ = ["STREAMS", "StreamStep", "as_dtype", "handed", "stream_params", "stream_step"]

Array: TypeAlias = "np.ndarray[Any, Any]"

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
        params=params, why="half-precision parameters round at every step, and not everywhere alike"
    )


STREAMS: tuple[Stream, ...] = (
    Stream(
        name="clean",
        about="200 ordinary steps of Adam with clipping: the guard changes nothing but what it is told to.",
        steps=200,
        optimizer=_ADAM,
        guard=GuardConfig(clip=5.0),
        expected=Expected(plain=SURVIVES, guarded=SURVIVES, skips=0),
        tolerance=_ADAM_TOLERANCE,
    ),
    Stream(
        name="single-inf",
        about="One inf at one step of 200: plain momentum SGD is lost, the guard skips that step.",
        steps=200,
        seed=1,
        events=(Event(step=20, tensor=1, value=INF),),
        optimizer=_MOMENTUM,
        expected=Expected(plain=DIES, guarded=SURVIVES, skips=1),
    ),
    Stream(
        name="single-nan",
        about="One NaN in one tensor, Adam with loss scaling: one poisoned moment would stay for ever.",
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
        expected=Expected(plain=DIES, guarded=SURVIVES, skips=2),
    ),
    Stream(
        name="nan-loss",
        about="The loss is NaN while the gradients look fine: skipped, and the loss scale is left alone.",
        seed=4,
        events=(Event(step=10, until=12, tensor="loss", value=NAN),),
        guard=GuardConfig(loss_scale="dynamic"),
        expected=Expected(plain=SURVIVES, guarded=SURVIVES, skips=3, final_loss_scale=2.0**16),
    ),
    Stream(
        name="bad-200",
        about="200 bad steps in a row: the loss scale stops at its floor, and good steps go on from there.",
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
        expected=Expected(plain=DIES, guarded=SURVIVES, skips=2, final_loss_scale=2.0**17),
    ),
    Stream(
        name="hysteresis",
        about="Overflows in twos with a tolerance of 2: only the second in a row lowers the scale.",
        steps=60,
        seed=7,
        events=tuple(Event(step=s, tensor=0, value=INF) for s in (5, 15, 25, 26, 40)),
        guard=GuardConfig(loss_scale=DynamicLossScale(hysteresis=2)),
        expected=Expected(plain=DIES, guarded=SURVIVES, skips=5, final_loss_scale=2.0**15),
    ),
    Stream(
        name="huge-1e20",
        about="Gradients of 1e20: their squares overflow float32. The usual clip zeroes them, the "
        "guard's does not.",
        seed=8,
        magnitude=1e20,
        guard=GuardConfig(clip=1.0),
        plain_clip=1.0,
        expected=Expected(plain=STALLS, guarded=SURVIVES, skips=0),
    ),
    Stream(
        name="tiny-1e-30",
        about="Gradients of 1e-30: their squares vanish in float32, their norm does not.",
        seed=9,
        magnitude=1e-30,
        start=0.0,
        guard=GuardConfig(clip=1.0),
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
        about="Three clip rules one after the other (a norm a tensor, the joint norm, each element), "
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
        about="float16 parameters and gradients, dynamic scaling that grows until it overflows, again "
        "and again.",
        steps=200,
        seed=12,
        tensors=_tensors("float16", "float16", "float16"),
        magnitude=0.05,
        # Fast enough that the parameters move by far more than the tolerance.
        optimizer=OptimizerSpec(name="sgd", lr=0.05, momentum=0.9),
        guard=GuardConfig(loss_scale=DynamicLossScale(growth_interval=10, init_scale=2.0**14)),
        expected=Expected(plain=SURVIVES, guarded=SURVIVES, skips=13),
        tolerance=_half_tolerance(1e-2),
    ),
    Stream(
        name="bf16-leaves",
        about="bfloat16, float16 and float32 parameters side by side, one inf.",
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
        about="No parameters at all (not on PyTorch, whose optimizers refuse that).",
        steps=20,
        seed=15,
        tensors=(),
        guard=GuardConfig(clip=1.0, loss_scale=DynamicLossScale(growth_interval=10)),
        events=(Event(step=5, tensor="loss", value=NAN),),
        expected=Expected(plain=SURVIVES, guarded=SURVIVES, skips=1),
    ),
    Stream(
        name="adam-1e-50",
        about="Adam, gradients x 1e-50: in float32 they are exactly 0 and the update is 0 / (0 + eps) "
        "= 0. No NaN.",
        seed=16,
        magnitude=1e-50,
        optimizer=_ADAM,
        expected=Expected(plain=SURVIVES, guarded=SURVIVES, skips=0),
        tolerance=_ADAM_TOLERANCE,
    ),
    Stream(
        name="adam-1e-50-eps-0",
        about="The same with eps = 0: 0 / 0. The guard watches gradients, and these are finite: it "
        "cannot help.",
        steps=10,
        seed=16,
        magnitude=1e-50,
        optimizer=OptimizerSpec(name="adam", lr=1e-3, eps=0.0),
        expected=Expected(plain=DIES, guarded=DIES, skips=0),
        tolerance=_ADAM_TOLERANCE,
    ),
    Stream(
        name="adam-1e-50-fp16",
        about="The same in pure float16: eps = 1e-8 rounds to 0 there, so 0 / 0 again. Keep Adam's "
        "state in float32.",
        steps=10,
        seed=16,
        tensors=_tensors("float16", "float16", "float16"),
        magnitude=1e-50,
        optimizer=_ADAM,
        expected=Expected(plain=DIES, guarded=DIES, skips=0),
        tolerance=_half_tolerance(2e-2),
    ),
    Stream(
        name="fp16-stall",
        about="float16 parameters at 1, steps of 1e-4: less than half an ulp, so nothing moves and "
        "nothing says so.",
        steps=200,
        seed=17,
        tensors=_tensors("float16", "float16", "float16"),
        start=1.0,
        magnitude=0.01,
        optimizer=OptimizerSpec(name="sgd", lr=0.005),
        guard=GuardConfig(loss_scale=DynamicLossScale(init_scale=2.0**10)),
        expected=Expected(plain=STALLS, guarded=STALLS, skips=0),
    ),
)


class StreamStep(NamedTuple):
    """One step of a stream: float32 gradients of the unscaled loss, and that loss."""

    gradients: list[Array]
    loss: np.float32


def stream_params(stream: Stream) -> list[Array]:
    """The parameters at the start, each in its dtype."""
    rng = np.random.default_rng([stream.seed, 0])
    drawn = [rng.normal(size=tensor.shape) for tensor in stream.tensors]
    return [
        as_dtype(
            np.full(tensor.shape, float(stream.start)) if stream.start is not None else value, tensor.dtype
        )
        for tensor, value in zip(stream.tensors, drawn, strict=True)
    ]


def stream_step(stream: Stream, step: int) -> StreamStep:
    """The gradients and the loss of one step."""
    rng = np.random.default_rng([stream.seed, 1, step])
    drawn = [rng.normal(size=tensor.shape) * float(stream.magnitude) for tensor in stream.tensors]
    level = _level(stream, step)
    gradients = [as_dtype(values * level, "float32") for values in drawn]
    loss = np.float32(1.0 / (1.0 + 0.05 * step) + 0.05 * rng.random())
    for event in stream.events:
        if not event.holds_at(step):
            continue
        if event.tensor == "loss":
            loss = np.float32(_after(event, np.asarray(loss)))
            continue
        for gradient in gradients if event.tensor == "all" else [gradients[event.tensor]]:
            whole = event.everywhere or event.factor is not None
            part = gradient if whole else gradient.reshape(-1)[:1]
            part[...] = _after(event, part)
    return StreamStep(gradients, loss)


def handed(stream: Stream, gradients: Sequence[Array], scale: float) -> list[Array]:
    """What the optimizer gets of a step's gradients: scaled, and rounded as the tensors say."""
    factor, made = np.float32(scale), []
    with np.errstate(all="ignore"):  # a half-precision gradient that overflows here is the point
        for gradient, tensor in zip(gradients, stream.tensors, strict=True):
            made.append(as_dtype(as_dtype(gradient * factor, tensor.computed or tensor.dtype), tensor.dtype))
    return made


def _level(stream: Stream, step: int) -> float:
    """What the gradients of a step are multiplied by; exactly 1 without drift and jitter."""
    # Numbers of their own, so that a jitter changes no other draw.
    swing = np.random.default_rng([stream.seed, 2, step]).normal() if stream.jitter else 0.0
    return float(stream.drift) ** step * math.exp(stream.jitter * swing)


def _after(event: Event, there: Array) -> Array:
    """What an event makes of the float32 numbers that are there."""
    if event.factor is None:
        return as_dtype(np.full(there.shape, event.value, np.float64), "float32")
    with np.errstate(invalid="ignore"):  # 0 x inf is NaN, as everywhere
        return as_dtype(there.astype(np.float64) * event.factor, "float32")


def as_dtype(array: Array, dtype: str) -> Array:
    """``array`` rounded to a dtype by its name (bfloat16: ml_dtypes). Overflow gives inf, silently."""
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(numpy_dtype(dtype))


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype for a name of :data:`stablenum.commands.compare.scenarios.DTYPES`."""
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes  # only needed where bfloat16 is

    return np.dtype(ml_dtypes.bfloat16)
