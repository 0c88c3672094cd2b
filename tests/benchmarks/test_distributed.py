"""The benchmark of the guard beside clipping by hand, at a small size, and the tables made from it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.distributed import run, worker
from benchmarks.steps.errors import BenchmarkError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def ranks(monkeypatch):
    """The module of the docs folder that writes the tables."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return __import__("ranks")


@pytest.mark.slow(reason="starts processes of several ranks")
def test_two_ranks_are_measured_and_decide_in_one_collective(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    rows = run.run(worlds=(2,), launches=2, rounds=3, layers=3, width=16)
    assert [(row["layout"], row["ranks"], row["tensors"]) for row in rows] == [("fsdp2", 2, 6), ("ddp", 2, 6)]
    for row in rows:
        counts = {name: (v["collectives"], v["bytes"]) for name, v in row["variants"].items()}
        assert counts["bare"] == (0, 0)
        assert counts[worker.OURS] == (1, 16 * 2)
        assert counts[worker.EXACT] == (1, 80 * 2)
        # DTensors' norms are reduced one by one in one message, and the loss in another.
        assert counts[worker.BY_HAND] == ((2, 4 * 6 + 4) if row["layout"] == "fsdp2" else (1, 4))


def test_a_rank_that_fails_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(BenchmarkError, match="a rank of 2 failed"):
        run.launch(2, 3, 0, 3, 16)


def test_figures_are_means_over_launches(ranks, tmp_path):
    def part(ours):
        samples = {"bare": [1.0] * 3, worker.BY_HAND: [3.0] * 3, worker.OURS: [ours] * 3}
        return {"samples": samples, "counts": {n: {"collectives": 1, "bytes": 32} for n in samples}}

    row = run.row("fsdp2", 2, [part(2.0), part(2.2)], layers=3, width=16)
    ours = row["variants"][worker.OURS]
    assert (ours["extra_ms"], ours["extra_over_peers"]) == (1.1, 0.55)
    assert ours["extra_ms_within"] == pytest.approx(12.706 * 0.1, abs=1e-4)
    report = {"machine": {"cpu_count": 2, "architecture": "x86_64"}, "python": "3", "rows": [row]}
    results = tmp_path / "distributed.json"
    results.write_text(json.dumps(report | {"versions": {"torch": "2", "torchtitan": None}}), "utf-8")
    ranks.write_distributed(results, tmp_path)
    text = (tmp_path / "distributed.md").read_text(encoding="utf-8")
    assert "|  | stablenum | 1.10 ± 1.27 | 0.55 ± 0.64 | 1 | 32 |" in text
    assert "torch 2." in text
    assert "torchtitan" not in text


def test_without_results_the_page_says_how_to_measure(ranks, tmp_path):
    ranks.write_distributed(tmp_path / "missing.json", tmp_path)
    assert "python -m benchmarks distributed" in (tmp_path / "distributed.md").read_text(encoding="utf-8")


def test_the_model_of_all_reduces(ranks, tmp_path):
    assert ranks.all_reduce_us(8, 1, 0) == pytest.approx(4.4 + 2 * 7 * 0.52)
    assert ranks.all_reduce_us(8, 128, 0) == pytest.approx(4.4 + 2 * (7 * 0.936 + 7 * 5.0))
    ranks.write_ranks_model(tmp_path)
    text = (tmp_path / "ranks-model.md").read_text(encoding="utf-8")
    guard = next(line for line in text.splitlines() if line.startswith("| the guard |"))
    assert guard.endswith(f"| {4.4 + 2 * (7 * 0.936 + 7 * 5.0) + 16 * 1024 / (80 / 3.8 / 2 * 1e3):.0f} |")
    page = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    for name in ("distributed", "ranks-model"):
        assert f"{{include}} _build/generated/{name}.md" in page
