"""How far what a compiler makes of a program is off the program's float64 twin."""

from __future__ import annotations

from collections.abc import Mapping

from stablenum.diagnosis.diff.sides.play import Result
from stablenum.diagnosis.diff.sides.rounding import Rounding, relative_error
from stablenum.diagnosis.diff.sides.sides import Side

__all__ = ["compiled_errors", "too_far"]

# The compiler adds and multiplies in another order: its result may be so many times as far off as that of the
# operations one by one. Chosen, not measured.
_FACTOR = 100.0
# Operations that happen to round less count as if they rounded by so much: some ten roundings of float32,
# each of which is 6e-8.
_FLOOR = 1e-6
# A result that is off by half of its size is nothing but rounding, such as the gradient of a key's bias in
# attention, which is zero.
_NOTHING = 0.5


def compiled_errors(side: Side, rounding: Rounding) -> Mapping[str, float] | None:
    """Return the largest relative error of each kind of result, by kind; None if nothing is compiled."""
    run = getattr(side.program, "compiled", None)
    found = None if run is None else run(weights=side.weights)
    if found is None:
        return None
    errors: dict[str, float] = {}
    for r in _telling(side, rounding):
        if r.step == 1 and (r.kind, r.name) in found:
            error = relative_error(found[r.kind, r.name].reshape(-1), side.arrays[r.value])
            errors[r.kind] = max(errors.get(r.kind, 0.0), error)
    return errors


def too_far(side: Side, rounding: Rounding, errors: Mapping[str, float]) -> bool:
    """Return whether a compiled program is further off than the rounding of its operations explains."""
    for kind, error in errors.items():
        own = max(rounding.errors.get(r.value, 0.0) for r in _telling(side, rounding) if r.kind == kind)
        if not error <= _FACTOR * max(own, _FLOOR):
            return True
    return False


def _telling(side: Side, rounding: Rounding) -> list[Result]:
    return [r for r in side.play.results if rounding.errors.get(r.value, 0.0) < _NOTHING]
