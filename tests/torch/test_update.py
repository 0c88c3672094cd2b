"""ClipUpdateRMS: the optimizer's update is shortened, or left unchanged bit for bit."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import stablenum
import stablenum_torch as st
from tests.torch.conftest import parameters, set_gradients, snapshot


def rms(update: torch.Tensor) -> float:
    return math.sqrt(update.double().square().mean().item())


@pytest.mark.parametrize("per_lr", [True, False])
def test_the_update_is_that_of_the_plain_optimizer_made_shorter(make_optimizer, path, per_lr):
    ours, theirs = parameters(), parameters()
    bound = 0.7 if per_lr else 0.004
    limit = 0.7e-2 if per_lr else 0.004
    opt = st.wrap(make_optimizer(ours), clip=stablenum.ClipUpdateRMS(bound, per_lr=per_lr))
    peer = make_optimizer(theirs)
    clipped = 0
    for i in range(6):
        set_gradients(ours, i)
        set_gradients(theirs, i)
        for a, b in zip(ours, theirs, strict=True):
            b.data.copy_(a.data)  # each step is compared by itself
        before = [p.detach().clone() for p in ours]
        opt.step()
        peer.step()
        for start, a, b in zip(before, ours, theirs, strict=True):
            wanted = b.detach() - start
            size = rms(wanted)
            if size <= limit:
                assert torch.equal(a.detach(), b.detach())
            else:
                clipped += 1
                torch.testing.assert_close(a.detach() - start, wanted * (limit / size), rtol=1e-4, atol=1e-7)
                assert rms(a.detach() - start) == pytest.approx(limit, rel=1e-4)
    assert clipped
    assert opt.last["clip_coefficient"] == 1.0


@pytest.mark.parametrize("at_a_time", [1, 13, 19, 20])
def test_updates_measured_in_pieces_are_clipped_the_same(path, monkeypatch, at_a_time):
    """The parameters have 12, 7 and 8 elements: each by itself, the first two together, or the last two."""

    def after_a_step():
        params = parameters()
        groups = [{"params": [p], "lr": 0.1 * (i + 1)} for i, p in enumerate(params)]
        opt = st.wrap(torch.optim.SGD(groups, lr=1.0), clip=stablenum.ClipUpdateRMS(0.5))
        set_gradients(params, 0, size=10.0)
        opt.step()
        return snapshot(opt)

    whole = after_a_step()
    monkeypatch.setattr("stablenum_torch._step.clip_update._AT_A_TIME", at_a_time)
    assert after_a_step() == whole


def test_within_the_limit_nothing_changes_and_a_skip_changes_no_bit(make_optimizer, path):
    ours, theirs = parameters(), parameters()
    for p in (ours[0], theirs[0]):
        p.data[0, 0] = -0.0
    opt, peer = st.wrap(make_optimizer(ours), clip=stablenum.ClipUpdateRMS(1e6)), make_optimizer(theirs)
    for i in range(5):
        set_gradients(ours, i)
        set_gradients(theirs, i)
        if i == 2:
            before = snapshot(opt)
            ours[1].grad[0] = math.nan
            opt.step()
            assert snapshot(opt) == before
            set_gradients(ours, i)
        for p in (ours[0], theirs[0]):
            p.grad[0, 0] = 0.0
        opt.step()
        peer.step()
        assert snapshot(opt) == snapshot(peer)


@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5)])
def test_each_group_has_its_own_rate(path, rate):
    a, b, c = (torch.nn.Parameter(torch.zeros(4)) for _ in range(3))
    groups = [{"params": [a, c], "lr": rate}, {"params": [b], "lr": 0.01}]
    opt = st.wrap(torch.optim.SGD(groups, lr=1.0, foreach=False), clip=stablenum.ClipUpdateRMS(2.0))
    a.grad, b.grad = torch.full((4,), -10.0), torch.full((4,), -10.0)
    opt.step()  # c has no gradient
    torch.testing.assert_close(a.detach(), torch.full((4,), 1.0))
    torch.testing.assert_close(b.detach(), torch.full((4,), 0.02))
    assert not c.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.filterwarnings("ignore:The fused SGD of torch")  # of which the last 8 elements are moved
def test_other_formats(path, dtype, fused):
    if fused and dtype.is_complex:
        pytest.skip("torch has no fused kernel for complex parameters")
    w = torch.nn.Parameter(torch.full((8,), 2.0, dtype=dtype))
    opt = st.wrap(torch.optim.SGD([w], lr=1.0, fused=fused), clip=stablenum.ClipUpdateRMS(0.25))
    w.grad = torch.full((8,), 3.0, dtype=dtype)
    opt.step()
    # Both parts of a complex number count: one part of 3 and one of 0 have an RMS of 3 / sqrt(2).
    wanted = 2.0 - 0.25 * (math.sqrt(2) if dtype.is_complex else 1.0)
    tolerance = 1e-3 if dtype.itemsize == 2 else 1e-6
    torch.testing.assert_close(w.detach(), torch.full_like(w, wanted), rtol=tolerance, atol=0)


def test_sparse_gradients(path):
    table = torch.nn.Embedding(4, 2, sparse=True)
    torch.nn.init.zeros_(table.weight)
    opt = st.wrap(torch.optim.SGD(table.parameters(), lr=1.0), clip=stablenum.ClipUpdateRMS(0.1))
    table(torch.tensor([2])).sum().backward()
    opt.step()
    wanted = torch.zeros(4, 2)
    wanted[2] = -0.1 * 2  # RMS over all eight elements, two of which moved
    torch.testing.assert_close(table.weight.detach(), wanted)


@pytest.mark.parametrize(
    ("size", "limit", "dtype"),
    [
        (1e25, 1e-3, torch.float32),
        (4e-24, 1e-24, torch.float32),
        (3e38, 10.0, torch.float32),
        (3e38, 1e-3, torch.float32),
        (3e38, 0.5, torch.bfloat16),
        (3e38, 0.5, torch.float64),
        (1e60, 0.5, torch.float64),
        (1e200, 0.5, torch.float64),
        (1e307, 1e-3, torch.float64),
    ],
)
def test_updates_of_any_size(path, size, limit, dtype):
    w = torch.nn.Parameter(torch.zeros(100, dtype=dtype))
    opt = st.wrap(torch.optim.SGD([w], lr=1.0), clip=stablenum.ClipUpdateRMS(limit))
    w.grad = torch.full((100,), -size, dtype=dtype)
    opt.step()
    rtol = 1e-2 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(w.detach(), torch.full((100,), limit, dtype=dtype), rtol=rtol, atol=0)


def test_a_non_finite_update_is_left_unchanged(path):
    class Breaks(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p[0] = math.inf
                    p[1] += 1.0

    w = torch.nn.Parameter(torch.zeros(3))
    opt = st.wrap(Breaks([w], lr=0.1), clip=stablenum.ClipUpdateRMS(0.1))
    w.grad = torch.ones(3)
    opt.step()
    assert w.tolist() == [math.inf, 1.0, 0.0]


def test_gradients_dropped_by_a_hook_of_the_inner_step(path):
    params = parameters()
    inner = torch.optim.SGD(params, lr=1.0)
    inner.register_step_post_hook(lambda o, *_: o.zero_grad())
    opt = st.wrap(inner, clip=stablenum.ClipUpdateRMS(0.5))
    before = [p.detach().clone() for p in params]
    set_gradients(params, 0, 10.0)
    opt.step()
    for start, p in zip(before, params, strict=True):
        assert rms(p.detach() - start) == pytest.approx(0.5, rel=1e-5)


def test_an_optimizer_without_a_learning_rate_raises():
    class NoRate(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                p -= p.grad

    params = parameters()
    with pytest.raises(ValueError, match=r"NoRate has no 'lr'.*per_lr=False"):
        st.wrap(NoRate(params), clip=stablenum.ClipUpdateRMS(1.0))
    opt = st.wrap(NoRate(params), clip=stablenum.ClipUpdateRMS(0.5, per_lr=False))
    before = copy.deepcopy(params)
    set_gradients(params, 0, 10.0)
    opt.step()
    assert rms((params[0] - before[0]).detach()) == pytest.approx(0.5, rel=1e-5)
