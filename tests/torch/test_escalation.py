"""Escalation in torch: autocast follows the guard's level, which matches the NumPy specification."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import stablenum
import stablenum_torch as st
from stablenum.reference.guarded import AdamW, Guarded
from tests.backends import BACKENDS
from tests.torch.digits import Digits, digits

BAD = range(40, 110)
RULE = stablenum.EscalatePrecision(after=3, for_steps=30)


def network() -> nn.Module:
    """A first layer whose outputs grow with the inputs, and a norm that removes their scale."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 48, bias=False), nn.LayerNorm(48), nn.ReLU(), nn.Linear(48, 10))


def train(data: Digits, how: str, steps: int = 240) -> tuple[float, list[dict[str, Any]], list[torch.dtype]]:
    """The test accuracy, the history of the steps, and the first layer's dtypes.

    The batches of ``BAD`` are so large that products overflow float16.
    """
    model = network()
    handle = (
        st.precision(model, stablenum.Policy.parse("p=f32,c=f16,o=f32", rules={"1": "f32"}))
        if how == "policy"
        else None
    )
    rule = None if how in ("float32", "float16") else RULE
    opt = st.wrap(torch.optim.AdamW(model.parameters(), lr=3e-3), loss_scale="dynamic", escalate=rule)
    seen: list[torch.dtype] = []
    rows: list[dict[str, Any]] = []
    model[0].register_forward_hook(lambda m, args, y: seen.append(y.dtype))
    g = torch.Generator().manual_seed(2)
    for step in range(steps):
        chosen = torch.randint(len(data.x), (96,), generator=g)
        x = data.x[chosen] * (2.0**18 if step in BAD else 1.0)
        opt.zero_grad()
        with opt.autocast(torch.float32 if how == "float32" else None, policy=handle):
            loss = F.cross_entropy(model(x).float(), data.y[chosen])
        opt.backward(loss)
        opt.step()
        rows.append(opt.history()[-1])
    with torch.no_grad():
        right = (model(data.test_x).argmax(1) == data.test_y).float().mean()
    return float(right), rows, seen[:steps]


def specification(rows: list[dict[str, Any]]) -> list[int]:
    """The levels that NumPy computes from the measured norms and losses."""
    numpy = BACKENDS["numpy"]
    config = stablenum.GuardConfig(loss_scale="dynamic", escalate=RULE)
    run, state, levels = numpy.prepare(config), numpy.init(config, 1), []
    for row in rows:
        levels.append(int(state.escalation.level))
        norm = row["grad_norm"] * float(state.loss_scale.scale)
        _, state = run(state, numpy.observe([norm], loss=row["loss"]))
    return levels


@pytest.mark.slow(reason="four trainings of 2 to 3 s")
@pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype is not supported")
def test_a_bad_stretch_ends_as_accurate_as_float32_at_the_levels_of_the_specification() -> None:
    data = digits()
    wide, _, _ = train(data, "float32")
    _, skipped, _ = train(data, "float16")
    assert sum(not row["applied"] for row in skipped) >= len(BAD)
    for how in ("autocast", "policy"):
        right, rows, seen = train(data, how)
        levels = [row["precision_level"] for row in rows]
        assert right >= wide - 0.005, how
        assert sum(not row["applied"] for row in rows) < len(BAD) / 3
        assert levels == specification(rows)
        assert seen == [(torch.float16, torch.float32)[level] for level in levels], (
            "what ran is what was decided"
        )
        assert {0, 1} == set(levels)
        assert levels[-1] == 0


def test_the_levels_match_the_specification() -> None:
    """The same gradients through the NumPy reference: the same level at every step."""
    rule = stablenum.EscalatePrecision(after=2, for_steps=3, formats=("float16", "bfloat16", "float32"))
    settings = {"escalate": rule, "loss_scale": "dynamic", "clip": 1.0}
    p = nn.Parameter(torch.ones(4))
    opt = st.wrap(torch.optim.AdamW([p], lr=1e-2), **settings)
    reference = Guarded([np.ones(4, np.float32)], AdamW(lr=1e-2), **settings)
    rng, dtypes = np.random.default_rng(4), []
    formats = {0: torch.float16, 1: torch.bfloat16}
    for _ in range(120):
        grad = rng.normal(size=4).astype(np.float32)
        if rng.random() < 0.45:
            grad[rng.integers(4)] = rng.choice([np.inf, np.nan])
        level = int(reference.state.escalation.level)
        with opt.autocast():
            dtypes.append(torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"))
        assert dtypes[-1] == formats.get(level, False)
        p.grad = torch.from_numpy(grad.copy())
        opt.step()
        assert reference.step([grad])["precision_level"] == opt.last["precision_level"]
    assert {False, torch.float16, torch.bfloat16} <= set(dtypes)


def test_without_escalation_autocast_is_unchanged() -> None:
    params = [nn.Parameter(torch.ones(2))]
    for settings, dtype, expected in (
        ({}, None, torch.bfloat16),
        ({"loss_scale": 8.0}, None, torch.float16),
        ({"loss_scale": 8.0}, torch.bfloat16, torch.bfloat16),
    ):
        opt = st.wrap(torch.optim.SGD(params, lr=0.1), **settings)
        context = opt.autocast(dtype) if dtype else opt.autocast()
        assert isinstance(context, torch.autocast)
        with context:
            assert torch.is_autocast_enabled("cpu")
            assert torch.get_autocast_dtype("cpu") == expected
    for policy, expected in (("p=f32,c=f16", torch.float16), ("fp8", torch.bfloat16), ("f32", None)):
        with opt.autocast(policy=policy):
            assert torch.is_autocast_enabled("cpu") is (expected is not None)
            assert expected is None or torch.get_autocast_dtype("cpu") == expected
    with pytest.raises(TypeError, match="policy must be"):
        opt.autocast(policy=3)


def test_eight_bit_layers_follow_the_levels() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    handle = st.precision(model, stablenum.Policy.parse("p=f32,c=fp8", rules={"1": "f16"}))
    rule = stablenum.EscalatePrecision(after=1, for_steps=2, formats=("fp8", "bf16", "f32"))
    opt = st.wrap(torch.optim.SGD(model.parameters(), lr=0.1), escalate=rule)
    seen = []
    for bad in (True, True, False, False, False, False, False):
        with opt.autocast(policy=handle):
            seen.append([handle.compute_format(m) for m in model])
            loss = model(torch.ones(2, 4)).float().sum()
        opt.zero_grad()
        opt.backward(loss * (torch.inf if bad else 1.0))
        opt.step()
    levels = [row["precision_level"] for row in opt.history()]
    assert levels == [0, 1, 2, 2, 1, 1, 0]
    names = {0: ["float8_e4m3fn", "float16"], 1: ["bfloat16", "bfloat16"], 2: ["float32", "float32"]}
    assert seen == [names[level] for level in levels]
    assert handle.compute_format(model[0]) == "float8_e4m3fn"


def test_levels_that_do_not_begin_at_the_policy_raise() -> None:
    model = nn.Linear(2, 2)
    opt = st.wrap(torch.optim.SGD(model.parameters(), lr=0.1), escalate=stablenum.EscalatePrecision())
    with st.precision(model, "p=f32,c=bf16") as handle:
        for policy in (handle, handle.policy, "p=f32,c=bf16"):
            with pytest.raises(ValueError, match=r"formats that begin with the policy's own, bfloat16"):
                opt.autocast(policy=policy)
    with opt.autocast(policy="p=f32,c=f16"):
        assert torch.get_autocast_dtype("cpu") == torch.float16


def test_the_level_is_saved_and_restored() -> None:
    def make() -> tuple[nn.Parameter, st.GuardedOptimizer]:
        p = nn.Parameter(torch.ones(2))
        return p, st.wrap(torch.optim.SGD([p], lr=0.1), escalate=stablenum.EscalatePrecision(after=1))

    p, opt = make()
    p.grad = torch.full((2,), torch.nan)
    opt.step()
    _, other = make()
    other.load_state_dict(opt.state_dict())
    with other.autocast():
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.gpu
def test_on_a_gpu_the_level_is_read_without_a_wait() -> None:
    p = nn.Parameter(torch.ones(4, device="cuda"))
    rule = stablenum.EscalatePrecision(after=2, for_steps=4)
    opt = st.wrap(torch.optim.AdamW([p], fused=True), escalate=rule)
    bad, good = torch.full((4,), torch.nan, device="cuda"), torch.ones(4, device="cuda")
    p.grad = good.clone()
    opt.step()
    states = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(20):
            with opt.autocast():
                states.append(torch.is_autocast_enabled("cuda"))
            p.grad = (bad if 4 <= step < 8 else good).clone()
            opt.step()
            torch.cuda.current_stream().query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    for _ in range(2):
        context = opt.autocast()
        torch.cuda.synchronize()
    assert context._enabled is (opt.guard_state.escalation.level.item() == 0)
    assert states[0]
