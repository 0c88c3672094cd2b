"""replay changes nothing: everything is bit-equal before and after, even if the step raises."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import stablenum_torch as st
from tests.injection import executed_lines, interrupted_at, some


class Net(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6, sparse=sparse)
        self.lin = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 3)
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0
        self.cache: dict[str, Tensor] = {}

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        self.count = self.count + 1
        h = self.norm(self.lin(self.embedding(tokens)))
        self.cache["h"] = h
        return self.head(F.dropout(h, 0.5, self.training))


def bits(x: Any) -> Any:
    """A value that compares equal if every bit does."""
    if isinstance(x, Tensor):
        if x.is_sparse:
            return ("sparse", bits(x._indices()), bits(x._values()))
        return (str(x.dtype), tuple(x.shape), x.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    if isinstance(x, dict):
        return {str(k) if not isinstance(k, Tensor) else id(k): bits(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [bits(v) for v in x]
    return repr(x)


def state(model: Net, opt: torch.optim.Optimizer) -> dict[str, Any]:
    """All state of the training."""
    hooks = (
        [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()],
        [len(p._backward_hooks or ()) for p in model.parameters()],
        len(torch.nn.modules.module._global_forward_hooks),
        len(_global_optimizer_pre_hooks),
    )
    guard = opt.guard_state_dict() if isinstance(opt, st.GuardedOptimizer) else None
    return {
        "model": bits({**dict(model.named_parameters()), **dict(model.named_buffers())}),
        "objects": [id(t) for t in (*model.parameters(), *model.buffers())],
        "addresses": [t.data_ptr() for t in (*model.parameters(), *model.buffers())],
        "gradients": [None if p.grad is None else (id(p.grad), bits(p.grad)) for p in model.parameters()],
        "optimizer": bits(dict(opt.state)),
        "groups": bits([{k: v for k, v in g.items() if k != "params"} for g in opt.param_groups]),
        "guard": repr(guard),
        "hooks": hooks,
        "training": [m.training for m in model.modules()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "attributes": (model.calls, sorted(model.cache), sorted(vars(model))),
        "torch rng": bits(torch.get_rng_state()),
        "numpy rng": repr(np.random.get_state()[1].tobytes() + bytes(np.random.get_state()[2])),
        "python rng": repr(random.getstate()),
        "modes": (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_default_dtype()),
        "contexts": (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
        "warnings": (id(warnings.filters), id(warnings.showwarning)),
        "compiler": repr(torch._dynamo.eval_frame._stance),
    }


OPTIMIZERS: dict[str, Callable[[Net], torch.optim.Optimizer]] = {
    "adamw, fused": lambda m: torch.optim.AdamW(m.parameters(), fused=True),
    "adam, foreach": lambda m: torch.optim.Adam(m.parameters(), foreach=True, amsgrad=True),
    "adam, single": lambda m: torch.optim.Adam(m.parameters(), foreach=False),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "guarded": lambda m: st.wrap(torch.optim.AdamW(m.parameters()), names=m, loss_scale="dynamic", clip=1.0),
}


def made(name: str, sparse: bool = False) -> tuple[Net, torch.optim.Optimizer, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Net(sparse)
    return model, OPTIMIZERS[name](model), torch.randint(0, 10, (8,)), torch.randint(0, 3, (8,))


def train(model: Net, opt: torch.optim.Optimizer, x: Tensor, y: Tensor, factor: float = 1.0) -> Tensor:
    """A whole step that also has side effects that a step should not have."""
    opt.zero_grad()
    loss = F.cross_entropy(model(x), y) * factor + random.random() + float(np.random.rand())
    (opt.scale(loss) if isinstance(opt, st.GuardedOptimizer) else loss).backward()
    opt.step()
    opt.param_groups[0]["lr"] *= 0.5
    model.eval()
    torch.set_grad_enabled(False)
    return loss


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("factor", [1.0, math.nan])
def test_a_whole_training_step(name: str, steps_before: int, factor: float) -> None:
    model, opt, x, y = made(name)
    for _ in range(steps_before):
        with torch.enable_grad():
            model.train()
            train(model, opt, x, y)
    model.train()
    torch.set_grad_enabled(True)
    model.lin.weight.grad = torch.full((6, 6), math.nan)  # left over from the step that failed
    before = state(model, opt)
    report = st.replay(train, model, opt, x, y, factor)
    assert report.ok is not math.isnan(factor), str(report)
    assert state(model, opt) == before


@pytest.mark.parametrize("known", ["model", "optimizer", "nothing"])
def test_tensors_that_are_not_passed_as_arguments_are_restored(known: str) -> None:
    model, opt, x, y = made("adamw, fused")
    weights = list(model.parameters())

    def step() -> Tensor:
        with torch.no_grad():
            for w in weights:
                w.mul_(1.5)
        return F.cross_entropy(model(x), y)

    given: dict[str, Any] = {"model": {"model": model}, "optimizer": {"optimizer": opt}}.get(known, {})
    before = state(model, opt)
    assert st.replay(step, **given).ok
    assert state(model, opt) == before


class TroubleError(Exception):
    """An exception defined by the user."""


@pytest.mark.parametrize("where", ["forward", "backward", "update"])
def test_a_step_that_raises(where: str) -> None:
    model, opt, x, y = made("adam, foreach")
    train(model, opt, x, y)
    model.train()
    torch.set_grad_enabled(True)

    def trouble(*_: Any) -> None:
        raise TroubleError(where)

    def step() -> None:
        model.eval()
        opt.zero_grad()
        logits = model(x)
        if where == "forward":
            trouble()
        if where == "backward":
            logits.register_hook(trouble)
        F.cross_entropy(logits, y).backward()
        opt.step()
        with torch.no_grad():
            model.lin.weight.fill_(1.0)
        trouble()

    before = state(model, opt)
    with pytest.raises(TroubleError):
        st.replay(step)
    assert state(model, opt) == before


def test_sparse_gradients() -> None:
    torch.manual_seed(0)
    model, x, y = Net(sparse=True), torch.tensor([1, 2, 1]), torch.tensor([0, 1, 2])
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    F.cross_entropy(model(x), y).backward()
    before = state(model, opt)
    assert st.replay(lambda: F.cross_entropy(model(x), y), model=model).ok

    def step() -> Tensor:
        e = model.embedding(x)
        return torch.sqrt(e - e.detach()).sum()

    report = st.replay(step, model=model, optimizer=opt)
    assert report.findings[0].operation == "sqrt"
    assert report.evidence.bad_gradients == ("embedding.weight",)
    assert state(model, opt) == before


def test_a_custom_random_generator() -> None:
    generator = torch.Generator().manual_seed(3)
    w = torch.ones(4, requires_grad=True)
    before = generator.get_state()
    seen: list[Tensor] = []

    def step() -> Tensor:
        noise = torch.randn(4, generator=generator)
        seen.append(noise)
        return (w * noise).sum() / 0.0

    assert not st.replay(step).ok
    assert torch.equal(generator.get_state(), before)
    assert len(seen) == 2
    assert torch.equal(seen[0], seen[1])


def test_the_batch_is_restored() -> None:
    w, x = torch.ones(4, requires_grad=True), torch.ones(4)

    def step(batch: Tensor) -> Tensor:
        batch.add_(1.0)
        return (batch * w).sum()

    assert st.replay(step, x).ok
    assert torch.equal(x, torch.ones(4))


def test_a_data_attribute_pointed_elsewhere_is_restored() -> None:
    lin = nn.Linear(2, 2)
    address, weight = lin.weight.data_ptr(), lin.weight.detach().clone()

    def step() -> Tensor:
        lin.weight.data = torch.zeros(2, 2)
        lin.bias.requires_grad_(False)
        return lin(torch.ones(1, 2)).sum()

    assert st.replay(step).ok
    assert lin.weight.data_ptr() == address
    assert torch.equal(lin.weight, weight)
    assert lin.bias.requires_grad


class Holder:
    """A user-defined object that holds another."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


def test_state_of_nested_objects_is_restored() -> None:
    model, opt, x, y = made("adam, foreach")
    trainer = Holder(engine=Holder(parts=Holder(model=model, optimizer=opt)))

    def step() -> Tensor:
        parts = trainer.engine.parts
        return train(parts.model, parts.optimizer, x, y)

    before = state(model, opt)
    assert st.replay(step).ok
    assert state(model, opt) == before


@pytest.mark.parametrize("change", ["append", "pop", "replace"])
def test_a_list_that_the_step_changes_is_restored(change: str) -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(2))
            self.seen = ["first", "second"]

        def forward(self) -> torch.Tensor:
            if change == "append":
                self.seen.append("third")
            elif change == "pop":
                self.seen.pop()
            else:
                self.seen[0] = "other"
            return self.w.sum()

    model = Counting()
    seen = model.seen
    st.replay(model, model=model)
    assert model.seen is seen
    assert seen == ["first", "second"]


def test_gradients_of_a_graph_that_was_built_before() -> None:
    lin = nn.Linear(2, 2)
    h = lin(torch.ones(1, 2))
    assert st.replay(lambda: h.square().sum().backward(retain_graph=True)).ok
    assert lin.weight.grad is None


def test_parameters_made_in_inference_mode() -> None:
    with torch.inference_mode():
        lin = nn.Linear(2, 2)
    weight = lin.weight.detach().clone()

    def step() -> Tensor:
        with torch.inference_mode():
            lin.weight.add_(1.0)
            return lin(torch.ones(1, 2)).sum()

    assert st.replay(step).ok
    assert torch.equal(lin.weight, weight)


def test_replaying_something_that_is_not_callable_raises() -> None:
    with pytest.raises(TypeError, match="step_fn must be a function"):
        st.replay(torch.ones(1))


@pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_an_interrupt_at_any_line(every: bool) -> None:
    """At the last time that each line runs, and at the lines that restore after the last run."""
    model, opt, x, y = made("guarded")
    train(model, opt, x, y)
    model.train()
    torch.set_grad_enabled(True)

    def call() -> None:
        st.replay(train, model, opt, x, y, math.nan)

    call()  # the first replay fills caches
    before, lines = state(model, opt), executed_lines(call)
    last = sorted({line: i for i, line in enumerate(lines)}.values())
    end = max(i for i, line in enumerate(lines) if line[0].endswith("snapshot.py"))
    restoring = [i for i in range(end - 600, end + 1) if lines[i][0].endswith(("snapshot.py", "modes.py"))]
    for number in sorted({*last, *some(restoring, 200)} if every else {*some(last, 4), *some(restoring, 5)}):
        assert interrupted_at(number, call) is not None
        assert state(model, opt) == before, lines[number]
