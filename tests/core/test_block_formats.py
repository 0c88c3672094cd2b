"""Block formats against exact arithmetic: every code, every scale mode, blocks of any kind."""

from __future__ import annotations

import math
from fractions import Fraction

import array_api_compat.numpy as xp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stablenum.precision import Quantized, block_law
from stablenum.precision.blocks.elements import ELEMENTS, decoded, encoded
from stablenum.precision.blocks.law import FORMATS_OF_BLOCKS
from stablenum.precision.blocks.scales import SCALE_MODES

KNOWN = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
POWERS = [(name, mode) for name, f in FORMATS_OF_BLOCKS.items() if f.scale == "e8m0" for mode in SCALE_MODES]


def number_of(code: int, element) -> Fraction | None:
    """The number of a code, from the text of the specification; None for NaN and inf."""
    sign = -1 if code >> (element.bits - 1) else 1
    field = (code >> element.mantissa) & ((1 << element.exponent) - 1)
    mantissa = Fraction(code & ((1 << element.mantissa) - 1), 1 << element.mantissa)
    if element.name == "e5m2" and field == 31:
        return None
    if element.name == "e4m3" and field == 15 and mantissa == Fraction(7, 8):
        return None
    whole, exponent = (1, field - element.bias) if field else (0, 1 - element.bias)
    return sign * (whole + mantissa) * Fraction(2) ** exponent


def table(element) -> list[tuple[Fraction, int]]:
    """The non-negative numbers and their codes, in order."""
    codes = range(1 << (element.bits - 1))
    return sorted((n, code) for code in codes if (n := number_of(code, element)) is not None)


def nearest(x: Fraction, element) -> int:
    """The code of the nearest number: of two, the one whose last bit is 0; the largest beyond it."""
    numbers = table(element)
    best = min(numbers, key=lambda row: (abs(row[0] - abs(x)), row[1] & 1))
    return best[1] | (1 << (element.bits - 1) if x < 0 else 0)


def scale_of(block: np.ndarray, element, mode: str) -> int:
    """The exponent of the scale of a block that is finite and not 0."""
    m = Fraction(float(np.abs(block).max()))
    below = math.floor(math.log2(m)) if m >= Fraction(2) ** -1000 else -200
    while Fraction(2) ** (below + 1) <= m:
        below += 1
    while Fraction(2) ** below > m:
        below -= 1
    exponent = {
        "floor": below,
        "ceil": below + (Fraction(2) ** below != m),
        "even": below + (m >= (2 - Fraction(1, 2 << element.mantissa)) * Fraction(2) ** below),
    }.get(mode)
    if exponent is None:
        exponent = below - 20
        while Fraction(element.max) * Fraction(2) ** (exponent - element.max_exponent) < m:
            exponent += 1
    return min(max(exponent - element.max_exponent, -127), 127)


@pytest.mark.parametrize("name", ELEMENTS)
def test_every_code_is_the_number_of_the_specification_and_of_ml_dtypes(name: str) -> None:
    element = ELEMENTS[name]
    codes = np.arange(1 << element.bits, dtype=np.uint8)
    ours = decoded(codes, element, xp=xp)
    theirs = codes.view(KNOWN[name]).astype(np.float32)
    np.testing.assert_array_equal(ours, theirs)
    for code, value in zip(codes.tolist(), ours.tolist(), strict=True):
        exact = number_of(code, element)
        assert exact == Fraction(value) if exact is not None else not math.isfinite(value)


@pytest.mark.parametrize("name", ELEMENTS)
def test_every_number_and_every_midpoint_rounds_as_ml_dtypes_rounds_it(name: str) -> None:
    element = ELEMENTS[name]
    numbers = np.array([float(n) for n, _ in table(element)], np.float32)
    middle = (numbers[1:] + numbers[:-1]) / 2
    x = np.concatenate([numbers, middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, 1e9)])
    x = np.concatenate([x, -x]).astype(np.float32)
    ours = encoded(x, element, xp=xp)
    theirs = x.astype(KNOWN[name]).view(np.uint8) & ((1 << element.bits) - 1)
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", ELEMENTS)
def test_what_is_beyond_a_format_saturates_and_nan_is_nan_or_zero(name: str) -> None:
    element = ELEMENTS[name]
    x = np.array([np.inf, -np.inf, 3e38, -3e38, np.nan, -0.0, 1e-44], np.float32)
    codes, sign = encoded(x, element, xp=xp).tolist(), 1 << (element.bits - 1)
    top = element.max_code
    assert codes == [top, top | sign, top, top | sign, element.nan or 0, sign, 0]


@pytest.mark.parametrize(("name", "mode"), POWERS)
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-140, 126), spread=st.integers(0, 12))
@settings(max_examples=20, deadline=None)
def test_a_block_of_a_power_of_two_is_that_of_exact_arithmetic(
    name: str, mode: str, seed: int, exponent: int, spread: int
) -> None:
    law, random = block_law(name, mode), np.random.default_rng(seed)
    element = law.format.element
    size = random.integers(1, 33)
    with np.errstate(all="ignore"):
        x = (random.normal(size=size) * 2.0 ** (exponent - random.uniform(0, spread, size))).astype(
            np.float32
        )
    x = np.clip(x, -2.9e38, 2.9e38)
    if random.random() < 0.3:  # next to the largest number of the format, times a power of two
        top = np.float32(element.max * 2.0 ** random.integers(-90, 90))
        x[0] = np.nextafter(top, np.float32(random.choice([0, np.inf])))
    found = law.quantize(x)
    if not x.any():
        assert found.scales.tolist() == [0]
        return
    scale = scale_of(x, element, mode)
    assert found.scales.tolist() == [scale + 127]
    exact = [nearest(Fraction(float(v)) / Fraction(2) ** scale, element) for v in x]
    exact = [
        code | (1 << (element.bits - 1) if math.copysign(1, v) < 0 else 0)
        for code, v in zip(exact, x, strict=True)
    ]
    assert found.codes.tolist() == exact
    back = law.dequantize(found)
    for code, value in zip(found.codes.tolist(), back.tolist(), strict=True):
        number = number_of(code, element)
        assert number is not None
        assert Fraction(value) == number * Fraction(2) ** scale


@pytest.mark.parametrize("name", FORMATS_OF_BLOCKS)
def test_a_block_with_a_number_that_is_not_finite_is_nan_and_others_are_not(name: str) -> None:
    law = block_law(name)
    block = law.format.block
    for bad in (np.nan, np.inf, -np.inf):
        x = np.ones(3 * block, np.float32)
        x[block + 1] = bad
        back = law.dequantize(law.quantize(x)).reshape(3, block)
        assert np.isnan(back[1]).all()
        expected = np.isnan if name == "nvfp4" else np.isfinite  # its one scale for all is not finite either
        assert expected(back[0]).all()
        assert expected(back[2]).all()


@pytest.mark.parametrize("name", FORMATS_OF_BLOCKS)
@pytest.mark.parametrize("shape", [(1,), (5, 3), (2, 33, 4), (0,), (3, 0), (130, 200)])
def test_blocks_lie_along_any_axis_and_need_not_be_full(name: str, shape: tuple[int, ...]) -> None:
    law = block_law(name)
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    for axis in range(len(shape)):
        found = law.quantize(x, axis)
        blocks = list(shape)
        blocks[axis] = -(-shape[axis] // law.format.block)
        assert found.codes.shape == shape
        assert found.scales.shape == tuple(blocks)
        other = law.quantize(np.moveaxis(x, axis, -1))
        np.testing.assert_array_equal(found.codes, np.moveaxis(other.codes, -1, axis))
        np.testing.assert_array_equal(found.scales, np.moveaxis(other.scales, -1, axis))
        np.testing.assert_array_equal(law.quantize(x, axis - len(shape)).codes, found.codes)
        assert law.dequantize(found).shape == shape


def test_square_blocks_have_the_largest_of_both_axes() -> None:
    law = block_law("fp8_block128")
    x = np.random.default_rng(0).normal(size=(130, 2, 200)).astype(np.float32)
    found = law.quantize(x, (0, -1))
    assert found.scales.shape == (2, 2, 2)
    assert found.scales[0, 1, 1] == np.abs(x[:128, 1, 128:]).max() / np.float32(448)
    np.testing.assert_allclose(law.dequantize(found), x, rtol=0.07, atol=0.01)


def test_scales_of_nvfp4_are_those_of_its_two_levels() -> None:
    x = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    found = block_law("nvfp4").quantize(x)
    largest = np.abs(x).reshape(4, 4, 16).max(-1)
    assert found.tensor_scale == np.float32(np.abs(x).max()) / np.float32(448 * 6)
    scale = (largest / np.float32(6) / found.tensor_scale).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(found.scales, scale.view(np.uint8))
    inverse = (np.float32(1) / found.tensor_scale) / scale.astype(np.float32)
    codes = (x.reshape(4, 4, 16) * inverse[..., None]).reshape(4, 64).astype(ml_dtypes.float4_e2m1fn)
    np.testing.assert_array_equal(found.codes, codes.view(np.uint8) & 15)


@pytest.mark.parametrize("name", [*FORMATS_OF_BLOCKS])
def test_stochastic_rounding_is_right_on_average_and_keeps_what_fits(name: str) -> None:
    law, random = block_law(name), np.random.default_rng(0)
    x = np.full((2000, law.format.block), 0.3, np.float32)
    x[:, 0] = law.format.element.max  # so that the scale is 1
    bits = random.integers(0, 1 << 16, x.shape, dtype=np.int32)
    back = law.dequantize(law.quantize(x, -1, bits))
    assert np.isclose(back[:, 1:].mean(), 0.3, rtol=0.01)
    assert len(np.unique(back[:, 1:])) == 2
    assert np.unique(back[:, 0]).tolist() == [pytest.approx(law.format.element.max)]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: block_law("mxfp7"), "format must be mxfp8_e4m3, mxfp8_e5m2"),
        (lambda: block_law("mxfp4", "up"), "scale_mode must be floor, rceil, even or ceil"),
        (lambda: block_law("nvfp4", "floor"), "scale_mode must be 'rceil', the default, for nvfp4"),
        (lambda: block_law("mxfp4").quantize(np.float32(1)), "axis must be one of the 0 axes"),
        (lambda: block_law("mxfp4").quantize(np.ones(3, np.float32), 1), "axis must be one of the 1 axes"),
        (
            lambda: block_law("mxfp4").quantize(np.ones((3, 3), np.float32), (0, 1)),
            "axis must be one of the 2",
        ),
        (
            lambda: block_law("fp8_block128").quantize(np.ones((3, 3), np.float32), (0, -2)),
            "axis must be one or",
        ),
    ],
)
def test_what_is_no_format_mode_or_axis_is_refused(make, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_numbers_that_are_no_floats_and_scales_of_other_blocks_are_refused() -> None:
    law = block_law("mxfp4")
    for x in (np.arange(5), np.ones(5, complex)):
        with pytest.raises(ValueError, match="dtype must be"):
            law.quantize(x)
    q = law.quantize(np.ones((4, 64), np.float32), np.int64(1))
    with pytest.raises(ValueError, match=r"q.scales must be of the shape \(4, 2\)"):
        law.dequantize(Quantized(q.codes, q.scales[:1], None, q.format, q.axis))
    with pytest.raises(ValueError, match="q must be numbers in nvfp4"):
        block_law("nvfp4").dequantize(q)


def test_numbers_at_the_top_of_float32_become_inf_but_for_floor() -> None:
    x = np.full(32, 3.3e38, np.float32)
    for mode in SCALE_MODES:
        law = block_law("mxfp8_e4m3", mode)
        assert np.isinf(law.dequantize(law.quantize(x))).all() == (mode != "floor")


@pytest.mark.parametrize("name", [name for name, f in FORMATS_OF_BLOCKS.items() if f.scale == "e8m0"])
def test_the_largest_number_itself_needs_no_larger_scale(name: str) -> None:
    law = block_law(name, "rceil")
    top = np.float32(law.format.element.max * 4)
    limits = np.array([top, np.nextafter(top, np.float32(np.inf)), np.nextafter(top, np.float32(0))])
    assert [int(law.quantize(limits[i : i + 1]).scales[0]) - 127 for i in range(3)] == [2, 3, 2]
