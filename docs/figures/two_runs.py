"""The figure of the first page and of the README: one training, without and with a guard."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from figures.style import AFTER, BAD, LIMIT, finish, mark, panels
from stablenum.commands.compare.backends import BACKENDS, REFERENCE
from stablenum.commands.compare.builtin import SCENARIOS
from stablenum.commands.compare.runner import run_guarded, run_plain

__all__ = ["two_runs"]


def two_runs() -> tuple[Figure, str]:
    """The losses of a network that learns digits in float16, with a few bad batches."""
    scenario, backend = SCENARIOS["digits-mlp"], BACKENDS[REFERENCE]
    with np.errstate(all="ignore"):  # the plain run computes with NaN
        plain, guarded = run_plain(scenario, backend), run_guarded(scenario, backend)
    skipped = [step for step, row in enumerate(guarded.rows) if not row.applied]
    losses = np.array([row.loss if row.applied else np.nan for row in guarded.rows])
    dead = int(np.flatnonzero(~np.isfinite(plain.losses))[0])

    figure, (ax,) = panels()
    figure.set_size_inches(5.2, 3.2)  # the letters stay legible on a phone
    ax.plot(losses, color=AFTER, lw=1.3, label="with a guard")
    ax.plot(plain.losses[:dead], color=LIMIT, lw=2.4, label="without one")
    mark(ax, [dead - 1], [plain.losses[dead - 1]], "NaN from here on", color=LIMIT)
    mark(ax, skipped, [4.5] * len(skipped), "bad batch, skipped", color=BAD, marker="v")
    ax.text(dead + 5, 1.9, f"dead: {plain.score:.1%} of the digits", color=LIMIT)
    ax.text(len(losses), 0.32, f"{guarded.score:.1%} of the digits", color=AFTER, ha="right")
    finish(ax, y="loss", log=10, columns=2)
    n, steps = len(skipped), len(losses)
    return figure, (
        f"A network learns handwritten digits in float16, and {n} of the {steps} batches are bad. Without a "
        f"guard the loss is NaN from step {dead} on, and the network ends with {plain.score:.1%} of the "
        f"held-out digits. With a guard {n} steps are skipped, and it ends with {guarded.score:.1%}."
    )
