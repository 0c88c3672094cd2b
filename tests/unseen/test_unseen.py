"""What ``stablenum explain`` says of programs that were written without sight of the library.

Each program is the work of someone who had read neither the library nor its tests, with a fault from a public
report or from experience; the healthy ones do unusual things with NaN and inf. ``expected.json`` says what is
wrong with each and which lines are right answers, in its author's words, and what was right when the tool saw
the program for the first time ("as_found"). "still" gives the reason where the line is not right today.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.selection import of_kind

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "diagnosis-accuracy.md"
PROGRAMS: dict[str, dict[str, Any]] = json.loads((HERE / "expected.json").read_text(encoding="utf-8"))


def explained(name: str) -> subprocess.CompletedProcess[str]:
    path = HERE / f"{name}.py"
    line = [sys.executable, "-m", "stablenum", "explain", path.name]
    return subprocess.run(line, capture_output=True, text=True, cwd=path.parent, timeout=280)


@pytest.mark.slow
@pytest.mark.parametrize("name", of_kind("failing", PROGRAMS))
def test_the_line_at_fault_is_named(name: str) -> None:
    result = explained(name)
    place = re.search(rf"^{Path(name).name}\.py:(\d+): ", result.stdout, re.MULTILINE)
    assert place is not None, result.stdout + result.stderr
    assert int(place[1]) in PROGRAMS[name]["lines"], result.stdout
    assert result.returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", of_kind("healthy", PROGRAMS))
def test_a_healthy_program_is_not_blamed(name: str) -> None:
    result = explained(name)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_page_gives_the_figures_as_they_were_found() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for framework, title in (("torch", "PyTorch"), ("jax", "JAX")):
        for number in sorted({program["round"] for program in PROGRAMS.values()}):
            all_of_them = [
                p for name, p in PROGRAMS.items() if name.startswith(framework) and p["round"] == number
            ]
            if not all_of_them:
                continue
            failing = [p["as_found"] for p in all_of_them if p["kind"] == "failing"]
            healthy = [p["as_found"] for p in all_of_them if p["kind"] == "healthy"]
            right = [
                f"{sum(p[what] for p in failing)} of {len(failing)}" for what in ("line", "cause", "remedy")
            ]
            blamed = f"{sum(p['blamed'] for p in healthy)} of {len(healthy)}"
            assert f"| {title}, round {number} | {' | '.join([*right, blamed])} |" in page
