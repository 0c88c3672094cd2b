"""What a diagnosis keeps of a tensor: counts and extremes, never the data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from stablenum._support.pickled_fields import pickled_by_name
from stablenum.diagnosis.replay.notebook_cells import shown_file

__all__ = ["MOST_VALUES", "Place", "TensorStats", "plain"]

# At most this many values around a failure are kept, so that no report leaks a batch.
MOST_VALUES = 4


@pickled_by_name
@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStats:
    """Statistics of one tensor.

    ``min``, ``max`` and ``amax`` (the largest magnitude) are those of the finite elements, in float64; they
    are NaN if no element is finite. ``values`` holds at most four elements around the failure.

    Example:
        >>> s = TensorStats(dtype="float32", shape=(2,), size=2, min=1.0, max=1.0, amax=1.0, posinf=1)
        >>> str(s)
        'float32[2] in [1, 1], 1 inf'
        >>> s.finite
        False
    """

    dtype: str
    shape: tuple[int, ...]
    size: int
    min: float = math.nan
    max: float = math.nan
    amax: float = math.nan
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    zero: int = 0
    subnormal: int = 0
    values: tuple[float, ...] = ()
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "values", tuple(self.values)[:MOST_VALUES])

    @property
    def inf(self) -> int:
        """How many elements are inf or -inf."""
        return self.posinf + self.neginf

    @property
    def finite(self) -> bool:
        """Whether every element is finite."""
        return not self.nan and not self.inf

    def __str__(self) -> str:
        label = f"{self.name} " if self.name else ""
        what = f"{label}{self.dtype}[{', '.join(map(str, self.shape))}]"
        parts = [] if math.isnan(self.min) else [f"in [{self.min:.4g}, {self.max:.4g}]"]
        counts = {
            "NaN": self.nan,
            "inf": self.posinf,
            "-inf": self.neginf,
            "zero": self.zero,
            "subnormal": self.subnormal,
        }
        parts += [f"{n} {kind}" for kind, n in counts.items() if n]
        return f"{what} {', '.join(parts)}" if parts else what

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; numbers that are not finite become strings."""
        return {k: plain(v) for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> TensorStats:
        """Return the object from which :meth:`to_dict` made ``d``."""
        numbers = {k: float(d[k]) for k in ("min", "max", "amax")}
        values = tuple(float(v) for v in d["values"])
        return cls(**{**d, **numbers, "shape": tuple(d["shape"]), "values": values})


def plain(v: Any) -> Any:
    """Return the value for JSON: a number that is not finite becomes a string, and a tuple becomes a list."""
    if isinstance(v, float) and not math.isfinite(v):
        return str(v)
    return [plain(x) for x in v] if isinstance(v, tuple) else v


@pickled_by_name
@dataclass(frozen=True, slots=True)
class Place:
    """A line of source.

    ``span`` is the part of it that was running: first and last line, and the columns at which it begins and
    ends, in bytes of UTF-8, as in Python's own tracebacks. Two places on one line are the same place.

    Example:
        >>> str(Place("model.py", 12, "forward", "return x.log()"))
        'model.py:12'
    """

    file: str
    line: int
    function: str = ""
    code: str = ""
    span: tuple[int, int, int, int] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.span is not None:
            object.__setattr__(self, "span", tuple(self.span))

    def __str__(self) -> str:
        return f"{shown_file(self.file)}:{self.line}"
