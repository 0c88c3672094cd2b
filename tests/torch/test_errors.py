"""Bad input is named in the error, and changes nothing."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import stablenum
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
        (
            {"clipping": 1.0},
            TypeError,
            "unknown setting 'clipping': did you mean clip=. GuardConfig has clip, loss_scale",
        ),
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


def _root():
    weight = torch.ones(2, requires_grad=True)
    return weight.sqrt().sum()


@pytest.mark.parametrize("scale", [math.nan, math.inf, -1.0, 0, True, "2", 1j, [1.0], torch.ones(2)])
def test_a_replay_with_a_wrong_loss_scale(scale):
    with pytest.raises(
        ValueError, match=r"loss_scale must be a finite number above 0; got .* or leave it out"
    ):
        st.replay(_root, loss_scale=scale)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": 3}, r"model must be a torch\.nn\.Module or None; got int"),
        ({"model": torch.optim.SGD(parameters(), lr=0.1)}, r"model must be .*; got SGD"),
        ({"optimizer": 3}, r"optimizer must be a torch\.optim\.Optimizer, guarded or not, or None; got int"),
        ({"optimizer": torch.nn.Linear(1, 1)}, "optimizer must be .*; got Linear"),
        ({"rng_state": 3}, r"rng_state must be the tensor that torch\.get_rng_state\(\) returns"),
        ({"rng_state": (1, 2)}, "rng_state must be .*; got tuple"),
        ({"rng_state": torch.ones(3)}, r"rng_state must be a tensor of uint8, .*; got torch\.float32"),
        ({"known_bad": "no"}, "known_bad must be True or False; got str"),
    ],
)
def test_a_replay_with_wrong_options(options, message):
    calls = []
    with pytest.raises(TypeError, match=message):
        st.replay(lambda: calls.append(1), **options)
    assert not calls


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3,), "closure must be a function that runs the forward pass"),
        ((_root, {"model": 3}), r"model must be a torch\.nn\.Module or None"),
        ((_root, {"rng_state": "x"}), "rng_state must be"),
    ],
)
def test_explain_with_wrong_arguments(arguments, message):
    closure, options = arguments if len(arguments) == 2 else (arguments[0], {})
    with pytest.raises(TypeError, match=message):
        st.wrap(torch.optim.SGD(parameters(), lr=0.1)).explain(closure, **options)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_an_audit_with_gradients_of_whole_numbers(dtype):
    weight = torch.nn.Parameter(torch.ones(2))
    opt = torch.optim.SGD([weight], lr=0.1)
    with pytest.raises(
        TypeError, match=r"grads\['.*'\] must be a floating-point tensor; got torch\.(int64|bool)"
    ):
        st.audit(opt, [torch.ones(2, dtype=dtype)])


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((3, torch.ones(2, 3)), {}, r"model must be a torch\.nn\.Module; got int"),
        ((torch.ones(2, 3), torch.nn.Linear(3, 1)), {}, "model must be .*; got Tensor"),
        (
            (torch.nn.Linear(3, 1), torch.ones(2, 3)),
            {"loss_fn": 3},
            r"loss_fn must be a function .*; got int",
        ),
        ((torch.nn.Linear(3, 1), torch.ones(2, 3)), {"optimizer": 3}, "optimizer must be .*; got int"),
        ((torch.nn.Linear(3, 1), torch.ones(2, 3)), {"formats": 3}, "formats must be a sequence of names"),
    ],
)
def test_a_range_report_of_wrong_arguments(arguments, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        st.range_report(*arguments, **options)


def _guarded(**settings):
    params = parameters()
    opt = st.wrap(torch.optim.AdamW(params), **settings)
    set_gradients(params, 0)
    opt.step()
    set_gradients(params, 1)
    return params, opt


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (
            lambda opt: opt.step(3),
            TypeError,
            "closure must be a function that returns the loss, or None; got int",
        ),
        (lambda opt: opt.step(torch.ones(())), TypeError, r"got Tensor\. Call opt\.backward\(loss\), then"),
        (
            lambda opt: opt.step(lambda: 1j),
            TypeError,
            "closure must return a real loss; got a complex number",
        ),
        (lambda opt: opt.step(lambda: torch.ones(()) + 1j), TypeError, "closure must return a real loss"),
        (lambda opt: opt.backward(torch.ones(())), ValueError, "loss must depend on a parameter"),
        (lambda opt: opt.backward(torch.ones(()) + 0j), ValueError, "loss must depend on a parameter"),
        (lambda opt: opt.autocast(3), TypeError, r"dtype must be a floating-point torch\.dtype, .*; got 3"),
        (lambda opt: opt.autocast("float16"), TypeError, "dtype must be .*; got 'float16'"),
        (lambda opt: opt.autocast(torch.int32), TypeError, r"dtype must be .*; got torch\.int32"),
        (lambda opt: opt.load_state_dict(3), TypeError, "state_dict must be a dict, .*; got int"),
        (lambda opt: opt.load_state_dict(None), TypeError, "state_dict must be a dict, .*; got NoneType"),
        (lambda opt: opt.load_state_dict({}), ValueError, "state_dict must be a dict with the keys 'state'"),
        (lambda opt: setattr(opt, "config", {}), TypeError, "config must be a GuardConfig; got dict"),
        (lambda opt: setattr(opt, "config", None), TypeError, "config must be a GuardConfig; got NoneType"),
    ],
)
def test_a_wrong_call_of_a_guarded_optimizer_changes_nothing(use, error, message):
    params, opt = _guarded(clip=1.0)
    before = [p.detach().clone() for p in params], opt.guard_state_dict(), opt.config
    with pytest.raises(error, match=message):
        use(opt)
    assert all(torch.equal(p, old) for p, old in zip(params, before[0], strict=True))
    assert (opt.guard_state_dict(), opt.config) == before[1:]
    opt.step()  # the failed call left nothing behind that spoils the next step
    assert opt.last["applied"]
    assert math.isnan(opt.last["loss"])


@pytest.mark.parametrize("kind", [st.KahanUpdate, st.MasterWeights, st.StochasticRounding])
def test_parameters_that_are_none(kind):
    with pytest.raises(TypeError, match=r"params must be parameters, .* or groups; got int"):
        kind(3, lambda p: torch.optim.SGD(p, lr=0.1))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"forward_scaling": stablenum.DelayedScaling(format="float8_e5m2")},
            ValueError,
            "forward_scaling must",
        ),
        ({"backward_scaling": stablenum.DelayedScaling()}, ValueError, "backward_scaling must be None or a"),
        ({"native": "no"}, TypeError, "native must be True or False; got str"),
        ({"native": 1}, TypeError, "native must be True or False; got int"),
    ],
)
def test_a_policy_with_wrong_options(options, error, message):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(error, match=message):
        st.precision(model, "compute=fp8", **options)
    st.precision(model, "compute=bf16").remove()  # nothing had been applied


@pytest.mark.parametrize("kind", [st.MasterWeights, st.KahanUpdate, st.StochasticRounding])
@pytest.mark.parametrize(
    ("state", "message"),
    [
        (5, "state_dict must be a dict.*; got int"),
        (None, "state_dict must be a dict.*; got NoneType"),
        ({}, r"state_dict must be a dict with the keys 'state' and 'param_groups'.*; got \[\]"),
        ({"state": 5}, "state_dict must be a dict with the keys .*; got \\['state'\\]"),
        ({"state": 5, "param_groups": []}, r"state_dict\['state'\] must be a dict; got int"),
    ],
)
def test_a_state_dict_that_is_none(kind, state, message):
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    opt = kind([p], lambda params: torch.optim.SGD(params, lr=0.1))
    for optimizer in (opt, st.wrap(opt)):
        with pytest.raises((TypeError, ValueError), match=message):
            optimizer.load_state_dict(state)
    with pytest.raises(TypeError, match="closure must be a function that returns the loss, or None; got int"):
        opt.step(5)
