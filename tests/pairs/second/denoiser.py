"""One-dimensional diffusion denoiser with FiLM conditioning: PyTorch (N, C, L) and flax linen (N, L, C), one AdamW step."""
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F

import stablenum_jax
import stablenum_torch

CHANNELS, LENGTH = 3, 12
WIDTH, TIME_WIDTH, DEPTH = 16, 24, 2
DIFFUSION_STEPS = 50
PEAK_LR, START, WARMUP, TOTAL = 2e-3, 0.1, 5, 100
DECAY, MAX_NORM = 0.05, 0.5


def make_batch():
    rng = np.random.default_rng(51)
    clean = rng.normal(size=(4, LENGTH, CHANNELS)).astype(np.float32)
    noise = rng.normal(size=(4, LENGTH, CHANNELS)).astype(np.float32)
    times = rng.integers(0, DIFFUSION_STEPS, size=4)
    return clean, noise, times


# ---------------------------------------------------------------- PyTorch


def timestep_embedding(times, width, dtype):
    half = width // 2
    frequencies = torch.exp(-math.log(10000.0) * torch.arange(half, dtype=dtype) / half)
    angles = times.to(dtype)[:, None] * frequencies[None, :]
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class TimeMLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = torch.nn.Linear(TIME_WIDTH, TIME_WIDTH)
        self.norm = torch.nn.LayerNorm(TIME_WIDTH)
        self.fc2 = torch.nn.Linear(TIME_WIDTH, TIME_WIDTH)

    def forward(self, times):
        t = timestep_embedding(times, TIME_WIDTH, self.fc1.weight.dtype)
        return F.silu(self.fc2(F.silu(self.norm(self.fc1(t)))))


class FiLMBlock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.GroupNorm(1, WIDTH)
        self.film = torch.nn.Linear(TIME_WIDTH, 2 * WIDTH)
        self.conv1 = torch.nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.conv2 = torch.nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x, t):
        scale, shift = self.film(t).unsqueeze(-1).chunk(2, dim=1)
        h = self.norm(x)
        h = h * (1 + scale) + shift
        return x + self.conv2(F.silu(self.conv1(F.silu(h))))


class Denoiser(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.time = TimeMLP()
        self.stem = torch.nn.Conv1d(CHANNELS, WIDTH, 3, padding=1)
        self.blocks = torch.nn.ModuleList([FiLMBlock() for _ in range(DEPTH)])
        self.head = torch.nn.Conv1d(WIDTH, CHANNELS, 1)

    def forward(self, x, times):
        t = self.time(times)
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, t)
        return self.head(F.silu(x))


def lr_factor(epoch):
    step = epoch + 1
    if step < WARMUP:
        return START + (1 - START) * step / WARMUP
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - WARMUP) / (TOTAL - WARMUP))))


def make_optimizer(model):
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.98), eps=1e-8)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)

    def clip(optimizer, args, kwargs):
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)

    optimizer.register_step_pre_hook(clip)
    return optimizer


def left():
    torch.manual_seed(12)
    model = Denoiser()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    clean, noise, times = make_batch()
    clean, noise = (torch.as_tensor(part).transpose(1, 2).contiguous() for part in (clean, noise))

    def loss_fn(clean, noise, times):
        betas = torch.linspace(1e-3, 0.1, DIFFUSION_STEPS, dtype=clean.dtype)
        alpha_bar = torch.cumprod(1 - betas, dim=0)[times].view(-1, 1, 1)
        noisy = alpha_bar.sqrt() * clean + (1 - alpha_bar).sqrt() * noise
        return F.mse_loss(model(noisy, times), noise)

    return stablenum_torch.program(
        loss_fn, clean, noise, torch.as_tensor(times), model=model, optimizer=make_optimizer(model)
    )


# ---------------------------------------------------------------- flax linen


class TimeEmbedding(nn.Module):
    @nn.compact
    def __call__(self, times):
        half = TIME_WIDTH // 2
        angles = times[:, None] * 10000.0 ** (-jnp.arange(half) / half)
        t = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        t = nn.Dense(TIME_WIDTH, name="fc1")(t)
        t = nn.silu(nn.LayerNorm(epsilon=1e-5, name="norm")(t))
        return nn.silu(nn.Dense(TIME_WIDTH, name="fc2")(t))


class ModulatedBlock(nn.Module):
    @nn.compact
    def __call__(self, x, t):
        film = nn.Dense(2 * WIDTH, name="film")(t)[:, None, :]
        gain, offset = film[..., :WIDTH], film[..., WIDTH:]
        y = nn.LayerNorm(epsilon=1e-5, reduction_axes=(1, 2), name="norm")(x)
        y = offset + (1.0 + gain) * y
        y = nn.Conv(WIDTH, (3,), name="conv1")(nn.silu(y))
        y = nn.Conv(WIDTH, (3,), name="conv2")(nn.silu(y))
        return x + y


class NoisePredictor(nn.Module):
    @nn.compact
    def __call__(self, x, times):
        t = TimeEmbedding(name="time")(times)
        x = nn.Conv(WIDTH, (3,), name="stem")(x)
        for i in range(DEPTH):
            x = ModulatedBlock(name=f"blocks_{i}")(x, t)
        return nn.Dense(CHANNELS, name="head")(nn.silu(x))


def clip_gradients(max_norm):
    def clip(grads, params=None):
        squares = [jnp.vdot(g, g) for g in jax.tree.leaves(grads)]
        coefficient = max_norm / (jnp.sqrt(sum(squares)) + 1e-6)
        return jax.tree.map(lambda g: jnp.where(coefficient < 1.0, g * coefficient, g), grads)

    return optax.stateless(clip)


def matrices_only(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


def make_transform():
    schedule = optax.warmup_cosine_decay_schedule(START * PEAK_LR, PEAK_LR, WARMUP, TOTAL)
    return optax.chain(
        clip_gradients(MAX_NORM),
        optax.scale_by_adam(b1=0.9, b2=0.98, eps=1e-8),
        optax.add_decayed_weights(DECAY, mask=matrices_only),
        optax.scale_by_learning_rate(lambda count: schedule(count + 1.0)),
    )


def right():
    clean, noise, times = (jnp.asarray(part) for part in make_batch())
    net = NoisePredictor()
    variables = net.init(jax.random.key(13), clean, times)
    rng = np.random.default_rng(14)
    params = jax.tree.map(lambda p: p + jnp.asarray(0.1 * rng.normal(size=p.shape), p.dtype), variables["params"])

    def loss_fn(params, clean, noise, times):
        kept = jnp.cumprod(1.0 - jnp.linspace(1e-3, 0.1, DIFFUSION_STEPS))[times][:, None, None]
        noisy = jnp.sqrt(kept) * clean + jnp.sqrt(1.0 - kept) * noise
        error = net.apply({"params": params}, noisy, times) - noise
        return jnp.mean(jnp.square(error))

    return stablenum_jax.program(loss_fn, params, clean, noise, times, optimizer=make_transform())
