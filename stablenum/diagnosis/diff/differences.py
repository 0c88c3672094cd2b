"""What a report holds: places, causes, differences, rounding errors and rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["MOST_NAMED", "Cause", "Difference", "Location", "Off", "Row"]

# A sentence of a report names so many of several, and counts the rest. Chosen, not measured.
MOST_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """An operation of one side.

    Attributes:
        where: "file.py:LINE".
        operation: its name; None if this side lacks the operation that the other side has, in which case
            ``where`` is the line after whose result it is missing, or that passes the gradient which the
            other side stops.
        module: the path of the module, or the name stack of JAX.
        phase: "forward", "backward" or "update".
        code: the source line.
        row: the index of the operation among the rows of its side; None for the line that makes an optimizer.
        called_at: the line of the user's own code that called it, if ``where`` is one of an installed
            package; else "".
    """

    where: str
    operation: str | None
    module: str
    phase: str
    code: str = ""
    row: int | None = field(default=None, compare=False)
    called_at: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A reason for a difference.

    Attributes:
        code: a word of a fixed vocabulary, such as "epsilon_value".
        sentence: what differs.
        evidence: what was measured.
        remedy: how to mend it.
        confirmed: whether it was tried, and made the two sides agree as the evidence says.
        numbers: what the left and the right program compute with, if the cause is another number.
    """

    code: str
    sentence: str
    evidence: str
    remedy: str
    confirmed: bool
    numbers: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One place at which the programs part.

    Attributes:
        left, right: the operation of each side; None where nothing of it leads to the difference.
        result: what differs first because of it, such as "loss".
        step: the training step.
        error: the largest relative difference of that result in float64.
        allowed: how much of it rounding explains.
        causes: the most likely first. Several are confirmed if each change alone makes the programs agree.
        within: the lines of each side from which the difference follows, up to where the programs agree
            again.
        also: further places, left and right, at which the programs part for the same confirmed cause, such as
            the other norms that have the same epsilon.
        of_rounding: whether the programs agree in float64, and the right one as it is rounds more than its
            recording on the left allows; ``error`` and ``allowed`` are then those of the operation.
    """

    left: Location | None
    right: Location | None
    result: str
    step: int
    error: float
    allowed: float
    causes: tuple[Cause, ...] = ()
    within: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    also: tuple[tuple[Location | None, Location | None], ...] = ()
    of_rounding: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Off:
    """How far one side is off its own float64 twin.

    Attributes:
        error: the largest relative error of a loss or output.
        where, operation: the operation that adds most.
        added: the relative error that it adds.
        compiled: the largest relative error of each kind of result as the compiler computes it; None if
            nothing is compiled.
    """

    error: float
    where: str
    operation: str
    added: float
    compiled: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One operation of one side, as the page lists it.

    Attributes:
        operation: its name.
        where: "file.py:LINE".
        code: the source line.
        module: the path of the module, such as "blocks.1.attn"; "" for none.
        phase: "forward", "backward" or "update".
        step: the training step, from 1.
        state: "equal": the other side has the same value, also as the programs are; "rounding": the same in
            float64 only; "unmatched": no counterpart, but nothing that differs depends on it; "different":
            on the way to a result that differs, from inputs that do not; "follows": further on the way.
        partner: the index of the row of the other side that has the same value; None if there is none.
        error: the relative difference from the partner in float64.
        allowed: how much of it rounding explains.
        off: how far the value in its own format is off its float64 twin.
    """

    operation: str
    where: str
    code: str
    module: str
    phase: str
    step: int
    state: str
    partner: int | None
    error: float | None
    allowed: float | None
    off: float | None
