"""``stablenum_torch.checkup``: a few steps on one batch, at most five passes, and everything as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import stablenum_torch as st


def training(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 16), nn.ReLU(),
        nn.Linear(16, 1),
    ).to(dtype)  # fmt: skip
    x = torch.randn(64, 8, dtype=dtype)
    return net, x, x @ torch.randn(8, 1, dtype=dtype)


def mse(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (net(x) - y).square().mean()


def adam(net: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=lr)


GUARDS: dict[str, Any] = {
    "plain": lambda net: adam(net),
    "fused": lambda net: torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True),
    "guarded": lambda net: st.wrap(adam(net), clip=1.0, loss_scale="dynamic", buffers=net),
    "master weights": lambda net: st.MasterWeights(net.parameters(), lambda ps: torch.optim.SGD(ps, lr=1e-2)),
}


def state_of(net: nn.Module, opt: torch.optim.Optimizer) -> list[Any]:
    def values(thing: Any) -> Any:
        if isinstance(thing, torch.Tensor):
            return thing.detach().clone()
        if isinstance(thing, dict):
            return {k: values(v) for k, v in thing.items()}
        return [values(v) for v in thing] if isinstance(thing, list | tuple) else copy.copy(thing)

    grads = [p.grad for p in net.parameters()]
    tensors = [*net.parameters(), *net.buffers()]
    return [values(tensors), values(grads), values(opt.state_dict()), torch.get_rng_state()]


def assert_same(a: Any, b: Any) -> None:
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for k in a:
            assert_same(a[k], b[k])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b or (a != a and b != b)


@pytest.mark.parametrize("kind", GUARDS)
@pytest.mark.parametrize("raises", [False, True])
def test_everything_is_left_as_it_was(kind: str, raises: bool) -> None:
    net, x, y = training(torch.bfloat16 if kind == "master weights" else torch.float32)
    opt = GUARDS[kind](net)
    for _ in range(3):
        opt.zero_grad()
        opt.backward(mse(net, x, y)) if isinstance(opt, st.GuardedOptimizer) else mse(net, x, y).backward()
        opt.step()
    before, calls = state_of(net, opt), []

    def loss_fn(*args: Any) -> torch.Tensor:
        calls.append(1)
        if raises and len(calls) == 3:
            raise RuntimeError("the data ran out")
        return mse(*args)

    if raises:
        with pytest.raises(RuntimeError, match="the data ran out"):
            st.checkup(net, loss_fn, x, y, optimizer=opt)
    else:
        report = st.checkup(net, loss_fn, x, y, optimizer=opt)
        assert report.ok, report
        assert (report.steps, len(calls)) == (3, 4)
        assert report.losses[1] < report.losses[0]
    assert_same(before, state_of(net, opt))
    assert all(p.grad is not None for p in net.parameters())


@pytest.mark.slow
def test_a_step_of_very_many_operations_is_undone() -> None:
    net, x, y = training()
    before = state_of(net, opt := adam(net))

    def loss_fn(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for _ in range(20_001):
                x = x + 0.0
        return mse(net, x, y)

    assert st.checkup(net, loss_fn, x, y, optimizer=opt).steps == 3
    assert_same(before, state_of(net, opt))


def test_there_are_three_backward_passes_and_one_without_an_optimizer() -> None:
    net, x, y = training()
    ran = []
    net[0].register_full_backward_hook(lambda *args: ran.append(1))
    st.checkup(net, mse, x, y, optimizer=adam(net))
    assert len(ran) == 3
    st.checkup(net, mse, x, y)
    assert len(ran) == 4


def test_a_layer_that_no_optimizer_has() -> None:
    net, x, y = training()
    report = st.checkup(net, mse, x, y, optimizer=torch.optim.Adam(net[0].parameters(), lr=1e-2))
    assert report.complaints[0].symptom.value == "not_in_optimizer"
    assert "4.weight" in report.complaints[0].evidence[0]


def test_the_optimizer_of_a_model_that_was_replaced() -> None:
    net, x, y = training()
    other, *_ = training()
    report = st.checkup(net, mse, x, y, optimizer=adam(other))
    assert {"not_in_model", "not_in_optimizer"} & {c.symptom.value for c in report.complaints}, report


def test_a_state_that_is_poisoned() -> None:
    net, x, y = training()
    opt = adam(net)
    mse(net, x, y).backward()
    opt.step()
    opt.state[net[0].weight]["exp_avg_sq"][0, 0] = -1.0
    report = st.checkup(net, mse, x, y, optimizer=opt)
    assert report.complaints[0].symptom.value == "bad_state", report
    assert "0.weight" in report.complaints[0].evidence[0]


def test_a_loss_without_a_graph() -> None:
    net, x, y = training()
    report = st.checkup(net, lambda net, x, y: torch.mean(x), x, y, optimizer=adam(net))
    assert report.complaints[0].symptom.value == "no_graph"
    assert "torch.mean(x)" in report.complaints[0].place.code


def test_a_loss_that_is_not_finite_is_a_finding() -> None:
    net, x, y = training()
    report = st.checkup(net, mse, x / 0, y, optimizer=adam(net))
    assert "loss_not_finite" in str(report)
    assert not report.ok


def test_a_rate_of_0_is_noted_and_not_blamed() -> None:
    net, x, y = training()
    report = st.checkup(net, mse, x, y, optimizer=torch.optim.SGD(net.parameters(), lr=0.0))
    assert report.ok
    assert report.notes == ("the learning rate is 0 here, so nothing moved",)


def test_an_optimizer_that_needs_a_closure_takes_no_step() -> None:
    net, x, y = training()
    report = st.checkup(net, mse, x, y, optimizer=torch.optim.LBFGS(net.parameters()))
    assert (report.steps, report.measured) == (0, 1)
    assert report.notes == ("the step of LBFGS needs a closure, so none was taken",)


def test_a_compiled_model_runs_eagerly() -> None:
    net, x, y = training()
    compiled = torch.compile(net, backend="eager")
    report = st.checkup(compiled, mse, x, y, optimizer=adam(net))
    assert report.ok, report
    assert report.measured == 3


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((3, mse), {}, "model must be a torch.nn.Module; got int"),
        ((nn.Linear(1, 1), 3), {}, "loss_fn must be a function .* got int"),
        ((nn.Linear(1, 1), mse), {"optimizer": 3}, "optimizer must be a torch.optim.Optimizer"),
        (
            (nn.Linear(1, 1), lambda m: m(torch.ones(2, 1))),
            {},
            r"loss_fn must be .* got 'torch.float32\[2, 1\]",
        ),
        ((nn.Linear(1, 1), lambda m: 3.0), {}, "loss_fn must be a function that returns .* got 3.0"),
    ],
)
def test_wrong_arguments(arguments: Any, options: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        st.checkup(*arguments, **options)
