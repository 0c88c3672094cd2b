"""The plot: a histogram of the exponents for each kind of tensor, below the ranges of the formats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from stablenum._support.files import write_file
from stablenum.diagnosis.ranges.rows import ACTIVATION_GRADIENT, BACKWARD, GRADIENT, KINDS, RangeRow
from stablenum.formats import FORMATS

__all__ = ["draw"]

_COLOURS = ("#1f77d0", "#159a8c", "#e08a00", "#7b3fc4", "#555555")
_BANDS = ("#d62728", "#1f77d0", "#2ca02c", "#8c564b", "#7b3fc4", "#111111")


def draw(rows: Sequence[RangeRow], formats: Sequence[str], scale: int, path: str | Path) -> None:
    """Write the plot to ``path``.

    Args:
        rows: the rows of a report, in which at least one value is not 0.
        formats: the names of the formats.
        scale: the exponent of the loss scale for float16; 0 for no loss scale.
        path: where to write the plot; the suffix selects the file format.
    """
    kinds = [kind for kind in KINDS if any(row.kind == kind and row.histogram for row in rows)]
    heights = [0.28 * len(formats) + 0.15, *(1.0 for _ in kinds)]
    figure = Figure(figsize=(10, 1.6 + 1.35 * sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    totals = {kind: _total(rows, kind) for kind in kinds}
    moved = max((scale + max(totals[kind]) for kind in kinds if kind in BACKWARD), default=0)
    low, high = _window(totals, moved)
    _ranges(axes[0], formats, low, high)
    for axis, kind, colour in zip(axes[1:], kinds, _COLOURS):
        k = scale if kind in BACKWARD else 0
        _histogram(axis, [row for row in rows if row.kind == kind], formats, totals[kind], k, colour)
    axes[-1].set_xlabel("$\\log_2 |x|$")
    axes[-1].set_xlim(low, high)
    figure.suptitle("Exponents of one step, and the ranges of the formats", fontsize=11)
    path = Path(path)
    write_file(path if path.suffix else path.with_suffix(".png"), lambda file: figure.savefig(file, dpi=120))


def _total(rows: Sequence[RangeRow], kind: str) -> dict[int, int]:
    total: dict[int, int] = {}
    for row in rows:
        for e, count in row.histogram.items() if row.kind == kind else ():
            total[e] = total.get(e, 0) + count
    return total


def _window(totals: dict[str, dict[int, int]], moved: int) -> tuple[float, float]:
    """Return the limits of the x axis: all exponents that occur, and at least the range of float16."""
    seen = [e for total in totals.values() for e in total]
    return min([*seen, -25]) - 3.0, max([*seen, 16, moved]) + 3.0


def _ranges(axis: Any, formats: Sequence[str], low: float, high: float) -> None:
    for place, (name, colour) in enumerate(zip(formats, _BANDS)):
        fmt = FORMATS[name]
        ends = [math.log2(x) for x in (fmt.smallest_subnormal, fmt.smallest_normal, fmt.max)]
        zero, normal, top = (min(max(end, low), high) for end in ends)
        axis.barh(place, top - normal, left=normal, height=0.62, color=colour)
        axis.barh(place, normal - zero, left=zero, height=0.62, color=colour, alpha=0.35)
        axis.text((normal + top) / 2, place, name, ha="center", va="center", color="white", fontsize=8)
    axis.set_ylim(len(formats) - 0.5, -0.5)
    axis.set_yticks([])
    axis.tick_params(bottom=False)
    for side in ("top", "right", "left", "bottom"):
        axis.spines[side].set_visible(False)
    axis.set_title(
        "solid: normal numbers; pale: subnormal numbers; dashed: where a 16-bit format ends in 0 or inf",
        fontsize=8,
        loc="left",
    )


def _histogram(
    axis: Any, rows: list[RangeRow], formats: Sequence[str], total: dict[int, int], k: int, colour: str
) -> None:
    """Draw the exponents of one kind as bars, and an outline where the loss scale 2^k moves them."""
    kind = rows[0].kind
    elements = sum(row.elements for row in rows)
    share = {e: count / elements for e, count in total.items()}
    # Each bar covers the range of the values that it counts.
    axis.bar(
        [e - 0.5 for e in share],
        list(share.values()),
        width=1.0,
        color=colour,
        edgecolor="white",
        linewidth=0.4,
    )
    axis.set_yscale("log")
    axis.set_ylim(min(0.5 / elements, 1e-2), 1.6)
    for name, tint in zip(formats, _BANDS):
        fmt = FORMATS[name]
        if fmt.bits != 8:
            for end in (math.log2(fmt.smallest_subnormal) - 1, math.log2(fmt.max)):
                axis.axvline(end, color=tint, linewidth=1.0, linestyle=(0, (4, 3)))
    if k:
        moved = sorted((e + k, count) for e, count in share.items())
        edges = [e - 1 for e, _ in moved] + [moved[-1][0]]
        dense = dict(moved)
        steps = range(edges[0], edges[-1])
        axis.stairs(
            [dense.get(e + 1, 0.0) for e in steps], [*steps, edges[-1]], color="#333333", linewidth=1.1
        )
    zeros, bad = sum(row.zeros for row in rows), sum(row.nan + row.inf for row in rows)
    label = "gradients of parameters" if kind == GRADIENT else f"{kind}s"
    label = "gradients of activations" if kind == ACTIVATION_GRADIENT else label
    title = f"{label}: {elements:,} elements, {zeros / elements:.0%} exact zeros" if elements else label
    title += f", {bad} non-finite" if bad else ""
    title += f"; outline: with the loss scale for float16, $2^{{{k}}}$" if k else ""
    axis.set_title(title, fontsize=8.5, loc="left")
    axis.set_ylabel("fraction", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.grid(axis="y", color="#e6e6e6", linewidth=0.6)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
