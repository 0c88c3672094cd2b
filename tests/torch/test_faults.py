"""Settings that are not finite are skipped and named; so is a parameter that the optimizer has made NaN."""

from __future__ import annotations

import logging
import math

import pytest
import torch

import stablenum
import stablenum_torch as st
from stablenum import Reason
from tests.torch.conftest import parameters, set_gradients, snapshot

BAD = [math.nan, math.inf, -math.inf]


def _numbers(group):
    """Return the places of the numbers among a group's settings."""
    for name, value in group.items():
        if isinstance(value, float):
            yield name, None
        elif isinstance(value, tuple) and all(isinstance(part, float) for part in value):
            yield from ((name, i) for i in range(len(value)))


def _replaced(value, i, bad):
    return bad if i is None else (*value[:i], bad, *value[i + 1 :])


def test_every_number_among_the_settings_is_looked_at_in_every_step(make_optimizer, path, caplog):
    params = parameters()
    opt = st.wrap(make_optimizer(params), loss_scale="dynamic")
    group = opt.param_groups[0]
    for n, (name, i) in enumerate(_numbers(group)):
        for bad in BAD:
            caplog.clear()
            set_gradients(params, n)
            opt.step()
            before, sound, scale = snapshot(opt), group[name], opt.loss_scale
            group[name] = _replaced(sound, i, bad)
            set_gradients(params, n)
            for _ in range(2):
                opt.step()
            group[name] = sound
            assert (snapshot(opt), opt.loss_scale) == (before, scale)
            assert opt.last["reason"] is Reason.NONFINITE_SETTING
            told = [r.getMessage() for r in caplog.records if "param_groups" in r.getMessage()]
            assert len(told) == 1, "the setting is named once"
            assert f"param_groups[0][{name!r}] is {bad}" in told[0]


@pytest.mark.parametrize("bad", BAD)
def test_a_learning_rate_in_a_host_tensor_is_looked_at(path, bad):
    rate = torch.tensor(0.1)
    params = parameters()
    opt = st.wrap(torch.optim.SGD(params, lr=rate))
    set_gradients(params, 0)
    before = snapshot(opt)
    rate.fill_(bad)
    opt.step()
    assert snapshot(opt) == before
    assert opt.last["reason"] is Reason.NONFINITE_SETTING
    rate.fill_(0.1)
    opt.step()
    assert opt.last["applied"]


def test_the_error_names_the_setting():
    w = torch.nn.Parameter(torch.ones(2))
    opt = st.wrap(torch.optim.SGD([w], lr=math.inf), on_nonfinite="raise")
    w.grad = torch.ones(2)
    with pytest.raises(stablenum.NonFiniteError, match=r"param_groups\[0\]\['lr'\] is inf"):
        opt.step()
    assert w.tolist() == [1.0, 1.0]


class _Unbounded(torch.optim.SGD):
    """An optimizer with a setting of which inf means no bound."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.param_groups[0]["growth_rate"] = math.inf


def test_a_bound_may_be_infinite():
    w = torch.nn.Parameter(torch.ones(2))
    opt = st.wrap(_Unbounded([w]))
    w.grad = torch.ones(2)
    opt.step()
    assert opt.last["applied"]


@pytest.mark.filterwarnings("ignore::stablenum_torch.EpsTooSmallWarning")
def test_the_step_after_names_the_parameter_that_the_optimizer_made_nan(path, caplog):
    names = ["sound", "dead"]
    params = [torch.nn.Parameter(torch.ones(2)) for _ in names]
    inner = torch.optim.Adam(params, lr=0.1, eps=0.0, foreach=True)
    opt = st.wrap(inner, names=zip(names, params, strict=True))
    for _ in range(4):
        opt.zero_grad()
        opt.backward(params[0].sum() + (0 * params[1]).sum())  # 0 / 0 in Adam
        opt.step()
    assert opt.last["skipped_in_a_row"] == 3
    first, *rest = opt.history()
    assert first["applied"]
    assert params[0].isfinite().all()
    for row in rest:
        assert (row["reason"], row["worst"].name) == (Reason.NONFINITE_UPDATE, "dead")
    (message,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "dead" in message
    assert "eps" in message


def test_an_overflow_behind_sound_parameters_is_none_of_the_optimizer(path):
    params = parameters()
    opt = st.wrap(torch.optim.SGD(params, lr=0.1, foreach=True))
    for i in range(3):
        set_gradients(params, i)
        if i == 1:
            params[1].grad[2] = math.inf
        opt.step()
    assert [row["reason"].name for row in opt.history()] == ["OK", "INF_GRADIENT", "OK"]
