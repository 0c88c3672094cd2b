"""The guard on two ranks, with DDP and FSDP2: a fault on one rank is skipped on both."""

from __future__ import annotations

import pytest

from benchmarks.partners.judge import Verdict, judge
from benchmarks.partners.outcome import Fault
from benchmarks.partners.torch_ranks import LOOPS

ONE_RANK = "nan_loss_on_one_rank"
GOOD = Verdict(finite=True, bit_equal=True, visible=True, scheduler_held=True, resumes=True)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*Fault, ONE_RANK])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_guarded_run_ends_bit_equal_to_the_run_without_the_bad_batch(loop, fault):
    assert judge(LOOPS[loop](fault, guarded=True)) == GOOD


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
def test_trap_a_nan_on_one_rank_alone_poisons_both(loop):
    verdict = judge(LOOPS[loop](ONE_RANK, guarded=False))
    assert not verdict.finite
    assert not verdict.visible  # rank 0 has an ordinary loss


def test_a_run_that_takes_too_long_is_ended(monkeypatch):
    monkeypatch.setattr("benchmarks.partners.torch_ranks.LIMIT", 0.0)
    with pytest.raises(TimeoutError, match="ddp with nan_batch had not ended after 0 seconds"):
        LOOPS["ddp"](Fault.NAN_BATCH, guarded=True)
