"""The figure of the first page and of the README: one training, without and with a guard."""

from __future__ import annotations

from matplotlib.figure import Figure

from figures.style import finish, panels
from stablenum.commands.compare.backends import REFERENCE
from stablenum.commands.demo.picture import draw
from stablenum.commands.demo.story import outcome
from stablenum.commands.demo.training import trained

__all__ = ["two_runs"]


def two_runs() -> tuple[Figure, str]:
    """The losses of a network that learns digits in float16, with a few bad batches."""
    training = trained(REFERENCE)
    figure, (ax,) = panels()
    figure.set_size_inches(5.2, 3.2)  # the letters stay legible on a phone
    draw(ax, training)
    finish(ax, y="loss", log=10, columns=2)
    return figure, outcome({REFERENCE: training})
