"""Fused kernels that a guard calls directly: the same in every bit, and only where nothing can tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim import optimizer as torch_optimizer

import stablenum_torch
from stablenum_torch._devices import direct_step as module
from stablenum_torch._devices import fused_optimizers
from stablenum_torch._devices.direct_step import Factors, direct_step

KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "Adam": lambda p: Adam(p, lr=0.1, fused=True, weight_decay=0.01),
    "Adam, amsgrad, maximize": lambda p: Adam(p, lr=0.1, fused=True, amsgrad=True, maximize=True),
    "Adam, a rate in a tensor": lambda p: Adam(p, lr=torch.tensor(0.1), fused=True),
    "AdamW": lambda p: AdamW(p, lr=0.1, fused=True, betas=(0.5, 0.7), eps=1e-3),
    "SGD": lambda p: SGD(p, lr=0.1, fused=True, weight_decay=0.01, maximize=True),
    "SGD, momentum": lambda p: SGD(p, lr=0.1, fused=True, momentum=0.9, dampening=0.1),
    "SGD, nesterov": lambda p: SGD(p, lr=0.1, fused=True, momentum=0.9, nesterov=True),
    "Adagrad": lambda p: Adagrad(p, lr=0.1, fused=True, lr_decay=0.01, weight_decay=0.01),
}


def parameters() -> list[nn.Parameter]:
    values = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(n, 3, generator=values)) for n in (2, 5, 1)]


def with_gradients(params: list[nn.Parameter], seed: int = 1) -> list[nn.Parameter]:
    values = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=values)
    return params


def two_groups(p: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": p[:1], "lr": 0.5}, {"params": p[1:]}, {"params": []}]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each step, whether the kernel was called directly."""
    found: list[bool] = []

    def noting(optimizer: Optimizer, factors: Factors) -> Callable[[], None] | None:
        call = direct_step(optimizer, factors)
        found.append(call is not None)
        return call

    monkeypatch.setattr(fused_optimizers, "direct_step", noting)
    return found


def replace_moments(optimizer: Any) -> None:
    for state in optimizer.state.values():
        for name, value in state.items():
            state[name] = value.clone()


def load(optimizer: Any) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def forget(optimizer: Any) -> None:
    optimizer.state.clear()


def add_group(optimizer: Any) -> None:
    optimizer.add_param_group({"params": with_gradients([nn.Parameter(torch.ones(2, 2))])})


def change_settings(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = group["lr"] * 0.5, 0.125


def widen(optimizer: Any) -> None:
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        p.data, p.grad = p.data.double(), None
        optimizer.state[p].update({k: v.double() for k, v in optimizer.state[p].items() if k != "step"})


CHANGES = {
    "nothing": lambda optimizer: None,
    "moments replaced": replace_moments,
    "a state loaded": load,
    "the state dropped": forget,
    "a group added": add_group,
    "settings": change_settings,
    "another format": widen,
}


def trained(kind: str, change: str, *, groups: bool, scale: Any) -> list[Tensor]:
    params = parameters()
    inner: Any = KINDS[kind](two_groups(params) if groups else params)
    optimizer = stablenum_torch.wrap(inner, clip=1.0, loss_scale=scale)
    for step in range(6):
        if step == 3:
            CHANGES[change](inner)
        loss = sum(
            (p.double() ** 2 * (p.numel() + step)).sum() for g in inner.param_groups for p in g["params"]
        )
        optimizer.zero_grad()
        optimizer.backward(loss)
        if step == 4:
            params[1].grad = None
        optimizer.step()
    return [p.detach() for p in params] + [
        v.detach().clone() for state in inner.state.values() for v in state.values() if isinstance(v, Tensor)
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", CHANGES)
def test_steps_are_the_same_in_every_bit(
    kind: str, change: str, calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    for groups, scale in ((False, 2.0**10), (True, None)):
        calls.clear()
        mine = trained(kind, change, groups=groups, scale=scale)
        direct = list(calls)
        with monkeypatch.context() as patch:
            patch.setattr(fused_optimizers, "direct_step", lambda *_: None)
            wanted = trained(kind, change, groups=groups, scale=scale)

        assert len(mine) == len(wanted)
        assert all(map(torch.equal, mine, wanted))
        assert direct[1:3] == [True, True]  # the first step makes the state, except where there is none
        assert not direct[4]  # a parameter has no gradient


# --- what takes torch's own way -----------------------------------------------------------------------------


class Own(AdamW):
    pass


def stepped(kind: Any = AdamW, **settings: Any) -> tuple[list[nn.Parameter], Any]:
    params = with_gradients(parameters())
    optimizer = kind(params, lr=0.1, **{"fused": True, **settings})
    optimizer.step()
    return params, optimizer


def replaced_step(params: Any, optimizer: Any) -> None:
    own = optimizer.step
    optimizer.step = lambda *a: own(*a)


def sparse(params: Any, optimizer: Any) -> None:
    params[0].grad = params[0].grad.to_sparse()


class OwnState(dict[Any, Any]):
    """A state that is kept elsewhere, for example."""


class Wrapped(Tensor):
    """A subclass, whose operations someone may watch."""


UNUSUAL: dict[str, Callable[[list[nn.Parameter], Any], Any]] = {
    "a hook before": lambda p, o: o.register_step_pre_hook(lambda *_: None),
    "a hook after": lambda p, o: o.register_step_post_hook(lambda *_: None),
    "a replaced step": replaced_step,
    "no gradient": lambda p, o: setattr(p[1], "grad", None),
    "a sparse gradient": sparse,
    "a subclass of tensors": lambda p, o: setattr(p[0], "grad", p[0].grad.as_subclass(Wrapped)),
    "a lost state": lambda p, o: o.state[p[0]].pop("exp_avg"),
    "a state that is looked up otherwise": lambda p, o: setattr(o, "state", OwnState(o.state)),
    "steps in another format": lambda p, o: [s.update(step=s["step"].long()) for s in o.state.values()],
    "a divisor that is left": lambda p, o: setattr(o, "grad_scale", torch.tensor(2.0)),
    "a skip that is left": lambda p, o: setattr(o, "found_inf", torch.tensor(1.0)),
    "betas in tensors": lambda p, o: o.param_groups[0].update(betas=(torch.tensor(0.9), torch.tensor(0.99))),
    "not fused": lambda p, o: o.param_groups[0].update(fused=False),
    "differentiable": lambda p, o: o.param_groups[0].update(differentiable=True),
}


@torch.no_grad()
def test_an_ordinary_optimizer_is_stepped_directly() -> None:
    assert direct_step(stepped()[1], Factors()) is not None


@pytest.mark.parametrize("name", UNUSUAL)
@torch.no_grad()
def test_what_torch_would_do_otherwise_is_left_to_torch(name: str) -> None:
    params, optimizer = stepped()
    before = [p.clone() for p in params]

    UNUSUAL[name](params, optimizer)

    assert direct_step(optimizer, Factors()) is None
    assert all(map(torch.equal, params, before))


@torch.no_grad()
def test_states_in_another_order_and_parameters_in_another_sequence_are_found() -> None:
    params, optimizer = stepped()
    _, wanted = stepped()
    optimizer.state.update({params[0]: optimizer.state.pop(params[0])})
    optimizer.param_groups[0]["params"] = nn.ParameterList(params)

    call = direct_step(optimizer, Factors())
    assert call is not None
    call()
    wanted.step()

    assert all(map(torch.equal, params, wanted.param_groups[0]["params"]))


def test_sgd_that_is_both_fused_and_foreach_takes_steps_as_torch_does() -> None:
    """Torch's SGD reads ``foreach`` first, of a group, and has no use for a divisor there."""
    moved = []
    for guarded in (False, True):
        params = parameters()
        groups = [{"params": params, "foreach": True}]
        inner: Any = SGD(groups, lr=0.1, momentum=0.9, fused=True)
        optimizer: Any = stablenum_torch.wrap(inner, clip=1.0) if guarded else inner
        for seed in range(3):
            with_gradients(params, seed)
            if not guarded:
                torch.nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
        moved.append(torch.cat([p.detach().reshape(-1) for p in params]))

    torch.testing.assert_close(*moved)


@pytest.mark.parametrize("kind", [Own, torch.optim.RMSprop, torch.optim.NAdam])
@torch.no_grad()
def test_other_optimizers_are_left_to_torch(kind: Any) -> None:
    assert direct_step(stepped(kind, fused=True)[1] if kind is Own else kind(parameters()), Factors()) is None


@torch.no_grad()
def test_a_step_of_the_class_that_someone_has_replaced_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = stepped()
    own = AdamW.step

    monkeypatch.setattr(AdamW, "step", lambda self, closure=None: own(self, closure))

    assert direct_step(optimizer, Factors()) is None


@torch.no_grad()
def test_hooks_of_all_optimizers_are_called() -> None:
    _, optimizer = stepped()
    for register in (
        torch_optimizer.register_optimizer_step_pre_hook,
        torch_optimizer.register_optimizer_step_post_hook,
    ):
        hook = register(lambda *_: None)
        try:
            assert direct_step(optimizer, Factors()) is None
        finally:
            hook.remove()
    assert direct_step(optimizer, Factors()) is not None


@torch.no_grad()
def test_a_profiler_sees_the_step() -> None:
    _, optimizer = stepped()
    with torch.profiler.profile():
        assert direct_step(optimizer, Factors()) is None


@torch.no_grad()
def test_kernels_of_another_version_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = stepped()

    def other(group: Any, *args: Any) -> Any:
        return module._adam({**group, "lr": 2 * group["lr"]}, *args)

    def refused(*args: Any) -> None:
        raise TypeError("_fused_adamw_() takes 3 positional arguments")

    for patched, name, value in ((module._KERNELS, AdamW, other), (torch, "_fused_adamw_", refused)):
        module._agrees.cache_clear()
        with monkeypatch.context() as patch:
            (patch.setattr if patched is torch else patch.setitem)(patched, name, value)
            assert direct_step(optimizer, Factors()) is None
    module._agrees.cache_clear()
    assert direct_step(optimizer, Factors()) is not None


def test_a_scheduler_counts_the_step(calls: list[bool], recwarn: pytest.WarningsRecorder) -> None:
    params, inner = stepped()
    scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 0.5**step)
    optimizer = stablenum_torch.wrap(inner, clip=1.0)
    for _ in range(2):
        with_gradients(params)
        optimizer.step()
        scheduler.step()

    assert calls == [True, True]
    assert not [w for w in recwarn if "lr_scheduler.step" in str(w.message)]


def test_hooks_and_profiles_of_the_guarded_optimizer_see_what_they_see_of_any() -> None:
    params, inner = stepped()
    optimizer = stablenum_torch.wrap(inner, clip=1.0)
    seen: list[tuple[str, Any]] = []
    hooks = [
        optimizer.register_step_pre_hook(lambda o, *_: seen.append(("before", o))),
        optimizer.register_step_post_hook(lambda o, *_: seen.append(("after", o))),
    ]
    optimizer.step()
    assert seen == [("before", optimizer), ("after", optimizer)]
    for hook in hooks:
        hook.remove()

    with_gradients(params)
    optimizer.step()
    with torch.profiler.profile() as profile:
        optimizer.step()

    assert len(seen) == 2
    entries = {event.key for event in profile.key_averages()}
    assert {"Optimizer.step#GuardedOptimizer.step", "Optimizer.step#AdamW.step"} <= entries
