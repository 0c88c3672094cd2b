"""What ``stablenum explain`` says of programs that were written without sight of the library.

The programs are in ``corpus/unseen``, where ``answers.json`` says what is wrong with each and which lines are
right answers. What was right when the tool saw a program for the first time is a result file of the corpus.
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

ROOT = Path(__file__).parents[2]
HERE = ROOT / "corpus" / "unseen"
# Why the line is not right today.
STILL = {
    "jax/f10": "the script silences NumPy's warnings, so nothing names the line that made the captured array",
}
PROGRAMS: dict[str, dict[str, Any]] = json.loads((HERE / "answers.json").read_text(encoding="utf-8"))
for missed, reason in STILL.items():
    PROGRAMS[missed]["still"] = reason


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
