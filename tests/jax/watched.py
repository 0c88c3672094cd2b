"""Watch a function as ``stablenum explain`` watches a JAX script."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import optax
import pytest

from stablenum.diagnosis import Report
from stablenum.diagnosis.watch.plan import Plan
from stablenum.diagnosis.watch.session import Session, Stop
from stablenum_jax._diagnosis import watch
from stablenum_jax._diagnosis.watch import eager


def watched_with(monkeypatch: pytest.MonkeyPatch) -> Session:
    """The session of a script that is watched from here on."""
    names = (
        "jit", "grad", "value_and_grad", "jacrev", "jacfwd", "jacobian", "hessian", "vjp", "vmap", "jvp",
        "linearize", "pmap", "shard_map",
    )  # fmt: skip
    for name in names:
        monkeypatch.setattr(jax, name, getattr(jax, name))
    for owner, name in list(eager.places()):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    transformation = optax.GradientTransformation
    monkeypatch.setattr(transformation, "update", transformation.__dict__["update"])
    made = Session(Plan(script="script.py"))
    watch.watch(made)
    return made


def found(session: Session, run: Callable[[], Any]) -> Report:
    with contextlib.suppress(Stop):
        run()
        session.outcome.exit_code = 0
    session.conclude()
    assert session.outcome.troubles == 0, session.outcome.trouble
    assert session.outcome.report is not None
    return Report.from_dict(session.outcome.report)


def assert_healthy(session: Session) -> None:
    session.conclude()
    assert session.outcome.troubles == 0, session.outcome.trouble
    assert session.outcome.failure is None, str(Report.from_dict(session.outcome.report))
