"""Tabular classifier: a residual MLP with LayerNorm and RMSNorm. PyTorch original and Flax (linen) port."""
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import stablenum_jax
import stablenum_torch
import torch
import torch.nn as nn
import torch.nn.functional as F

FEATURES, WIDTH, HIDDEN, CLASSES, DEPTH = 12, 16, 40, 5, 2


def make_batch():
    rng = np.random.default_rng(7)
    table = rng.normal(1.0, 2.0, size=(8, FEATURES)).astype(np.float32)
    labels = rng.integers(0, CLASSES, size=8)
    return table, labels


# ---------------------------------------------------------------- PyTorch


class RMSNorm(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        mean_square = x.pow(2).mean(dim=-1, keepdim=True)
        return x * torch.rsqrt(mean_square + self.eps) * self.weight


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x):
        h = self.norm(x)
        h = F.gelu(self.fc1(h))
        return x + self.fc2(h)


class GatedUnit(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = RMSNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.value = nn.Linear(width, hidden, bias=False)
        self.out = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        normed = self.norm(x)
        gated = F.silu(self.gate(normed)) * self.value(normed)
        return x + self.out(gated)


class TabularNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList([Block(WIDTH, HIDDEN) for _ in range(DEPTH)])
        self.gated = GatedUnit(WIDTH, HIDDEN)
        self.mixer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def standardize(self, table):
        centered = table - table.mean(dim=0)
        return centered / table.std(dim=0)

    def forward(self, table):
        x = self.embed(self.standardize(table))
        for block in self.blocks:
            x = block(x)
        x = self.gated(x)
        code = torch.tanh(self.mixer(x))
        x = x + code @ self.mixer.weight
        return self.head(x)


def make_torch_optimizer(model):
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)


def left():
    torch.manual_seed(0)
    model = TabularNet()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    table, labels = make_batch()

    def loss_fn(table, labels):
        logits = model(table)
        return F.cross_entropy(logits, labels)

    optimizer = make_torch_optimizer(model)
    return stablenum_torch.program(
        loss_fn, torch.from_numpy(table), torch.from_numpy(labels), model=model, optimizer=optimizer
    )


# ---------------------------------------------------------------- Flax


class FlaxRMSNorm(linen.Module):
    eps: float = 1e-6

    @linen.compact
    def __call__(self, x):
        scale = self.param("scale", linen.initializers.ones, (x.shape[-1],))
        ms = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        x_hat = x / jnp.sqrt(ms + self.eps)
        return x_hat * scale


class FlaxBlock(linen.Module):
    hidden: int

    @linen.compact
    def __call__(self, x):
        norm = linen.LayerNorm(epsilon=1e-5, name="norm")
        y = norm(x)
        y = linen.Dense(self.hidden, name="fc1")(y)
        y = linen.gelu(y, approximate=False)
        y = linen.Dense(x.shape[-1], name="fc2")(y)
        return x + y


class FlaxGatedUnit(linen.Module):
    hidden: int

    @linen.compact
    def __call__(self, x):
        y = FlaxRMSNorm(name="norm")(x)
        gate = linen.Dense(self.hidden, use_bias=False, name="gate")(y)
        value = linen.Dense(self.hidden, use_bias=False, name="value")(y)
        y = linen.silu(gate) * value
        return x + linen.Dense(x.shape[-1], use_bias=False, name="out")(y)


class FlaxTabularNet(linen.Module):
    @linen.compact
    def __call__(self, table):
        spread = jnp.std(table, axis=0, ddof=1)
        x = linen.Dense(WIDTH, name="embed")((table - jnp.mean(table, axis=0)) / spread)
        for i in range(DEPTH):
            x = FlaxBlock(HIDDEN, name=f"block_{i}")(x)
        x = FlaxGatedUnit(HIDDEN, name="gated")(x)
        kernel = self.param("mixer_kernel", linen.initializers.lecun_normal(), (WIDTH, WIDTH))
        bias = self.param("mixer_bias", linen.initializers.zeros, (WIDTH,))
        code = jnp.tanh(jnp.dot(x, kernel) + bias)
        x = x + jnp.dot(code, kernel.T)
        return linen.Dense(CLASSES, name="head")(x)


def matrices_only(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


def right():
    table, labels = make_batch()
    model = FlaxTabularNet()
    params = model.init(jax.random.key(11), table)["params"]
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(12), len(leaves))
    params = treedef.unflatten([p + 0.05 * jax.random.normal(k, p.shape) for p, k in zip(leaves, keys)])

    def loss_fn(params, table, labels):
        logits = model.apply({"params": params}, table)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean()

    tx = optax.adamw(3e-3, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, mask=matrices_only)
    return stablenum_jax.program(loss_fn, params, jnp.asarray(table), jnp.asarray(labels), optimizer=tx)
