"""Healthy trainings whose aim moves: adversaries, annealed terms, returns, contrasts."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.recovery.healthy.training import STEPS, Batch, Training, digits, epochs, mlp

__all__ = ["adversaries", "annealed", "contrast", "fitted_values", "policy_gradient", "two_views"]


def adversaries(seed: int) -> Training:
    """A generator and a discriminator of eight clusters on a circle; the loss is that of the generator."""
    generator, discriminator = mlp(8, 48, 48, 2), mlp(2, 48, 48, 1, activation=nn.LeakyReLU)
    adam = {"lr": 1e-3, "betas": (0.5, 0.999)}
    optimizer = torch.optim.Adam(generator.parameters(), **adam)
    other = torch.optim.Adam(discriminator.parameters(), **adam)

    def real(rows: int, rng: np.random.Generator) -> Tensor:
        angles = rng.integers(8, size=rows) * np.pi / 4
        points = np.stack([np.cos(angles), np.sin(angles)], 1) + 0.05 * rng.normal(size=(rows, 2))
        return torch.tensor(points, dtype=torch.float32)

    def at(position: int) -> list[Batch]:
        rng = np.random.default_rng((seed, position))
        return [(real(64, rng), torch.tensor(rng.normal(size=(64, 8)), dtype=torch.float32))]

    def loss(batch: Batch, step: int) -> Tensor:
        points, noise = batch
        made = generator(noise)
        other.zero_grad()
        judged = functional.softplus(-discriminator(points)) + functional.softplus(
            discriminator(made.detach())
        )
        judged.mean().backward()
        other.step()
        return functional.softplus(-discriminator(made)).mean()

    rng = np.random.default_rng(1)
    tested, noise = real(256, rng), torch.tensor(rng.normal(size=(256, 8)), dtype=torch.float32)

    def distance() -> float:
        """The energy distance between what is made and what is real."""
        made = generator(noise)
        across = torch.cdist(made, tested).mean()
        return float(2.0 * across - torch.cdist(made, made).mean() - torch.cdist(tested, tested).mean())

    training = Training(generator, optimizer, at, loss, distance)
    training.extra = {"discriminator": discriminator, "its optimizer": other}
    return training


class _Autoencoder(nn.Module):
    """A variational autoencoder with eight latent features."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(64, 48, 16), mlp(8, 48, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the image that is found again, and the divergence of each row."""
        mean, log_variance = self.encoder(x).chunk(2, dim=-1)
        sample = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1.0 - log_variance).sum(1)
        return self.decoder(sample), divergence


def annealed(seed: int) -> Training:
    """The divergence of a variational autoencoder counts more and more, so that the loss rises."""
    x, _, held_out, _ = digits()
    model = _Autoencoder()

    def bound(images: Tensor, beta: float) -> Tensor:
        found, divergence = model(images)
        return ((found - images).square().sum(1) + beta * divergence).mean()

    def loss(batch: Batch, step: int) -> Tensor:
        return bound(batch[0], min(1.0, max(0.0, step / STEPS - 0.25) * 2.0))

    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    return Training(model, optimizer, epochs((x,), 32, seed), loss, lambda: float(bound(held_out, 1.0)))


def contrast(seed: int) -> Training:
    """Triplets whose margin is kept more and more often: the loss goes to 0 and so do most gradients."""
    x, y, held_out, classes = digits()
    model = mlp(64, 48, 16)
    by_class = [x[y == c] for c in range(10)]

    def at(position: int) -> list[Batch]:
        rng = np.random.default_rng((seed, position))
        pairs = [rng.choice(10, size=2, replace=False) for _ in range(16)]

        def one(c: int) -> Tensor:
            return by_class[c][int(rng.integers(len(by_class[c])))]

        rows = [(one(same), one(same), one(different)) for same, different in pairs]
        return [tuple(torch.stack(part) for part in zip(*rows, strict=True))]

    def loss(batch: Batch, step: int) -> Tensor:
        return functional.triplet_margin_loss(*(model(part) for part in batch))

    def nearest() -> float:
        """The share of rows whose nearest other row is of another class."""
        found = torch.cdist(model(held_out), model(held_out)).fill_diagonal_(torch.inf)
        return float((classes[found.argmin(1)] != classes).float().mean())

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Training(model, optimizer, at, loss, nearest)


class _Pairs(nn.Module):
    """Two encoders and a temperature that is learned, as for images and their captions."""

    def __init__(self) -> None:
        super().__init__()
        self.upper, self.lower = mlp(32, 48, 16), mlp(32, 48, 16)
        self.log_scale = nn.Parameter(torch.tensor(2.66))

    def forward(self, images: Tensor) -> Tensor:
        """Return how well each upper half fits each lower half."""
        upper, lower = self.upper(images[:, :32]), self.lower(images[:, 32:])
        return self.log_scale.exp() * functional.normalize(upper) @ functional.normalize(lower).T


def two_views(seed: int) -> Training:
    """The upper halves of images are matched with the lower ones."""
    x, _, held_out, _ = digits()
    model = _Pairs()

    def matched(images: Tensor) -> Tensor:
        fits, own = model(images), torch.arange(len(images))
        return 0.5 * (functional.cross_entropy(fits, own) + functional.cross_entropy(fits.T, own))

    def loss(batch: Batch, step: int) -> Tensor:
        return matched(batch[0])

    def evaluate() -> float:
        return float(torch.stack([matched(part) for part in held_out[:576].split(64)]).mean())

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    return Training(model, optimizer, epochs((x,), 64, seed), loss, evaluate)


_CELLS = 10


def _walked(cells: Tensor, right: Tensor, rng: np.random.Generator) -> Tensor:
    """The next cells of a corridor in which one step in ten goes the other way."""
    slips = torch.from_numpy(rng.random(len(cells)) < 0.1)
    return (cells + 2 * (right ^ slips).long() - 1).clamp(0, _CELLS - 1)


def policy_gradient(seed: int) -> Training:
    """REINFORCE in a corridor with noisy rewards at its end, and a bonus for entropy."""
    model = mlp(_CELLS, 32, 2, activation=nn.Tanh)

    def episodes(rows: int, rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
        cells, returns = torch.full((rows,), 3), torch.zeros(rows)
        chances, entropies = torch.zeros(rows), torch.zeros(rows)
        for _ in range(12):
            logs = model(functional.one_hot(cells, _CELLS).float()).log_softmax(-1)
            right = torch.tensor(rng.random(rows), dtype=torch.float32) < logs[:, 1].exp().detach()
            chances = chances + logs.gather(1, right.long()[:, None])[:, 0]
            entropies = entropies - (logs.exp() * logs).sum(1)
            cells = _walked(cells, right, rng)
            noise = torch.tensor(rng.normal(size=rows), dtype=torch.float32)
            returns = returns + (cells == _CELLS - 1) * (1.0 + noise) - 0.1
        return returns, chances, entropies

    def loss(batch: Batch, step: int) -> Tensor:
        returns, chances, entropies = episodes(16, np.random.default_rng((seed, int(batch[0]))))
        return -((returns - returns.mean()) * chances + 0.01 * entropies).mean()

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Training(
        model,
        optimizer,
        lambda position: [(torch.tensor(position),)],
        loss,
        lambda: -float(episodes(256, np.random.default_rng(1))[0].mean()),
    )


def fitted_values(seed: int) -> Training:
    """Values of actions learned from values of a frozen copy that is renewed every 100 steps."""
    model, frozen = mlp(_CELLS, 32, 2), mlp(_CELLS, 32, 2)
    frozen.load_state_dict(model.state_dict())
    ends = torch.zeros(_CELLS)
    ends[-1] = 1.0

    def at(position: int) -> list[Batch]:
        rng = np.random.default_rng((seed, position))
        cells = torch.from_numpy(rng.integers(_CELLS, size=32))
        right = torch.from_numpy(rng.random(32) < 0.5)
        return [(cells, right.long(), _walked(cells, right, rng))]

    def loss(batch: Batch, step: int) -> Tensor:
        cells, action, following = batch
        value = model(functional.one_hot(cells, _CELLS).float()).gather(1, action[:, None])[:, 0]
        with torch.no_grad():
            best = frozen(functional.one_hot(following, _CELLS).float()).amax(1)
        return functional.mse_loss(value, ends[following] + 0.9 * best)

    def after(step: int) -> None:
        if (step + 1) % 100 == 0:
            frozen.load_state_dict(model.state_dict())

    def truth() -> Tensor:
        """The values of the best actions."""
        cells = torch.arange(_CELLS)
        left, right = (cells - 1).clamp(min=0), (cells + 1).clamp(max=_CELLS - 1)
        values = torch.zeros(_CELLS, 2)
        for _ in range(200):
            gains = ends + 0.9 * values.amax(1)
            go_left, go_right = gains[left], gains[right]
            values = torch.stack([0.9 * go_left + 0.1 * go_right, 0.1 * go_left + 0.9 * go_right], 1)
        return values

    best = truth()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    training = Training(
        model, optimizer, at, loss, lambda: float(functional.mse_loss(model(torch.eye(_CELLS)), best))
    )
    training.after, training.extra = after, {"frozen": frozen}
    return training
