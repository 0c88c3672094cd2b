"""What the pages say of small steps under ``stablenum explain`` is what was measured."""

from __future__ import annotations

import importlib
import json
import re
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import watching

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "small-steps.json"
REPORT: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))


def page(name: str) -> str:
    return " ".join((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8").split())


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that writes the table."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("tables")


def test_the_table_shows_every_script(tables: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="python -m benchmarks small-steps"):
        tables.write_small_steps(tmp_path / "small-steps.json", tmp_path)
    tables.write_small_steps(RESULTS, tmp_path)
    shown = (tmp_path / "small-steps.md").read_text(encoding="utf-8")
    assert [f"{framework} {o}" for framework, (_, names) in watching._SMALL.items() for o in names] == list(
        REPORT["small_steps"]
    )
    for row in REPORT["small_steps"].values():
        assert f"| {row['ms']:.2f} | {row['explain_ms']:.2f} | {row['ratio']:.1f} |" in shown
    assert f"torch {REPORT['versions']['torch']}" in shown
    assert "{include} _build/generated/small-steps.md" in page("cost")


@pytest.mark.parametrize("name", ["cost", "diagnosis"])
def test_the_pages_give_the_range_that_was_measured(name: str) -> None:
    found = re.findall(
        r"a step of ([\d.]+) to ([\d.]+) ms takes ([\d.]+) to ([\d.]+) times as long", page(name)
    )
    rows = REPORT["small_steps"].values()
    times, ratios = ([row[key] for row in rows] for key in ("ms", "ratio"))
    measured = (f"{min(times):.1f}", f"{max(times):.1f}", f"{min(ratios):.1f}", f"{max(ratios):.1f}")
    assert found == [measured]


def test_each_side_counts_with_its_fastest_run(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []
    known: Counter[tuple[object, ...]] = Counter()

    def output(script: str, arguments: tuple[str, ...], command: tuple[str, ...]) -> str:
        runs.append("watched" if command else "alone")
        known[script, arguments, command] += 1
        first = known[script, arguments, command] == 1
        return "0.6\n" if command and first else "0.7\n" if command else "0.5\n" if first else "0.4\n"

    monkeypatch.setattr(watching, "_output", output)
    found = watching.small_steps(lambda line: None)
    assert runs[:4] == ["alone", "watched", "alone", "watched"]
    assert {(row["ms"], row["explain_ms"], row["ratio"]) for row in found["small_steps"].values()} == {
        (0.4, 0.6, 1.5)
    }
