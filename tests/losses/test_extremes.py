"""Numbers near the end of the format: no NaN where the docstrings promise none."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import stablenum_jax.losses as jl
import stablenum_torch.losses as tl


def test_poisson_rate_and_product_that_are_both_out_of_range() -> None:
    z = torch.tensor([3e38, 1e30, -3e38], requires_grad=True)
    y = torch.tensor([1e20, 1e20, 1e20], requires_grad=True)
    loss = tl.poisson_nll(z, y, reduction="none")
    assert loss.tolist() == [math.inf, math.inf, math.inf]
    slopes = torch.autograd.grad(loss.sum(), [z, y])
    assert all(torch.isfinite(s).all() for s in slopes)
    found = jax.vjp(lambda z, y: jl.poisson_nll(z, y, reduction="none"), *map(_jax, (z, y)))[1](jnp.ones(3))
    for ours, theirs in zip(found, slopes, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_a_soft_target_of_weight_0_beside_logits_that_span_more_than_the_format() -> None:
    x = torch.tensor([[3e38, -3e38, 0.0]], requires_grad=True)
    t = torch.tensor([[0.5, 0.5, 0.0]], requires_grad=True)
    loss = tl.cross_entropy(x, t, weight=torch.tensor([1.0, 0.0, 1.0]))
    assert loss.item() == 0.0
    assert not any(torch.isnan(s).any() for s in torch.autograd.grad(loss, [x, t]))


@pytest.mark.parametrize("total_count", [1e-8, 1.0, 1e30, 3e38])
def test_negative_binomial_of_large_means_and_counts(total_count: float) -> None:
    means, counts = np.array(list(itertools.product((1e-30, 1e-3, 1.0, 1e3, 1e30), (0.0, 1.0, 1e20)))).T
    m = torch.tensor(means, dtype=torch.float32, requires_grad=True)
    y = torch.tensor(counts, dtype=torch.float32)
    r = torch.tensor(total_count, requires_grad=True)

    def loss(m: jax.Array, r: jax.Array) -> jax.Array:
        return jl.negative_binomial_nll(m, _jax(y), r, log_input=False, reduction="none")

    value = tl.negative_binomial_nll(m, y, r.expand(len(means)), log_input=False, reduction="none")
    found, pull = jax.vjp(loss, _jax(m), jnp.full(len(means), total_count, jnp.float32))
    slopes = torch.autograd.grad(value.sum(), [m, r])
    for part in (value.detach(), *slopes, found, *pull(jnp.ones(len(means)))):
        assert not np.isnan(np.asarray(part)).any()


def _jax(x: torch.Tensor) -> jax.Array:
    return jnp.asarray(x.detach().numpy())
