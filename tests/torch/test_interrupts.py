"""An exception at any line of a step (Ctrl-C) leaves the state of before it or of after it, never a mixture.

Not covered, because no Python code can promise it: an exception inside the inner optimizer's own step.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stablenum
import stablenum_torch as st
from tests.injection import InterruptError, executed_lines, first_and_last, interrupted_at, some

Optimizer = torch.optim.Optimizer

INNER: dict[str, Callable[[Any], Optimizer]] = {
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "foreach": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
}
CLIPS: dict[str, Any] = {
    "global": 0.5,
    "update": (0.5, stablenum.ClipUpdateRMS(0.2)),
    "several": (stablenum.ClipByNorm(0.4), stablenum.ClipByValue(0.05)),
    "each": stablenum.AdaGC(warmup_steps=2),
    "units": stablenum.AdaptiveGradClip(clipping=0.05, output_axis="first"),
}
WARM_UP = 3


class Training:
    """A guarded optimizer with everything in it that a step changes."""

    def __init__(self, inner: str, clip: str) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.opt = st.wrap(
            INNER[inner](self.net.parameters()),
            names=self.net,
            clip=CLIPS[clip],
            loss_scale=stablenum.DynamicLossScale(init_scale=8.0, growth_interval=2),
            spike=stablenum.SpikeGuard(window=4, min_samples=2, threshold=1000.0),
            buffers=self.net,
        )
        for number in range(WARM_UP):
            self.backward(number)
            self.opt.step()

    def backward(self, number: int, *, bad: bool = False, unscale: bool = False) -> None:
        self.opt.zero_grad()
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(number))
        self.opt.backward(self.net(x * math.nan if bad else x).square().mean())
        if unscale:
            self.opt.unscale_()

    def state(self) -> dict[str, Any]:
        """All that a step changes, apart from gradients."""
        found = self.opt.state_dict()
        return {
            "guard": repr(found.pop("stablenum")),
            "parameters": [bits(p) for p in self.net.parameters()],
            "buffers": [bits(b) for b in self.net.buffers()],
            "optimizer": {k: {n: bits(v) for n, v in s.items()} for k, s in found["state"].items()},
            "factors": [hasattr(self.opt.inner, name) for name in ("grad_scale", "found_inf")],
        }


def bits(x: Any) -> Any:
    return x.detach().numpy().tobytes() if isinstance(x, Tensor) else x


def check_every_line(make: Callable[[], Training], act: Callable[[Training], Any], most: int | None) -> None:
    """Interrupt ``act`` at its lines (``most`` of them), each time from the same beginning; then go on.

    Each line is interrupted when it runs for the first time and for the last: by an exception or a signal.
    """

    def next_step(training: Training) -> dict[str, Any]:
        training.backward(100)
        training.opt.step()
        return training.state()

    training = make()
    before = training.state()
    after_neither = next_step(training)
    training = make()
    lines = executed_lines(lambda: act(training))
    after = training.state()
    after_both = next_step(training)
    assert before != after
    numbers = first_and_last(lines)
    for i, number in enumerate(numbers if most is None else some(numbers, most)):
        training = make()
        error = InterruptError if i % 2 else KeyboardInterrupt
        place = interrupted_at(number, functools.partial(act, training), error)
        assert place is not None, number
        found = training.state()
        assert found in (before, after), (place, [k for k in found if found[k] != after[k]])
        assert next_step(training) == (after_neither if found == before else after_both), place


MOST = [pytest.param(16, id="some"), pytest.param(None, id="every", marks=pytest.mark.slow)]
CASES = [("fused", "global", False), ("fused", "global", True), ("foreach", "update", False)]
MORE = [("foreach", "several", True), ("fused", "update", False), ("foreach", "units", False)]


@pytest.mark.parametrize("most", MOST)
@pytest.mark.parametrize(
    ("inner", "clip", "bad"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
def test_an_interrupted_step_was_taken_whole_or_not_at_all(path, inner, clip, bad, most):
    def make() -> Training:
        training = Training(inner, clip)
        training.backward(50, bad=bad)
        return training

    check_every_line(make, lambda training: training.opt.step(), most)


@pytest.mark.parametrize("most", MOST)
def test_a_step_after_unscale(path, most):
    def make() -> Training:
        training = Training("fused", "global")
        training.backward(50, unscale=True)
        return training

    check_every_line(make, lambda training: training.opt.step(), most)


def trained() -> Training:
    """A training of which one step has been skipped."""
    other = Training("fused", "global")
    other.backward(7, bad=True)
    other.opt.step()
    return other


@pytest.mark.parametrize("most", MOST)
def test_a_checkpoint_is_loaded_whole_or_not_at_all(most):
    saved = trained().opt.state_dict()

    def load(training: Training) -> None:
        training.opt.load_state_dict(copy.deepcopy(saved))  # torch goes on with the tensors that it is given

    check_every_line(lambda: Training("fused", "global"), load, most)


@pytest.mark.parametrize("most", MOST)
def test_the_guards_own_checkpoint_is_loaded_whole_or_not_at_all(most):
    saved = trained().opt.guard_state_dict()

    def load(training: Training) -> None:
        training.opt.load_guard_state_dict(saved)

    # Most lines read the state; those that write it are the last.
    lines = executed_lines(functools.partial(load, Training("fused", "global")))
    whole = Training("fused", "global")
    before = whole.state()
    load(whole)
    for number in range(len(lines) - 40, len(lines)) if most is not None else first_and_last(lines):
        training = Training("fused", "global")
        assert interrupted_at(number, functools.partial(load, training)) is not None
        assert training.state() in (before, whole.state()), lines[number]


@pytest.mark.parametrize("most", MOST)
def test_settings_are_replaced_whole_or_not_at_all(most):
    def replace(training: Training) -> None:
        training.opt.config = stablenum.GuardConfig(clip=1.0, loss_scale=4.0)

    def state(training: Training) -> Any:
        return training.opt.config, training.state()

    lines = executed_lines(functools.partial(replace, Training("fused", "global")))
    whole = Training("fused", "global")
    before = state(whole)
    replace(whole)
    ends = [i for i, (file, _) in enumerate(lines) if file.endswith("_step/guard.py")][-20:]
    for number in ends if most is not None else first_and_last(lines):
        training = Training("fused", "global")
        assert interrupted_at(number, functools.partial(replace, training)) is not None
        assert state(training) in (before, state(whole)), lines[number]


@pytest.mark.parametrize("most", MOST)
@pytest.mark.parametrize("kind", [st.MasterWeights, st.KahanUpdate])
@pytest.mark.parametrize("guarded", [True, False])
def test_an_interrupted_step_of_16_bit_parameters_leaves_them_with_their_copies(kind, guarded, most):
    def make() -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).bfloat16()
        opt = kind(net.parameters(), lambda params: torch.optim.AdamW(params, lr=0.01))
        used = st.wrap(opt, clip=0.5) if guarded else opt
        for number in range(3):
            if number:
                used.step()
            used.zero_grad()
            net(torch.full((2, 3), 1.0 + number, dtype=torch.bfloat16)).square().mean().backward()
        return net, opt, used

    def found(net: Any, opt: Any) -> Any:
        values = [(bits(p.float()), bits(opt.wide_value(p).clone())) for p in net.parameters()]
        grads = [wide.grad is None for p, wide in opt._copies.items()]
        return values, {k: bits(v) for s in opt.state.values() for k, v in s.items()}, grads

    net, opt, used = make()
    before = found(net, opt)
    lines = executed_lines(lambda: used.step())
    after = found(net, opt)
    numbers = [i for i in first_and_last(lines) if lines[i][0].endswith(("_copies.py", "weights.py"))]
    for number in numbers if most is None else some(numbers, most):
        net, opt, used = make()
        assert interrupted_at(number, lambda used=used: used.step()) is not None
        seen = found(net, opt)
        assert seen[:2] in (before[:2], after[:2]), lines[number]
        assert guarded or all(seen[2]), lines[number]


@pytest.mark.parametrize("most", MOST)
def test_a_new_parameter_group_enlarges_the_state_at_once_or_later(most):
    def add(training: Training) -> None:
        training.opt.add_param_group({"params": [nn.Parameter(torch.ones(2))]})

    def result(number: int | None) -> dict[str, Any]:
        training = Training("foreach", "each")
        if number is not None:
            assert interrupted_at(number, functools.partial(add, training)) is not None
        if len(training.opt.param_groups) == 1:
            add(training)
        training.backward(60)
        training.opt.step()
        return training.state()

    lines = executed_lines(functools.partial(add, Training("foreach", "each")))
    whole = result(None)
    numbers = first_and_last(lines)
    for number in numbers if most is None else some(numbers, most):
        assert result(number) == whole, lines[number]


def test_a_halted_guard_still_raises_after_an_interrupt(path):
    """Between the step that halts and its error, an interrupt delays the error to the next step."""

    def make() -> Any:
        w = nn.Parameter(torch.ones(2))
        opt = st.wrap(torch.optim.SGD([w], lr=0.1), on_nonfinite="raise")
        w.grad = torch.full((2,), math.nan)
        return w, opt

    def act(opt: Any) -> None:
        with pytest.raises(stablenum.NonFiniteError):
            opt.step()

    lines = executed_lines(functools.partial(act, make()[1]))
    for number in some(first_and_last(lines), 30):
        w, opt = make()
        assert interrupted_at(number, functools.partial(act, opt)) is not None
        assert torch.equal(w.detach(), torch.ones(2))
        w.grad = torch.full((2,), math.nan)
        act(opt)


def autocast_nesting() -> int:
    """How many contexts of autocast are entered: in one too many, casts of weights are kept for good."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


@pytest.mark.parametrize("most", MOST)
def test_a_range_report_restores_the_model(most):
    training = Training("fused", "global")
    training.backward(50)
    x = torch.ones(8, 3)

    def call() -> None:
        st.range_report(training.net, x, loss_fn=lambda net, x: net(x).square().mean())

    def found() -> Any:
        tables = [[id(t) for t in m._parameters.values()] for m in training.net.modules()]
        hooks = [len(m._forward_hooks) for m in training.net.modules()]
        grads = [(p.grad.data_ptr(), p.data_ptr()) for p in training.net.parameters()]
        modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), autocast_nesting()
        return training.state(), tables, hooks, grads, modes

    call()  # the first call fills caches
    before, lines = found(), executed_lines(call)
    last = sorted({line: i for i, line in enumerate(lines)}.values())
    ends = [i for i in range(len(lines)) if lines[i][0].endswith("_diagnosis/ranges.py")][-150:]
    for number in sorted({*last, *ends} if most is None else {*some(last, 3), *some(ends, most)}):
        assert interrupted_at(number, call) is not None
        assert found() == before, lines[number]
