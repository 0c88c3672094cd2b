"""ConvNet with hand-written batch norm: NCHW batch in PyTorch, per-image Equinox convolutions under vmap."""
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import stablenum_jax
import stablenum_torch
import torch
import torch.nn as nn
import torch.nn.functional as F

WIDTHS, CLASSES, EPS = (3, 8, 10), 4, 1e-5


def make_batch():
    rng = np.random.default_rng(55)
    images = rng.uniform(0.0, 1.0, size=(5, 3, 12, 12)).astype(np.float32)
    onehot = np.eye(CLASSES, dtype=np.float32)[rng.integers(0, CLASSES, size=5)]
    return images, onehot


# ---------------------------------------------------------------- PyTorch


class BatchNorm(nn.Module):
    """Batch statistics in one pass."""

    def __init__(self, channels):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels))
        self.beta = nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        mean = x.mean(dim=(0, 2, 3), keepdim=True)
        var = (x * x).mean(dim=(0, 2, 3), keepdim=True) - mean * mean
        scale = self.gamma.view(1, -1, 1, 1) * torch.rsqrt(var + EPS)
        return x * scale + (self.beta.view(1, -1, 1, 1) - mean * scale)


class Stage(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, kernel_size=3, padding=1, bias=False)
        self.bn = BatchNorm(cout)
        self.depthwise = nn.Conv2d(cout, cout, kernel_size=3, padding=1, groups=cout)

    def forward(self, x):
        x = F.relu6(3.0 * self.bn(self.conv(x)))
        x = x + self.depthwise(x)
        return F.avg_pool2d(x, 2)


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList([Stage(a, b) for a, b in zip(WIDTHS, WIDTHS[1:])])
        self.head = nn.Linear(WIDTHS[-1] * 9, CLASSES)

    def forward(self, images):
        x = (images - 0.5) / 0.25
        for stage in self.stages:
            x = stage(x)
        return self.head(torch.flatten(x, 1))


def left():
    torch.manual_seed(16)
    model = ConvNet()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    images, onehot = (torch.from_numpy(a) for a in make_batch())

    def loss_fn(images, onehot):
        log_probs = F.log_softmax(model(images), dim=1)
        return -(onehot * log_probs).sum(dim=1).mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.8)
    return stablenum_torch.program(loss_fn, images, onehot, model=model, optimizer=optimizer)


# ---------------------------------------------------------------- Equinox


class EqxStage(eqx.Module):
    conv: eqx.nn.Conv2d
    gamma: jax.Array
    beta: jax.Array
    depthwise: eqx.nn.Conv2d

    def __init__(self, cin, cout, key):
        k1, k2, k3 = jax.random.split(key, 3)
        self.conv = eqx.nn.Conv2d(cin, cout, 3, padding=1, use_bias=False, key=k1)
        self.depthwise = eqx.nn.Conv2d(cout, cout, 3, padding=1, groups=cout, key=k2)
        self.gamma, self.beta = jnp.array([[1.0], [0.0]]) + 0.05 * jax.random.normal(k3, (2, cout))

    def batch_norm(self, x):
        centered = x - jnp.mean(x, axis=(0, 2, 3), keepdims=True)
        var = jnp.mean(centered**2, axis=(0, 2, 3), keepdims=True)
        normed = centered / jnp.sqrt(var + EPS)
        return normed * self.gamma[:, None, None] + self.beta[:, None, None]

    def __call__(self, x):
        y = self.batch_norm(jax.vmap(self.conv)(x))
        y = jnp.clip(3.0 * y, 0.0, 6.0)
        y = y + jax.vmap(self.depthwise)(y)
        b, c, h, w = y.shape
        return y.reshape(b, c, h // 2, 2, w // 2, 2).mean(axis=(3, 5))


class EqxConvNet(eqx.Module):
    stages: list
    head: eqx.nn.Linear

    def __init__(self, key):
        *keys, last = jax.random.split(key, len(WIDTHS))
        self.stages = [EqxStage(a, b, k) for a, b, k in zip(WIDTHS, WIDTHS[1:], keys)]
        self.head = eqx.nn.Linear(WIDTHS[-1] * 9, CLASSES, key=last)

    def __call__(self, images):
        x = 4.0 * images - 2.0
        for stage in self.stages:
            x = stage(x)
        return jax.vmap(self.head)(x.reshape(x.shape[0], -1))


def loss_fn(model, images, onehot):
    logits = model(images)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - jnp.sum(onehot * logits, axis=-1))


def right():
    images, onehot = (jnp.asarray(a) for a in make_batch())
    model = EqxConvNet(jax.random.key(60))
    tx = optax.chain(optax.trace(decay=0.8), optax.scale(-0.05))
    return stablenum_jax.program(loss_fn, model, images, onehot, optimizer=tx)
