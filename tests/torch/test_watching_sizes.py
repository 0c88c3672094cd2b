"""What the watch measures at each step: sizes that are exact, the first bad step, and nothing left behind."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.nn.modules import module as modules
from torch.overrides import TorchFunctionMode

from stablenum.diagnosis.watch.plan import Plan
from stablenum.diagnosis.watch.session import Session
from stablenum_torch._devices.finiteness import _SMALL, magnitudes
from stablenum_torch._diagnosis.checkup import watch as checkup
from stablenum_torch._diagnosis.watch.by_hand import finite, graph_of
from stablenum_torch._diagnosis.watch.optimizers import largest
from stablenum_torch._diagnosis.watch.watcher import _Watcher
from tests.torch.watched import Watching, assert_healthy, ended

FORMATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2)
SHAPES = ((1,), (), (3, 5), (_SMALL,), (_SMALL + 1,), (2, 0), (7, 300))


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf], ids=str)
def test_sizes_are_exact_and_bad_where_a_number_is(dtype: torch.dtype, bad: float | None) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(shape).to(dtype) for shape in SHAPES if 0 not in shape]
    tensors.append(torch.randn(40, 60).to(dtype).t()[::2])
    if bad is not None:
        for tensor in tensors[1::2]:
            tensor.view(-1)[-1] = bad if tensor.is_contiguous() else 0.0
    for size, tensor in zip(magnitudes(tensors), tensors, strict=True):
        expected = tensor.double().abs().max().item()
        assert size == expected or (math.isnan(size) and math.isnan(expected))
        assert math.isfinite(size) == finite(tensor.double())


def test_what_cannot_be_measured_together_is_checked_by_itself() -> None:
    sparse = torch.sparse_coo_tensor([[0, 2]], [1.0, math.nan], (3,))
    others = [torch.zeros(2, 0), torch.ones(2, dtype=torch.long), torch.empty(3, device="meta")]
    tensors = [sparse, torch.full((2,), -3.0), torch.full((2,), 3e38 + 3e38j), *others]
    nan, *sizes = largest(tensors)
    assert math.isnan(nan)
    assert sizes == [3.0, 0.0, 0.0, 0.0, 0.0]
    assert largest([]) == []


def small(rate: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, _SMALL // 2), torch.nn.Linear(_SMALL // 2, 1))
    return model, torch.optim.SGD(model.parameters(), lr=rate)


def bad_gradient(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    next(model.parameters()).grad[-1, -1] = -math.inf  # type: ignore[index]


def bad_update(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 3e38


def bad_data(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        list(model.parameters())[-1].data.fill_(math.nan)


@pytest.mark.parametrize(
    ("break_it", "what"), [(bad_gradient, "gradient"), (bad_update, "parameter"), (bad_data, "parameter")]
)
def test_the_first_bad_step_is_named_though_steps_of_others_follow(
    watching: Watching, break_it: Callable[..., None], what: str
) -> None:
    model, optimizer = small(1e-9)
    other, its_optimizer = small(1e-9)

    def run() -> None:
        for step in range(6):
            for m, o in ((model, optimizer), (other, its_optimizer)):
                o.zero_grad()
                (m(torch.ones(2, 3)) - 1e3).square().mean().backward()
                if step == 2 and m is model:
                    break_it(m, o)
                o.step()

    failure = ended(watching(), run).outcome.failure
    assert failure is not None
    assert (failure.step, failure.what) == (4, what)


def test_a_step_inside_another_counts_once_also_after_one_that_raised(watching: Watching) -> None:
    model, inner = small(1e-6)

    class Outer(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__(model.parameters(), {})
            self.fails = False

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            inner.step()
            if self.fails:
                raise LookupError("mine")

    outer = Outer()

    def run() -> None:
        for step in range(6):
            outer.zero_grad()
            model(torch.ones(2, 3)).square().mean().backward()
            outer.fails = step % 3 == 1
            try:
                outer.step()
            except LookupError:
                inner.step()

    session = watching()
    assert_healthy(session, run)
    assert session.outcome.steps == 6


def test_only_numbers_that_a_loss_may_be_are_looked_at(
    watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[object] = []
    monkeypatch.setattr(_Watcher, "before_look", lambda self, *args: looked.append(args[0]))
    watching()
    weight = torch.ones((), requires_grad=True)
    model, _ = small(1e-6)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3)).square().mean().backward()
    optimizer.step()  # which reads how many steps each parameter has taken
    assert (torch.tensor(2.0).item(), float(weight.detach()), bool(torch.isnan(weight))) == (2.0, 1.0, False)
    assert looked == []
    loss = weight * 2
    assert (loss.item(), bool(torch.isfinite(loss))) == (2.0, True)
    assert [thing is loss for thing in looked] == [True, True]


def test_modes_and_subclasses_of_the_script_see_no_question_of_ours(watching: Watching) -> None:
    asked: list[str] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            asked.append(getattr(function, "__name__", ""))
            return function(*args, **(kwargs or {}))

    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            asked.append(getattr(function, "__name__", ""))
            return super().__torch_function__(function, types, args, kwargs)

    def read() -> list[str]:
        asked.clear()
        with Mode():
            torch.ones(()).item()
        torch.ones(()).as_subclass(Own).item()
        return list(asked)

    alone = read()
    watching()
    assert read() == alone


def test_a_graph_is_read_again_when_it_has_changed() -> None:
    a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    loss = (a * 2).sum()
    first = graph_of([loss])
    assert graph_of([loss]) is first
    loss += b.sum()
    assert {id(leaf) for leaf in graph_of([loss]).leaves} == {id(a), id(b)}
    assert graph_of([a.detach()]).leaves == []


def test_modules_run_without_hooks_between_the_steps_that_are_measured() -> None:
    watcher = checkup._Watcher(Session(Plan(script="script.py")))
    model, _ = small(1e-6)
    known = len(modules._global_forward_pre_hooks)
    watcher.watch_modules()
    watcher.watch_modules()
    assert len(modules._global_forward_pre_hooks) == known + 1
    model(torch.ones(2, 3))
    assert watcher.window is not None
    watcher.close()
    assert len(modules._global_forward_pre_hooks) == known
    assert watcher.session.outcome.troubles == 0, watcher.session.outcome.trouble
