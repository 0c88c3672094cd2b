"""Optimizers that step in two parts (SAM) are guarded as a whole; unknown ones are refused by name."""

from __future__ import annotations

import math

import pytest
import torch

import stablenum_torch as st
from stablenum import ClipUpdateRMS, GuardConfig, Reason


class SAM(torch.optim.Optimizer):
    """Climb by ``rho`` along the gradient, and step the optimizer inside with the gradient found there."""

    keeps_copies = True

    def __init__(self, params, base, **settings):
        super().__init__(params, {"rho": 0.05, **settings})
        self.base_optimizer = base(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups

    def _with_gradient(self):
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        params = self._with_gradient()
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            climb = p.grad * (self.param_groups[0]["rho"] / (norm + 1e-12))
            self.state[p]["old"] = p.clone() if self.keeps_copies else climb
            p.add_(climb)
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for p in self._with_gradient():
            if self.keeps_copies:
                p.data = self.state[p]["old"]
            else:
                p.sub_(self.state[p]["old"])
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    def step(self, closure=None):
        assert closure is not None
        self.first_step(zero_grad=True)
        torch.enable_grad()(closure)()
        self.second_step()


class Subtracting(SAM):
    """Comes back by subtraction, as some do, which does not take NaN back."""

    keeps_copies = False


KINDS = [SAM, Subtracting]


def _training(kind, **settings):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    inner = kind(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    return model, st.wrap(inner, names=model, **settings)


def _batches(n):
    torch.manual_seed(1)
    return [torch.randn(8, 3) for _ in range(n)]


def _step(model, opt, batch, *, first=1.0, second=1.0, by_closure=False):
    """Take a step whose losses are multiplied by two factors."""

    def loss(factor):
        return factor * model(batch).square().mean()

    opt.backward(loss(first))
    if by_closure:
        opt.step(lambda: opt.backward(loss(second)))
        opt.zero_grad()
    else:
        opt.first_step(zero_grad=True)
        opt.backward(loss(second))
        opt.second_step(zero_grad=True)


def _everything(model, opt):
    states = [opt.inner.state, opt.inner.base_optimizer.state]
    return [
        *(p.detach().clone() for p in model.parameters()),
        *(x.clone() for state in states for p in model.parameters() for x in state[p].values()),
    ]


def _same(ours, theirs):
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by_closure", [False, True])
def test_good_steps_are_those_of_the_optimizer_alone(kind, by_closure, path):
    model, opt = _training(kind)
    bare_model, wrapped = _training(kind)
    bare = wrapped.inner
    for batch in _batches(4):
        _step(model, opt, batch, by_closure=by_closure)
        bare_model(batch).square().mean().backward()
        bare.first_step(zero_grad=True)
        bare_model(batch).square().mean().backward()
        bare.second_step(zero_grad=True)
    assert _same(list(model.parameters()), list(bare_model.parameters()))
    assert [row["applied"] for row in opt.history()] == [True] * 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("at", ["first", "second"])
def test_a_bad_gradient_in_either_part_changes_no_bit(kind, bad, at, path):
    model, opt = _training(kind, clip=1.0, loss_scale=8.0)
    first, *rest = _batches(4)
    _step(model, opt, first)
    before = _everything(model, opt)
    _step(model, opt, rest[0], **{at: bad})
    assert _same(_everything(model, opt), before)
    assert opt.last["reason"] is Reason.NONFINITE_LOSS
    assert str(opt.last["loss"]) == str(bad)
    assert all(p.grad is None for p in model.parameters())
    for batch in rest[1:]:
        _step(model, opt, batch)
    again_model, again = _training(kind, clip=1.0, loss_scale=8.0)
    for batch in (first, *rest[1:]):
        _step(again_model, again, batch)
    assert _same(list(model.parameters()), list(again_model.parameters()))


@pytest.mark.parametrize("by_closure", [False, True])
@pytest.mark.parametrize("at", ["first", "second"])
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_only_an_overflow_of_gradients_lowers_the_scale(what, at, by_closure, path):
    model, opt = _training(SAM, loss_scale="dynamic")
    calls = iter(range(2))

    def spoil(gradient):
        return gradient * (math.inf if next(calls, None) == ["first", "second"].index(at) else 1.0)

    if what == "gradient":
        model[2].bias.register_hook(spoil)
    factors = {at: math.nan} if what == "loss" else {}
    batch, *rest = _batches(2)
    _step(model, opt, batch, by_closure=by_closure, **factors)
    of_gradient = Reason.FOUND_INF if at == "first" else Reason.INF_GRADIENT
    assert opt.last["reason"] is (Reason.NONFINITE_LOSS if what == "loss" else of_gradient)
    assert opt.loss_scale == (65536.0 if what == "loss" else 32768.0)
    _step(model, opt, *rest, by_closure=by_closure)
    assert opt.last["reason"] is Reason.OK  # nothing is left of the bad loss


def test_a_bad_gradient_names_its_parameter():
    model, opt = _training(SAM)
    model[2].bias.register_hook(lambda g: g * math.nan)
    _step(model, opt, _batches(1)[0])
    assert (opt.last["reason"], opt.last["worst"].name) == (Reason.NAN_GRADIENT, "2.bias")


def test_a_first_part_without_a_second_one_is_undone():
    model, opt = _training(SAM)
    before = [p.detach().clone() for p in model.parameters()]
    for batch in _batches(2):
        opt.backward(model(batch).square().mean())
        opt.first_step(zero_grad=True)
    opt.second_step()  # without a gradient
    assert _same(list(model.parameters()), before)
    assert opt.history() == []


def test_what_is_not_a_step_is_said_before_anything_moves():
    model, opt = _training(SAM, loss_scale=8.0)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(TypeError, match=r"SAM needs a closure.*opt.first_step\(zero_grad=True\)"):
        opt.step()
    with pytest.raises(RuntimeError, match="must follow first_step"):
        opt.second_step()
    assert _same(list(model.parameters()), before)
    with pytest.raises(ValueError, match="ClipUpdateRMS with SAM"):
        opt.config = GuardConfig(clip=ClipUpdateRMS(1.0), loss_scale=8.0)


def test_an_ordinary_optimizer_has_no_parts():
    opt = st.wrap(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
    assert not hasattr(opt, "first_step")
    with pytest.raises(AttributeError, match="'GuardedOptimizer' object has no attribute 'first_step'"):
        opt.first_step()


@pytest.mark.parametrize("name", ["third_step", "extrapolation", "perturb_weights", "ascent_step"])
def test_parts_that_are_not_known_are_refused_by_name(name):
    kind = type("Odd", (SAM,), {name: lambda self: None})
    with pytest.raises(TypeError, match=rf"Odd cannot be guarded.*{name}\(\)"):
        _training(kind)


class Extra(torch.optim.SGD):
    """Steps in a method that the guard cannot know."""

    def advance(self):
        super().step()


def _around(opt, how):
    if how == "method":
        opt.advance()
    elif how == "inner":
        opt.inner.step()
    else:
        other = torch.optim.Adam(opt.param_groups[0]["params"], lr=0.1)
        other.step()


@pytest.mark.parametrize("how", ["method", "inner", "another optimizer"])
@pytest.mark.parametrize("clears", ["before", "not", "set_to_none"])
def test_a_step_around_the_guard_is_told_once(how, clears):
    model = torch.nn.Linear(3, 2)
    opt = st.wrap(Extra(model.parameters(), lr=0.1))

    def step():
        if clears != "not":
            opt.zero_grad(set_to_none=clears == "set_to_none")
        opt.backward(model(torch.ones(2, 3)).square().mean())
        _around(opt, how)

    step()
    with pytest.warns(UserWarning, match=r"passed by the guard.*opt\.step\(\)"):
        step()
    for _ in range(3):
        step()  # a second warning would be an error


def test_what_moves_parameters_between_steps_is_no_step():
    model = torch.nn.Sequential(torch.nn.Embedding(4, 3, max_norm=0.1), torch.nn.Linear(3, 2))
    opt = st.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    ids = torch.arange(4)

    def swap():
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.5)

    saved = opt.state_dict()
    for i in range(4):
        opt.zero_grad()
        for _ in range(2):  # the embedding norms its rows again in each forward pass
            opt.backward(model(ids).square().mean())
        if i == 2:  # a rewind
            swap()
            opt.load_state_dict(saved)
            continue
        if i == 1:
            model[1].bias.grad[0] = math.nan
        opt.step()
        swap()  # a clamp of the weights, or an average for an evaluation
    assert len(opt.history()) == 1  # since the rewind
