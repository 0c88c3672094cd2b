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
NUMBERS = ["first", "second", "third", "fourth", "fifth"]
ROUNDS = [(letter, f"{word} round") for letter, word in zip("bcdef", NUMBERS, strict=True)]
PAGE = ROOT / "docs" / "checkup.md"
FIRST_RUN = ROOT / "corpus" / "results" / "stablenum-checkup-first-run.json"
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


@pytest.mark.parametrize(("letter", "round_"), ROUNDS)
@pytest.mark.parametrize(("framework", "title"), [("torch", "PyTorch"), ("jax", "JAX")])
def test_the_page_gives_the_figures_as_they_were_found(
    framework: str, title: str, letter: str, round_: str
) -> None:
    page = PAGE.read_text(encoding="utf-8")
    records = json.loads(FIRST_RUN.read_text(encoding="utf-8"))["programs"]
    names = [name for name in PROGRAMS if name.startswith(f"{framework}/{letter}")]
    assert {PROGRAMS[name]["set"] for name in names} == {"held_out"}
    found = {name: records[name.replace("/", "/silent/")]["judged"] for name in names}
    broken = [found[name] for name in names if PROGRAMS[name]["kind"] == "failing"]
    healthy = [found[name]["detected"] for name in names if PROGRAMS[name]["kind"] == "healthy"]
    right = [f"{sum(p[what] for p in broken)} of {len(broken)}" for what in ("cause", "line")]
    assert f"| {title}, {round_} | {' | '.join(right)} | {sum(healthy)} of {len(healthy)} |" in page


def test_what_is_missed_is_a_failing_program() -> None:
    assert all(PROGRAMS[name]["kind"] == "failing" for name in MISSED)
