"""The built-in streams for rules that learn from past steps, and for the rule that bounds units."""

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
from stablenum.rules.clipping import (
    AdaGC,
    AdaptiveGradClip,
    AutoClip,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    ClipUpdateRMS,
    ZClip,
)
from stablenum.rules.loss_scale import DynamicLossScale, LogMaxLossScale, UnderflowAwareLossScale
from stablenum.rules.spikes import MeanStdSpikeGuard, SpikeGuard

__all__ = ["RULE_STREAMS"]

NAN, INF = math.nan, math.inf
SURVIVES, DIES, STALLS = Outcome.SURVIVES, Outcome.DIES, Outcome.STALLS
FAILS, STOPS = Outcome.FAILS, Outcome.STOPS

_SGD = OptimizerSpec(name="sgd", lr=0.1)
_ADAM = OptimizerSpec(name="adam", lr=1e-3)
_ADAM_TOLERANCE = Tolerance(params=1e-4, why="Adam divides by a root of the squares")
_HALF_TOLERANCE = Tolerance(
    params=1e-2, why="half-precision parameters are rounded at every step, differently in each backend"
)
_HALF = tuple(TensorSpec(shape=s, dtype="float16") for s in ((8, 5), (5,), (3, 2, 4)))
_AUTOCAST = tuple(TensorSpec(shape=s, computed="float16") for s in ((8, 5), (5,), (3, 2, 4)))


def _spike(step: int, factor: float, *, loss: float = 1.0) -> tuple[Event, ...]:
    """Return the events of a step whose gradients are multiplied by ``factor`` and whose loss by ``loss``."""
    of_loss = (Event(step=step, tensor="loss", factor=loss),) if loss != 1.0 else ()
    return (Event(step=step, tensor="all", factor=factor), *of_loss)


# The first spike is more than ten times as large as the next ones and hides them from a mean and standard
# deviation. One spike is in the loss only, and one step is NaN.
_MASKED = (
    *_spike(120, 1000.0, loss=10.0),
    *_spike(130, 60.0),
    *_spike(140, 60.0, loss=4.0),
    Event(step=150, tensor=1, value=NAN),
    *_spike(160, 60.0),
    *_spike(200, 1.0, loss=10.0),
)


def _masked(
    name: str,
    about: str,
    spike: SpikeGuard | MeanStdSpikeGuard,
    expected: Expected,
    *,
    compiled_in: str | None = None,
) -> Stream:
    """Return the stream with these spikes, which is the same for every spike rule."""
    return Stream(
        name=name,
        about=about,
        steps=260,
        seed=40,
        magnitude=0.02,
        jitter=0.2,
        events=_MASKED,
        optimizer=_SGD,
        guard=GuardConfig(spike=spike),
        most_moved=0.1,
        compiled_in=compiled_in,
        expected=expected,
    )


_CLIPPING = (
    Stream(
        name="agc",
        about="AdaptiveGradClip on all tensors but one, then a clip by the joint norm. One unit has "
        "a gradient of 2000 for 40 steps, and all tensors have spikes.",
        steps=200,
        seed=30,
        magnitude=0.05,
        events=(
            Event(step=40, until=79, tensor=0, value=2000.0),
            *_spike(100, 1e4),
            *_spike(101, 1e4),
        ),
        optimizer=_SGD,
        # The axis is given, so that all frameworks see the same units.
        guard=GuardConfig(
            clip=(AdaptiveGradClip(clipping=0.1, exclude=("2",), output_axis="last"), ClipByGlobalNorm(1.0))
        ),
        most_moved=0.4,
        compiled_in="all-rules",
        expected=Expected(plain=FAILS, guarded=SURVIVES, skips=0),
    ),
    Stream(
        name="autoclip",
        about="AutoClip at the median of 100 norms that fall and jitter; three spikes of 1000, and one NaN.",
        steps=200,
        seed=31,
        magnitude=0.05,
        drift=0.99,
        jitter=0.3,
        events=(
            *_spike(50, 1000.0),
            *_spike(51, 1000.0),
            Event(step=90, tensor=2, value=NAN),
            *_spike(120, 1000.0),
        ),
        optimizer=_SGD,
        guard=GuardConfig(clip=AutoClip(quantile=0.5, window=100)),
        most_moved=0.5,
        compiled_in="all-rules",
        expected=Expected(plain=DIES, guarded=SURVIVES, skips=1),
    ),
    Stream(
        name="zclip",
        about="ZClip with a spike of 1e30 and an inf in its warm-up, and spikes of 100 after the "
        "warm-up. A clip by the joint norm bounds the first spike.",
        steps=200,
        seed=32,
        magnitude=0.05,
        jitter=0.2,
        events=(
            Event(step=5, tensor="all", factor=1e30),
            Event(step=10, tensor=0, value=INF),
            Event(step=60, until=64, tensor="all", factor=100.0),
            *_spike(130, 100.0),
        ),
        optimizer=_SGD,
        guard=GuardConfig(clip=(ZClip(max_norm=None), ClipByGlobalNorm(20.0))),
        most_moved=0.4,
        compiled_in="all-rules",
        expected=Expected(plain=DIES, guarded=SURVIVES, skips=1),
    ),
    Stream(
        name="adagc-late",
        about="AdaGC with a tensor that gets no gradient for 60 steps and then warms up; spikes in "
        "one tensor at a time.",
        steps=200,
        seed=33,
        magnitude=0.02,
        jitter=0.2,
        events=(
            Event(step=0, until=59, tensor=2, factor=0.0),
            Event(step=50, tensor=0, factor=1000.0),
            Event(step=120, tensor=2, factor=1000.0),
            Event(step=150, tensor=1, factor=1000.0),
        ),
        optimizer=_SGD,
        guard=GuardConfig(clip=AdaGC(warmup_steps=30)),
        plain_clip=1.0,
        most_moved=0.035,
        compiled_in="all-rules",
        expected=Expected(plain=FAILS, guarded=SURVIVES, skips=0),
    ),
    Stream(
        name="stale-second-moment",
        about="Adam with gradients of one sign that rise 10,000-fold at step 250: v lags, and steps are "
        "long. Clipping the norm does not help; clipping the update does.",
        steps=300,
        seed=34,
        magnitude=1e-6,
        events=(Event(step=250, until="end", tensor="all", value=0.01, everywhere=True),),
        optimizer=_ADAM,
        guard=GuardConfig(clip=ClipUpdateRMS(0.5)),
        plain_clip=0.02,
        most_moved=0.05,
        expected=Expected(plain=FAILS, guarded=SURVIVES, skips=0),
        tolerance=_ADAM_TOLERANCE,
    ),
)

_SPIKES = (
    _masked(
        "spike-skip",
        "SpikeGuard skips all spikes of norm and loss, even soon after a larger one, and a NaN.",
        SpikeGuard(),
        Expected(plain=DIES, guarded=SURVIVES, skips=6),
        compiled_in="all-rules",
    ),
    _masked(
        "spike-clip",
        "The same stream with spikes shrunk to the median norm and applied: only the NaN is skipped.",
        SpikeGuard(action="clip"),
        Expected(plain=DIES, guarded=SURVIVES, skips=1),
        compiled_in="all-rules",
    ),
    _masked(
        "spike-mean-std",
        "The same stream judged by mean and standard deviation: the first spike hides the others.",
        MeanStdSpikeGuard(),
        Expected(plain=DIES, guarded=FAILS, skips=3),
    ),
    Stream(
        name="level-shift",
        about="All gradients are ten times as large from step 120 on: SpikeGuard skips 8 steps, then accepts "
        "the new level.",
        steps=260,
        seed=41,
        magnitude=0.02,
        jitter=0.2,
        events=(
            Event(step=120, until="end", tensor="all", factor=10.0),
            *_spike(240, 100.0),
        ),
        optimizer=_SGD,
        guard=GuardConfig(spike="skip"),
        most_moved=0.6,
        compiled_in="all-rules",
        expected=Expected(plain=FAILS, guarded=SURVIVES, skips=9),
    ),
    Stream(
        name="drift",
        about="Norms that jitter and rise by a third in 100 steps cause no false alarm. AutoClip bounds a "
        "spike that comes too early for SpikeGuard, which skips a later one.",
        steps=300,
        seed=42,
        magnitude=0.02,
        drift=1.003,
        jitter=0.2,
        events=(*_spike(40, 1000.0), *_spike(290, 1000.0)),
        optimizer=_SGD,
        guard=GuardConfig(clip=AutoClip(quantile=0.9), spike="skip"),
        most_moved=0.2,
        compiled_in="all-rules",
        expected=Expected(plain=FAILS, guarded=SURVIVES, skips=1),
    ),
    Stream(
        name="long-zeros",
        about="No gradient at all in the first 30 steps and in steps 120 to 199: no rule stops "
        "adapting, and none mistakes the return for a spike. There are two spikes, and one tensor "
        "whose gradients rise.",
        steps=280,
        seed=43,
        magnitude=0.02,
        jitter=0.2,
        events=(
            Event(step=0, until=29, tensor="all", factor=0.0),
            *_spike(50, 1000.0),
            Event(step=120, until=199, tensor="all", factor=0.0),
            Event(step=200, until="end", tensor=1, factor=3.0),
            *_spike(250, 1000.0),
        ),
        optimizer=_SGD,
        guard=GuardConfig(
            # AutoClip bounds the spike in AdaGC's warm-up; AdaGC bounds the tensor that rises.
            clip=(AdaGC(max_norm=10.0, warmup_steps=30), AutoClip(quantile=0.9)),
            loss_scale=LogMaxLossScale(std_factor=2.0),
            spike="skip",
        ),
        most_moved=0.035,
        compiled_in="all-rules",
        expected=Expected(plain=FAILS, guarded=SURVIVES, skips=1, final_loss_scale=2.0**17),
    ),
)

_LOSS_SCALES = (
    Stream(
        name="log-max",
        about="float16 tensors with gradients 1000 times as large from step 120 on: with "
        "LogMaxLossScale, a few steps overflow, then the scale adapts.",
        steps=240,
        seed=50,
        tensors=_HALF,
        magnitude=3e-4,
        events=(Event(step=120, until="end", tensor="all", factor=1000.0),),
        optimizer=OptimizerSpec(name="sgd", lr=0.3),
        guard=GuardConfig(loss_scale=LogMaxLossScale()),
        compiled_in="all-rules",
        expected=Expected(plain=SURVIVES, guarded=SURVIVES, skips=8, final_loss_scale=8.0),
        tolerance=_HALF_TOLERANCE,
    ),
    Stream(
        name="underflow",
        about="Gradients of 1e-9, computed in float16: all are 0. UnderflowAwareLossScale doubles the "
        "scale until they are not, and no further; at the end a larger element limits the scale.",
        steps=150,
        seed=51,
        tensors=_AUTOCAST,
        magnitude=1e-9,
        # The scale is 2^19 by step 60. From then on one tensor is close to float16's smallest number, 2^-24:
        # with a scale of 2^19 it rounds to 2^-24, and with 2^20 to twice that. From step 100 on, this takes a
        # scale of 2^22, but at 2^20 the largest element is already at 0.7 of the headroom.
        events=(
            Event(step=60, until=99, tensor=2, value=0.75 * 2.0**-43, everywhere=True),
            Event(step=100, until="end", tensor=2, value=0.6 * 2.0**-44, everywhere=True),
            Event(step=100, until="end", tensor=1, value=0.7 * 2.0**-26),
        ),
        optimizer=OptimizerSpec(name="sgd", lr=1e7),
        guard=GuardConfig(
            # The headroom is small, so that the element is 0 in float16 without a scale.
            loss_scale=UnderflowAwareLossScale(
                init_scale=2.0**8, max_tiny=0.01, headroom=2.0**-6, max_scale=2.0**40
            )
        ),
        expected=Expected(plain=STALLS, guarded=SURVIVES, skips=0, final_loss_scale=2.0**21),
    ),
    Stream(
        name="no-scale-helps",
        about="inf at every step from 40 on: the scale stops at its minimum, the reason says that no scale "
        "can help, and training stops.",
        steps=150,
        seed=52,
        events=(Event(step=40, until="end", tensor=0, value=INF),),
        guard=GuardConfig(
            loss_scale=DynamicLossScale(init_scale=2.0**12, min_scale=2.0**6), max_skips_in_a_row=30
        ),
        compiled_in="bad-200",
        expected=Expected(plain=DIES, guarded=STOPS, skips=30, final_loss_scale=2.0**6),
    ),
    Stream(
        name="hysteresis-growth",
        about="Overflows far apart, with a hysteresis of 2 that only growth refills: the second and the "
        "third lower the scale.",
        steps=150,
        seed=53,
        events=tuple(Event(step=s, tensor=0, value=INF) for s in (10, 30, 50, 125)),
        guard=GuardConfig(
            loss_scale=DynamicLossScale(hysteresis=2, hysteresis_refill="growth", growth_interval=60)
        ),
        compiled_in="bad-200",
        expected=Expected(plain=DIES, guarded=SURVIVES, skips=4, final_loss_scale=2.0**15),
    ),
)

_TOGETHER = (
    Stream(
        name="all-rules",
        about="Every clip rule in order, with SpikeGuard and LogMaxLossScale; a late tensor, spikes, a NaN "
        "and zeros. The rules compose, and each affects the result.",
        steps=200,
        seed=60,
        magnitude=0.05,
        jitter=0.2,
        events=(
            Event(step=0, until=39, tensor=1, factor=0.0),
            *_spike(30, 1e6),
            Event(step=60, tensor=0, value=NAN),
            Event(step=70, until="end", tensor=0, value=0.4),
            *_spike(100, 1e4, loss=100.0),
            Event(step=120, until=129, tensor="all", factor=0.0),
            Event(step=150, until="end", tensor=2, factor=5.0),
        ),
        optimizer=_SGD,
        guard=GuardConfig(
            # Each bound is low enough to act on the norms that result from the rules before it.
            clip=(
                AdaptiveGradClip(clipping=0.1, output_axis="last"),
                AdaGC(clip_ratio=1.5, warmup_steps=20),
                ZClip(z_threshold=1.0, max_norm=None),
                AutoClip(quantile=0.8, window=64),
                ClipByNorm(0.25),
                ClipByGlobalNorm(0.35),
                ClipByValue(0.08),
                ClipUpdateRMS(0.04),
            ),
            loss_scale=LogMaxLossScale(),
            spike=SpikeGuard(action="clip", window=64, min_samples=32),
        ),
        most_moved=1.0,
        expected=Expected(
            plain=DIES,
            guarded=SURVIVES,
            skips=1,
            final_loss_scale=2.0**11,
            moved=(0.1592, 0.0615, 0.0538),
        ),
        tolerance=Tolerance(norm=1e-5, why="the product of eight factors, each rounded separately"),
    ),
)

RULE_STREAMS: tuple[Stream, ...] = (*_CLIPPING, *_SPIKES, *_LOSS_SCALES, *_TOGETHER)
