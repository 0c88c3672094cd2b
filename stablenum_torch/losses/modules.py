"""The losses as modules, with the names and the constructor arguments of ``torch.nn``.

Arguments that ``torch.nn`` does not have are keyword-only. ``forward`` passes further keywords (``mask``,
``class_mask``) to the function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from stablenum._support.settings_checks import check_number
from stablenum.losses.common import check_reduction, check_smoothing
from stablenum_torch.losses import functions

__all__ = [
    "BCEWithLogitsLoss",
    "BinaryFocalLoss",
    "CosineEmbeddingLoss",
    "CrossEntropyLoss",
    "FocalLoss",
    "GaussianNLLLoss",
    "HingeLoss",
    "HuberLoss",
    "InfoNCELoss",
    "JSDivLoss",
    "KLDivLoss",
    "LogCoshLoss",
    "NegativeBinomialNLLLoss",
    "PoissonNLLLoss",
]


class _Loss(torch.nn.Module):
    """A loss function with its settings; tensors among them are buffers."""

    _settings: tuple[str, ...]

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        check_reduction(settings["reduction"])
        self._settings = tuple(settings)
        for name, value in settings.items():
            if name in ("weight", "pos_weight"):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._settings}

    def extra_repr(self) -> str:
        shown = ((name, value) for name, value in self._options().items() if not isinstance(value, Tensor))
        return ", ".join(f"{name}={value!r}" for name, value in shown if value is not None)


class _TargetLoss(_Loss):
    """A loss of an input and its target."""

    _function: ClassVar[Callable[..., Tensor]]

    def forward(self, input: Tensor, target: Tensor, **options: Any) -> Tensor:  # noqa: A002, torch's name
        """Return the loss of ``input`` compared with ``target``."""
        return type(self)._function(input, target, **self._options(), **options)


class CrossEntropyLoss(_TargetLoss):
    """:func:`cross_entropy` as ``torch.nn.CrossEntropyLoss``, with ``z_loss`` and ``dim``.

    Example:
        >>> import torch
        >>> CrossEntropyLoss(label_smoothing=0.1)(torch.zeros(2, 3), torch.tensor([0, -100]))
        tensor(1.0986)
    """

    _function = staticmethod(functions.cross_entropy)

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        dim: int | None = None,
    ) -> None:
        super().__init__(
            weight=weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=check_smoothing(label_smoothing),
            z_loss=check_number("z_loss", z_loss, at_least=0.0),
            dim=dim,
        )


class BCEWithLogitsLoss(_TargetLoss):
    """:func:`binary_cross_entropy` as ``torch.nn.BCEWithLogitsLoss``, with ``label_smoothing``.

    Example:
        >>> import torch
        >>> BCEWithLogitsLoss()(torch.tensor([-200.0]), torch.tensor([1.0]))
        tensor(200.)
    """

    _function = staticmethod(functions.binary_cross_entropy)

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        reduction: str = "mean",
        pos_weight: Tensor | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(
            weight=weight,
            pos_weight=pos_weight,
            reduction=reduction,
            label_smoothing=check_smoothing(label_smoothing),
        )


class FocalLoss(_TargetLoss):
    """:func:`focal`: one label out of many.

    Example:
        >>> import torch
        >>> FocalLoss(gamma=0.5)(torch.tensor([[0.0, 0.0]]), torch.tensor([0]))
        tensor(0.4901)
    """

    _function = staticmethod(functions.focal)

    def __init__(
        self,
        gamma: float = 2.0,
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        dim: int | None = None,
    ) -> None:
        gamma = check_number("gamma", gamma, at_least=0.0)
        super().__init__(gamma=gamma, weight=weight, ignore_index=ignore_index, reduction=reduction, dim=dim)


class BinaryFocalLoss(_TargetLoss):
    """:func:`binary_focal`: yes-or-no labels.

    Example:
        >>> import torch
        >>> BinaryFocalLoss()(torch.tensor([0.0]), torch.tensor([1.0]))
        tensor(0.1733)
    """

    _function = staticmethod(functions.binary_focal)

    def __init__(self, gamma: float = 2.0, alpha: float | None = None, *, reduction: str = "mean") -> None:
        gamma = check_number("gamma", gamma, at_least=0.0)
        super().__init__(gamma=gamma, alpha=alpha, reduction=reduction)


class KLDivLoss(_TargetLoss):
    """:func:`kl_divergence` as ``torch.nn.KLDivLoss``: of log-probabilities (or logits) and probabilities.

    "mean" is the mean over rows, which torch calls "batchmean"; that name works here too. torch's "mean"
    divides by the number of classes as well, and its "none" gives one number for each class, not for each
    row.

    Example:
        >>> import torch
        >>> KLDivLoss()(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[1.0, 0.0]]))
        tensor(0.6931)
    """

    _function = staticmethod(functions.kl_divergence)

    def __init__(self, reduction: str = "mean", log_target: bool = False, *, dim: int = -1) -> None:
        reduction = "mean" if reduction == "batchmean" else reduction
        super().__init__(reduction=reduction, log_targets=log_target, dim=dim)


class JSDivLoss(_TargetLoss):
    """:func:`js_divergence` of two sets of logits or log-probabilities.

    Example:
        >>> import torch
        >>> JSDivLoss()(torch.zeros(1, 2), torch.zeros(1, 2))
        tensor(0.)
    """

    _function = staticmethod(functions.js_divergence)

    def __init__(self, reduction: str = "mean", *, dim: int = -1) -> None:
        super().__init__(reduction=reduction, dim=dim)


class GaussianNLLLoss(_Loss):
    """:func:`gaussian_nll` as ``torch.nn.GaussianNLLLoss``.

    Example:
        >>> import torch
        >>> GaussianNLLLoss()(torch.zeros(2), torch.ones(2), torch.ones(2))
        tensor(0.5000)
    """

    def __init__(self, *, full: bool = False, eps: float = 1e-6, reduction: str = "mean") -> None:
        super().__init__(full=full, eps=check_number("eps", eps, above=0.0), reduction=reduction)

    def forward(
        self,
        input: Tensor,  # noqa: A002
        target: Tensor,
        var: Tensor,
        **options: Any,
    ) -> Tensor:
        """Return the loss of the mean ``input`` and the variance ``var`` for ``target``.

        As in torch, ``var`` may lack the last dimension, if the variance is the same along it.
        """
        if isinstance(var, Tensor) and var.shape != input.shape and var.shape == input.shape[:-1]:
            var = var.unsqueeze(-1)
        return functions.gaussian_nll(input, target, var, **self._options(), **options)


class PoissonNLLLoss(_TargetLoss):
    """:func:`poisson_nll` as ``torch.nn.PoissonNLLLoss``, with ``max_log_rate``.

    Example:
        >>> import torch
        >>> PoissonNLLLoss()(torch.zeros(1), torch.ones(1))
        tensor(1.)
    """

    _function = staticmethod(functions.poisson_nll)

    def __init__(
        self,
        log_input: bool = True,
        full: bool = False,
        *,
        eps: float = 1e-8,
        max_log_rate: float | None = None,
        reduction: str = "mean",
    ) -> None:
        eps = check_number("eps", eps, above=0.0)
        super().__init__(
            log_input=log_input, full=full, eps=eps, max_log_rate=max_log_rate, reduction=reduction
        )


class NegativeBinomialNLLLoss(_Loss):
    """:func:`negative_binomial_nll`.

    Example:
        >>> import torch
        >>> NegativeBinomialNLLLoss()(torch.zeros(1), torch.zeros(1), torch.ones(1))
        tensor(0.6931)
    """

    def __init__(
        self, log_input: bool = True, full: bool = False, *, eps: float = 1e-8, reduction: str = "mean"
    ) -> None:
        eps = check_number("eps", eps, above=0.0)
        super().__init__(log_input=log_input, full=full, eps=eps, reduction=reduction)

    def forward(
        self,
        input: Tensor,  # noqa: A002
        target: Tensor,
        total_count: Tensor,
        **options: Any,
    ) -> Tensor:
        """Return the loss of the counts ``target``, given their (log-)mean ``input`` and ``total_count``."""
        return functions.negative_binomial_nll(input, target, total_count, **self._options(), **options)


class HuberLoss(_TargetLoss):
    """:func:`huber` as ``torch.nn.HuberLoss``.

    Example:
        >>> import torch
        >>> HuberLoss(delta=2.0)(torch.tensor([3.0]), torch.zeros(1))
        tensor(4.)
    """

    _function = staticmethod(functions.huber)

    def __init__(self, reduction: str = "mean", delta: float = 1.0) -> None:
        super().__init__(reduction=reduction, delta=check_number("delta", delta, above=0.0))


class LogCoshLoss(_TargetLoss):
    """:func:`log_cosh`.

    Example:
        >>> import torch
        >>> LogCoshLoss()(torch.tensor([100.0]), torch.zeros(1))
        tensor(99.3069)
    """

    _function = staticmethod(functions.log_cosh)

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__(reduction=reduction)


class HingeLoss(_TargetLoss):
    """:func:`hinge`: labels of -1 and 1.

    Example:
        >>> import torch
        >>> HingeLoss()(torch.tensor([0.5]), torch.tensor([1.0]))
        tensor(0.5000)
    """

    _function = staticmethod(functions.hinge)

    def __init__(self, margin: float = 1.0, *, squared: bool = False, reduction: str = "mean") -> None:
        super().__init__(margin=check_number("margin", margin), squared=squared, reduction=reduction)


class CosineEmbeddingLoss(_Loss):
    """:func:`cosine_embedding` as ``torch.nn.CosineEmbeddingLoss``; the cosine distance without a target.

    Example:
        >>> import torch
        >>> CosineEmbeddingLoss()(torch.eye(2), torch.eye(2), torch.tensor([1, -1]))
        tensor(0.5000)
    """

    def __init__(self, margin: float = 0.0, *, reduction: str = "mean", dim: int = -1) -> None:
        margin = check_number("margin", margin, at_least=-1.0, at_most=1.0)
        super().__init__(margin=margin, reduction=reduction, dim=dim)

    def forward(self, input1: Tensor, input2: Tensor, target: Tensor | None = None, **options: Any) -> Tensor:
        """Return the loss of pairs; ``target`` is positive for pairs that belong together."""
        return functions.cosine_embedding(input1, input2, target, **self._options(), **options)


class InfoNCELoss(_Loss):
    """:func:`info_nce` of queries and keys; ``positives`` and ``mask`` are given in the call.

    Example:
        >>> import torch
        >>> InfoNCELoss(temperature=1.0)(torch.eye(2), torch.eye(2))
        tensor(0.3133)
    """

    def __init__(
        self,
        temperature: float = 0.07,
        *,
        normalized: bool = False,
        symmetric: bool = False,
        reduction: str = "mean",
    ) -> None:
        temperature = check_number("temperature", temperature, above=0.0)
        super().__init__(
            temperature=temperature, normalized=normalized, symmetric=symmetric, reduction=reduction
        )

    def forward(self, queries: Tensor, keys: Tensor, **options: Any) -> Tensor:
        """Return the loss of finding each query's key."""
        return functions.info_nce(queries, keys, **self._options(), **options)
