"""The models in PyTorch: the loss as a function of parameters and batch, for autograd to differentiate."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import Tensor

from stablenum.commands.compare.scenarios import Training
from stablenum.commands.compare.scenarios.training_data import NORM_EPS

__all__ = ["loss_function"]

Loss: TypeAlias = Callable[[list[Tensor], Tensor, Tensor, Tensor], Tensor]


def loss_function(training: Training, compute: str | None) -> Loss:
    """Return ``loss(params, x, y, weight)`` of a training: () float32, computed in ``compute``.

    With None, parameters and inputs are left unchanged, for use under ``opt.autocast()``.
    """
    dtype = None if compute is None else getattr(torch, compute)
    model, criterion = _MODELS[training.model], _LOSSES[training.model]

    def loss(params: list[Tensor], x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        if dtype is not None:
            params, x = [p.to(dtype) for p in params], x.to(dtype)
        return criterion(model(params, x).float(), y) * weight

    return loss


def _linear(weights: list[Tensor], x: Tensor) -> Tensor:
    return x @ weights[0] + weights[1]


def _mlp(weights: list[Tensor], x: Tensor) -> Tensor:
    w1, b1, w2, b2 = weights
    return F.relu(x @ w1 + b1) @ w2 + b2


def _normed(weights: list[Tensor], x: Tensor) -> Tensor:
    w1, b1, w2, b2 = weights
    hidden = F.relu(x @ w1 + b1)
    wide = hidden.float()
    rms = (wide.square().mean(dim=1, keepdim=True) + NORM_EPS).sqrt()
    return (wide / rms).to(hidden.dtype) @ w2 + b2


def _conv(weights: list[Tensor], x: Tensor) -> Tensor:
    kernel, b1, w2, b2 = weights
    return F.relu(F.conv2d(x.reshape(-1, 1, 8, 8), kernel, b1)).flatten(1) @ w2 + b2


def _deep(weights: list[Tensor], x: Tensor) -> Tensor:
    for w in weights:
        x = F.leaky_relu(x @ w, 0.1)
    return x


def _bce_with_log(z: Tensor, y: Tensor) -> Tensor:
    p = torch.sigmoid(z[:, 0])
    return -(y * p.log() + (1 - y) * (1 - p).log()).mean()


def _squares(output: Tensor, y: Tensor) -> Tensor:
    return (output[:, 0] - y).square().mean()


def _absolute(output: Tensor, y: Tensor) -> Tensor:
    return (output - y[:, None]).abs().mean()


_MODELS: dict[str, Callable[[list[Tensor], Tensor], Tensor]] = {
    "sigmoid-bce": _linear,
    "deep": _deep,
    "regression": _mlp,
    "digits-mlp": _mlp,
    "digits-normed": _normed,
    "digits-conv": _conv,
}
_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sigmoid-bce": _bce_with_log,
    "deep": _absolute,
    "regression": _squares,
    "digits-mlp": F.cross_entropy,
    "digits-normed": F.cross_entropy,
    "digits-conv": F.cross_entropy,
}
