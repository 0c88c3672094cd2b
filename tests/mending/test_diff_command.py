"""``stablenum diff --fix``: what it prints, writes and returns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mending.ports import PORT, with_mistakes

GELU = ", approximate=False)", ")"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "COLUMNS": "200"}
    command = [sys.executable, "-m", "stablenum", "diff", *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_a_proven_change_is_shown_and_then_written(tmp_path: Path) -> None:
    port, mistaken = tmp_path / "port.py", with_mistakes(GELU)
    port.write_text(mistaken)
    found = run(tmp_path, "port.py", "--fix", "--json", "report.json")
    assert found.returncode == 4, found.stderr
    assert "+    hidden = jax.nn.gelu((x - mean) / jnp.sqrt(var + 1e-3) @ params" in found.stdout
    assert port.read_text() == mistaken
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["stages"] == {"outputs": "differs", "gradients": "differs", "training": "differs"}
    (fix,) = report["fixes"]
    assert fix["proven"]
    assert fix["evidence"] == (
        "In a separate process, all results agree in float64: 1 loss, 3 gradients, 3 updated parameters, "
        "at the programs' own weights and, for one more step, at others."
    )
    (tmp_path / "fix.patch").write_text(fix["patch"])
    subprocess.run(["git", "apply", "fix.patch"], cwd=tmp_path, check=True)
    assert port.read_text() == PORT


@pytest.mark.slow
def test_a_change_is_written_with_a_copy_beside_it(tmp_path: Path) -> None:
    (tmp_path / "port.py").write_text(with_mistakes(GELU))
    found = run(tmp_path, "port.py", "--fix", "--write")
    assert found.returncode == 4, found.stderr
    assert (tmp_path / "port.py").read_text() == PORT
    assert (tmp_path / "port.py.bak").read_text() == with_mistakes(GELU)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["port.py", "port.py.bak"]
    found = run(tmp_path, "port.py", "--fix", "--write")
    assert found.returncode == 0, found.stdout
    assert not (tmp_path / "port.py.bak1").exists()


@pytest.mark.slow
def test_what_is_not_mended_leaves_the_file_alone(tmp_path: Path) -> None:
    mistaken = with_mistakes(('params["up"], app', '(params["up"] * 2 + jnp.sin(params["up"])), app'))
    (tmp_path / "port.py").write_text(mistaken)
    found = run(tmp_path, "port.py", "--fix", "--write")
    assert found.returncode == 1
    assert "no change is proven, and nothing was written: " in found.stderr
    assert (tmp_path / "port.py").read_text() == mistaken
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["port.py"]


@pytest.mark.slow
def test_the_left_side_is_mended_if_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "port.py").write_text(with_mistakes(("F.gelu((x", "F.silu((x")))
    found = run(tmp_path, "port.py", "--fix", "--side", "left", "--write")
    assert found.returncode == 4, found.stderr
    assert (tmp_path / "port.py").read_text() == PORT


@pytest.mark.slow
def test_a_module_beside_the_file_is_mended_against_a_recording(tmp_path: Path) -> None:
    loss = PORT[PORT.index("def loss_of") : PORT.index("def right")]
    (tmp_path / "losses.py").write_text("import jax\nimport jax.numpy as jnp\n\n\n" + loss.replace(*GELU))
    rest = PORT.replace(loss, "").replace(
        "import stablenum_jax\n", "import stablenum_jax\nfrom losses import loss_of\n"
    )
    (tmp_path / "golden.py").write_text(PORT)
    (tmp_path / "port.py").write_text(rest)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    record = [sys.executable, "-m", "stablenum", "record", "golden.py", "-o", "golden.snum", "--side", "left"]
    subprocess.run(record, cwd=tmp_path, env=env, check=True)
    found = run(tmp_path, "golden.snum", "port.py", "--side", "right", "--fix", "--write")
    assert found.returncode == 4, found.stderr + found.stdout
    assert "approximate=False" in (tmp_path / "losses.py").read_text()
    assert (tmp_path / "port.py").read_text() == rest


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("port.py", "--write"), "needs --fix"),
        (("port.py", "--side", "left"), "needs --fix, or two files"),
    ],
)
def test_options_that_need_others(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    (tmp_path / "port.py").write_text("")
    found = run(tmp_path, *arguments)
    assert found.returncode == 2
    assert said in found.stderr


@pytest.mark.slow
def test_a_recording_cannot_be_mended(tmp_path: Path) -> None:
    (tmp_path / "port.py").write_text(PORT)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    record = [sys.executable, "-m", "stablenum", "record", "port.py", "-o", "golden.snum", "--side", "left"]
    subprocess.run(record, cwd=tmp_path, env=env, check=True)
    found = run(tmp_path, "port.py", "golden.snum", "--side", "right", "--fix")
    assert found.returncode == 2
    assert "golden.snum is a recording: give it as LEFT" in found.stderr
