"""The tables of the page on comparing two programs show what was measured."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import diff_peers
from benchmarks.diff_cost import row_of
from tests.pairs.judged import cases

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PEERS = RESULTS / "diff-peers.json"


@pytest.fixture
def diffs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the docs folder that writes the tables."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return __import__("diffs")


def test_the_page_includes_the_tables() -> None:
    page = (ROOT / "docs" / "diff.md").read_text(encoding="utf-8")
    conf = (ROOT / "docs" / "conf.py").read_text(encoding="utf-8")
    for name in ("diff-peers", "diff-cost"):
        written = f"write_{name.replace('-', '_')}(" in conf
        assert (f"{{include}} _build/generated/{name}.md" in page) == written
    assert "write_diff_peers(" in conf
    reference = (ROOT / "docs" / "diff-reference.md").read_text(encoding="utf-8")
    assert "{include} _build/generated/diff-causes.md" in reference
    assert "write_diff_causes(" in conf


def test_the_table_of_the_causes(diffs: ModuleType, tmp_path: Path) -> None:
    diffs.write_diff_causes(tmp_path)
    text = (tmp_path / "diff-causes.md").read_text(encoding="utf-8")
    assert "| `softmax_axis` | Take the softmax over the same axis. |" in text
    assert "1e-6 in flax. Where updates differ: Give both optimizers the same epsilon" in text


def test_the_results_are_of_the_pairs_that_there_are() -> None:
    report = json.loads(PEERS.read_text(encoding="utf-8"))
    within = list(cases("within").values())
    of = {
        "copied": [c for c in within if "both" in c],
        "rewritten": [c for c in within if "both" not in c],
        "ported": [case for _, case in diff_peers._ported()],
    }
    for part, pairs in of.items():
        for row in report[part].values():
            for phase in ("forward", "backward", "update"):
                assert row[phase]["pairs"] == sum(
                    c.get("phase") == phase for c in pairs if c["kind"] == "error"
                )
                assert row[phase]["place"] <= row[phase]["seen"] <= row[phase]["pairs"]
            assert row["equivalent"]["pairs"] == sum(c["kind"] == "equivalent" for c in pairs)
    assert set(diff_peers.PEERS) <= set(report["versions"])


def test_what_the_results_say_of_diff_is_what_the_tests_of_the_pairs_check() -> None:
    report = json.loads(PEERS.read_text(encoding="utf-8"))
    found = [diff_peers._checked("within", name) for name in cases("within")]
    rows = [report[part]["stablenum.diff, by both lines"] for part in ("copied", "rewritten")]
    right = sum(row[phase]["place"] for row in rows for phase in ("forward", "backward", "update"))
    assert right == sum(f.phase and f.left and f.right for f in found)
    assert sum(row["equivalent"]["false_alarms"] for row in rows) == 0


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
    cost = {"peak_mb": 900.0, "operations": 3909}
    rounds = [
        {
            "steps": steps,
            "alike": cost | {"diff": 10.0 + i},
            "recorded": cost | {"diff": 5.0, "record": 2.0 + i},
        }
        for i in (0, 1)
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
    assert "|  | the first from a file, recorded in 2.5 s | 3,909 | 5 | 10 ± 0 | 900 |" in text
