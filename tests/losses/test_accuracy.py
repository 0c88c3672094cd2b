"""No loss is off by more than the accuracy page says."""

from __future__ import annotations

import pytest

import stablenum.losses
from tests.losses.accuracy import LOSSES, Loss, worst_loss
from tests.numerics.oracle import FORMATS

BOUND = 4.0
# p is the exponential of a rounded logarithm, and multiplies another.
BOUNDS = {"js_divergence": (5.0, 8.0)}
# Narrow formats are computed in float32 and rounded once: the arithmetic is that of float32.
FORMS = [pytest.param(f, marks=[] if "32" in f or "64" in f else [pytest.mark.slow]) for f in FORMATS]


def test_every_loss_is_measured() -> None:
    assert {loss.name for loss in LOSSES.values()} == set(stablenum.losses.__all__)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ["torch", "jax-jit"])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_the_regular_range(loss: Loss, backend: str, form: str) -> None:
    value, slope = worst_loss(loss, FORMATS[form], backend)
    narrow = form in ("bfloat16", "float16")
    bounds = (0.6, 0.6) if narrow else BOUNDS.get(loss.name, (BOUND, BOUND))
    assert value <= bounds[0]
    assert slope <= bounds[1]
