"""Block formats in PyTorch: the core's laws on tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import array_api_compat.torch as xp
import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from stablenum.errors import bad_field, bad_type
from stablenum.precision.blocks.law import Quantized, block_law

__all__ = ["dequantize", "quantize"]


def _parts(q: Quantized[Tensor]) -> tuple[list[Tensor], tuple[str, tuple[int, ...]]]:
    return [q.codes, q.scales, *([] if q.tensor_scale is None else [q.tensor_scale])], (q.format, q.axis)


def _made(parts: Iterable[Tensor], known: tuple[str, tuple[int, ...]]) -> Quantized[Tensor]:
    codes, scales, *whole = parts
    return Quantized(codes, scales, whole[0] if whole else None, *known)


register_pytree_node(Quantized, _parts, _made)  # for torch.func.vmap


def quantize(
    x: Tensor,
    format: str,  # noqa: A002  the public name
    *,
    axis: int | Sequence[int] = -1,
    scale_mode: str = "rceil",
    rounding: str = "nearest",
    generator: torch.Generator | None = None,
) -> Quantized[Tensor]:
    """Return a tensor's numbers in a block format: a narrow code each, and a scale for each block.

    The codes and scales are bit for bit those of :func:`stablenum_jax.quantize` and of the law in NumPy,
    :func:`stablenum.precision.block_law`, which says what NaN, inf, zeros, subnormal numbers and blocks that
    are not full become. Works in graphs of ``torch.compile`` and under ``torch.func.vmap``, for which the
    result is a pytree; no gradient passes.

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
    if generator is not None and rounding != "stochastic":
        raise bad_field("generator", "None unless rounding is 'stochastic'", generator)
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

    Raises:
        TypeError: ``q`` is something else.
        ValueError: its scales are not those of its blocks, or ``dtype`` is not a floating-point dtype.

    Example:
        >>> dequantize(quantize(torch.ones(2, 40), "mxfp8_e4m3"), torch.bfloat16).sum().item()
        80.0
    """
    if not isinstance(q, Quantized):
        raise bad_type("q", "what quantize returns", q)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise bad_field("dtype", "a floating-point dtype", dtype)
    found: Tensor = block_law(q.format).dequantize(q, xp=xp)
    return found.to(dtype)
