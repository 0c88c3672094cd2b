"""The picture of the demo: the loss of one training without a guard, which dies, and with one."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np

from stablenum.commands.demo.training import Training

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["death_of", "draw", "svg_of"]

# Okabe and Ito's palette, which colour-blind readers can tell apart.
_WITH, _WITHOUT, _BAD = "#0072B2", "#D55E00", "#000000"


def death_of(training: Training) -> int:
    """Return the step at which the loss without a guard stops being finite for good; the number of steps if
    it never does."""
    finite = np.flatnonzero(np.isfinite(training.plain))
    return int(finite[-1]) + 1 if finite.size else 0


def draw(ax: Axes, training: Training) -> None:
    """Draw the losses, with the death and the skipped steps marked."""
    dead, skipped, steps = death_of(training), list(training.skipped), len(training.losses)
    losses = np.array(training.losses)
    losses[skipped] = np.nan
    last = training.plain[dead - 1]
    ax.plot(losses, color=_WITH, lw=1.3, label="with a guard")
    ax.plot(training.plain[:dead], color=_WITHOUT, lw=2.4, label="without one")
    ax.scatter(
        [dead - 1], [last], s=34, marker="x", color=_WITHOUT, lw=1.4, label="NaN from here on", zorder=4
    )
    ax.scatter(
        skipped, [4.5] * len(skipped), s=22, marker="v", color=_BAD, label="bad batch, skipped", zorder=4
    )
    ax.text(dead + 5, 1.9, f"dead: {training.plain_score:.1%} of the digits", color=_WITHOUT)
    ax.text(steps, 0.32, f"{training.score:.1%} of the digits", color=_WITH, ha="right")
    ax.set_yscale("log")


def svg_of(training: Training, title: str) -> str:
    """Return the picture as an SVG element."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#ececec"}
    with rc_context({**style, "svg.hashsalt": title, "svg.fonttype": "none"}):
        figure = Figure(figsize=(5.2, 3.2), layout="constrained")
        ax = figure.subplots()
        draw(ax, training)
        ax.set_title(title, fontsize=11, loc="left")
        ax.set_xlabel("step")
        ax.set_ylabel("loss")
        ax.margins(x=0.01)
        figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=9)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]
