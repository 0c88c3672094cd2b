"""The benchmark of ranks, in small: one collective a step, of eight bytes a parameter tensor."""

from __future__ import annotations

import math

import pytest

from benchmarks import repeats
from benchmarks.ranks import jax_ranks, run, torch_ranks
from benchmarks.steps.errors import NoisyError


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    monkeypatch.setattr(repeats, "LEAST", 2)
    monkeypatch.setattr(repeats, "MOST", 3)
    monkeypatch.setattr(repeats, "PAUSE_S", 0.0)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def test_two_ranks_join_their_norms_in_one_collective():
    (row,) = run.run(worlds=(2,), rounds=4, bound=math.inf, frameworks=("torch",))
    assert (row["framework"], row["ranks"], row["processes"]) == ("torch", 2, 2)
    counts = {name: (v["collectives"], v["bytes"]) for name, v in row["variants"].items()}
    assert counts["stablenum"] == (1, 8 * len(torch_ranks.SHAPES))
    assert counts["bare"] == (0, 0)
    assert counts["norm, finiteness and clip by hand"] == (2, 8)
    assert all(v["median_ms"] > 0 for v in row["variants"].values())


def test_two_devices_join_their_norms_in_one_collective():
    (row,) = run.run(worlds=(2,), rounds=4, bound=math.inf, frameworks=("jax",))
    counts = {name: v["collectives"] for name, v in row["variants"].items()}
    assert counts["bare"] == 0
    assert counts["stablenum"] == 1
    # Four bytes a tensor.
    assert row["variants"]["stablenum"]["bytes"] == 4 * jax_ranks.TENSORS
    assert counts["apply_if_finite + clip"] >= 2


def test_an_uncertainty_beyond_the_bound_is_no_result(monkeypatch):
    asked = []

    def restless(world, rounds):
        asked.append((world, rounds))
        return {"samples": {"bare": [1.0] * 4, "stablenum": [1.0 + len(asked)] * 4}, "counts": {}}

    monkeypatch.setattr(run, "MEASURE", {"torch": restless})
    with pytest.raises(NoisyError, match=r"torch, 2 ranks: an uncertainty of \d+% is beyond 10%"):
        run.run(worlds=(2,), rounds=10, frameworks=("torch",))
    assert asked == [(2, 10)] * 3
