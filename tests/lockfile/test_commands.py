"""``stablenum record``, and ``stablenum diff`` with recordings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import stablenum
from tests.lockfile.data import WEIGHTS, X
from tests.lockfile.torch_program import in_torch

PROGRAM = "from tests.lockfile.torch_program import in_torch\n\n\ndef program():\n    return in_torch({})\n"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with a program, a changed one and a pair."""
    (tmp_path / "same.py").write_text(PROGRAM.format(""))
    (tmp_path / "other.py").write_text(PROGRAM.format("epsilon=1e-6"))
    pair = PROGRAM.format("").replace("program()", "left()")
    pair += "\n\ndef right():\n    return in_torch(rate=0.1)\n"
    (tmp_path / "pair.py").write_text(pair)
    (tmp_path / "fails.py").write_text("def program():\n    raise OSError('no data')\n")
    stablenum.save_program(in_torch(), tmp_path / "golden.snum")
    return tmp_path


def run(here: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stablenum", *arguments]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(command, cwd=here, env=env, capture_output=True, text=True, check=False)


def test_a_program_is_recorded_and_compared(here: Path) -> None:
    found = run(here, "record", "same.py", "-o", "new.snum", "--steps", "2")
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("new.snum: ")
    assert "2 training steps" in found.stdout
    assert run(here, "diff", "new.snum", "same.py").returncode == 0
    found = run(here, "diff", "other.py", "new.snum", "--json", "report.json")
    assert found.returncode == 1
    assert "epsilon_value" in found.stdout
    assert not json.loads((here / "report.json").read_text())["ok"]


@pytest.mark.slow
def test_a_side_of_a_pair_is_recorded(here: Path) -> None:
    assert run(here, "record", "pair.py", "-o", "left.snum", "--side", "left").returncode == 0
    assert run(here, "diff", "left.snum", "same.py").returncode == 0
    assert run(here, "diff", "left.snum", "pair.py", "--side", "right").returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("record", "same.py", "-o", "new.txt"), "must end in .snum"),
        (("record", "none.py", "-o", "new.snum"), "none.py"),
        (("record", "pair.py", "-o", "new.snum"), "choose with --side"),
        (("record", "fails.py", "-o", "new.snum"), "failed, line 2: OSError: no data"),
        (("diff", "golden.snum"), "name the other one, too"),
        (("diff", "golden.snum", "fails.py"), "failed, line 2: OSError: no data"),
        (("diff", "golden.snum", "same.py", "--steps", "2"), "as many as were recorded"),
        (("diff", "broken.snum", "same.py"), "is not a recording"),
        (("diff", "same.py", "--side", "left"), "needs two files"),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_a_sentence(
    here: Path, arguments: tuple[str, ...], said: str
) -> None:
    (here / "broken.snum").write_text("nothing")
    found = run(here, *arguments)
    assert found.returncode == 2
    assert said in " ".join(found.stderr.replace("│", " ").split())
    assert "Traceback" not in found.stderr
    assert not (here / "new.snum").exists()


@pytest.mark.slow
def test_named_arrays_are_compared_with_a_program(here: Path) -> None:
    hidden = np.tanh(X @ WEIGHTS["up"].T + WEIGHTS["up_bias"])
    np.savez(here / "engine.npz", hidden=hidden, centred=hidden - hidden.mean(-1, keepdims=True) * 1.001)
    found = run(here, "diff", "engine.npz", "same.py")
    assert found.returncode == 1
    assert "hidden: the same as tanh" in found.stdout
    assert "centred: differs from" in found.stdout


@pytest.mark.slow
def test_two_folders_may_have_modules_of_one_name(here: Path) -> None:
    program = "import torch\nimport stablenum_torch\nfrom model import act\n\n\n"
    program += "def program():\n    return stablenum_torch.program(act, torch.linspace(-2, 2, 9))\n"
    for name, function in (("old", "tanh"), ("new", "sin")):
        (here / name).mkdir()
        (here / name / "model.py").write_text(f"from torch import {function} as act\n")
        (here / name / "prog.py").write_text(program)
    assert run(here, "diff", "old/prog.py", "old/prog.py").returncode == 0
    found = run(here, "diff", "old/prog.py", "new/prog.py")
    assert found.returncode == 1, found.stdout
    assert "tanh" in found.stdout
    assert "sin" in found.stdout
