"""sentence-transformers' trainer with a guard: each fault leaves no trace."""

from __future__ import annotations

import pytest

from benchmarks.partners.outcome import Fault
from tests.partners.hugging_face import alone, check_guarded


@pytest.mark.parametrize("fault", Fault)
def test_a_bad_batch_leaves_no_trace(fault):
    check_guarded("sentence-transformers", fault)


@pytest.mark.parametrize("fault", [Fault.NAN_IN_BATCHNORM, Fault.LOSS_SPIKE])
def test_trap_the_trainer_alone_applies_the_bad_batch(fault):
    verdict = alone("sentence-transformers", fault)
    assert not verdict.bit_equal
    assert not verdict.scheduler_held
