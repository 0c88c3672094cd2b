"""The core's losses with torch's conventions: ``dim`` for ``axis``, autocast as in torch's own losses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor

from stablenum import losses as core
from stablenum._support.adapter_docs import spelled_signature, spelled_text
from stablenum.errors import bad_field, bad_type
from stablenum.losses.common import (
    argument_kinds,
    check_arguments,
    check_fits,
    check_reduction,
    check_same_shape,
    check_smoothing,
)
from stablenum_torch.losses.fused import binary_items, binary_total, can_fuse, fused_class_sums

__all__ = [
    "binary_cross_entropy",
    "binary_focal",
    "cosine_embedding",
    "cosine_similarity",
    "cross_entropy",
    "focal",
    "gaussian_nll",
    "hinge",
    "huber",
    "info_nce",
    "js_divergence",
    "kl_divergence",
    "log_cosh",
    "negative_binomial_nll",
    "poisson_nll",
]

Loss = Callable[..., Tensor]
_WORDS = (("``axis``", "``dim``"), ("axis: ", "dim: "), (" axis, ", " dim, "))


def _spelled(function: Callable[..., Any], example: str, note: str = "") -> Callable[[Loss], Loss]:
    """Give an implementation the name, arguments and docstring of a core function, in torch's terms."""

    def spell(implementation: Loss) -> Loss:
        @functools.wraps(function)
        def loss(*tensors: Any, **options: Any) -> Tensor:
            given = tensors[0] if tensors else options.get(first)
            if not isinstance(given, Tensor):
                raise bad_type(first, "a tensor", given)
            check_arguments(kinds, tensors, options, is_array=_is_tensor, noun="a tensor")
            return _called(implementation, given, tensors, options)

        kinds = argument_kinds(function)
        first = next(iter(kinds))
        loss.__signature__ = spelled_signature(  # type: ignore[attr-defined]
            function,
            names={"axis": "dim"},
            defaults={"axis": None if note else -1},
            return_annotation=Tensor,
        )
        loss.__doc__ = spelled_text(function, example, words=_WORDS, note=note)
        loss.__module__ = __name__
        return loss

    return spell


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _called(implementation: Loss, first: Tensor, tensors: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    """Call with the core's names and without autocast, whose narrower formats would undo the core's work."""
    dtype = options.get("dtype")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype must be a floating-point torch.dtype or None; got {dtype!r}.")
    dim = options.get("dim")
    if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int)):
        raise bad_field("dim", "a whole number or None", dim)
    if "dim" in options:
        options["axis"] = options.pop("dim")
    kind = first.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return implementation(*tensors, **options)
    if options.get("dtype") is None and first.dtype != torch.float64:
        options["dtype"] = torch.float32
    with torch.autocast(kind, enabled=False):
        return implementation(*tensors, **options)


def _plain(function: Callable[..., Any], example: str) -> Loss:
    return _spelled(function, example)(functools.partial(function, xp=xp))


_CLASSES = """\
With ``dim`` None the classes are where torch has them: dimension 1, or 0 for a single row. On a CPU, outside
``torch.compile`` and ``torch.func``, a target that is not a class raises a ValueError. Elsewhere the check
would make the host wait, so the loss of such an item is NaN instead."""


@_spelled(
    core.cross_entropy,
    """
    >>> import torch
    >>> x = torch.tensor([[0.0, 0.0, -torch.inf], [torch.nan, 0.0, 0.0]], requires_grad=True)
    >>> loss = cross_entropy(x, torch.tensor([1, -100]), label_smoothing=0.1)
    >>> loss.backward()
    >>> bool(loss.isfinite() & x.grad.isfinite().all())
    True
    """,
    _CLASSES,
)
def cross_entropy(
    logits: Tensor, targets: Tensor, *, axis: int | None = None, ignore_index: int = -100, **options: Any
) -> Tensor:
    axis = (1 if logits.ndim > 1 else 0) if axis is None else axis
    targets = _index(targets, logits, axis, ignore_index, options.get("mask"))
    return core.cross_entropy(
        logits, targets, axis=axis, ignore_index=ignore_index, sums=fused_class_sums, xp=xp, **options
    )


@_spelled(
    core.focal,
    """
    >>> import torch
    >>> x = torch.tensor([[80.0, 0.0]], requires_grad=True)
    >>> focal(x, torch.tensor([0]), gamma=0.5).backward()
    >>> bool(x.grad.isfinite().all())
    True
    """,
    _CLASSES,
)
def focal(
    logits: Tensor, targets: Tensor, *, axis: int | None = None, ignore_index: int = -100, **options: Any
) -> Tensor:
    axis = (1 if logits.ndim > 1 else 0) if axis is None else axis
    targets = _index(targets, logits, axis, ignore_index, options.get("mask"))
    return core.focal(logits, targets, axis=axis, ignore_index=ignore_index, xp=xp, **options)


def _index(targets: Tensor, logits: Tensor, axis: int, ignore_index: int, mask: Tensor | None) -> Tensor:
    """Convert integer targets to int64, which gathering needs, and check them where that costs no wait."""
    if targets.dtype.is_floating_point or targets.dtype in (torch.bool, torch.int64):
        index = targets
    else:
        index = targets.long()
    checkable = index.dtype == torch.int64 and index.device.type == "cpu" and can_fuse(index, mask)
    if checkable and -logits.ndim <= axis < logits.ndim and logits.shape[axis]:
        classes = logits.shape[axis]
        wrong = (index != ignore_index) & ((index < 0) | (index >= classes))
        if mask is not None:
            check_fits("mask", mask, index.shape, of="the items")
            wrong = wrong & mask
        if bool(wrong.any()):
            allowed = f"whole numbers from 0 to {classes - 1}, or ignore_index ({ignore_index})"
            raise bad_field("targets", allowed, int(index.expand_as(wrong)[wrong][0]))
    return index


@_spelled(
    core.binary_cross_entropy,
    """
    >>> import torch
    >>> z = torch.tensor([200.0, -200.0], requires_grad=True)
    >>> loss = binary_cross_entropy(z, torch.tensor([1.0, 1.0]))
    >>> loss.backward()
    >>> loss.item(), z.grad.tolist()
    (100.0, [0.0, -0.5])
    """,
)
def binary_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    mask: Tensor | None = None,
    reduction: str = "mean",
    dtype: torch.dtype | None = None,
) -> Tensor:
    if (
        weight is None
        and pos_weight is None
        and mask is None
        and reduction != "none"
        and logits.is_floating_point()
    ):
        reduction, s = check_reduction(reduction), check_smoothing(label_smoothing)
        check_same_shape("targets", targets, "logits", logits)
        total = binary_total(logits, targets if s == 0 else targets * (1.0 - s) + s / 2)
        if total is not None:
            total = total / max(logits.numel(), 1) if reduction == "mean" else total
            return total.to(dtype or logits.dtype)
    return core.binary_cross_entropy(
        logits,
        targets,
        weight=weight,
        pos_weight=pos_weight,
        label_smoothing=label_smoothing,
        mask=mask,
        reduction=reduction,
        dtype=dtype,
        items=binary_items,
        xp=xp,
    )


binary_focal = _plain(
    core.binary_focal,
    """
    >>> import torch
    >>> z = torch.tensor([0.0, 40.0], requires_grad=True)
    >>> binary_focal(z, torch.tensor([1.0, 1.0]), gamma=0.5).backward()
    >>> bool(z.grad.isfinite().all())
    True
    """,
)
kl_divergence = _plain(
    core.kl_divergence,
    """
    >>> import torch
    >>> kl_divergence(torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([[1.0, 0.0, 0.0]]))
    tensor(0.6931)
    """,
)
js_divergence = _plain(
    core.js_divergence,
    """
    >>> import torch
    >>> js_divergence(torch.tensor([[0.0, -torch.inf]]), torch.tensor([[-torch.inf, 0.0]]))
    tensor(0.6931)
    """,
)
gaussian_nll = _plain(
    core.gaussian_nll,
    """
    >>> import torch
    >>> gaussian_nll(torch.zeros(2), torch.ones(2), torch.ones(2))
    tensor(0.5000)
    """,
)
poisson_nll = _plain(
    core.poisson_nll,
    """
    >>> import torch
    >>> poisson_nll(torch.tensor([0.0, 1000.0]), torch.tensor([1.0, 0.0])).isfinite()
    tensor(True)
    """,
)
negative_binomial_nll = _plain(
    core.negative_binomial_nll,
    """
    >>> import torch
    >>> negative_binomial_nll(torch.zeros(1), torch.zeros(1), torch.ones(1))  # P(0) = 1 / 2
    tensor(0.6931)
    """,
)
huber = _plain(
    core.huber,
    """
    >>> import torch
    >>> huber(torch.tensor([0.5, 3.0]), torch.zeros(2), reduction="none")
    tensor([0.1250, 2.5000])
    """,
)
log_cosh = _plain(
    core.log_cosh,
    """
    >>> import torch
    >>> log_cosh(torch.tensor([100.0]), torch.zeros(1))
    tensor(99.3069)
    """,
)
hinge = _plain(
    core.hinge,
    """
    >>> import torch
    >>> hinge(torch.tensor([0.5, 3.0]), torch.tensor([1.0, -1.0]), reduction="none")
    tensor([0.5000, 4.0000])
    """,
)
cosine_similarity = _plain(
    core.cosine_similarity,
    """
    >>> import torch
    >>> x = torch.zeros(1, 2, requires_grad=True)
    >>> cosine_similarity(x, torch.ones(1, 2)).sum().backward()
    >>> x.grad
    tensor([[0., 0.]])
    """,
)
cosine_embedding = _plain(
    core.cosine_embedding,
    """
    >>> import torch
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    >>> cosine_embedding(x, x, reduction="none")
    tensor([0., 1.])
    """,
)
info_nce = _plain(
    core.info_nce,
    """
    >>> import torch
    >>> info_nce(torch.eye(2), torch.eye(2), temperature=1.0)
    tensor(0.3133)
    """,
)
