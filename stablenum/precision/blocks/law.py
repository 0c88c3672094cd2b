"""The law of a block format: which scale each block gets, and which code each number."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from stablenum.arrays import at_most
from stablenum.errors import bad_field, either
from stablenum.formats import get_format
from stablenum.precision.blocks.elements import (
    ELEMENTS,
    Element,
    decoded,
    encoded,
    over_power_of_two,
)
from stablenum.precision.blocks.scales import (
    NAN_SCALE,
    SCALE_MODES,
    divided,
    e4m3_scales,
    e8m0_scales,
    float32_scales,
)

__all__ = ["FORMATS_OF_BLOCKS", "BlockFormat", "BlockLaw", "Quantized", "block_law"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any
A = TypeVar("A")

_SIGN_LESS = 0x7FFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat:
    """A block format.

    Attributes:
        name: as in ``quantize(x, "mxfp8_e4m3")``.
        element: the format of its numbers.
        block: how many numbers along an axis share a scale.
        scale: the kind of its scales, "e8m0", "e4m3" or "float32".
    """

    name: str
    element: Element
    block: int
    scale: str


FORMATS_OF_BLOCKS = {
    f.name: f
    for f in (
        BlockFormat(name="mxfp8_e4m3", element=ELEMENTS["e4m3"], block=32, scale="e8m0"),
        BlockFormat(name="mxfp8_e5m2", element=ELEMENTS["e5m2"], block=32, scale="e8m0"),
        BlockFormat(name="mxfp6_e3m2", element=ELEMENTS["e3m2"], block=32, scale="e8m0"),
        BlockFormat(name="mxfp6_e2m3", element=ELEMENTS["e2m3"], block=32, scale="e8m0"),
        BlockFormat(name="mxfp4", element=ELEMENTS["e2m1"], block=32, scale="e8m0"),
        BlockFormat(name="nvfp4", element=ELEMENTS["e2m1"], block=16, scale="e4m3"),
        BlockFormat(name="fp8_block128", element=ELEMENTS["e4m3"], block=128, scale="float32"),
    )
}


@dataclass(frozen=True, slots=True)
class Quantized(Generic[A]):
    """Numbers in a block format.

    Attributes:
        codes: uint8, of the shape of the numbers: one code each, in the lowest bits.
        scales: one for each block, along the axes of the blocks in place of the numbers: uint8 codes of e8m0
            or e4m3, or float32.
        tensor_scale: float32 of no axes, by which all are multiplied, too (nvfp4); None for other formats.
        format: the name of the format.
        axis: the axes along which blocks lie, counted from the end: -1 for the last one. An axis that is put
            before the others, as by ``vmap``, changes nothing.
    """

    codes: A
    scales: A
    tensor_scale: A | None
    format: str
    axis: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockLaw:
    """How numbers are quantized to a block format, the same in every array library.

    Attributes:
        format: the format.
        scale_mode: how powers of two are found from the largest magnitude; see
            :func:`stablenum.precision.block_law`.
    """

    format: BlockFormat
    scale_mode: str

    def quantize(
        self,
        x: Array,
        axis: int | Sequence[int] = -1,
        random_bits: Array | None = None,
        *,
        xp: Namespace | None = None,
    ) -> Quantized[Array]:
        """Return the codes and scales of float32 numbers.

        Blocks begin at the start of an axis; the last one may be shorter. A block that holds NaN or inf has a
        scale that is NaN (255 in e8m0): all its numbers are NaN when they are dequantized. Numbers that round
        to 2^128, from 2.9e38 on, are inf then; "floor" saturates instead. Where the scale is no power of two
        (nvfp4, fp8_block128), subnormal float32 numbers count as 0.

        Args:
            x: float32, any shape with at least one axis; other floating-point formats are converted.
            axis: the axis along which the numbers of a block lie; two of them for square blocks
                (fp8_block128).
            random_bits: integers of ``x``'s shape, whose lowest 16 bits round stochastically; None rounds to
                nearest, ties to even.
            xp: the array namespace; NumPy by default.

        Raises:
            ValueError: ``x`` has no axis, or no floating-point numbers; or ``axis`` is none of its axes, or
                two for a format without square blocks.
        """
        if xp is None:
            xp = _numpy()
            get_format(x.dtype)
        axes = self._axes(x, axis)
        x32 = xp.astype(x, xp.float32)
        bits = x32.view(xp.int32)
        if self.format.scale != "e8m0":
            bits = xp.where((bits & _SIGN_LESS) < 0x00800000, xp.zeros_like(bits), bits)
        magnitude = bits & _SIGN_LESS
        largest = self._of_blocks(magnitude, axes, xp=xp)
        # The scale of a block that is not finite is NaN, whatever its numbers are.
        magnitude = xp.where(magnitude < 0x7F800000, magnitude, xp.zeros_like(magnitude))
        tensor_scale = None
        if self.format.scale == "e8m0":
            scales = e8m0_scales(largest, self.format.element, self.scale_mode, xp=xp)
            unit = self._spread(scales, x.shape, axes, xp=xp) - 127
            scaled = over_power_of_two(magnitude, unit, xp=xp)
            bad = unit == NAN_SCALE - 127
            stored = xp.astype(scales, xp.uint8)
        elif self.format.scale == "e4m3":
            codes, tensor_scale = e4m3_scales(largest.view(xp.float32), self.format.element, xp=xp)
            stored = xp.astype(codes, xp.uint8)
            scale = decoded(stored, ELEMENTS["e4m3"], xp=xp)
            inverse = divided(divided(xp.ones_like(scale), tensor_scale, xp=xp), scale, xp=xp)
            scaled = magnitude.view(xp.float32) * self._spread(inverse, x.shape, axes, xp=xp)
            bad = xp.isnan(self._spread(scale, x.shape, axes, xp=xp)) | xp.isnan(tensor_scale)
        else:
            stored = float32_scales(largest.view(xp.float32), self.format.element, xp=xp)
            scale = self._spread(stored, x.shape, axes, xp=xp)
            scaled = divided(magnitude.view(xp.float32), scale, xp=xp)
            bad = xp.isnan(scale)
        # Of a bad block, each number is NaN if the format has one, else 0.
        scaled = xp.where(bad, xp.full_like(scaled, float("nan")), scaled)
        signed = xp.where(bits < 0, -scaled, scaled)
        found = encoded(signed, self.format.element, random_bits, xp=xp)
        ends = tuple(a - len(x.shape) for a in axes)
        return Quantized(found, stored, tensor_scale, self.format.name, ends)

    def dequantize(self, q: Quantized[Array], *, xp: Namespace | None = None) -> Array:
        """Return the float32 numbers. With scales that are powers of two they are exact; others are rounded,
        and 0 below 2^-126.

        Args:
            q: codes and scales.
            xp: the array namespace; NumPy by default.

        Raises:
            ValueError: ``q`` has another format, or its scales are not those of its blocks.
        """
        xp = _numpy() if xp is None else xp
        element, shape = self.format.element, tuple(q.codes.shape)
        axes = self._axes(q.codes, q.axis)
        wanted = tuple(-(-n // self.format.block) if a in axes else n for a, n in enumerate(shape))
        if q.format != self.format.name:
            raise bad_field("q", f"numbers in {self.format.name}", q.format)
        if tuple(q.scales.shape) != wanted:
            raise bad_field("q.scales", f"of the shape {wanted}, one for each block", tuple(q.scales.shape))
        if self.format.scale == "e8m0":
            code = self._spread(xp.astype(q.scales, xp.int32), shape, axes, xp=xp)
            value = decoded(q.codes, element, at_most(code, NAN_SCALE - 1, xp=xp) - 127, xp=xp)
            return xp.where(code == NAN_SCALE, xp.full_like(value, float("nan")), value)
        scale = q.scales
        if self.format.scale == "e4m3":
            scale = _normal(decoded(q.scales, ELEMENTS["e4m3"], xp=xp) * q.tensor_scale, xp=xp)
        return _normal(decoded(q.codes, element, xp=xp) * self._spread(scale, shape, axes, xp=xp), xp=xp)

    def _axes(self, x: Array, axis: int | Sequence[int]) -> tuple[int, ...]:
        count = len(x.shape)
        square = self.format.scale == "float32"
        allowed = f"{'one or two of' if square else 'one of'} the {count} axes of x"
        try:
            given = tuple(map(operator.index, axis if isinstance(axis, Sequence) else (axis,)))
        except TypeError:
            raise bad_field("axis", allowed, axis) from None
        if not given or len(given) > 1 + square or any(not -count <= a < count for a in given):
            raise bad_field("axis", allowed, axis)
        axes = tuple(sorted(a % count for a in given))
        if len(set(axes)) != len(axes):
            raise bad_field("axis", allowed, axis)
        return axes

    def _of_blocks(self, magnitude: Array, axes: tuple[int, ...], *, xp: Namespace) -> Array:
        """Return the largest of each block; of an empty array, an empty one."""
        for axis in axes:
            size = magnitude.shape[axis]
            blocks = -(-size // self.format.block)
            pad = blocks * self.format.block - size
            if pad:
                more = (*magnitude.shape[:axis], pad, *magnitude.shape[axis + 1 :])
                zeros = xp.zeros_like(xp.broadcast_to(magnitude[_first(axis)], more))
                magnitude = xp.concat([magnitude, zeros], axis=axis)
            shape = (*magnitude.shape[:axis], blocks, self.format.block, *magnitude.shape[axis + 1 :])
            magnitude = xp.reshape(magnitude, shape)
            if 0 in shape:
                magnitude = xp.astype(xp.sum(magnitude, axis=axis + 1), xp.int32)
            else:
                magnitude = xp.max(magnitude, axis=axis + 1)
        return magnitude

    def _spread(self, scales: Array, shape: Sequence[int], axes: tuple[int, ...], *, xp: Namespace) -> Array:
        """Return the scale of each number."""
        for axis in axes:
            scales = xp.repeat(scales, self.format.block, axis=axis)
            cut = tuple(slice(None) for _ in range(axis))
            scales = scales[(*cut, slice(0, shape[axis]))]
        return scales


def _first(axis: int) -> tuple[slice, ...]:
    return (*(slice(None) for _ in range(axis)), slice(0, 1))


def _normal(x: Array, *, xp: Namespace) -> Array:
    """Return float32 numbers with 0 in place of the subnormal ones."""
    return xp.where((x.view(xp.int32) & _SIGN_LESS) < 0x00800000, xp.zeros_like(x), x)


def _numpy() -> Namespace:
    import array_api_compat.numpy

    return array_api_compat.numpy


def block_law(format: str, scale_mode: str = "rceil") -> BlockLaw:  # noqa: A002  the public name
    """Return the law of a block format, which quantizes NumPy arrays and is what the adapters are tested
    against.

    The scale modes are those of the formats whose scales are powers of two (mx...), see
    ``stablenum.precision.blocks.scales``: "rceil" never saturates a number; "floor" is the text of OCP's MX
    specification 1.0, and the default of torchao's ``to_mx``; "even" and "ceil" are torchao's.

    Args:
        format: "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "nvfp4" or "fp8_block128".
        scale_mode: "rceil", "floor", "even" or "ceil". nvfp4 and fp8_block128 have one rule only, under the
            default.

    Raises:
        ValueError: a format or mode is another one.

    Example:
        >>> import numpy as np
        >>> law = block_law("mxfp4")
        >>> q = law.quantize(np.asarray([1.0, -3.0, 0.2, 24.0], np.float32))
        >>> q.codes.tolist(), q.scales.tolist()
        ([0, 10, 0, 7], [129])
        >>> law.dequantize(q).tolist()
        [0.0, -4.0, 0.0, 24.0]
    """
    if format not in FORMATS_OF_BLOCKS:
        raise bad_field("format", either(FORMATS_OF_BLOCKS), format)
    if scale_mode not in SCALE_MODES:
        raise bad_field("scale_mode", either(SCALE_MODES), scale_mode)
    known = FORMATS_OF_BLOCKS[format]
    if known.scale != "e8m0" and scale_mode != "rceil":
        raise bad_field(
            "scale_mode", f"'rceil', the default, for {format}, whose scales are numbers", scale_mode
        )
    return BlockLaw(known, scale_mode)
