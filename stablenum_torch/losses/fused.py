"""Cross-entropy and binary cross-entropy with torch's fused kernels and a single gradient buffer.

``F.cross_entropy`` keeps the log-probabilities and makes two gradients of the size of the logits. Here only
the logits are kept: both passes work on a block of rows at a time, which stays in the cache, and the backward
pass writes softmax and target into one buffer, which is the gradient.

Value and gradient are those of the core (``stablenum.losses``). The core itself computes rows with a logit of
inf, -inf or NaN, everything under ``torch.func``, ``torch.compile`` and forward-mode differentiation, and all
derivatives beyond the first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor
from torch.nn import functional

from stablenum.losses.binary import entropy_items
from stablenum.losses.classes import ClassSums, class_sums

__all__ = ["binary_items", "binary_total", "can_fuse", "fused_class_sums"]

# Numbers per block: about what fits in a core's cache; far more on a GPU, where launches cost more.
_BLOCK = 2**18
_BLOCK_ELSEWHERE = 2**26

# Private in torch, but used by its own autograd.Function. If it is missing, the core computes everything.
_transforming = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
_is_batch = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda tensor: False)


def can_fuse(*tensors: Tensor | None) -> bool:
    """Return whether all arguments are plain tensors, and no program transformation is active."""
    present = [t for t in tensors if t is not None]
    return (
        not torch.compiler.is_compiling()
        and not _transforming()
        and all(type(t) in (Tensor, torch.nn.Parameter) and t.device.type != "meta" for t in present)
        and all(torch.autograd.forward_ad.unpack_dual(t).tangent is None for t in present)
    )


def _blocks(n: int, size: int, device: torch.device) -> Iterator[slice]:
    room = _BLOCK * torch.get_num_threads() if device.type == "cpu" else _BLOCK_ELSEWHERE
    step = max(1, room // max(size, 1))
    return (slice(i, min(i + step, n)) for i in range(0, n, step))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# --- cross-entropy -------------------------------------------------------------------------------------


def fused_class_sums(
    x: Tensor,
    index: Tensor,
    keep: Tensor,
    *,
    weight: Tensor | None = None,
    smoothing: bool = False,
    xp: Any = xp,
) -> ClassSums:
    """Return what :func:`stablenum.losses.classes.class_sums` returns, with torch's fused kernel where it
    applies."""
    if not can_fuse(x, index, keep, weight) or (weight is not None and weight.requires_grad):
        return class_sums(x, index, keep, weight=weight, smoothing=smoothing, xp=xp)
    shape = index.shape
    rows, index, keep = x.reshape(-1, x.shape[-1]), index.reshape(-1), keep.reshape(-1)
    nll, lse, smooth = _ClassSums.apply(rows, index, keep, weight, smoothing)
    return ClassSums(nll.reshape(shape), lse.reshape(shape), smooth.reshape(shape) if smoothing else None)


class _ClassSums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, index: Tensor, keep: Tensor, weight: Tensor | None, smoothing: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        nll, lse, smooth = (torch.zeros(len(x), dtype=_wide(x.dtype), device=x.device) for _ in range(3))
        for block in _blocks(len(x), x.shape[1], x.device):
            sums = _block_sums(x[block], index[block], keep[block], weight, smoothing)
            nll[block], lse[block] = sums.nll, sums.lse
            if sums.smooth is not None:
                smooth[block] = sums.smooth
        ctx.save_for_backward(x, index, keep, weight, lse)
        ctx.smoothing = smoothing
        return nll, lse, smooth

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, index, keep, weight, lse = ctx.saved_tensors
        if torch.is_grad_enabled() or _transforming() or any(map(_is_batch, grads)):
            return _by_the_core(ctx, x, index, keep, weight, grads), None, None, None, None
        grad = torch.empty_like(x, memory_format=torch.contiguous_format)
        for block in _blocks(len(x), x.shape[1], x.device):
            g_nll, g_lse, g_smooth = (g[block] for g in grads)
            _block_grad(
                grad[block],
                x[block],
                index[block],
                lse[block],
                g_nll,
                g_lse,
                g_smooth if ctx.smoothing else None,
                weight,
            )
        return grad, None, None, None, None


def _block_sums(x: Tensor, index: Tensor, keep: Tensor, weight: Tensor | None, smoothing: bool) -> ClassSums:
    """Sum one block of rows: by torch's fused log_softmax for rows of finite logits, else by the core."""
    if x.device.type != "cpu":  # the check for finite logits would make the host wait
        return class_sums(x, index, keep, weight=weight, smoothing=smoothing, xp=xp)
    log_p = torch.log_softmax(x, 1, dtype=_wide(x.dtype))
    nll = -log_p.gather(1, index[:, None])[:, 0]
    # Measured from the largest logit, because at a target far below it the difference x - log_p has no
    # correct digit.
    lse = x.amax(1).to(nll.dtype) - log_p.amax(1)
    smooth = None
    if smoothing:
        smooth = -(log_p.mean(1) if weight is None else (log_p @ weight) / x.shape[1])
    ordinary = torch.isfinite(lse) if smooth is None else torch.isfinite(lse) & torch.isfinite(smooth)
    if not bool(ordinary.all()):
        others = torch.nonzero(~ordinary)[:, 0]
        sums = class_sums(x[others], index[others], keep[others], weight=weight, smoothing=smoothing, xp=xp)
        nll[others], lse[others] = sums.nll, sums.lse
        if smooth is not None:
            smooth[others] = sums.smooth
    return ClassSums(nll, lse, smooth)


def _block_grad(
    out: Tensor,
    x: Tensor,
    index: Tensor,
    lse: Tensor,
    g_nll: Tensor,
    g_lse: Tensor,
    g_smooth: Tensor | None,
    weight: Tensor | None,
) -> None:
    """Write ``p (g_nll + g_lse) - onehot g_nll``, plus the part for label smoothing, into ``out``."""
    direct = out.dtype == g_nll.dtype
    p = torch.softmax(x, 1, out=out) if direct else torch.softmax(x, 1, dtype=g_nll.dtype)
    there = x.gather(1, index[:, None])[:, 0] != -torch.inf
    g_nll = torch.where(there, g_nll, 0.0)  # a target with a logit of -inf: the loss is inf, without gradient
    dead = (g_nll == 0) & (g_lse == 0) & ((g_smooth == 0) if g_smooth is not None else True)
    dead = dead | (lse == -torch.inf)
    total = g_nll + g_lse
    if g_smooth is None:
        p.mul_(total[:, None])
    else:
        here = x != -torch.inf
        each = g_smooth / here.sum(1).clamp_(min=1)
        share = here.to(p.dtype) if weight is None else here * weight
        p.mul_((total + each * share.sum(1))[:, None]).sub_(share.mul_(each[:, None]))
    p.scatter_add_(1, index[:, None], -g_nll[:, None])
    if x.device.type != "cpu":
        p.masked_fill_(dead[:, None], 0.0)
    elif bool(dead.any()):
        p[dead] = 0.0
    if not direct:
        out.copy_(p)


def _by_the_core(
    ctx: Any, x: Tensor, index: Tensor, keep: Tensor, weight: Tensor | None, grads: tuple[Tensor, ...]
) -> Tensor:
    """Return the same gradient as a differentiable function of the logits and the incoming gradients."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        sums = class_sums(x, index, keep, weight=weight, smoothing=ctx.smoothing, xp=xp)
        outputs = [s for s in sums if s is not None]
        (grad,) = torch.autograd.grad(outputs, x, grads[: len(outputs)], create_graph=again)
    return grad


# --- binary cross-entropy ------------------------------------------------------------------------------


def binary_items(z: Tensor, y: Tensor, pos_weight: Tensor | None = None, *, xp: Any = xp) -> Tensor:
    """Return what :func:`stablenum.losses.binary.entropy_items` returns, with torch's fused kernel where it
    applies."""
    if pos_weight is not None or y.requires_grad or not can_fuse(z, y):
        return entropy_items(z, y, pos_weight, xp=xp)
    return _BinaryItems.apply(z, y, False)


def binary_total(z: Tensor, y: Tensor) -> Tensor | None:
    """Return the sum of all items, in float32 or wider; None if the fused path does not apply."""
    if y.requires_grad or not can_fuse(z, y):
        return None
    return _BinaryItems.apply(z, y, True)


class _BinaryItems(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, y: Tensor, total: bool) -> Tensor:
        ctx.save_for_backward(z, y)
        ctx.hard = True
        flat, labels = z.reshape(-1), y.reshape(-1)
        wide = _wide(z.dtype)
        result = torch.zeros(() if total else flat.shape, dtype=wide, device=z.device)
        for block in _blocks(len(flat), 1, z.device):
            negative, block_total, hard = _log_likelihood(flat[block].to(wide), labels[block].to(wide))
            ctx.hard = ctx.hard and hard
            if total:
                result -= block_total
            else:
                torch.neg(negative, out=result[block])
        return result if total else result.reshape(z.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, y = ctx.saved_tensors
        if torch.is_grad_enabled() or _transforming() or _is_batch(grad):
            return _binary_by_the_core(z, y, grad), None, None
        result = torch.empty_like(z, memory_format=torch.contiguous_format)
        flat, labels, out = z.reshape(-1), y.reshape(-1), result.view(-1)
        each = grad.reshape(-1) if grad.ndim == z.ndim and grad.shape == z.shape else None
        slopes = _hard_slopes if ctx.hard else _soft_slopes
        for block in _blocks(len(flat), 1, z.device):
            x, label = flat[block].to(grad.dtype), labels[block].to(grad.dtype)
            slope = slopes(x, label, out[block] if out.dtype == x.dtype else None)
            slope.mul_(grad if each is None else each[block])
            if out.dtype != x.dtype:
                out[block] = slope
        return result, None, None


def _log_likelihood(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Return a block's negated items, their sum, and whether all labels are 0 or 1. The core handles inf."""
    if z.device.type == "cpu":
        hard = _are_hard(y)
        if hard:
            result = functional.logsigmoid(_flipped(z, y).neg_())
        else:
            result = functional.logsigmoid(z.abs())
            result.sub_(z.clamp(min=0.0).addcmul_(z, y, value=-1.0))
        total = result.sum()
        if math.isfinite(total):
            return result, total, hard
    result = entropy_items(z, y, xp=xp).neg()
    return result, result.sum(), False


def _are_hard(y: Tensor) -> bool:
    if not len(y):
        return True
    low, high = torch.addcmul(y, y, y, value=-1.0).aminmax()
    return float(low) == 0.0 == float(high)


def _flipped(z: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
    """Return z where the label is 0, -z where it is 1."""
    return torch.addcmul(z, z, y, value=-2.0, out=out)


def _hard_slopes(z: Tensor, y: Tensor, out: Tensor | None) -> Tensor:
    """Return ``sigmoid(z)`` or ``-sigmoid(-z)``: a single sigmoid; labels between 0 and 1 need two."""
    slope = _flipped(z, y, out).sigmoid_()
    return slope.addcmul_(slope, y, value=-2.0)


def _soft_slopes(z: Tensor, y: Tensor, out: Tensor | None) -> Tensor:
    """Return ``sigmoid(z) (1 - y) - sigmoid(-z) y``; ``sigmoid(z) - y`` is 0 once the sigmoid rounds to y =
    1."""
    slope = torch.sigmoid(z, out=out)
    slope.addcmul_(slope, y, value=-1.0)
    return slope.addcmul_(torch.neg(z).sigmoid_(), y, value=-1.0)


def _binary_by_the_core(z: Tensor, y: Tensor, grad: Tensor) -> Tensor:
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        z = z if z.requires_grad else z.detach().requires_grad_()
        items = entropy_items(z.to(_wide(z.dtype)), y.to(_wide(z.dtype)), xp=xp)
        items = items if grad.shape == items.shape else items.sum()
        (result,) = torch.autograd.grad(items, z, grad, create_graph=again)
    return result
