"""The promise of the smallest row: the guard adds less time than its peer."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import benchmarks.__main__ as command
from benchmarks.steps.errors import BenchmarkError
from benchmarks.steps.promises import SMALL, broken_promises
from benchmarks.steps.rows import LABELS, row_named
from benchmarks.steps.summary import PEER


def small_row(**extra_ms: float) -> dict[str, Any]:
    """The row of 10 k parameters, as it is written to the results; by default every variant adds 0.2 ms."""
    row = row_named(SMALL)
    added = dict.fromkeys(row.variants, 0.2) | {"bare": 0.0, PEER["torch"]: 0.3} | extra_ms
    variants = {name: {"label": LABELS[name], "extra_ms": extra} for name, extra in added.items()}
    return {"name": row.name, "peer": PEER["torch"], "variants": variants}


def test_a_guard_that_costs_less_than_its_peer_keeps_the_promise() -> None:
    assert broken_promises([small_row()]) == []


@pytest.mark.parametrize("name", ["idle", "fold"])
@pytest.mark.parametrize("extra", [0.3, 0.31, float("nan")])
def test_a_guard_that_costs_as_much_as_its_peer_breaks_the_promise(name: str, extra: float) -> None:
    (said,) = broken_promises([small_row(**{name: extra})])
    assert SMALL in said
    assert LABELS[name] in said
    assert "0.300 ms" in said


def test_other_rows_promise_nothing() -> None:
    other = copy.deepcopy(small_row(fold=9.0)) | {"name": "torch adamw fused 38M/108 float32"}
    assert broken_promises([other]) == []


def test_the_command_fails_after_it_has_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[str] = []

    def save(console: Any, name: str, *_: Any) -> list[dict[str, Any]]:
        saved.append(name)
        return [small_row(fold=0.5)]

    monkeypatch.setattr(command, "_save_steps", save)
    with pytest.raises(BenchmarkError, match="promise broken"):
        command._measure_steps(command.Console())
    assert saved == ["cpu.json"]
