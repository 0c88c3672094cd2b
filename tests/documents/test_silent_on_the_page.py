"""The page on the checkup has the figures of the first run of each set."""

from __future__ import annotations

import json

import pytest

from tests.silent.test_silent import PROGRAMS, ROOT

NUMBERS = ["first", "second", "third", "fourth", "fifth"]
ROUNDS = [(letter, f"{word} round") for letter, word in zip("bcdef", NUMBERS, strict=True)]
PAGE = ROOT / "docs" / "checkup.md"
FIRST_RUN = ROOT / "corpus" / "results" / "stablenum-checkup-first-run.json"


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
