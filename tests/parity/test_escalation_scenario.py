"""A training run that fails in float16 alone: escalation makes it succeed, and nothing else does."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from stablenum.commands.compare.agreement import Trace
from stablenum.commands.compare.backends import BACKENDS
from stablenum.commands.compare.backends.numpy_models import evaluate
from stablenum.commands.compare.builtin import SCENARIOS
from stablenum.commands.compare.runner import run_guarded, run_scenario
from stablenum.commands.compare.scenarios import Outcome, Training
from stablenum.commands.compare.scenarios.training_data import batch_at, data_of, initial_params
from stablenum.formats import FORMATS
from stablenum.guard.config import GuardConfig
from stablenum.guard.reasons import Reason
from stablenum.rules.escalation import EscalatePrecision
from stablenum.rules.loss_scale import DynamicLossScale
from tests.selection import only

SCENARIO = SCENARIOS["escalate-fp16"]
assert isinstance(SCENARIO, Training)
BAD = [fault.step for fault in SCENARIO.faults]


def guarded_by(**fields: object) -> Training:
    return dataclasses.replace(SCENARIO, guard=dataclasses.replace(SCENARIO.guard, **fields))


def loss_of(trace: Trace) -> float:
    return evaluate(SCENARIO, trace.params, data_of(SCENARIO), "loss")


@functools.cache
def escalating() -> Trace:
    return run_guarded(SCENARIO, BACKENDS["numpy"])


def test_without_escalation_the_scenario_fails() -> None:
    result = run_scenario(guarded_by(escalate=None), [BACKENDS["numpy"]])
    assert result.outcome(result.guarded["numpy"]) == Outcome.FAILS
    assert result.guarded["numpy"].skipped == len(BAD)
    wanted = ["guarded: expected that it survives, but it fails", "numpy: expected 12 skipped steps, got 240"]
    assert all(any(words in surprise for surprise in result.surprises) for words in wanted)


def test_the_final_loss_is_as_good_as_in_float32() -> None:
    """The held-out loss is within 5 % of float32's; without escalation it is over three times as large."""
    alone = guarded_by(escalate=None)
    wide = run_guarded(dataclasses.replace(alone, compute="float32"), BACKENDS["numpy"])
    assert wide.skipped == 0
    assert loss_of(escalating()) <= 1.05 * loss_of(wide)
    assert loss_of(run_guarded(alone, BACKENDS["numpy"])) > 3 * loss_of(wide)


def test_no_loss_scale_helps() -> None:
    """The forward pass overflows by a wide margin on the bad batches, and is far from it on the others."""
    for params in (initial_params(SCENARIO), escalating().params):
        largest = [abs(batch_at(SCENARIO, step).x @ params[0]).max() for step in range(SCENARIO.steps)]
        assert min(np.take(largest, BAD)) > 1.5 * FORMATS["float16"].max
        assert max(np.delete(largest, BAD)) < 1e-3 * FORMATS["float16"].max
    low = guarded_by(escalate=None, loss_scale=DynamicLossScale(init_scale=1.0, min_scale=2.0**-20))
    assert run_guarded(low, BACKENDS["numpy"]).skipped == len(BAD)


def test_the_format_goes_to_float32_and_back() -> None:
    """Three skips, then sixty float32 steps, four times over; the last is 12 steps after the bad stretch."""
    rows = escalating().rows
    skipped = [step for step, row in enumerate(rows) if not row.applied]
    assert skipped == [start + i for start in (30, 93, 156, 219) for i in range(3)]
    assert {rows[step].reason for step in skipped} == {Reason.NONFINITE_LOSS}
    wide = [step for step, row in enumerate(rows) if row.precision_level == 1]
    assert wide == [step for step in range(33, 282) if step not in skipped]
    assert {row.precision_level for row in rows} == {0, 1}


@pytest.mark.parametrize("backend", only(["numpy", "torch"], ["numpy", "torch", "jax-jit"]))
def test_an_escalation_from_another_format_changes_nothing(backend: str) -> None:
    """A guard may be used with any scenario; the computation keeps the scenario's format."""
    other = GuardConfig(escalate=EscalatePrecision(after=1, formats=("bfloat16", "float32")))
    assert SCENARIO.ladder(other) == SCENARIO.ladder(None) == ("float16",)
    short = dataclasses.replace(guarded_by(escalate=other.escalate), steps=34)
    trace = run_guarded(short, BACKENDS[backend])
    assert [row.applied for row in trace.rows] == [True] * 30 + [False] * 4
    assert [row.precision_level for row in trace.rows] == [0] * 31 + [1] * 3
