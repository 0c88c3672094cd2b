"""An exception at any line of a replay or a range report leaves JAX and the user's classes as they were."""

from __future__ import annotations

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax._src.interpreters import ad

import stablenum_jax
from tests.injection import executed_lines, interrupted_at, some

MOST = [pytest.param(4, id="some"), pytest.param(None, id="every", marks=pytest.mark.slow)]


def surroundings() -> list[Any]:
    """What replays and range reports change in JAX and in other packages."""
    rules = [id(r.get(ad.custom_lin_p)) for r in (ad.primitive_transposes, ad.fancy_transposes)]
    flags = [jax.config.jax_debug_nans, jax.config.jax_debug_infs, jax.config.jax_disable_jit]
    return [*rules, *flags, id(eqx.nn.Linear.__call__), id(nnx.Linear.__call__)]


def check(call: Any, most: int | None) -> None:
    call()  # the first call fills caches
    before, lines = surroundings(), executed_lines(call)
    last = sorted({line: i for i, line in enumerate(lines)}.values())
    ends = [
        i for i in last if lines[i][0].endswith(("interrupts.py", "jax_internals.py", "module_scopes.py"))
    ]
    for number in last if most is None else sorted({*some(last, most), *some(ends, 3 * most)}):
        place = interrupted_at(number, call)
        assert place is not None
        assert surroundings() == before, lines[number]


@pytest.mark.parametrize("most", MOST)
def test_a_replay(most):
    w = jnp.asarray([0.0, 1.0])
    with jax.debug_nans(True):
        check(lambda: stablenum_jax.replay(lambda w: jnp.sum(jnp.sqrt(w)) * math.nan, w), most)


@pytest.mark.parametrize("most", MOST)
@pytest.mark.parametrize("library", ["equinox", pytest.param("nnx", marks=pytest.mark.slow)])
def test_a_range_report(library, most):
    model = (
        eqx.nn.Linear(2, 2, key=jax.random.key(0))
        if library == "equinox"
        else nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    )
    check(lambda: stablenum_jax.range_report(lambda m, x: jnp.sum(m(x)), model, jnp.ones(2)), most)
