"""Compensated updates and stochastic rounding, against ml_dtypes, exact fractions and long sums."""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from stablenum.rounding import kahan_add, round_stochastically, round_to_nearest
from tests.backends import BACKENDS, to_numpy

NAMESPACES = {name: BACKENDS[name].xp for name in ("numpy", "torch", "jax")}
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
ODD_NAN = np.asarray([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)


@pytest.fixture(params=list(NAMESPACES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _quiet():
    """NumPy alone warns of what is computed before it is selected from."""
    with np.errstate(all="ignore"):
        yield


def kahan(name: str):
    """``kahan_add`` of the namespace, compiled in JAX, where it is slow otherwise."""
    run = functools.partial(kahan_add, xp=NAMESPACES[name])
    return jax.jit(run) if name == "jax" else run


def array(name: str, values: np.ndarray, dtype: str | None = None):
    """NumPy values, bit for bit, as an array of the namespace, in ``dtype``."""
    made = torch.from_numpy(values) if name == "torch" else jnp.asarray(values) if name == "jax" else values
    if dtype is None:
        return made
    if name == "numpy":
        return made.astype(DTYPES[dtype])
    return NAMESPACES[name].astype(made, getattr(NAMESPACES[name], dtype))


def as_float32(values) -> np.ndarray:
    if isinstance(values, torch.Tensor):
        return values.float().numpy()
    return np.asarray(values).astype(np.float32)


def many_numbers() -> np.ndarray:
    """float32 numbers of all sizes, the edges of both formats and what lies right beside them."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)
    edges = [65504, 65519.99, 65520, 2.0**-14, 2.0**-24, 2.0**-25, 2.0**-26, 3.39e38, 0.0, 1.0, math.inf]
    near = np.asarray(edges, np.float32)
    near = np.concatenate([near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(math.inf))])
    halves = (2.0 ** rng.integers(-30, 16, 20_000) * (1 + rng.integers(0, 4096, 20_000) / 4096)).astype(
        np.float32
    )
    found = np.concatenate([bits, near, -near, halves, ODD_NAN])
    # XLA's CPU code takes float32's subnormals for 0.
    return found[~((np.abs(found) < 2.0**-126) & (found != 0))]


@pytest.mark.parametrize("fmt", DTYPES)
def test_to_nearest_is_the_cast_but_saturates(name: str, fmt: str) -> None:
    x = many_numbers()
    got = as_float32(round_to_nearest(array(name, x), fmt, xp=NAMESPACES[name]))
    with np.errstate(all="ignore"):
        cast = x.astype(DTYPES[fmt]).astype(np.float32)
    top = float(ml_dtypes.finfo(DTYPES[fmt]).max)
    expected = np.where(np.isfinite(x), np.clip(cast, -top, top), x)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(np.signbit(got[x == 0]), np.signbit(x[x == 0]))


def test_float32_is_left_alone() -> None:
    x = np.asarray([1.1, math.nan], np.float32)
    assert round_to_nearest(x, "float32", xp=NAMESPACES["numpy"]) is x


def test_stochastic_rounding_is_a_neighbour_and_right_in_the_mean(name: str) -> None:
    """Over all 65,536 values of the random bits the mean is the number itself, as exact fractions."""
    every = np.arange(2**16, dtype=np.int32)
    for x in (1.001, -3.7e-5, 1e-30, 250.3, -1.0):
        x = np.float32(x)
        got = as_float32(
            round_stochastically(array(name, np.full(2**16, x)), array(name, every), xp=NAMESPACES[name])
        )
        values, counts = np.unique(got, return_counts=True)
        assert sum(Fraction(float(v)) * int(n) for v, n in zip(values, counts)) / 2**16 == Fraction(float(x))
        assert len(values) <= 2
        assert (values.astype(ml_dtypes.bfloat16).astype(np.float32) == values).all()


def test_stochastic_rounding_passes_what_is_not_finite_and_saturates_what_is(name: str) -> None:
    top = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
    x = np.concatenate([ODD_NAN, np.asarray([math.inf, -math.inf, 3.4e38, -3.4e38, top, 0.0], np.float32)])
    for bits in (0, 0xFFFF, -1, 2**31 - 1):
        noise = array(name, np.full(len(x), bits, np.int32))
        got = as_float32(round_stochastically(array(name, x), noise, xp=NAMESPACES[name]))
        assert np.isnan(got[:3]).all(), "0x7fffffff + noise is -0.0 where bits alone are looked at"
        np.testing.assert_array_equal(got[3:], [math.inf, -math.inf, top, -top, top, 0.0])


def test_the_random_bits_may_be_unsigned() -> None:
    x = np.full(4, 1.001, np.float32)
    for dtype in (np.uint16, np.uint32, np.int64):
        bits = np.asarray([0, 0xFFFF, 0, 0xFFFF], dtype)
        assert round_stochastically(x, bits, xp=NAMESPACES["numpy"]).tolist() == [1.0, 1.0078125] * 2
    bits = jax.random.bits(jax.random.key(0), (4,), jnp.uint32)
    assert round_stochastically(jnp.asarray(x), bits, xp=jnp).dtype == jnp.float32


@pytest.mark.parametrize("fmt", DTYPES)
def test_a_thousand_lost_updates(name: str, fmt: str) -> None:
    """The weight goes the way to within its own spacing; with the compensation to within 1 %."""
    xp, add = NAMESPACES[name], kahan(name)
    w = array(name, np.ones(3, np.float32), fmt)
    c, plain = xp.zeros_like(w), w
    u = array(name, np.full(3, -1e-4, np.float32))
    for _ in range(1000):
        w, c = add(w, c, u)
        plain = xp.astype(xp.astype(plain, xp.float32) + u, plain.dtype)
    spacing = float(ml_dtypes.finfo(DTYPES[fmt]).eps) / 2
    np.testing.assert_allclose(1 - as_float32(w), 0.1, atol=0.75 * spacing)
    np.testing.assert_allclose(1 - (as_float32(w) + as_float32(c)), 0.1, rtol=0.01)
    assert (as_float32(plain) == 1).all()


def test_what_compensation_of_16_bits_cannot_hold(name: str) -> None:
    """An update below 2^-18 of a bfloat16 weight is lost in the compensation itself, in the end."""
    add = kahan(name)
    for size, moves in ((2.0**-17, True), (2.0**-19, False)):
        w = array(name, np.ones(1, np.float32), "bfloat16")
        c = array(name, np.full(1, -(2.0**-9) * 0.75, np.float32), "bfloat16")
        for _ in range(300):
            w, c = add(w, c, array(name, np.full(1, -size, np.float32)))
        assert (as_float32(w)[0] < 1) is np.bool_(moves)


def test_a_compiler_does_not_undo_it() -> None:
    """XLA may skip a conversion to bfloat16 and back, which would leave nothing to compensate."""

    @jax.jit
    def run(w, c):
        return jax.lax.fori_loop(
            0, 1000, lambda _, wc: kahan_add(*wc, jnp.full_like(w, -1e-4), xp=jnp), (w, c)
        )

    w, c = run(jnp.ones(3, jnp.bfloat16), jnp.zeros(3, jnp.bfloat16))
    xp = NAMESPACES["torch"]
    tw, tc = torch.ones(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)
    for _ in range(1000):
        tw, tc = kahan_add(tw, tc, torch.full_like(tw, -1e-4), xp=xp)
    np.testing.assert_array_equal(as_float32(w), as_float32(tw))
    np.testing.assert_array_equal(as_float32(c), as_float32(tc))


def test_torch_compiles_it_to_the_same() -> None:
    xp, g = NAMESPACES["torch"], torch.Generator().manual_seed(1)
    w = torch.randn(100, generator=g).bfloat16()
    c, u = torch.zeros_like(w), torch.randn(100, generator=g) * 1e-3
    compiled = torch.compile(lambda *a: kahan_add(*a, xp=xp), fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(w, c, u), kahan_add(w, c, u, xp=xp), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("fmt", DTYPES)
def test_random_sums_against_float64(name: str, fmt: str) -> None:
    xp, add, rng = NAMESPACES[name], kahan(name), np.random.default_rng(5)
    start = rng.normal(size=50).astype(np.float32)
    w = array(name, start, fmt)
    c, exact = xp.zeros_like(w), as_float32(w).astype(np.float64)
    for _ in range(300):
        u = (rng.normal(size=50) * 1e-3 + 1e-4).astype(np.float32)
        exact += u
        w, c = add(w, c, array(name, u))
    eps = float(ml_dtypes.finfo(DTYPES[fmt]).eps)
    assert (np.abs(as_float32(w) - exact) <= np.abs(exact) * eps + 300 * eps * eps).all()


@pytest.mark.parametrize("fmt", [*DTYPES, "float32"])
def test_not_finite_passes_through_and_leaves_no_trace(name: str, fmt: str) -> None:
    xp = NAMESPACES[name]
    bad = np.asarray([math.nan, math.inf, -math.inf, 1.0], np.float32)
    cast = None if fmt == "float32" else fmt
    ones = array(name, np.ones(4, np.float32), cast)
    for w, u in ((ones, array(name, bad)), (array(name, bad, cast), ones)):
        moved, rest = (as_float32(part) for part in kahan_add(w, xp.zeros_like(w), u, xp=xp))
        np.testing.assert_array_equal(moved[:3], bad[:3])
        np.testing.assert_array_equal(rest, 0)


@pytest.mark.parametrize("fmt", [*DTYPES, "float32"])
def test_finite_sums_saturate_and_come_back(name: str, fmt: str) -> None:
    xp = NAMESPACES[name]
    top = float(np.finfo(np.float32).max if fmt == "float32" else ml_dtypes.finfo(DTYPES[fmt]).max)
    cast = None if fmt == "float32" else fmt
    w = array(name, np.asarray([top, -top], np.float32), cast)
    c, u = xp.zeros_like(w), array(name, np.asarray([top, -top], np.float32))
    for _ in range(5):
        w, c = kahan_add(w, c, u, xp=xp)
    np.testing.assert_array_equal(as_float32(w), [top, -top])
    w, _ = kahan_add(w, c, -u, xp=xp)
    np.testing.assert_array_equal(as_float32(w), [0, 0])


def test_empty_and_scalar(name: str) -> None:
    xp = NAMESPACES[name]
    for shape in ((0,), ()):
        w = array(name, np.ones(shape, np.float32), "float16")
        moved, rest = kahan_add(w, xp.zeros_like(w), w, xp=xp)
        assert (moved.shape, rest.shape, moved.dtype) == (w.shape, w.shape, w.dtype)
        x = array(name, np.ones(shape, np.float32))
        bits = array(name, np.zeros(shape, np.int32))
        assert to_numpy(round_stochastically(x, bits, xp=xp)).shape == shape


def test_wrong_input_is_named() -> None:
    xp, one = NAMESPACES["numpy"], np.ones(2, np.float32)
    with pytest.raises(ValueError, match="w must be of the format bfloat16, float16, float32"):
        kahan_add(np.ones(2), np.ones(2), np.ones(2), xp=xp)
    with pytest.raises(ValueError, match="format must be of the format"):
        round_to_nearest(one, "float8_e5m2", xp=xp)
    with pytest.raises(ValueError, match="x32 must be float32"):
        round_to_nearest(np.ones(2), "float16", xp=xp)
    with pytest.raises(ValueError, match="x32 must be float32"):
        round_stochastically(np.ones(2), np.ones(2, np.int32), xp=xp)
    with pytest.raises(ValueError, match=r"random_bits must be of x32's shape \(2,\)"):
        round_stochastically(one, np.ones(3, np.int32), xp=xp)
