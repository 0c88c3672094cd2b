"""Bad input is named in the error, and changes nothing."""

from __future__ import annotations

import copy

import pytest
import torch

import stablenum_torch as st
from tests.torch.conftest import parameters, set_gradients


@pytest.mark.parametrize("thing", [None, 3, torch.nn.Linear(2, 2), torch.optim.AdamW, "adam"])
def test_wrapping_something_else_than_an_optimizer_raises(thing):
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer; got"):
        st.wrap(thing)


def test_wrapping_an_optimizer_without_parameters():
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    inner.param_groups[0]["params"].clear()
    with pytest.raises(ValueError, match="optimizer must hold at least one parameter"):
        st.wrap(inner)


def test_wrapping_a_guarded_optimizer_again():
    with pytest.raises(TypeError, match="already guarded"):
        st.wrap(st.wrap(torch.optim.SGD(parameters(), lr=0.1)))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"clip": -1.0}, ValueError, "clip must be a finite number above 0; got -1.0"),
        ({"clip": "1"}, ValueError, "clip must be None, a positive number"),
        ({"loss_scale": "auto"}, ValueError, "loss_scale must be None, 'dynamic'"),
        ({"loss_scale": 0}, ValueError, "loss_scale must be a finite number at least .*; got 0"),
        ({"on_nonfinite": "ignore"}, ValueError, "on_nonfinite must be 'skip' or 'raise'; got 'ignore'"),
        ({"max_skips_in_a_row": 0}, ValueError, "max_skips_in_a_row must be a whole number from 1"),
        ({"clipping": 1.0}, TypeError, "unknown setting 'clipping'; GuardConfig has clip, loss_scale"),
        ({"config": {"clip": 1.0}}, TypeError, "config must be a GuardConfig or None; got dict"),
        ({"names": 3}, TypeError, "names must be the model"),
        ({"names": ["w"]}, TypeError, "names must be the model"),
    ],
)
def test_wrong_settings(settings, error, message):
    inner = torch.optim.SGD(parameters(), lr=0.1)
    before = set(inner.__dict__)
    with pytest.raises(error, match=message):
        st.wrap(inner, **settings)
    assert set(inner.__dict__) == before


@pytest.mark.parametrize("loss", [1.0, None, torch.tensor(3)])
def test_scale_of_something_that_is_not_a_loss(loss):
    opt = st.wrap(torch.optim.SGD(parameters(), lr=0.1))
    with pytest.raises(TypeError, match="loss must be a floating-point tensor; got"):
        opt.scale(loss)


def test_a_state_of_another_shape_changes_nothing():
    params = parameters()
    opt = st.wrap(torch.optim.AdamW(params), clip=1.0, loss_scale="dynamic")
    set_gradients(params, 0)
    opt.step()
    good = opt.state_dict()
    before = opt.guard_state_dict()

    def spoiled(change):
        bad = copy.deepcopy(good)
        change(bad["stablenum"])
        return bad

    cases = {
        r"guard state must be a dict written by guard_state_dict\(\)": lambda d: d.update(version=99),
        "state must be a dict with the keys step": lambda d: d["state"].pop("step"),
        r"state\.clip must be a list of rule states": lambda d: d["state"].update(clip=3),
        r"state\.loss_scale\.scale must be a number from": lambda d: d["state"]["loss_scale"].update(
            scale=0.0
        ),
        r"state\.recorder\.floats must be a list of 128 items": lambda d: d["state"]["recorder"].update(
            floats=[]
        ),
        r"state\.step must be a whole number; got 'x'": lambda d: d["state"].update(step="x"),
    }
    for message, change in cases.items():
        with pytest.raises(ValueError, match=message):
            opt.load_state_dict(spoiled(change))
        assert opt.guard_state_dict() == before
    with pytest.raises(ValueError, match="guard state must be"):
        opt.load_guard_state_dict([1])
    other = st.wrap(torch.optim.AdamW(parameters()[:2]), clip=1.0, loss_scale="dynamic").state_dict()
    with pytest.raises(ValueError, match="parameter group"):
        opt.load_state_dict(other)
    assert opt.guard_state_dict() == before


def test_unknown_attributes_raise():
    opt = st.wrap(torch.optim.SGD(parameters(), lr=0.1))
    with pytest.raises(AttributeError, match="trian"):
        opt.trian()
    assert not hasattr(opt, "_private_of_nobody")


def test_other_public_attributes_of_the_inner_optimizer_are_reached():
    class ScheduleFree(torch.optim.SGD):
        def train(self):
            return "training"

    assert st.wrap(ScheduleFree(parameters(), lr=0.1)).train() == "training"
