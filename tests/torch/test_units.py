"""AdaptiveGradClip in torch's layouts, against the formula of the paper, unit by unit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import stablenum
import stablenum_torch as st
from stablenum.formats import FLOAT32_MAX
from stablenum_torch._step.inputs import StepInputs
from stablenum_torch._step.measure.units import units_on_host, units_without_wait

CPU = torch.device("cpu")


def inputs_of(rule, params, included):
    return StepInputs(stablenum.GuardConfig(clip=rule), params, included, CPU)


def on_host(rule, params, included):
    with np.errstate(all="ignore"):
        norms, units = units_on_host(rule, inputs_of(rule, params, included))
    return norms.tolist(), [u.tolist() for u in units.norms], [u.tolist() for u in units.weights]


def on_device(rule, params, included):
    norms, units = units_without_wait(rule, inputs_of(rule, params, included))
    return norms.tolist(), [u.tolist() for u in units.norms], [u.tolist() for u in units.weights]


@pytest.fixture(params=[on_host, on_device])
def measure(request):
    return request.param


def parameter(value: torch.Tensor, grad: torch.Tensor | None) -> torch.nn.Parameter:
    p = torch.nn.Parameter(value)
    p.grad = grad
    return p


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    net = torch.nn.ModuleDict(
        {
            "linear": torch.nn.Linear(5, 4),
            "conv1d": torch.nn.Conv1d(3, 4, 5),
            "conv2d": torch.nn.Conv2d(3, 6, (2, 3)).to(memory_format=torch.channels_last),
            "norm": torch.nn.LayerNorm(7),
            "head": torch.nn.Linear(4, 2),
        }
    )
    torch.nn.init.zeros_(net["norm"].bias)
    generator = torch.Generator().manual_seed(1)
    for p in net.parameters():
        p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator))
    net["linear"].weight.grad[1] = 0
    net["linear"].weight.grad[2] *= 1e-4
    return net


def by_the_paper(w: torch.Tensor, g: torch.Tensor, clipping: float, eps: float) -> torch.Tensor:
    """Equation 3 of Brock et al. 2021, one row W_i of a weight at a time, in plain numbers."""
    whole = w.dim() < 2
    out = g.detach().clone()
    for i in range(1 if whole else w.shape[0]):
        unit_w, unit_g = (w, g) if whole else (w[i], g[i])
        norm_w = math.sqrt(math.fsum(x * x for x in unit_w.flatten().tolist()))
        norm_g = math.sqrt(math.fsum(x * x for x in unit_g.flatten().tolist()))
        limit = clipping * max(norm_w, eps)
        if norm_g > limit:
            (out if whole else out[i]).mul_(limit / norm_g)
    return out


@pytest.mark.parametrize("fused", [True, False])
def test_torch_layers_are_clipped_by_the_formula(path, fused):
    net = model()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    wanted = {
        name: p.grad.clone() if name.startswith("head") else by_the_paper(p, p.grad, 0.05, 1e-3)
        for name, p in net.named_parameters()
    }
    rule = stablenum.AdaptiveGradClip(clipping=0.05, exclude="head.*")
    opt = st.wrap(torch.optim.SGD(net.parameters(), lr=1.0, fused=fused), clip=rule, names=net)
    opt.step()
    for name, p in net.named_parameters():
        torch.testing.assert_close(before[name] - p.detach(), wanted[name], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(p.grad, wanted[name], rtol=1e-6, atol=1e-9)
    assert opt.last["reason"] is stablenum.Reason.CLIPPED
    assert not net["linear"].weight.grad[1].any(), "a zero gradient stays zero"
    unclipped = math.sqrt(sum(p.square().sum().item() for p in wanted.values()))
    assert opt.last["grad_norm"] > unclipped


def test_gradients_within_their_limit_keep_every_bit(path):
    net = model()
    grads = [p.grad.clone() for p in net.parameters()]
    opt = st.wrap(
        torch.optim.SGD(net.parameters(), lr=1.0),
        clip=stablenum.AdaptiveGradClip(clipping=1e9, eps=1.0),
        names=net,
    )
    opt.step()
    for p, g in zip(net.parameters(), grads, strict=True):
        assert torch.equal(p.grad, g)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("output_axis", ["first", "last"])
def test_unit_norms_are_exact_in_every_layout(measure, dtype, output_axis):
    g = torch.Generator().manual_seed(0)
    shapes = [(4, 3), (7,), (2, 3, 4), (8, 3, 5, 5), (), (1, 5), (300, 70), (3, 20_000), (3, 70_000)]
    params = [
        parameter(torch.randn(s, generator=g).to(dtype), torch.randn(s, generator=g).to(dtype))
        for s in shapes
    ]
    params[3].grad = params[3].grad.contiguous(memory_format=torch.channels_last)
    params[6].grad = params[6].grad.t().contiguous().t()
    rule = stablenum.AdaptiveGradClip(output_axis=output_axis)
    norms, of_grads, of_weights = measure(rule, params, [True] * len(params))
    for i, p in enumerate(params):
        assert norms[i] == pytest.approx(p.grad.double().norm().item(), rel=1e-6)
        axes = rule.unit_axes(p.shape, default="first")
        for got, tensor in ((of_grads[i], p.grad), (of_weights[i], p.detach())):
            exact = tensor.double().square().sum(dim=axes).sqrt() if axes else tensor.double().abs()
            np.testing.assert_allclose(got, exact.flatten().numpy(), rtol=2e-6)


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_units_beyond_float32s_squares(measure, layout):
    rows = torch.ones(9, 4)
    grad = rows * torch.tensor([1e20, 1e-25, 0, 1, 3e38, 1e-42, math.nan, math.inf, 5e19])[:, None]
    grad[6, 0] = math.inf  # NaN wins
    grad[7, 0] = 1.0
    p = parameter(rows.clone(), grad)
    if layout == "columns":
        p = parameter(rows.t().contiguous().t(), None)
        p.grad = grad.t().contiguous().t()
    (norm,), (units,), _ = measure(stablenum.AdaptiveGradClip(), [p], [True])
    assert units[:4] == pytest.approx([2e20, 2e-25, 0.0, 2.0], rel=1e-6)
    assert units[4] == np.float32(FLOAT32_MAX)
    assert units[5] == pytest.approx(2e-42, rel=1e-3)
    assert math.isnan(units[6])
    assert units[7] == math.inf
    assert units[8] == pytest.approx(1e20, rel=1e-6)
    assert math.isnan(norm)
    p.grad[6] = 0
    assert measure(stablenum.AdaptiveGradClip(), [p], [True])[0] == [math.inf]
    p.grad[7] = 0
    (norm,), _, _ = measure(stablenum.AdaptiveGradClip(), [p], [True])
    assert norm == np.float32(FLOAT32_MAX)


def test_float64_units_beyond_float32_saturate(measure):
    grad = torch.tensor([[1e300, 1e300], [1.0, 1.0]], dtype=torch.float64)
    (norm,), (units,), _ = measure(
        stablenum.AdaptiveGradClip(), [parameter(torch.ones_like(grad), grad)], [True]
    )
    assert units == pytest.approx([FLOAT32_MAX, math.sqrt(2)])
    assert norm == pytest.approx(FLOAT32_MAX)


def test_excluded_empty_and_gradientless_parameters_are_not_measured(measure):
    params = [
        parameter(torch.ones(2, 2), torch.ones(2, 2)),
        parameter(torch.ones(2, 2), None),
        parameter(torch.ones(0, 3), torch.ones(0, 3)),
        parameter(torch.ones(2), torch.full((2,), 2.0)),
    ]
    norms, of_grads, of_weights = measure(stablenum.AdaptiveGradClip(), params, [False, True, True, True])
    assert norms == pytest.approx([2.0, 0.0, 0.0, math.sqrt(8)])
    assert [len(u) for u in of_grads] == [len(u) for u in of_weights] == [0, 0, 0, 1]


class Reads(TorchDispatchMode):
    """Counts how many elements of the given tensors are read by operations that compute."""

    def __init__(self, tensors):
        super().__init__()
        self.memory = {t.untyped_storage().data_ptr() for t in tensors}
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and "_foreach" not in str(func) and "detach" not in str(func):
            # dot(block, block) reads its block once
            seen = {id(a): a for a in args if isinstance(a, torch.Tensor)}.values()
            self.elements += sum(a.numel() for a in seen if a.untyped_storage().data_ptr() in self.memory)
        elif "_foreach" in str(func):
            self.elements += sum(t.numel() for t in args[0] if t.untyped_storage().data_ptr() in self.memory)
        return func(*args, **(kwargs or {}))


def test_the_rule_reads_gradients_and_weights_once(path):
    def reads(**settings) -> tuple[int, int]:
        net = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Conv2d(4, 8, 3))
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        opt = st.wrap(torch.optim.SGD(net.parameters(), lr=0.1), **settings)
        opt.scale(torch.tensor(math.nan))  # so that nothing is applied after measuring
        opt.step()  # the first step looks at all parameters
        opt.scale(torch.tensor(math.nan))
        with Reads([p.grad for p in net.parameters()]) as gradients, Reads(list(net.parameters())) as weights:
            opt.step()
        return gradients.elements, weights.elements

    size = 64 * 32 + 32 + 8 * 4 * 9 + 8
    assert reads(clip=1.0) == (size, 0)
    assert reads(clip=(stablenum.AdaptiveGradClip(), 1.0)) == (size, size)


def test_sparse_gradients_are_clipped_by_rows(path):
    table = torch.nn.Embedding(6, 3, sparse=True)
    with torch.no_grad():
        table.weight.fill_(1.0)
    opt = st.wrap(torch.optim.SGD(table.parameters(), lr=1.0), clip=stablenum.AdaptiveGradClip(clipping=0.1))
    (table(torch.tensor([1, 1, 4])) * torch.tensor([3.0])).sum().backward()
    opt.step()
    wanted = torch.ones(6, 3)
    wanted[[1, 4]] -= 0.1
    torch.testing.assert_close(table.weight.detach(), wanted)
    assert table.weight.grad.layout == torch.sparse_coo
    assert opt.last["grad_norm"] == pytest.approx(math.sqrt(3 * 36 + 3 * 9), rel=1e-6)


def test_complex_gradients_are_clipped_by_magnitude(path):
    w = parameter(
        torch.full((2, 2), 3 + 4j, dtype=torch.complex64),
        torch.tensor([[3 + 4j, 0], [1e-3, 0]], dtype=torch.complex64),
    )
    opt = st.wrap(torch.optim.SGD([w], lr=1.0), clip=stablenum.AdaptiveGradClip(clipping=0.1))
    opt.step()
    limit = 0.1 * math.sqrt(50)
    torch.testing.assert_close(
        w.grad, torch.tensor([[(3 + 4j) * limit / 5, 0], [1e-3, 0]], dtype=torch.complex64)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_gradients_are_multiplied_in_float32(path, dtype):
    w = parameter(torch.ones(2, 4, dtype=dtype), torch.full((2, 4), 3000.0, dtype=dtype))
    scale = 2.0**20  # the factor is far below float16's normal numbers
    opt = st.wrap(
        torch.optim.SGD([w], lr=0.0),
        clip=stablenum.AdaptiveGradClip(clipping=1e-9, eps=1e-3),
        loss_scale=scale,
    )
    opt.step()
    wanted = torch.tensor(1e-9 * 2 / 2).to(dtype)  # limit 1e-9 * |w| = 2e-9, spread over four elements
    torch.testing.assert_close(w.grad, torch.full((2, 4), wanted.item(), dtype=dtype), rtol=1e-2, atol=6e-8)


def test_a_pattern_that_matches_nothing_raises_in_wrap():
    net = model()
    inner = torch.optim.SGD(net.parameters(), lr=1.0)
    rule = stablenum.AdaptiveGradClip(exclude="classifier.*")
    with pytest.raises(ValueError, match=r"exclude must be patterns that each match a parameter.*linear"):
        st.wrap(inner, clip=rule, names=net)
    with pytest.raises(ValueError, match=r"names=model"):
        st.wrap(inner, clip=stablenum.AdaptiveGradClip(exclude="head.*"))
    named = torch.optim.SGD(net.named_parameters(), lr=1.0)
    assert st.wrap(named, clip=stablenum.AdaptiveGradClip(exclude="head.*")).config.unit_rule is not None


def test_non_finite_weights_leave_the_gradient_unchanged(path):
    w = parameter(torch.tensor([[1.0, math.nan], [1.0, 0.0]]), torch.ones(2, 2))
    opt = st.wrap(torch.optim.SGD([w], lr=0.0), clip=stablenum.AdaptiveGradClip(clipping=0.1))
    opt.step()
    torch.testing.assert_close(
        w.grad, torch.tensor([[1.0, 1.0], [0.1, 0.1]]) / torch.tensor([[1.0], [2**0.5]])
    )
