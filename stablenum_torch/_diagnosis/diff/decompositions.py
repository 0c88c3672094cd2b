"""Operations that are opened into their parts, so that the parts can be matched with other programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stablenum_torch._diagnosis.diff.recurrent_cells import CELLS

__all__ = ["FORMULAS", "decomposition_of"]

_OPENED = frozenset({
    "_fused_rms_norm", "_log_softmax", "_log_softmax_backward_data", "_native_batch_norm_legit", "_softmax",
    "_softmax_backward_data", "addcdiv", "addcmul", "addmm", "addmv", "baddbmm", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "elu", "gelu", "gelu_backward", "glu", "hardswish", "huber_loss",
    "lerp", "linalg_vector_norm", "log_sigmoid_forward", "logsumexp", "mean", "mish", "mse_loss",
    "native_batch_norm", "native_batch_norm_backward", "native_group_norm", "native_group_norm_backward",
    "native_layer_norm", "native_layer_norm_backward", "nll_loss2d_forward", "nll_loss_forward", "prelu",
    "sigmoid_backward", "silu", "silu_backward", "smooth_l1_loss", "softplus", "std", "tanh_backward",
    "upsample_bilinear2d", "upsample_nearest2d", "var", "var_mean",
})  # fmt: skip


def decomposition_of(func: Any, name: str, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """Return a function of simpler operations that computes the same; None if there is none."""
    if name == "convolution" and args[2] is None:  # nothing to open, which ends the recursion
        return None
    if name in _OWN:
        return _OWN[name]
    if name not in _OPENED:
        return None
    found: Callable[..., Any] | None = torch._decomp.decomposition_table.get(func)
    return found


def _convolution(x: Any, weight: Any, bias: Any, *options: Any) -> Any:
    made = torch.ops.aten.convolution.default(x, weight, None, *options)
    return made + bias.reshape(1, -1, *(1 for _ in made.shape[2:]))


def _attention_on_cpu(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Any = None,
    scale: Any = None,
) -> Any:
    scores = _scores(q, k, attn_mask, is_causal, scale)
    return torch.softmax(scores, dim=-1) @ v, torch.logsumexp(scores, dim=-1)


def _efficient(
    q: Any, k: Any, v: Any, bias: Any, with_sums: bool, dropout_p: float = 0.0, is_causal: bool = False,
    *rest: Any, scale: Any = None,
) -> Any:  # fmt: skip
    """The efficient kernel's attention, and cuDNN's; their other results have no formula."""
    k, v = (_for_each_head(x, q) for x in (k, v))
    return (torch.softmax(_scores(q, k, bias, is_causal, scale), dim=-1) @ v,)


def _flash(
    q: Any, k: Any, v: Any, dropout_p: float = 0.0, is_causal: bool = False, *rest: Any, scale: Any = None
) -> Any:
    return _efficient(q, k, v, None, False, dropout_p, is_causal, scale=scale)


def _efficient_backward(
    grad: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, sums: Any, seed: Any, offset: Any,
    dropout_p: float, wanted: Any, is_causal: bool = False, *, scale: Any = None,
) -> Any:  # fmt: skip
    return _gradients(grad, q, k, v, bias, is_causal, scale, of_bias=bias is not None and wanted[3])


def _flash_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, sums: Any, starts_q: Any, starts_k: Any, most_q: int,
    most_k: int, dropout_p: float, is_causal: bool, *rest: Any, scale: Any = None,
) -> Any:  # fmt: skip
    return _gradients(grad, q, k, v, None, is_causal, scale)


def _cudnn_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, sums: Any, seed: Any, offset: Any, bias: Any, starts_q: Any,
    starts_k: Any, most_q: int, most_k: int, dropout_p: float, is_causal: bool, *, scale: Any = None,
) -> Any:  # fmt: skip
    return _gradients(grad, q, k, v, bias, is_causal, scale)


def _scores(q: Any, k: Any, bias: Any, is_causal: bool, scale: float | None) -> Any:
    scores = (q @ k.transpose(-1, -2)) * _scale_of(q, scale)
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return scores if bias is None else scores + bias


def _scale_of(q: Any, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _for_each_head(x: Any, q: Any) -> Any:
    """Keys or values that several heads of the queries share, once for each."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _gradients(
    grad: Any,
    q: Any,
    k: Any,
    v: Any,
    bias: Any,
    is_causal: bool,
    scale: float | None,
    *,
    of_bias: bool = False,
) -> Any:
    """The gradients of an attention with respect to q, k and v, and if asked for to the bias."""
    of_all_heads = [_for_each_head(x, q) for x in (k, v)]
    weights = torch.softmax(_scores(q, of_all_heads[0], bias, is_causal, scale), dim=-1)
    of_weights = grad @ of_all_heads[1].transpose(-1, -2)
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
    of_products = of_scores * _scale_of(q, scale)
    of_k, of_v = of_products.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ grad
    found = (of_products @ of_all_heads[0], _of_shared_heads(of_k, k), _of_shared_heads(of_v, v))
    return (*found, of_scores.sum_to_size(bias.shape)) if of_bias else found


def _of_shared_heads(gradient: Any, x: Any) -> Any:
    same = gradient.shape == x.shape
    return gradient if same else gradient.unflatten(1, (x.shape[1], -1)).sum(2)


def _weight_norm(v: Any, g: Any, dim: int = 0) -> Any:
    norm = v.square().sum(_others(v, dim), keepdim=True).sqrt()
    return v * (g / norm), norm


def _weight_norm_backward(grad: Any, v: Any, g: Any, norm: Any, dim: int) -> Any:
    of_g = (grad * v).sum(_others(v, dim), keepdim=True) / norm
    return g / norm * (grad - v * (of_g / norm)), of_g


def _others(v: Any, dim: int) -> list[int]:
    return [axis for axis in range(v.dim()) if axis != dim % v.dim()]


_OWN: dict[str, Callable[..., Any]] = {
    "convolution": _convolution,
    "_scaled_dot_product_flash_attention_for_cpu": _attention_on_cpu,
    **CELLS,
}

# Kernels that have no float64, with the formulas that stand for them, and the weight norm, whose norms have
# only 24 bits on CUDA. A formula gives the first of a kernel's results; the others are kept for the backward
# pass, and have no say.
FORMULAS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_cudnn_attention": _efficient,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_weight_norm_interface": _weight_norm,
    "_weight_norm_interface_backward": _weight_norm_backward,
}
