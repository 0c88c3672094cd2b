"""The benchmark of ranks, in small: one collective a step, of eight bytes a parameter tensor."""

from __future__ import annotations

from benchmarks import ranks


def test_two_ranks_join_their_norms_in_one_collective(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    (row,) = ranks.run(worlds=(2,), rounds=4)
    assert row["ranks"] == 2
    counts = row["of one step"]
    assert counts["stablenum"] == {"collectives": 1, "bytes": 8 * len(ranks.SHAPES)}
    assert counts["bare"]["collectives"] == 0
    assert counts["norm, finiteness and clip by hand"]["collectives"] == 2
    assert all(time["median_ms"] > 0 for time in row["times"].values())
