"""Random streams: nothing that the guard or the optimizer keeps ever becomes non-finite."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as some

import stablenum
import stablenum_torch as st
from stablenum.arrays import leaves

ELEMENTS = some.one_of(
    some.floats(-10, 10, width=32),
    some.sampled_from([0.0, -0.0, 1e-30, -1e-30, 1e20, -3e38, 1e-45, math.nan, math.inf, -math.inf]),
)
STEPS = some.lists(some.lists(ELEMENTS, min_size=5, max_size=5), min_size=1, max_size=12)
CONFIGS = some.fixed_dictionaries(
    {},
    optional={
        "clip": some.sampled_from(
            [
                1.0,
                stablenum.ClipByNorm(0.5),
                stablenum.ClipByValue(0.1),
                (stablenum.ClipByNorm(3.0), 1.0),
                (stablenum.AutoClip(window=4), stablenum.AdaptiveGradClip(), 1.0),
                stablenum.ZClip(warmup_steps=2),
                (stablenum.AdaptiveGradClip(clipping=1.0), stablenum.AdaGC(warmup_steps=2)),
                (stablenum.AdaGC(warmup_steps=2), stablenum.ClipByValue(0.5), stablenum.ClipUpdateRMS(0.1)),
            ]
        ),
        "loss_scale": some.sampled_from(
            [
                "dynamic",
                1024.0,
                stablenum.DynamicLossScale(growth_interval=2, max_scale=2.0**17),
                stablenum.LogMaxLossScale(),
                stablenum.UnderflowAwareLossScale(),
            ]
        ),
        # Too few steps for it to skip one; its statistics have to stay finite all the same.
        "spike": some.sampled_from(["skip", stablenum.SpikeGuard(window=4, min_samples=2, action="clip")]),
    },
)


@given(STEPS, CONFIGS, some.sampled_from(["sgd", "sgd-fused", "momentum"]))
@settings(max_examples=120)
def test_nothing_kept_becomes_non_finite(steps, config, kind):
    a, b = torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(1))
    inner = torch.optim.SGD(
        [a, b], lr=1e-3, momentum=0.9 if kind == "momentum" else 0.0, fused=kind == "sgd-fused"
    )
    # Without clipping a gradient of 3e38 may rightly move a parameter out of range.
    opt = st.wrap(inner, **({"clip": 1.0} | config))
    skipped = 0
    for values in steps:
        a.grad, b.grad = torch.tensor(values[:4]).view(2, 2), torch.tensor(values[4:])
        finite = bool(torch.isfinite(torch.tensor(values)).all())
        opt.step()
        skipped += not finite
        assert opt.last["applied"] is finite
        kept = [
            a,
            b,
            *(s["momentum_buffer"] for s in inner.state.values() if s.get("momentum_buffer") is not None),
        ]
        assert all(torch.isfinite(t).all() for t in kept)
        assert math.isfinite(opt.loss_scale)
        assert opt.loss_scale > 0
        assert math.isfinite(opt.last["clip_coefficient"])
        statistics = leaves((opt.guard_state.clip, opt.guard_state.loss_scale, opt.guard_state.spike))
        assert all(torch.isfinite(leaf).all() for leaf in statistics)
    assert opt.last["skipped_total"] == skipped
