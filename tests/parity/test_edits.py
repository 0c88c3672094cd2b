"""Safe functions in the user's own expressions: each edit runs, and changes only what was not finite."""

import importlib.util
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import stablenum_jax
import stablenum_torch
from stablenum.diagnosis.edits.safe_forms import edits_for
from tests.selection import slow_unless

INF, NAN = math.inf, math.nan
ROWS = [[1.0, 2.0], [-INF, -INF]]
# Expression, the arguments x and y at which it fails, and others at which it does not.
TORCH = {
    "x / y": ([1.0, 0.0], [0.0, 0.0], [1.0, 2.0], [3.0, -4.0]),
    "torch.div(x, y)": ([1.0, 0.0], [0.0, 1.0], [1.0, 2.0], [3.0, -4.0]),
    "x.div(y)": ([1.0, 0.0], [0.0, 1.0], [1.0, 2.0], [3.0, -4.0]),
    "(x * y).sum() / y.sum()": ([1.0, 2.0], [0, 0], [1.0, 2.0], [1, 1]),
    "(x * y).sum() / (y > 0).sum()": ([1.0, 2.0], [0, 0], [1.0, 2.0], [1, 1]),
    "1 / x": ([1.0, 0.0], [0.0], [1.0, 2.0], [0.0]),
    "torch.reciprocal(x)": ([1.0, 0.0], [0.0], [1.0, 2.0], [0.0]),
    "torch.log(x)": ([0.0, 1.0], [0.0], [3.0, 2.0], [0.0]),
    "(x + y).log()": ([0.0, 1.0], [0.0, 0.0], [3.0, 2.0], [1.0, 1.0]),
    "x.sqrt()": ([0.0, 4.0], [0.0], [3.0, 2.0], [0.0]),
    "x ** 0.5": ([0.0, 4.0], [0.0], [3.0, 2.0], [0.0]),
    "(x * x) ** (y / 2)": ([0.0, 2.0], [1.0, 1.0], [3.0, 2.0], [3.0, 3.0]),
    "x / x.norm(dim=-1, keepdim=True)": ([[0.0, 0.0]], [0.0], [[1.0, 2.0]], [0.0]),
    "x.pow(-1.5)": ([0.0, 4.0], [0.0], [3.0, 2.0], [0.0]),
    "torch.rsqrt(x)": ([0.0, 4.0], [0.0], [3.0, 2.0], [0.0]),
    "torch.acos(x)": ([1.0, 0.5], [0.0], [0.3, 0.2], [0.0]),
    "x.atanh()": ([1.0, 0.5], [0.0], [0.3, 0.2], [0.0]),
    "torch.sum(x * x, -1).sqrt()": ([[0.0, 0.0]], [0.0], [[1.0, 2.0]], [0.0]),
    "torch.softmax(x, -1)": (ROWS, [0.0], [[1.0, 2.0]], [0.0]),
    "x.log_softmax(dim=1)": (ROWS, [0.0], [[1.0, 2.0]], [0.0]),
    "x.logsumexp(-1)": (ROWS, [0.0], [[1.0, 2.0]], [0.0]),
    "torch.log(1 + torch.exp(x))": ([100.0, 1.0], [0.0], [1.0, -2.0], [0.0]),
    "torch.log(torch.sigmoid(x))": ([-200.0, 1.0], [0.0], [1.0, -2.0], [0.0]),
    "torch.log(1 - torch.sigmoid(x))": ([200.0, 1.0], [0.0], [1.0, -2.0], [0.0]),
    "torch.exp(x).sum(-1).log()": ([[100.0, 1.0]], [0.0], [[1.0, -2.0]], [0.0]),
    "torch.log(torch.softmax(x, -1))": ([[200.0, 1.0]], [0.0], [[1.0, -2.0]], [0.0]),
    "torch.exp(x) / torch.exp(x).sum(-1, keepdim=True)": ([[100.0, 1.0]], [0.0], [[1.0, -2.0]], [0.0]),
    "torch.nn.functional.cross_entropy(x, y, ignore_index=-1)": (
        [[1.0, 2.0]], [-1], [[1.0, 2.0], [0.5, 1.0]], [-1, 1]
    ),
}  # fmt: skip
JAX = {
    "x / y": TORCH["x / y"],
    "jnp.divide(x, y)": TORCH["x / y"],
    "(x * y).sum() / y.sum()": TORCH["(x * y).sum() / y.sum()"],
    "1 / x": TORCH["1 / x"],
    "jnp.log(x)": TORCH["torch.log(x)"],
    "jnp.sqrt(x)": TORCH["x.sqrt()"],
    "x ** 0.5": TORCH["x ** 0.5"],
    "(x * x) ** (y / 2)": TORCH["(x * x) ** (y / 2)"],
    "x / jnp.linalg.norm(x, axis=-1, keepdims=True)": TORCH["x / x.norm(dim=-1, keepdim=True)"],
    "jax.lax.rsqrt(x)": TORCH["torch.rsqrt(x)"],
    "jnp.arccos(x)": TORCH["torch.acos(x)"],
    "jnp.arctanh(x)": TORCH["x.atanh()"],
    "jnp.arctan2(y, x)": ([0.0, 0.5], [0.0, 1.0], [0.3, 0.2], [1.0, -1.0]),
    "jnp.linalg.norm(x, axis=-1)": ([[0.0, 0.0]], [0.0], [[1.0, 2.0]], [0.0]),
    "jnp.linalg.norm(x)": ([0.0, 0.0], [0.0], [1.0, 2.0], [0.0]),
    "jnp.std(x, axis=-1)": ([[1.0, 1.0], [1.0, 3.0]], [0.0], [[1.0, 2.0], [1.0, 3.0]], [0.0]),
    "jax.nn.softmax(x, axis=-1)": TORCH["torch.softmax(x, -1)"],
    "jnp.log(1 + jnp.exp(x))": TORCH["torch.log(1 + torch.exp(x))"],
    "jnp.log(jax.nn.sigmoid(x))": TORCH["torch.log(torch.sigmoid(x))"],
    "jnp.log(jax.nn.softmax(x, axis=-1))": TORCH["torch.log(torch.softmax(x, -1))"],
    "jnp.log(jnp.sum(jnp.exp(x), axis=-1))": TORCH["torch.exp(x).sum(-1).log()"],
}
HEADS = {"torch": "import torch\n", "jax": "import jax\nimport jax.numpy as jnp\n"}


def loaded(source, path):
    """Return the function of a file with this source."""
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.f


def evaluated(framework, f, x, y):
    """Return the value and the gradient of the sum, as NumPy arrays."""
    if framework == "torch":
        x = torch.tensor(x, requires_grad=True)
        value = f(x, torch.tensor(y))
        (slope,) = torch.autograd.grad(value.sum(), x)
        return value.detach().numpy(), slope.numpy()

    def total(x):
        value = f(x, jnp.asarray(y))
        return value.sum(), value

    (_, value), slope = jax.jit(jax.value_and_grad(total, has_aux=True))(jnp.asarray(x))
    return np.asarray(value), np.asarray(slope)


CASES = [("torch", e) for e in TORCH] + [("jax", e) for e in JAX]
# Of these, the same operations are edited in torch, and others that are written alike run here.
LIKE_TORCH = [
    ("jax", "(x * y).sum() / y.sum()"),
    ("jax", "1 / x"),
    ("jax", "x / jnp.linalg.norm(x, axis=-1, keepdims=True)"),
    ("jax", "jnp.arccos(x)"),
    ("jax", "jnp.linalg.norm(x)"),
    ("jax", "jnp.log(jax.nn.softmax(x, axis=-1))"),
    ("jax", "jnp.log(jnp.sum(jnp.exp(x), axis=-1))"),
]


@pytest.mark.parametrize(("framework", "expression"), slow_unless(lambda *row: row not in LIKE_TORCH, CASES))
def test_an_edit_runs_on_the_arguments_that_failed_and_changes_nothing_else(framework, expression, tmp_path):
    x, y, good_x, good_y = (TORCH if framework == "torch" else JAX)[expression]
    source = f"{HEADS[framework]}def f(x, y):\n    return {expression}\n"
    f = loaded(source, tmp_path / "before.py")
    if framework == "torch":
        report = stablenum_torch.replay(f, torch.tensor(x, requires_grad=True), torch.tensor(y))
    else:
        report = stablenum_jax.replay(lambda x, y: f(x, y).sum(), jnp.asarray(x), jnp.asarray(y))
    edits = edits_for(report.findings[0], report.verdict, source)
    assert edits, str(report)
    edited = loaded(edits[0].applied(source), tmp_path / "after.py")
    assert all(
        np.isfinite(part).all() or -INF in np.asarray(x) for part in evaluated(framework, edited, x, y)
    )
    assert not any(np.isnan(part).any() for part in evaluated(framework, edited, x, y))
    before, after = (evaluated(framework, g, good_x, good_y) for g in (f, edited))
    for a, b in zip(before, after, strict=True):
        np.testing.assert_allclose(b, a, rtol=3e-6, atol=1e-7)


def test_no_edit_changes_the_correction_of_a_variance(tmp_path):
    """A batch of one item has no variance; without the correction, an edit would change those of others."""
    source = "import torch\ndef f(x):\n    return torch.var(x, dim=0)\n"
    f = loaded(source, tmp_path / "before.py")
    report = stablenum_torch.replay(f, torch.ones(1, 2, requires_grad=True))
    assert report.findings[0].operation == "var"
    assert not edits_for(report.findings[0], report.verdict, source)
