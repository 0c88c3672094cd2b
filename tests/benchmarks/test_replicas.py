"""The benchmark of comparing replicas, at a small size."""

from __future__ import annotations

import math

import pytest

from benchmarks import repeats, replicas


@pytest.mark.slow(reason="starts processes of two replicas")
@pytest.mark.parametrize("framework", replicas.FRAMEWORKS)
def test_a_checked_step_is_compared_with_one_that_is_not(framework, monkeypatch):
    monkeypatch.setattr(repeats, "LEAST", 2)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    small = {"rounds": 3, "bound": math.inf, "shapes": ((50, 4),) * 2}
    (row,) = replicas.run(frameworks=(framework,), **small)
    assert (row["framework"], row["parameters"], row["processes"]) == (framework, 400, 2)
    assert row["variants"]["checked"]["ratio_to_bare"] > 0
