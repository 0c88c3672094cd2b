"""Say what in a checkpoint is poison, what is suspicious, and what is only worth a note.

Poison is a number that training or inference computes with and that is wrong for good:

- NaN or inf in a parameter or a buffer, except in a mask, which holds nothing but 0 and -inf;
- NaN or inf in an optimizer's state, and a negative second moment;
- NaN in any other number, and inf in a learning rate, momentum or weight decay.

What is not finite on purpose is noted, by the rule by which ``Checkpoints`` saves: a guard's state; inf in
one number, plain or in an array, that is no parameter, as the best value so far is inf at first; and what the
user allows by name.
"""

from __future__ import annotations

import cmath
import dataclasses
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stablenum.checkpoints.finiteness import Kind, NonFinite, is_meant
from stablenum.commands.verify.contents import Contents, Entry, Path
from stablenum.commands.verify.counts import NARROW, Counts, count, count_blocks, is_measured, width_of
from stablenum.commands.verify.layout import Layout, Part
from stablenum.commands.verify.limits import Limits
from stablenum.commands.verify.moments import rows_of
from stablenum.commands.verify.verdicts import Poison, Verdict
from stablenum.diagnosis.audit import Risk, Role, Row, risks_of

__all__ = ["judged"]

_KINDS = {
    Role.FIRST: "first moment",
    Role.SECOND: "second moment",
    Role.SECOND_MAX: "largest second moment",
    Role.NORM: "norm",
    Role.MEAN: "mean of gradients",
    Role.BUFFER: "momentum",
    Role.ACCUMULATOR: "accumulator",
    Role.COMPENSATION: "compensation",
}
_MEANT: dict[Kind, str] = {"buffer": "a mask", "guard": "a guard's state", "number": "a record"}
_SHOWN = 3
_USUAL = Limits()


def judged(contents: Contents, *, allow: Sequence[str] = (), limits: Limits = _USUAL) -> Verdict:
    """Return what is to be said of a checkpoint.

    Args:
        contents: what a reader found.
        allow: patterns of the names of entries that may be not finite.
        limits: how much may be read.

    Raises:
        NotCheckedError: there is more than the limits allow.
    """
    layout = Layout(contents)
    looked = _Look(layout, tuple(allow), limits)
    for entry in contents.arrays:
        if is_measured(entry.dtype):
            looked.at_array(entry)
    for path, value in contents.values.items():
        if isinstance(value, float | complex):
            looked.at_number(path, value)
    for name, value in contents.faults.items():
        looked.at_fault(name, value)
    return Verdict(
        format=contents.format,
        entries=len(contents.arrays),
        elements=looked.elements,
        numbers=looked.numbers,
        poison=tuple(looked.poison),
        suspicious=tuple(_suspicious(layout, looked)),
        notes=(*contents.notes, *_of_guards(layout, looked.passed_over), *looked.notes, *looked.ranges()),
    )


@dataclass(slots=True)
class _Wide:
    """The entries that would overflow in a narrower format."""

    names: list[str]
    elements: int = 0
    largest: float = 0.0


class _Look:
    """Looks at one entry after another."""

    def __init__(self, layout: Layout, allow: tuple[str, ...], limits: Limits) -> None:
        self.layout, self.allow, self.limits = layout, allow, limits
        self._bytes = 0
        self._known: dict[Hashable, Counts] = {}  # of elements that several entries hold
        self.elements = self.numbers = self.passed_over = 0
        self.poison: list[Poison] = []
        self.notes: list[str] = []
        self._wide: dict[str, _Wide] = {}

    def at_array(self, entry: Entry) -> None:
        part, role = self.layout.part(entry.path), self.layout.role(entry.path)
        if part is Part.GUARD:
            self.passed_over += math.prod(entry.shape)
            return
        squared = role is not None and role.squared
        found = self._count(entry, signed=not squared)
        self.elements += found.size
        if part is Part.STATE:
            self._note_range(entry.name, found)
        if not found.nonfinite and not found.negative:
            return
        why = self._meant(entry, found)
        if why:
            self.notes.append(f"{_told(entry.name, found)}: {why}")
        else:
            self.poison.append(_poison(entry, _kind(part, role, entry.path), found))

    def reading(self, entry: Entry) -> None:
        """Take note of the bytes of an entry before it is read.

        Raises:
            NotCheckedError: all together, they are more than the limits allow.
        """
        self._bytes += entry.size * width_of(entry.dtype)
        self.limits.check_bytes(self._bytes, self.layout.contents.stored)

    def _count(self, entry: Entry, *, signed: bool) -> Counts:
        key = None if entry.source is None else (entry.source, signed)
        if key in self._known:
            return self._known[key]
        self.reading(entry)
        if entry.blocks is None:
            found = count(entry.read(), signed=signed)
        else:
            found = count_blocks(entry.blocks(), entry.shape, signed=signed, columns=entry.columns)
        if key is not None:
            self._known[key] = found
        return found

    def at_number(self, path: Path, value: float | complex) -> None:
        part, name = self.layout.part(path), ".".join(path)
        if part is Part.GUARD:
            self.passed_over += 1
            return
        self.numbers += 1
        if cmath.isfinite(value):
            return
        nan = int(cmath.isnan(value))
        kind = self.layout.kind(path, size=None)
        if is_meant(NonFinite(name, kind, nan, 1 - nan, 0, 1), self.allow):
            self.notes.append(f"{name} is {value}")
        else:
            what = "setting" if self.layout.is_setting(path) else "number"
            self.poison.append(Poison.of_number(name, what, value))

    def at_fault(self, name: str, value: float) -> None:
        infinite = int(math.isinf(value))
        if is_meant(NonFinite(name, "array", 1 - infinite, infinite, 0, 1), self.allow):
            self.notes.append(f"{name} is {value}")
        else:
            self.poison.append(Poison.of_number(name, "guard's field", value))

    def ranges(self) -> Iterator[str]:
        """Yield a sentence for each narrower format in which parameters or buffers would overflow."""
        for name in NARROW:
            wide = self._wide.get(name)
            if wide is not None:
                yield (
                    f"{_counted(wide.elements, 'number')} would be inf in {name} (up to {wide.largest:.3g}): "
                    f"{_listed(wide.names)}"
                )

    def _note_range(self, name: str, found: Counts) -> None:
        for narrow, elements in found.overflow.items():
            wide = self._wide.setdefault(narrow, _Wide([]))
            wide.names.append(name)
            wide.elements += elements
            wide.largest = max(wide.largest, found.largest)

    def _meant(self, entry: Entry, found: Counts) -> str:
        """Return why an entry may be as it is; "" if it may not."""
        kind = self.layout.kind(entry.path, size=found.size)
        seen = _as_nonfinite(entry, kind, found)
        if is_meant(seen):
            return _MEANT[kind]
        return "allowed by name" if is_meant(seen, self.allow) else ""


def _as_nonfinite(entry: Entry, kind: Kind, found: Counts) -> NonFinite:
    return NonFinite(
        entry.name,
        kind,
        found.nan,
        found.plus_inf,
        found.minus_inf,
        found.size,
        dimensions=len(entry.shape),
        others_zero=found.largest == 0.0,
    )


def _kind(part: Part, role: Role | None, path: Path) -> str:
    if role is not None:
        return _KINDS.get(role, "moment")
    if part is Part.OPTIMIZER:
        return "step count" if path[-1].endswith(("step", "count")) else "optimizer's state"
    return part.value


def _poison(entry: Entry, kind: str, found: Counts) -> Poison:
    return Poison(
        name=entry.name,
        kind=kind,
        dtype=entry.dtype,
        shape=entry.shape,
        size=found.size,
        nan=found.nan,
        inf=found.plus_inf + found.minus_inf,
        negative=found.negative,
        first=found.first,
    )


def _told(name: str, found: Counts) -> str:
    counts = (("NaN", found.nan), ("inf", found.plus_inf), ("-inf", found.minus_inf), ("< 0", found.negative))
    listed = ", ".join(f"{n} {word}" for word, n in counts if n)
    return f"{name} holds {listed} of {_counted(found.size, 'number')}"


def _of_guards(layout: Layout, numbers: int) -> Iterator[str]:
    if layout.guards:
        are = " is a guard's state" if len(layout.guards) == 1 else " are guards' states"
        names = _listed([".".join(path) or "the top" for path in layout.guards])
        yield f"{names}{are}, where inf is meant; {_counted(numbers, 'number')} in it were not judged"


def _suspicious(layout: Layout, looked: _Look) -> list[Risk]:
    """Return what the audit finds beyond the poison, which is listed by entry; the worst first."""
    state = {e.name: e for e in layout.contents.arrays if layout.part(e.path) is Part.STATE}
    risks = [
        risk
        for row in rows_of(layout.slots, state, looked.reading)
        for risk in risks_of(_without_poison(row))
    ]
    return sorted(risks, key=lambda risk: risk.weight, reverse=True)


def _without_poison(row: Row) -> Row:
    measured = dataclasses.replace(row.measured, parameter_bad=0, poisoned=0)
    return dataclasses.replace(row, measured=measured)


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _listed(names: Sequence[Any]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(str, names[:_SHOWN])) + more
