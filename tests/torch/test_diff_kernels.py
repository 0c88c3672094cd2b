"""A comparison of programs whose attention is a kernel of CUDA: no float64, and more results than the values.

On a machine without a GPU, kernels with the same traits stand in for them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import stablenum
import stablenum_torch

aten = torch.ops.aten
BATCH, HEADS, LENGTH, WIDTH = 2, 4, 6, 8


def junk(like: Tensor, *shape: int) -> Tensor:
    """Uninitialised memory, which is something else in each call."""
    return torch.from_numpy(np.random.default_rng().normal(size=shape)).to(like)


def softmax_of(q: Tensor, k: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        scores = scores + torch.full(scores.shape[-2:], -math.inf).triu(1)
    return torch.softmax(scores if bias is None else scores + bias, -1)


def forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    if q.dtype == torch.float64:
        raise RuntimeError("expected scalar type Half but found Double")
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return softmax_of(q, k, bias, is_causal, scale) @ v


def gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor | None, ...]:
    shared = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
    p = softmax_of(q, k, bias, is_causal, scale)
    of_p = grad @ v.mT
    of_scores = p * (of_p - (of_p * p).sum(-1, keepdim=True))
    scaled = of_scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    of_k, of_v = (x.unflatten(1, (-1, shared)).sum(2) for x in (scaled.mT @ q, p.mT @ grad))
    return scaled @ k, of_k, of_v, None if bias is None else of_scores


def efficient(q, k, v, bias, with_sums, dropout_p=0.0, is_causal=False, *, scale=None):
    out = forward(q, k, v, bias, is_causal, scale)
    seed = torch.randint(0, 10**9, ())
    return out, junk(q, BATCH, q.shape[1], 32), seed, seed + 1


def efficient_backward(
    grad, q, k, v, bias, out, sums, seed, offset, dropout_p, wanted, is_causal=False, *, scale=None
):
    return gradients(grad, q, k, v, bias, is_causal, scale)


def flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    out = forward(q, k, v, None, is_causal, scale)
    seed = torch.randint(0, 10**9, (2,))
    return out, junk(q, BATCH, q.shape[1], LENGTH), None, None, LENGTH, LENGTH, seed, seed[0] + 1, junk(q, 0)


def flash_backward(
    grad, q, k, v, out, sums, cum_q, cum_k, max_q, max_k, dropout_p, causal, seed, offset, *, scale=None
):
    return gradients(grad, q, k, v, None, causal, scale)[:3]


@pytest.fixture
def kernels() -> Iterator[None]:
    """The kernels, on the CPU."""
    library = torch.library.Library("aten", "IMPL")
    for name, made in (("efficient", efficient), ("flash", flash)):
        library.impl(f"_scaled_dot_product_{name}_attention", made, "CPU")
    library.impl("_scaled_dot_product_efficient_attention_backward", efficient_backward, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", flash_backward, "CPU")
    yield
    library._destroy()


def by_efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
    return aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, **options)[0]


def by_flash(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
    return aten._scaled_dot_product_flash_attention(q, k, v, **options)[0]


def by_torch(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    return nn.functional.scaled_dot_product_attention(
        q, k, v, bias, is_causal=is_causal, scale=scale, enable_gqa=k.shape[1] != q.shape[1]
    )


def program(
    attend: Callable[..., Tensor], *, heads_of_k: int = HEADS, bias: bool = False, **options: Any
) -> Any:
    torch.manual_seed(0)
    q_of, k_of, v_of = (nn.Linear(16, n * WIDTH) for n in (HEADS, heads_of_k, heads_of_k))
    model = nn.ModuleDict({"q": q_of, "k": k_of, "v": v_of})
    given = nn.Parameter(torch.randn(1, 1, LENGTH, LENGTH)) if bias else None
    if given is not None:
        model.register_parameter("bias", given)
    x = torch.randn(BATCH, LENGTH, 16)

    def loss_fn(x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for f in (q_of, k_of, v_of))
        mask = None if given is None else given.expand(BATCH, HEADS, LENGTH, LENGTH)
        return attend(q, k, v, mask, **options).square().mean()

    return stablenum_torch.program(loss_fn, x, model=model)


FORMS = {
    "efficient": (by_efficient, {}),
    "efficient, causal": (by_efficient, {"is_causal": True}),
    "efficient, bias": (by_efficient, {"bias": True, "scale": 0.3}),
    "flash": (by_flash, {}),
    "flash, causal": (by_flash, {"is_causal": True, "scale": 0.2}),
    "flash, shared heads": (by_flash, {"heads_of_k": 2}),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_kernel_without_float64_is_the_same_as_its_formula(form: str, kernels: None) -> None:
    attend, options = FORMS[form]
    report = stablenum.diff(program(attend, **options), program(by_torch, **options))
    assert report.ok, str(report)
    assert "not the same when it runs again" not in str(report)


@pytest.mark.parametrize("attend", [by_efficient, by_flash])
def test_another_scale_is_found_at_the_attention(attend: Callable[..., Tensor], kernels: None) -> None:
    report = stablenum.diff(program(attend, scale=0.25), program(by_torch, scale=0.3))
    assert not report.ok
    assert report.first is not None
    assert report.first.left is not None
    assert report.first.left.phase == "forward"
    assert len(report.differences) == 1
    assert report.causes[0].code == "scale"
    assert report.causes[0].confirmed


def fused_adamw(params, grads, firsts, seconds, largest, steps, **options) -> None:
    """The kernel of CUDA: whatever the parameters' format, it reads counts of steps as float32."""
    assert all(t.dtype == torch.float32 for t in steps)
    of = options
    for p, g, m, v, t in zip(params, grads, firsts, seconds, steps, strict=True):
        p.mul_(1 - of["lr"] * of["weight_decay"])
        m.lerp_(g, 1 - of["beta1"])
        v.mul_(of["beta2"]).addcmul_(g, g, value=1 - of["beta2"])
        first, second = (1 - of[name] ** float(t) for name in ("beta1", "beta2"))
        p.sub_(of["lr"] / first * m / ((v / second).sqrt() + of["eps"]))


def rnn(x, weights, stride, flat, hx, cx, mode, size, projected, layers, first, dropout, *rest):
    out = torch.tanh(x @ weights[0].T)
    reserve = torch.from_numpy(np.random.default_rng().integers(0, 256, 8 * x.element_size(), np.uint8))
    return out, out[-1:].clone(), x.new_zeros(0), reserve, x.new_zeros(0) if flat is None else flat


def rnn_backward(x, weights, stride, flat, hx, cx, out, of_out, of_hy, of_cy, *rest):
    reserve = rest[-2]
    if reserve.numel() != 8 * x.element_size():
        raise RuntimeError(f"the reserve has {reserve.numel()} bytes")
    of_in = of_out * (1 - out.square())
    of_w = of_in.flatten(0, 1).T @ x.flatten(0, 1)
    return of_in @ weights[0], torch.zeros_like(hx), None, [of_w]


@pytest.fixture
def other_kernels() -> Iterator[None]:
    """A fused optimizer and a recurrent layer that are called as those of CUDA are."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has one for the CPU, which is overridden
        library.impl("_fused_adamw_", fused_adamw, "CPU", allow_override=True)
    library.impl("_cudnn_rnn", rnn, "CPU")
    library.impl("_cudnn_rnn_backward", rnn_backward, "CPU")
    yield
    library._destroy()


def test_a_fused_optimizer_is_given_float32_counts_and_is_the_same(other_kernels: None) -> None:
    def made(fused: bool) -> Any:
        torch.manual_seed(0)
        model, x = nn.Linear(4, 3), torch.randn(5, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused, foreach=False)
        return stablenum_torch.program(
            lambda x: model(x).square().mean(), x, model=model, optimizer=optimizer
        )

    report = stablenum.diff(made(True), made(False), steps=2)
    assert report.ok, str(report)


def test_the_reserve_of_a_recurrent_layer_has_the_size_that_its_kernel_wants(other_kernels: None) -> None:
    def made(by_kernel: bool) -> Any:
        torch.manual_seed(0)
        model, x = nn.Linear(4, 4, bias=False), torch.randn(5, 2, 4)

        def loss_fn(x: Tensor) -> Tensor:
            if not by_kernel:
                return torch.tanh(model(x)).square().mean()
            hx = torch.zeros(1, 2, 4)
            out, *_ = aten._cudnn_rnn(
                x, [model.weight], 1, None, hx, None, 1, 4, 0, 1, False, 0.0, True, False, [], None
            )
            return out.square().mean()

        return stablenum_torch.program(loss_fn, x, model=model)

    report = stablenum.diff(made(True), made(False))
    assert report.ok, str(report)
    assert "not the same when it runs again" not in str(report)


def test_weights_that_a_recurrent_kernel_returns_are_still_the_weights(other_kernels: None) -> None:
    def made(by_kernel: bool) -> Any:
        torch.manual_seed(0)
        model, x = nn.Linear(4, 4, bias=False), torch.randn(5, 2, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def loss_fn(x: Tensor) -> Tensor:
            if not by_kernel:
                return torch.tanh(model(x)).square().mean()
            flat, hx = model.weight.detach().view(-1), torch.zeros(1, 2, 4)
            out, *_ = aten._cudnn_rnn(
                x, [model.weight], 1, flat, hx, None, 1, 4, 0, 1, False, 0.0, True, False, [], None
            )
            return out.square().mean()

        return stablenum_torch.program(loss_fn, x, model=model, optimizer=optimizer)

    report = stablenum.diff(made(True), made(False))
    assert report.ok, str(report)


def weight_norm(v, g, dim=0):
    """The kernel of CUDA: its norms have 24 bits, in float64 too."""
    norm = v.flatten(1).norm(dim=1).float().to(v).view_as(g)
    return v / norm * g, norm


def weight_norm_backward(grad, v, g, norm, dim):
    of_g = (grad * v).flatten(1).sum(1).view_as(g) / norm
    return (grad - of_g * v / norm) * g / norm, of_g


@pytest.fixture
def rounding_kernel() -> Iterator[None]:
    """The weight norm of CUDA, on the CPU."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("_weight_norm_interface", weight_norm, "CPU", allow_override=True)
        library.impl("_weight_norm_interface_backward", weight_norm_backward, "CPU", allow_override=True)
    yield
    library._destroy()


def normed(*, by_torch: bool, device: str = "cpu") -> Any:
    torch.manual_seed(0)
    model = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 6, 3)).to(device)
    x = torch.randn(2, 4, 8).to(device)
    gains, weights = model.parametrizations.weight.parameters()

    def loss_fn(x: Tensor) -> Tensor:
        if by_torch:
            return model(x).square().mean()
        weight = gains * weights / weights.square().sum((1, 2), keepdim=True).sqrt()
        return nn.functional.conv1d(x, weight, model.bias).square().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return stablenum_torch.program(loss_fn, x, model=model, optimizer=optimizer)


def test_a_weight_norm_that_rounds_to_float32_is_the_same_as_one_written_out(rounding_kernel: None) -> None:
    report = stablenum.diff(normed(by_torch=True), normed(by_torch=False))
    assert report.ok, str(report)


@pytest.mark.gpu
def test_a_weight_norm_on_a_gpu_is_the_same_as_one_written_out() -> None:
    left = normed(by_torch=True, device="cuda")
    for device in ("cpu", "cuda"):
        report = stablenum.diff(left, normed(by_torch=False, device=device))
        assert report.ok, str(report)


BACKENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_each_kernel_of_a_gpu_is_the_same_as_the_formula_on_a_cpu(
    backend: SDPBackend, is_causal: bool
) -> None:
    def made(device: str, dtype: torch.dtype) -> Any:
        torch.manual_seed(0)
        model = nn.Linear(32, 3 * 64).to(device, dtype)
        x = torch.randn(2, 16, 32).to(device, dtype)

        def loss_fn(x: Tensor) -> Tensor:
            q, k, v = model(x).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
            with sdpa_kernel(backend if device == "cuda" else SDPBackend.MATH):
                out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
            return out.float().square().mean()

        return stablenum_torch.program(loss_fn, x, model=model)

    report = stablenum.diff(made("cuda", torch.bfloat16), made("cpu", torch.bfloat16))
    assert report.ok, str(report)
    assert "not the same when it runs again" not in str(report)


@pytest.mark.gpu
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.Conv2d, nn.BatchNorm2d, nn.TransformerEncoderLayer])
def test_a_layer_on_a_gpu_is_the_same_as_on_a_cpu(layer: Callable[..., nn.Module]) -> None:
    def made(device: str) -> Any:
        torch.manual_seed(0)
        options = {
            nn.Conv2d: {"kernel_size": 3},
            nn.TransformerEncoderLayer: {"dim_feedforward": 16, "dropout": 0.0, "batch_first": True},
        }
        sizes = (8,) if layer is nn.BatchNorm2d else (8, 4 if layer is nn.TransformerEncoderLayer else 8)
        model = layer(*sizes, **options.get(layer, {})).to(device)
        shape = (4, 8, 6, 6) if layer in (nn.Conv2d, nn.BatchNorm2d) else (4, 6, 8)
        x = torch.randn(shape).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device == "cuda")

        def loss_fn(x: Tensor) -> Tensor:
            out = model(x)
            return (out[0] if isinstance(out, tuple) else out).square().mean()

        return stablenum_torch.program(loss_fn, x, model=model, optimizer=optimizer)

    report = stablenum.diff(made("cuda"), made("cpu"))
    assert report.ok, str(report)


@pytest.mark.gpu
def test_a_program_may_be_recorded_under_a_default_device() -> None:
    with torch.device("cuda"):
        left = program(by_torch)
        report = stablenum.diff(left, program(by_torch))
        assert report.ok, str(report)
        assert not stablenum.diff(left, program(by_torch, scale=0.3)).ok
