"""How near two numbers must be to count as equal, where they have no tolerance of their own.

The values of two programs have one, which says how far rounding moves them (``sides``). What is computed from
them to find a cause has none. It is computed in float64, so that what is equal differs by some roundings, and
what is not by far more. The two margins that stand at each number were measured in ``tests/core/test_diff_*``
and in four pairs of ``tests/pairs``.
"""

from __future__ import annotations

__all__ = ["SAME_ARRAY", "SAME_ENTRIES", "SAME_FORMULA", "SAME_MULTIPLE", "SAME_UPDATE"]

# Two arrays that were given, such as parameters, hold the same numbers. Another order of a million numbers
# moves the sums of a fingerprint by 2e-16, and a rounding to float32 by more than this.
SAME_ARRAY = 1e-12
# Two arrays hold the same entries, of which one was computed in another order, or as the small difference of
# two parameters: up to 1e-10; others differ by 1e-8 and more.
SAME_ENTRIES = 1e-9
# A value is a multiple of another one, a sum of its entries, or has them in another order: up to 4e-15;
# others differ by 2e-5 and more.
SAME_MULTIPLE = 1e-8
# A formula of NumPy gives what an operation gives: up to 4e-15; others differ by 0.02 and more.
SAME_FORMULA = 1e-7
# An update is a multiple of a gradient or of another update: up to 1e-7; others differ by a tenth and more.
SAME_UPDATE = 1e-6
