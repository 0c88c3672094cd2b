"""What ``stablenum checkup`` says of programs that fail to learn although no number is NaN or inf.

The programs are in ``corpus/silent``, where ``answers.json`` says what is wrong with each, which lines are
right answers and which symptom is to be found first. "set" is "tuned" for programs that the rules were tuned
to, "held_out" for those that were run once after that; what was right then is a result file of the corpus.
``missed.json`` gives the reason where the symptom ("still") or the place ("place_still") is wrong today.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.checkups import run_checkup
from tests.selection import of_kind

ROOT = Path(__file__).parents[2]
HERE = ROOT / "corpus" / "silent"
MISSED = json.loads((Path(__file__).parent / "missed.json").read_text(encoding="utf-8"))
PROGRAMS: dict[str, dict[str, Any]] = {
    name: answer | MISSED.get(name, {})
    for name, answer in json.loads((HERE / "answers.json").read_text(encoding="utf-8")).items()
}


def checked(name: str, target: Path) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    path = HERE / f"{name}.py"
    return run_checkup(path.name, path.parent, target, "--once")


@pytest.mark.slow
@pytest.mark.parametrize("name", of_kind("failing", PROGRAMS))
def test_the_fault_is_the_first_finding(name: str, tmp_path: Path) -> None:
    result, report = checked(name, tmp_path / "report.json")
    assert result.returncode == 1, result.stdout + result.stderr
    first, wanted = report["complaints"][0], PROGRAMS[name]
    places = [place["line"] for place in (first["place"], *first["places"]) if place is not None]
    assert first["symptom"] == wanted["symptom"], result.stdout
    if not wanted.get("place_still"):
        assert not set(places).isdisjoint(wanted["lines"]), result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", of_kind("healthy", PROGRAMS))
def test_a_healthy_program_is_not_blamed(name: str, tmp_path: Path) -> None:
    result, report = checked(name, tmp_path / "report.json")
    assert report["ok"], result.stdout
    assert result.returncode == 0


def test_what_is_missed_is_a_failing_program() -> None:
    assert all(PROGRAMS[name]["kind"] == "failing" for name in MISSED)
