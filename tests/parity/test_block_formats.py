"""Block formats have the same codes and scales in NumPy, PyTorch and JAX, however they are run."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import stablenum_jax
import stablenum_torch
from stablenum.precision import Quantized, block_law
from stablenum.precision.blocks.law import FORMATS_OF_BLOCKS
from stablenum.precision.blocks.scales import SCALE_MODES
from tests.selection import only

RULES = [
    (name, mode)
    for name, f in FORMATS_OF_BLOCKS.items()
    for mode in (SCALE_MODES if f.scale == "e8m0" else ("rceil",))
]
# One of each kind of scale; the rest is slow, for what JAX compiles.
FEW = [("mxfp8_e4m3", "rceil"), ("mxfp6_e3m2", "even"), ("mxfp4", "floor"), ("nvfp4", "rceil")]
SHAPES = [((-1, 32), -1), ((-1, 100), 0), ((-1, 48), 1)]


def numbers(count: int, seed: int = 0) -> np.ndarray:
    """Numbers of mixed size: blocks of one size and of many, subnormal, zero, next to limits, NaN and inf."""
    random = np.random.default_rng(seed)
    x = np.empty((count // 64, 64), np.float32)
    half = len(x) // 2
    sizes = np.exp2(random.uniform(-148, 127, (half, 1)) - random.uniform(0, 12, (half, 64)))
    x[:half] = np.clip(random.normal(size=(half, 64)) * sizes, -3.4e38, 3.4e38)
    x[half:] = random.integers(0, 1 << 32, (len(x) - half, 64), np.uint32).view(np.float32)
    x[3], x[5, 7], x[6, 2], x[7, 40] = 0.0, np.nan, np.inf, -np.inf
    limits = np.array([448, 57344, 28, 7.5, 6, 1.75, 1.875, 1.5], np.float32)
    x[8:16, :8] = limits * np.exp2(np.arange(-60, 68, 16, np.float32))[:, None]
    x[16:24, :8] = np.nextafter(x[8:16, :8], np.float32(np.inf))
    return x.reshape(-1)


def bits(x: object) -> np.ndarray:
    """The bits of an array, every NaN alike."""
    array = np.asarray(x)
    if array.dtype == np.uint8:
        return array
    assert array.dtype == np.float32
    return np.where(np.isnan(array), np.uint32(0x7FC00000), array.view(np.uint32))


def assert_equal(one: Quantized, other: Quantized) -> None:
    assert (one.format, one.axis) == (other.format, other.axis)
    for name in ("codes", "scales"):
        np.testing.assert_array_equal(bits(getattr(one, name)), bits(getattr(other, name)), name)
    assert (one.tensor_scale is None) == (other.tensor_scale is None)
    if one.tensor_scale is not None:
        np.testing.assert_array_equal(bits(one.tensor_scale), bits(other.tensor_scale))


def check(name: str, mode: str, count: int) -> None:
    law = block_law(name, mode)
    for shape, axis in SHAPES:
        x = numbers(count)
        x = x[: x.size // shape[1] * shape[1]].reshape(shape)
        if name == "nvfp4":
            x = np.where(np.isfinite(x), x, np.float32(0))  # or all of it is NaN
        expected = law.quantize(x, axis)
        in_torch = stablenum_torch.quantize(torch.tensor(x), name, axis=axis, scale_mode=mode)
        quantize = functools.partial(stablenum_jax.quantize, format=name, axis=axis, scale_mode=mode)
        assert_equal(expected, in_torch)
        assert_equal(expected, quantize(x))
        compiled = jax.jit(quantize)(x)
        assert_equal(expected, compiled)
        back = bits(law.dequantize(expected))
        np.testing.assert_array_equal(bits(stablenum_torch.dequantize(in_torch)), back)
        np.testing.assert_array_equal(bits(jax.jit(stablenum_jax.dequantize)(compiled)), back)


@pytest.mark.parametrize("rule", only([*FEW, ("fp8_block128", "rceil")], RULES), ids="-".join)
def test_codes_scales_and_numbers_are_the_same_in_three_libraries(rule: tuple[str, str]) -> None:
    check(*rule, 1 << 14)


@pytest.mark.slow(reason="ten million numbers in each format and mode")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "mode"), RULES)
def test_ten_million_numbers_are_the_same(name: str, mode: str) -> None:
    check(name, mode, 10_000_000)


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp4", "fp8_block128"])
def test_every_row_of_a_batch_is_quantized_alone_and_read_back(name: str) -> None:
    x = numbers(1 << 12)[: 4 * 96 * 5].reshape(4, 96, 5)
    expected = block_law(name).quantize(x, 1)
    by_row = torch.func.vmap(lambda row: stablenum_torch.quantize(row, name, axis=0))(torch.tensor(x))
    assert_equal(expected, by_row)
    assert_equal(expected, jax.vmap(lambda row: stablenum_jax.quantize(row, name, axis=0))(x))
    back = bits(block_law(name).dequantize(expected))
    np.testing.assert_array_equal(bits(stablenum_torch.dequantize(by_row)), back)


@pytest.mark.parametrize("size", [1e-38, 3e-38, 1e-36, 1e-33, 1e38])
def test_the_two_levels_of_nvfp4_are_the_same_for_tensors_of_any_size(size: float) -> None:
    random = np.random.default_rng(0)
    x = (random.normal(size=(8, 16)) * np.exp2(-np.arange(8.0))[:, None] * size).astype(np.float32)
    expected = block_law("nvfp4").quantize(x)
    assert_equal(expected, stablenum_torch.quantize(torch.tensor(x), "nvfp4"))
    assert_equal(expected, stablenum_jax.quantize(x, "nvfp4"))
    assert_equal(expected, jax.jit(functools.partial(stablenum_jax.quantize, format="nvfp4"))(x))


@pytest.mark.parametrize("name", only(["mxfp8_e5m2", "nvfp4"], FORMATS_OF_BLOCKS))
def test_a_compiled_graph_gives_the_same(name: str) -> None:
    x = np.nan_to_num(numbers(1 << 12), posinf=1.0, neginf=-1.0).reshape(-1, 64)
    traced = torch.compile(lambda t: stablenum_torch.quantize(t, name), fullgraph=True, backend="aot_eager")
    assert_equal(block_law(name).quantize(x), traced(torch.tensor(x)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_formats_are_read_as_float32(dtype: str) -> None:
    x = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    tensor = torch.tensor(x).to(getattr(torch, dtype))
    expected = block_law("mxfp6_e2m3").quantize(tensor.float().numpy())
    assert_equal(expected, stablenum_torch.quantize(tensor, "mxfp6_e2m3"))
    if dtype != "float64":
        array = jnp.asarray(x, getattr(jnp, dtype))
        assert_equal(expected, stablenum_jax.quantize(array, "mxfp6_e2m3"))
        back = stablenum_jax.dequantize(stablenum_jax.quantize(array, "mxfp6_e2m3"), array.dtype)
        assert back.dtype == array.dtype
    assert stablenum_torch.dequantize(expected_in_torch(expected), tensor.dtype).dtype == tensor.dtype


def expected_in_torch(q: Quantized) -> Quantized:
    return Quantized(torch.tensor(q.codes), torch.tensor(q.scales), None, q.format, q.axis)


def test_random_bits_of_both_round_to_neighbours() -> None:
    x = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    nearest = block_law("mxfp8_e4m3").quantize(x)
    generator = torch.Generator().manual_seed(0)
    in_torch = stablenum_torch.quantize(
        torch.tensor(x), "mxfp8_e4m3", rounding="stochastic", generator=generator
    )
    in_jax = stablenum_jax.quantize(x, "mxfp8_e4m3", rounding="stochastic", key=jax.random.key(0))
    for found in (in_torch, in_jax):
        np.testing.assert_array_equal(np.asarray(found.scales), nearest.scales)
        steps = np.abs(np.asarray(found.codes).astype(int) - nearest.codes)
        assert set(steps.ravel().tolist()) == {0, 1}
        assert 0.2 < (steps == 1).mean() < 0.4  # on average a quarter of the way: 1/4 of the numbers


def test_no_gradient_passes() -> None:
    x = torch.ones(32, requires_grad=True)
    assert not stablenum_torch.dequantize(stablenum_torch.quantize(x, "mxfp4")).requires_grad
    slope = jax.grad(lambda v: stablenum_jax.dequantize(stablenum_jax.quantize(v, "mxfp4")).sum())
    assert not slope(jnp.ones(32)).any()


in_torch, in_jax = stablenum_torch.quantize, stablenum_jax.quantize


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: in_torch([1.0], "mxfp4"), TypeError, "x must be a floating-point tensor; got list"),
        (lambda: in_torch(torch.ones(3).int(), "mxfp4"), TypeError, "got torch.int32"),
        (lambda: in_torch(torch.ones(3), "mxfp4", generator=torch.Generator()), ValueError, "generator must"),
        (lambda: in_jax(jnp.ones(3, int), "mxfp4"), TypeError, "x must be a floating-point array"),
        (lambda: in_torch(torch.ones(3), "mxfp4", rounding="up"), ValueError, "'nearest' or 'stochastic'"),
        (lambda: in_jax(jnp.ones(3), "mxfp4", rounding="up"), ValueError, "'nearest' or 'stochastic'"),
        (lambda: in_jax(jnp.ones(3), "mxfp4", rounding="stochastic"), ValueError, "key must be a key"),
        (lambda: in_jax(jnp.ones(3), "mxfp4", key=jax.random.key(0)), ValueError, "and None otherwise"),
    ],
)
def test_what_cannot_be_quantized_is_refused(call, error, said: str) -> None:
    with pytest.raises(error, match=said):
        call()
