"""The kernel that reads all gradients once: sums of squares in float64, one for each piece of a gradient.

float64 holds the square of every float32, float16 and bfloat16 number, so that a sum is not finite if and
only if an element is not.

``squared`` takes ``addresses``, (n,) int64, of the gradients, multiples of 16; ``table``, (4, pieces) int64:
of each piece its gradient, the bytes before it, a multiple of 16, the number of its elements, and their
format, by its place in ``FORMATS``; and ``squares``, (pieces,) float64, the output. Each piece has a program
of its own.

It is a text, as the other kernel is: only a launch needs Triton.
"""

from __future__ import annotations

__all__ = ["BLOCK", "FORMATS", "SOURCE"]

BLOCK = 4096  # elements that a program holds at a time: 16 for each of the threads of 8 warps
FORMATS = ("float32", "float16", "bfloat16")

SOURCE = """import triton
import triton.language as tl


@triton.jit
def sum_of_squares(elements, n, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float64)
    whole = n // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):  # without a mask, so that several elements are loaded at once
        x = tl.cast(tl.load(elements + start + tl.arange(0, BLOCK)), tl.float64)
        total += x * x
    place = whole + tl.arange(0, BLOCK)
    x = tl.cast(tl.load(elements + place, mask=place < n, other=0.0), tl.float64)
    return tl.sum(total + x * x, 0)


@triton.jit
def squared(addresses, table, squares, BLOCK: tl.constexpr):
    piece = tl.program_id(0)
    pieces = tl.num_programs(0)
    address = tl.load(addresses + tl.load(table + piece)) + tl.load(table + pieces + piece)
    n = tl.load(table + 2 * pieces + piece)
    kind = tl.load(table + 3 * pieces + piece)
    if kind == 0:
        total = sum_of_squares(tl.multiple_of(tl.cast(address, tl.pointer_type(tl.float32)), 16), n, BLOCK)
    elif kind == 1:
        total = sum_of_squares(tl.multiple_of(tl.cast(address, tl.pointer_type(tl.float16)), 16), n, BLOCK)
    else:
        total = sum_of_squares(tl.multiple_of(tl.cast(address, tl.pointer_type(tl.bfloat16)), 16), n, BLOCK)
    tl.store(squares + piece, total)
"""
