"""Norms against exact sums in rational arithmetic, on the host path and the device path."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stablenum.formats import FLOAT32_MAX
from stablenum_torch._step.measure.norms import norms_on_host, norms_without_wait

CPU = torch.device("cpu")
MEASURES = {
    "host": lambda grads: norms_on_host(grads).tolist(),
    "device": lambda grads: norms_without_wait(grads, CPU).tolist(),
}


@pytest.fixture(params=list(MEASURES))
def measure(request):
    return MEASURES[request.param]


def exact(values: list[float]) -> float:
    """The norm, rounded only at the end: an exact sum of exact squares."""
    from fractions import Fraction

    total = sum(Fraction(v) ** 2 for v in values)
    shift = 0 if total == 0 else (total.numerator.bit_length() - total.denominator.bit_length()) // 2
    return min(math.ldexp(math.sqrt(total / Fraction(4) ** shift), shift), FLOAT32_MAX)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=20))
def test_finite_gradients_have_their_exact_norm(values):
    grad = torch.tensor(values, dtype=torch.float32)
    for measure in MEASURES.values():
        (norm,) = measure([grad])
        # Below float32's normal range the result is rounded to its subnormals.
        assert norm == pytest.approx(exact(grad.tolist()), rel=1e-6, abs=1e-44)


@given(
    st.lists(st.floats(width=16), min_size=1, max_size=8), st.sampled_from([torch.float16, torch.bfloat16])
)
def test_non_finite_if_and_only_if_an_element_is(values, dtype):
    grad = torch.tensor(values, dtype=torch.float64).to(dtype)
    for measure in MEASURES.values():
        (norm,) = measure([grad])
        assert math.isfinite(norm) == bool(torch.isfinite(grad).all())
        assert math.isnan(norm) == bool(torch.isnan(grad).any())


@pytest.mark.parametrize("size", [2**16, 2**16 + 1, 2**18 + 7, 2**22])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_tensors_keep_six_digits(measure, size, dtype):
    grad = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    (norm,) = measure([grad])
    assert norm == pytest.approx(grad.double().norm().item(), rel=1e-6)


def test_torchs_own_float32_norm_loses_digits_of_large_tensors():
    grad = torch.randn(2**24, generator=torch.Generator().manual_seed(0))
    (norm,) = torch._foreach_norm([grad])
    assert abs(norm.item() / grad.double().norm().item() - 1) > 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_of_several_large_tensors_has_its_own_norm(measure, dtype):
    g = torch.Generator().manual_seed(0)
    # In one, two, one and four pieces, with a small tensor among them.
    sizes = (2**16 + 1, 2**19, 70_000, 5, 2**20 + 3)
    grads = [(i + 1) * torch.randn(size, generator=g).to(dtype) for i, size in enumerate(sizes)]
    wanted = [grad.double().norm().item() for grad in grads]
    assert measure(grads) == pytest.approx(wanted, rel=1e-6)


def test_many_tensors_of_all_kinds(measure):
    g = torch.Generator().manual_seed(0)
    complex_ = torch.complex(torch.randn(5, generator=g), torch.randn(5, generator=g))
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 2, 2]]), torch.tensor([3.0, 1.0, 3.0]), (4,), check_invariants=True
    )
    grads = [
        torch.randn(3, 4, generator=g),
        None,
        torch.zeros(0),
        torch.randn(2**17, generator=g).view(2, -1).t(),
        complex_,
        sparse,
        torch.full((3,), 1e300, dtype=torch.float64),
        torch.full((3,), 2.0, dtype=torch.float64),
        torch.full((3,), 6e4, dtype=torch.float16),
        torch.zeros(5),
    ]
    wanted = [
        grads[0].double().norm().item(),
        0.0,
        0.0,
        grads[3].double().norm().item(),
        complex_.abs().double().norm().item(),
        5.0,
        FLOAT32_MAX,
        2 * math.sqrt(3),
        grads[8].double().norm().item(),
        0.0,
    ]
    assert measure(grads) == pytest.approx(wanted, rel=1e-6)


def test_nan_wins_over_overflow(measure):
    grad = torch.full((4,), 1e30)
    grad[2] = math.nan
    assert math.isnan(measure([grad])[0])
    grad[2] = -math.inf
    assert measure([grad])[0] == math.inf


def test_norms_without_anything_to_measure(measure):
    assert measure([]) == []
    assert measure([None, None]) == [0.0, 0.0]


def test_small_float32_tensors_are_measured_by_one_call(monkeypatch):
    """Per tensor, a step of a small model would take longer than the optimizer's own."""
    calls = []
    many = torch._foreach_norm
    monkeypatch.setattr(torch, "_foreach_norm", lambda *a, **k: calls.append(a) or many(*a, **k))
    monkeypatch.setattr("stablenum_torch._step.measure.norms._norms_of_any", None)
    assert norms_on_host([torch.full((4,), 1.0), torch.full((9,), 2.0)]).tolist() == [2.0, 6.0]
    assert len(calls) == 1


def test_a_gradient_that_has_a_gradient_is_measured():
    grad = torch.full((4,), 2.0, requires_grad=True) * 3.0
    with torch.no_grad():  # as in every step
        assert norms_on_host([grad]).tolist() == [12.0]
