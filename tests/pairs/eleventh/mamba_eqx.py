"""Selective state-space model (Mamba) that predicts coverage along DNA: batches and loops in PyTorch,
single sequences, vmap and an associative scan in equinox. Both strands are read."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn as nn
import torch.nn.functional as F

import stablenum_jax
import stablenum_torch

LENGTH, BIN, DIM, INNER, STATE, RANK, KERNEL, DEPTH = 24, 4, 10, 20, 4, 3, 4, 2
LR, DECAY = 1e-3, 0.1


def make_batch():
    rng = np.random.default_rng(31)
    bases = rng.integers(0, 4, (3, LENGTH))
    dna = np.eye(4, dtype=np.float32)[bases]
    coverage = rng.poisson(2.0, (3, LENGTH // BIN)).astype(np.float32)
    return dna, coverage


# ---------------------------------------------------------------- PyTorch


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class MambaMixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_proj = nn.Linear(DIM, 2 * INNER, bias=False)
        self.conv1d = nn.Conv1d(INNER, INNER, KERNEL, groups=INNER, padding=KERNEL - 1)
        self.x_proj = nn.Linear(INNER, RANK + 2 * STATE, bias=False)
        self.dt_proj = nn.Linear(RANK, INNER)
        A = torch.arange(1, STATE + 1, dtype=torch.float32).repeat(INNER, 1)
        self.A_log = nn.Parameter(torch.log(A))
        self.D = nn.Parameter(torch.ones(INNER))
        self.out_proj = nn.Linear(INNER, DIM, bias=False)

    def forward(self, hidden_states):
        L = hidden_states.size(1)
        x, z = self.in_proj(hidden_states).chunk(2, dim=-1)
        x = self.conv1d(x.transpose(1, 2))[..., :L].transpose(1, 2)
        x = F.silu(x)
        dt, B, C = torch.split(self.x_proj(x), [RANK, STATE, STATE], dim=-1)
        dt = F.softplus(self.dt_proj(dt))
        y = self.selective_scan(x, dt, B, C)
        y = y + x * self.D
        return self.out_proj(y * F.silu(z))

    def selective_scan(self, x, dt, B, C):
        A = -torch.exp(self.A_log)
        state = x.new_zeros(x.size(0), INNER, STATE)
        ys = []
        for t in range(x.size(1)):
            dA = torch.exp(dt[:, t, :, None] * A)
            dB = dt[:, t, :, None] * B[:, t, None, :]
            state = dA * state + dB * x[:, t, :, None]
            ys.append(torch.einsum("bdn,bn->bd", state, C[:, t]))
        return torch.stack(ys, dim=1)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = RMSNorm(DIM)
        self.mixer = MambaMixer()

    def forward(self, x):
        return x + self.mixer(self.norm(x))


class CoverageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv1d(4, DIM, 5, padding=2)
        nn.init.normal_(self.stem.weight, std=0.02)
        nn.init.zeros_(self.stem.bias)
        self.layers = nn.ModuleList([Layer() for _ in range(DEPTH)])
        self.norm_f = RMSNorm(DIM)
        self.head = nn.Linear(DIM, 1)

    def one_strand(self, dna):
        x = self.stem(dna.transpose(1, 2)).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        x = F.avg_pool1d(self.norm_f(x).transpose(1, 2), BIN)
        return self.head(x.transpose(1, 2)).squeeze(-1)

    def forward(self, dna):
        forward = self.one_strand(dna)
        reverse = self.one_strand(dna.flip(1, 2)).flip(1)
        return F.softplus(0.5 * (forward + reverse))


def make_adamw(model):
    decay, rest = [], []
    for name, p in model.named_parameters():
        special = name.endswith((".A_log", ".D", "bias")) or "norm" in name
        (rest if special else decay).append(p)
    return torch.optim.AdamW(
        [{"params": decay, "weight_decay": DECAY}, {"params": rest, "weight_decay": 0.0}],
        lr=LR,
        betas=(0.9, 0.95),
    )


# ---------------------------------------------------------------- JAX


def uniform(key, shape, fan_in):
    return jax.random.uniform(key, shape, minval=-1, maxval=1) / math.sqrt(fan_in)


class Scale(eqx.Module):
    gain: jax.Array

    def __call__(self, x):
        power = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        return self.gain * x / jnp.sqrt(power + 1e-5)


def linear_recurrence(decay, increment):
    """h[t] = decay[t] * h[t - 1] + increment[t], along the first axis."""

    def combine(left, right):
        a, b = left
        c, d = right
        return a * c, c * b + d

    return jax.lax.associative_scan(combine, (decay, increment))[1]


class Mixer(eqx.Module):
    w_x: jax.Array
    w_z: jax.Array
    kernel: jax.Array
    kernel_bias: jax.Array
    w_dt_down: jax.Array
    w_b: jax.Array
    w_c: jax.Array
    dt_up: eqx.nn.Linear
    log_a: jax.Array
    skip: jax.Array
    w_out: jax.Array

    def __init__(self, key):
        k = jax.random.split(key, 9)
        self.w_x = uniform(k[0], (DIM, INNER), DIM)
        self.w_z = uniform(k[1], (DIM, INNER), DIM)
        self.kernel = uniform(k[2], (KERNEL, INNER), KERNEL)
        self.kernel_bias = uniform(k[3], (INNER,), KERNEL)
        self.w_dt_down = uniform(k[4], (INNER, RANK), INNER)
        self.w_b = uniform(k[5], (INNER, STATE), INNER)
        self.w_c = uniform(k[6], (INNER, STATE), INNER)
        self.dt_up = eqx.nn.Linear(RANK, INNER, key=k[7])
        self.log_a = jnp.tile(jnp.log(jnp.arange(1.0, STATE + 1)), (INNER, 1))
        self.skip = jnp.ones(INNER)
        self.w_out = uniform(k[8], (INNER, DIM), INNER)

    def __call__(self, u):
        length = u.shape[0]
        x, gate = u @ self.w_x, u @ self.w_z
        padded = jnp.pad(x, ((KERNEL - 1, 0), (0, 0)))
        taps = [self.kernel[i] * padded[i : i + length] for i in range(KERNEL)]
        x = jax.nn.silu(sum(taps) + self.kernel_bias)
        delta = jax.nn.softplus(jax.vmap(self.dt_up)(x @ self.w_dt_down))
        a = -jnp.exp(self.log_a)
        decay = jnp.exp(jnp.einsum("ld,dn->ldn", delta, a))
        increment = jnp.einsum("ld,ln->ldn", delta * x, x @ self.w_b)
        h = linear_recurrence(decay, increment)
        y = jnp.einsum("ldn,ln->ld", h, x @ self.w_c) + self.skip * x
        return (y * jax.nn.silu(gate)) @ self.w_out


class Coverage(eqx.Module):
    stem: eqx.nn.Conv1d
    norms: list
    mixers: list
    out_norm: Scale
    w_head: jax.Array
    b_head: jax.Array

    def __init__(self, key):
        keys = jax.random.split(key, DEPTH + 2)
        self.stem = eqx.nn.Conv1d(4, DIM, 5, padding=2, key=keys[0])
        self.norms = [Scale(jnp.ones(DIM)) for _ in range(DEPTH)]
        self.mixers = [Mixer(k) for k in keys[2:]]
        self.out_norm = Scale(jnp.ones(DIM))
        self.w_head = uniform(keys[1], (DIM,), DIM)
        self.b_head = jnp.zeros(())

    def strand(self, dna):
        x = self.stem(dna.T).T
        for norm, mixer in zip(self.norms, self.mixers):
            x = mixer(norm(x)) + x
        pooled = self.out_norm(x).reshape(-1, BIN, DIM).mean(axis=1)
        return pooled @ self.w_head + self.b_head

    def __call__(self, dna):
        both = self.strand(dna) + self.strand(dna[::-1, ::-1])[::-1]
        return jax.nn.softplus(both / 2)


def loss_fn(model, dna, coverage):
    rate = jax.vmap(model)(dna)
    return jnp.mean(rate - coverage * jnp.log(rate + 1e-8))


def decayed(model):
    """True for the matrices and kernels of the model."""
    mask = jax.tree.map(lambda p: p.ndim > 1, model)
    mask = eqx.tree_at(lambda m: m.w_head, mask, True)
    mask = eqx.tree_at(lambda m: m.stem.bias, mask, False)
    return eqx.tree_at(lambda m: [mixer.log_a for mixer in m.mixers], mask, [False] * DEPTH)


# ---------------------------------------------------------------- the pair


def left():
    torch.manual_seed(0)
    model = CoverageModel()
    poisson = nn.PoissonNLLLoss(log_input=False)
    dna, coverage = make_batch()
    return stablenum_torch.program(
        lambda dna, coverage: poisson(model(dna), coverage),
        torch.tensor(dna),
        torch.tensor(coverage),
        model=model,
        optimizer=make_adamw(model),
    )


def right():
    model = Coverage(jax.random.key(6))
    optimizer = optax.adamw(LR, b1=0.9, b2=0.95, weight_decay=DECAY, mask=decayed)
    return stablenum_jax.program(loss_fn, model, *map(jnp.asarray, make_batch()), optimizer=optimizer)
