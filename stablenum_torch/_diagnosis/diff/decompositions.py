"""Operations that are opened into their parts, so that the parts can be matched with those of other programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["decomposition_of"]

_OPENED = frozenset(
    "addmm addmv baddbmm native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit "
    "_fused_rms_norm gelu silu _softmax _log_softmax nll_loss_forward nll_loss2d_forward mse_loss "
    "binary_cross_entropy binary_cross_entropy_with_logits huber_loss smooth_l1_loss linalg_vector_norm "
    "addcmul addcdiv lerp native_layer_norm_backward "
    "native_group_norm_backward native_batch_norm_backward gelu_backward tanh_backward sigmoid_backward "
    "silu_backward _softmax_backward_data _log_softmax_backward_data upsample_bilinear2d "
    "upsample_nearest2d var_mean var std logsumexp mean elu hardswish softplus mish glu "
    "log_sigmoid_forward prelu".split()
)


def decomposition_of(func: Any, name: str) -> Callable[..., Any] | None:
    """Return a function of simpler operations that computes the same; None if the operation is not opened."""
    if name in _OWN:
        return _OWN[name]
    if name not in _OPENED:
        return None
    found: Callable[..., Any] | None = torch._decomp.decomposition_table.get(func)
    return found


def _convolution(x: Any, weight: Any, bias: Any, *options: Any) -> Any:
    made = torch.ops.aten.convolution.default(x, weight, None, *options)
    if bias is None:
        return made
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
