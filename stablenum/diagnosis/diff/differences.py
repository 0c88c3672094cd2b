"""What a report holds: places, causes, differences and rounding errors."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Cause", "Difference", "Location", "Off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """An operation of one side.

    Attributes:
        where: "file.py:LINE".
        operation: its name; None if this side lacks the operation that the other side has, in which case
            ``where`` is the line after whose result it is missing.
        module: the path of the module, or the name stack of JAX.
        phase: "forward", "backward" or "update".
        code: the source line.
    """

    where: str
    operation: str | None
    module: str
    phase: str
    code: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A reason for a difference.

    Attributes:
        code: a word of a fixed vocabulary, such as "epsilon_value".
        sentence: what differs.
        evidence: what was measured.
        remedy: how to mend it.
        confirmed: whether trying it made the two sides agree.
    """

    code: str
    sentence: str
    evidence: str
    remedy: str
    confirmed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One place at which the programs part.

    Attributes:
        left, right: the operation of each side; None where nothing of it leads to the difference.
        result: what differs first because of it, such as "loss".
        step: the training step.
        error: the largest relative difference of that result in float64.
        allowed: how much of it rounding explains.
        causes: the most likely first.
    """

    left: Location | None
    right: Location | None
    result: str
    step: int
    error: float
    allowed: float
    causes: tuple[Cause, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Off:
    """How far one side is off its own float64 twin.

    Attributes:
        error: the largest relative error of a loss or output.
        where, operation: the operation that adds most.
        added: the relative error that it adds.
    """

    error: float
    where: str
    operation: str
    added: float
