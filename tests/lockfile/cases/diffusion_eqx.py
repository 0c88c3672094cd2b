"""Denoising diffusion on short 1-d signals: equinox conv net, sinusoidal time embedding."""
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import stablenum_jax

LENGTH, CHANNELS, WIDTH, TIME_DIM, STEPS = 32, 2, 16, 24, 200
MAX_SNR = 5.0


def cosine_alpha_bar(steps, offset=0.008):
    """Share of signal that is left after each step (Nichol & Dhariwal)."""
    t = np.arange(1, steps + 1) / steps
    f = np.cos((t + offset) / (1 + offset) * np.pi / 2) ** 2
    f0 = np.cos(offset / (1 + offset) * np.pi / 2) ** 2
    return np.clip(f / f0, 1e-5, 0.99999)


ALPHA_BAR = cosine_alpha_bar(STEPS)


def time_embedding(t, dim=TIME_DIM, max_period=10000.0):
    half = dim // 2
    freqs = jnp.exp(-jnp.log(max_period) * jnp.arange(half) / half)
    angles = t * freqs
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)])


class ResBlock(eqx.Module):
    norm: eqx.nn.GroupNorm
    conv1: eqx.nn.Conv1d
    conv2: eqx.nn.Conv1d
    film: eqx.nn.Linear

    def __init__(self, width, key):
        k1, k2, k3 = jax.random.split(key, 3)
        self.norm = eqx.nn.GroupNorm(4, width)
        self.conv1 = eqx.nn.Conv1d(width, width, 3, padding=1, key=k1)
        self.conv2 = eqx.nn.Conv1d(width, width, 3, padding=1, key=k2)
        self.film = eqx.nn.Linear(WIDTH, 2 * width, key=k3)

    def __call__(self, x, temb):
        scale, shift = jnp.split(self.film(temb), 2)
        h = self.conv1(jax.nn.silu(self.norm(x)))
        h = h * (1 + scale[:, None]) + shift[:, None]
        return x + self.conv2(jax.nn.silu(h))


class Denoiser(eqx.Module):
    time_mlp: eqx.nn.MLP
    inp: eqx.nn.Conv1d
    blocks: list
    out: eqx.nn.Conv1d

    def __init__(self, key):
        k1, k2, k3, k4, k5 = jax.random.split(key, 5)
        self.time_mlp = eqx.nn.MLP(TIME_DIM, WIDTH, 32, 1, activation=jax.nn.silu, key=k1)
        self.inp = eqx.nn.Conv1d(CHANNELS, WIDTH, 3, padding=1, key=k2)
        self.blocks = [ResBlock(WIDTH, k3), ResBlock(WIDTH, k4)]
        self.out = eqx.nn.Conv1d(WIDTH, CHANNELS, 3, padding=1, key=k5)

    def __call__(self, x, t):
        temb = jax.nn.silu(self.time_mlp(time_embedding(t)))
        h = self.inp(x)
        for block in self.blocks:
            h = block(h, temb)
        return self.out(h)


def make_data(n=8, seed=11):
    rng = np.random.default_rng(seed)
    phase, freq = rng.uniform(0, 2 * np.pi, (n, CHANNELS, 1)), rng.uniform(1, 4, (n, CHANNELS, 1))
    x0 = np.sin(freq * np.linspace(0, 2 * np.pi, LENGTH) + phase)
    noise = rng.normal(size=x0.shape)
    t = rng.integers(0, STEPS, size=n)
    return x0.astype(np.float32), t.astype(np.int32), noise.astype(np.float32)


def program():
    model = Denoiser(jax.random.PRNGKey(11))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss_fn(params, x0, t, noise):
        model = eqx.combine(params, static)
        a = jnp.asarray(ALPHA_BAR, dtype=x0.dtype)[t]
        signal, sigma = jnp.sqrt(a), jnp.sqrt(1 - a)
        noisy = signal[:, None, None] * x0 + sigma[:, None, None] * noise
        predicted = jax.vmap(model)(noisy, t)
        per_sample = jnp.mean((predicted - noise) ** 2, axis=(1, 2))
        snr = a / (1 - a)
        weight = jnp.minimum(snr, MAX_SNR) / snr
        return jnp.mean(weight * per_sample)

    optimizer = optax.adam(2e-3)
    return stablenum_jax.program(loss_fn, params, *make_data(), optimizer=optimizer)
