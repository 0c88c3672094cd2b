"""Operations that are opened into their parts, so that the parts can be matched with other programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["decomposition_of"]

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


def _attention(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> Any:
    scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    if attn_mask is not None:
        scores = scores + attn_mask
    return torch.softmax(scores, dim=-1) @ v, torch.logsumexp(scores, dim=-1)


_OWN: dict[str, Callable[..., Any]] = {
    "convolution": _convolution,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
}
