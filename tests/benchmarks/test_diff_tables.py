"""The tables of the page on comparing two programs show what was measured."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.diff_cost import row_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def diffs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the docs folder that writes the tables."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return __import__("diffs")


def test_the_table_of_the_peers(diffs: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=re.escape("python -m benchmarks diff-peers")):
        diffs.write_diff_peers(tmp_path / "diff-peers.json", tmp_path)
    row = {
        p: {"pairs": 9, "seen": i + 1, "place": i} for i, p in enumerate(("forward", "backward", "update"))
    }
    row["equivalent"] = {"pairs": 7, "false_alarms": 4, "in_the_update": 2}
    report = {
        "machine": {"cpu_count": 2, "architecture": "x86_64"},
        "python": "3.11",
        "versions": {"flax": "1"},
    }
    report |= {"copied": {"tool": row}, "rewritten": {"tool": row}, "ported": {"other tool": row}}
    (tmp_path / "diff-peers.json").write_text(json.dumps(report), encoding="utf-8")
    diffs.write_diff_peers(tmp_path / "diff-peers.json", tmp_path)
    text = (tmp_path / "diff-peers.md").read_text(encoding="utf-8")
    assert "| tool | 1 / 0 | 2 / 1 | 3 / 2 | 4 | 2 |" in text
    assert "| other tool | 1 / 0 |" in text
    assert "27 mistakes, 7 pairs that agree" in text
    assert "2 cores, x86_64, Python 3.11, flax 1." in text


def test_the_table_of_the_cost(diffs: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=re.escape("python -m benchmarks diff`")):
        diffs.write_diff_cost(tmp_path / "diff.json", tmp_path)
    steps = {"torch": 0.3, "jax": 0.2, "peak_mb": 600.4}
    rounds = [
        {"steps": steps, "alike": {"diff": 10.0 + i, "peak_mb": 900.0, "operations": 3909}} for i in (0, 1)
    ]
    report = {
        "machine": {"cpu_count": 2, "architecture": "x86_64"},
        "python": "3.11",
        "versions": {"jax": "1"},
    }
    report["sizes"] = {"1M": row_of(rounds)}
    (tmp_path / "diff.json").write_text(json.dumps(report), encoding="utf-8")
    diffs.write_diff_cost(tmp_path / "diff.json", tmp_path)
    text = (tmp_path / "diff-cost.md").read_text(encoding="utf-8")
    assert "| 1M | plain steps |  | 0.50 | 1 | 600 |" in text
    assert "|  | programs that agree | 3,909 | 10 | 21 ± 13 | 900 |" in text
