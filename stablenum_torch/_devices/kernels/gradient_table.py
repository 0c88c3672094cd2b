"""Where the gradients of a step are: the addresses, sizes and formats that the kernels read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stablenum_torch._devices.kernels.squares_source import FORMATS

__all__ = ["GradientTable"]

# Elements of a piece: 64 Ki float32 are 256 KiB, enough for a program to pay, and few enough for a gradient
# to occupy the whole device.
_PIECE = 2**16
# Pieces of one gradient, which one program adds up.
_MOST_PIECES = 256
_ALIGNMENT = 16  # bytes, of one load
_FORMATS = [getattr(torch, name) for name in FORMATS]


class GradientTable:
    """Knows where gradients are, and sends their addresses to their device when one has moved.

    Args:
        device: the gradients' device.

    Attributes:
        pieces: the number of pieces.
        most: the largest number of pieces of one gradient; at least 1.
        addresses, table: (n,) and (4, pieces) int64, see ``squares_source.py``.
        first, count: (n,) int32, the first piece of each gradient, and the number of its pieces.
        squares: (pieces,) float64, room for the sums of squares.
    """

    addresses: Tensor
    table: Tensor
    first: Tensor
    count: Tensor
    squares: Tensor

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pieces, self.most = 0, 1
        self._layouts: list[object] | None = None
        self._places: list[int] | None = None

    def follow(self, grads: Sequence[Tensor | None]) -> bool:
        """Return whether the kernel can read these gradients, after sending what has changed.

        It reads plain tensors on the device, in a format that it knows, without gaps and in one order.
        """
        try:
            places = [0 if g is None else g.data_ptr() for g in grads]
            # An allocator may give the memory of a gradient to one of another shape.
            layouts: list[object] = [None if g is None else (g.dtype, g.shape, g.stride()) for g in grads]
        except RuntimeError:  # a tensor that is not in one piece of memory, such as a sparse one
            return False
        if places == self._places and layouts == self._layouts:
            return True
        if not all(g is None or self._readable(g) for g in grads):
            return False
        # An interrupt leaves a table that is sent again.
        self._places = None
        if layouts != self._layouts:
            self._layouts = None
            self._lay_out(grads)
            self._layouts = layouts
        self.addresses = _sent(places, torch.int64, self.device)
        self._places = places
        return True

    def _readable(self, grad: Tensor) -> bool:
        dense = grad.is_contiguous() or grad.is_contiguous(memory_format=torch.channels_last)
        plain = type(grad) in (Tensor, torch.nn.Parameter) and grad.layout == torch.strided
        known = grad.dtype in _FORMATS and not grad.is_neg()
        return plain and known and dense and grad.device == self.device and grad.data_ptr() % _ALIGNMENT == 0

    def _lay_out(self, grads: Sequence[Tensor | None]) -> None:
        rows: list[tuple[int, int, int, int]] = []
        first, count = [], []
        for i, grad in enumerate(grads):
            begin = len(rows)
            if grad is not None:
                rows += _pieces_of(i, grad)
            first.append(begin)
            count.append(len(rows) - begin)
        self.pieces, self.most = len(rows), max(1, *count)
        self.table = _sent([list(column) for column in zip(*rows, strict=True)], torch.int64, self.device)
        ends = _sent([first, count], torch.int32, self.device)
        self.first, self.count = ends[0], ends[1]
        self.squares = torch.empty(self.pieces, dtype=torch.float64, device=self.device)


def _pieces_of(i: int, grad: Tensor) -> list[tuple[int, int, int, int]]:
    n, width, kind = grad.numel(), grad.element_size(), _FORMATS.index(grad.dtype)
    size = max(_PIECE, -(-n // _MOST_PIECES))
    size = -(-size // _PIECE) * _PIECE  # so that each piece is aligned
    return [(i, start * width, min(size, n - start), kind) for start in range(0, n, size)]


def _sent(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    made = torch.tensor(values, dtype=dtype, device="cpu")  # whatever the default device is
    return made if device.type == "cpu" else made.pin_memory().to(device, non_blocking=True)
