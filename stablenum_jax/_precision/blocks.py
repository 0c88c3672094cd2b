"""Block formats in JAX: the core's laws on arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stablenum.errors import bad_field, bad_type
from stablenum.precision.blocks.law import Quantized, block_law

__all__ = ["dequantize", "quantize"]

jax.tree_util.register_dataclass(
    Quantized, data_fields=["codes", "scales", "tensor_scale"], meta_fields=["format", "axis"]
)


def quantize(
    x: jax.Array,
    format: str,  # noqa: A002  the public name
    *,
    axis: int | Sequence[int] = -1,
    scale_mode: str = "rceil",
    rounding: str = "nearest",
    key: jax.Array | None = None,
) -> Quantized[jax.Array]:
    """Return an array's numbers in a block format: a narrow code each, and a scale for each block.

    The codes and scales are bit for bit those of :func:`stablenum_torch.quantize` and of the law in NumPy,
    :func:`stablenum.precision.block_law`, which says what NaN, inf, zeros, subnormal numbers and blocks that
    are not full become. The result is a pytree; works under ``jit`` and ``vmap``; no gradient passes.

    Args:
        x: any floating-point dtype, any shape with at least one axis; it is converted to float32.
        format: "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "nvfp4" or "fp8_block128".
        axis: the axis along which blocks lie; two of them for blocks of 128 x 128.
        scale_mode: "rceil", "floor", "even" or "ceil".
        rounding: "nearest" (ties to even) or "stochastic".
        key: a key of ``jax.random`` for stochastic rounding.

    Raises:
        TypeError: ``x`` is not a floating-point array.
        ValueError: another argument is none of these, or stochastic rounding has no ``key``.

    Example:
        >>> q = quantize(jnp.array([1.0, -3.0, 0.2, 24.0]), "mxfp4")
        >>> q.codes.tolist(), q.scales.tolist(), dequantize(q).tolist()
        ([0, 10, 0, 7], [129], [0.0, -4.0, 0.0, 24.0])
    """
    law = block_law(format, scale_mode)
    if not isinstance(x, jax.Array | np.ndarray) or not _is_floating(x.dtype):
        got = getattr(x, "dtype", type(x).__name__)
        raise TypeError(f"x must be a floating-point array; got {got}.")
    x = jax.lax.stop_gradient(jnp.asarray(x))
    if rounding not in ("nearest", "stochastic"):
        raise bad_field("rounding", "'nearest' or 'stochastic'", rounding)
    if (rounding == "stochastic") is not (key is not None):
        raise bad_field("key", "a key of jax.random for stochastic rounding, and None otherwise", key)
    bits = None if key is None else jax.random.randint(key, x.shape, 0, 1 << 16, jnp.int32)
    return law.quantize(x, axis, bits, xp=jnp)


def _is_floating(dtype: Any) -> bool:
    try:
        return dtype is not None and bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:
        return False


def dequantize(q: Quantized[jax.Array], dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
    """Return the numbers that codes and scales stand for.

    With scales that are powers of two they are exact in float32; blocks whose scale is NaN are NaN.

    Args:
        q: what :func:`quantize` returned, or made from stored codes and scales.
        dtype: of the result, which is computed in float32.

    Raises:
        TypeError: ``q`` is something else.
        ValueError: its scales are not those of its blocks, or ``dtype`` is not a floating-point dtype.

    Example:
        >>> float(dequantize(quantize(jnp.ones((2, 40)), "mxfp8_e4m3"), jnp.bfloat16).sum())
        80.0
    """
    if not isinstance(q, Quantized):
        raise bad_type("q", "what quantize returns", q)
    if not _is_floating(dtype):
        raise bad_field("dtype", "a floating-point dtype", dtype)
    found: jax.Array = block_law(q.format).dequantize(q, xp=jnp)
    return found.astype(dtype)
