"""What the tests of Hugging Face's libraries share: runs of the common loops, and missing partners."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from benchmarks.partners.batches import BAD, STEPS
from benchmarks.partners.judge import Verdict, judge
from benchmarks.partners.outcome import Fault, Outcome
from benchmarks.partners.torch_hf import LOOPS
from stablenum import Reason

GRADIENT = {Reason.INF_GRADIENT, Reason.NAN_GRADIENT}
REASONS = {
    Fault.NAN_BATCH: {Reason.NONFINITE_LOSS},
    Fault.INF_GRADIENT: GRADIENT,
    Fault.LOSS_SPIKE: {Reason.SPIKE_LOSS},
    Fault.FP16_OVERFLOW: {*GRADIENT, Reason.NONFINITE_LOSS},
    Fault.NAN_IN_BATCHNORM: {Reason.NONFINITE_LOSS},
}
WELL = Verdict(finite=True, bit_equal=True, visible=True, scheduler_held=True, resumes=True)


@functools.cache
def run(loop: str, fault: Fault, *, guarded: bool) -> Outcome:
    """Run a loop once, whoever asks for it."""
    return LOOPS[loop](fault, guarded=guarded)


def check_guarded(loop: str, fault: Fault) -> None:
    """Check that a guarded run with a fault ends like the run without the bad batch, shows it and resumes."""
    outcome = run(loop, fault, guarded=True)
    assert judge(outcome) == WELL
    check_same(outcome.state, outcome.reference.state)
    assert [row["guard/applied"] for row in outcome.log] == [i != BAD for i in range(STEPS)]
    assert [row["guard/skipped_total"] for row in outcome.log] == [i >= BAD for i in range(STEPS)]
    assert Reason(outcome.log[BAD]["guard/reason"]) in REASONS[fault]


def alone(loop: str, fault: Fault) -> Verdict:
    """Return the verdict on a partner without a guard."""
    return judge(run(loop, fault, guarded=False))


def bits(state: Any) -> dict[str, bytes]:
    return {name: np.asarray(value).tobytes() for name, value in state.items()}


def check_same(one: Any, other: Any) -> None:
    assert len(one) > 8
    assert {name for name, value in bits(one).items() if value != bits(other).get(name)} == set()
    assert set(one) == set(other)
