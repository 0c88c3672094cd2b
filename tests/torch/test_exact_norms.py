"""``exact_norms=True`` in one process: the norm is the true one, rounded once."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

import stablenum_torch as st
from stablenum import AdaGC
from stablenum_torch._step.guard import on_device_path
from tests.selection import only


def true_norm(*grads: torch.Tensor) -> float:
    """The norm in rational arithmetic, rounded to float32 once."""
    total = sum(Fraction(x) ** 2 for g in grads for x in g.double().flatten().tolist())
    root = Fraction(math.isqrt(total.numerator * 2**400 // total.denominator), 2**200)
    return float(np.float32(float(root)))


def stepped(grads, **settings):
    params = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
    opt = st.wrap(torch.optim.SGD(params, lr=1.0), exact_norms=True, **settings)
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    opt.step()
    return opt.last


@pytest.fixture(params=only(["host"], ["host", "device"]), autouse=True)
def path(request):
    if request.param == "host":
        yield
    else:
        with on_device_path():
            yield


def spread(seed, n, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, generator=generator) * torch.exp(8 * torch.randn(n, generator=generator))).to(
        dtype
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(6))
def test_the_norm_is_the_true_one_rounded_once(seed, dtype):
    grads = [spread(seed, 301, dtype), spread(seed + 100, 17, dtype)]
    assert stepped(grads)["grad_norm"] == true_norm(*grads)


def test_the_order_of_elements_makes_no_difference():
    g = spread(3, 5000)
    norms = {stepped([g[torch.randperm(len(g))]])["grad_norm"] for _ in range(5)}
    assert len(norms) == 1


def test_many_pieces_are_added_up_without_rounding(monkeypatch):
    """More pieces than are added up at once."""
    monkeypatch.setattr("stablenum_torch._step.measure.exactly._AT_A_TIME", 7)
    g = spread(4, 2500)
    assert stepped([g])["grad_norm"] == true_norm(g)


@pytest.mark.parametrize(("bad", "reason"), [(math.nan, "NAN_GRADIENT"), (math.inf, "INF_GRADIENT")])
def test_a_step_that_is_not_finite_is_skipped(bad, reason):
    last = stepped([torch.tensor([1.0, bad]), torch.ones(3)])
    assert (last["applied"], last["reason"].name, last["worst"].index) == (False, reason, 0)


def test_zero_empty_and_missing_gradients_have_the_norm_0():
    assert stepped([torch.zeros(3), torch.zeros(0)])["grad_norm"] == 0


def test_huge_and_tiny_gradients_have_finite_norms():
    assert stepped([torch.full((4,), 1e38)])["grad_norm"] == true_norm(torch.full((4,), 1e38))
    assert stepped([torch.full((4,), 2.0**-140)])["grad_norm"] == true_norm(torch.full((4,), 2.0**-140))
    assert stepped([torch.full((9,), 3e38)])["applied"]


def test_norms_of_parameters_are_exact_too():
    grads = [spread(8, 400), spread(9, 400) * 1e-3]
    opts = []
    for order in (slice(None), slice(None, None, -1)):
        params = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
        opt = st.wrap(torch.optim.SGD(params, lr=1.0), exact_norms=True, clip=AdaGC(warmup_steps=1))
        for step in range(3):
            for p, g in zip(params, grads, strict=True):
                p.grad = (g * (step + 1))[order] if order.step is None else (g * (step + 1)).flip(0)
            opt.step()
        opts.append([row["clip_coefficient"] for row in opt.history()])
    assert opts[0] == opts[1]


@pytest.mark.parametrize("seed", range(4))
def test_sums_are_those_that_the_core_defines(seed):
    """The core reads them from the bits of the elements, in integers."""
    import array_api_compat.numpy as xp

    from stablenum.norms.exact_sums import summed
    from stablenum_torch._step.measure.exactly import exact_sums

    g = spread(seed, 3000)
    g[:4] = torch.tensor([0.0, -0.0, 2.0**-149, -(2.0**-130)])
    found, wanted = exact_sums([g], g.device), summed(g.numpy().view(np.int32), xp=xp)
    assert int(found.window[0]) == int(wanted.window)
    assert found.digits[0].tolist() == wanted.digits.tolist()
