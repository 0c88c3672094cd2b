"""The largest element and the fraction that float16 would lose, counted against plain Python."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

import stablenum
import stablenum_torch as st
from stablenum.formats import FLOAT32_MAX
from stablenum_torch._step.inputs import StepInputs
from stablenum_torch._step.measure.elements import extremes_on_host, extremes_without_wait

BOTH = frozenset({"amax", "tiny"})


def on_host(grads, needs=BOTH):
    return extremes_on_host(grads, needs)


def on_device(grads, needs=BOTH):
    params = [SimpleNamespace(grad=g) for g in grads]
    inputs = StepInputs(SimpleNamespace(needs=needs), params, (), torch.device("cpu"))
    return extremes_without_wait(inputs).joined()


@pytest.fixture(params=[on_host, on_device])
def measure(request):
    return request.param


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_extremes_match_a_count_element_by_element(measure, dtype):
    g = torch.Generator().manual_seed(0)
    grads = [(torch.randn(shape, generator=g) * 1e-6).to(dtype) for shape in ((70_000,), (3, 5), (4, 4))]
    grads[1][0, 0] = 0.0
    grads[1][0, 1] = 2.0**-24
    grads[1][0, 2] = -(2.0**-24)
    grads[2] = grads[2].t()[1:]
    grads.insert(1, None)
    grads.append(torch.zeros(0, dtype=dtype))
    elements = [abs(x) for grad in grads if grad is not None for x in grad.flatten().tolist()]
    nonzero = [x for x in elements if x != 0]
    amax, tiny = measure(grads)
    assert amax.item() == pytest.approx(max(elements), rel=1e-7)
    assert tiny.item() == pytest.approx(sum(x <= 2.0**-24 for x in nonzero) / len(nonzero), rel=1e-6)
    assert str(amax.dtype).endswith("float32")
    assert str(tiny.dtype).endswith("float32")
    assert amax.shape == tiny.shape == ()


@pytest.mark.parametrize("grads", [[None], [torch.zeros(3)], [torch.zeros(0)], [None, torch.zeros(2, 2)]])
def test_extremes_without_anything_to_count(measure, grads):
    amax, tiny = measure(grads)
    assert (amax.item(), tiny.item()) == (0.0, 0.0)


def test_complex_and_sparse(measure):
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 2, 2]]), torch.tensor([3.0, 1e-9, 1e-9]), (4,), check_invariants=True
    )
    complex_ = torch.tensor([complex(-5, 1e-9), 0], dtype=torch.complex64)
    amax, tiny = measure([sparse, complex_])
    assert amax.item() == 5.0
    assert tiny.item() == pytest.approx(0.5)  # 3, 2e-9; -5, 1e-9


def test_float64_beyond_float32_saturates(measure):
    amax, tiny = measure([torch.tensor([1e300, 1e-300], dtype=torch.float64)])
    assert amax.item() == pytest.approx(FLOAT32_MAX)
    assert tiny.item() == 0.5


def test_only_what_is_needed_is_measured(measure):
    grads = [torch.ones(3)]
    assert measure(grads, frozenset()) == (None, None)
    amax, tiny = measure(grads, frozenset({"amax"}))
    assert amax.item() == 1.0
    assert tiny is None


def test_scales_follow_the_gradients(path):
    w = torch.nn.Parameter(torch.zeros(100))
    opt = st.wrap(torch.optim.SGD([w], lr=0.0), loss_scale=stablenum.LogMaxLossScale(init_scale=2.0))
    for _ in range(3):
        w.grad = torch.full((100,), 3.0) * opt.loss_scale
        opt.step()
    assert opt.loss_scale == 2.0 ** math.floor(16 - math.log2(3))
    opt = st.wrap(torch.optim.SGD([w], lr=0.0), loss_scale=stablenum.UnderflowAwareLossScale(init_scale=1.0))
    seen = []
    for _ in range(12):
        w.grad = torch.full((100,), 2.0**-30) * opt.loss_scale
        opt.step()
        seen.append(opt.loss_scale)
    # 2^-30 times 2^6 is 2^-24, still lost; after one more doubling nothing is lost.
    assert seen[:8] == [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 128.0]
    w.grad = torch.full((100,), math.inf)
    opt.step()
    assert opt.loss_scale == 64.0


@pytest.mark.parametrize("loss", [-1e300, -3.4028234663852886e38, 1e300])
def test_a_loss_beyond_float32_is_a_loss_that_was_given(path, loss):
    w = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    opt = st.wrap(torch.optim.SGD([w], lr=0.1))
    opt.backward(w.sum() * 0 + loss)
    opt.step()
    assert opt.last["applied"]
    assert opt.last["loss"] == pytest.approx(math.copysign(3.4028235e38, loss), rel=1e-6)
