"""8-bit products: scales and rounding against oracles, the native product, and recovery from bad values."""

from __future__ import annotations

import copy
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

import stablenum
import stablenum_torch as st
from tests.torch.digits import accuracy, digits, train

BF16 = torch.bfloat16
TOP = {"e4m3": 448.0, "e5m2": 57344.0}
FORMAT = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
POLICY = "p=f32,c=fp8,o=f32"


def oracle_scale(kind: str, amaxes: list[float]) -> float:
    """The power of two below ``top / max``; 1 if nothing was seen."""
    seen = [a for a in amaxes if math.isfinite(a) and a > 0]
    return 2.0 ** (math.frexp(TOP[kind] / max(seen))[1] - 1) if seen else 1.0


def oracle_rounded(x: torch.Tensor, kind: str, scale: float) -> np.ndarray:
    scaled = np.clip(x.detach().double().numpy() * scale, -TOP[kind], TOP[kind])
    return scaled.astype(np.float32).astype(FORMAT[kind]).astype(np.float64) / scale


def layer(n_in: int = 16, n_out: int = 32, **kwargs) -> tuple[nn.Sequential, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(n_in, n_out))
    st.precision(model, POLICY, **kwargs)
    return model, model[0].fp8


def test_scales_and_roundings_match_the_oracle() -> None:
    model, state = layer()
    g = torch.Generator().manual_seed(1)
    seen = {"x": [], "w": [], "g": []}
    for step in range(12):
        x = (torch.randn(48, 16, generator=g) * 10.0 ** (step % 5 - 2)).bfloat16().float().requires_grad_()
        coefficients = torch.randn(48, 32, generator=g).bfloat16().float() * 0.01
        weight = model[0].weight.detach().bfloat16()
        if step in (0, 3):
            with torch.no_grad():
                model[0].weight.mul_(2)
            weight = model[0].weight.detach().bfloat16()
        used = {}
        for name, kind, value in (
            ("x", "e4m3", x),
            ("w", "e4m3", weight),
            ("g", "e5m2", coefficients.bfloat16()),
        ):
            amax = float(value.detach().abs().max())
            used[name] = oracle_scale(kind, seen[name] or [amax])  # at first by its own maximum
            seen[name].append(amax)
        model.zero_grad()
        y = model(x)
        (y * coefficients).sum().backward()
        xq, wq = oracle_rounded(x, "e4m3", used["x"]), oracle_rounded(weight, "e4m3", used["w"])
        gq = oracle_rounded(coefficients.bfloat16(), "e5m2", used["g"])
        bias = model[0].bias.detach().bfloat16().double().numpy()
        for got, expected in (
            (y, xq @ wq.T + bias),
            (x.grad, gq @ wq),
            (model[0].weight.grad, gq.T @ xq),
        ):
            expected = torch.from_numpy(expected)
            assert (got.double() - expected).norm() <= 6e-3 * expected.norm(), step
        assert state.scale.tolist() == [oracle_scale("e4m3", seen["x"]), oracle_scale("e4m3", seen["w"])]
        assert state.gradient_scale.tolist() == [oracle_scale("e5m2", seen["g"])]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("native", [False, True])
def test_non_finite_values_pass_through_and_leave_the_scales_unchanged(bad: float, native: bool) -> None:
    model, state = layer(native=native)
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    model(x).sum().backward()
    before = copy.deepcopy(state.state_dict())
    spoilt = x.clone()
    spoilt[3, 4] = bad
    y = model(spoilt)
    assert not torch.isfinite(y[3]).any()
    assert torch.isfinite(y[:3]).all()
    (y.nan_to_num(0.0, 0.0, 0.0) * spoilt[0, :1]).sum().backward()
    assert torch.equal(state.scale, before["scale"])
    for buffer in state.buffers():
        assert torch.isfinite(buffer).all()
    model.zero_grad()
    (model(x) * bad).sum().backward()
    assert not torch.isfinite(model[0].weight.grad).any()
    assert torch.equal(state.gradient_scale, before["gradient_scale"])
    assert torch.isfinite(model(x)).all()


def test_a_value_beyond_the_scale_saturates_once() -> None:
    model, _ = layer()
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(32, 16))
        model[0].bias.zero_()
    model(torch.ones(16, 16))
    first = model(torch.full((16, 16), 1000.0))[0, 0].item()
    second = model(torch.full((16, 16), 1000.0))[0, 0].item()
    assert first == 448 / 256  # the scale of 1.0 is 2^8
    assert abs(second - 1000) <= 1000 / 16


def test_evaluation_uses_the_scales_without_changing_them() -> None:
    model, state = layer()
    model(torch.ones(16, 16))
    before = copy.deepcopy(state.state_dict())
    model.eval()
    model(torch.full((16, 16), 3.0))
    model.train()
    with torch.no_grad():
        model(torch.full((16, 16), 3.0))
    assert all(torch.equal(state.state_dict()[key], value) for key, value in before.items())


def test_the_native_product_matches_the_emulated_one() -> None:
    """torch has it on CPUs too, in plain loops; sizes that it does not support are emulated."""
    for rows, size in ((32, 32), (5, 20)):
        models = [layer(size, size, native=native)[0] for native in (False, True)]
        g = torch.Generator().manual_seed(2)
        for _ in range(3):
            x = torch.randn(2, rows // 2, size, generator=g)
            found = []
            for model in models:
                a = x.clone().requires_grad_()
                model.zero_grad()
                y = model(a)
                y.square().sum().backward()
                found.append((y, a.grad, model[0].weight.grad, model[0].bias.grad))
            for one, other in zip(*found, strict=True):
                assert (one - other).norm() <= 0.01 * one.norm()
            assert torch.equal(models[0][0].fp8.scale, models[1][0].fp8.scale)


@pytest.mark.gpu
def test_the_native_product_on_a_gpu() -> None:
    torch.manual_seed(0)
    model = nn.Linear(256, 512).cuda()
    other = copy.deepcopy(model)
    st.precision(other, POLICY, native=False)
    st.precision(model, POLICY)
    if torch.cuda.get_device_capability() >= (8, 9):
        assert model.fp8.native
    x = torch.randn(64, 256, device="cuda")
    for m in (model, other):
        m(x).square().sum().backward()
    assert (model(x) - other(x)).norm() <= 0.01 * other(x).norm()
    assert (model.weight.grad - other.weight.grad).norm() <= 0.02 * other.weight.grad.norm()


def test_statistics_are_saved_with_the_model_and_removed_with_the_policy() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    keys = set(model.state_dict())
    plain = copy.deepcopy(model.state_dict())
    handle = st.precision(model, POLICY)
    model(torch.randn(8, 16)).sum().backward()
    saved = model.state_dict()
    assert {key for key in saved if ".fp8." not in key} == keys
    assert len(saved) == len(keys) + 8
    other = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    st.precision(other, POLICY)
    other.load_state_dict(saved)
    x = torch.randn(8, 16)
    assert torch.equal(other(x), model(x))
    other.load_state_dict(plain)  # of before: statistics stay
    assert torch.equal(other[0].fp8.gradient_scale, model[0].fp8.gradient_scale)
    model.half()
    assert {b.dtype for m in (model[0].fp8, model[2].fp8) for b in m.buffers()} == {torch.float32}
    model.float()
    handle.remove()
    assert set(model.state_dict()) == keys
    assert "forward" not in model[0].__dict__


def test_rules_exclude_layers_and_autocast_can_be_combined() -> None:
    for how in ("casts", "autocast"):
        model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16))
        st.precision(model, stablenum.Policy.parse(POLICY, rules={"1": "float32", "2": "bf16"}), how=how)
        assert hasattr(model[0], "fp8")
        assert not hasattr(model[2], "fp8")
        y = model(torch.randn(16, 16))
        y.sum().backward()
        assert y.dtype == torch.float32
        assert model[0].weight.grad.dtype == torch.float32


def test_empty_batches_and_copies() -> None:
    model, _ = layer()
    assert model(torch.zeros(0, 16)).shape == (0, 32)
    twin = copy.deepcopy(model)
    twin(torch.ones(2, 16))
    assert model[0].fp8.history.abs().sum() < twin[0].fp8.history.abs().sum()
    torch.testing.assert_close(model(torch.ones(2, 16)), twin(torch.ones(2, 16)))


@pytest.mark.slow
def test_a_network_on_digits_is_as_good_as_in_bfloat16_and_survives_an_inf() -> None:
    data = digits()
    found = {}
    for name in ("p=f32,c=bf16,o=f32", POLICY, "an inf on the way"):
        spoil = 40 if name == "an inf on the way" else None
        model = train(data, policy=POLICY if spoil else name, spoil=spoil)[0]
        found[name] = accuracy(model, data)
    bf16, fp8, spoilt = found.values()
    assert bf16 > 0.95
    assert fp8 >= bf16 - 0.01, found
    assert spoilt >= bf16 - 0.01, found
