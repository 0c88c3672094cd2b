"""Block formats in PyTorch: the core's laws on tensors."""

from __future__ import annotations

from collections.abc import Sequence

import array_api_compat.torch as xp
import torch
from torch import Tensor

from stablenum.errors import bad_field
from stablenum.precision.blocks.law import Quantized, block_law

__all__ = ["dequantize", "quantize"]


def quantize(
    x: Tensor,
    format: str,  # noqa: A002
    *,
    axis: int | Sequence[int] = -1,
    scale_mode: str = "rceil",
    rounding: str = "nearest",
    generator: torch.Generator | None = None,
) -> Quantized[Tensor]:
    """Return a tensor's numbers in a block format: a narrow code each, and a scale for each block.

    The codes and scales are bit for bit those of :func:`stablenum_jax.quantize` and of the law in NumPy,
    :func:`stablenum.precision.block_law`, which says what NaN, inf, zeros, subnormal numbers and blocks that
    are not full become. Works under ``torch.compile`` and ``torch.func.vmap``; no gradient passes.

    Args:
        x: any floating-point dtype, any shape with at least one axis; it is converted to float32.
        format: "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "nvfp4" or "fp8_block128".
        axis: the axis along which blocks lie; two of them for blocks of 128 x 128.
        scale_mode: "rceil", "floor", "even" or "ceil".
        rounding: "nearest" (ties to even) or "stochastic".
        generator: of the random bits of stochastic rounding.

    Raises:
        TypeError: ``x`` is not a floating-point tensor.
        ValueError: another argument is none of these.

    Example:
        >>> q = quantize(torch.tensor([1.0, -3.0, 0.2, 24.0]), "mxfp4")
        >>> q.codes.tolist(), q.scales.tolist(), dequantize(q).tolist()
        ([0, 10, 0, 7], [129], [0.0, -4.0, 0.0, 24.0])
    """
    law = block_law(format, scale_mode)
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"x must be a floating-point tensor; got {got}.")
    if rounding not in ("nearest", "stochastic"):
        raise bad_field("rounding", "'nearest' or 'stochastic'", rounding)
    x = x.detach()
    bits = None
    if rounding == "stochastic":
        bits = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    return law.quantize(x, axis, bits, xp=xp)


def dequantize(q: Quantized[Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the numbers that codes and scales stand for.

    With scales that are powers of two they are exact in float32; blocks whose scale is NaN are NaN.

    Args:
        q: what :func:`quantize` returned, or made from stored codes and scales.
        dtype: of the result, which is computed in float32.

    Example:
        >>> dequantize(quantize(torch.ones(2, 40), "mxfp8_e4m3"), torch.bfloat16).sum().item()
        80.0
    """
    found: Tensor = block_law(q.format).dequantize(q, xp=xp)
    return found.to(dtype)
