"""A failure of our own code is never a verdict: the report says that the step could not be replayed."""

import jax.numpy as jnp
import pytest
import torch

import stablenum_jax
import stablenum_torch
from stablenum.diagnosis import Cause
from stablenum.diagnosis.replay.judge import Evidence, judge
from stablenum_jax._diagnosis.replay import flags as jax_flags
from stablenum_jax._diagnosis.replay import interpreter
from stablenum_torch._diagnosis.replay import recorder


def broken(*args, **kwargs):
    raise KeyError("an error of ours")


broken.__code__ = broken.__code__.replace(co_filename=jax_flags.__file__)


@pytest.mark.parametrize("known", [{}, {"known_bad": True}])
@pytest.mark.parametrize("at", ["describe", "flags_of", "survey"])
def test_an_error_of_ours_in_a_replay_in_torch(at, known, monkeypatch):
    monkeypatch.setattr(recorder, at, broken)
    w = torch.zeros(2, requires_grad=True)
    report = stablenum_torch.replay(lambda: w.sqrt().sum(), **known)
    said(report)
    assert w.grad is None


@pytest.mark.parametrize("known", [{}, {"known_bad": True}])
def test_an_error_of_ours_in_a_replay_in_jax(known, monkeypatch):
    monkeypatch.setattr(interpreter, "operation_name", broken)
    said(stablenum_jax.replay(lambda w: jnp.sqrt(w).sum(), jnp.zeros(2), **known))


def said(report):
    text = str(report)
    assert report.verdict.cause is Cause.NOT_REPLAYED
    assert not report.ok
    assert "KeyError: 'an error of ours'" in text
    assert "please report" in text.lower()
    assert not any(word in text.lower() for word in ("device", "hardware", "transient", "nothing wrong"))


@pytest.mark.parametrize("error", [ValueError("the user's"), KeyError("x")])
def test_the_users_own_errors_are_raised(error):
    def step(*args):
        raise error

    with pytest.raises(type(error)) as raised:
        stablenum_torch.replay(step, torch.ones(1))
    assert raised.value is error
    with pytest.raises(type(error)) as raised:
        stablenum_jax.replay(step, jnp.ones(1))
    assert raised.value is error


def test_arguments_that_an_operation_rejects_are_the_users_error():
    with pytest.raises(TypeError, match="log"):
        stablenum_torch.replay(lambda: torch.log("not a tensor"))
    with pytest.raises(RuntimeError, match="shape"):
        stablenum_torch.replay(lambda: torch.ones(2, 3) @ torch.ones(2, 3))


def test_what_is_known_besides_does_not_hide_that_the_replay_failed():
    evidence = Evidence(
        framework="torch", unreplayed="KeyError", exploded="w grew", bad_parameters=("w",), reproduced=False
    )
    assert judge(evidence).cause is Cause.NOT_REPLAYED
