"""Settings that are not finite are skipped and named; so is a parameter that the optimizer has made NaN."""

from __future__ import annotations

import logging
import math
import weakref

import pytest
import torch

import stablenum
import stablenum_torch as st
from stablenum import Reason
from stablenum_torch._step.faults import Settings
from stablenum_torch._step.first_look import FirstLook
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


MASKS = {"-inf": -math.inf, "nan": math.nan}


def _masked(bad, kind):
    """Return a mask among the parameters, and its part of the loss."""
    mask = torch.nn.Parameter(torch.tensor([bad, 0.0, 0.0]), requires_grad=kind == "trained")
    return mask, lambda: torch.where(mask.isfinite(), mask, 0.0).sum() if kind != "unused" else 0.0


@pytest.mark.parametrize("loss_scale", [None, 8.0, "dynamic"])
@pytest.mark.parametrize("kind", ["unused", "frozen", "trained"])
@pytest.mark.parametrize("bad", MASKS.values(), ids=MASKS)
def test_a_mask_is_never_blamed_and_the_scale_goes_down(bad, kind, loss_scale, path):
    mask, of_mask = _masked(bad, kind)
    w = torch.nn.Parameter(torch.ones(3))
    opt = st.wrap(torch.optim.SGD([mask, w], lr=0.1, foreach=True), loss_scale=loss_scale)
    before = opt.loss_scale
    for i in range(6):
        opt.zero_grad()
        opt.backward(w.square().sum() + of_mask())
        if i in (1, 4):
            w.grad.fill_(math.inf)
        opt.step()
    reasons = [row["reason"] for row in opt.history()]
    assert reasons == [Reason.INF_GRADIENT if i in (1, 4) else Reason.OK for i in range(6)]
    assert opt.loss_scale == before * (0.25 if loss_scale == "dynamic" else 1.0)
    assert w.isfinite().all()


@pytest.mark.filterwarnings("ignore::stablenum_torch.EpsTooSmallWarning")
@pytest.mark.parametrize("late", [False, True], ids=["from the start", "added later"])
@pytest.mark.parametrize("bad", MASKS.values(), ids=MASKS)
def test_a_parameter_beside_a_mask_is_named(bad, late, path):
    mask, of_mask = _masked(bad, "trained")
    w, dead = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    first = [w, dead] if late else [mask, w, dead]
    inner = torch.optim.Adam(first, lr=0.1, eps=0.0, foreach=True)
    opt = st.wrap(inner, loss_scale="dynamic")
    opt.backward(w.square().sum())
    opt.step()
    if late:
        opt.add_param_group({"params": [mask]})
    for _ in range(3):
        opt.zero_grad()
        opt.backward(w.square().sum() + of_mask() + (0 * dead).sum())  # 0 / 0 in Adam
        opt.step()
    rows = opt.history()
    assert [row["reason"] for row in rows] == [Reason.OK] * 2 + [Reason.NONFINITE_UPDATE] * 2
    assert {row["worst"].index for row in rows[2:]} == {len(first) - 1}


def test_a_parameter_without_a_gradient_is_not_blamed(path):
    w, other = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    opt = st.wrap(torch.optim.SGD([other, w], lr=0.1, foreach=True))
    for i in range(2):
        w.grad = torch.full((2,), math.inf if i else 1.0)
        opt.step()
        other.data.fill_(math.nan)  # by other code
    assert opt.last["reason"] is Reason.INF_GRADIENT


def test_a_first_look_keeps_no_parameter():
    look = FirstLook()
    params = [torch.nn.Parameter(torch.tensor([x])) for x in (1.0, math.nan)]
    look.look(params)
    assert look.bad() == {id(params[1])}
    look.look(params[:1])
    gone = weakref.ref(params.pop())
    assert gone() is None
    assert look.bad() == set()


def test_an_overflow_behind_sound_parameters_is_none_of_the_optimizer(path):
    params = parameters()
    opt = st.wrap(torch.optim.SGD(params, lr=0.1, foreach=True))
    for i in range(3):
        set_gradients(params, i)
        if i == 1:
            params[1].grad[2] = math.inf
        opt.step()
    assert [row["reason"].name for row in opt.history()] == ["OK", "INF_GRADIENT", "OK"]


def test_a_setting_is_looked_at_again_whenever_it_may_have_changed() -> None:
    """Settings that are the same objects as before are not; a tensor may have changed by itself."""
    rate = torch.tensor(0.1)
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": params[:1]}, {"params": params[1:], "lr": rate}]
    inner = torch.optim.AdamW(groups, lr=0.1, fused=True)
    opt = st.wrap(inner)
    first, second = inner.param_groups

    def skipped() -> bool:
        for p in params:
            p.grad = torch.ones(2)
        opt.step()
        return not opt.last["applied"]

    assert [skipped() for _ in range(2)] == [False, False]
    rate.fill_(math.nan)
    assert skipped()
    rate.fill_(0.1)
    first["weight_decay"] = math.nan
    assert skipped()
    first["weight_decay"] = 0.0
    assert not skipped()
    first["betas"] = (math.nan, 0.9)
    assert skipped()
    first["betas"], second["eps"] = (0.9, 0.9), math.inf
    assert skipped()
    second["eps"] = 1e-8
    assert not skipped()
    first["lr"] = math.inf
    assert skipped()


def test_a_tensor_in_a_pair_of_settings_may_change_by_itself() -> None:
    beta = torch.tensor(0.9)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.param_groups[0]["betas"] = (beta, 0.999)
    settings = Settings()
    assert [settings.first_bad(optimizer) for _ in range(2)] == [None, None]
    beta.fill_(math.nan)
    found = settings.first_bad(optimizer)
    assert found is not None
    assert found.place == "param_groups[0]['betas']"
