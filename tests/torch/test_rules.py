"""Every rule through ``wrap`` gives the decisions and parameters of the specification in NumPy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

import stablenum
import stablenum_torch as st
from stablenum.reference import guarded as reference
from tests.selection import one_in_three, pairwise, slow_unless
from tests.torch.conftest import PATHS, RULES, named, parameters, snapshot

STEPS = 150
NAN, INF, ZERO, SPIKE, ABSURD, LOSS_SPIKE = 33, 47, 60, 80, 97, 120
OPTIMIZERS = {
    "adamw-fused": (
        lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
        lambda: reference.AdamW(lr=1e-2),
    ),
    "sgd-foreach": (
        lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, foreach=True),
        lambda: reference.SGD(lr=1e-2, momentum=0.9),
    ),
}


def gradients(step: int, scale: float) -> dict[str, np.ndarray]:
    """Seeded gradients of one step, with trouble at the steps named above."""
    rng = np.random.default_rng(step)
    size = {ZERO: 0.0, SPIKE: 100.0, ABSURD: 1e4}.get(step, 1.0) * scale
    shapes = {"a": (4, 3), "b": (7,), "c": (2, 2, 2)}
    made = {k: (rng.normal(size=shape) * size).astype(np.float32) for k, shape in shapes.items()}
    made["b"][:3] *= np.float32(1e-9)  # magnitudes that float16 would lose
    if step < 20:
        made["c"][:] = 0  # a tensor whose gradients are 0 at first
    if step in (NAN, INF):
        made["b"][2] = math.nan if step == NAN else -math.inf
    return made


def loss_of(step: int) -> float:
    rng = np.random.default_rng(10_000 + step)
    return float(np.float32(2 + 0.1 * rng.normal() + (50 if step == LOSS_SPIKE else 0)))


ALWAYS_ON_DEVICE = [("all at once", "device"), ("each tensor", "device")]
CHOSEN = pairwise([*RULES], [*OPTIMIZERS], PATHS)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("rule", "optimizer", "path"),
    # Most rules on the device path are the core's alone, which runs on torch's tensors in its own tests.
    slow_unless(
        lambda rule, optimizer, path: (
            (rule, path) in ALWAYS_ON_DEVICE
            or ((rule, optimizer, path) in CHOSEN and (path == "host" or one_in_three(rule)))
        ),
        itertools.product(RULES, OPTIMIZERS, PATHS),
    ),
    indirect=["rule", "path"],
)
def test_every_rule_decides_as_the_specification(rule, optimizer, path):
    make, make_reference = OPTIMIZERS[optimizer]
    params = named(parameters())
    spec = reference.Guarded(
        {k: p.detach().numpy().copy() for k, p in params.items()}, make_reference(), **rule
    )
    opt = st.wrap(make(list(params.values())), names=params, **rule)
    for step in range(STEPS):
        grads = gradients(step, spec.loss_scale)
        for name, p in params.items():
            p.grad = torch.from_numpy(grads[name].copy())
        before = snapshot(opt)
        opt.scale(torch.tensor(loss_of(step)))
        opt.step()
        wanted, got = spec.step(grads, loss_of(step)), opt.last
        for key in ("step", "applied", "reason", "loss_scale", "skipped_total", "worst"):
            assert got[key] == wanted[key], (step, key)
        for key in ("grad_norm", "clip_coefficient"):
            assert got[key] == pytest.approx(wanted[key], rel=2e-5, nan_ok=True), (step, key)
        assert opt.loss_scale == spec.loss_scale
        if not got["applied"]:
            assert snapshot(opt) == before, "a skipped step changes no bit"
    assert not opt.history()[NAN - STEPS]["applied"]
    for name, p in params.items():
        np.testing.assert_allclose(p.detach().numpy(), spec.params[name], rtol=2e-4, atol=2e-5)
    assert_same(spec.guard_state_dict()["state"]["clip"], opt.guard_state_dict()["state"]["clip"])
    assert_same(spec.guard_state_dict()["state"]["spike"], opt.guard_state_dict()["state"]["spike"])


def test_the_stream_triggers_every_rule():
    """The comparison above would prove nothing about a rule that never acts."""
    for name, settings in RULES.items():
        params = {k: p.detach().numpy().copy() for k, p in named(parameters()).items()}
        spec = reference.Guarded(params, reference.SGD(lr=1e-2), **settings)
        rows = [spec.step(gradients(step, spec.loss_scale), loss_of(step)) for step in range(STEPS)]
        reasons = {stablenum.Reason(row["reason"]) for row in rows}
        scales = {row["loss_scale"] for row in rows}
        assert {
            stablenum.Reason.NAN_GRADIENT,
            stablenum.Reason.INF_GRADIENT,
            stablenum.Reason.OK,
        } <= reasons, name
        if spec.config.changes_gradients and not name.endswith("scale") and name != "hysteresis":
            assert reasons & {stablenum.Reason.CLIPPED, stablenum.Reason.SPIKE_CLIPPED}, name
        if name.endswith("scale") or name == "hysteresis":
            assert len(scales) > 2, name
        if name in ("spike skip", "spike mean"):
            assert reasons >= {stablenum.Reason.SPIKE_GRAD_NORM, stablenum.Reason.SPIKE_LOSS}, name
        if name == "spike clip":
            assert stablenum.Reason.SPIKE_CLIPPED in reasons


def assert_same(wanted, got) -> None:
    """The statistics of both agree, including infinities."""
    if isinstance(wanted, dict):
        assert wanted.keys() == got.keys()
        for key in wanted:
            assert_same(wanted[key], got[key])
    elif isinstance(wanted, list):
        for a, b in zip(wanted, got, strict=True):
            assert_same(a, b)
    else:
        assert float(got) == pytest.approx(float(wanted), rel=1e-4, abs=1e-7)
