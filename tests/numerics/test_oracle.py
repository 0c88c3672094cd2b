"""Value and gradient of every safe function against 50 digits: regular range and documented edges."""

from __future__ import annotations

import itertools
import math

import array_api_compat.numpy as numpy_namespace
import numpy as np
import pytest

from stablenum.numerics.logarithms import log1mexp
from tests.numerics.measuring import measured, worst, worst_rows
from tests.numerics.oracle import FORMATS, FUNCTIONS, ROWS, mp, mpf
from tests.numerics.running import BACKENDS, ours
from tests.selection import REPEATS, slow_unless

# In ulp. Each bound above 4 has its reason here.
BOUND = 4.0
SLOPE_BOUNDS = {
    "cumulative_logsumexp": 6.0,  # a product of one weight for each of the log2(n) doublings, here 6
}


def is_fast(backend: str, form: str) -> bool:
    return backend == "torch" or (backend == "jax-jit" and form in ("float32", "float16"))


# JAX without jit compiles each operation by itself: slow, and the same kernels as under jit. What
# torch.compile adds, eager backend, is tracing. Under jit a wide and a narrow format stand for the others.
CASES = [
    pytest.param(b, f, id=f"{b}-{f}", marks=[] if is_fast(b, f) else [REPEATS])
    for b in BACKENDS
    for f in FORMATS
]


@pytest.mark.sampled
@pytest.mark.parametrize(("backend", "form"), CASES)
@pytest.mark.parametrize("function", [*FUNCTIONS, *ROWS], ids=lambda f: f.label)
def test_the_regular_range(function, backend, form):
    if function in ROWS:
        options = {"axis": -1} if function.name == "norm" else {}
        value, slope = worst_rows(function, FORMATS[form], backend, ours(backend, function.name, **options))
    else:
        value, slope = worst(function, FORMATS[form], backend)
    narrow = form in ("bfloat16", "float16")  # rounded once
    assert value <= (0.6 if narrow else BOUND)
    assert slope <= (1.0 if narrow else SLOPE_BOUNDS.get(function.name, BOUND))


# At the edges, JAX in float32 and in float16 by turns.
IN_JAX = set(zip((f.label for f in FUNCTIONS), itertools.cycle(["float32", "float16"])))


@pytest.mark.parametrize(
    ("function", "backend", "form"),
    slow_unless(
        lambda f, backend, form: backend == "torch" or (backend == "jax-jit" and (f.label, form) in IN_JAX),
        itertools.product(FUNCTIONS, BACKENDS, FORMATS),
    ),
    ids=lambda value: value if isinstance(value, str) else value.label,
)
def test_the_edges(function, backend, form):
    fmt = FORMATS[form]
    edges = function.edges(fmt)
    values, slopes = measured(function, fmt, backend)
    values, slopes = values[-len(edges) :], [s[-len(edges) :] for s in slopes]
    for i, (point, value, wanted) in enumerate(edges):
        assert _same(values[i], value, fmt), (point, values[i], value)
        for got, want in zip(slopes, wanted, strict=True):
            if not math.isnan(want):  # nothing is promised for NaN, nor for x^n at -inf
                assert _same(got[i], want, fmt), (point, got[i], want)


def _same(got, want, fmt):
    if math.isnan(want) or math.isinf(want):
        return np.array_equal(got, want, equal_nan=True)
    return got == want or abs(got - want) <= 2 * float(fmt.ulp(want))


def test_log1mexp_is_exact_to_the_last_digits_where_its_series_ends():
    """The last terms of the series matter most just below log 2, and only in float64."""
    at = np.linspace(0.5, math.log(2), 50)
    for a, value in zip(at, log1mexp(at, xp=numpy_namespace), strict=True):
        exact = mp.log(-mp.expm1(-mpf(float(a))))
        assert abs(mpf(float(value)) - exact) <= 2 * np.spacing(abs(value))
