"""The benchmark of the page of a run measures a page, and the table shows what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import report_page

ROOT = Path(__file__).parents[2]


@pytest.fixture
def table(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return __import__("runs").write_report_page


def test_the_table_shows_the_results(table, tmp_path):
    results = ROOT / "benchmarks" / "results" / "report.json"
    report = json.loads(results.read_text(encoding="utf-8"))
    table(results, tmp_path)
    text = (tmp_path / "report-page.md").read_text(encoding="utf-8")
    assert "| 1 run of 100,000 steps | 3 runs of 100,000 steps |" in text
    for page in report["pages"]:
        for name in ("interactive", "zoom_in", "move", "whole_run", "point"):
            times = [page["browser"][key]["median_ms"] for key in (name, f"{name}_cpu")]
            assert f" {times[0]:.0f} ({times[1]:.0f}) " in text
    del report["pages"][0]["browser"]["move"]
    (tmp_path / "report.json").write_text(json.dumps(report), encoding="utf-8")
    with pytest.raises(KeyError, match="move"):
        table(tmp_path / "report.json", tmp_path)


@pytest.mark.slow  # opens a page of some runs in a browser a dozen times
def test_the_benchmark_measures_a_page(monkeypatch, table, tmp_path):
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not any(map(report_page.shutil.which, report_page.NAMES)):
        pytest.skip(f"none of {', '.join(report_page.NAMES)} is installed")
    monkeypatch.setattr(report_page, "STEPS", 500)
    monkeypatch.setattr(report_page, "ROUNDS", 2)
    said: list[str] = []
    report = report_page.run(said.append)
    assert [page["runs"] for page in report["pages"]] == [1, 3]
    assert len(said) == 2
    for page in report["pages"]:
        assert all(0 < time["median_ms"] <= time["most_ms"] for time in page["browser"].values())
    assert report["training"]["step_us"] > 0
    (tmp_path / "report.json").write_text(json.dumps(report), encoding="utf-8")
    table(tmp_path / "report.json", tmp_path)


def test_without_a_browser_the_benchmark_says_so(monkeypatch):
    monkeypatch.setattr(report_page.shutil, "which", lambda name: None)
    with pytest.raises(report_page.BenchmarkError, match=r"none of chromium, .* is installed"):
        report_page.run(print)
