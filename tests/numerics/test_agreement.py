"""PyTorch against JAX: the same results at every edge and for every number of a narrow format."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from stablenum.numerics.common import power_of_two_below
from stablenum_torch.numerics import xp as torch_xp
from tests.numerics.measuring import measured
from tests.numerics.oracle import FORMATS, FUNCTIONS
from tests.numerics.running import call, ours

LABELLED = {"ids": lambda f: f.label}
# The frameworks' pow, tanh and log differ by this much in ulp.
APART = 8.0
# XLA flushes what is below the smallest normal number to 0; the loss is counted in units of that number.
FLUSHED = {"soft_cap": 64.0, "power": 16.0}  # x / cap times the cap, x ** (n - 1) times n


def _compare(p, q, form, where, scale=None, allowance=0.0, flushed=4.0):
    """Equal NaN and inf, other numbers within some ulp; a subnormal number may be flushed to 0."""
    size = np.maximum(np.abs(p), np.abs(q))
    size = size if scale is None else np.maximum(size, scale)
    finite = np.isfinite(p) & np.isfinite(q)
    # Near the largest number one of them may have been rounded up to inf.
    verge = (size >= form.max / 2) | (np.minimum(np.abs(p), np.abs(q)) >= form.max * (1 - 8 * form.eps))
    same = (p == q) | (np.isnan(p) & np.isnan(q)) | (~finite & verge & (np.sign(p) == np.sign(q)))
    with np.errstate(invalid="ignore", over="ignore"):
        ulp = np.exp2(np.floor(np.log2(np.clip(size, form.tiny, form.max)))) * form.eps
        near = finite & (np.abs(p / 2 - q / 2) <= ulp * (APART / 2 + allowance) + flushed * form.wide.tiny)
    bad = ~(same | near)
    assert not bad.any(), [(np.asarray(w)[bad][:4], p[bad][:4], q[bad][:4]) for w in where]


@pytest.mark.sampled
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("function", FUNCTIONS, **LABELLED)
def test_both_frameworks_give_the_same_at_every_edge(function, form):
    fmt = FORMATS[form]
    points = function.arguments(fmt) + [edge[0] for edge in function.edges(fmt)]
    columns = [np.asarray(column) for column in zip(*points, strict=True)]
    (value, slopes), (value_2, slopes_2) = (measured(function, fmt, b) for b in ("torch", "jax-jit"))
    with np.errstate(invalid="ignore"):
        scale = np.asarray([float(function.scale(*p)) for p in points])
        allowance = np.asarray([float(function.slope_allowance(*p)) for p in points])
    _compare(value, value_2, fmt, columns, np.where(np.isfinite(scale), scale, 0))
    given = ~np.isnan(columns).any(axis=0)
    for p, q in zip(slopes, slopes_2, strict=True):
        known = np.nan_to_num(allowance, posinf=0.0)[given]
        _compare(p[given], q[given], fmt, [c[given] for c in columns], allowance=known)


@pytest.mark.sampled
@pytest.mark.parametrize("form", ["bfloat16", "float16"])
@pytest.mark.parametrize("function", [f for f in FUNCTIONS if len(f.slopes) == 1], **LABELLED)
def test_both_frameworks_give_the_same_for_every_number_of_a_narrow_format(function, form):
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    numbers = bits.view(getattr(torch, form)).double().numpy()
    results = []
    for backend in ("torch", "jax-jit"):
        run = functools.partial(_with_positional, ours(backend, function.name), function.positional)
        results.append(call(backend, run, [numbers], form))
    (value, (slope,)), (value_2, (slope_2,)) = results
    given = ~np.isnan(numbers)
    assert np.isnan(value[~given]).all()
    assert not np.isnan(value[given]).any()
    finite = np.isfinite(numbers)
    assert not np.isnan(slope[finite]).any()
    allowance = np.asarray([float(function.slope_allowance(x)) for x in numbers[given]])
    flushed = FLUSHED.get(function.name, 4.0)
    _compare(value[given], value_2[given], FORMATS[form], [numbers[given]], flushed=flushed)
    _compare(
        slope[finite],
        slope_2[finite],
        FORMATS[form],
        [numbers[finite]],
        allowance=allowance[finite[given]],
        flushed=flushed,
    )


def _with_positional(run, positional, x):
    return run(x, *positional)


def test_the_power_of_two_below_is_an_exact_power_of_two():
    """Division by it is exact only if every pow gives 2^n exactly."""
    exponents = np.arange(-126, 128)
    x = np.concatenate([np.ldexp(c, exponents) for c in (1.0, 1.3, 1.9999999)]).astype(np.float32)
    eager = power_of_two_below(torch.from_numpy(x), xp=torch_xp).numpy()
    compiled = jax.jit(lambda v: power_of_two_below(v, xp=jnp))(x)
    for found in (eager, np.asarray(compiled)):
        assert (np.frexp(found)[0] == 0.5).all()
        assert (x[x > 1] / found[x > 1] <= 32).all()


def test_xla_removes_a_constant_that_is_added_and_taken_off():
    """This is why no formula adds and subtracts a constant: XLA computes as on paper, and not 0.

    Older releases do this by default, newer ones only with fast math.
    """

    def shifted(u):
        return (1.0 + u) - 1.0

    tiny = np.float32(1e-9)
    assert jax.jit(shifted, compiler_options={"xla_cpu_enable_fast_math": True})(tiny) == tiny
    assert shifted(jnp.asarray(tiny)) == 0.0


def test_xla_multiplies_by_a_divisor_of_the_divisor():
    """This is why no formula divides by ``x / power``: XLA squares the power first, which overflows."""

    def divided(power, x):
        return power / (x / power)

    power, x = np.float32(1e30), np.float32(2e30)
    assert divided(jnp.asarray(power), jnp.asarray(x)) == np.float32(5e29)
    assert jax.jit(divided)(power, x) == np.inf
