"""The benchmark of what a recovery adds to a training, at a small size."""

from __future__ import annotations

import math

import pytest

from benchmarks import recovery_cost
from benchmarks.__main__ import _recovery_table
from stablenum_torch._recovery.findings import Search
from stablenum_torch._recovery.state import RunState


@pytest.mark.parametrize("framework", recovery_cost.FRAMEWORKS)
def test_a_training_with_snapshots_is_compared_with_one_without(framework: str) -> None:
    (row,) = recovery_cost.run(rounds=2, widths=(8,), frameworks=(framework,), stretch=100)
    assert row["framework"] == framework
    assert row["state_bytes"] >= 3 * 4 * 8 * 8 * 4  # four layers, and two moments of each
    assert row["snapshot_bytes"] >= row["state_bytes"]
    assert set(row["variants"]) == {"plain", "checked", "snapshots"}
    assert row["variants"]["plain"]["ratio_to_plain"] == 1.0
    assert all(0 < v["ms_per_step"] < math.inf for v in row["variants"].values())
    assert _recovery_table(row).row_count == 3


def test_each_variant_does_what_its_name_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import recovery_torch

    made: list[str] = []
    capture, findings = RunState.capture, Search.findings
    monkeypatch.setattr(RunState, "capture", lambda self: made.append("snapshot") or capture(self))
    monkeypatch.setattr(Search, "findings", lambda self, **how: made.append("check") or findings(self, **how))
    for name, snapshots, checks in (("plain", 0, 0), ("checked", 1, 10), ("snapshots", 2, 10)):
        training = recovery_torch.training(8, recovery_cost.VARIANTS[name])
        made.clear()
        training.steps(101)
        assert (made.count("snapshot"), made.count("check")) == (snapshots, checks), name
