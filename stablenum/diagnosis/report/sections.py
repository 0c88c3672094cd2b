"""The parts of a report, in order, before they are rendered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stablenum._support.outside_text import printable
from stablenum.diagnosis.replay.causes import NOTHING_TO_TRY
from stablenum.diagnosis.replay.findings import Finding
from stablenum.diagnosis.replay.judge import Verdict
from stablenum.diagnosis.replay.source_files import package_of
from stablenum.diagnosis.replay.values import Place, TensorStats

__all__ = ["Row", "Sections", "sections_of"]

# These limits keep a report to one screen.
MOST_FRAMES = 6
MOST_TENSORS = 4
MOST_FACTS = 6
MOST_OTHERS = 3
MOST_NOTES = 4


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor: whether it is input or output, its name and type, its finite range, and other counts."""

    which: str
    what: str
    within: str
    counts: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sections:
    """The parts of a report; a part is empty if there is nothing to say. ``source`` has the numbered lines
    around the place."""

    title: str
    place: Place | None
    source: tuple[tuple[int, str], ...]
    details: tuple[tuple[str, str], ...]
    rows: tuple[Row, ...]
    cause: str
    what: str
    facts: tuple[str, ...]
    remedy: str
    code: tuple[str, ...]
    tried: str
    frames: tuple[Place, ...]
    others: tuple[str, ...]
    notes: tuple[str, ...]


def sections_of(verdict: Verdict, findings: Sequence[Finding], notes: Sequence[str]) -> Sections:
    """Return the parts of a report that are shown: statistics, never data, and no more than one screen."""
    first = findings[0] if findings else None
    rows: tuple[Row, ...] = ()
    frames: tuple[Place, ...] = ()
    details: tuple[tuple[str, str], ...] = ()
    if first is not None:
        details = (("primitive", first.primitive), ("module", first.module), ("inside", first.where))
        rows = (*_rows("in", first.inputs), *_rows("out" if first.phase != "before" else "is", first.outputs))
        frames = first.frames if len(first.frames) > 1 else ()
    # Statistics are shown as rows.
    facts = [fact for fact in verdict.evidence if not fact.startswith(("in:  ", "out: "))]
    # A forward pass that runs again (as with checkpointing) fails again, on the same line.
    distinct = dict.fromkeys(str(finding) for finding in findings)
    others = list(distinct)[1:]
    return Sections(
        title=printable(str(first)) if first is not None else "",
        place=_clean_place(first.place) if first is not None and first.place is not None else None,
        source=tuple((n, printable(line)) for n, line in first.around) if first is not None else (),
        details=tuple((label, printable(text)) for label, text in details if text),
        rows=rows,
        cause=verdict.cause.value,
        what=_sentence(verdict.what),
        facts=_some(facts, MOST_FACTS),
        remedy=_sentence(verdict.remedy),
        code=tuple(map(printable, verdict.patch or filter(None, [verdict.code]))),
        tried=printable(_tried(verdict)),
        frames=tuple(_clean_place(frame) for frame in _shown(frames)),
        others=_some(others, MOST_OTHERS),
        notes=tuple(_sentence(note) for note in _some(notes, MOST_NOTES)),
    )


def _tried(verdict: Verdict) -> str:
    if verdict.trial or verdict.cause in NOTHING_TO_TRY:
        return verdict.trial
    if verdict.tried != "finite":
        return "not tried"
    said = "tried: finite, in value and derivative, on what this operation read"
    return f"{said}; not tried: {', '.join(_some(verdict.left, MOST_OTHERS))}" if verdict.left else said


def _shown(frames: Sequence[Place]) -> list[Place]:
    """Return the innermost frames, those of the user's own code before those of installed packages."""
    last = len(frames) - 1
    own = [i for i, frame in enumerate(frames) if not package_of(frame.file) or i == last]
    rest = [i for i in range(len(frames)) if i not in own]
    kept = own[-MOST_FRAMES:]
    room = MOST_FRAMES - len(kept)
    return [frames[i] for i in sorted(kept + (rest[-room:] if room else []))]


def _rows(which: str, tensors: tuple[TensorStats, ...]) -> list[Row]:
    rows = [_row(which, s) for s in tensors[:MOST_TENSORS]]
    left = len(tensors) - len(rows)
    return [*rows, Row("", f"and {left} more", "", "")] if left > 0 else rows


def _row(which: str, s: TensorStats) -> Row:
    counts = {"NaN": s.nan, "inf": s.posinf, "-inf": s.neginf, "zero": s.zero, "subnormal": s.subnormal}
    shown = [f"{n:,} {kind}" for kind, n in counts.items() if n]
    what = f"{s.dtype}[{', '.join(map(str, s.shape))}]"
    within = "" if s.min != s.min else f"in [{s.min:.4g}, {s.max:.4g}]"
    return Row(which, printable(f"{s.name} {what}") if s.name else what, within, ", ".join(shown))


def _clean_place(place: Place) -> Place:
    return Place(printable(place.file), place.line, printable(place.function), printable(place.code))


def _sentence(text: str) -> str:
    text = printable(text)
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '!', '?')) else '.'}" if text else ""


def _some(texts: Sequence[str], most: int) -> tuple[str, ...]:
    left = len(texts) - most
    return (*map(printable, texts[:most]), *([f"and {left} more"] if left > 0 else []))
