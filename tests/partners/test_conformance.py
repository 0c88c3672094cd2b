"""Every cell of the table on trainers under one bad batch, run again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.partners import table
from benchmarks.partners.loops import PARTNERS
from tests.selection import only

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "partners.json"
RUNS = [
    (name, variant, fault) for name, p in PARTNERS.items() for variant in table.VARIANTS for fault in p.faults
]


def measured() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))["partners"]
    return found


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize(("name", "variant"), dict.fromkeys(run[:2] for run in RUNS))
def test_each_cell_is_as_it_was_measured(name: str, variant: str) -> None:
    assert table.verdicts(name, variant) == measured()[name][variant]


# With a guard, all goes on as it was; what becomes of the training without one is no test of the library.
@pytest.mark.parametrize("variant", only(["guarded"], table.VARIANTS))
@pytest.mark.parametrize("name", only(["optax"], ["PyTorch, one process", "optax"]))
def test_some_cells_are_run_each_time(name: str, variant: str) -> None:
    expected = measured()[name][variant]["nan_batch"]
    assert table.verdicts(name, variant, ["nan_batch"]) == {"nan_batch": expected}


def test_a_run_that_does_not_end_counts_as_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_PATIENCE_S", 0.1)
    assert table.verdicts("optax", "alone", ["nan_batch"]) == {"nan_batch": {"ends": False}}


def test_a_run_that_fails_is_no_verdict() -> None:
    with pytest.raises(table.BenchmarkError, match="optax, alone"):
        table.verdicts("optax", "alone", ["no such fault"])
