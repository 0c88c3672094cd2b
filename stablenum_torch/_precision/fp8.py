"""8-bit products: a linear layer whose factors and gradient are rounded to 8 bits with delayed scaling.

The formats are e4m3 in the forward pass and e5m2 for gradients (Micikevicius et al. 2022, arXiv 2209.05433).
By default the rounded values are multiplied in 16 bits (quantise, dequantise), which works on any hardware;
the native product multiplies the 8-bit numbers where the device can.
"""

from __future__ import annotations

from typing import Any

import array_api_compat.torch as torch_namespace
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from stablenum.formats import FORMATS
from stablenum.precision.delayed_scaling import DelayedScaling, DelayedScalingState, fits_hardware
from stablenum_torch._precision.casts import dtype_of

__all__ = ["EightBitProducts", "offers_native_products"]


def offers_native_products(device: torch.device) -> bool:
    """Return whether the device multiplies 8-bit matrices faster than wider ones: NVIDIA GPUs from Ada (8.9)
    on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


class EightBitProducts(torch.nn.Module):
    """The 8-bit product of one linear layer, with its statistics of input, weight and gradient.

    In training mode with gradients enabled, a call updates the statistics; otherwise it only reads the
    scales. The first call is scaled by its own largest magnitude. NaN and inf stay as they are (both are NaN
    in the native product) and do not enter the statistics.

    Args:
        forward_rule: the rule for the input and the weight.
        backward_rule: the rule for the gradient of the output.
        native: multiply with ``torch._scaled_mm`` where all sizes are multiples of 16.
        device: the device of the statistics.
    """

    history: Tensor
    scale: Tensor
    gradient_history: Tensor
    gradient_scale: Tensor

    def __init__(
        self,
        forward_rule: DelayedScaling,
        backward_rule: DelayedScaling,
        *,
        native: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.forward_rule, self.backward_rule, self.native = forward_rule, backward_rule, native
        both = forward_rule.init(2, xp=torch_namespace, device=device)
        back = backward_rule.init(1, xp=torch_namespace, device=device)
        self.register_buffer("history", both.history)
        self.register_buffer("scale", both.scale)
        self.register_buffer("gradient_history", back.history)
        self.register_buffer("gradient_scale", back.scale)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``x @ weight.T + bias`` in ``x``'s dtype, with both factors rounded to 8 bits.

        Args:
            x: (..., k), bfloat16, float16 or float32.
            weight: (n, k).
            bias: (n,) or None; it is added, and its gradient summed, in ``x``'s dtype.
        """
        amax = torch.stack([_amax(x), _amax(weight)])
        state = DelayedScalingState(self.history, self.scale)
        scales, after = self.forward_rule.use(state, amax, xp=torch_namespace)
        if self.training and torch.is_grad_enabled():
            self.history.copy_(after.history)
            self.scale.copy_(after.scale)
        name, (of_x, of_weight) = self.forward_rule.format, scales.unbind()
        if self.native and _fits(x, weight):
            y = _NativeProduct.apply(x, weight, of_x, of_weight, self)
        else:
            y = F.linear(_Rounded.apply(x, of_x, name), _Rounded.apply(weight, of_weight, name))
            y = _RoundedGradient.apply(y, self)
        return y if bias is None else y + bias

    def gradients_scale(self, grad: Tensor) -> Tensor:
        """Return the scale for this gradient, () float32, and add the gradient to the statistics."""
        state = DelayedScalingState(self.gradient_history, self.gradient_scale)
        scale, after = self.backward_rule.use(state, _amax(grad)[None], xp=torch_namespace)
        self.gradient_history.copy_(after.history)
        self.gradient_scale.copy_(after.scale)
        return scale[0]

    def _apply(self, fn: Any, recurse: bool = True) -> EightBitProducts:
        # ``model.half()`` must not narrow the statistics.
        super()._apply(fn, recurse)
        for name, buffer in self._buffers.items():
            if buffer is not None and buffer.dtype != torch.float32:
                self._buffers[name] = buffer.float()
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, buffer in self._buffers.items():  # a model without the policy may have been saved
            state_dict.setdefault(prefix + name, buffer)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _amax(x: Tensor) -> Tensor:
    """Return the largest magnitude, () float32: NaN if there is a NaN, 0 for an empty tensor."""
    if not x.numel():
        return torch.zeros((), device=x.device)
    return x.detach().abs().amax().float()


def _quantised(x: Tensor, scale: Tensor, name: str) -> Tensor:
    """Return ``x * scale`` in 8 bits: finite values saturate, inf becomes NaN (e4m3 has no inf)."""
    top = FORMATS[name].max
    scaled = x.float() * scale
    kept = torch.where(torch.isfinite(x), scaled.clamp(-top, top), torch.nan)
    return kept.to(dtype_of(name))


def _requantised(x: Tensor, scale: Tensor, name: str) -> Tensor:
    """Return ``x`` rounded to 8 bits, in its own dtype; NaN and inf stay."""
    read = _quantised(x, scale, name).float() / scale
    return torch.where(torch.isfinite(x), read.to(x.dtype), x)


class _Rounded(torch.autograd.Function):
    """Rounds in the forward pass, and passes the gradient through unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, name: str) -> Tensor:
        return _requantised(x, scale, name)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None


class _RoundedGradient(torch.autograd.Function):
    """Passes the value through unchanged, and rounds its gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, products: EightBitProducts) -> Tensor:
        ctx.products = products
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        products = ctx.products
        return _requantised(grads[0], products.gradients_scale(grads[0]), products.backward_rule.format), None


def _fits(x: Tensor, weight: Tensor) -> bool:
    """Return whether the native product supports these sizes."""
    k = x.shape[-1]
    return fits_hardware(x.numel() // k if k else 0, *weight.shape)


class _NativeProduct(torch.autograd.Function):
    """``x @ weight.T`` and both products of its backward pass on 8-bit numbers."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, of_x: Tensor, of_weight: Tensor, products: EightBitProducts
    ) -> Tensor:
        name = products.forward_rule.format
        x8 = _quantised(x.reshape(-1, x.shape[-1]), of_x, name)
        w8 = _quantised(weight, of_weight, name)
        ctx.save_for_backward(x8, w8, 1 / of_x, 1 / of_weight)
        ctx.products, ctx.shape, ctx.weight_dtype = products, x.shape, weight.dtype
        y = torch._scaled_mm(x8, w8.t(), scale_a=1 / of_x, scale_b=1 / of_weight, out_dtype=x.dtype)
        return y.reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x8, w8, of_x, of_weight = ctx.saved_tensors
        grad, products = grads[0], ctx.products
        scale = products.gradients_scale(grad)
        g8 = _quantised(grad.reshape(-1, grad.shape[-1]), scale, products.backward_rule.format)
        # The second factor has to be column-major.
        back = {"scale_a": 1 / scale, "out_dtype": grad.dtype}
        of_input = torch._scaled_mm(g8, w8.t().contiguous().t(), scale_b=of_weight, **back)
        of_w = torch._scaled_mm(g8.t().contiguous(), x8.t().contiguous().t(), scale_b=of_x, **back)
        return of_input.reshape(ctx.shape), of_w.to(ctx.weight_dtype), None, None, None
