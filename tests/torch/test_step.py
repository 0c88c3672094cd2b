"""The guarded step: skipped entirely, or applied exactly as torch's own functions would."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

import stablenum
import stablenum_torch as st
from tests.torch.conftest import parameters, set_gradients, snapshot

BAD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@pytest.mark.parametrize("bad", BAD)
def test_a_skipped_step_changes_no_bit(make_optimizer, path, bad):
    params = parameters()
    opt = st.wrap(make_optimizer(params), clip=1.0)
    for i in range(3):
        set_gradients(params, i)
        opt.step()
    before = snapshot(opt)
    set_gradients(params, 3)
    params[1].grad[2] = BAD[bad]
    opt.step()
    assert snapshot(opt) == before
    assert opt.last["applied"] is False
    assert opt.last["worst"] == (1, "param_groups[0].params[1]")
    set_gradients(params, 4)
    opt.step()
    assert snapshot(opt) != before


@pytest.mark.parametrize("scaled", [False, True])
def test_bad_steps_leave_no_mark_on_the_result_of_a_run(make_optimizer, path, scaled):
    bad_steps = {0, 3, 4, 7}

    def run(with_bad: bool) -> list[bytes]:
        params = parameters()
        settings = {"clip": 0.7} | ({"loss_scale": 8.0} if scaled else {})
        opt = st.wrap(make_optimizer(params), **settings)
        for i in range(10):
            if i in bad_steps and not with_bad:
                continue
            set_gradients(params, i, 8.0 if scaled else 1.0)
            if i in bad_steps:
                params[i % 3].grad.view(-1)[0] = math.nan
            opt.step()
        assert opt.last["skipped_total"] == (len(bad_steps) if with_bad else 0)
        return snapshot(opt)

    assert run(True) == run(False)


def test_clipping_by_global_norm_equals_torchs_own(make_optimizer, path):
    ours, theirs = parameters(), parameters()
    opt, peer = st.wrap(make_optimizer(ours), clip=0.5), make_optimizer(theirs)
    for i in range(20):
        set_gradients(ours, i)
        set_gradients(theirs, i)
        opt.step()
        norm = torch.nn.utils.clip_grad_norm_(theirs, 0.5)
        peer.step()
        assert opt.last["grad_norm"] == pytest.approx(norm.item(), rel=1e-6)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_clipping_by_value_equals_torchs_own(make_optimizer, path):
    ours, theirs = parameters(), parameters()
    opt = st.wrap(make_optimizer(ours), clip=stablenum.ClipByValue(0.3), loss_scale=4.0)
    peer = make_optimizer(theirs)
    for i in range(5):
        set_gradients(ours, i, 4.0)
        set_gradients(theirs, i)
        opt.step()
        torch.nn.utils.clip_grad_value_(theirs, 0.3)
        peer.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_clipping_each_tensor_by_its_own_norm(path):
    params = parameters()
    opt = st.wrap(torch.optim.SGD(params, lr=1.0), clip=stablenum.ClipByNorm(0.5), loss_scale=2.0)
    before = [p.detach().clone() for p in params]
    params[0].grad = torch.full_like(params[0], 10.0)
    params[2].grad = torch.full_like(params[2], 0.02)
    opt.step()
    assert (before[0] - params[0]).norm().item() == pytest.approx(0.5, rel=1e-5)
    assert torch.equal(before[1], params[1].detach())  # it had no gradient
    torch.testing.assert_close(before[2] - params[2], torch.full_like(params[2], 0.01), rtol=1e-4, atol=0)


def test_loss_scaling_gives_the_unscaled_step(make_optimizer, path):
    def run(**settings):
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        with torch.no_grad():
            for p, q in zip(model.parameters(), parameters() + parameters(1), strict=False):
                p.copy_(q.flatten().repeat(8)[: p.numel()].view_as(p))
        opt = st.wrap(make_optimizer(model.parameters()), **settings)
        x = torch.linspace(-1, 1, 12).view(3, 4)
        for _ in range(5):
            opt.zero_grad()
            opt.backward(model(x).square().mean())
            opt.step()
        return snapshot(opt), opt

    scaled, opt = run(loss_scale=2.0**10)
    plain, _ = run()
    assert scaled == plain, "a power of two costs no bit"
    assert opt.loss_scale == 1024.0
    assert opt.last["loss"] == pytest.approx(float(opt.last["loss"]))
    assert opt.last["loss_scale"] == 1024.0


def test_defaults_change_nothing_but_skipping(make_optimizer, path):
    ours, theirs = parameters(), parameters()
    opt, peer = st.wrap(make_optimizer(ours)), make_optimizer(theirs)
    for i in range(5):
        set_gradients(ours, i, 1e3)
        set_gradients(theirs, i, 1e3)
        opt.step()
        peer.step()
    assert snapshot(opt) == snapshot(peer)
    assert opt.loss_scale == 1.0


def test_the_scale_follows_overflows_and_good_steps(path):
    params = parameters()
    rule = stablenum.DynamicLossScale(init_scale=16.0, growth_interval=3)
    opt = st.wrap(torch.optim.SGD(params, lr=0.1, fused=True), loss_scale=rule)
    seen = []
    for i in range(8):
        set_gradients(params, i)
        if i == 1:
            params[0].grad[0, 0] = math.inf
        opt.step()
        seen.append(opt.loss_scale)
    assert seen == [16, 8, 8, 8, 16, 16, 16, 32]
    assert [row["loss_scale"] for row in opt.history()] == [16, 16, 8, 8, 8, 16, 16, 16]
    assert opt.history()[1]["reason"] is stablenum.Reason.INF_GRADIENT


def test_a_non_finite_loss_skips_and_leaves_the_scale(path):
    params = parameters()
    opt = st.wrap(torch.optim.SGD(params, lr=0.1), loss_scale="dynamic")
    opt.scale(torch.tensor(math.nan))
    set_gradients(params, 0)
    before = snapshot(opt)
    opt.step()
    assert snapshot(opt) == before
    assert opt.last["reason"] is stablenum.Reason.NONFINITE_LOSS
    assert opt.loss_scale == 65536.0
    set_gradients(params, 1)
    opt.step()
    assert opt.last["applied"], "the loss of a step does not outlive it"


def test_gradient_accumulation_adds_the_losses(path):
    w = torch.nn.Parameter(torch.tensor([1.0]))
    opt = st.wrap(torch.optim.SGD([w], lr=0.5), loss_scale=4.0)
    for x in (1.0, 2.0):
        opt.backward((w * x).sum() / 2)
    opt.step()
    assert opt.last["loss"] == pytest.approx(1.5)
    assert opt.last["grad_norm"] == pytest.approx(1.5)
    assert w.item() == pytest.approx(1 - 0.5 * 1.5)


def test_several_param_groups_keep_their_own_settings(path):
    a, b = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    opt = st.wrap(torch.optim.SGD([{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.01}]), clip=1.0)
    a.grad, b.grad = torch.full((2,), 3.0), torch.full((2,), 4.0)
    opt.step()
    total = math.sqrt(2 * 9 + 2 * 16)
    torch.testing.assert_close(a.detach(), torch.full((2,), 1 - 0.1 * 3 / total))
    torch.testing.assert_close(b.detach(), torch.full((2,), 1 - 0.01 * 4 / total))


def test_sparse_gradients(path):
    table = torch.nn.Embedding(5, 2, sparse=True)
    with torch.no_grad():
        table.weight.fill_(1.0)
    opt = st.wrap(torch.optim.SGD(table.parameters(), lr=1.0), clip=1.0, loss_scale=2.0)
    opt.backward((table(torch.tensor([1, 1, 3])) * 3.0).sum())
    opt.step()
    norm = math.sqrt(2 * 6.0**2 + 2 * 3.0**2)
    assert opt.last["grad_norm"] == pytest.approx(norm, rel=1e-6)
    expected = torch.ones(5, 2)
    expected[1] -= 6 / norm
    expected[3] -= 3 / norm
    torch.testing.assert_close(table.weight.detach(), expected)
    opt.zero_grad()
    before = table.weight.detach().clone()
    (table(torch.tensor([0])) * math.inf).sum().backward()
    opt.step()
    assert torch.equal(table.weight.detach(), before)


def test_sparse_adam_and_clip_by_value(path):
    table = torch.nn.Embedding(4, 3, sparse=True)
    opt = st.wrap(torch.optim.SparseAdam(table.parameters(), lr=0.1), clip=stablenum.ClipByValue(0.5))
    table(torch.tensor([2, 2])).sum().backward()
    opt.step()
    assert opt.last["applied"]
    assert torch.equal(table.weight.grad.coalesce().values(), torch.full((1, 3), 0.5))


def test_complex_gradients(path):
    w = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    opt = st.wrap(torch.optim.SGD([w], lr=1.0), clip=1.0)
    w.grad = torch.full((3,), 3 + 4j, dtype=torch.complex64)
    opt.step()
    assert opt.last["grad_norm"] == pytest.approx(5 * math.sqrt(3), rel=1e-6)
    assert w.detach().abs().square().sum().item() == pytest.approx(1.0, rel=1e-5)
    w.grad = torch.tensor([complex(1, math.nan), 0, 0], dtype=torch.complex64)
    opt.step()
    assert opt.last["reason"] is stablenum.Reason.NAN_GRADIENT


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.filterwarnings("ignore:The fused SGD of torch")  # which is right about parameters of this size
def test_other_float_formats(path, dtype, fused):
    params = parameters(dtype=dtype)
    opt = st.wrap(torch.optim.SGD(params, lr=0.1, fused=fused), clip=1.0)
    before = [p.detach().double() for p in params]
    set_gradients(params, 0, 10.0)
    exact = math.sqrt(sum(p.grad.double().square().sum().item() for p in params))
    wanted = [b - 0.1 * p.grad.double() / exact for b, p in zip(before, params, strict=True)]
    opt.step()
    assert opt.last["grad_norm"] == pytest.approx(exact, rel=1e-6)
    for w, p in zip(wanted, params, strict=True):
        torch.testing.assert_close(
            p.detach().double(),
            w,
            rtol=2 * torch.finfo(dtype).eps,
            atol=1e-3 if dtype != torch.float64 else 1e-6,
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_fused_kernel_that_leaves_elements_unmoved_is_reported(dtype, momentum):
    """torch 2.13's SGD does, with 16-bit parameters on a CPU."""
    p = torch.nn.Parameter(torch.ones(40, dtype=dtype))
    inner = torch.optim.SGD([p], lr=0.5, momentum=momentum, fused=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt = st.wrap(inner)
    p.grad = torch.ones_like(p)
    opt.step()
    reports = [str(w.message) for w in caught if w.filename == __file__]
    assert len(reports) == int(not (p != 1).all())
    assert all(f"{str(dtype)[6:]} parameters" in text and "fused=False" in text for text in reports)


def test_a_group_that_a_fused_kernel_leaves_unmoved_is_reported_when_it_is_added():
    opt = st.wrap(torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.5, fused=True))
    added = torch.nn.Parameter(torch.ones(40, dtype=torch.bfloat16))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt.add_param_group({"params": [added]})
    added.grad = torch.ones_like(added)
    opt.step()
    reports = [str(w.message) for w in caught if w.filename == __file__]
    assert len(reports) == int(not (added != 1).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["unfused", "masters", "adamw", "adagrad"])
def test_optimizers_that_move_all_elements_of_16_bit_parameters(dtype, kind):
    p = torch.nn.Parameter(torch.ones(40, dtype=dtype))
    inner = {
        "unfused": lambda: torch.optim.SGD([p], lr=0.5),
        "masters": lambda: st.MasterWeights([p], lambda g: torch.optim.SGD(g, lr=0.5, fused=True)),
        "adamw": lambda: torch.optim.AdamW([p], lr=0.5, fused=True),
        "adagrad": lambda: torch.optim.Adagrad([p], lr=0.5, fused=True),
    }[kind]()
    opt = st.wrap(inner)  # a warning is an error here
    p.grad = torch.ones_like(p)
    opt.step()
    assert (p != 1).all()


def test_closure_runs_once_with_gradients_and_its_loss_is_seen(path):
    w = torch.nn.Parameter(torch.tensor(2.0))
    opt = st.wrap(torch.optim.SGD([w], lr=0.25), loss_scale=8.0)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        opt.zero_grad()
        loss = w * w
        opt.backward(loss)
        return loss

    assert opt.step(closure).item() == 4.0
    assert calls == [True]
    assert w.item() == pytest.approx(2 - 0.25 * 4)
    assert opt.last["loss"] == 4.0

    def plain_closure():
        opt.zero_grad()
        loss = 8.0 * w * math.nan
        loss.backward()
        return loss

    opt.step(plain_closure)
    assert w.item() == pytest.approx(1.0)
    assert opt.last["reason"] is stablenum.Reason.NONFINITE_LOSS


def test_the_losses_that_a_closure_scales_add_up(path):
    w = torch.nn.Parameter(torch.tensor(2.0))
    opt = st.wrap(torch.optim.SGD([w], lr=0.25), loss_scale=8.0)

    def closure():
        opt.zero_grad()
        for share in (1.0, 3.0):
            loss = share * w
            opt.backward(loss)
        return loss

    assert opt.step(closure).item() == 6.0
    assert opt.last["loss"] == 8.0


def test_channels_last_gradients_are_measured_exactly(path):
    conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    opt = st.wrap(torch.optim.AdamW(conv.parameters(), fused=True), clip=1e-3)
    conv(torch.ones(2, 3, 8, 8).to(memory_format=torch.channels_last)).square().sum().backward()
    exact = math.sqrt(sum(p.grad.double().square().sum().item() for p in conv.parameters()))
    opt.step()
    assert opt.last["grad_norm"] == pytest.approx(exact, rel=1e-6)


def test_halting_stops_before_the_step_and_can_be_resumed(path):
    params = parameters()
    opt = st.wrap(
        torch.optim.SGD(params, lr=0.1),
        max_skips_in_a_row=2,
        loss_scale="dynamic",
        names=[("a", params[0]), ("b", params[1]), ("c", params[2])],
    )
    before = snapshot(opt)
    for i in range(2):
        set_gradients(params, i)
        params[1].grad[0] = math.inf
        if i == 0:
            opt.step()
    with pytest.raises(
        stablenum.NonFiniteError,
        match=r"2 step\(s\) in a row.*limit is 2.*from step 0.*First bad parameter: b.*Remedy.*65536, 32768",
    ):
        opt.step()
    assert snapshot(opt) == before
    set_gradients(params, 5)
    opt.step()
    assert opt.last["applied"], "the error was seen by the host; going on is its decision"


def test_on_nonfinite_raise(path):
    params = parameters()
    opt = st.wrap(
        torch.optim.AdamW(params, fused=True),
        on_nonfinite="raise",
        names=dict(zip("abc", params, strict=True)),
    )
    set_gradients(params, 0)
    opt.step()
    set_gradients(params, 1)
    params[2].grad[0, 0, 0] = math.nan
    before = snapshot(opt)
    with pytest.raises(stablenum.NonFiniteError, match="First bad parameter: c") as caught:
        opt.step()
    assert snapshot(opt) == before
    assert caught.value.metrics["reason"] is stablenum.Reason.NAN_GRADIENT


def test_an_error_in_the_inner_step_leaves_the_guard_unchanged(path):
    params = parameters()
    inner = torch.optim.AdamW(params, fused=True)
    opt = st.wrap(inner, loss_scale="dynamic")
    state = opt.guard_state_dict()

    def fail(*_):
        raise RuntimeError("disk full")

    handle = inner.register_step_pre_hook(fail)
    set_gradients(params, 0)
    with pytest.raises(RuntimeError, match="disk full"):
        opt.step()
    assert opt.guard_state_dict() == state
    assert not hasattr(inner, "grad_scale")
    assert not hasattr(inner, "found_inf")
    handle.remove()
    set_gradients(params, 0, 65536.0)
    opt.step()
    assert opt.last["applied"]


def test_autocast_follows_the_loss_scale():
    w = torch.nn.Linear(4, 4)
    x = torch.ones(2, 4)
    with st.wrap(torch.optim.SGD(w.parameters(), lr=0.1), loss_scale="dynamic").autocast():
        assert w(x).dtype == torch.float16
    with st.wrap(torch.optim.SGD(w.parameters(), lr=0.1)).autocast():
        assert w(x).dtype == torch.bfloat16
    with st.wrap(torch.optim.SGD(w.parameters(), lr=0.1)).autocast(torch.float16):
        assert w(x).dtype == torch.float16


def test_model_moved_or_cast_after_wrapping_keeps_the_guard():
    model = torch.nn.Linear(2, 2)
    opt = st.wrap(torch.optim.SGD(model.parameters(), lr=0.1), clip=1.0)
    model.double()
    model(torch.ones(1, 2).double()).sum().backward()
    opt.step()
    assert opt.last["applied"]
