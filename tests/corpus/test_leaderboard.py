"""The page is made from the result files, and these are complete."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from corpus import Task
from corpus.judging import score
from corpus.labels import read
from corpus.runner import chosen

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "corpus" / "results"
ENTRIES = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("*.json")}
LABELS = read()


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("leaderboard")


@pytest.mark.parametrize("name", ENTRIES)
def test_a_result_covers_whole_sets(name: str) -> None:
    entry = ENTRIES[name]
    assert not entry.get("not_run")
    programs = entry["programs"]
    assert programs
    for framework, kind in {(Task(program).framework, Task(program).set) for program in programs}:
        wanted = set(chosen(framework, [kind]))
        if entry.get("first_run"):
            wanted = {program for program in wanted if LABELS[program]["status"] == "held_out"}
        assert wanted == {p for p in programs if (Task(p).framework, Task(p).set) == (framework, kind)}
    text = json.dumps(entry)
    assert "/tmp" not in text
    assert "/home" not in text


def test_every_tool_has_its_row_and_figures_of_tuned_programs_stand_apart(board: Any, tmp_path: Path) -> None:
    board.write_leaderboard(RESULTS, tmp_path)
    assert (tmp_path / "leaderboard-tuned.md").read_text("utf-8").count("| `stablenum`, **tuned** |") == 2
    for name, (sets, _) in board.BOARDS.items():
        text = (tmp_path / f"leaderboard-{name}.md").read_text(encoding="utf-8")
        shown = set(re.findall(r"^\| `(.+?)`", text, re.MULTILINE))
        assert shown == {
            entry["tool"]
            for entry in ENTRIES.values()
            if any(Task(program).set in sets for program in entry["programs"])
        }
    seen = {LABELS[p]["status"] for p in LABELS if Task(p).set in board.BOARDS["tuned"][0]}
    assert seen == {"tuned"}
    assert {LABELS[p]["status"] for p in LABELS if Task(p).set == "unseen"} == {"held_out"}


def test_a_row_counts_what_is_right(board: Any, tmp_path: Path) -> None:
    names = ["torch/failing/sqrt_at_zero", "torch/failing/log_of_zero", "torch/healthy/causal_mask"]
    line = LABELS[names[0]]["lines"][0]
    answers = [
        {"detected": True, "line": line, "operation": "SqrtBackward0", "cause": "domain", "seconds": 2.0},
        {"error": "no answer in 1 s", "seconds": 1.0},
        {"detected": True, "seconds": 1.0},
    ]
    facts = {"machine": {"cpu_count": 2, "architecture": "x"}, "python": "3", "versions": {"torch": "9"}}
    entry = {"tool": "mine", "programs": dict(zip(names, answers, strict=True)), **facts}
    (tmp_path / "mine.json").write_text(json.dumps(entry), encoding="utf-8")
    board.write_leaderboard(tmp_path, tmp_path)
    text = (tmp_path / "leaderboard-tuned.md").read_text(encoding="utf-8")
    assert "| tool | detected, of 2 | line, of 2 | operation, of 2 | cause, of 2 | false alarms |" in text
    assert "| `mine` | 50% (1) | 50% (1) | 50% (1) | – | 1 of 1 | 1 | 4 |" in text
    assert "### PyTorch: 2 failing, 1 healthy" in text
    assert "\n2 cores, x, Python 3, torch 9.\n" in text
    with pytest.raises(FileNotFoundError, match="python -m corpus run"):
        board.write_leaderboard(tmp_path / "nothing", tmp_path)


def test_the_page_shows_all_boards() -> None:
    page = (ROOT / "docs" / "leaderboard.md").read_text(encoding="utf-8")
    for board in ("held-out", "tuned", "silent"):
        assert f"{{include}} _build/generated/leaderboard-{board}.md" in page


def test_our_own_figures_keep_the_documented_promises() -> None:
    """95 % of lines and operations, 90 % of causes, on the programs that the diagnosis is tuned to."""

    for framework in ("torch", "jax"):
        programs = ENTRIES[f"stablenum-{framework}"]["programs"]
        total = score(LABELS, programs, programs)
        assert total.right["line"] >= 0.95 * total.of["line"]
        assert total.right["operation"] >= 0.95 * total.of["operation"]
        assert total.right["cause"] >= 0.9 * total.of["cause"]
        assert total.alarms == total.errors == []


def test_the_table_of_costs_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    tables = importlib.import_module("tables")
    kept = ROOT / "benchmarks" / "results" / "diagnosis.json"
    tables.write_diagnosis(kept, tmp_path)
    assert (tmp_path / "diagnosis-cost.md").read_text(encoding="utf-8").count("seconds") == 1
    report = json.loads(kept.read_text(encoding="utf-8"))
    with_it, without = (report["steady"][name] for name in ("explain at hand", "taken out"))
    for count in ("operations", "passes over the parameters", "waits"):
        assert with_it[count] == without[count]
    for explanation in report["explanation"].values():
        assert explanation["parameters"] > 3_000_000
        assert explanation["seconds"] < 15
    with pytest.raises(FileNotFoundError, match="python -m benchmarks diagnosis"):
        tables.write_diagnosis(tmp_path / "diagnosis.json", tmp_path)
