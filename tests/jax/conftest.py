"""Each test of a step runs under jit, and under ``make test-all`` eagerly as well."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import pytest

import stablenum_jax
from stablenum.diagnosis.watch.session import Session
from tests.jax.watched import watched_with
from tests.selection import REPEATS

# Their tests need four devices; other tests run them in a process that has them.
_ON_FOUR = ["joined_rules.py", "shards.py"]
collect_ignore = [] if "device_count=4" in os.environ.get("XLA_FLAGS", "") else _ON_FOUR

Step = Callable[..., tuple[Any, Any]]


@pytest.fixture(params=[pytest.param("eager", marks=REPEATS), "jit"])
def mode(request: pytest.FixtureRequest) -> str:
    """How the step is called.

    Run eagerly, each operation is compiled separately, which takes longer than the test itself. Tests of what
    can differ between the modes (``tests.jax.helpers.every_mode``) always run both ways.
    """
    return str(request.param)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    """The session of a script that is watched from here on."""
    return watched_with(monkeypatch)


@pytest.fixture
def stepper(mode: str) -> Callable[[Any], Step]:
    """Makes ``step`` of one optimizer: ``(params, opt_state, grads, value=None) -> (params, opt_state)``."""

    @functools.cache
    def make(tx: Any) -> Step:
        step = functools.partial(stablenum_jax.step, tx)
        return step if mode == "eager" else jax.jit(step)

    return make


@pytest.fixture
def updater(mode: str) -> Callable[[Any], Step]:
    """Makes the plain loop of one optimizer: ``tx.update``, then ``optax.apply_updates``."""

    @functools.cache
    def make(tx: Any) -> Step:
        update = tx.update if mode == "eager" else jax.jit(tx.update)

        def step(params: Any, opt_state: Any, grads: Any, **extra: Any) -> tuple[Any, Any]:
            updates, opt_state = update(grads, opt_state, params, **extra)
            return jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates), opt_state

        return step

    return make
