"""The example of a run that goes back ends as its page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_page_shows_what_the_example_prints() -> None:
    program = "examples/recovery/digits.py"
    command = [sys.executable, program]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    page = (ROOT / "docs" / "recover.md").read_text(encoding="utf-8")
    shown = re.search(rf"^\$ python {re.escape(program)}\n(.*?)^```", page, re.M | re.S)
    assert shown is not None
    printed = result.stdout.splitlines()
    # The last digit of a figure may move with the versions of torch; steps and batches may not.
    assert [_without_fractions(line) for line in printed] == [
        _without_fractions(line) for line in shown[1].splitlines()
    ]
    clean, hurt, recovered = (float(re.findall(r"([\d.]+)%", line)[0]) for line in printed[:3])
    assert hurt < 20
    assert recovered > clean - 2


def _without_fractions(line: str) -> str:
    return re.sub(r"\d+\.\d+", "#", line)
