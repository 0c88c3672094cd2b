"""Compensated updates and stochastic rounding, compared with ml_dtypes, exact fractions and long sums."""

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
from hypothesis import given, settings
from hypothesis import strategies as some

from stablenum.precision.rounding import (
    compensated_value,
    kahan_add,
    round_stochastically,
    round_to_nearest,
)
from tests.backends import BACKENDS, to_numpy
from tests.selection import only

NAMESPACES = {name: BACKENDS[name].xp for name in ("numpy", "torch", "jax")}
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
ODD_NAN = np.asarray([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)


@pytest.fixture(params=only(["numpy", "torch"], NAMESPACES))
def name(request: pytest.FixtureRequest) -> str:
    """A namespace. That JAX keeps the same bits as the others is tested in every run, below."""
    return str(request.param)


@pytest.fixture(autouse=True)
def _quiet():
    """Silence NumPy, the only namespace that warns about values that are not selected afterwards."""
    with np.errstate(all="ignore"):
        yield


def kahan(name: str):
    """``kahan_add`` in the namespace; compiled in JAX, because it is slow there otherwise."""
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


def no_compensation(name: str, w):
    """A compensation of zeros, in the dtype that belongs to ``w``."""
    xp = NAMESPACES[name]
    return xp.zeros_like(w, dtype=xp.float32 if w.dtype == xp.float32 else xp.int16)


def whole(name: str, w, c) -> np.ndarray:
    """``w + c`` in float64, with the unit computed from the weight itself by ``frexp``."""
    wide, units = as_float32(w).astype(np.float64), np.asarray(c).astype(np.float64)
    exponent = np.frexp(np.where(np.isfinite(wide), wide, 1.0))[1] - 1
    fmt = str(w.dtype).removeprefix("torch.")
    if fmt == "float32":
        return wide + units
    spacing = np.maximum(exponent, -14) - 10 if fmt == "float16" else exponent - 7
    return wide + units * 2.0 ** (spacing - 16)


def as_float32(values) -> np.ndarray:
    if isinstance(values, torch.Tensor):
        return values.float().numpy()
    return np.asarray(values).astype(np.float32)


def many_numbers() -> np.ndarray:
    """float32 numbers of all sizes, the limits of both formats and the numbers next to them."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)
    edges = [65504, 65519.99, 65520, 2.0**-14, 2.0**-24, 2.0**-25, 2.0**-26, 3.39e38, 0.0, 1.0, math.inf]
    edges += [448, 464, 57344, 61440, 2.0**-6, 2.0**-9, 2.0**-10, 2.0**-11, 2.0**-16, 2.0**-17, 2.0**-18]
    near = np.asarray(edges, np.float32)
    near = np.concatenate([near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(math.inf))])
    halves = (2.0 ** rng.integers(-30, 16, 20_000) * (1 + rng.integers(0, 4096, 20_000) / 4096)).astype(
        np.float32
    )
    found = np.concatenate([bits, near, -near, halves, ODD_NAN])
    # XLA's CPU code treats float32's subnormals as 0.
    return found[~((np.abs(found) < 2.0**-126) & (found != 0))]


FLOAT8 = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}


@pytest.mark.sampled
@pytest.mark.parametrize("fmt", DTYPES | FLOAT8)
def test_to_nearest_is_the_cast_but_saturates(name: str, fmt: str) -> None:
    x = many_numbers()
    got = as_float32(round_to_nearest(array(name, x), fmt, xp=NAMESPACES[name]))
    with np.errstate(all="ignore"):
        dtype = (DTYPES | FLOAT8)[fmt]
        top = float(ml_dtypes.finfo(dtype).max)
        # e4m3 has no inf: what rounds beyond its largest number is NaN.
        cast = np.clip(x, -2 * top, 2 * top).astype(dtype).astype(np.float32)
        cast = np.where(np.isnan(cast), np.copysign(top, x), cast)
    expected = np.where(np.isfinite(x), np.clip(cast, -top, top), x)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(np.signbit(got[x == 0]), np.signbit(x[x == 0]))


def test_float32_is_unchanged() -> None:
    x = np.asarray([1.1, math.nan], np.float32)
    assert round_to_nearest(x, "float32", xp=NAMESPACES["numpy"]) is x


def test_stochastic_rounding_gives_a_neighbour_and_the_exact_mean(name: str) -> None:
    """Over all 65,536 values of the random bits, the mean, in exact fractions, is the number itself."""
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


def test_stochastic_rounding_passes_non_finite_values_and_saturates_finite_ones(name: str) -> None:
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


@pytest.mark.sampled
@pytest.mark.parametrize("fmt", DTYPES)
def test_a_thousand_updates_that_rounding_would_lose_are_kept(name: str, fmt: str) -> None:
    """The weight alone is within 2 % of the way (its format's precision), with the compensation 0.1 %."""
    xp, add = NAMESPACES[name], kahan(name)
    w = array(name, np.ones(3, np.float32), fmt)
    c, plain = no_compensation(name, w), w
    u = array(name, np.full(3, -1e-4, np.float32))
    for _ in range(1000):
        w, c = add(w, c, u)
        plain = xp.astype(xp.astype(plain, xp.float32) + u, plain.dtype)
    np.testing.assert_array_equal(as_float32(w), np.float32(0.9).astype(DTYPES[fmt]).astype(np.float32))
    np.testing.assert_allclose(1 - as_float32(w), 0.1, rtol=0.02)
    np.testing.assert_allclose(1 - whole(name, w, c), 0.1, rtol=1e-3)
    np.testing.assert_allclose(whole(name, w, c), 1 - 1000 * np.float64(np.float32(1e-4)), rtol=1e-4)
    assert (as_float32(plain) == 1).all()


@pytest.mark.parametrize("fmt", DTYPES)
def test_an_update_of_one_unit_is_kept_and_a_quarter_of_it_is_not(name: str, fmt: str) -> None:
    """Updates of one unit (2^-24 for a bfloat16 weight below 1) add up; a quarter of it does not."""
    add, lowest = kahan(name), -24 if fmt == "bfloat16" else -27
    for size, moves in ((2.0**lowest, True), (2.0 ** (lowest - 2), False)):
        w = array(name, np.full(1, 0.75, np.float32), fmt)
        c = no_compensation(name, w)
        for _ in range(300):
            w, c = add(w, c, array(name, np.full(1, -size, np.float32)))
        assert whole(name, w, c)[0] == 0.75 - 300 * size * moves


@pytest.mark.sampled
@pytest.mark.parametrize("fmt", DTYPES)
def test_long_random_streams_against_float64(name: str, fmt: str) -> None:
    """Weight and compensation together are as close to the exact sum as a float32 weight."""

    @settings(max_examples=15, deadline=None)
    @given(seed=some.integers(0, 2**32 - 1), size=some.sampled_from([1e-6, 1e-4, 1e-2, 1.0]))
    def check(seed: int, size: float) -> None:
        rng = np.random.default_rng(seed)
        w = array(name, rng.normal(size=32).astype(np.float32), fmt)
        c, exact = no_compensation(name, w), as_float32(w).astype(np.float64)
        largest = np.abs(exact)
        for _ in range(100):
            u = (rng.normal(size=32) * size).astype(np.float32)
            exact += u
            largest = np.maximum(largest, np.abs(exact))
            w, c = add(w, c, array(name, u))
        assert (np.abs(whole(name, w, c) - exact) <= 100 * 2.0**-23 * (largest + size)).all()
        got = as_float32(value(w, c))
        np.testing.assert_array_equal(got, whole(name, w, c).astype(np.float32))

    add, value = kahan(name), functools.partial(compensated_value, xp=NAMESPACES[name])
    check()


@pytest.mark.parametrize("fmt", DTYPES)
def test_every_namespace_keeps_the_same_bits(fmt: str) -> None:
    """This includes weights that nearly cancel or change exponent, and the smallest and largest numbers."""

    @settings(max_examples=25, deadline=None)
    @given(seed=some.integers(0, 2**32 - 1))
    def check(seed: int) -> None:
        rng, n = np.random.default_rng(seed), 64
        least, most = (-95, 127) if fmt == "bfloat16" else (-24, 15)
        w = (rng.normal(size=n) * 2.0 ** rng.integers(least, most, n)).astype(np.float32)
        w[:2] = 0.0, 2.0**least
        w = w.astype(DTYPES[fmt])
        pairs = {key: (array(key, w.astype(np.float32), fmt), None) for key in NAMESPACES}
        pairs = {key: (start, no_compensation(key, start)) for key, (start, _) in pairs.items()}
        for _ in range(4):
            now = as_float32(pairs["numpy"][0])
            u = (now * rng.normal(size=n) * 2.0 ** rng.integers(-26, 3, n)).astype(np.float32)
            u = np.where(rng.random(n) < 0.2, -now, u) + np.float32(2.0**-90)
            pairs = {key: adds[key](w, c, array(key, u)) for key, (w, c) in pairs.items()}
            w, c = pairs["numpy"]
            assert c.dtype == np.int16
            for other, kept in (pairs["torch"], pairs["jax"]):
                np.testing.assert_array_equal(as_float32(other), as_float32(w))
                np.testing.assert_array_equal(np.asarray(kept), c)

    adds = {key: kahan(key) for key in NAMESPACES}
    check()


@pytest.mark.sampled
@pytest.mark.parametrize("fmt", DTYPES)
def test_numbers_near_zero_have_no_compensation_or_a_finite_one(name: str, fmt: str) -> None:
    xp, add = NAMESPACES[name], kahan(name)
    tiny = [0.0, -0.0, 2.0**-24, 2.0**-14, 2.0**-100, -(2.0**-126)]
    w = array(name, np.asarray(tiny, np.float32), fmt)
    c = xp.astype(xp.full_like(no_compensation(name, w), 32767), xp.int16)  # no update produces this
    for u in (0.0, 2.0**-30, -(2.0**-120)):
        value = as_float32(compensated_value(w, c, xp=xp))
        assert np.isfinite(value).all()
        assert (np.abs(value - as_float32(w)) <= np.maximum(np.abs(as_float32(w)) * 2.0**-8, 2.0**-25)).all()
        w, c = add(w, c, array(name, np.full(len(tiny), u, np.float32)))
    if fmt == "bfloat16":
        assert np.asarray(c)[-2] == 0
    zero = array(name, np.zeros(1, np.float32), fmt)
    w, c = add(zero, no_compensation(name, zero), array(name, np.full(1, 1.001e-3, np.float32)))
    np.testing.assert_allclose(whole(name, w, c), np.float32(1.001e-3), rtol=2.0**-24)


def test_a_weight_too_small_for_a_unit_has_no_compensation(name: str) -> None:
    """Such a pair arises if a weight is overwritten after its compensation was computed."""
    xp, add = NAMESPACES[name], kahan(name)
    w = array(name, np.asarray([2.0**-102, 2.0**-103, -(2.0**-120), 0.0], np.float32), "bfloat16")
    c = xp.astype(xp.full_like(no_compensation(name, w), 2**14), xp.int16)
    # A unit is 2^-125 of the first, and there is none below.
    wanted = [2.0**-102 + 2.0**-111, 2.0**-103, -(2.0**-120), 0.0]
    assert as_float32(compensated_value(w, c, xp=xp)).tolist() == wanted
    w, c = add(w, c, array(name, np.zeros(4, np.float32)))
    assert as_float32(w).tolist() == [2.0**-102, *wanted[1:]]
    assert np.asarray(c).tolist() == [2**14, 0, 0, 0]


def test_the_compensation_of_a_changed_weight_is_at_most_half_a_spacing(name: str) -> None:
    xp, add = NAMESPACES[name], kahan(name)
    w = array(name, np.full(2, 1000.0, np.float32), "bfloat16")
    w, c = add(w, no_compensation(name, w), array(name, np.asarray([1.9, -1.9], np.float32)))
    loaded = array(name, np.asarray([0.001, 3.0], np.float32), "bfloat16")
    value = as_float32(compensated_value(loaded, c, xp=xp))
    assert (np.abs(value / as_float32(loaded) - 1) <= 2.0**-8).all()


def test_compilers_do_not_remove_the_rounding() -> None:
    """XLA may skip a conversion to bfloat16 and back, which would leave nothing to compensate."""

    @jax.jit
    def run(w, c):
        return jax.lax.fori_loop(
            0, 1000, lambda _, wc: kahan_add(*wc, jnp.full_like(w, -1e-4), xp=jnp), (w, c)
        )

    w, c = run(jnp.ones(3, jnp.bfloat16), jnp.zeros(3, jnp.int16))
    xp = NAMESPACES["torch"]
    tw, tc = torch.ones(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int16)
    for _ in range(1000):
        tw, tc = kahan_add(tw, tc, torch.full_like(tw, -1e-4), xp=xp)
    np.testing.assert_array_equal(as_float32(w), as_float32(tw))
    np.testing.assert_array_equal(as_float32(c), as_float32(tc))


def test_torch_compile_gives_the_same_bits() -> None:
    xp, g = NAMESPACES["torch"], torch.Generator().manual_seed(1)
    w = torch.randn(100, generator=g).bfloat16()
    c, u = torch.zeros_like(w, dtype=torch.int16), torch.randn(100, generator=g) * 1e-3
    compiled = torch.compile(lambda *a: kahan_add(*a, xp=xp), fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(w, c, u), kahan_add(w, c, u, xp=xp), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("fmt", [*DTYPES, "float32"])
def test_non_finite_values_pass_through_and_do_not_enter_the_compensation(name: str, fmt: str) -> None:
    xp = NAMESPACES[name]
    bad = np.asarray([math.nan, math.inf, -math.inf, 1.0], np.float32)
    cast = None if fmt == "float32" else fmt
    ones = array(name, np.ones(4, np.float32), cast)
    for w, u in ((ones, array(name, bad)), (array(name, bad, cast), ones)):
        moved, rest = (as_float32(part) for part in kahan_add(w, no_compensation(name, w), u, xp=xp))
        np.testing.assert_array_equal(moved[:3], bad[:3])
        np.testing.assert_array_equal(rest, 0)


@pytest.mark.sampled
@pytest.mark.parametrize("fmt", [*DTYPES, "float32"])
def test_finite_sums_saturate_and_later_updates_apply(name: str, fmt: str) -> None:
    xp = NAMESPACES[name]
    top = float(np.finfo(np.float32).max if fmt == "float32" else ml_dtypes.finfo(DTYPES[fmt]).max)
    cast = None if fmt == "float32" else fmt
    w = array(name, np.asarray([top, -top], np.float32), cast)
    c, u = no_compensation(name, w), array(name, np.asarray([top, -top], np.float32))
    for _ in range(5):
        w, c = kahan_add(w, c, u, xp=xp)
    np.testing.assert_array_equal(as_float32(w), [top, -top])
    w, _ = kahan_add(w, c, -u, xp=xp)
    np.testing.assert_array_equal(as_float32(w), [0, 0])


def test_empty_and_scalar(name: str) -> None:
    xp = NAMESPACES[name]
    for shape in ((0,), ()):
        w = array(name, np.ones(shape, np.float32), "float16")
        moved, rest = kahan_add(w, no_compensation(name, w), w, xp=xp)
        assert (moved.shape, rest.shape, moved.dtype) == (w.shape, w.shape, w.dtype)
        x = array(name, np.ones(shape, np.float32))
        bits = array(name, np.zeros(shape, np.int32))
        assert to_numpy(round_stochastically(x, bits, xp=xp)).shape == shape


def test_wrong_input_is_named() -> None:
    xp, one = NAMESPACES["numpy"], np.ones(2, np.float32)
    with pytest.raises(ValueError, match="w must be bfloat16, float16 or float32"):
        kahan_add(np.ones(2), np.ones(2), np.ones(2), xp=xp)
    half = one.astype(np.float16)
    with pytest.raises(ValueError, match="c must be int16 for float16 weights"):
        kahan_add(half, half, half, xp=xp)
    with pytest.raises(ValueError, match="c must be float32 for float32 weights"):
        compensated_value(one, np.ones(2, np.int16), xp=xp)
    with pytest.raises(
        ValueError, match="format must be bfloat16, float16, float32, float8_e4m3fn or float8_e5m2"
    ):
        round_to_nearest(one, "float64", xp=xp)
    with pytest.raises(ValueError, match="x32 must be float32"):
        round_to_nearest(np.ones(2), "float16", xp=xp)
    with pytest.raises(ValueError, match="x32 must be float32"):
        round_stochastically(np.ones(2), np.ones(2, np.int32), xp=xp)
    with pytest.raises(ValueError, match=r"random_bits must be of x32's shape \(2,\)"):
        round_stochastically(one, np.ones(3, np.int32), xp=xp)
