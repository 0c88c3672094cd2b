"""``stablenum explain --fix``: what it prints, writes and returns."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stablenum.diagnosis.watch.edit_trials import tried
from stablenum.diagnosis.watch.plan import Failure, Outcome

TORCH = '''"""A mean over the rows of a mask, one of which has none."""
import torch

torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(20):
    x = torch.randn(8, 3)
    mask = torch.zeros(8) if step == 6 else torch.ones(8)
    per = (model(x)[:, 0] - x.sum(1)) ** 2
    loss = (per * mask).sum() / mask.sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
'''
JAX = """import jax
import jax.numpy as jnp
from losses import masked

step = jax.jit(jax.value_and_grad(masked))
w = jnp.ones(3)
for i in range(12):
    x = jax.random.normal(jax.random.key(i), (8, 3))
    mask = jnp.zeros(8) if i == 5 else jnp.ones(8)
    loss, grad = step(w, x, mask)
    w = w - 0.01 * grad
"""
LOSSES = "def masked(w, x, mask):\n    per = (x @ w) ** 2\n    return (per * mask).sum() / mask.sum()\n"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "stablenum", "explain", *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_a_proven_change_is_written_with_an_import_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TORCH)
    done = run(tmp_path, "train.py", "--fix", "--write", "--json", "report.json")
    assert done.returncode == 4, done.stderr
    (fix,) = json.loads((tmp_path / "report.json").read_text())["fixes"]
    assert fix["proven"]
    assert "the 6 losses before it are the same" in fix["evidence"]
    text = (tmp_path / "train.py").read_text()
    assert text == TORCH.replace("import torch\n", "import torch\nimport stablenum_torch\n").replace(
        "(per * mask).sum() / mask.sum()",
        "stablenum_torch.numerics.divide((per * mask).sum(), mask.sum(), fill=0.0)",
    )
    assert (tmp_path / "train.py.bak").read_text() == TORCH


@pytest.mark.slow
def test_a_module_of_jax_is_mended_where_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(JAX)
    (tmp_path / "losses.py").write_text(LOSSES)
    done = run(tmp_path, "train.py", "--fix", "--json", "report.json")
    assert done.returncode == 4, done.stderr
    (fix,) = json.loads((tmp_path / "report.json").read_text())["fixes"]
    assert "+    return stablenum_jax.numerics.divide(" in fix["patch"]
    assert "losses before it are the same" in fix["evidence"]
    assert (tmp_path / "losses.py").read_text() == LOSSES
    (tmp_path / "fix.patch").write_text(fix["patch"])
    subprocess.run(["git", "apply", "fix.patch"], cwd=tmp_path, check=True)
    ast.parse((tmp_path / "losses.py").read_text())
    assert run(tmp_path, "train.py", "--fix").returncode == 0


@pytest.mark.slow
def test_healthy_and_failing_scripts_get_no_patch(tmp_path: Path) -> None:
    (tmp_path / "healthy.py").write_text(TORCH.replace("step == 6", "step == 60"))
    (tmp_path / "fails.py").write_text("import torch\nraise OSError('no data')\n")
    for name, code in (("healthy.py", 0), ("fails.py", 3)):
        done = run(tmp_path, name, "--fix", "--write")
        assert done.returncode == code, done.stderr
        assert "+++" not in done.stdout
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["fails.py", "healthy.py"]


def test_options_that_need_others(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    assert run(tmp_path, "train.py", "--write").returncode == 2
    assert "--once" in run(tmp_path, "train.py", "--fix", "--once").stderr


LOSSES_BEFORE = [4.0, 3.0, 2.0, float("nan")]


@pytest.mark.parametrize(
    ("losses", "steps", "proven", "said"),
    [
        ([4.0, 3.0, 2.0, 1.0, 0.5], 5, True, "the 3 losses before it are the same"),
        ([4.0 * (1 + 2**-22), 3.0, 2.0, 1.0, 0.5], 5, True, "the same within 2 ulps of float32"),
        ([4.0 * (1 + 2**-18), 3.0, 2.0, 1.0, 0.5], 5, False, "but the losses before it differ, by 3.8e-06"),
        ([4.0, 3.0, 2.1, 1.0, 0.5], 5, False, "but the losses before it differ, by 0.048"),
        ([4.0, 3.0, 2.0, 1.0], 4, False, "the 3 losses before it are the same"),  # no step after it
        ([4.0, 3.0, 2.0, 1.0, 900.0], 5, False, ""),  # runs away
    ],
)
def test_what_was_finite_before_stays_as_it_was(
    losses: list[float], steps: int, proven: bool, said: str
) -> None:
    first = Outcome(failure=Failure(step=3, what="loss"), losses=LOSSES_BEFORE)
    result = tried(first, Outcome(steps=steps, losses=losses))
    assert result.proven is proven
    assert said in result.said
