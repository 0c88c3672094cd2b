"""One row of the report: the counts for one kind of tensor in one module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stablenum.diagnosis.ranges.limits import limits

__all__ = [
    "ACTIVATION",
    "ACTIVATION_GRADIENT",
    "BACKWARD",
    "FORWARD",
    "GRADIENT",
    "KINDS",
    "UPDATE",
    "WEIGHT",
    "RangeRow",
    "module_label",
]

ACTIVATION, WEIGHT = "activation", "weight"
ACTIVATION_GRADIENT, GRADIENT = "activation gradient", "gradient"
UPDATE = "update"
#: The kinds: activations, weights, gradients of activations, gradients of parameters, updates of parameters.
KINDS = (ACTIVATION, WEIGHT, ACTIVATION_GRADIENT, GRADIENT, UPDATE)
FORWARD = (ACTIVATION, WEIGHT)
BACKWARD = (ACTIVATION_GRADIENT, GRADIENT)


def module_label(module: str) -> str:
    """Return a module's path as it is shown; the path of the model itself is empty."""
    return module or "(model)"


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRow:
    """Counts over all elements of one kind in one module.

    Attributes:
        kind: one of :data:`KINDS`.
        module: the path of the module, parts joined by dots; ``""`` is the model itself.
        elements: the number of finite elements, zeros included. All fractions refer to these.
        nan: the number of elements that are NaN in float32; no other count includes them.
        inf: the number of elements that are infinite in float32; no other count includes them.
        zeros: the number of exact zeros.
        amax: the largest \\|x\\|; 0.0 if there are no elements.
        amin: the smallest \\|x\\| above 0; 0.0 if there is none.
        histogram: for each exponent e, the number of elements with 2**(e-1) < \\|x\\| <= 2**e.
        overflow: for each format, the number of elements that become inf (NaN in e4m3fn, or 448 if the cast
            saturates).
        subnormal: for each format, the number of elements that are kept with fewer bits.
        lost: for each format, the number of elements with w + dw == w although dw is not 0, where w, dw and
            the sum are rounded to the format; only for the kind ``"update"``.
    """

    kind: str
    module: str
    elements: int = 0
    nan: int = 0
    inf: int = 0
    zeros: int = 0
    amax: float = 0.0
    amin: float = 0.0
    histogram: Mapping[int, int] = field(default_factory=dict)
    overflow: Mapping[str, int] = field(default_factory=dict)
    subnormal: Mapping[str, int] = field(default_factory=dict)
    lost: Mapping[str, int] = field(default_factory=dict)

    def flushed(self, name: str, exponent: int = 0) -> int:
        """Return how many nonzero elements become 0 in the format after a multiplication by
        ``2**exponent``."""
        last = limits(name).flush - exponent
        return sum(count for e, count in self.histogram.items() if e <= last)

    def fraction(self, count: int) -> float:
        """Return ``count`` as a fraction of the finite elements; 0.0 if there are none."""
        return count / self.elements if self.elements else 0.0

    def merged(self, other: RangeRow) -> RangeRow:
        """Return one row for the elements of this row and the other."""
        smallest = [amin for amin in (self.amin, other.amin) if amin > 0]
        return RangeRow(
            kind=self.kind,
            module=self.module,
            elements=self.elements + other.elements,
            nan=self.nan + other.nan,
            inf=self.inf + other.inf,
            zeros=self.zeros + other.zeros,
            amax=max(self.amax, other.amax),
            amin=min(smallest, default=0.0),
            histogram=_added(self.histogram, other.histogram),
            overflow=_added(self.overflow, other.overflow),
            subnormal=_added(self.subnormal, other.subnormal),
            lost=_added(self.lost, other.lost),
        )

    def to_dict(self, formats: tuple[str, ...]) -> dict[str, Any]:
        """Return plain values for JSON: counts, and fractions per format."""
        return {
            "kind": self.kind,
            "module": self.module,
            "elements": self.elements,
            "nan": self.nan,
            "inf": self.inf,
            "zeros": self.zeros,
            "amax": self.amax,
            "amin": self.amin,
            "histogram": {str(e): count for e, count in sorted(self.histogram.items())},
            "formats": {name: self._fractions(name) for name in formats},
        }

    def _fractions(self, name: str) -> dict[str, float]:
        found = {
            "overflow": self.fraction(self.overflow.get(name, 0)),
            "flushed": self.fraction(self.flushed(name)),
            "subnormal": self.fraction(self.subnormal.get(name, 0)),
        }
        if name in self.lost:
            found["lost"] = self.fraction(self.lost[name])
        return found


def _added(a: Mapping[Any, int], b: Mapping[Any, int]) -> dict[Any, int]:
    return {key: a.get(key, 0) + b.get(key, 0) for key in sorted({*a, *b})}
