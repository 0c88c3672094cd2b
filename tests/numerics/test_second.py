"""Second derivatives on the grid of edges: never NaN, and inf only where the true one is out of range."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest

from tests.numerics.oracle import FORMATS, FUNCTIONS, mp, mpf
from tests.numerics.running import curvatures, ours

CASES = [
    pytest.param(b, f, id=f"{b}-{f}", marks=[pytest.mark.slow] if b == "jax-jit" and f != "float32" else [])
    for b in ("torch", "jax-jit")
    for f in FORMATS
]


@functools.cache
def _exact(function, form):
    """All second derivatives at the regular arguments, by differences of the slopes with many digits."""
    found = []
    points = function.arguments(form)
    with mp.workdps(400 if form.name == "float64" else 130):
        for slope in function.slopes:
            for j in range(len(function.slopes)):
                found.append([_difference(slope, [mpf(v) for v in p], j) for p in points])
    return found


def _difference(slope, point, j):
    step = (abs(point[j]) or max(map(abs, point)) or mpf(1)) * mpf(10) ** -30
    up, down = (slope(*(v + sign * step if k == j else v for k, v in enumerate(point))) for sign in (1, -1))
    return (up - down) / (2 * step)


@pytest.mark.sampled
@pytest.mark.parametrize(("backend", "form"), CASES)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.label)
def test_second_derivatives(function, backend, form):
    fmt = FORMATS[form]
    edges = [e[0] for e in function.edges(fmt) if not any(map(math.isnan, e[0]))]
    regular = function.arguments(fmt)
    columns = [np.asarray(column) for column in zip(*regular, *edges, strict=True)]
    run = ours(backend, function.name)
    got = curvatures(backend, lambda *a: run(*a, *function.positional), columns, form)
    for derivative, exact in zip(got, _exact(function, fmt), strict=True):
        assert not np.isnan(derivative).any(), [c[np.isnan(derivative)] for c in columns]
        for point, found, true in zip(regular, derivative, exact, strict=False):
            value = function.value(*map(mpf, point))
            fits = abs(true) < fmt.wide.max / 64 and abs(true) < fmt.max and abs(value) < fmt.max
            assert math.isfinite(found) or not fits, (point, found, true)
            if fits and len(point) == 1 and fmt.wide is fmt:
                # The terms that cancel in it are at most about 1.
                assert abs(found - true) <= 1e-4 * abs(true) + 4 * fmt.eps, (point, found, true)
        for point, found in zip(edges, derivative[len(regular) :], strict=True):
            assert math.isfinite(found) or any(map(math.isinf, point)) or max(map(abs, point)) < 1e-30, point
