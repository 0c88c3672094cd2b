"""Where torch's own clipping and scaling are right, ours give the same."""

from __future__ import annotations

import math

import pytest
import torch

import stablenum
import stablenum_torch as st
from tests.torch.conftest import parameters, set_gradients


@pytest.mark.sampled
@pytest.mark.parametrize("max_norm", [0.1, 1.0, 4.0, 1e6])
def test_clipping_matches_clip_grad_norm_to_six_digits(make_optimizer, path, max_norm):
    ours, theirs = parameters(), parameters()
    opt = st.wrap(make_optimizer(ours), clip=max_norm)
    for i in range(10):
        set_gradients(ours, i, 10.0 ** (i % 5 - 2))
        set_gradients(theirs, i, 10.0 ** (i % 5 - 2))
        opt.step()
        norm = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
        assert opt.last["grad_norm"] == pytest.approx(norm.item(), rel=1e-6)
        # Fused kernels write back the gradients that they used.
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=0)


@pytest.mark.sampled
@pytest.mark.parametrize("bound", [0.05, 0.5, 1e3])
def test_clipping_matches_clip_grad_value_to_six_digits(make_optimizer, path, bound):
    ours, theirs = parameters(), parameters()
    opt = st.wrap(make_optimizer(ours), clip=stablenum.ClipByValue(bound))
    for i in range(5):
        set_gradients(ours, i)
        set_gradients(theirs, i)
        opt.step()
        torch.nn.utils.clip_grad_value_(theirs, bound)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=0)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("rate", "growth_interval", "growth_factor", "backoff_factor"),
    [
        (0.02, 40, 2.0, 0.5),
        (0.1, 6, 4.0, 0.25),
        (0.2, 3, 2.0, 0.5),
        (0.3, 2, 8.0, 0.125),
        (0.1, 7, 1.5, 0.75),
    ],
)
@pytest.mark.parametrize("fused", [True, False])
def test_the_scale_matches_gradscaler_over_random_overflows(
    path, fused, rate, growth_interval, growth_factor, backoff_factor
):
    # The factors are float32 numbers: GradScaler multiplies by a double and rounds, the guard by a float32.
    generator = torch.Generator().manual_seed(growth_interval)
    settings = {
        "init_scale": 2.0**16,
        "growth_factor": growth_factor,
        "backoff_factor": backoff_factor,
        "growth_interval": growth_interval,
    }
    ours, theirs = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    opt = st.wrap(
        torch.optim.SGD([ours], lr=1e-3, fused=fused),
        loss_scale=stablenum.DynamicLossScale(**settings, min_scale=2.0**-100, max_scale=2.0**100),
    )
    peer, scaler = torch.optim.SGD([theirs], lr=1e-3, fused=fused), torch.amp.GradScaler("cpu", **settings)
    scales = set()
    for i in range(200):
        bad = float(torch.rand((), generator=generator)) < rate
        grad = torch.randn(3, generator=generator)
        for p, scale in ((ours, opt.loss_scale), (theirs, scaler.get_scale())):
            p.grad = grad * scale
            if bad:
                p.grad[i % 3] = [math.inf, -math.inf, math.nan][i % 3]
        opt.step()
        scaler.scale(torch.ones(()))
        scaler.step(peer)
        scaler.update()
        assert opt.loss_scale == scaler.get_scale()
        assert opt.last["applied"] is not bad
        scales.add(opt.loss_scale)
    assert len(scales) > 3
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
