"""Cases in which a peer fails, shown on the peer where that is cheap, and handled by the guard."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import stablenum
import stablenum_torch as st
from stablenum_torch._devices.fused_optimizers import _moves_same, forgets_elements
from tests.torch.conftest import parameters, set_gradients, snapshot


def test_the_scale_does_not_collapse_after_200_bad_steps(path):
    w = torch.nn.Parameter(torch.ones(3))
    opt = st.wrap(torch.optim.SGD([w], lr=0.1, fused=True), loss_scale="dynamic")
    for _ in range(200):
        w.grad = torch.full((3,), math.inf)
        opt.step()
    assert opt.loss_scale == 1.0
    w.grad = torch.ones(3)
    opt.step()
    torch.testing.assert_close(w.detach(), torch.full((3,), 0.9))


def test_the_scale_of_gradscaler_collapses():
    w = torch.nn.Parameter(torch.ones(3))
    peer, scaler = torch.optim.SGD([w], lr=0.1, fused=True), torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    for _ in range(200):
        w.grad = torch.full((3,), math.inf)
        scaler.step(peer)
        scaler.update()
    assert scaler.get_scale() == 0.0, "the peer's scale has no floor"


def test_first_step_of_fused_sgd_with_momentum_skipped(path):
    params = parameters()
    opt = st.wrap(torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True))
    set_gradients(params, 0)
    params[0].grad[0, 0] = math.nan
    # An uninitialised buffer would show the large numbers of this freed memory.
    junk = [torch.full_like(p, 1e36) for p in params for _ in range(50)]
    del junk
    opt.step()
    set_gradients(params, 1)
    before = [p.detach().clone() for p in params]
    opt.step()
    for b, p in zip(before, params, strict=True):
        torch.testing.assert_close(b - 0.1 * p.grad, p.detach())


def test_found_inf_is_exactly_zero_or_one(monkeypatch, path):
    seen = []
    inner = torch.optim.AdamW(parameters(), fused=True)

    def look(optimizer, *_):
        flag = getattr(optimizer, "found_inf", None)
        if flag is not None:
            seen.append((flag.item(), flag.shape, flag.dtype))

    inner.register_step_pre_hook(look)
    opt = st.wrap(inner, clip=1.0)
    params = opt.param_groups[0]["params"]
    for i in range(3):
        set_gradients(params, i)
        if i == 1:
            for p in params:  # several bad tensors still give a flag of 1.
                p.grad.fill_(math.inf)
        opt.step()
    wanted = {"host": [], "device": [0.0, 1.0, 0.0]}[path]
    assert seen == [(value, torch.Size(()), torch.float32) for value in wanted]


@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.float16, 6e4), (torch.float32, 1e20), (torch.float32, 3e38)]
)
def test_large_finite_gradients_are_clipped_not_zeroed(dtype, value, path):
    w = torch.nn.Parameter(torch.zeros(100, dtype=dtype))
    opt = st.wrap(torch.optim.SGD([w], lr=1.0), clip=1.0)
    w.grad = torch.full((100,), value, dtype=dtype)
    opt.step()
    assert opt.last["applied"]
    wanted = min(float(w.new_tensor(value)) * 10, torch.finfo(torch.float32).max)
    assert opt.last["grad_norm"] == pytest.approx(wanted, rel=1e-3)
    # Beyond float32 the norm saturates: the step is then longer than the limit, never zero or inf.
    assert 0.9 < w.detach().float().norm().item() < (50 if value > 1e38 else 1.01)


def test_large_finite_gradients_are_zeroed_by_torchs_clip():
    w = torch.nn.Parameter(torch.zeros(100))
    w.grad = torch.full((100,), 1e20)
    torch.nn.utils.clip_grad_norm_([w], 1.0)
    assert not w.grad.any(), "the peer zeroes finite gradients"


def test_tiny_gradients_have_a_norm(path):
    w = torch.nn.Parameter(torch.zeros(4))
    opt = st.wrap(torch.optim.SGD([w], lr=1.0), clip=1.0)
    w.grad = torch.full((4,), 1e-30)
    opt.step()
    assert opt.last["grad_norm"] == pytest.approx(2e-30, rel=1e-6)
    w.grad = torch.zeros(4)
    opt.step()
    assert opt.last["grad_norm"] == 0.0
    assert opt.last["applied"]


@pytest.mark.parametrize("fused", [True, False])
def test_a_guarded_step_under_an_outer_gradscaler(fused):
    ours, theirs = parameters(), parameters()
    opt = st.wrap(torch.optim.AdamW(ours, lr=0.01, fused=fused), clip=1e6)
    peer = torch.optim.AdamW(theirs, lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(torch.ones(()))
    for i in range(6):
        set_gradients(ours, i, 256.0)
        set_gradients(theirs, i)
        if i == 3:
            ours[0].grad[0, 0] = math.inf
        scaler.step(opt)
        scaler.update(256.0)
        if i != 3:
            peer.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_a_positional_closure_is_guarded_like_any_step(path):
    w = torch.nn.Parameter(torch.tensor(1.0))
    opt = st.wrap(torch.optim.SGD([w], lr=0.1), loss_scale=1024.0)

    def closure():
        opt.zero_grad()
        opt.backward(3 * w)
        return 3 * w

    opt.step(closure)
    assert w.item() == pytest.approx(0.7), "on unscaled gradients"


def test_wrapping_lbfgs_raises():
    with pytest.raises(TypeError, match=r"LBFGS cannot be guarded.*closure"):
        st.wrap(torch.optim.LBFGS(parameters()))


def test_an_inf_gradient_that_detect_anomaly_lets_pass(path):
    w = torch.nn.Parameter(torch.tensor([0.0, 4.0]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # anomaly mode warns that it is on
        with torch.autograd.detect_anomaly():
            w.sqrt().sum().backward()  # d sqrt(0) = inf, unnoticed
    opt = st.wrap(torch.optim.SGD([w], lr=0.1))
    opt.step()
    assert opt.last["reason"] is stablenum.Reason.INF_GRADIENT
    assert w.tolist() == [0.0, 4.0]


def test_pickling_and_copying_in_the_middle_of_an_iteration(path):
    params = parameters()
    opt = st.wrap(
        torch.optim.AdamW(params, fused=True), loss_scale="dynamic", clip=1.0, names={"w": params[0]}
    )
    set_gradients(params, 0)
    params[0].grad[0, 0] = math.inf
    opt.step()  # an overflow
    opt.scale(torch.tensor(1.0))  # and the next iteration has begun
    for twin in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        assert twin.guard_state_dict() == opt.guard_state_dict()
        assert twin.loss_scale == 32768.0
        assert twin.last["worst"].name == "w"
        twins = twin.param_groups[0]["params"]
        assert twins[0] is not params[0]
        before = snapshot(opt)
        for i in range(3):
            set_gradients(twins, i, 32768.0)
            twin.step()
        assert snapshot(opt) == before, "the copy shares nothing with the original"
        assert twin.last["step"] == 3
        assert opt.last["step"] == 0


def test_a_group_that_is_refused_is_not_added():
    params = parameters()
    opt = st.wrap(torch.optim.SGD(params[:1], lr=0.1))
    with pytest.raises(ValueError, match="meta device"):
        opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(3, device="meta"))]})
    assert len(opt.param_groups) == len(opt.inner.param_groups) == 1
    set_gradients(params[:1], 0)
    opt.step()
    assert opt.last["applied"]


@pytest.mark.parametrize("cast", ["before it is wrapped", "after it is wrapped"])
def test_a_fused_kernel_that_moves_only_some_elements_is_warned_of(cast):
    net = torch.nn.Linear(64, 4)
    if cast == "before it is wrapped":
        net.bfloat16()
    inner = torch.optim.SGD(net.parameters(), lr=0.5, fused=True)
    if forgets_elements(torch.optim.SGD(net.bfloat16().parameters(), fused=True)) is None:
        pytest.skip("the fused SGD of this version of torch moves all elements")
    if cast == "after it is wrapped":
        net.float()

    def train() -> None:
        opt = st.wrap(inner)
        opt.backward(net.bfloat16()(torch.ones(2, 64, dtype=torch.bfloat16)).float().square().mean())
        opt.step()

    with pytest.warns(UserWarning, match="does not move all elements of bfloat16") as warned:
        train()
    assert len(warned) == 1


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_trap_fused_kernels_move_wrong_elements_where_strides_differ(kind):
    w = torch.nn.Parameter(torch.zeros(8, 8))
    opt = st.wrap(getattr(torch.optim, kind)([w], lr=0.1, fused=True), names=[("w", w)])
    if _moves_same(kind):
        pytest.skip("the fused kernels of this version of torch follow the strides")
    w.grad = torch.arange(64.0).view(8, 8).t()
    with pytest.warns(UserWarning, match=r"gradient of w has other strides .*\(1, 8\) instead of \(8, 1\)"):
        opt.step()
    opt.step()  # said once
    w.grad = None
    for fused, strides in ((False, (1, 8)), (True, (8, 1))):
        quiet = st.wrap(getattr(torch.optim, kind)([w], lr=0.1, fused=fused))
        w.grad = torch.zeros(8, 8).as_strided((8, 8), strides)
        quiet.step()
        w.grad = None


@pytest.mark.filterwarnings("ignore:.*has other strides")
def test_how_kernels_move_elements_is_tried_on_a_cpu_whatever_the_default_device():
    w = torch.nn.Parameter(torch.zeros(4, 3))
    opt = st.wrap(torch.optim.AdamW([w], lr=0.1, fused=True))
    w.grad = torch.ones(3, 4).t()
    _moves_same.cache_clear()
    with torch.device("meta"):
        opt.step()
    assert w.detach().abs().min() > 0


@pytest.mark.parametrize("result", ["0.5", b"0.5", {"loss": 1.0}, (torch.ones(()),)], ids=type)
def test_a_closure_that_returns_no_loss_is_refused(result):
    w = torch.nn.Parameter(torch.ones(2))
    opt = st.wrap(torch.optim.SGD([w], lr=0.1))

    def closure():
        w.grad = torch.ones(2)
        return result

    with pytest.raises(TypeError, match=rf"closure's result must be .*; got {type(result).__name__}"):
        opt.step(closure)
    assert w.tolist() == [1.0, 1.0]
    if isinstance(result, (dict, tuple)):  # passed on where the guard knows the loss

        def calls_backward():
            opt.backward(w.sum())
            return result

        assert opt.step(calls_backward) is result


def test_add_param_group_reaches_the_guard_and_the_inner_optimizer(path):
    params = parameters()
    inner = torch.optim.SGD(params[:1], lr=0.1)
    opt = st.wrap(inner, clip=1.0)
    opt.add_param_group({"params": params[1:2], "lr": 0.5})
    inner.add_param_group({"params": params[2:]})
    assert opt.param_groups is inner.param_groups
    assert opt.state is inner.state
    assert len(opt.param_groups) == 3
    set_gradients(params, 0)
    params[2].grad.fill_(math.nan)
    before = snapshot(opt)
    opt.step()
    assert opt.last["worst"].index == 2, "a parameter added later is watched too"
    assert snapshot(opt) == before


def test_a_hook_may_replace_the_state_dict_that_is_loaded():
    opt = st.wrap(torch.optim.SGD(parameters(), lr=0.1), loss_scale=8.0)
    saved = opt.state_dict()
    opt.register_load_state_dict_pre_hook(
        lambda _, d: {**d, "param_groups": [{**g, "lr": 0.5} for g in d["param_groups"]]}
    )
    opt.load_state_dict(saved)
    assert opt.param_groups[0]["lr"] == 0.5


def test_hooks_run_around_each_step():
    params = parameters()
    inner = torch.optim.SGD(params, lr=0.1)
    opt = st.wrap(inner)
    calls = []
    opt.register_step_pre_hook(lambda o, *_: calls.append(("pre", o is opt)))
    opt.register_step_post_hook(lambda o, *_: calls.append(("post", o is opt)))
    inner.register_step_post_hook(lambda o, *_: calls.append(("inner", o is inner)))
    opt.register_state_dict_post_hook(lambda o, d: d | {"mine": 1})
    opt.register_state_dict_pre_hook(lambda o: calls.append(("save", o is opt)))
    opt.register_load_state_dict_pre_hook(lambda o, d: {k: v for k, v in d.items() if k != "mine"})
    opt.register_load_state_dict_post_hook(lambda o: calls.append(("loaded", o is opt)))
    set_gradients(params, 0)
    opt.step()
    assert calls == [("pre", True), ("inner", True), ("post", True)]
    calls.clear()
    set_gradients(params, 0)
    params[0].grad.fill_(math.nan)
    opt.step()
    assert calls == [("pre", True), ("post", True)], "the inner optimizer did not step"
    calls.clear()
    saved = opt.state_dict()
    assert saved["mine"] == 1
    opt.load_state_dict(saved)
    assert calls == [("save", True), ("loaded", True)]


@pytest.mark.parametrize("loss_scale", [None, "dynamic"])
@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)])
def test_distributed_checkpointing_creates_state_and_changes_nothing_else(loss_scale, lr, path):
    model = torch.nn.Linear(3, 2)
    opt = st.wrap(torch.optim.AdamW(model.parameters(), lr=lr, fused=True), loss_scale=loss_scale)
    peer = get_optimizer_state_dict(model, torch.optim.AdamW(model.parameters(), lr=lr, fused=True))
    before = opt.guard_state_dict()
    saved = get_optimizer_state_dict(model, opt)
    assert opt.guard_state_dict() == before, "a step with zero gradients and lr 0 is not evidence"
    assert saved["state"].keys() == peer["state"].keys() == {"weight", "bias"}
    own = [{key: v for key, v in group.items() if key != "stablenum"} for group in saved["param_groups"]]
    assert own == peer["param_groups"]
    set_optimizer_state_dict(model, opt, saved)
    assert opt.guard_state_dict() == before
    model(torch.ones(1, 3)).sum().backward()
    opt.step()
    assert opt.last["step"] == 0


def test_zero_learning_rate_still_guards(path):
    params = parameters()
    opt = st.wrap(torch.optim.AdamW(params, lr=0.0, fused=True))
    set_gradients(params, 0)
    params[0].grad[0, 0] = math.nan
    opt.step()  # as in the first step of a warm-up: NaN must not reach the moments
    assert opt.last["applied"] is False
    set_gradients(params, 1)
    opt.step()
    assert opt.last["step"] == 1
    assert all(torch.isfinite(s["exp_avg"]).all() for s in opt.state.values())


def test_plain_and_guarded_optimizers_load_one_anothers_checkpoints():
    def trained(make):
        params = parameters()
        opt = make(torch.optim.AdamW(params, lr=0.01))
        for i in range(3):
            set_gradients(params, i)
            opt.step()
        return params, opt

    _, guarded = trained(lambda o: st.wrap(o, loss_scale=stablenum.StaticLossScale(scale=1.0), clip=1e9))
    _, plain = trained(lambda o: o)
    buffer = io.BytesIO()
    torch.save(guarded.state_dict(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    assert {k: v for k, v in saved.items() if k != "stablenum"}.keys() == plain.state_dict().keys()
    fresh = torch.optim.AdamW(parameters(), lr=0.5)
    fresh.load_state_dict(saved)
    assert fresh.param_groups[0]["lr"] == 0.01
    assert torch.equal(fresh.state_dict()["state"][0]["exp_avg"], guarded.state_dict()["state"][0]["exp_avg"])
    back = st.wrap(torch.optim.AdamW(parameters(), lr=0.5), clip=1.0)
    history = back.history()
    back.load_state_dict(plain.state_dict())
    assert back.history() == history
    assert back.param_groups[0]["lr"] == 0.01
    again = st.wrap(
        torch.optim.AdamW(parameters(), lr=0.5), clip=1.0, loss_scale=stablenum.StaticLossScale(scale=1.0)
    )
    again.load_state_dict(saved)
    assert again.last["step"] == 2


def test_accelerate_round_trips_and_steps():
    import accelerate

    model = torch.nn.Linear(3, 1)
    opt = st.wrap(torch.optim.AdamW(model.parameters(), fused=True), clip=1.0)
    accelerator = accelerate.Accelerator(cpu=True)
    prepared, prepared_opt = accelerator.prepare(model, opt)
    for i in range(3):
        prepared_opt.zero_grad()
        x = torch.ones(2, 3) * (math.nan if i == 1 else 1.0)
        accelerator.backward(prepared(x).square().mean())
        prepared_opt.step()
    assert opt.last["skipped_total"] == 1
    assert opt.last["step"] == 2
    prepared_opt.load_state_dict(prepared_opt.state_dict())
    assert opt.last["skipped_total"] == 1


def test_a_class_built_on_ours_without_init_works():
    # Lightning makes such a class and copies the optimizer's __dict__ into it.
    class Mixin:
        def __init__(self, optimizer):
            self.__dict__ = dict(optimizer.__dict__)

    params = parameters()
    opt = st.wrap(torch.optim.AdamW(params, fused=True), clip=1.0)
    made = type("Lightning" + type(opt).__name__, (Mixin, type(opt)), {})(opt)
    set_gradients(params, 0)
    made.step()
    assert made.last["applied"]
    assert made.param_groups is opt.param_groups
    assert made._step_supports_amp_scaling is False


def test_schedulers_accept_a_guarded_optimizer_and_can_pause_on_a_skip():
    params = parameters()
    opt = st.wrap(torch.optim.SGD(params, lr=1.0, momentum=0.9))
    torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=1.0, total_steps=10)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt)
    rates = []
    for i in range(4):
        set_gradients(params, i)
        if i == 1:
            params[0].grad.fill_(math.inf)
        opt.step()
        if opt.last["applied"]:
            scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    plateau.step(1.0)
    assert rates[0] == rates[1] > rates[2] > rates[3]
    assert isinstance(opt, torch.optim.Optimizer)
    twin = pickle.loads(pickle.dumps(opt))
    assert twin.guard_state_dict() == opt.guard_state_dict(), "though the scheduler patched step"


def test_no_gradients_at_all_is_a_no_op(make_optimizer, path):
    params = parameters()
    opt = st.wrap(make_optimizer(params), loss_scale="dynamic", clip=1.0)
    before, state = snapshot(opt), opt.guard_state_dict()
    opt.step()
    assert snapshot(opt) == before
    assert opt.guard_state_dict() == state


def test_parameters_without_gradient_stay(path):
    params = parameters()
    opt = st.wrap(torch.optim.AdamW(params, fused=True), clip=stablenum.ClipByNorm(0.1), loss_scale=2.0)
    set_gradients(params, 0)
    params[1].grad = None
    before = params[1].detach().clone()
    opt.step()
    assert torch.equal(before, params[1].detach())
    assert params[1] not in opt.state
    assert opt.last["applied"]


def test_empty_parameters(path):
    params = [torch.nn.Parameter(torch.zeros(0)), torch.nn.Parameter(torch.ones(2))]
    opt = st.wrap(torch.optim.SGD(params, lr=1.0), clip=1.0)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    assert opt.last["grad_norm"] == pytest.approx(math.sqrt(2))


def test_skips_are_counted_on_the_device(path):
    params = parameters()
    opt = st.wrap(torch.optim.AdamW(params, fused=True))
    counter = opt.guard_state.skipped_total
    for _ in range(2):
        set_gradients(params, 0)
        params[0].grad.fill_(math.nan)
        opt.step()
    assert counter.item() == 2, "the same tensor, updated in place"


def test_float16_adam_warns_of_its_eps():
    params = parameters(dtype=torch.float16)
    with pytest.warns(st.EpsTooSmallWarning, match="eps=1e-08 is 0 in float16"):
        opt = st.wrap(torch.optim.Adam(params))
    for p in params:
        p.grad = torch.zeros_like(p)
    opt.step()
    assert torch.isnan(params[0]).any(), "the warning is right: 0 / 0"
    fused = parameters(dtype=torch.float16)
    opt = st.wrap(torch.optim.Adam(fused, fused=True))
    for p in fused:
        p.grad = torch.zeros_like(p)
    opt.step()
    assert torch.isfinite(fused[0]).all(), "the fused kernel divides in float32"
