"""Conditional VAE with a learned prior and balanced KL; the noise comes with the batch."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn as nn
import torch.nn.functional as F
from flax import nnx
from torch.distributions import Independent, Normal, kl_divergence

import stablenum_jax
import stablenum_torch

INPUT, HIDDEN, LATENT, CLASSES = 24, 32, 6, 4
BETA, BALANCE = 0.5, 0.8


def make_batch():
    rng = np.random.default_rng(8)
    x = rng.uniform(size=(8, INPUT)).astype(np.float32)
    label = rng.integers(0, CLASSES, size=(8,)).astype(np.int32)
    noise = rng.normal(size=(8, LATENT)).astype(np.float32)
    return x, label, noise


# ---------------------------------------------------------------- PyTorch


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(INPUT, HIDDEN),
            nn.LeakyReLU(0.2),
            nn.Linear(HIDDEN, HIDDEN),
            nn.LeakyReLU(0.2),
        )
        self.fc_mu = nn.Linear(HIDDEN, LATENT)
        self.fc_logvar = nn.Linear(HIDDEN, LATENT)

    def forward(self, x):
        h = self.body(x)
        return self.fc_mu(h), self.fc_logvar(h)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(LATENT + CLASSES, HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, INPUT)

    def forward(self, z, label):
        z = torch.cat([z, F.one_hot(label, CLASSES).to(z.dtype)], dim=-1)
        return self.fc2(torch.tanh(self.fc1(z)))


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.decoder = Decoder()
        self.prior_mu = nn.Embedding(CLASSES, LATENT)
        self.prior_logvar = nn.Embedding(CLASSES, LATENT)
        nn.init.normal_(self.prior_logvar.weight, std=0.3)

    def forward(self, x, label, eps):
        mu, logvar = self.encoder(x)
        std = torch.exp(0.5 * logvar)
        z = mu + std * eps
        logits = self.decoder(z, label)
        prior_mu = self.prior_mu(label)
        prior_std = (0.5 * self.prior_logvar(label)).exp()
        return logits, (mu, std), (prior_mu, prior_std)


def normal(mean, std):
    return Independent(Normal(mean, std), 1)


def elbo_loss(model, x, label, eps):
    logits, (mu, std), (prior_mu, prior_std) = model(x, label, eps)
    recon = F.binary_cross_entropy_with_logits(logits, x, reduction="sum") / x.shape[0]
    kl_prior = kl_divergence(normal(mu.detach(), std.detach()), normal(prior_mu, prior_std)).mean()
    kl_post = kl_divergence(normal(mu, std), normal(prior_mu.detach(), prior_std.detach())).mean()
    kl = BALANCE * kl_prior + (1 - BALANCE) * kl_post
    return recon + BETA * kl


class ClippedSGD(torch.optim.SGD):
    """Clips the gradient norm before each step."""

    def __init__(self, params, max_norm, **kwargs):
        super().__init__(params, **kwargs)
        self.max_norm = max_norm

    def step(self, closure=None):
        for group in self.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], self.max_norm)
        return super().step(closure)


# ---------------------------------------------------------------- JAX (flax nnx)


def leaky(x):
    return jax.nn.leaky_relu(x, negative_slope=0.2)


class GaussianEncoder(nnx.Module):
    def __init__(self, rngs):
        self.fc1 = nnx.Linear(INPUT, HIDDEN, rngs=rngs)
        self.fc2 = nnx.Linear(HIDDEN, HIDDEN, rngs=rngs)
        self.stats = nnx.Linear(HIDDEN, 2 * LATENT, rngs=rngs)

    def __call__(self, x):
        h = leaky(self.fc1(x))
        h = leaky(self.fc2(h))
        mean, log_var = jnp.split(self.stats(h), 2, axis=-1)
        return mean, log_var


class ConditionalDecoder(nnx.Module):
    def __init__(self, rngs):
        self.fc1 = nnx.Linear(LATENT + CLASSES, HIDDEN, rngs=rngs)
        self.fc2 = nnx.Linear(HIDDEN, INPUT, rngs=rngs)

    def __call__(self, z, label):
        z = jnp.concatenate([z, jax.nn.one_hot(label, CLASSES, dtype=z.dtype)], axis=-1)
        return self.fc2(jnp.tanh(self.fc1(z)))


class ConditionalVAE(nnx.Module):
    def __init__(self, rngs):
        self.encoder = GaussianEncoder(rngs)
        self.decoder = ConditionalDecoder(rngs)
        self.prior_mu = nnx.Embed(CLASSES, LATENT, rngs=rngs)
        self.prior_logvar = nnx.Embed(CLASSES, LATENT, rngs=rngs)


def gaussian_kl(q, p):
    """KL(q || p) of diagonal Gaussians given as (mean, log variance), per sample."""
    (q_mean, q_logvar), (p_mean, p_logvar) = q, p
    per_dim = p_logvar - q_logvar - 1.0
    per_dim = per_dim + (jnp.exp(q_logvar) + (q_mean - p_mean) ** 2) * jnp.exp(-p_logvar)
    return 0.5 * jnp.sum(per_dim, axis=-1)


def negative_elbo(model, x, label, noise):
    posterior = model.encoder(x)
    mean, log_var = posterior
    z = mean + noise * jnp.exp(log_var / 2)
    logits = model.decoder(z, label)
    nll = optax.sigmoid_binary_cross_entropy(logits, x).sum(axis=-1)
    prior = (model.prior_mu(label), model.prior_logvar(label))
    sg = jax.lax.stop_gradient
    train_prior = gaussian_kl(sg(posterior), prior)
    train_posterior = gaussian_kl(posterior, sg(prior))
    kl = BALANCE * train_prior + (1 - BALANCE) * train_posterior
    return jnp.mean(nll + BETA * kl)


# ---------------------------------------------------------------- the pair


def left():
    torch.manual_seed(0)
    model = VAE()
    optimizer = ClippedSGD(model.parameters(), max_norm=1.0, lr=2e-2, momentum=0.9, nesterov=True)
    x, label, noise = make_batch()

    def loss_fn(x, label, noise):
        return elbo_loss(model, x, label, noise)

    return stablenum_torch.program(loss_fn, torch.tensor(x), torch.tensor(label).long(), torch.tensor(noise),
                                   model=model, optimizer=optimizer)


def right():
    model = ConditionalVAE(nnx.Rngs(0))
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.sgd(2e-2, momentum=0.9, nesterov=True),
    )
    x, label, noise = make_batch()

    def loss_fn(model, x, label, noise):
        return negative_elbo(model, x, label, noise)

    return stablenum_jax.program(loss_fn, model, x, label, noise, optimizer=optimizer)
