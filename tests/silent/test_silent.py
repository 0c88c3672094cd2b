"""What ``stablenum checkup`` says of programs that fail to learn although no number is NaN or inf.

Each was written by someone who had read neither the library nor its tests. ``expected.json`` says what is
wrong, in its author's words, which lines are right answers, and which finding comes first today. "set" is
"tuned" for programs that the rules were tuned to, "blind" for those that were run once after that; of these,
"as_found" says what was right when they were run. "still" gives the reason where the answer is wrong today.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.checkups import run_checkup
from tests.selection import of_kind

HERE = Path(__file__).parent
NUMBERS = ["first", "second", "third", "fourth", "fifth"]
ROUNDS = [(letter, f"{word} round") for letter, word in zip("bcdef", NUMBERS, strict=True)]
PAGE = HERE.parents[1] / "docs" / "checkup.md"
PROGRAMS: dict[str, dict[str, Any]] = json.loads((HERE / "expected.json").read_text(encoding="utf-8"))


def checked(name: str, target: Path) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    path = HERE / f"{name}.py"
    return run_checkup(path.name, path.parent, target, "--once")


@pytest.mark.slow
@pytest.mark.parametrize("name", of_kind("broken", PROGRAMS))
def test_the_fault_is_the_first_finding(name: str, tmp_path: Path) -> None:
    result, report = checked(name, tmp_path / "report.json")
    assert result.returncode == 1, result.stdout + result.stderr
    first, wanted = report["complaints"][0], PROGRAMS[name]
    places = [place["line"] for place in (first["place"], *first["places"]) if place is not None]
    assert first["symptom"] == wanted["finding"], result.stdout
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
    blind = [p for name, p in PROGRAMS.items() if name.startswith(f"{framework}/{letter}")]
    assert {p["set"] for p in blind} == {"blind"}
    broken = [p["as_found"] for p in blind if p["kind"] == "broken"]
    healthy = [p["as_found"]["blamed"] for p in blind if p["kind"] == "healthy"]
    right = [f"{sum(p[what] for p in broken)} of {len(broken)}" for what in ("symptom", "place")]
    assert f"| {title}, {round_} | {' | '.join(right)} | {sum(healthy)} of {len(healthy)} |" in page


def test_every_program_has_an_answer() -> None:
    files = {f"{path.parent.name}/{path.stem}" for path in HERE.glob("*/*.py")}
    assert files == set(PROGRAMS)
