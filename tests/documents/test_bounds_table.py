"""The table of how near healthy programs come to the rules of the checkup is whole, and of today's bounds."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import bounds
from stablenum.diagnosis.checkup import rules_data, rules_flow, rules_functions, rules_updates
from stablenum.diagnosis.checkup.course import NOT_DOWN, PARTLY_DOWN, Course, Loss, ParameterSeen, Probe
from stablenum.diagnosis.checkup.ranking import complaints
from stablenum.diagnosis.checkup.symptoms import Symptom

ROOT = Path(__file__).parents[2]
REPORT: dict[str, Any] = json.loads(bounds.RESULTS.read_text(encoding="utf-8"))


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that writes the table."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    spec = importlib.util.spec_from_file_location("bounds_page", ROOT / "docs" / "bounds.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bounds_page", module)
    spec.loader.exec_module(module)
    return module


def test_every_symptom_has_a_row_with_the_nearest_programs_first(page: ModuleType, tmp_path: Path) -> None:
    page.write_bounds(bounds.RESULTS, tmp_path)
    lines = (tmp_path / "checkup-bounds.md").read_text(encoding="utf-8").splitlines()
    rows = {line.split("`")[1] for line in lines if line.startswith("| `")}
    assert rows == {symptom.value for symptom in Symptom}
    for symptom in bounds.RULES:
        margins = [margin for margin, *_ in page.nearest(REPORT, symptom.value)]
        assert margins == sorted(margins, reverse=True)


def test_the_programs_are_those_of_the_corpus_and_healthy() -> None:
    assert set(REPORT) <= set(bounds.programs())
    assert {name for name in bounds.programs() if "/methods/" in name} <= set(REPORT)


@pytest.mark.parametrize("symptom", list(bounds.RULES))
def test_no_healthy_program_is_beyond_a_bound(symptom: Symptom) -> None:
    beyond = {n for n, rules in REPORT.items() if min(c[-1] for c in rules.get(symptom.value, [[0.0]])) > 1}
    assert not beyond


@pytest.mark.parametrize(
    ("symptom", "allowed"),
    [
        (Symptom.SATURATED, {rules_functions._SATURATED, PARTLY_DOWN}),
        (Symptom.DEAD_UNITS, {rules_functions._DEAD}),
        (Symptom.EXPLODING_GRADIENTS, {rules_flow._GRADIENT_RATIO, PARTLY_DOWN}),
        (Symptom.LOST_UPDATES, {rules_updates._MOSTLY}),
        (Symptom.CONSTANT_OUTPUT, {rules_data._CONSTANT, 0.9}),
    ],
)
def test_what_was_recorded_is_of_the_bounds_of_today(symptom: Symptom, allowed: set[float]) -> None:
    recorded = {c[2] for rules in REPORT.values() for c in rules.get(symptom.value, [])}
    assert recorded == allowed


@pytest.mark.parametrize("change", [0.05, 0.09, 0.11, 0.5])
@pytest.mark.parametrize("last", [1.0, 0.95, 0.88, 0.5])
def test_a_margin_is_above_1_where_the_rule_speaks(change: float, last: float) -> None:
    one = ParameterSeen("w", (4, 4), "float32", weight=1.0, update=change)
    run = Course(
        framework="torch",
        steps=8,
        probes=[Probe(step=i, parameters=(one,)) for i in range(8)],
        losses=[Loss(i, 1.0 if i < 2 else last) for i in range(8)],
    )
    found = [c.symptom for c in complaints(run)]
    margin = bounds.least(bounds.measured(run)[Symptom.STEPS_TOO_LARGE.value])
    assert (margin > 1) is (Symptom.STEPS_TOO_LARGE in found)
    assert (margin > 1) is (change > 0.1 and 1 - last < NOT_DOWN)
    assert not math.isnan(margin)
