"""The built-in streams of runs that go back to a snapshot."""

from __future__ import annotations

import math

from stablenum.commands.compare.scenarios import Event, Expected, OptimizerSpec, Outcome, Stream, Tolerance
from stablenum.recovery.settings import RecoveryPolicy, Response

__all__ = ["RECOVERY_STREAMS"]

SURVIVES, DIES, FAILS, STOPS = Outcome.SURVIVES, Outcome.DIES, Outcome.FAILS, Outcome.STOPS

_ADAM = OptimizerSpec(name="adam", lr=1e-3)
_ADAM_TOLERANCE = Tolerance(params=1e-4, why="Adam divides by a root of the squares")
_POLICY = RecoveryPolicy(
    every=10,
    good_after=15,
    check_every=5,
    skips_in_a_row=4,
    runaway_steps=6,
    window=24,
    responses=(Response(), Response(older=1, skip_further=20, rate=0.5, steps=15)),
    forget_after=40,
)

RECOVERY_STREAMS: tuple[Stream, ...] = (
    Stream(
        name="recover-skips",
        about="Six batches with a NaN loss: the run goes back once and leaves them out.",
        steps=120,
        seed=41,
        events=(Event(step=60, until=65, tensor="loss", value=math.nan),),
        optimizer=_ADAM,
        recovery=_POLICY,
        compiled_in="all-zero",
        expected=Expected(plain=SURVIVES, guarded=SURVIVES, rewinds=1),
        tolerance=_ADAM_TOLERANCE,
    ),
    Stream(
        name="recover-runaway",
        about="Thirty batches with gradients of 100 times the norm: finite, so that nothing is skipped, and "
        "plain SGD is moved far away. Two rewinds leave them out.",
        steps=120,
        seed=42,
        events=(Event(step=60, until=89, tensor="all", factor=100.0),),
        recovery=_POLICY,
        most_moved=0.6,
        compiled_in="clip-rules",
        expected=Expected(plain=FAILS, guarded=SURVIVES, skips=0, rewinds=2),
    ),
    Stream(
        name="recover-stops",
        about="From one batch on, all are bad: the run stops in its last good state when nothing helps.",
        steps=120,
        seed=43,
        events=(Event(step=60, until="end", tensor=1, value=math.nan),),
        optimizer=_ADAM,
        recovery=_POLICY,
        compiled_in="all-zero",
        expected=Expected(plain=DIES, guarded=STOPS, rewinds=2),
        tolerance=_ADAM_TOLERANCE,
    ),
)
