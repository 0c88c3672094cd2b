"""The range report: rows, verdicts, a table, JSON and a plot."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stablenum._support.partners import of_extra
from stablenum.diagnosis.ranges.counting import checked_formats
from stablenum.diagnosis.ranges.rows import RangeRow, module_label
from stablenum.diagnosis.ranges.verdicts import FormatVerdict, Trouble, judge
from stablenum.errors import bad_field, either
from stablenum.formats import FORMATS
from stablenum.precision.policy import Policy, PolicyRule

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["RangeReport"]

_HEAD = ("module", "kind", "elements", "smallest", "largest")


class RangeReport:
    """What each format would do to the values of one training step.

    :func:`stablenum_torch.range_report` and :func:`stablenum_jax.range_report` return it. A value overflows
    if rounding to nearest, ties to even, makes it inf (float16: from 65520; e4m3fn: above 464, where it
    becomes NaN, or 448 if the cast saturates). A value is flushed if rounding makes it 0 (float16: up to
    2**-25). All fractions refer to the finite elements, zeros included.

    Args:
        rows: the counts per kind and module, in the order of execution.
        formats: the names of the formats.
        notes: sentences about what was not measured.

    Attributes:
        rows: the rows as given.
        formats: the full names of the formats.
        notes: the notes as given.

    Raises:
        ValueError: no format is given, or a format is unknown.

    Example:
        >>> import array_api_compat.numpy as np
        >>> from stablenum.diagnosis.ranges import RangeCollector, RangeReport
        >>> seen = RangeCollector(["float16"], xp=np, cast=lambda x, name: x.astype(name).astype(x.dtype))
        >>> seen.add("activation", "blocks.3.attn", np.asarray([1e6, 2.0]))
        >>> seen.add("gradient", "blocks.0.mlp", np.asarray([0.5, 1e-9]))
        >>> print(RangeReport(seen.rows, seen.formats).verdict)
        float16 works with scale 2^15; without it 50.0% of the gradients become 0 (most in blocks.0.mlp),
        with it 0.0%; blocks.3.attn overflows (1e+06); use bfloat16 there, or a soft cap of 50.
    """

    def __init__(self, rows: Iterable[RangeRow], formats: Sequence[str], notes: Iterable[str] = ()) -> None:
        self.rows = tuple(rows)
        self.formats = checked_formats(formats)
        self.notes = tuple(notes)

    @cached_property
    def verdicts(self) -> Mapping[str, FormatVerdict]:
        """The verdict on each format, by name."""
        return {name: judge(name, self.rows) for name in self.formats}

    @property
    def verdict(self) -> str:
        """A sentence or two on each format, one line per format."""
        return "\n".join(verdict.sentence for verdict in self.verdicts.values())

    @property
    def troubles(self) -> tuple[Trouble, ...]:
        """What goes wrong in which module and format."""
        return tuple(trouble for verdict in self.verdicts.values() for trouble in verdict.troubles)

    def loss_scale(self, name: str = "float16") -> float | None:
        """Return the recommended initial loss scale for a format, a power of two; None without gradients.

        Raises:
            ValueError: the report is not about this format.
        """
        return self._verdict(name).loss_scale

    def policy(self, name: str = "float16") -> Policy:
        """Return a policy with float32 parameters that computes in a format, and in float32 in the modules
        where the format fails.

        Raises:
            ValueError: the report is not about this format.
        """
        wider = {
            t.module for t in self._verdict(name).troubles if t.what in ("overflow", "flushed") and t.module
        }
        rules = tuple(PolicyRule(path, compute="float32", output="float32") for path in sorted(wider))
        return Policy(params="float32", compute=name, rules=rules)

    def by_trouble(self) -> list[RangeRow]:
        """Return the rows, the worst first; those without trouble stay in the order of execution."""
        return sorted(self.rows, key=lambda row: -max(self._trouble(row, name) for name in self.formats))

    def table(self, rows: int | None = 40) -> str:
        """Return a table in plain text, the worst rows first.

        Args:
            rows: the largest number of rows; None for all.

        Returns:
            The lines. A cell shows the fraction of elements that overflow (``over``), are flushed to 0
            (``zero``), are subnormal (``sub``) or lose their update (``lost``); it is empty if there are
            none.
        """
        lines = [[*_HEAD, *self.formats], *self._cells(rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        lines.insert(1, ["-" * width for width in widths])
        right = range(2, len(_HEAD))
        text = [
            "  ".join(
                cell.rjust(width) if i in right else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths))
            ).rstrip()
            for line in lines
        ]
        return "\n".join([*text, *self._left_out(rows)])

    def rich_table(self, rows: int | None = 40) -> Table:
        """Return the table as a ``rich.table.Table``: overflow in red, lost and flushed in yellow.

        Raises:
            ImportError: rich is not installed (extra ``cli``).
        """
        of_extra("RangeReport.rich_table", "rich", "rich")
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, caption=" ".join(self._left_out(rows)) or None)
        for i, name in enumerate([*_HEAD, *self.formats]):
            table.add_column(name, justify="right" if 2 <= i < len(_HEAD) else "left")
        for line in self._cells(rows):
            formats = [Text(cell, style=_style(cell)) for cell in line[len(_HEAD) :]]
            table.add_row(*(Text(cell) for cell in line[: len(_HEAD)]), *formats)
        return table

    def to_dict(self) -> dict[str, Any]:
        """Return plain values: formats, verdicts, rows, notes."""
        return {
            "formats": list(self.formats),
            "verdicts": {name: asdict(verdict) for name, verdict in self.verdicts.items()},
            "rows": [row.to_dict(self.formats) for row in self.rows],
            "notes": list(self.notes),
        }

    def to_json(self, *, indent: int | None = None) -> str:
        """Return strict JSON of :meth:`to_dict` (no NaN, no Infinity)."""
        return json.dumps(self.to_dict(), allow_nan=False, indent=indent)

    def plot(self, path: str | Path) -> None:
        """Draw each kind's exponents and the formats' ranges to a file. The suffix selects the file format.

        Raises:
            ImportError: matplotlib is not installed (extra ``demo``).
            ValueError: nothing was measured, or matplotlib cannot write such a file.
        """
        if not any(row.histogram for row in self.rows):
            raise bad_field("plot", "called on a report with at least one value other than 0", self.rows)
        of_extra("RangeReport.plot", "matplotlib", "matplotlib")
        from stablenum.diagnosis.ranges.plot import draw

        scale = self.loss_scale("float16") if "float16" in self.formats else None
        draw(self.rows, self.formats, 0 if scale is None else round(math.log2(scale)), path)

    def __str__(self) -> str:
        return "\n\n".join([self.table(), self.verdict, *([" ".join(self.notes)] if self.notes else [])])

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self.rows)} rows, {', '.join(self.formats)}>"

    def _verdict(self, name: str) -> FormatVerdict:
        if name not in self.verdicts:
            raise bad_field("name", f"one of {either(self.formats)}", name)
        return self.verdicts[name]

    def _trouble(self, row: RangeRow, name: str) -> float:
        """Return the rank of a row: overflow counts most, then lost or flushed values. 8-bit formats count
        less, because their tensors are scaled."""
        over = row.fraction(row.overflow.get(name, 0))
        gone = row.fraction(max(row.flushed(name), row.lost.get(name, 0)))
        weight = 0.01 if FORMATS[name].bits == 8 else 1.0
        return weight * (2 + over if over else gone)

    def _cells(self, rows: int | None) -> list[list[str]]:
        return [
            [
                module_label(row.module),
                row.kind,
                f"{row.elements + row.nan + row.inf}",
                f"{row.amin:.1e}",
                f"{row.amax:.1e}",
                *(self._cell(row, name) for name in self.formats),
            ]
            for row in self.by_trouble()[:rows]
        ]

    def _cell(self, row: RangeRow, name: str) -> str:
        counts = {
            "over": row.overflow.get(name, 0),
            "zero": row.flushed(name),
            "lost": row.lost.get(name, 0),
            "sub": row.subnormal.get(name, 0),
        }
        shown = [f"{word} {_share(row.fraction(count))}" for word, count in counts.items() if count]
        bad = row.nan + row.inf
        return " ".join([*shown, *([f"non-finite {bad}"] if bad else [])])

    def _left_out(self, rows: int | None) -> list[str]:
        more = 0 if rows is None else len(self.rows) - rows
        return [f"({more} more rows with less trouble)"] if more > 0 else []


def _share(fraction: float) -> str:
    """Format a fraction. What occurs is never shown as 0 %, and what has exceptions never as 100 %."""
    if fraction < 0.001:
        return "<0.1%"
    if fraction < 0.1:
        return f"{fraction:.1%}"
    return f"{fraction:.0%}" if fraction in (1.0,) or fraction < 0.995 else ">99%"


def _style(cell: str) -> str:
    if "over" in cell or "non-finite" in cell:
        return "bold red"
    return "yellow" if "zero" in cell or "lost" in cell else "dim"
