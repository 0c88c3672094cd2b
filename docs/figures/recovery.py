"""The figure of the page on recovery: the training of ``examples/recovery/digits.py``."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from figures.style import AFTER, BAD, LIMIT, finish, mark, panels, raw
from stablenum.commands.quiet import without_log

__all__ = ["rewound"]

_PROGRAM = Path(__file__).parents[2] / "examples" / "recovery" / "digits.py"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def rewound() -> tuple[Figure, str]:
    """The losses without and with recovery, and the step that the run is at."""
    program: dict[str, Any] = runpy.run_path(str(_PROGRAM))
    alone, its_accuracy = program["alone"]()
    with without_log():
        recovered, accuracy, events = program["with_recovery"]()
    at, losses = (np.asarray(values) for values in zip(*recovered, strict=True))
    figure, (top, bottom) = panels(2, height=2.4)
    raw(top, np.arange(len(alone)), alone, "guarded alone")
    top.plot(np.arange(len(losses)), losses, color=AFTER, lw=1.1, label="with recovery")
    finish(top, y="loss", log=10, x=False, columns=2)
    bottom.plot(np.arange(len(at)), at, color=AFTER, lw=1.3, label="step of the run")
    back = np.flatnonzero(np.diff(at) < 0)
    mark(bottom, back, at[back], "goes back", color=LIMIT, marker="v")
    finish(bottom, y="step of the run", columns=2)
    bottom.set_xlabel("steps made")
    first, last = program["BAD"][0], program["BAD"][-1]
    top.axvspan(first, last, color=BAD, alpha=0.08, lw=0)
    return figure, (
        f"Batches {first} to {last} are bad (grey, for the run alone). The guarded run ends with "
        f"{its_accuracy:.0%} of the held-out digits, because the statistics of its batch norm are those of "
        f"the bad batches. With recovery the run goes back {_times(len(events))} and ends with "
        f"{accuracy:.0%}."
    )
