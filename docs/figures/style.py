"""The style of all figures: light, with colours that colour-blind readers can distinguish."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["AFTER", "ALSO", "BAD", "LIMIT", "RAW", "finish", "how_many", "mark", "panels", "raw", "save"]

# Okabe and Ito's palette.
RAW, AFTER, LIMIT, ALSO, BAD = "#a3a3a3", "#0072B2", "#D55E00", "#009E73", "#000000"

_STYLE = {
    "font.size": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.labelcolor": "#333333",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#ececec",
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "lines.solid_joinstyle": "round",
    "svg.hashsalt": "stablenum",
}


def panels(n: int = 1, *, height: float = 3.1, same_x: bool = True) -> tuple[Figure, list[Axes]]:
    """A figure with ``n`` stacked panels."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(8.6, height * n + 0.3), layout="constrained")
        axes = figure.subplots(n, 1, sharex=same_x, squeeze=False)[:, 0]
    return figure, list(axes)


def raw(ax: Axes, steps: Any, values: Any, label: str) -> None:
    """Plot what the rule saw."""
    ax.plot(steps, values, color=RAW, lw=0.9, label=label, zorder=2)


def mark(ax: Axes, steps: Any, values: Any, label: str, *, color: str = BAD, marker: str = "x") -> None:
    """Mark single steps; without any, draw nothing."""
    if len(steps):
        size = 34 if marker == "x" else 22
        ax.scatter(steps, values, s=size, marker=marker, color=color, linewidths=1.4, label=label, zorder=4)


def finish(ax: Axes, *, y: str, log: int | None = None, x: bool = True, columns: int = 4) -> None:
    """Set labels, scale and legend."""
    if log:
        ax.set_yscale("log", base=log)
    ax.set_ylabel(y)
    if x:
        ax.set_xlabel("step")
    ax.legend(
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=columns,
        borderaxespad=0.2,
        handlelength=1.6,
        columnspacing=1.4,
        borderpad=0.1,
        frameon=False,
        fontsize=9.0,
        labelcolor="#333333",
    )
    ax.margins(x=0.01)


def save(figure: Figure, path: Path) -> None:
    """Save as SVG, with the same bytes for the same figure."""
    with mpl.rc_context(_STYLE), np.errstate(all="ignore"):
        figure.savefig(path, metadata={"Date": None})


def how_many(n: int, what: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{n:,} {what}" + ("" if n == 1 else "s")
