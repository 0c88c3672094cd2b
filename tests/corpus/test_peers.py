"""What the benchmark reads from the output of other tools, and the tables made of its figures."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.diagnosis import COLUMNS, PEERS, Said
from tests.corpus.case import FRAMEWORKS, bad_line

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "diagnosis.json"


def said(framework: str, tool: str, kind: str, name: str) -> tuple[Said, Any]:
    module = importlib.import_module(f"tests.corpus.{kind}.{name}")
    program = getattr(module, f"in_{framework}")()
    return PEERS[framework][tool](program, f"{name}.py"), module


# (framework, tool, case) -> whether the guilty line is named, and the operation.
WORDS = [
    ("torch", "torch.autograd.detect_anomaly", "where_trap_sqrt", True, "sqrt"),
    ("torch", "torch.autograd.detect_anomaly", "fully_masked_row", False, "mul"),
    ("jax", "jax_debug_nans", "acos_beyond_one", True, "acos"),
    ("jax", "jax_debug_nans + jax_debug_infs", "log_of_zero", True, "log"),
    ("jax", "checkify float_checks", "acos_beyond_one", True, "acos"),
    ("jax", "checkify float_checks", "division_by_own_sum", True, "div"),
]


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize(("framework", "tool", "name", "line", "operation"), WORDS)
def test_the_output_of_a_tool_is_parsed(
    framework: str, tool: str, name: str, line: bool, operation: str
) -> None:
    heard, module = said(framework, tool, "failing", name)
    assert heard.text
    assert (heard.line == bad_line(module, framework)[1]) is line
    assert heard.operation == operation


@pytest.mark.parametrize("tool", PEERS["jax"])
def test_a_tool_without_output_found_nothing(tool: str) -> None:
    assert said("jax", tool, "healthy", "double_where")[0] == Said()


def test_anomaly_detection_does_not_see_an_infinite_loss() -> None:
    assert said("torch", "torch.autograd.detect_anomaly", "failing", "log_of_zero")[0] == Said()


def test_the_figures_keep_the_documented_promises() -> None:
    report = json.loads(RESULTS.read_text(encoding="utf-8"))
    for framework in FRAMEWORKS:
        corpus = report["corpus"][framework]
        ours = corpus["tools"][f"stablenum_{framework}.replay"]
        assert ours["line and operation"] >= 0.95 * corpus["with an operation"]
        assert ours["cause"] >= 0.9 * corpus["failures"]
        assert ours["false alarms"] == 0
        assert corpus["tools"].keys() == {f"stablenum_{framework}.replay", *PEERS[framework]}
        assert report["explanation"][framework]["parameters"] > 3_000_000
        assert report["explanation"][framework]["seconds"] < 15
    with_it, without = (report["steady"][name] for name in ("explain at hand", "taken out"))
    for count in ("operations", "passes over the parameters", "waits"):
        assert with_it[count] == without[count]


def test_the_tables_have_one_row_per_tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(RESULTS.parents[2] / "docs"))
    tables = importlib.import_module("tables")
    tables.write_diagnosis(RESULTS, tmp_path)
    text = (tmp_path / "diagnosis-accuracy.md").read_text(encoding="utf-8")
    for tools in PEERS.values():
        for tool in tools:
            (row,) = (line for line in text.splitlines() if f"`{tool}`" in line)
            assert row.count("|") == len(COLUMNS) + 4
    assert (tmp_path / "diagnosis-cost.md").read_text(encoding="utf-8").count("seconds") == 1
    with pytest.raises(FileNotFoundError, match="python -m benchmarks diagnosis"):
        tables.write_diagnosis(tmp_path / "diagnosis.json", tmp_path)
