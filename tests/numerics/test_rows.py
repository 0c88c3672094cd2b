"""Functions of rows: second derivatives at the edges, gradients of weight and bias, empty rows."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.numerics.oracle import FORMATS, mp, mpf, weights_for
from tests.numerics.row_edges import ROW_EDGES
from tests.numerics.running import call, ours
from tests.selection import only

CASES = [
    pytest.param(b, f, id=f"{b}-{f}", marks=[pytest.mark.slow] if (b, f) == ("jax-jit", "float64") else [])
    for b in ("torch", "jax-jit")
    for f in ("float32", "float64")
]
SINGLE = ("logsumexp", "norm", "variance", "std")


def _edges(name, fmt):
    """Rows of numbers, of -inf and with masked elements, and a few huge and tiny ones of two sizes."""
    groups = defaultdict(list)
    for edge in ROW_EDGES[name](fmt):
        there = [v for i, v in enumerate(edge.row) if edge.mask is None or edge.mask[i]]
        if not any(math.isnan(v) or v == math.inf or (v == -math.inf and "m" not in name) for v in there):
            groups[len(edge.row), edge.mask is not None].append((edge.row, edge.mask))
    big, tiny = fmt.max, fmt.tiny
    groups[4, False] += [((v, -v, w, 0.0), None) for v in (big / 4, 1e30, 1e-30, tiny) for w in (v, v / 2)]
    return groups


@pytest.mark.sampled
@pytest.mark.parametrize(("backend", "form"), CASES)
# Softmax and the logarithm of the sum stand for the logarithm of softmax.
@pytest.mark.parametrize("name", only([name for name in ROW_EDGES if name != "log_softmax"], ROW_EDGES))
def test_second_derivatives_at_the_edges_of_rows(name, backend, form):
    fmt = FORMATS[form]
    for (_, masked), edges in _edges(name, fmt).items():
        rows = np.asarray([row for row, _ in edges])
        if name in ("norm", "normalize", "variance", "std", "rms_norm", "layer_norm"):
            rows = rows[np.isfinite(rows).all(axis=1)]
        options = {"axis": -1} | ({"mask": np.asarray([mask for _, mask in edges])} if masked else {})
        weights = np.asarray(weights_for(rows.shape[1]))
        found = _curved(backend, ours(backend, name, **options), rows, weights, form, name in SINGLE)
        # The second derivatives of x / |x| are divided by the square of the norm.
        size = np.max(np.abs(rows), axis=1)
        fits = (name != "normalize") | (size == 0) | (size > 10 * math.sqrt(fmt.tiny))
        assert np.isfinite(found[fits]).all(), rows[fits][~np.isfinite(found[fits]).all(axis=1)]
        if name == "normalize":
            assert masked or len(rows[0]) == 1 or not fits.all()


def _curved(backend, run, rows, weights, form, single):
    """The gradient of a weighted sum of the gradient of a weighted sum of the results."""
    if backend == "torch":
        x = torch.tensor(rows, dtype=getattr(torch, form), requires_grad=True)
        w = torch.tensor(weights, dtype=x.dtype)
        result = run(x)
        total = (result if single else result * w).nan_to_num(neginf=0.0).sum()
        (slope,) = torch.autograd.grad(total, x, create_graph=True)
        if not slope.requires_grad:
            return np.zeros_like(rows)
        return torch.autograd.grad((slope * w).sum(), x, materialize_grads=True)[0].double().numpy()
    with jax.enable_x64(True) if form == "float64" else contextlib.nullcontext():
        w = jnp.asarray(weights, form)

        def total(x):
            result = run(x)
            result = result if single else result * w
            return jnp.where(jnp.isfinite(result), result, 0.0).sum()

        again = jax.jit(jax.grad(lambda x: (jax.grad(total)(x) * w).sum()))
        return np.asarray(again(jnp.asarray(rows, form)), np.float64)


@pytest.mark.sampled
@pytest.mark.parametrize("backend", ["torch", "jax-jit"])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_the_gradients_by_weight_and_bias(name, form, backend):
    """The weight's gradients sum normalised rows times upstream; the bias's sum the upstream gradients."""
    fmt = FORMATS[form]
    rng = np.random.default_rng(3)
    size = np.asarray([fmt.wide.tiny**0.25, 1.0, 1e4, 0.0])[:, None]
    x = fmt.round(rng.normal(size=(4, 6)) * np.minimum(size, fmt.max / 8))
    weight, bias, upstream = (fmt.round(rng.normal(size=s)) for s in ((6,), (6,), (4, 6)))
    given = [x, weight] + ([bias] if name == "layer_norm" else [])
    value, slopes = call(backend, ours(backend, name), given, form, upstream)
    rows = [[mpf(v) for v in row] for row in x.tolist()]
    mean = [mp.fsum(r) / 6 if name == "layer_norm" else mpf(0) for r in rows]
    eps = mpf(1e-5 if name == "layer_norm" else 1e-6)
    away = [[v - m for v in r] for r, m in zip(rows, mean, strict=True)]
    units = [[v / mp.sqrt(mp.fsum(u * u for u in r) / 6 + eps) for v in r] for r in away]
    # A number near the mean of its row has only the accuracy of the largest ones.
    sizes = [max(map(abs, r)) for r in units]
    for j in range(6):
        terms = [mpf(upstream[i, j]) * units[i][j] for i in range(4)]
        scales = [abs(upstream[i, j]) * sizes[i] for i in range(4)]
        assert fmt.error(slopes[1][j], mp.fsum(terms), max(scales)) <= 4
        if name == "layer_norm":
            exact = mp.fsum(map(mpf, upstream[:, j]))
            assert fmt.error(slopes[2][j], exact, np.abs(upstream[:, j]).max()) <= 4
        for i in range(4):
            exact = units[i][j] * mpf(weight[j]) + (mpf(bias[j]) if name == "layer_norm" else 0)
            scale = sizes[i] * abs(weight[j]) if name == "layer_norm" else 0
            assert fmt.error(value[i, j], exact, scale) <= 4


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("name", ROW_EDGES)
def test_empty_rows_and_empty_batches(name, backend):
    """No rows: no results. Rows of length 0: a norm of 0, a logsumexp of -inf, no division."""
    run = ours(backend, name, axis=-1)
    shape = (0,) if name in SINGLE else (0, 3)
    value, (slope,) = call(backend, run, [np.zeros((0, 3))], "float32")
    assert (value.shape, slope.shape) == (shape, (0, 3))
    if name in ("variance", "std", "layer_norm"):
        with pytest.raises(ValueError, match="the number of values less correction"):
            call(backend, run, [np.zeros((2, 0))], "float32")
        return
    value, (slope,) = call(backend, run, [np.zeros((2, 0))], "float32")
    assert slope.shape == (2, 0)
    if name in SINGLE:
        assert value.tolist() == [0.0 if name == "norm" else -math.inf] * 2
    else:
        assert value.shape == (2, 0)
