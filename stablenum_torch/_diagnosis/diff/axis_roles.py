"""What a product, a convolution or a look-up does with each axis of what it reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

__all__ = ["roles_of"]

_ROW, _COLUMN = ("kept", "summed"), ("summed", "kept")
# The operations by which products are computed below autograd.
_PRODUCTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "mm": (_ROW, _COLUMN),
    "addmm": (("kept", "kept"), _ROW, _COLUMN),
    "bmm": (("batch", *_ROW), ("batch", *_COLUMN)),
    "baddbmm": (("batch", "kept", "kept"), ("batch", *_ROW), ("batch", *_COLUMN)),
    "mv": (_ROW, ("summed",)),
    "addmv": (("kept",), _ROW, ("summed",)),
    "dot": (("summed",), ("summed",)),
}


def roles_of(name: str, args: Sequence[Any]) -> tuple[tuple[str, ...], ...]:
    """Return the roles of the axes of each input; see ``Step.roles`` of the core."""
    if name == "convolution":
        return _convolution(*args[:2], transposed=args[6])
    if name == "embedding":
        return (_COLUMN, ("batch",) * args[1].dim())
    if name == "index":
        return _index(args[0], args[1])
    if name == "index_select":
        return (_looked_up(args[0], {args[1] % max(args[0].dim(), 1)}), ("batch",))
    return _PRODUCTS.get(name, ())


def _convolution(x: Tensor, kernel: Tensor, *, transposed: bool) -> tuple[tuple[str, ...], ...]:
    window = tuple(f"window {i}" for i in range(kernel.dim() - 2))
    first = _COLUMN if transposed else _ROW
    return (("batch", "summed", *window)[: x.dim()], (*first, *window))


def _index(x: Tensor, indices: Sequence[Tensor | None]) -> tuple[tuple[str, ...], ...]:
    at = {axis for axis, index in enumerate(indices) if index is not None}
    return (_looked_up(x, at), *(("batch",) * t.dim() for t in indices if t is not None))


def _looked_up(x: Tensor, at: set[int]) -> tuple[str, ...]:
    return tuple("summed" if axis in at else "kept" for axis in range(x.dim()))
