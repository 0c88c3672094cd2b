"""The ways of running a training: without protection, and with what is meant to bring it back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.recovery.data import Batch
from benchmarks.recovery.faults import Planted
from benchmarks.recovery.runs import EVALUATE_AT, STEPS, Run
from stablenum import MeanStdSpikeGuard, RecoveryStopped
from stablenum.typing import Response

__all__ = ["CHECKPOINT_EVERY", "WAYS", "Outcome", "same_data"]

CHECKPOINT_EVERY = 100
MOST_LOADS = 5
# Chosen on the digits with seed 0, and used for all trainings. The defaults are for runs of many thousands of
# steps; here each number of steps is smaller. A fault may stay hidden for 100 steps.
GUARD: dict[str, Any] = {}
POLICY: dict[str, Any] = {
    "every": 25,
    "good_after": 100,
    "window": 64,
    "runaway_steps": 10,
    "runaway_threshold": 3.0,
    "forget_after": 100,
    "responses": (
        Response(skip_further=100),
        Response(older=1, skip_further=100),
        Response(older=2, skip_further=200, clip=1.0, steps=50),
    ),
}

# Makes a run, with a guard of these settings or without one.
MakeRun = Callable[[dict[str, Any] | None], Run]
At = Callable[[int], Batch]


@dataclass
class Outcome:
    """How a training went.

    Attributes:
        run: at its end.
        losses: of the steps in the final state's past, by step.
        evaluations: by the number of steps before them.
        positions: where the batches of the steps in the final state's past were read, by step.
        ended: whether it made all its steps.
        made: how many steps it made, with those that were undone.
        attempts: how often it went back.
        why: of what it stopped or went back.
    """

    run: Run
    losses: dict[int, float] = field(default_factory=dict)
    evaluations: dict[int, float] = field(default_factory=dict)
    positions: dict[int, int] = field(default_factory=dict)
    ended: bool = False
    made: int = 0
    attempts: int = 0
    why: list[str] = field(default_factory=list)


def _plainly(run: Run, at: At, planted: Planted) -> Outcome:
    outcome = Outcome(run)
    for step in range(STEPS):
        planted.before(run, step)
        outcome.losses[step] = run.step(planted.batch(step, at(step)))
        if step + 1 in EVALUATE_AT:
            outcome.evaluations[step + 1] = run.evaluate()
    outcome.made, outcome.ended = STEPS, True
    return outcome


def no_protection(make: MakeRun, at: At, planted: Planted) -> Outcome:
    """A plain optimizer."""
    return _plainly(make(None), at, planted)


def single_step_skip(make: MakeRun, at: At, planted: Planted) -> Outcome:
    """Skip a step that is not finite, or whose loss or norm is 6 standard deviations above the last 128.

    The rule is that of OLMo-core's ``SkipStepOptimizer`` (``rolling_interval_length=128``,
    ``sigma_factor=6``) and of MaxText's ``skip_step_on_spikes``, which follows it. Neither looks at anything
    but the step.
    """
    return _plainly(make({"spike": MeanStdSpikeGuard(window=128, threshold=6.0)}), at, planted)


def last_checkpoint(make: MakeRun, at: At, planted: Planted) -> Outcome:
    """Save every 100 steps; load what was saved last when a loss, also an evaluation's, is NaN or infinite.

    The same data come again. After ``MOST_LOADS`` loads the run is given up.
    """
    run = make(None)
    outcome, step = Outcome(run), 0
    saved, at_step = run.save(), 0
    while step < STEPS:
        if step % CHECKPOINT_EVERY == 0:
            saved, at_step = run.save(), step
        planted.before(run, outcome.made)
        loss = outcome.losses[step] = run.step(planted.batch(step, at(step)))
        outcome.made += 1
        step += 1
        if step in EVALUATE_AT:
            outcome.evaluations[step] = run.evaluate()
        if math.isfinite(loss) and math.isfinite(outcome.evaluations.get(step, 0.0)):
            continue
        outcome.why.append(f"NaN or inf after step {step - 1}")
        if outcome.attempts == MOST_LOADS:
            return outcome
        outcome.attempts += 1
        run.load(saved)
        step = at_step
    outcome.ended = True
    return outcome


def recovery(make: MakeRun, at: At, planted: Planted) -> Outcome:
    """``Recovery`` with ``POLICY``, and a guard with its defaults."""
    run = make(GUARD)
    outcome = Outcome(run)
    recovery = run.recovery(lambda position: (position, planted.batch(position, at(position))), **POLICY)
    try:
        for position, batch in recovery.batches(steps=STEPS):
            planted.before(run, outcome.made)
            outcome.losses[recovery.step] = run.step(batch)
            outcome.positions[recovery.step] = position
            outcome.made += 1
            if recovery.step + 1 in EVALUATE_AT:
                found = outcome.evaluations[recovery.step + 1] = run.evaluate()
                recovery.evaluated(found)
        outcome.ended = True
    except RecoveryStopped as stopped:
        outcome.why.append(str(stopped))
    outcome.attempts = len(recovery.events)
    outcome.why[:0] = [str(event) for event in recovery.events]
    return outcome


def same_data(make: MakeRun, at: At, outcome: Outcome) -> Outcome:
    """A clean run that reads what is in the past of a run's final state: without faults, and in one go."""
    run = make(GUARD)
    control = Outcome(run, ended=True, made=STEPS)
    for step in range(STEPS):
        control.losses[step] = run.step(at(outcome.positions[step]))
    return control


WAYS: dict[str, Callable[[MakeRun, At, Planted], Outcome]] = {
    "no protection": no_protection,
    "single-step skip": single_step_skip,
    "last checkpoint": last_checkpoint,
    "Recovery": recovery,
}
