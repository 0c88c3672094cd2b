"""The report of a checkup: what is wrong, since when, where, the evidence, and the cure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from stablenum.diagnosis.checkup.course import Course
from stablenum.diagnosis.checkup.ranking import complaints
from stablenum.diagnosis.checkup.rendering import as_html, as_rich, as_text
from stablenum.diagnosis.checkup.symptoms import Complaint, Level
from stablenum.diagnosis.checkup.trials import FirstStep, with_trial
from stablenum.diagnosis.report.html import framed

__all__ = ["Checkup"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkup:
    """What a checkup of a training has found.

    Attributes:
        complaints: what is wrong, root causes first, each with its consequences.
        steps: the number of optimizer steps that were watched.
        measured: the number of these that were measured in full.
        losses: the first and the last loss; None if no loss was seen.
        notes: what could not be measured.

    Example:
        >>> from stablenum.diagnosis.checkup.course import Course
        >>> print(Checkup.of(Course(framework="torch", steps=3)))
        Nothing found in 3 optimizer steps, of which 0 were measured in full.
    """

    complaints: tuple[Complaint, ...]
    steps: int
    measured: int
    losses: tuple[float, float] | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, course: Course, *, first: FirstStep | None = None, notes: tuple[str, ...] = ()) -> Checkup:
        """Return the report on a course; if its first step can be evaluated again, cures are tried on it."""
        values = [v for v in course.values if math.isfinite(v)]
        return cls(
            complaints=with_trial(complaints(course), course, first),
            steps=course.steps,
            measured=len(course.probes),
            losses=(values[0], values[-1]) if values else None,
            notes=notes,
        )

    @property
    def ok(self) -> bool:
        """Whether nothing above a note was found."""
        return all(c.level is Level.NOTE for c in self.complaints)

    def with_tried(self, shown: str) -> Checkup:
        """Return the report with what a trial of the first cure has shown."""
        first, *others = self.complaints
        return replace(self, complaints=(first.with_(tried=shown), *others))

    def with_refuted(self, shown: str) -> Checkup:
        """Return the report with a trial in which the first cure was no better. The finding loses that cure,
        and comes after those of which nothing speaks against theirs."""
        first, *others = self.complaints
        first = first.with_(tried=shown, cure="", level=min(first.level, Level.WARNING))
        return replace(self, complaints=tuple(sorted((*others, first), key=lambda c: -c.level)))

    def __str__(self) -> str:
        return as_text(self)

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        return as_rich(self)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "ok": self.ok,
            "complaints": [c.to_dict() for c in self.complaints],
            "steps": self.steps,
            "measured": self.measured,
            "losses": self.losses,
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Checkup:
        """Return the object from which :meth:`to_dict` made ``d``."""
        return cls(
            complaints=tuple(map(Complaint.from_dict, d["complaints"])),
            steps=d["steps"],
            measured=d["measured"],
            losses=None if d["losses"] is None else (d["losses"][0], d["losses"][1]),
            notes=tuple(d["notes"]),
        )

    def to_json(self) -> str:
        """Return the report as strict JSON."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def to_html(self) -> str:
        """Return one self-contained HTML page: no network, no script, a light and a dark theme."""
        return as_html(self)

    def _repr_html_(self) -> str:
        """Return the page in a frame, for notebooks."""
        return framed(self.to_html())
