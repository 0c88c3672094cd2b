"""Losses of single items against mpmath: edges, formats, ways of running; value and gradient."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import array_api_compat.numpy
import array_api_compat.torch
import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
import torch
from mpmath import mpf

import stablenum_jax.losses
import stablenum_torch.losses
from stablenum.formats import FORMATS
from stablenum.losses.gamma_function import log_factorial
from tests.losses import oracle
from tests.losses.running import ROUTES, RUNS, close, rounded, run

Z = [
    0.0,
    -0.0,
    1e-4,
    -1e-4,
    0.5,
    -0.5,
    1.0,
    -1.0,
    3.0,
    -3.0,
    10.0,
    -10.0,
    17.0,
    -17.0,
    30.0,
    -30.0,
    85.0,
    -85.0,
]
Z += [100.0, -100.0, 200.0, -200.0, 1e4, -1e4]


def _edges(form: str) -> list[float]:
    f = FORMATS[form]
    around_one = [1 + f.eps, 1 - f.eps / 2, -1 - f.eps, -1 + f.eps / 2]
    tiny = [f.smallest_normal, -f.smallest_normal, f.smallest_subnormal, -f.smallest_subnormal]
    return [*Z, *around_one, *tiny, f.eps, -f.eps, f.max, -f.max]


def _pairs(form: str, second: list[float]) -> tuple[np.ndarray, ...]:
    grid = list(itertools.product(_edges(form), second))
    return tuple(np.asarray(column) for column in zip(*grid, strict=True))


@dataclass(frozen=True, eq=False)
class Case:
    """A loss, its arguments, and its oracle."""

    name: str
    exact: Callable[..., Any]
    arguments: Callable[[str], tuple[np.ndarray, ...]]
    options: dict[str, Any] = field(default_factory=dict)
    wrt: tuple[int, ...] = (0,)
    # The size of what cancels in value and gradient, as a function of the arguments; 0: nothing.
    scale: Callable[..., float] = lambda *a: 0.0
    grad_scale: Callable[..., float] = lambda *a: 0.0
    ulps: float = 4.0


def _counts(form: str) -> tuple[np.ndarray, ...]:
    z = [0.0, 1.0, -1.0, 5.0, -5.0, 9.0, -20.0, 60.0, 79.0, 100.0, 1000.0, -1000.0]
    return tuple(np.asarray(c) for c in zip(*itertools.product(z, [0.0, 1.0, 3.0, 50.0])))


def _dispersed(form: str) -> tuple[np.ndarray, ...]:
    big = min(1e6, FORMATS[form].max / 2)
    grid = itertools.product(
        [0.0, 1.0, -4.0, 6.0, -30.0], [0.0, 1.0, 7.0, 300.0], [0.01, 0.5, 3.0, 20.0, big]
    )
    return tuple(np.asarray(c) for c in zip(*grid, strict=True))


def _gaussian(form: str) -> tuple[np.ndarray, ...]:
    top = math.sqrt(FORMATS[form].max) / 1e4
    means = [0.0, 1e-3, 0.7, -3.0, top]
    grid = itertools.product(means, [0.0, 1.0], [0.01, 0.5, 1.0, 7.0, 100.0])
    return tuple(np.asarray(c) for c in zip(*grid, strict=True))


def _poisson_scale(z: float, y: float, *_: float) -> float:
    return math.exp(min(z, 79.0)) + abs(y * z) + 5 * y


def _nb_scale(z: float, y: float, r: float) -> float:
    odds = z - math.log(r)
    plus = max(odds, 0) + math.log1p(math.exp(-abs(odds)))
    shift = (y + 10) * (abs(math.log(r + y + 10)) + abs(z) + 1)
    return r * plus + y * (abs(odds) + 1) + shift


CASES = [
    Case("binary_cross_entropy", oracle.binary_cross_entropy, lambda f: _pairs(f, [0.0, 1.0])),
    Case(
        "binary_cross_entropy",
        oracle.binary_cross_entropy,
        lambda f: _pairs(f, [0.25]),
        {"label_smoothing": 0.0},
        grad_scale=lambda z, y: 0.25,
    ),
    Case(
        "binary_cross_entropy",
        lambda z, y: oracle.binary_cross_entropy(z, y, 2.5),
        lambda f: _pairs(f, [0.0, 1.0]),
        {"pos_weight": np.asarray(2.5)},
    ),
    *(
        Case(
            "binary_focal",
            lambda z, y, g=g, a=a: oracle.binary_focal(z, y, g, a),
            lambda f: tuple(c[np.abs(_pairs(f, [0.0, 1.0])[0]) < 80] for c in _pairs(f, [0.0, 1.0])),
            {"gamma": g, "alpha": a},
        )
        for g, a in ((0.5, None), (2.0, 0.25))
    ),
    Case("huber", oracle.huber, lambda f: _pairs(f, [0.0])),
    Case("huber", lambda a, b: oracle.huber(a, b, 3.0), lambda f: _pairs(f, [0.0]), {"delta": 3.0}),
    Case("log_cosh", oracle.log_cosh, lambda f: _pairs(f, [0.0])),
    Case(
        "hinge",
        oracle.hinge,
        lambda f: tuple(
            c[_pairs(f, [1.0, -1.0])[0] * _pairs(f, [1.0, -1.0])[1] != 1] for c in _pairs(f, [1.0, -1.0])
        ),
    ),
    Case(
        "gaussian_nll",
        oracle.gaussian_nll,
        _gaussian,
        wrt=(0, 2),
        scale=lambda m, y, v: abs(math.log(v)) + (y - m) ** 2 / v,
        grad_scale=lambda m, y, v: 1 / v + (y - m) ** 2 / v**2,
        ulps=8.0,
    ),
    Case(
        "poisson_nll",
        lambda z, y: oracle.poisson_nll(z, y, CAP),
        _counts,
        {"max_log_rate": 9.5},
        scale=_poisson_scale,
        grad_scale=lambda z, y: math.exp(min(z, 9.5)) + y,
        ulps=16.0,
    ),
    Case(
        "negative_binomial_nll",
        oracle.negative_binomial_nll,
        _dispersed,
        wrt=(0, 2),
        scale=_nb_scale,
        grad_scale=lambda z, y, r: (y + 1) * (1 + 1 / r) + math.exp(min(z, 7.0)) + 10,
        ulps=8.0,
    ),
]
CAP = 9.5


@functools.cache
def exactly(case: Case, form: str) -> tuple[list[tuple[float, ...]], list[float], list[list[float]]]:
    """For all routes: the arguments of each item, its value, its derivatives in those of ``case.wrt``."""
    rows = list(zip(*(rounded(a, form).tolist() for a in case.arguments(form)), strict=True))
    exact = [float(case.exact(*map(mpf, row))) for row in rows]
    return rows, exact, [[oracle.derivative(case.exact, row, i) for row in rows] for i in case.wrt]


@pytest.mark.sampled
@pytest.mark.parametrize(("route", "form"), RUNS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join([c.name, *map(str, c.options)]))
def test_value_and_gradient(case: Case, route: str, form: str) -> None:
    arguments = [rounded(a, form) for a in case.arguments(form)]
    value, grads = run(route, case.name, arguments, form, wrt=case.wrt, **case.options)
    rows, exact, slopes = exactly(case, form)
    assert not np.isnan(value).any()
    assert not any(np.isnan(grad).any() for grad in grads)
    close(value, exact, form, ulps=case.ulps, scale=[case.scale(*row) for row in rows], what="value")
    for i, grad, slope in zip(case.wrt, grads, slopes, strict=True):
        close(grad, slope, form, ulps=case.ulps, scale=[case.grad_scale(*r) for r in rows], what=f"by {i}")


@pytest.mark.parametrize("route", ROUTES)
def test_edges_are_as_documented(route: str) -> None:
    inf, one = np.inf, np.asarray([1.0])
    value, (grad,) = run(
        route, "binary_cross_entropy", [np.asarray([inf, -inf, inf, -inf]), np.asarray([1.0, 0, 0, 1])]
    )
    assert value.tolist() == [0, 0, inf, inf]
    assert grad.tolist() == [0, 0, 1, -1]
    # At the corner of the hinge the gradient is that of its flat side.
    value, (grad,) = run(route, "hinge", [one, one])
    assert (value.tolist(), grad.tolist()) == ([0.0], [0.0])
    # Below the floor: value and gradient at the floor, so that the variance can recover.
    at = [np.zeros(4), np.full(4, 1e-2), np.asarray([1e-6, 1e-8, 0.0, -3.0])]
    value, (_, grad) = run(route, "gaussian_nll", at, wrt=(0, 2))
    close(value, [float(oracle.gaussian_nll(mpf(0), mpf(1e-2), mpf(1e-6)))] * 4, "float32", ulps=16)
    close(grad, [0.5 * (1e6 - 1e-4 * 1e12)] * 4, "float32", ulps=16)
    # Not only whole numbers: log(Gamma(1.5)) counts for half an event.
    value, _ = run(route, "poisson_nll", [np.zeros(1), np.full(1, 0.5)], full=True)
    close(value, [1 + math.lgamma(1.5)], "float32", ulps=16)
    # A rate that overflows is continued along its tangent.
    value, (grad,) = run(route, "poisson_nll", [np.asarray([1e3]), np.zeros(1)])
    assert np.isfinite(value).all()
    assert grad[0] == pytest.approx(np.exp(0.9 * np.log(FORMATS["float32"].max)), rel=1e-5)
    value, (grad,) = run(route, "poisson_nll", [np.asarray([0.0, -1.0]), np.ones(2)], log_input=False)
    close(value, [8 * math.log(10), 8 * math.log(10) - 1], "float32", ulps=4)
    close(grad, [1 - 1e8] * 2, "float32", ulps=4)


@pytest.mark.parametrize("form", ["float32", "float64"])
@pytest.mark.parametrize("route", ["torch", "jax jit"])
def test_the_logarithm_of_a_factorial_is_accurate(route: str, form: str) -> None:
    """What ``full=True`` adds: next to a loss of 1 at the logarithm 0, whose slope by the count is 0."""
    draw = np.random.default_rng(7)
    counts = [np.arange(60), [170, 1e3, 1e6, 1e12, 1e30], draw.uniform(0, 12, 200), draw.uniform(0, 2, 50)]
    y = rounded(np.concatenate(counts), form)
    value, (slope,) = run(route, "poisson_nll", [0 * y, y], form, wrt=(1,), full=True)
    exact = [float(1 + mpmath.loggamma(1 + mpf(v))) for v in y.tolist()]
    slopes = [float(mpmath.digamma(1 + mpf(v))) for v in y.tolist()]
    close(value, exact, form, ulps=4, what="value")
    close(slope, slopes, form, ulps=5, scale=0.5, what="slope")


@pytest.mark.parametrize("form", ["float32", "float64"])
@pytest.mark.parametrize("route", ["torch", "jax jit", "numpy"])
def test_the_logarithm_of_a_factorial_is_accurate_next_to_its_zeros(route: str, form: str) -> None:
    offsets = 2.0 ** -np.arange(1, 24)
    y = np.concatenate([offsets, 1 - offsets, 1 + offsets, [0.0, 1.0, 2.0, 9.999, 10.0]]).astype(form)
    with jax.enable_x64(form == "float64"):
        got = {
            "torch": lambda: log_factorial(torch.tensor(y), xp=array_api_compat.torch),
            "jax jit": lambda: jax.jit(functools.partial(log_factorial, xp=jnp))(jnp.asarray(y)),
            "numpy": lambda: log_factorial(y, xp=array_api_compat.numpy),
        }[route]()
    exact = [float(mpmath.loggamma(1 + mpf(v))) for v in y.tolist()]
    close(np.asarray(got, np.float64), exact, form, ulps=4)


@pytest.mark.parametrize("route", ["torch", "jax jit"])
def test_the_loss_of_a_count_of_0_is_exact(route: str) -> None:
    """The Gamma functions cancel exactly: XLA used to leave 4e-10 of them."""
    value, _ = run(
        route, "negative_binomial_nll", [np.full(4, -30.0), np.zeros(4), np.asarray([0.01, 3.0, 20.0, 1e6])]
    )
    np.testing.assert_allclose(value, math.exp(-30), rtol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("route", ["torch", "jax jit"])
@pytest.mark.parametrize("gamma", [0.3, 0.5, 1.0, 2.0, 3.0])
def test_second_derivatives_of_the_focal_loss_at_the_edges(route: str, gamma: float) -> None:
    z = np.asarray([0.0, 1e-30, 5.0, -5.0, 60.0, -60.0, 88.0, -88.0, 104.0, -104.0, 3e4, -3e4])
    for y in (0.0, 0.25, 1.0):
        curve = _second(route, z, y, gamma)
        assert np.isfinite(curve).all()


def _second(route: str, z: np.ndarray, y: float, gamma: float) -> np.ndarray:
    options: dict[str, Any] = {"gamma": gamma, "reduction": "sum"}
    if route == "torch":
        x = torch.tensor(z, dtype=torch.float32, requires_grad=True)
        loss = stablenum_torch.losses.binary_focal(x, torch.full_like(x, y), **options)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad(slope.sum(), x)[0].numpy()

    def total(x: jax.Array) -> jax.Array:
        return stablenum_jax.losses.binary_focal(x, jnp.full_like(x, y), **options)

    return np.asarray(jax.jit(jax.grad(lambda x: jax.grad(total)(x).sum()))(jnp.asarray(z, jnp.float32)))


@pytest.mark.parametrize("route", ["torch", "jax jit"])
def test_a_weight_of_0_removes_an_infinite_loss(route: str) -> None:
    scores, labels = np.asarray([1e30, 1.0]), np.asarray([-1.0, -1.0])
    value, (grad,) = run(
        route, "hinge", (scores, labels), squared=True, weight=np.asarray([0.0, 1.0], np.float32)
    )
    assert value.tolist() == [0.0, 4.0]
    assert grad.tolist() == [0.0, 4.0]


@pytest.mark.parametrize("route", ["torch", "jax jit"])
def test_a_cap_beyond_the_range_changes_nothing_below_it(route: str) -> None:
    z, y = np.asarray([0.0, 5.0, -3.0, 90.0]), np.asarray([1.0, 2.0, 3.0, 4.0])
    value, (grad,) = run(route, "poisson_nll", (z, y), max_log_rate=100.0)
    np.testing.assert_allclose(value[:3], (np.exp(z) - y * z)[:3], rtol=1e-6)
    np.testing.assert_allclose(grad[:3], (np.exp(z) - y)[:3], rtol=1e-6)
    assert math.isfinite(grad[3])


@pytest.mark.parametrize("name", ["log_factorial", "log_rising"])
def test_a_compiler_that_shares_nothing_meets_no_explosion(name: str) -> None:
    """Inductor writes a chain of elementwise operations into one loop, and repeats what is used twice."""
    import jax
    import jax.numpy as jnp

    from stablenum.losses import gamma_function

    arguments = [jnp.ones(3)] * (1 if name == "log_factorial" else 2)
    function = functools.partial(getattr(gamma_function, name), xp=jnp)
    jaxpr = jax.make_jaxpr(lambda *a: jax.tree.leaves(function(*a)))(*arguments).jaxpr

    def inlined(jaxpr: Any, given: list[int]) -> list[int]:
        sizes = dict(zip(jaxpr.invars, given, strict=True))

        def size(v: Any) -> int:
            return sizes.get(v, 1) if not hasattr(v, "val") else 1

        for eqn in jaxpr.eqns:
            read = [size(v) for v in eqn.invars]
            inner = eqn.params.get("jaxpr")
            made = inlined(inner.jaxpr, read) if inner is not None else [1 + sum(read)] * len(eqn.outvars)
            sizes.update(zip(eqn.outvars, made, strict=True))
        return [size(v) for v in jaxpr.outvars]

    assert sum(inlined(jaxpr, [1] * len(arguments))) < 10_000
