"""The reference compared with oracles that share no code with it: torch.optim and exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from stablenum import ClipByNorm, ClipByValue, DynamicLossScale, GuardConfig, NonFiniteError, Reason
from stablenum.reference.guarded import SGD, Adam, AdamW, Guarded, measure, measure_loss, tensor_norm

F32_MAX = float(np.finfo(np.float32).max)


def exact_norm(values: np.ndarray) -> float:
    """The norm by rational arithmetic and an integer square root, rounded to float32 once."""
    total = sum((Fraction(float(v)) ** 2 for v in values.ravel()), Fraction(0))
    shift = 4**200
    root = Fraction(math.isqrt(int(total * shift * shift)), shift)
    return float(np.float32(min(float(root), F32_MAX)))


# ------------------------------------------------------------------------------------- measure


@pytest.mark.parametrize("magnitude", [1e-30, 1e-12, 1.0, 1e20, 1e37])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
def test_norm_is_exact(magnitude: float, dtype: Any) -> None:
    values = (np.random.default_rng(0).normal(size=(7, 5)) * magnitude).astype(dtype)
    assert float(tensor_norm(values)) == pytest.approx(exact_norm(values), rel=6e-8)


def test_norm_of_half_precision_beyond_its_own_range() -> None:
    values = np.full(5, 6e4, np.float16)
    assert float(tensor_norm(values)) == pytest.approx(exact_norm(values), rel=6e-8)
    assert float(tensor_norm(values)) > 65504


def test_norm_saturates_instead_of_overflowing() -> None:
    assert float(tensor_norm(np.full(9, 3e38, np.float32))) == F32_MAX
    assert float(tensor_norm(np.asarray([1e300]))) == F32_MAX


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([np.inf, np.nan, 1], "nan"),
        ([np.inf, 1], "inf"),
        ([-np.inf], "inf"),
        ([np.nan], "nan"),
        ([], "0.0"),
        ([0, 0], "0.0"),
    ],
)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
def test_norm_of_empty_and_non_finite_arrays(values: list[float], expected: str, dtype: Any) -> None:
    assert str(float(tensor_norm(np.asarray(values, dtype)))) == expected


def test_norm_of_complex_counts_both_parts() -> None:
    assert float(tensor_norm(np.asarray([3 + 4j, 0], np.complex64))) == 5.0
    assert math.isnan(tensor_norm(np.asarray([complex(1, math.nan)])))
    transposed = np.arange(6).reshape(2, 3).T * (1 + 1j)
    assert float(tensor_norm(transposed)) == pytest.approx(math.sqrt(2 * 55))


def test_missing_gradients_and_losses() -> None:
    assert measure([None, np.ones(4, np.float32)]).tolist() == [0.0, 2.0]
    assert measure([]).shape == (0,)
    assert measure_loss(None) is None
    assert measure_loss(-1e300) == -F32_MAX
    assert np.isposinf(measure_loss(np.inf))


# ---------------------------------------------------------------------------------- optimizers

PAIRS = {
    "sgd": (SGD(lr=0.05), lambda p: torch.optim.SGD(p, lr=0.05, foreach=False)),
    "sgd-momentum": (
        SGD(lr=0.05, momentum=0.9, weight_decay=1e-2, dampening=0.1),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-2, dampening=0.1, foreach=False),
    ),
    "sgd-nesterov": (
        SGD(lr=0.05, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, foreach=False),
    ),
    "adam": (Adam(lr=1e-2), lambda p: torch.optim.Adam(p, lr=1e-2, foreach=False)),
    "adam-l2": (
        Adam(lr=1e-2, weight_decay=1e-2, betas=(0.4, 0.99)),
        lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=1e-2, betas=(0.4, 0.99), foreach=False),
    ),
    "adamw": (AdamW(lr=1e-2), lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_optimizer_equals_torchs_within_ulps(name: str, dtype: Any) -> None:
    ours, make = PAIRS[name]
    rng = np.random.default_rng(1)
    start = rng.normal(size=(6, 4)).astype(dtype)
    train = Guarded([start], ours)
    param = torch.from_numpy(start.copy()).requires_grad_()
    theirs = make([param])
    for _ in range(200):
        gradient = rng.normal(size=start.shape).astype(dtype)
        train.step([gradient])
        param.grad = torch.from_numpy(gradient.copy())
        theirs.step()
    got, expected = train.params[0], param.detach().numpy()
    ulps = np.abs(got - expected) / np.spacing(np.maximum(np.abs(expected), np.abs(start)))
    assert got.dtype == dtype
    assert ulps.max() <= 40  # 200 roundings of a sum that moves by about 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_adam_equals_torchs_within_ulps(dtype: str) -> None:
    rng = np.random.default_rng(2)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
    start = rng.normal(size=20).astype(kind)
    train = Guarded([start], Adam(lr=1e-2))
    param = torch.tensor(start.astype(np.float32)).to(getattr(torch, dtype)).requires_grad_()
    theirs = torch.optim.Adam([param], lr=1e-2, foreach=False)
    for _ in range(20):
        gradient = rng.normal(size=20).astype(kind)
        train.step([gradient])
        param.grad = torch.tensor(gradient.astype(np.float32)).to(param.dtype)
        theirs.step()
    got, expected = train.params[0].astype(np.float32), param.detach().float().numpy()
    np.testing.assert_allclose(got, expected, rtol=0, atol=4 * float(ml_dtypes.finfo(kind).eps))


def test_pure_float16_adam_makes_nan_of_a_zero_gradient_as_torch_does() -> None:
    train = Guarded([np.ones(3, np.float16)], Adam())
    train.step([np.zeros(3, np.float16)])
    assert np.isnan(train.params[0]).all()
    param = torch.ones(3, dtype=torch.float16, requires_grad=True)
    param.grad = torch.zeros_like(param)
    torch.optim.Adam([param], foreach=False).step()
    assert param.isnan().all()


def test_complex_parameters_step_as_torchs_do() -> None:
    start = np.asarray([[1 + 2j, -3j], [0.5, 1]], np.complex64)
    gradient = np.asarray([[1 - 1j, 2], [3j, -1 + 1j]], np.complex64)
    train = Guarded({"w": start}, Adam(lr=0.1))
    param = torch.from_numpy(start.copy()).requires_grad_()
    theirs = torch.optim.Adam([param], lr=0.1, foreach=False)
    for _ in range(5):
        train.step({"w": gradient})
        param.grad = torch.from_numpy(gradient.copy())
        theirs.step()
    np.testing.assert_allclose(train.params["w"], param.detach().numpy(), rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: SGD(lr=-1), "SGD.lr"),
        (lambda: SGD(lr=1, nesterov=True), "SGD.nesterov"),
        (lambda: SGD(lr=1, momentum=math.nan), "SGD.momentum"),
        (lambda: Adam(eps=-1e-8), "Adam.eps"),
        (lambda: Adam(betas=(0.9, 1.0)), "Adam.betas[1]"),
    ],
)
def test_wrong_optimizer_settings_are_named(make: Any, field: str) -> None:
    with pytest.raises(ValueError, match=field.replace("[", r"\[")):
        make()


# -------------------------------------------------------------------------------------- driver


def bits(train: Guarded) -> list[bytes]:
    state = [part.tobytes() for s in train.opt_state for part in s if isinstance(part, np.ndarray)]
    return [p.tobytes() for p in train._params] + state + [repr([s[0] for s in train.opt_state]).encode()]


@pytest.mark.parametrize("optimizer", [SGD(lr=0.1, momentum=0.9), AdamW(lr=0.1)])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_skipped_step_changes_no_bit(optimizer: Any, value: float) -> None:
    rng = np.random.default_rng(3)
    train = Guarded([rng.normal(size=5).astype(np.float32)], optimizer, clip=1.0, loss_scale="dynamic")
    train.step([rng.normal(size=5).astype(np.float32)])
    before = bits(train)
    bad = rng.normal(size=5).astype(np.float32)
    bad[2] = value
    last = train.step([bad])
    assert bits(train) == before
    assert last["applied"] is False
    assert last["reason"] in (Reason.NAN_GRADIENT, Reason.INF_GRADIENT)
    assert train.loss_scale == 2.0**15


@pytest.mark.parametrize("optimizer", [SGD(lr=0.1, momentum=0.9), Adam(lr=0.1)])
def test_bad_steps_have_no_effect(optimizer: Any) -> None:
    rng = np.random.default_rng(4)
    start = [rng.normal(size=5).astype(np.float32)]
    gradients = [rng.normal(size=5).astype(np.float32) for _ in range(20)]
    clean, rough = Guarded(start, optimizer, clip=1.0), Guarded(start, optimizer, clip=1.0)
    for i, gradient in enumerate(gradients):
        if i % 3 == 0:
            rough.step([np.where(np.arange(5) == i % 5, np.nan, gradient).astype(np.float32)])
        clean.step([gradient])
        rough.step([gradient])
    assert bits(clean) == bits(rough)


def test_the_callers_arrays_are_never_written() -> None:
    start, gradient = np.ones(3, np.float32), np.ones(3, np.float32)
    train = Guarded([start], SGD(lr=1.0, momentum=0.9), clip=0.1, loss_scale=8.0)
    train.step([gradient])
    train.step([gradient])
    assert start.tolist() == gradient.tolist() == [1, 1, 1]
    train.params[0].sum()
    assert train.params[0].tolist() != [1, 1, 1]


def test_per_tensor_and_element_clips() -> None:
    params = {"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)}
    train = Guarded(params, SGD(lr=1.0), clip=(ClipByNorm(5.0), ClipByValue(3.5)), loss_scale=4.0)
    raw = {"a": np.asarray([24, 32], np.float32) * 4, "b": np.asarray([0.3, -9.0], np.float32) * 4}
    train.step(raw)
    assert train.params["a"].tolist() == pytest.approx([-3.0, -3.5], rel=1e-5)
    assert train.params["b"][1] == pytest.approx(3.5)
    assert train.last["worst"] == (0, "a")


def test_a_parameter_without_gradient_stays() -> None:
    train = Guarded([np.ones(2, np.float32), np.ones(2, np.float32)], SGD(lr=1.0, weight_decay=0.1))
    train.step([None, np.ones(2, np.float32)])
    assert train.params[0].tolist() == [1, 1]
    assert train.params[1][0] == pytest.approx(-0.1)


def test_stopping_raises_and_names_the_parameter() -> None:
    train = Guarded({"w": np.ones(2, np.float32)}, SGD(lr=1.0), max_skips_in_a_row=2)
    bad = {"w": np.asarray([np.nan, 0], np.float32)}
    train.step(bad)
    with pytest.raises(NonFiniteError, match="First bad parameter: w"):
        train.step(bad)
    assert train.params["w"].tolist() == [1, 1]


def test_guard_state_round_trip() -> None:
    config = GuardConfig(loss_scale=DynamicLossScale(growth_interval=3))
    one, two = (Guarded([np.ones(2, np.float32)], SGD(lr=0.1), config) for _ in range(2))
    for gradient in ([1, 1], [np.inf, 1], [1, 1], [1, 1]):
        one.step([np.asarray(gradient, np.float32)])
    two.load_guard_state_dict(one.guard_state_dict())
    assert repr(two.history()) == repr(one.history())
    assert two.loss_scale == one.loss_scale == 2.0**15


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Guarded([np.ones(2, np.int32)], SGD(lr=1)), r"params\[0\]"),
        (lambda: Guarded([np.ones(2)], SGD(lr=1)).step([]), "gradients"),
        (lambda: Guarded([np.ones(2)], SGD(lr=1)).step([np.ones(3)]), r"gradients\[0\] must be of shape"),
        (lambda: Guarded({"w": np.ones(2)}, SGD(lr=1)).step([np.ones(2)]), "keys w"),
        (lambda: Guarded({"w": np.ones(2)}, SGD(lr=1)).load_guard_state_dict({}), "guard state"),
    ],
)  # fmt: skip
def test_wrong_input_is_named(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.bool_, np.object_])
def test_gradients_without_a_floating_dtype_are_rejected(dtype: Any) -> None:
    """Multiplied by a factor below 1, integers would all be rounded to 0."""
    train = Guarded({"w": np.ones(2, np.float32)}, SGD(lr=0.1), clip=1.0)
    gradients = {"w": np.asarray([3, 4]).astype(dtype)}
    with pytest.raises(
        ValueError, match=r"gradients\[w\] must be of a floating-point dtype; got dtype.*float32"
    ):
        train.step(gradients)
    assert train.params["w"].tolist() == [1.0, 1.0]
    assert int(train.state.skipped_total) == 0
