"""The loops of JAX partners with one bad batch: what becomes of them alone and with a guard."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.partners.batches import BAD, STEPS
from benchmarks.partners.jax_loops import LOOPS
from benchmarks.partners.judge import Verdict, judge
from benchmarks.partners.outcome import Fault
from tests.selection import slow_but_for

GOOD = Verdict(finite=True, bit_equal=True, visible=True, scheduler_held=True, resumes=True)
# Each loop and each fault; a step in float16 is compiled by itself, so there are few of them.
ALWAYS = [
    ("optax", Fault.FP16_OVERFLOW),
    ("flax TrainState", Fault.NAN_BATCH),
    ("flax nnx.Optimizer", Fault.NAN_IN_BATCHNORM),
    ("equinox", Fault.NAN_IN_BATCHNORM),
    ("optax.MultiSteps", Fault.NAN_BATCH),
    ("Orbax", Fault.LOSS_SPIKE),
    ("optax.apply_if_finite", Fault.LOSS_SPIKE),
    ("flax DynamicScale", Fault.INF_GRADIENT),
    ("jmp", Fault.INF_GRADIENT),
    ("Keras on JAX", Fault.NAN_IN_BATCHNORM),
]
CASES = list(itertools.product(LOOPS, Fault))


@pytest.mark.parametrize(("loop", "fault"), slow_but_for(ALWAYS, CASES))
def test_with_a_guard_a_bad_batch_leaves_no_trace_but_in_the_log(loop: str, fault: Fault) -> None:
    outcome = LOOPS[loop](fault, True)
    assert judge(outcome) == GOOD
    applied = [bool(row["applied"]) for row in outcome.log]
    assert applied == [i != BAD for i in range(STEPS)]


ALONE = [
    ("optax", Fault.INF_GRADIENT, {"finite", "visible", "scheduler_held"}),
    ("flax TrainState", Fault.NAN_BATCH, {"finite", "scheduler_held"}),
    ("optax.MultiSteps", Fault.NAN_BATCH, {"finite", "scheduler_held"}),
    ("optax.apply_if_finite", Fault.NAN_BATCH, {"finite"}),
    ("optax.apply_if_finite", Fault.LOSS_SPIKE, {"scheduler_held"}),
    ("flax DynamicScale", Fault.INF_GRADIENT, {"scheduler_held"}),
    ("jmp", Fault.INF_GRADIENT, set()),
    ("Keras on JAX", Fault.NAN_IN_BATCHNORM, {"finite", "visible", "scheduler_held"}),
]


@pytest.mark.parametrize(
    ("loop", "fault", "lost"), ALONE, ids=[f"{loop}-{fault}" for loop, fault, _ in ALONE]
)
def test_alone_a_bad_batch_changes_the_training(loop: str, fault: Fault, lost: set[str]) -> None:
    verdict = judge(LOOPS[loop](fault, False))
    assert {name for name, value in vars(verdict).items() if not value} == {"bit_equal", *lost}


def test_without_a_fault_a_run_is_not_compared_and_nothing_is_skipped() -> None:
    outcome = LOOPS["optax"](None, True)
    assert outcome.reference is None
    assert all(row["applied"] for row in outcome.log)
    assert outcome.schedule == tuple(map(float, range(1, STEPS + 1)))
