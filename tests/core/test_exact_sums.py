"""Norms without rounding on the way: exact, in every order, and alike on every backend."""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import array_api_compat.numpy as npx
import array_api_compat.torch as tx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stablenum.formats import FLOAT32_MAX
from stablenum.norms import exact_sums
from stablenum.norms.exact_sums import Sums, add, as_columns, counted_once, from_columns, norms, summed
from stablenum.norms.wide import Wide

TINY = 2.0**-149
# Every float32 has the same chance, by its bits; and numbers around 1, as gradients of one layer are.
any_finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
alike = st.floats(0.5, 2.0, width=32)
elements = st.lists(any_finite, max_size=40) | st.lists(alike, max_size=40)


def of(values) -> Sums:
    return summed(np.asarray(values, np.float32).view(np.int32), xp=npx)


def stacked(parts) -> Sums:
    return Sums(*(np.stack(column) for column in zip(*parts, strict=True)))


def joined(parts) -> Sums:
    return add(stacked(parts), xp=npx)


def same(a, b) -> bool:
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in zip(a, b, strict=True))


def square(norm) -> Fraction:
    return (Fraction(float(norm.value)) * 2 ** int(norm.power)) ** 2


def assert_within_an_ulp(norm, values) -> None:
    """The sum of squares lies between the squares of the norm's neighbours."""
    true = sum((Fraction(float(np.float32(x))) ** 2 for x in values), start=Fraction(0))
    value = np.float32(norm.value)
    below, above = (np.nextafter(value, np.float32(x)) for x in (-np.inf, np.inf))
    assert square(Wide(max(below, np.float32(0)), norm.power)) <= true
    assert square(Wide(above, norm.power)) >= true


@given(elements)
def test_the_norm_is_within_one_unit_in_the_last_place(values):
    assert_within_an_ulp(norms(of(values), xp=npx), values)


@given(elements, st.data())
def test_the_norm_is_the_same_however_the_elements_are_divided(values, data):
    whole = norms(of(values), xp=npx)
    places = data.draw(st.lists(st.integers(0, 7), min_size=len(values), max_size=len(values)))
    parts = [of([x for x, place in zip(values, places, strict=True) if place == k]) for k in range(8)]
    assert same(norms(joined(parts), xp=npx), whole)
    in_two_steps = joined([joined(parts[:3]), joined(parts[3:])])
    assert same(norms(in_two_steps, xp=npx), whole)


@given(elements)
def test_sums_survive_as_float32(values):
    found = of(values)
    columns = as_columns(found, xp=npx)
    assert columns.dtype == np.float32
    assert columns.shape == (exact_sums.COLUMNS,)
    assert same(from_columns(columns, xp=npx), found)


@given(st.lists(elements, min_size=1, max_size=3))
def test_the_backends_agree_in_every_bit(rows):
    bits = [np.asarray(row, np.float32).view(np.int32) for row in rows]
    want = stacked([summed(row, xp=npx) for row in bits])
    by_torch = [summed(torch.from_numpy(row), xp=tx) for row in bits]
    for one, expected in zip(by_torch, zip(*want, strict=True), strict=True):
        assert same([part.numpy() for part in one], expected)
    expected = norms(want, xp=npx)
    assert same([x.numpy() for x in norms(Sums(*map(torch.from_numpy, want)), xp=tx)], expected)
    # XLA flushes subnormal numbers to zero on a CPU.
    flushed = np.where(expected.value < 2.0**-126, np.float32(0), expected.value)
    assert same(by_jax(len(rows))(Sums(*map(jnp.asarray, want))), (flushed, expected.power))


@functools.cache
def by_jax(n: int):
    del n  # one compilation each
    return jax.jit(functools.partial(norms, xp=jnp))


@pytest.mark.parametrize(
    ("values", "expected"),
    [([], 0.0), ([0.0, -0.0], 0.0), ([math.inf, 1.0], math.inf), ([-math.inf], math.inf)],
)
def test_norms_without_elements_or_of_infinities(values, expected):
    assert norms(of(values), xp=npx) == (expected, 0)
    assert norms(joined([of(values), of([FLOAT32_MAX])]), xp=npx).value == max(expected, FLOAT32_MAX)


def test_nan_counts_more_than_inf():
    assert math.isnan(norms(of([math.inf, math.nan, 1.0]), xp=npx).value)
    assert math.isnan(norms(joined([of([math.inf]), of([math.nan]), of([1.0])]), xp=npx).value)


def test_a_norm_beyond_float32_has_a_power():
    found = norms(of([FLOAT32_MAX] * 4), xp=npx)
    assert (float(found.value), int(found.power)) == (FLOAT32_MAX * 2.0**-63, 64)


@pytest.mark.parametrize("value", [TINY, 2.0**-126, 2.0**-127, 1.0 - 2.0**-24, 1.0, FLOAT32_MAX])
def test_the_norm_of_one_element_is_its_size(value):
    assert norms(of([-value]), xp=npx) == (np.float32(value), 0)


def test_a_root_that_rounds_up_to_a_power_of_two_is_one():
    """(1 - 2**-24)**2 and what is missing to 1, almost."""
    values = [1.0 - 2.0**-24, 2.0**-12, *[2.0**-13] * 3]
    assert norms(of(values), xp=npx) == (1.0, 0)


def test_small_parts_are_left_out_alike_wherever_they_are_summed():
    """Many of them would carry into the large one's limbs, if they were carried before they are left out."""
    small = [2.0**-30 * (1 + 2.0**-23 * k) for k in range(4000)]
    whole = of([1.0, *small])
    assert same(joined([of([1.0]), of(small)]), whole)
    assert same(joined([of([1.0, *small[:7]]), of(small[7:90]), of(small[90:])]), whole)


def test_as_many_elements_as_the_digits_hold():
    """2**32 elements of one size, from sums that are added up 2**7 at a time."""
    one = of([FLOAT32_MAX])
    for _ in range(5):
        one = joined([one] * 128)
    found = norms(one, xp=npx)
    assert int(found.power) == 64
    np.testing.assert_allclose(float(found.value), FLOAT32_MAX * 2.0 ** (17.5 - 64), rtol=1e-7)


def test_the_digits_keep_carries_within_their_limb(monkeypatch):
    """What the tests above find, if a carry is lost."""
    monkeypatch.setattr(exact_sums, "digits_of", lambda digits, *, xp: [d & 0xFFFF for d in digits])
    parts = [of([1.9999]) for _ in range(8)]
    assert not same(norms(joined(parts), xp=npx), norms(of([1.9999] * 8), xp=npx))


def test_a_copy_counts_once_unless_it_is_not_finite():
    """A copy that has gone bad on one rank alone must not be left out with the good ones."""
    sums = stacked([of([3.0]), of([4.0]), of([5.0])])
    once = counted_once(sums, np.asarray([True, True, False]), xp=npx)
    assert float(norms(add(once, xp=npx), xp=npx).value) == 5.0
    bad = stacked([of([3.0]), of([math.nan])])
    once = counted_once(bad, np.asarray([True, False]), xp=npx)
    assert math.isnan(float(norms(add(once, xp=npx), xp=npx).value))
