"""Neither ``stablenum checkup`` nor ``explain`` blames the healthy programs of ``corpus/methods``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkups import run_checkup

FOLDER = Path(__file__).parents[2] / "corpus" / "methods"
PROGRAMS = sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.glob("*/*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_above_a_note_is_found_in_a_sound_method(name: str, tmp_path: Path) -> None:
    path = FOLDER / f"{name}.py"
    result, report = run_checkup(str(path), tmp_path, tmp_path / "report.json", "--once")
    assert report["ok"], result.stdout
    assert result.returncode == 0, result.stderr
    assert "watching failed" not in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_sound_method_has_nothing_to_explain(name: str, tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    line = [sys.executable, "-m", "stablenum", "explain", str(FOLDER / f"{name}.py"), "--json", str(target)]
    # To record every step, as --once does, takes minutes in PyTorch, and seconds in JAX.
    once = ["--once"] if name.startswith("jax/") else []
    result = subprocess.run([*line, *once], capture_output=True, text=True, cwd=tmp_path, timeout=280)
    report = json.loads(target.read_text(encoding="utf-8"))
    assert (report["ok"], report["verdict"]) == (True, None), result.stdout + result.stderr
    assert "complaints" not in report, result.stdout
    assert result.returncode == 0, result.stderr


def test_each_method_is_there_in_both_frameworks() -> None:
    names = {
        framework: {n.split("/")[1] for n in PROGRAMS if n.startswith(framework)}
        for framework in ("torch", "jax")
    }
    assert names["torch"] == names["jax"]
    assert len(names["torch"]) > 20
