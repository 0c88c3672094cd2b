"""The loss and its scale: a backward pass that goes past the scale stops the run, before anything moves."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import stablenum
import stablenum_torch as st
from tests.torch.conftest import parameters, snapshot

PAST_THE_SCALE = "no loss was multiplied by it since the last step"
TWO_SCALES = r"without a GradScaler.*got loss_scale="
Program = Callable[[torch.optim.Optimizer, Callable[[], torch.Tensor]], None]


@pytest.fixture(autouse=True, scope="module")
def gradients_set_by_hand() -> None:
    """The gradients of these tests are those of a loss."""


def plain_backward(opt, loss):
    loss().backward()
    opt.step()


def torch_autograd(opt, loss):
    for group in opt.param_groups:
        for p, g in zip(group["params"], torch.autograd.grad(loss(), group["params"]), strict=True):
            p.grad = g
    opt.step()


def closure_that_scales_nothing(opt, loss):
    def closure():
        opt.zero_grad()
        value = loss()
        value.backward()
        return value

    opt.step(closure)


def outer_scaler(opt, loss):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss()).backward()
    scaler.step(opt)
    scaler.update()


def accelerate(opt, loss):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(opt)
    accelerator.backward(loss())
    prepared.step()


PROGRAMS = [plain_backward, torch_autograd, closure_that_scales_nothing, outer_scaler, accelerate]


def loss_of(params: list[torch.nn.Parameter]) -> Callable[[], torch.Tensor]:
    return lambda: sum((p.float() - 1).square().sum() for p in params)


@pytest.mark.parametrize("scale", [8.0, "dynamic"])
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_backward_pass_past_the_scale_stops_before_anything_moves(program, scale, steps_before):
    params = parameters()
    opt, loss = st.wrap(torch.optim.AdamW(params), loss_scale=scale), loss_of(params)
    for _ in range(steps_before):
        opt.zero_grad()
        opt.backward(loss())
        opt.step()
    opt.zero_grad()
    before, state = snapshot(opt), opt.guard_state_dict()
    with pytest.raises(RuntimeError, match=TWO_SCALES if program is outer_scaler else PAST_THE_SCALE):
        program(opt, loss)
    assert snapshot(opt) == before
    assert opt.guard_state_dict() == state
    opt.zero_grad()
    opt.backward(loss())
    opt.step()
    assert opt.last["applied"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_without_a_scale_any_backward_pass_will_do(program):
    params = parameters()
    opt = st.wrap(torch.optim.AdamW(params))
    before = snapshot(opt)
    program(opt, loss_of(params))
    assert snapshot(opt) != before


@pytest.mark.parametrize("unscaled_before", [False, True])
def test_two_loss_scales_stop_the_first_step(unscaled_before):
    """Their product overflows, and ``GradScaler`` would drop the steps silently, in front of the guard."""
    params = parameters()
    opt, loss = st.wrap(torch.optim.AdamW(params), loss_scale="dynamic"), loss_of(params)
    scaler = torch.amp.GradScaler("cpu")
    before, state = snapshot(opt), opt.guard_state_dict()
    scaler.scale(opt.scale(loss()) * 2.0**100).backward()
    if unscaled_before:
        scaler.unscale_(opt)
    with pytest.raises(RuntimeError, match=TWO_SCALES):
        scaler.step(opt)
    assert snapshot(opt) == before
    assert opt.guard_state_dict() == state
    opt.zero_grad()
    opt.backward(loss())
    opt.step()
    assert opt.last["applied"]


def test_a_gradscaler_that_is_turned_off_is_no_second_scale():
    params = parameters()
    opt, loss = st.wrap(torch.optim.AdamW(params), loss_scale=8.0), loss_of(params)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(opt.scale(loss())).backward()
    scaler.step(opt)
    scaler.update()
    assert opt.last["applied"]


def test_the_scale_counts_for_one_step(path):
    params = parameters()
    opt, loss = st.wrap(torch.optim.SGD(params, lr=0.1), loss_scale=8.0), loss_of(params)
    opt.backward(loss())
    opt.step()
    with pytest.raises(RuntimeError, match=PAST_THE_SCALE):
        opt.step()  # the gradients have been unscaled


@pytest.mark.parametrize("bad", [False, True])
def test_a_skipped_step_counts_as_a_step(path, bad):
    params = parameters()
    opt, loss = st.wrap(torch.optim.SGD(params, lr=0.1), loss_scale=8.0), loss_of(params)
    opt.backward(loss() * (math.nan if bad else 1.0))
    opt.step()
    assert opt.last["applied"] is not bad
    with pytest.raises(RuntimeError, match=PAST_THE_SCALE):
        plain_backward(opt, loss)


def test_gradients_may_be_cleared_between_scale_and_backward():
    params = parameters()
    opt, loss = st.wrap(torch.optim.SGD(params, lr=0.1), loss_scale=8.0), loss_of(params)
    scaled = opt.scale(loss())
    opt.zero_grad()
    scaled.backward()
    opt.step()
    assert opt.last["applied"]


def test_one_loss_for_two_optimizers():
    params = parameters()
    optimizers = [st.wrap(torch.optim.SGD([p], lr=0.1), loss_scale=8.0) for p in params]
    loss = loss_of(params)()
    scaled = [opt.scale(loss) for opt in optimizers]
    scaled[0].backward()
    expected = [p.detach() - 0.1 * 2 * (p.detach() - 1) for p in params]
    for opt in optimizers:
        opt.step()
        assert opt.last["loss"] == pytest.approx(loss.item())
    for p, after in zip(params, expected, strict=True):
        torch.testing.assert_close(p.detach(), after, rtol=1e-5, atol=1e-6)


def test_gradients_older_than_the_guard_may_be_those_of_a_scaled_loss():
    params = parameters()
    (8.0 * loss_of(params)()).backward()
    opt = st.wrap(torch.optim.SGD(params, lr=0.1), loss_scale=8.0)
    opt.step()
    assert opt.last["applied"]


@pytest.mark.parametrize("scale", [8.0, "dynamic"])
def test_distributed_checkpointing_may_step_with_gradients_of_zero(path, scale):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = torch.nn.Linear(3, 2)
    opt = st.wrap(torch.optim.AdamW(model.parameters()), loss_scale=scale)
    assert get_optimizer_state_dict(model, opt)["state"]


def test_gradients_that_are_not_those_of_a_loss(path):
    """The scale itself, without a wait; nothing is recorded as the loss."""
    params = parameters()
    opt = st.wrap(torch.optim.SGD(params, lr=0.5), loss_scale=8.0)
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.ones_like(p) * opt.scale()
    opt.step()
    assert opt.last["applied"]
    assert math.isnan(opt.last["loss"])
    for p, b in zip(params, before, strict=True):
        torch.testing.assert_close(p.detach(), b - 0.5)
    with pytest.raises(RuntimeError, match=PAST_THE_SCALE):
        opt.step()


def test_a_step_without_gradients_needs_no_loss():
    opt = st.wrap(torch.optim.SGD(parameters(), lr=0.1), loss_scale=8.0)
    opt.step()
    assert int(opt.guard_state.step) == 0


CLIPPING_BY_HAND = {
    "norm": lambda params: torch.nn.utils.clip_grad_norm_(params, 0.5),
    "value": lambda params: torch.nn.utils.clip_grad_value_(params, 0.01),
    "nothing": lambda params: None,
    "nan_to_num": lambda params: [p.grad.nan_to_num_(0.0, 1.0, -1.0) for p in params],
}


@pytest.mark.parametrize("clip", CLIPPING_BY_HAND)
@pytest.mark.parametrize("fused", [False, True])
def test_clipping_by_hand_after_unscale_equals_gradscaler(path, clip, fused):
    """One in four batches overflows; GradScaler skips it although clipping by value would hide the inf."""
    ours, theirs = parameters(), parameters()
    scale = stablenum.DynamicLossScale(init_scale=1024.0, growth_interval=3)
    opt = st.wrap(torch.optim.AdamW(ours, lr=0.1, fused=fused), loss_scale=scale)
    peer = torch.optim.AdamW(theirs, lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    for step in range(16):
        factor = math.inf if step % 4 == 1 else 1.0 + step

        def loss(params, factor=factor):
            first, *rest = (((p - 1) ** 2).sum() for p in params)
            # The loss is finite; a factor of inf is met by the gradient alone.
            return sum(rest) + _Times.apply(first, factor)

        for o in (opt, peer):
            o.zero_grad()
        opt.backward(loss(ours))
        opt.unscale_()
        scaler.scale(loss(theirs)).backward()
        scaler.unscale_(peer)
        for p, q in zip(ours, theirs, strict=True):
            assert torch.equal(p.grad, q.grad)
        CLIPPING_BY_HAND[clip](ours)
        CLIPPING_BY_HAND[clip](theirs)
        opt.step()
        scaler.step(peer)
        scaler.update()
        assert opt.last["applied"] is (step % 4 != 1)
        assert opt.loss_scale == scaler.get_scale()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


class _Times(torch.autograd.Function):
    """The identity, whose derivative is a given number."""

    @staticmethod
    def forward(ctx, x, slope):
        ctx.slope = slope
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.slope, None


def test_the_guards_own_rules_see_what_is_left_after_clipping_by_hand(path):
    params = parameters()
    opt, loss = st.wrap(torch.optim.SGD(params, lr=0.1), loss_scale=8.0, clip=0.25), loss_of(params)
    opt.backward(loss())
    opt.unscale_()
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    opt.step()
    assert opt.last["grad_norm"] == pytest.approx(1.0, rel=1e-5)
    assert opt.last["clip_coefficient"] == pytest.approx(0.25, rel=1e-5)


def test_unscale_in_the_wrong_place_raises_and_changes_nothing():
    params = parameters()
    opt, loss = st.wrap(torch.optim.SGD(params, lr=0.1), loss_scale=8.0), loss_of(params)
    with pytest.raises(RuntimeError, match="between the backward pass of a scaled loss and step"):
        opt.unscale_()
    opt.backward(loss())
    opt.unscale_()
    before = [p.grad.clone() for p in params]
    with pytest.raises(RuntimeError, match=r"unscale_\(\) was called twice"):
        opt.unscale_()
    assert all(torch.equal(p.grad, b) for p, b in zip(params, before, strict=True))
    opt.zero_grad()  # the batch is dropped
    opt.backward(loss())
    opt.unscale_()
    opt.step()
    assert opt.last["applied"]


def test_a_loss_that_is_scaled_after_unscale_is_refused(path):
    """The trap: the gradients of the second loss are 8 times too large beside those of the first."""
    params = parameters()
    opt, loss = st.wrap(torch.optim.SGD(params, lr=0.1), loss_scale=8.0), loss_of(params)
    opt.backward(loss())
    opt.unscale_()
    before = [p.grad.clone() for p in params]
    for more in (lambda: opt.backward(loss()), lambda: opt.scale(loss()), opt.scale):
        with pytest.raises(RuntimeError, match=r"a loss was scaled after unscale_\(\)"):
            more()
    assert all(torch.equal(p.grad, b) for p, b in zip(params, before, strict=True))
    opt.step()
    assert opt.last["applied"]


@pytest.mark.parametrize("stepped", [False, True])
def test_a_batch_that_is_dropped_after_unscale_leaves_nothing(path, stepped):
    """The trap: the update of the next batch is multiplied by the loss scale."""
    ends = []
    for dropped in (False, True):
        params = parameters()
        opt, loss = st.wrap(torch.optim.SGD(params, lr=0.1), loss_scale=8.0), loss_of(params)
        if dropped:
            opt.backward(loss())
            opt.unscale_()
            for p in params:
                p.grad = None
            if stepped:
                opt.step()
        opt.backward(loss())
        opt.step()
        ends.append(params)
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_unscale_ignores_parameters_without_a_gradient(path):
    used, unused = parameters()[0], torch.nn.Parameter(torch.ones(2))
    opt = st.wrap(torch.optim.SGD([used, unused], lr=0.1), loss_scale=8.0)
    opt.backward(used.sum())
    opt.unscale_()
    assert torch.equal(used.grad, torch.ones_like(used))
    opt.step()
    assert unused.grad is None
    assert opt.last["applied"]


def test_unscale_raises_on_float16_gradients():
    w = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    opt = st.wrap(torch.optim.SGD([w], lr=0.1), loss_scale=8.0)
    opt.backward(w.float().sum())
    with pytest.raises(ValueError, match="cannot be used on float16 gradients"):
        opt.unscale_()
    assert w.grad.tolist() == [8.0, 8.0]


def test_unscale_without_a_scale_does_nothing():
    params = parameters()
    opt, loss = st.wrap(torch.optim.SGD(params, lr=0.1)), loss_of(params)
    opt.backward(loss())
    before = [p.grad.clone() for p in params]
    opt.unscale_()
    opt.unscale_()
    assert all(torch.equal(p.grad, b) for p, b in zip(params, before, strict=True))


@pytest.mark.parametrize("bad", [False, True])
def test_a_run_of_skips_is_logged_without_a_handler(bad, caplog):
    model = torch.nn.Linear(3, 1)
    opt = st.wrap(torch.optim.SGD(model.parameters(), lr=0.1), names=model)
    for _ in range(100):
        opt.zero_grad()
        opt.backward(model(torch.full((2, 3), math.nan if bad else 1.0)).square().mean())
        opt.step()
    messages = [record.getMessage() for record in caplog.records if record.name == "stablenum"]
    assert [message.split()[0] for message in messages] == (["3", "30"] if bad else [])
    assert all("The loss was not finite, nor were the gradients" in message for message in messages)
