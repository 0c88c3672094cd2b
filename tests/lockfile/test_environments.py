"""A program is recorded in one virtual environment and compared in another one, with the other framework."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.forking import FRESH

ROOT = Path(__file__).parents[2]
PROGRAMS = {"torch": "torch_program.py", "jax": "jax_program.py"}


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The interpreter of an environment with PyTorch alone, and of one with JAX alone."""
    found = {}
    for framework in PROGRAMS:
        folder = tmp_path_factory.mktemp(framework)
        subprocess.run([FRESH, "-m", "venv", folder], check=True)
        python = folder / "bin" / "python"
        install = [python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt"]
        subprocess.run([*install, f"{ROOT}[{framework},cli]"], check=True)
        found[framework] = python
    return found


def run(python: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [python, "-m", "stablenum", *arguments], env=env, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize(("here", "there"), [("torch", "jax"), ("jax", "torch")])
def test_a_recording_of_one_framework_is_compared_where_only_the_other_one_is_installed(
    environments: dict[str, Path], here: str, there: str, tmp_path: Path
) -> None:
    golden = tmp_path / "golden.snum"
    made = run(environments[here], "record", ROOT / "tests" / "lockfile" / PROGRAMS[here], "-o", golden)
    assert made.returncode == 0, made.stderr
    missing = subprocess.run([environments[there], "-c", f"import {here}"], capture_output=True, check=False)
    assert missing.returncode != 0  # it is not installed there
    program = ROOT / "tests" / "lockfile" / PROGRAMS[there]
    for sides in ((golden, program), (program, golden)):
        same = run(environments[there], "diff", *sides)
        assert same.returncode == 0, same.stdout + same.stderr
        assert "the same in exact arithmetic" in same.stdout
    other = tmp_path / "other.py"
    text = program.read_text(encoding="utf-8")
    assert text.count("1e-5") == 1
    other.write_text(text.replace("1e-5", "1e-6"), encoding="utf-8")
    differs = run(environments[there], "diff", golden, other)
    assert differs.returncode == 1, differs.stdout + differs.stderr
    assert "epsilon_value" in differs.stdout
