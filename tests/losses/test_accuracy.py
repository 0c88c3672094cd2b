"""No loss is off by more than the accuracy page says."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import stablenum.losses
import stablenum_jax.losses
import stablenum_torch.losses
from tests.losses.accuracy import LOSSES, worst_loss
from tests.numerics.oracle import FORMATS
from tests.selection import one_in_three, slow_unless

BOUND = 4.0
# p is the exponential of a rounded logarithm, and multiplies another.
BOUNDS = {"js_divergence": (5.0, 8.0)}


def test_every_loss_is_measured() -> None:
    assert {loss.name for loss in LOSSES.values()} == set(stablenum.losses.__all__)


def always(name: str, backend: str, form: str) -> bool:
    """Whether a case is in the fast run: each loss by PyTorch in float32, and a third of the rest."""
    # Narrow formats are computed in float32 and rounded once: the arithmetic is that of float32.
    wide = form in ("float32", "float64")
    return (backend, form) == ("torch", "float32") or (wide and one_in_three(name + backend + form))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "backend", "form"),
    slow_unless(always, itertools.product(LOSSES, ("torch", "jax-jit"), FORMATS)),
)
def test_the_regular_range(name: str, backend: str, form: str) -> None:
    loss = LOSSES[name]
    value, slope = worst_loss(loss, FORMATS[form], backend)
    narrow = form in ("bfloat16", "float16")
    bounds = (0.6, 0.6) if narrow else BOUNDS.get(loss.name, (BOUND, BOUND))
    assert value <= bounds[0]
    assert slope <= bounds[1]


# Rows and classes, and the spread of the logits.
MANY = [(20_000, 7, 1.0), (4_000, 7, 10.0), (500, 100, 1e-3), (100, 1_000, 1.0), (8, 32_768, 1e-3)]


@pytest.mark.sampled
@pytest.mark.parametrize(("rows", "classes", "spread"), MANY)
@pytest.mark.parametrize("name", ["cross_entropy", "kl_divergence"])
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_gradients_over_many_rows_or_classes(
    backend: str, name: str, rows: int, classes: int, spread: float
) -> None:
    """The gradient is the softmax minus the target, in ulp of the larger one and beyond what rounding the
    differences of logits costs. In float64, the softmax of float32 logits is as good as exact."""
    draw = np.random.default_rng(classes)
    logits = (draw.normal(size=(rows, classes)) * spread).astype(np.float32)
    index = draw.integers(0, classes, rows)
    target = np.zeros((rows, classes), np.float32)
    target[np.arange(rows), index] = 1.0
    grad = {"torch": _torch_grad, "jax": _jax_grad}[backend](
        name, logits, index if name == "cross_entropy" else target
    )
    below = logits.astype(np.float64) - logits.max(1, keepdims=True)
    share = np.exp(below) / np.exp(below).sum(1, keepdims=True)
    ulp = np.spacing(np.maximum(share, target).astype(np.float32)).astype(np.float64)
    # torch's own softmax, which is used on a CPU, adds up many classes in as many partial sums as a register
    # holds: 16 with AVX-512, and 8 without it (an error of 14.5 ulp was measured).
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    bound = (8.0 if wide else 16.0) if backend == "torch" and classes > 10_000 else BOUND
    worst = float((np.abs(grad - (share - target)) / ulp + below).max())
    assert worst <= bound


def _torch_grad(name: str, logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    x = torch.tensor(logits, requires_grad=True)
    getattr(stablenum_torch.losses, name)(x, torch.tensor(targets), reduction="sum").backward()
    return x.grad.double().numpy()


def _jax_grad(name: str, logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    function: Callable[..., jax.Array] = getattr(stablenum_jax.losses, name)
    grad = jax.jit(jax.grad(lambda x: function(x, jnp.asarray(targets), reduction="sum")))
    return np.asarray(grad(jnp.asarray(logits)), np.float64)
