"""Healthy trainings that start from something: frozen layers, adapters, layers and scales that begin at 0."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.recovery.healthy.training import STEPS, Batch, Training, cosine, digits, epochs, error, mlp

__all__ = ["adapters", "learnable_scale", "unfrozen", "zero_outputs"]


def _pretrained() -> nn.Sequential:
    """A network that knows the digits 0 to 4."""
    x, y = digits()[:2]
    model = mlp(64, 64, 64, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(100):
        optimizer.zero_grad()
        functional.cross_entropy(model(x[y < 5]), y[y < 5]).backward()
        optimizer.step()
    return model


def _tuned(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> Training:
    """A training on all digits, turned by a quarter."""
    x, y, held_out, classes = digits()
    x, held_out = (part.view(-1, 8, 8).rot90(1, (1, 2)).flatten(1) for part in (x, held_out))

    def loss(batch: Batch, step: int) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    return Training(model, optimizer, epochs((x, y), 32, seed), loss, error(model, held_out, classes))


class _Adapted(nn.Module):
    """A frozen layer with an adapter of low rank, whose second factor is 0 at first."""

    def __init__(self, layer: nn.Linear, rank: int = 4, alpha: float = 8.0) -> None:
        super().__init__()
        self.layer, self.scale = layer.requires_grad_(False), alpha / rank
        self.a = nn.Parameter(torch.randn(rank, layer.in_features) * layer.in_features**-0.5)
        self.b = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.scale * (x @ self.a.T @ self.b.T)


def adapters(seed: int) -> Training:
    """Adapters of low rank on a frozen network."""
    model = nn.Sequential(*(_Adapted(x) if isinstance(x, nn.Linear) else x for x in _pretrained()))
    trained = [p for p in model.parameters() if p.requires_grad]
    training = _tuned(model, torch.optim.AdamW(trained, lr=5e-3), seed)
    training.rate = lambda step: min(1.0, step / 60) * (1.0 - step / STEPS)
    return training


def unfrozen(seed: int) -> Training:
    """The last layer alone for half of the run, then all of them with one rate."""
    model = _pretrained()
    training = _tuned(model, torch.optim.AdamW(model.parameters(), lr=3e-3), seed)
    body = [p for layer in list(model)[:-1] for p in layer.parameters()]

    def before(step: int) -> None:
        for parameter in body:
            parameter.requires_grad_(step >= STEPS // 2)

    training.before = before
    return training


class _Cosines(nn.Module):
    """Classes by the angle to their directions, times a scale that is learned as its logarithm."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.directions = mlp(64, 64, 16), nn.Parameter(torch.randn(10, 16))
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        angles = functional.normalize(self.body(x)) @ functional.normalize(self.directions).T
        return angles * self.log_scale.exp()


def learnable_scale(seed: int) -> Training:
    """A scale of the logits that grows through the whole run."""
    model = _Cosines()
    x, y, held_out, classes = digits()
    optimizer = torch.optim.AdamW(
        [
            {"params": [model.log_scale], "lr": 1e-2, "weight_decay": 0.0},
            {"params": [model.directions, *model.body.parameters()]},
        ],
        lr=3e-3,
    )

    def loss(batch: Batch, step: int) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    return Training(model, optimizer, epochs((x, y), 32, seed), loss, error(model, held_out, classes))


class _Residual(nn.Module):
    """A block that is the identity at first, as its last layer is 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = mlp(width, 2 * width, width, activation=nn.GELU)
        self.norm = nn.LayerNorm(width)
        nn.init.zeros_(self.inner[-1].weight)
        nn.init.zeros_(self.inner[-1].bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


def zero_outputs(seed: int) -> Training:
    """Blocks whose last layers and a head begin at 0: at first, only the head has a gradient."""
    model = nn.Sequential(nn.Linear(64, 32), *(_Residual(32) for _ in range(4)), nn.Linear(32, 10))
    nn.init.zeros_(model[-1].weight)
    nn.init.zeros_(model[-1].bias)
    training = _tuned(model, torch.optim.AdamW(model.parameters(), lr=1e-3), seed)
    training.rate = cosine
    return training
