"""The benchmark runs at a small size; its figures for memory are exact and do not need a quiet machine."""

from __future__ import annotations

import pytest

from benchmarks import losses


@pytest.mark.slow(reason="measures memory at a size that takes 10 s")
def test_no_more_memory_than_the_peers_and_the_same_results() -> None:
    report = losses.run(rows=512, classes=4096, items=2**21, rounds=2)
    assert len(report) == 4
    for row in report.values():
        peer, ours = row["peak_bytes"].values()
        assert 0 < ours <= 1.001 * peer
