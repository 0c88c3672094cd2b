"""Master weights, compensated and stochastically rounded updates: accuracy, saved state, true skips."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict as checkpoint

import stablenum
import stablenum_torch as st
from tests.torch.conftest import parameters, set_gradients

KINDS = {"master": st.MasterWeights, "kahan": st.KahanUpdate, "stochastic": st.StochasticRounding}
INNER = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "sgd-fused-dampening": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.5, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


def narrow_parameters(dtype: torch.dtype = torch.bfloat16) -> list[torch.nn.Parameter]:
    """Two narrow parameters and one of float32."""
    params = parameters()
    for p in params[:2]:
        p.data = p.data.to(dtype)
    return params


def bits(tree) -> list[bytes]:
    """All tensors, bit by bit, and all other values in nested dicts, lists and tuples."""
    if isinstance(tree, Tensor):
        flat = tree.detach().contiguous().reshape(-1)
        return [flat.view(torch.uint8).numpy().tobytes()]
    if isinstance(tree, dict):
        return [b for key in sorted(tree, key=str) for b in bits(tree[key])]
    if isinstance(tree, (list, tuple)):
        return [b for part in tree for b in bits(part)]
    return [repr(tree).encode()]


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> type:
    return KINDS[request.param]


@pytest.fixture(params=list(INNER))
def inner(request: pytest.FixtureRequest):
    return INNER[request.param]


def thousand(make, n: int) -> tuple[Tensor, torch.optim.Optimizer]:
    w = torch.nn.Parameter(torch.ones(n, dtype=torch.bfloat16))
    opt = make([w])
    for _ in range(1000):
        w.grad = torch.full_like(w, 1e-4)
        opt.step()
    return w.detach().double(), opt


def test_a_thousand_updates_smaller_than_the_rounding_are_kept() -> None:
    def sgd(p):
        return torch.optim.SGD(p, lr=1.0)

    plain, _ = thousand(sgd, 4)
    assert (plain == 1).all()
    kahan, opt = thousand(lambda p: st.KahanUpdate(p, sgd), 4)
    (p,) = opt.param_groups[0]["params"]
    # The nearest bfloat16 number is 1.6 % off; with its compensation it is as near as a float32 weight.
    assert abs((1 - kahan) / 0.1 - 1).max() < 0.02
    assert opt.state[p]["compensation"].dtype == torch.int16
    exact = 1 - 1000 * torch.full((4,), 1e-4, dtype=torch.bfloat16).double()
    torch.testing.assert_close(opt.wide_value(p).double(), exact, rtol=1e-4, atol=0)
    rounded, _ = thousand(lambda p: st.StochasticRounding(p, sgd, seed=3), 10_000)
    assert abs(float(1 - rounded.mean()) / 0.1 - 1) < 0.02
    master, _ = thousand(lambda p: st.MasterWeights(p, sgd), 4)
    assert (abs(1 - master - 0.1) <= 2**-9).all()


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compensated_updates_match_float32_training(inner, dtype) -> None:
    """Weight and compensation follow float32 weights to the last bits, in half the memory of masters."""
    params = narrow_parameters(dtype)
    wide = [torch.nn.Parameter(p.detach().float()) for p in params]
    opt, other = st.KahanUpdate(params, inner), inner(wide)
    for seed in range(50):
        set_gradients(params, seed)
        for p, w in zip(params, wide, strict=True):
            w.grad = p.grad.float()
        opt.step()
        other.step()
        for p, w in zip(params, wide, strict=True):
            torch.testing.assert_close(opt.wide_value(p), w.detach(), rtol=1e-6, atol=1e-7)
            assert (abs(p.detach() - w) <= abs(w) * torch.finfo(p.dtype).eps / 2 + 1e-7).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_master_weights_match_float32_training(inner, dtype) -> None:
    """The plain optimizer in float32 with the same gradients: equal master weights, rounded parameters."""
    params = narrow_parameters(dtype)
    wide = [torch.nn.Parameter(p.detach().float()) for p in params]
    opt, other = st.MasterWeights(params, inner), inner(wide)
    for seed in range(20):
        set_gradients(params, seed)
        for p, w in zip(params, wide, strict=True):
            w.grad = p.grad.float()
        opt.step()
        other.step()
        for p, m, w in zip(params, opt.masters(), wide, strict=True):
            assert torch.equal(m, w)
            assert torch.equal(p, w.to(p.dtype))


def test_schedulers_and_other_tools_accept_it_as_an_optimizer(kind, inner) -> None:
    params = narrow_parameters()
    opt = kind([{"params": params[:2]}, {"params": params[2:], "lr": 0.5}], inner)
    assert isinstance(opt, torch.optim.Optimizer)
    assert [p for g in opt.param_groups for p in g["params"]] == params
    assert [g["lr"] for g in opt.param_groups] == [1e-2, 0.5]
    schedule = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.0)
    set_gradients(params, 0)
    opt.step()
    schedule.step()
    before = bits(params)
    set_gradients(params, 1)
    opt.step()
    assert [g["lr"] for g in opt.inner.param_groups] == [0.0, 0.0]
    if kind is not st.StochasticRounding:
        assert bits(params) == before
    opt.zero_grad()
    assert all(p.grad is None for p in params)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "settings", [{}, {"loss_scale": "dynamic", "clip": 1.0}, {"clip": stablenum.ClipByValue(0.1)}]
)
def test_a_skipped_step_changes_no_bit(kind, inner, path, settings) -> None:
    params = narrow_parameters()
    opt = st.wrap(kind(params, inner), **settings)
    for step, bad in enumerate([True, False, False, True, True, False]):
        set_gradients(params, step)
        if bad:
            params[step % 3].grad.view(-1)[0] = (math.nan, math.inf)[step % 2]
        before, state = bits(params), bits(opt.inner.state_dict())
        opt.step()
        assert opt.last["applied"] is not bad
        assert (bits(params) == before) is bad
        if step > 0:  # a fused optimizer creates its state, of zeros, even in a first step that it skips
            assert (bits(opt.inner.state_dict()) == state) is bad
    assert all(torch.isfinite(p).all() for p in params)


def test_without_a_guard_nan_and_inf_pass_through_and_finite_values_saturate(kind) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        if kind is st.StochasticRounding and dtype == torch.float16:
            continue
        top = torch.finfo(dtype).max
        w = torch.nn.Parameter(torch.tensor([1.0, 1.0, -top, 1.0], dtype=dtype))
        opt = kind([w], lambda p: torch.optim.SGD(p, lr=1e36 if dtype == torch.bfloat16 else 1e4))  # noqa: B023
        w.grad = torch.tensor([math.nan, math.inf, 1.0, 0.0], dtype=dtype)
        opt.step()
        assert w[0].isnan()
        assert w[1] == -math.inf
        assert w[2] == -top
        assert w[3] == 1


@pytest.mark.parametrize("clip", [None, 1.0, stablenum.ClipByNorm(5.0)])
def test_float16_gradients_are_unscaled_in_float32(inner, path, clip) -> None:
    """A scaled gradient of 1e-3 is 1.5e-8 after a loss scale of 2^16: half of it is gone in float16."""
    params = narrow_parameters(torch.float16)
    wide = [torch.nn.Parameter(p.detach().float()) for p in params]
    opt, other = st.wrap(st.MasterWeights(params, inner), loss_scale=2.0**16, clip=clip), inner(wide)
    for seed in range(5):
        set_gradients(params, seed, size=1e-3)
        for p, w in zip(params, wide, strict=True):
            w.grad = p.grad.float() / 2.0**16
        opt.step()
        other.step()
    for m, w in zip(opt.inner.masters(), wide, strict=True):
        torch.testing.assert_close(m, w, rtol=1e-6, atol=0)


def test_a_loaded_state_continues_identically(kind, inner) -> None:
    params = narrow_parameters()
    opt = st.wrap(kind(params, inner))
    for seed in range(3):
        set_gradients(params, seed)
        opt.step()
    file = io.BytesIO()
    torch.save({"opt": opt.state_dict(), "params": [p.detach() for p in params]}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    others = narrow_parameters()
    other = st.wrap(kind(others, inner))
    set_gradients(others, 9)
    other.step()
    with torch.no_grad():
        for p, value in zip(others, saved["params"], strict=True):
            p.copy_(value)
    other.load_state_dict(saved["opt"])
    for seed in range(3, 6):
        for ps, o in ((params, opt), (others, other)):
            set_gradients(ps, seed)
            o.step()
    assert bits([params, opt.state_dict()]) == bits([others, other.state_dict()])


def test_a_compensated_step_compiles_without_graph_breaks() -> None:
    def run(step) -> list[bytes]:
        w = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
        opt = st.KahanUpdate([w], lambda p: torch.optim.SGD(p, lr=1.0))
        for _ in range(3):
            twin = opt.wide_value(w) - 1e-4
            step(opt)(w, twin)
        return bits([w, opt.state[w]["compensation"]])

    def compiled(opt):
        return torch.compile(torch.no_grad()(opt._write_back), fullgraph=True, backend="aot_eager")

    assert run(compiled) == run(lambda opt: torch.no_grad()(opt._write_back))


def test_masters_and_parameters_stay_in_step() -> None:
    def in_step() -> bool:
        return all(torch.equal(p, m.to(p.dtype)) for p, m in zip(params, opt.masters(), strict=True))

    params = narrow_parameters()
    opt = st.MasterWeights(params[:1], INNER["adamw"])
    opt.add_param_group({"params": params[1:], "lr": 0.1})
    assert [g["lr"] for g in opt.inner.param_groups] == [1e-2, 0.1]
    set_gradients(params, 0)
    opt.step()
    saved = copy.deepcopy(opt.state_dict())
    for seed in (1, 2):
        set_gradients(params, seed)
        opt.step()
    opt.load_state_dict(saved)  # parameters follow the master weights
    assert in_step()
    with torch.no_grad():
        params[0].fill_(7.0)  # and master weights a parameter that was changed elsewhere
    set_gradients(params, 3)
    opt.step()
    assert in_step()
    assert (abs(params[0].float() - 7) < 0.1).all()


def test_the_plain_optimizers_state_is_read(kind) -> None:
    params = parameters()
    plain = INNER["adamw"](params)
    set_gradients(params, 0)
    plain.step()
    for p in params:
        p.data = p.data.bfloat16()
    opt = kind(params, INNER["adamw"])
    opt.load_state_dict(plain.state_dict())
    assert torch.equal(opt.state[params[0]]["exp_avg"], plain.state[params[0]]["exp_avg"])
    if kind is st.MasterWeights:
        assert torch.equal(opt.masters()[0], params[0].float())


def test_copies_and_pickles_continue_identically(kind) -> None:
    params = narrow_parameters()
    opt = kind(params, INNER["adamw"])
    set_gradients(params, 0)
    opt.step()
    copies = [copy.deepcopy((params, opt)), pickle.loads(pickle.dumps((params, opt)))]
    for ps, o in [(params, opt), *copies]:
        set_gradients(ps, 1)
        o.step()
    for ps, o in copies:
        assert bits([ps, o.state_dict()]) == bits([params, opt.state_dict()])


def test_closures_names_and_missing_gradients(kind) -> None:
    params = narrow_parameters()
    opt = kind({"a": params[0], "b": params[1], "c": params[2]}, INNER["adamw"])
    assert opt.param_groups[0]["param_names"] == ["a", "b", "c"]
    guarded = st.wrap(opt)
    before = bits(params[1:])

    def closure() -> Tensor:
        guarded.zero_grad()
        loss = params[0].float().square().sum()
        guarded.backward(loss)
        return loss

    guarded.step(closure)
    assert guarded.last["worst"] == (0, "a")
    assert bits(params[1:]) == before


def test_no_warning_about_an_eps_that_is_not_lost() -> None:
    params = narrow_parameters(torch.float16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        st.wrap(st.MasterWeights(params, INNER["adamw"]))
    with pytest.warns(st.EpsTooSmallWarning):
        st.wrap(INNER["adamw"](params))


def test_wrong_arguments_are_named(kind) -> None:
    with pytest.raises(TypeError, match="make must be a function that makes an optimizer"):
        kind(narrow_parameters(), torch.optim.AdamW(parameters()))
    with pytest.raises(TypeError, match=r"make must return a torch\.optim\.Optimizer; got int"):
        kind(narrow_parameters(), lambda p: 3)
    with pytest.raises(ValueError, match="params must be bfloat16 for StochasticRounding"):
        st.StochasticRounding(narrow_parameters(torch.float16), INNER["adamw"])
    with pytest.raises(ValueError, match="seed must be a whole number"):
        st.StochasticRounding(narrow_parameters(), INNER["adamw"], seed=-1)
    params = narrow_parameters()
    opt = st.MasterWeights(params, INNER["adamw"])
    set_gradients(params, 0)
    opt.step()
    saved = opt.state_dict()
    saved["state"][0]["master"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"\['master'\] must have shape \(4, 3\); got \(3,\)"):
        opt.load_state_dict(saved)


@pytest.mark.parametrize("kind", [st.MasterWeights, st.KahanUpdate])
def test_distributed_checkpoints_hold_the_precision_state(kind) -> None:
    """They name parameters where a state dict has numbers."""

    def make(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).bfloat16()
        return model, st.wrap(kind(model.parameters(), INNER["adamw"]))

    model, opt = make(0)
    set_gradients(list(model.parameters()), 0)
    opt.step()
    saved = copy.deepcopy(checkpoint.get_state_dict(model, opt))
    other, opt2 = make(1)
    checkpoint.set_state_dict(other, opt2, model_state_dict=saved[0], optim_state_dict=saved[1])
    for m, o in ((model, opt), (other, opt2)):
        set_gradients(list(m.parameters()), 1)
        o.step()
    assert bits(list(model.parameters())) == bits(list(other.parameters()))


def test_an_infinite_weight_stays_infinite_in_compensated_updates() -> None:
    w = torch.nn.Parameter(torch.tensor([1.0, torch.inf, -torch.inf, torch.nan], dtype=torch.bfloat16))
    opt = st.KahanUpdate([w], lambda p: torch.optim.SGD(p, lr=1.0))
    w.grad = torch.full_like(w, 0.5)
    opt.step()
    torch.testing.assert_close(
        w.detach().float(), torch.tensor([0.5, torch.inf, -torch.inf, torch.nan]), equal_nan=True
    )
    assert not opt.state[w]["compensation"].any()
