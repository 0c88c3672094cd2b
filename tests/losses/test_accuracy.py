"""No loss is off by more than the accuracy page says."""

from __future__ import annotations

import itertools

import pytest

import stablenum.losses
from tests.losses.accuracy import LOSSES, worst_loss
from tests.numerics.oracle import FORMATS
from tests.selection import one_in_three, slow_unless

BOUND = 4.0
# p is the exponential of a rounded logarithm, and multiplies another.
BOUNDS = {"js_divergence": (5.0, 8.0)}


def test_every_loss_is_measured() -> None:
    assert {loss.name for loss in LOSSES.values()} == set(stablenum.losses.__all__)


def always(name: str, backend: str, form: str) -> bool:
    """Whether a case is in the fast run: each loss by PyTorch in float32, and a third of the rest."""
    # Narrow formats are computed in float32 and rounded once: the arithmetic is that of float32.
    wide = form in ("float32", "float64")
    return (backend, form) == ("torch", "float32") or (wide and one_in_three(name + backend + form))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "backend", "form"),
    slow_unless(always, itertools.product(LOSSES, ("torch", "jax-jit"), FORMATS)),
)
def test_the_regular_range(name: str, backend: str, form: str) -> None:
    loss = LOSSES[name]
    value, slope = worst_loss(loss, FORMATS[form], backend)
    narrow = form in ("bfloat16", "float16")
    bounds = (0.6, 0.6) if narrow else BOUNDS.get(loss.name, (BOUND, BOUND))
    assert value <= bounds[0]
    assert slope <= bounds[1]
