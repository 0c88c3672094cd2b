"""How far a step moved the parameters, from a sample of their elements before and after it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stablenum.runlog.lines import Update

__all__ = ["SAMPLE", "update_of"]

SAMPLE = 256  # elements of each parameter


def update_of(
    step: int,
    moved: Sequence[float],
    sizes: Sequence[float],
    counts: Sequence[int],
    names: Sequence[str] | None,
) -> Update | None:
    """Return the size of an update, of all parameters and of the one that moved most for its size.

    A sample stands for the whole parameter: each has the weight of its number of elements.

    Args:
        step: the step's number.
        moved: for each parameter, the root mean square of the sampled elements' update.
        sizes: for each, that of the elements before the update.
        counts: for each, its number of elements.
        names: their names, if they are known.

    Returns:
        The update; None if all sampled elements were 0 before the step, or one is not finite.

    Example:
        >>> update_of(63, [0.1, 0.0], [1.0, 2.0], [10, 30], ["a", "b"])
        Update(step=63, size=0.0277..., largest=0.1, parameter='a')
    """
    norm = math.sqrt(sum(n * s**2 for n, s in zip(counts, sizes, strict=True)))
    update = math.sqrt(sum(n * m**2 for n, m in zip(counts, moved, strict=True)))
    if not (0 < norm < math.inf and update < math.inf):
        return None
    each = [m / s if s > 0 else 0.0 for m, s in zip(moved, sizes, strict=True)]
    most = max(range(len(each)), key=each.__getitem__)
    return Update(step, update / norm, each[most], names[most] if names else None)
