"""The report of a comparison."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from stablenum.diagnosis.diff.rendering import as_rich, as_text
from stablenum.errors import either
from stablenum.files import write_text

__all__ = ["Cause", "DiffReport", "Difference", "Location", "Off"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffReport:
    """The result of comparing two programs.

    Attributes:
        verdict: "the same", "the same in exact arithmetic" or "different".
        differences: the places at which the programs part, each independent of those before it.
        weights: parameter of the right program -> where it comes from.
        left_off, right_off: how far each side is off its float64 twin, if the programs agree.
        matched: how many of the values of each side the other side has too, and of how many.
        notes: what could not be compared.
    """

    verdict: str
    differences: tuple[Difference, ...] = ()
    weights: Mapping[str, str]
    left_off: Off | None = None
    right_off: Off | None = None
    matched: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (0, 0))
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the programs compute the same, up to rounding."""
        return not self.differences

    @property
    def first(self) -> Difference | None:
        """The first difference; None if there is none."""
        return self.differences[0] if self.differences else None

    @property
    def causes(self) -> tuple[Cause, ...]:
        """The causes of the first difference, the most likely first."""
        return self.first.causes if self.first is not None else ()

    def __str__(self) -> str:
        return as_text(self)

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        return as_rich(self)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"ok": self.ok, **asdict(self)}

    def to_json(self) -> str:
        """Return the report as strict JSON."""
        return json.dumps(_plain(self.to_dict()), indent=2, allow_nan=False)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the report in the format that the suffix names: ``.json`` or ``.txt``.

        Raises:
            ValueError: ``path`` has another suffix.
        """
        path = Path(path)
        forms = {".json": self.to_json, ".txt": self.__str__}
        form = forms.get(path.suffix.lower())
        if form is None:
            raise ValueError(
                f"path must end in {either(forms)}; got {str(path)!r}. The suffix selects the format."
            )
        write_text(path, form().rstrip("\n") + "\n")


def _plain(x: Any) -> Any:
    """Return values that strict JSON can hold."""
    if isinstance(x, Mapping):
        return {k: _plain(v) for k, v in x.items()}
    if isinstance(x, tuple | list):
        return [_plain(v) for v in x]
    if isinstance(x, float) and x - x != 0:
        return str(x)
    return x
