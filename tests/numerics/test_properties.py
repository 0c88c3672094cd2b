"""Properties that hold for all numbers: no NaN, and the identities of the functions."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

import stablenum_torch.numerics as nt
from tests.numerics.running import call, ours
from tests.selection import thinned

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
ANY_LOGIT = st.one_of(FINITE, st.just(-math.inf))
ROW = st.lists(FINITE, min_size=5, max_size=5)
ONE = ["log", "log1mexp", "softplus", "log_sigmoid", "reciprocal", "sqrt", "rsqrt", "arccos", "arctanh"]
TWO = ["logaddexp", "logsubexp", "xlogy", "divide", "arctan2"]
ALONG = [
    "logsumexp",
    "softmax",
    "log_softmax",
    "cumulative_logsumexp",
    "norm",
    "normalize",
    "variance",
    "std",
]
ALONG += ["rms_norm", "layer_norm"]


@pytest.mark.parametrize("name", [*ONE, *TWO, *ALONG])
@given(a=ROW, b=ROW)
def test_no_finite_number_gives_nan(name, a, b):
    arrays = [np.asarray(a), np.asarray(b)] if name in TWO else [np.asarray(a)]
    value, slopes = call("torch", ours("torch", name), arrays, "float32")
    assert not np.isnan(value).any()
    assert not any(np.isnan(s).any() for s in slopes)


@pytest.mark.parametrize("name", thinned([*ONE, *TWO, *ALONG]))
def test_no_finite_number_gives_nan_in_jax(name):
    rng = np.random.default_rng(0)
    ends = [0.0, -0.0, 1.0, -1.0, 1.2e-38, -1e-40, 3.4e38, -3.4e38, 1e-25, 1e19]
    wild = np.ldexp(rng.normal(size=(400, 5)), rng.integers(-140, 127, (400, 5)))
    wild = np.where(rng.random((400, 5)) < 0.4, rng.choice(ends, (400, 5)), wild)
    arrays = [wild, wild[::-1]] if name in TWO else [wild]
    run = ours("jax-jit", name, **({"axis": -1} if name == "norm" else {}))
    value, slopes = call("jax-jit", run, arrays, "float32")
    assert not np.isnan(value).any()
    assert not any(np.isnan(s).any() for s in slopes)


@given(row=st.lists(ANY_LOGIT, min_size=1, max_size=9), data=st.data())
def test_masked_elements_count_as_removed(row, data):
    mask = data.draw(st.lists(st.booleans(), min_size=len(row), max_size=len(row)))
    junk = torch.tensor([v if m else math.nan for v, m in zip(row, mask, strict=True)], requires_grad=True)
    kept = torch.tensor([v for v, m in zip(row, mask, strict=True) if m])
    mask = torch.tensor(mask)
    for name in ("logsumexp", "softmax", "log_softmax"):
        got, want = getattr(nt, name)(junk, mask=mask), getattr(nt, name)(kept)
        torch.testing.assert_close(got if name == "logsumexp" else got[mask], want)
        (slope,) = torch.autograd.grad(got.sum(), junk)
        assert (slope[~mask] == 0).all()
        assert not slope.isnan().any()


@given(row=st.lists(st.integers(-50, 50), min_size=1, max_size=9), shift=st.integers(-1000, 1000))
def test_log_softmax_is_invariant_under_a_shift(row, shift):
    x = torch.tensor(row, dtype=torch.float32)
    assert torch.equal(nt.log_softmax(x), nt.log_softmax(x + shift))


@given(a=FINITE, b=FINITE)
def test_symmetry(a, b):
    p, q = torch.tensor(a), torch.tensor(b)
    assert torch.equal(nt.logaddexp(p, q), nt.logaddexp(q, p))
    assert torch.equal(nt.arctanh(-p), -nt.arctanh(p))
    assert torch.equal(nt.soft_cap(-p, 2.0), -nt.soft_cap(p, 2.0))
    assert torch.equal(nt.arctan2(-p, q), -nt.arctan2(p, q)) or a == 0
    assert torch.equal(nt.log_sigmoid(p), -nt.softplus(-p))


@given(values=st.lists(FINITE, min_size=2, max_size=20))
def test_monotonicity(values):
    x = torch.tensor(values).sort().values
    for name in ("log", "softplus", "log_sigmoid", "sqrt", "arctanh"):
        assert (getattr(nt, name)(x).diff().nan_to_num() >= 0).all(), name


@given(row=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=12))
def test_cumulative_logsumexp_matches_the_logsumexp_of_each_prefix(row):
    x = torch.tensor(row)
    want = torch.stack([nt.logsumexp(x[: i + 1]) for i in range(len(row))])
    torch.testing.assert_close(nt.cumulative_logsumexp(x), want, rtol=1e-6, atol=1e-5)
