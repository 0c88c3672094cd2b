"""The benchmark of ranks, in small: one collective a step, of eight bytes a parameter tensor."""

from __future__ import annotations

import math

import pytest

from benchmarks import ranks
from benchmarks.steps.errors import NoisyError


def test_two_ranks_join_their_norms_in_one_collective(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    (row,) = ranks.run(worlds=(2,), rounds=4, bound=math.inf)
    assert row["ranks"] == 2
    counts = row["of one step"]
    assert counts["stablenum"] == {"collectives": 1, "bytes": 8 * len(ranks.SHAPES)}
    assert counts["bare"]["collectives"] == 0
    assert counts["norm, finiteness and clip by hand"]["collectives"] == 2
    assert all(time["median_ms"] > 0 for time in row["times"].values())


def test_an_uncertainty_beyond_the_bound_is_no_result(monkeypatch):
    asked = []

    def restless(world, rounds):
        asked.append(rounds)
        return {"times": {"bare": {"uncertainty": 0.5}}}

    monkeypatch.setattr(ranks, "_one_world", restless)
    with pytest.raises(NoisyError, match="50% is beyond 15%"):
        ranks.run(worlds=(2,), rounds=10)
    assert asked == [10, 20, 30]
