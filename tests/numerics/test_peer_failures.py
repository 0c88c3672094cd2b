"""What the frameworks' own functions do at an edge, and what ours do: each test shows both."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from stablenum_jax import numerics as nj
from stablenum_torch import numerics as nt

INF = float("inf")


def gradients(torch_function, jax_function, *rows):
    """The gradient of the sum with respect to the first argument, in both frameworks."""
    tensors = [torch.tensor(r, requires_grad=True) for r in rows]
    torch_function(*tensors).sum().backward()
    slope = jax.grad(lambda *a: jax_function(*a).sum())(*map(jnp.asarray, rows))
    return tensors[0].grad.numpy(), np.asarray(slope)


# ours in torch and JAX, theirs, arguments, the right gradient by the first; do torch and JAX fail at it?
CASES = {
    "softmax of a masked row": (
        (nt.softmax, nj.softmax),
        (lambda x: torch.softmax(x, -1), jax.nn.softmax),
        ([-INF, -INF],),
        [0.0, 0.0],
        (True, True),
    ),
    "log_softmax of a masked row": (
        (lambda x: torch.exp(nt.log_softmax(x)), lambda x: jnp.exp(nj.log_softmax(x))),
        (lambda x: torch.exp(torch.log_softmax(x, -1)), lambda x: jnp.exp(jax.nn.log_softmax(x))),
        ([-INF, -INF],),
        [0.0, 0.0],
        (True, True),
    ),
    "logaddexp of two masked": (
        (nt.logaddexp, nj.logaddexp),
        (torch.logaddexp, jnp.logaddexp),
        ([-INF], [-INF]),
        [0.0],
        (True, True),
    ),
    "sqrt of 0": ((nt.sqrt, nj.sqrt), (torch.sqrt, jnp.sqrt), ([0.0],), [0.0], (True, True)),
    "norm of 0, by hand": (
        (nt.norm, nj.norm),
        (lambda x: torch.sqrt((x * x).sum()), jnp.linalg.norm),
        ([0.0, 0.0],),
        [0.0, 0.0],
        (True, True),
    ),
    "norm of large numbers": (
        (nt.norm, nj.norm),
        (lambda x: torch.sqrt((x * x).sum()), jnp.linalg.norm),
        ([3e30, 4e30],),
        [0.6, 0.8],
        (True, True),
    ),
    "arccos at 1": ((nt.arccos, nj.arccos), (torch.arccos, jnp.arccos), ([1.0],), [0.0], (True, True)),
    "arctanh at 1": ((nt.arctanh, nj.arctanh), (torch.arctanh, jnp.arctanh), ([1.0],), [0.0], (True, True)),
    "arctan2 near 0": (
        (nt.arctan2, nj.arctan2),
        (torch.arctan2, jnp.arctan2),
        ([0.0], [1e-25]),
        [1e25],
        (True, True),
    ),
    "std of a constant": (
        (nt.std, nj.std),
        (torch.std, lambda x: jnp.std(x, ddof=1)),
        ([2.0, 2.0],),
        [0.0, 0.0],
        (False, True),
    ),
    "log1pexp at 100": (
        (nt.log1pexp, nj.log1pexp),
        (lambda x: torch.log1p(torch.exp(x)), lambda x: jnp.log1p(jnp.exp(x))),
        ([100.0],),
        [1.0],
        (True, True),
    ),
    "log1mexp at 1e-9": (
        (nt.log1mexp, nj.log1mexp),
        (lambda a: torch.log(1 - torch.exp(-a)), lambda a: jnp.log(1 - jnp.exp(-a))),
        ([1e-9],),
        [1e9],
        (True, True),
    ),
    "1 / 1e-20 of nothing": (
        (lambda y: nt.divide(0.0, y), lambda y: nj.divide(0.0, y)),
        (lambda y: torch.divide(torch.tensor(0.0), y), lambda y: jnp.divide(0.0, y)),
        ([1e-20],),
        [0.0],
        (False, True),
    ),
    "normalize of a tiny vector": (
        (lambda x: nt.normalize(x)[1:], lambda x: nj.normalize(x)[1:]),
        (lambda x: torch.nn.functional.normalize(x, dim=0)[1:], lambda x: (x / jnp.linalg.norm(x))[1:]),
        ([1e-25, 0.0],),
        [0.0, 1e25],
        (True, True),
    ),
    "soft cap far out": (
        (lambda x: nt.soft_cap(x, 1.0), lambda x: nj.soft_cap(x, 1.0)),
        (torch.tanh, jnp.tanh),
        ([10.0],),
        [8.2446144e-9],
        (True, True),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_ours_is_right_where_theirs_is_not(case):
    ours, theirs, rows, right, fails = case
    for got in gradients(*ours, *rows):
        np.testing.assert_allclose(got, right, rtol=1e-5, atol=0 if any(right) else 1e-30)
    for got, fail in zip(gradients(*theirs, *rows), fails, strict=True):
        assert np.allclose(got, right, rtol=1e-5, atol=0) != fail, got


def test_no_probability_exceeds_one_and_logsumexp_of_one_element_is_that_element():
    for value in (0.7, -1e-5, 3.7):
        x = torch.tensor([value, value - 100.0])
        assert nt.log_softmax(x).max() <= 0
        assert nt.logsumexp(torch.tensor([value])) == torch.tensor(value)
        assert float(nj.logsumexp(jnp.asarray([value]))) == np.float32(value)


def test_a_masked_infinity_stays_masked():
    x, mask = [INF, 0.0], [False, True]
    assert nt.log_softmax(torch.tensor(x), mask=torch.tensor(mask)).tolist() == [-INF, 0.0]
    assert nj.log_softmax(jnp.asarray(x), mask=jnp.asarray(mask)).tolist() == [-INF, 0.0]


@pytest.mark.parametrize("n", [3, 7, 10, 1000])
def test_equal_numbers_have_no_spread(n):
    for value in (0.1, 1e-30, 3e38, -7.3):
        assert float(nt.std(torch.full((n,), value))) == 0
        assert float(jax.jit(nj.std)(jnp.full((n,), value))) == 0
        assert nt.layer_norm(torch.full((n,), value), eps=1e-12).abs().max() < 1e-30


def test_layer_norm_far_from_zero_keeps_its_digits():
    x = torch.tensor([10000.0, 10000.5, 10001.25])
    right = (x.double() - x.double().mean()) / x.double().std(correction=0)
    assert (nt.layer_norm(x, eps=0.0) - right).abs().max() < 1e-6
    assert (torch.nn.functional.layer_norm(x, (3,), eps=0.0) - right).abs().max() > 1e-5
