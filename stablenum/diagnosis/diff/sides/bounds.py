"""How far a value may be off its float64 twin by rounding, on any machine.

Another number of threads, another instruction set, compiler or library adds up the same terms in another
order, so that the error that one machine happens to make says little. The bound is computed instead: the
program is evaluated in float64 with each result moved by one rounding of float32, which shows how the program
passes roundings on (its conditioning), and a sum of n terms may round sqrt(n) times as much, in whatever
order it is taken (Higham and Mary, A new approach to probabilistic rounding error analysis, SIAM J. Sci.
Comput. 41, 2019).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from stablenum.diagnosis.diff.sides.kinds import quiet
from stablenum.diagnosis.replay.trace import Step, Trace

__all__ = ["ROUNDING", "limits_of", "unit_of"]

# Half the spacing of float32 at 1: what rounding to the nearest does to a result, at most.
ROUNDING = 2.0**-24
# The unit roundoff of each format, by its name in both frameworks.
_UNITS = {
    "float64": 2.0**-53, "float32": ROUNDING, "float16": 2.0**-11, "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3, "complex128": 2.0**-53, "complex64": ROUNDING,
}  # fmt: skip
# One draw of the noise may move a value little by chance, a function such as exp may be off by a few units,
# and a library may take a longer way. Set by the harmless changes of ``tests/lockfile``.
_FACTOR = 4.0


def unit_of(form: str) -> float:
    """Return the unit roundoff of a format; 0 for whole numbers and flags."""
    return _UNITS.get(form, 0.0)


def limits_of(
    trace: Trace, shapes: Sequence[tuple[int, ...]], forms: Mapping[int, str], moved: Mapping[int, float]
) -> list[float]:
    """Return for each value how far rounding may take it from its float64 twin, relative to its largest
    entry; infinity where nothing is known.

    Args:
        trace: the program.
        shapes: of all values.
        forms: the format of each value in the program as it is; of float32 where none is known.
        moved: how far one rounding of float32 in each result moves a value.
    """
    unit, terms = [0.0] * len(trace.values), [1.0] * len(trace.values)
    for value in trace.values:
        if value.producer is None:
            unit[value.id] = unit_of(forms.get(value.id, "float32"))
    for step in trace.steps:
        own = 1.0 if quiet(step) else _terms(step, shapes)
        coarsest = max((unit[i] for i in step.inputs), default=0.0)
        most = max((terms[i] for i in step.inputs), default=1.0)
        for output in step.outputs:
            unit[output] = max(coarsest, unit_of(forms.get(output, "float32")))
            terms[output] = max(own, most)
    return [
        math.inf
        if v.id not in moved
        else _FACTOR * math.sqrt(terms[v.id]) * unit[v.id] * max(moved[v.id] / ROUNDING, 1.0)
        for v in trace.values
    ]


def _terms(step: Step, shapes: Sequence[tuple[int, ...]]) -> float:
    """Return how many terms each entry of what a step gives is the sum of."""
    if step.roles and step.inputs:
        sizes = (
            math.prod(n for n, role in zip(shape, roles, strict=False) if role not in ("kept", "batch"))
            for shape, roles in zip((shapes[i] for i in step.inputs), step.roles, strict=False)
        )
        return float(max(sizes, default=1))
    largest = max((math.prod(shapes[i]) for i in step.inputs), default=1)
    smallest = min((math.prod(shapes[o]) for o in step.outputs), default=1)
    return max(largest / max(smallest, 1), 1.0)
