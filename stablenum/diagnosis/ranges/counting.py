"""Count a tensor's elements against the limits of the formats, with one sort for all formats."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from stablenum.diagnosis.ranges.limits import HIGHEST, LOWEST, limits
from stablenum.diagnosis.ranges.rows import KINDS, UPDATE, RangeRow
from stablenum.errors import bad_field, either
from stablenum.formats import FORMATS
from stablenum.precision.policy import parse_format

__all__ = ["RangeCollector", "checked_formats", "count_lost", "count_row"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any
#: Rounds an array to a format and returns the result in the array's own dtype.
Cast: TypeAlias = Callable[[Array, str], Array]

_BINS = range(LOWEST, HIGHEST)


def checked_formats(formats: Sequence[str]) -> tuple[str, ...]:
    """Return the full names of ``formats``, each once.

    Raises:
        ValueError: no format is given, or a format is unknown.

    Example:
        >>> checked_formats(["f16", "bfloat16"])
        ('float16', 'bfloat16')
    """
    if isinstance(formats, str) or not isinstance(formats, Iterable) or not formats:
        hint = "Put a single name into a tuple." if isinstance(formats, str) and formats else ""
        raise bad_field("formats", f"a sequence of names from {either(FORMATS)}", formats, hint=hint)
    return tuple(dict.fromkeys(parse_format(name) for name in formats))


def count_row(kind: str, module: str, x: Array, *, formats: Sequence[str], xp: Namespace) -> RangeRow | None:
    """Return the counts of one array.

    The elements are sorted by magnitude once. The position of a limit among them is the number of elements
    below it.

    Args:
        kind: one of :data:`stablenum.diagnosis.ranges.KINDS`.
        module: the module's path.
        x: any shape; float32 or float64.
        formats: names from :data:`stablenum.formats.FORMATS`.
        xp: the array namespace. On a device that flushes subnormals to zero, subnormals are counted as zeros.

    Returns:
        The row, or None for integers, bools, complex numbers and empty arrays. Elements that are not finite
        are counted separately.

    Example:
        >>> import array_api_compat.numpy as np
        >>> row = count_row("weight", "a", np.asarray([1.0, 1e-9, 7e4, 0.0]), formats=["float16"], xp=np)
        >>> row.flushed("float16"), row.overflow, row.zeros
        (1, {'float16': 1}, 1)
    """
    if not xp.isdtype(x.dtype, "real floating") or 0 in x.shape:
        return None
    size = xp.abs(xp.reshape(x, (-1,)))
    finite = xp.isfinite(size)
    size = xp.where(finite, size, xp.zeros_like(size))
    ordered = xp.sort(size)
    ends = [limits(name) for name in formats]
    top = float(xp.finfo(x.dtype).max)

    def positions(values: Sequence[float], side: str) -> list[int]:
        representable = [value if value <= top else float("inf") for value in values]
        like = {"dtype": x.dtype, "device": getattr(x, "device", None)}
        found: list[int] = xp.searchsorted(ordered, xp.asarray(representable, **like), side=side).tolist()
        return found

    n = int(size.shape[0])
    at_most = positions([0.0, *(2.0**e for e in _BINS), *(end.overflow for end in ends)], "right")
    below = positions([*(end.overflow for end in ends), *(end.normal for end in ends)], "left")
    bad = n - int(xp.sum(xp.astype(finite, xp.int64)))
    nan = int(xp.sum(xp.astype(xp.isnan(x), xp.int64)))
    powers, tops = at_most[: len(_BINS) + 1], at_most[len(_BINS) + 1 :]
    bins = {e: b - a for e, a, b in zip([*_BINS, HIGHEST], powers, [*powers[1:], n]) if b > a}
    row = RangeRow(
        kind=kind,
        module=module,
        elements=n - bad,
        nan=nan,
        inf=bad - nan,
        zeros=powers[0] - bad,  # elements that are not finite were replaced by 0
        amax=float(ordered[-1]),
        amin=float(ordered[powers[0]]) if powers[0] < n else 0.0,
        histogram=bins,
        overflow={name: n - (tops[i] if ends[i].strict else below[i]) for i, name in enumerate(formats)},
    )
    under = {name: below[len(ends) + i] - powers[0] for i, name in enumerate(formats)}
    subnormal = {name: max(under[name] - row.flushed(name), 0) for name in formats}
    return dataclasses.replace(row, subnormal=subnormal)


def count_lost(
    before: Array, update: Array, *, formats: Sequence[str], cast: Cast, xp: Namespace
) -> dict[str, int]:
    """Count the updates that each format loses: ``w + dw == w`` although dw is not 0.

    Weight, update and sum are each rounded to the format, as in an optimizer that keeps everything in that
    format. Elements that are not finite, and weights that overflow the format, do not count. For e4m3fn the
    casts saturate.

    Args:
        before: float32, the weights.
        update: float32, of the same shape; what is added to the weights.
        formats: the names of the formats.
        cast: rounds an array to a format.
        xp: the array namespace.

    Example:
        >>> import array_api_compat.numpy as np
        >>> half = lambda x, name: x.astype(name).astype(np.float32)
        >>> w, dw = np.asarray([[1.0, 1.0], [1e-4, 1e-3]], dtype=np.float32)
        >>> count_lost(w, dw, formats=["float16"], cast=half, xp=np)
        {'float16': 1}
    """
    found = {}
    usable = xp.isfinite(before) & xp.isfinite(update) & (update != 0)
    before, update = (xp.where(usable, x, xp.zeros_like(x)) for x in (before, update))
    for name in formats:
        end = limits(name)
        top = FORMATS[name].max

        def rounded(x: Array, name: str = name, strict: bool = end.strict, top: float = top) -> Array:
            return cast(xp.clip(x, -top, top) if strict else x, name)

        fits = usable & ((xp.abs(before) <= end.overflow) if end.strict else (xp.abs(before) < end.overflow))
        weight = rounded(xp.where(fits, before, xp.zeros_like(before)))
        moved = rounded(weight + rounded(update))
        found[name] = int(xp.sum(xp.astype(fits & (moved == weight), xp.int64)))
    return found


class RangeCollector:
    """Collects rows in the order in which their modules first appear. Counts for the same row are added up.

    Args:
        formats: the names of the formats.
        xp: the array namespace of all arrays that are added.
        cast: rounds an array to a format; needed for updates.

    Raises:
        ValueError: no format is given, or a format is unknown.
    """

    def __init__(self, formats: Sequence[str], *, xp: Namespace, cast: Cast) -> None:
        self.formats = checked_formats(formats)
        self.notes: list[str] = []
        self._xp, self._cast = xp, cast
        self._rows: dict[tuple[str, str], RangeRow] = {}

    @property
    def rows(self) -> tuple[RangeRow, ...]:
        """The rows, grouped by kind."""
        return tuple(row for kind in KINDS for row in self._rows.values() if row.kind == kind)

    def add(self, kind: str, module: str, x: Array) -> None:
        """Count an array, unless it is empty or not of a floating-point type."""
        self._put(count_row(kind, module, x, formats=self.formats, xp=self._xp))

    def add_update(self, module: str, before: Array, update: Array) -> None:
        """Count an update of a parameter, and how many of its elements are lost."""
        row = count_row(UPDATE, module, update, formats=self.formats, xp=self._xp)
        if row is not None:
            lost = count_lost(before, update, formats=self.formats, cast=self._cast, xp=self._xp)
            self._put(dataclasses.replace(row, lost=lost))

    def note(self, text: str) -> None:
        """Keep a sentence about what was not measured, unless it is already there."""
        if text not in self.notes:
            self.notes.append(text)

    def _put(self, row: RangeRow | None) -> None:
        if row is not None:
            key = (row.kind, row.module)
            self._rows[key] = self._rows[key].merged(row) if key in self._rows else row
