"""What the page shows is what the commands print."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_diff_examples import without_numbers

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
TEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "test_numerics.py"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the example."""
    shutil.copytree(ROOT / "examples" / "numerics", tmp_path / "example")
    return tmp_path / "example"


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "CI" and not k.startswith("PYTEST_")}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def shown(begin: str) -> list[str]:
    """The lines of a block of the page, without the first ones that name the command and the dots."""
    block = next(b for b in re.findall(r"^```(?:console|text)\n(.*?)^```", PAGE, re.M | re.S) if begin in b)
    lines = [line for line in block.splitlines() if not line.startswith(("$", "...", "=", "_"))]
    return [line for line in without_numbers("\n".join(lines)) if line and "made with" not in line]


def assert_shown(block: list[str], printed: str) -> None:
    lines = without_numbers(printed)
    for line in block:
        assert any(own.startswith(line) for own in lines), (line, printed)


@pytest.mark.slow
def test_the_first_run_and_the_planted_change_are_as_shown(folder: Path) -> None:
    first = run(folder, *TEST)
    assert first.returncode == 0
    assert_shown(shown("recorded. Commit it"), first.stdout)
    model = folder / "model.py"
    text = model.read_text()
    model.write_text(
        text.replace("(self.up(self.norm2(x))))", '(self.up(self.norm2(x)), approximate="tanh"))')
    )
    red = run(folder, *TEST)
    assert red.returncode == 1
    assert_shown(shown("gelu_variant"), red.stdout)
    assert run(folder, *TEST, "--numerics-update").returncode == 0
    assert run(folder, *TEST).returncode == 0


@pytest.mark.slow
def test_a_softmax_in_half_precision_is_as_shown(folder: Path) -> None:
    run(folder, *TEST)
    model = folder / "model.py"
    text = model.read_text()
    model.write_text(text.replace(".softmax(-1)", ".bfloat16().softmax(-1).float()"))
    assert_shown(shown("lower_precision"), run(folder, *TEST).stdout)


@pytest.mark.slow
def test_the_gaps_of_the_log_probabilities_are_as_shown(folder: Path) -> None:
    assert run(folder, sys.executable, "logprobs.py", "rope").returncode == 0
    printed = run(folder, sys.executable, "-m", "stablenum", "diff", "engine.npz", "logprobs.py").stdout
    assert_shown(shown("logprobs.py rope"), printed)
