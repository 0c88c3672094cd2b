"""Image-patch encoder (a small ViT): nn.MultiheadAttention against linen.MultiHeadDotProductAttention."""
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

PATCH, DIM, HEADS, LAYERS, CLASSES = 4, 24, 3, 2, 5


def make_batch():
    rng = np.random.default_rng(44)
    images = rng.normal(size=(4, 3, 12, 12)).astype(np.float32)
    labels = rng.integers(0, CLASSES, size=4)
    return images, labels


# ---------------------------------------------------------------- PyTorch


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(DIM, eps=1e-6)
        self.attention = nn.MultiheadAttention(DIM, HEADS, bias=False, batch_first=True)
        self.norm2 = nn.LayerNorm(DIM, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x):
        h = self.norm1(x)
        attended, _ = self.attention(h, h, h, need_weights=False)
        x = x + attended
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, DIM, kernel_size=PATCH, stride=PATCH)
        self.cls = nn.Parameter(0.1 * torch.randn(1, 1, DIM))
        self.positions = nn.Parameter(0.1 * torch.randn(1, 10, DIM))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(DIM, eps=1e-6)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        x = self.norm(self.blocks(x))
        return self.head(x[:, 0])


def left():
    torch.manual_seed(30)
    model = ViT()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    images, labels = (torch.from_numpy(a) for a in make_batch())

    def loss_fn(images, labels):
        return F.cross_entropy(model(images), labels, label_smoothing=0.2)

    return stablenum_torch.program(loss_fn, images, labels, model=model)


# ---------------------------------------------------------------- Flax


class Mlp(linen.Module):
    @linen.compact
    def __call__(self, x):
        y = linen.Dense(2 * x.shape[-1])(x)
        y = 0.5 * y * (1.0 + jax.lax.erf(y / np.sqrt(2.0)))
        return linen.Dense(x.shape[-1])(y)


class FlaxBlock(linen.Module):
    @linen.compact
    def __call__(self, x):
        y = linen.LayerNorm(use_fast_variance=False)(x)
        x = x + linen.MultiHeadDotProductAttention(HEADS, use_bias=False)(y, y)
        y = linen.LayerNorm(use_fast_variance=False)(x)
        return x + Mlp()(y)


def to_patches(images):
    b, c, h, w = images.shape
    x = images.reshape(b, c, h // PATCH, PATCH, w // PATCH, PATCH)
    return x.transpose(0, 2, 4, 3, 5, 1).reshape(b, -1, PATCH * PATCH * c)


class FlaxViT(linen.Module):
    @linen.compact
    def __call__(self, images):
        x = linen.Dense(DIM, name="patches")(to_patches(images))
        cls = self.param("cls", linen.initializers.normal(0.1), (DIM,))
        positions = self.param("positions", linen.initializers.normal(0.1), (10, DIM))
        x = jnp.concatenate([jnp.tile(cls, (x.shape[0], 1, 1)), x], axis=1) + positions
        for _ in range(LAYERS):
            x = FlaxBlock()(x)
        first = linen.LayerNorm(name="norm")(x[:, 0])
        return linen.Dense(CLASSES, name="head")(first)


def right():
    images, labels = (jnp.asarray(a) for a in make_batch())
    net = FlaxViT()
    params = net.init(jax.random.key(93), images)["params"]
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(94), len(leaves))
    params = treedef.unflatten([p + 0.05 * jax.random.normal(k, p.shape) for p, k in zip(leaves, keys)])

    def loss_fn(params, images, labels):
        targets = optax.smooth_labels(jax.nn.one_hot(labels, CLASSES, dtype=images.dtype), 0.2)
        log_probs = jax.nn.log_softmax(net.apply({"params": params}, images))
        return -jnp.sum(targets * log_probs) / labels.shape[0]

    return stablenum_jax.program(loss_fn, params, images, labels)
