"""Warnings about a guard in a place where it cannot do all its work."""

from __future__ import annotations

__all__ = ["GuardPlacementWarning", "NotATrueSkipWarning"]


class NotATrueSkipWarning(UserWarning):
    """A guard called through plain ``tx.update`` cannot skip a bad step as if it had never been.

    A guard in a plain ``optax.chain`` can only zero bad gradients; the parameters still move: with
    zero gradients, Adam still applies its momentum, and weight decay still applies. Call
    :func:`stablenum_jax.step`, or build the optimizer with :func:`stablenum_jax.chain` or ``guard(inner)``.

    A guard inside ``optax.MultiSteps`` sees only the sum of a window, and a NaN stays in the accumulator:
    every later window is skipped. Put the guard around it, ``guard(optax.MultiSteps(...))``, or call
    ``step``.
    """


class GuardPlacementWarning(UserWarning):
    """Something changes the gradients before the guard sees them.

    A clip before the guard turns an overflow into finite numbers, and gradients under a loss scale
    are not in the units that other transformations expect. Put the guard first.
    """
