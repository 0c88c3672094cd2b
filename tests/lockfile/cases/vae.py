"""Variational autoencoder on binary vectors, Bernoulli decoder, warm-up weight on the KL."""
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import stablenum_torch

INPUT, HIDDEN, LATENT = 72, 64, 6
KL_WEIGHT = 0.5


class _Swish(torch.autograd.Function):
    """x * sigmoid(x) that keeps only the input for the backward pass."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad_out):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad_out * (s + x * s * (1 - s))


def swish(x):
    return _Swish.apply(x)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(INPUT, HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, HIDDEN)
        self.mu = nn.Linear(HIDDEN, LATENT)
        self.logvar = nn.Linear(HIDDEN, LATENT)

    def forward(self, x):
        h = swish(self.fc1(x))
        h = swish(self.fc2(h)) + h
        return self.mu(h), self.logvar(h)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(LATENT, HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, INPUT)

    def forward(self, z):
        return self.fc2(swish(self.fc1(z)))


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Encoder(), Decoder()

    def forward(self, x, noise):
        mu, logvar = self.encoder(x)
        std = torch.exp(0.5 * logvar)
        z = mu + std * noise
        return self.decoder(z), mu, logvar


def reconstruction_loss(logits, x):
    bce = F.binary_cross_entropy_with_logits(logits, x, reduction="none")
    return bce.sum(dim=1)


def kl_divergence(mu, logvar):
    """KL(q(z|x) || N(0, 1)), one number a row."""
    terms = mu.pow(2) + logvar.exp() - 1.0 - logvar
    return 0.5 * terms.sum(dim=1)


def make_data(n=24, seed=2):
    rng = np.random.default_rng(seed)
    prototypes = rng.random((4, INPUT))
    x = (rng.random((n, INPUT)) < prototypes[rng.integers(0, 4, size=n)]).astype("float32")
    noise = rng.standard_normal((n, LATENT)).astype("float32")
    return torch.from_numpy(x), torch.from_numpy(noise)


def program():
    torch.manual_seed(2)
    model = VAE()
    x, noise = make_data()

    def loss_fn(x, noise):
        logits, mu, logvar = model(x, noise)
        rec = reconstruction_loss(logits, x)
        kl = kl_divergence(mu, logvar)
        return (rec + KL_WEIGHT * kl).mean()

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return stablenum_torch.program(loss_fn, x, noise, model=model, optimizer=optimizer)
