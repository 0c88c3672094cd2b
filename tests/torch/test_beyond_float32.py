"""Finite gradients are clipped to what was asked, whatever their size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import stablenum_torch as st
from stablenum import AdaGC, AdaptiveGradClip, ClipByNorm
from tests.huge_gradients import HUGE_GRADIENTS, recorded_norm

OPTIMIZERS = ["fused", "foreach", "for-loop"]


def moved(
    grads: list[torch.Tensor],
    kind: str = "foreach",
    *,
    clip: Any = 1.0,
    scale: float | None = None,
    path: str = "host",
) -> tuple[list[float], dict[str, Any]]:
    """How far one step of SGD with learning rate 1 moves each parameter, in float64, and the record."""
    params = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
    inner = torch.optim.SGD(params, lr=1.0, fused=kind == "fused", foreach=kind == "foreach")
    opt = st.wrap(inner, clip=clip, loss_scale=scale)
    opt._guard.on_host = path == "host"
    if scale is not None:
        opt.scale(torch.tensor(0.0))
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    opt.step()
    return [float(torch.linalg.vector_norm(p.detach().double())) for p in params], opt.last


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(
    ("element", "n", "scale"),
    HUGE_GRADIENTS,
)
@pytest.mark.parametrize("limit", [1.0, 1e-6])
def test_float32_gradients_keep_the_norm_that_was_asked_for(kind, element, n, scale, limit):
    (norm,), record = moved([torch.full((n,), element)], kind, clip=limit, scale=scale)
    assert norm == pytest.approx(limit, rel=1e-5)
    assert record["grad_norm"] == pytest.approx(recorded_norm(element, n, scale), rel=1e-6)


@pytest.mark.parametrize("size", [1e39, 1e100, 1e200, 1e307])
def test_float64_gradients_keep_the_norm_that_was_asked_for(size):
    grad = torch.zeros(4, dtype=torch.float64)
    grad[1] = size
    norms, _ = moved([grad, torch.ones(3)])
    assert norms[0] == pytest.approx(1.0, rel=1e-5)
    norms, _ = moved([torch.full((4,), size, dtype=torch.float64), torch.ones(3)], "fused")
    assert norms[0] == pytest.approx(1.0, rel=1e-5)


def test_a_small_tensor_beside_a_huge_one_keeps_its_own_factor():
    grads = [torch.tensor([1e200]).double(), torch.full((4,), 0.25), torch.full((4,), 3e38)]
    grads[0][0] = 1e200
    norms, _ = moved(grads, clip=ClipByNorm(1.0))
    assert norms == pytest.approx([1.0, 0.5, 1.0], rel=1e-5)


def test_units_of_any_size_keep_their_own_factors():
    weight = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    bias = torch.nn.Parameter(torch.zeros(100))
    rule = AdaptiveGradClip(clipping=0.5, eps=1.0)
    opt = st.wrap(torch.optim.SGD([weight, bias], lr=1.0), clip=rule)
    weight.grad = torch.tensor([[1e200, 1e200], [1.0, 0.1]], dtype=torch.float64)
    bias.grad = torch.full((100,), 3e38)
    opt.step()
    assert torch.linalg.vector_norm(weight.detach(), dim=1).tolist() == pytest.approx([0.5, 0.5], rel=1e-5)
    assert float(bias.detach().double().norm()) == pytest.approx(0.5, rel=1e-5)


def test_bfloat16_gradients_of_any_size():
    (norm,), _ = moved([torch.full((1024,), 3e38, dtype=torch.bfloat16)], scale=65536.0)
    assert norm == pytest.approx(1.0, rel=1e-2)


@pytest.mark.parametrize("kind", [st.MasterWeights, st.KahanUpdate, st.StochasticRounding])
@pytest.mark.parametrize(("element", "limit"), [(3e38, 1.0), (1e36, 1e-3), (1e30, 1e-6), (3e38, 1e3)])
@pytest.mark.parametrize("scale", [None, 65536.0])
def test_gradients_that_are_widened_to_float32(kind, element, limit, scale):
    """The gradients that are changed are copies: each of the factors must reach the same ones."""
    w = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    opt = st.wrap(kind([w], lambda ps: torch.optim.SGD(ps, lr=1.0)), clip=limit, loss_scale=scale)
    if scale is not None:
        opt.scale(torch.tensor(0.0))
    w.grad = torch.full_like(w, element)
    opt.step()
    assert float(w.detach().double().norm()) == pytest.approx(limit, rel=1e-2)
    assert opt.last["reason"].name == "CLIPPED"


def test_where_the_host_does_not_wait_the_factor_is_bounded():
    """The kernel takes one float32, and the joint norm saturates: the step is longer, never zero or inf."""
    (norm,), _ = moved([torch.full((1000,), 3e38)], "fused", path="device")
    assert norm == pytest.approx(9.49e39 * 2.0**-126, rel=1e-2)


def test_ordinary_steps_are_not_measured_again(monkeypatch):
    from stablenum_torch._step import on_host

    monkeypatch.setattr(on_host, "observed_beyond_float32", None)
    for scale in (None, 65536.0, 0.25):
        for size in (1e-8, 1.0, 1e20):
            moved([torch.full((10,), size)], scale=scale)
    (norm,), record = moved([torch.full((10,), torch.inf)], scale=4.0)
    assert norm == 0
    assert record["applied"] is False


# ---------------------------------------------------------------------------------- decided by a group


@pytest.fixture
def group():
    """A process group of this process alone, which joins norms as any other group does."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("clip", "small"), [(ClipByNorm(1.0), 1.0), (AdaGC(max_norm=1.0), 0.0), (1.0, 0.0)], ids=str
)
@pytest.mark.parametrize("size", [1e100, 1e149, 1e151, 1e200, 1e300, 1e308])
def test_float64_gradients_in_a_group_keep_the_norm_that_was_asked_for(group, size, clip, small):
    params = [torch.nn.Parameter(torch.zeros(3, dtype=torch.float64)), torch.nn.Parameter(torch.zeros(4))]
    opt = st.wrap(torch.optim.SGD(params, lr=1.0), clip=clip, process_group=group)
    params[0].grad = torch.tensor([size, -size, 0.5 * size], dtype=torch.float64)
    params[1].grad = torch.full((4,), 3.0)
    opt.step()
    norms = [float(torch.linalg.vector_norm(p.detach().double())) for p in params]
    assert norms == pytest.approx([1.0, small], rel=1e-5, abs=1e-30)
