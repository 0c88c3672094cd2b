"""Constants beyond their format, and library functions at the edge of their domain: neither is a mask."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.scipy import special, stats

from stablenum_jax import replay
from tests.jax.replaying import check, marked_line

HALF = jnp.float16

_SCALE = {
    "captured": lambda: jnp.asarray(2.0**16, HALF),
    "number": lambda: jnp.float16(1e5),
    "an array": lambda: jnp.full(3, 1e5, HALF),
    "numpy": lambda: np.float16(np.inf),
}


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("made", sorted(_SCALE))
def test_a_constant_beyond_its_format_is_named_where_it_multiplies(made: str) -> None:
    scale = _SCALE[made]()

    def loss(w: jax.Array) -> jax.Array:
        value = -jax.nn.log_softmax(w.astype(HALF))
        return (value * scale).sum()  # BAD

    report = replay(loss, jnp.arange(3.0))
    test = test_a_constant_beyond_its_format_is_named_where_it_multiplies
    check(report, test, "overflow", "mul")
    assert "inf in float16, whose largest number is 65504" in report.verdict.evidence[0]
    assert "float32" in report.verdict.remedy


def test_an_infinite_loss_scale_of_which_only_the_gradient_is_kept() -> None:
    scale = jnp.asarray(jnp.inf, HALF)

    def loss(w: jax.Array) -> tuple[jax.Array, jax.Array]:
        value = -jax.nn.log_softmax(w.astype(HALF))[0]
        return value * scale, value  # BAD

    def step(w: jax.Array) -> tuple[jax.Array, jax.Array]:
        gradient, value = jax.grad(loss, has_aux=True)(w)
        return w - gradient / scale.astype(jnp.float32), value

    report = replay(step, jnp.arange(3.0), gradients=False)
    check(report, test_an_infinite_loss_scale_of_which_only_the_gradient_is_kept, "overflow", "mul")


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_a_number_beyond_float32_that_is_added() -> None:
    report = replay(lambda w: w.sum() + 1e39, jnp.ones(3))
    assert (report.verdict.cause.value, report.findings[0].operation) == ("overflow", "add")
    assert "3.4028e+38" in report.verdict.evidence[0]
    assert "float32" not in report.verdict.remedy


_DENSITIES = {
    "beta": lambda w: stats.beta.logpdf(jnp.asarray([0.0, 0.5]), w, 2.0),
    "gamma": lambda w: stats.gamma.logpdf(jnp.asarray([-1.0, 0.5]), w),
    "uniform": lambda w: stats.uniform.logpdf(jnp.asarray([3.0, 0.5]), 0.0, w),
    "truncated": lambda w: stats.truncnorm.logpdf(jnp.asarray([3.0, 0.5]), -1.0, 1.0, w),
    "pareto": lambda w: stats.pareto.logpdf(jnp.asarray([0.5, 2.0]), w),
    "von Mises": lambda w: stats.vonmises.logpdf(jnp.asarray([0.5, 2.0]), -w),
    "Poisson": lambda w: stats.poisson.logpmf(jnp.asarray([2.0, 1.0]), w - 2.0),
    "Bernoulli": lambda w: stats.bernoulli.logpmf(jnp.asarray([1, 0]), w - 2.0),
}


@pytest.mark.parametrize("name", sorted(_DENSITIES))
def test_a_value_at_the_edge_of_a_support_is_no_mask(name: str) -> None:
    report = replay(lambda w: -_DENSITIES[name](w).mean(), jnp.asarray(2.0))
    assert report.verdict.cause.value == "domain", str(report)
    assert report.findings[0].library.startswith("jax.scipy.stats.")
    assert "open support" in report.verdict.remedy


_SPECIAL = {
    "exp1": (special.exp1, 0.0),
    "expi": (special.expi, 0.0),
    "gamma": (special.gamma, -1.0),
    "lgamma": (special.gammaln, 0.0),
    "logit": (special.logit, 0.0),
    "ndtri": (special.ndtri, 0.0),
    "polygamma": (lambda x: special.polygamma(1, x), 0.0),
    "xlog1py": (lambda x: special.xlog1py(2.0, x), -1.0),
    "igamma": (lambda x: special.gammainc(2.0, x), -1.0),
}


@pytest.mark.parametrize("name", sorted(_SPECIAL))
def test_a_special_function_at_its_edge(name: str) -> None:
    function, at = _SPECIAL[name]
    report = replay(lambda x: function(x).sum(), jnp.asarray([at, 0.5]))
    assert (report.verdict.cause.value, report.findings[0].operation) == ("domain", name), str(report)


def test_both_ends_of_a_quantile_function() -> None:
    """Their sum is inf - inf: neither is a mask."""
    report = replay(lambda p: stats.norm.ppf(p).sum(), jnp.asarray([0.0, 0.5, 1.0]))
    assert (report.verdict.cause.value, report.findings[0].operation) == ("domain", "ndtri")


def test_a_derivative_at_the_edge_of_a_support_is_not_named_after_a_truth_value() -> None:
    report = replay(lambda a: stats.beta.logpdf(jnp.asarray([0.0, 0.5]), a, 1.0).sum(), jnp.asarray(1.0))
    assert report.findings[0].operation in ("logpdf", "xlogy"), str(report)
    assert "open support" in report.verdict.remedy


_NOT_YET = np.where(np.arange(3) == 0, 0.0, -np.inf).astype(np.float32)
_SUMS = {
    "logsumexp": lambda a: jax.nn.logsumexp(a[:, None] + jnp.where(jnp.eye(3) == 1, 0.0, -jnp.inf), axis=0),
    "logaddexp": lambda a: jnp.logaddexp(a, jnp.roll(a, 1)),
    "logcumsumexp": lambda a: jax.lax.cumlogsumexp(a[::-1]),
}


@pytest.mark.parametrize("operation", sorted(_SUMS))
def test_a_sum_over_states_that_cannot_be_reached_yet(operation: str) -> None:
    report = replay(lambda w: jax.nn.logsumexp(_SUMS[operation](_NOT_YET + w)), jnp.ones(3))
    first = report.findings[0]
    assert (first.operation, first.phase) == (operation, "backward"), str(report)
    assert report.verdict.cause.value in ("domain", "mask")
    assert "-1e9" in report.verdict.remedy
    assert "mask=mask" not in report.verdict.code


def _logarithm(c: jax.Array) -> jax.Array:
    w, v = jnp.linalg.eigh(c)
    return (v * jnp.log(w)) @ v.T


def test_the_call_of_a_function_that_is_called_twice() -> None:
    """Of two calls of one function the first is degenerate: what that one read is shown."""
    others = jnp.stack([jnp.diag(jnp.asarray([1.0, 2.0, 3.0]))] * 5)

    def loss(c: jax.Array) -> jax.Array:
        first = _logarithm(c @ c.T)
        return ((first - jax.vmap(_logarithm)(others)) ** 2).mean()

    report = replay(loss, jnp.eye(3))
    first = report.findings[0]
    assert (first.operation, report.verdict.cause.value) == ("eigh", "boundary_derivative"), str(report)
    assert [s.shape for s in first.inputs] == [(3, 3)]


_DECOMPOSED = {
    "eigh": (lambda m: jnp.linalg.eigh(m @ m.T)[1][:, 0].sum(), jnp.eye(3)),
    "svd": (lambda m: (jnp.linalg.svd(m)[0] @ jnp.linalg.svd(m)[2])[0].sum(), jnp.eye(3)),
    "qr": (lambda m: jnp.linalg.qr(m)[0][0].sum(), jnp.zeros((3, 3))),
}


@pytest.mark.parametrize("operation", sorted(_DECOMPOSED))
def test_a_decomposition_of_a_degenerate_matrix(operation: str) -> None:
    loss, matrix = _DECOMPOSED[operation]
    report = replay(loss, matrix)
    first = report.findings[0]
    assert (first.operation, first.phase) == (operation, "backward"), str(report)
    assert report.verdict.cause.value == "boundary_derivative"
    assert "clamp" not in report.verdict.remedy


@pytest.mark.parametrize("make", [optax.adam, optax.adamw, optax.rmsprop])
def test_an_eps_that_is_zero_in_its_format_is_named_where_the_optimizer_was_made(make: Any) -> None:
    w = jnp.asarray([0.0, 1.0], HALF)
    tx = make(1e-3)  # BAD
    state = tx.init(w)

    def step(w: jax.Array, state: optax.OptState) -> optax.Updates:
        return tx.update(jax.grad(lambda w: (w * w).sum())(w), state, w)[0]

    report = replay(step, w, state, gradients=False)
    first = report.findings[0]
    test = test_an_eps_that_is_zero_in_its_format_is_named_where_the_optimizer_was_made
    assert report.verdict.cause.value == "optimizer_state", str(report)
    assert first.place is not None
    assert first.place.line == marked_line(test), str(report)
    assert "eps=1e-4" in report.verdict.remedy
